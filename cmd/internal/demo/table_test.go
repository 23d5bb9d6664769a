package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

func attempt(id string, kind selftest.Kind, seen selftest.Seen) selftest.Result {
	expected := selftest.Refused
	if kind == selftest.MustWork {
		expected = selftest.Worked
	}
	return selftest.Result{ID: id, Title: id, Kind: kind, Expected: expected, Seen: seen,
		OK: seen == expected || seen == selftest.Skipped, Detail: "detail of " + id}
}

func TestCompareFindsWhatIsWrong(t *testing.T) {
	const fail, work = selftest.MustFail, selftest.MustWork
	const refused, worked, skipped = selftest.Refused, selftest.Worked, selftest.Skipped
	tests := []struct {
		id              string
		kind            selftest.Kind
		inside, outside selftest.Seen // empty: not in the report
		want            string
	}{
		{"read-home", fail, refused, worked, ""},
		{"a-leak", fail, worked, worked, "expected refused, seen worked: detail of a-leak"},
		{"a-need", work, refused, worked, "expected worked, seen refused: detail of a-need"},
		{"fails-everywhere", fail, refused, refused, ""},
		{"no-target", fail, skipped, refused, ""},
		{"inside-only", fail, refused, "", "was not tried outside"},
		{"tcp-host", fail, refused, refused, "proves nothing: inside refused, outside refused: detail of tcp-host"},
		{"read-root", fail, skipped, skipped, "proves nothing: inside skipped, outside skipped: detail of read-root"},
		{"udp", fail, "", worked, "was not tried inside"},
	}
	inside, outside := &selftest.Report{}, &selftest.Report{}
	want, named := map[string]string{}, map[string]bool{}
	for _, id := range planted {
		want[id] = ""
	}
	for _, test := range tests {
		want[test.id], named[test.id] = test.want, true
		if test.inside != "" {
			inside.Results = append(inside.Results, attempt(test.id, test.kind, test.inside))
		}
		if test.outside != "" {
			outside.Results = append(outside.Results, attempt(test.id, test.kind, test.outside))
		}
	}
	for _, id := range planted {
		if !named[id] {
			inside.Results = append(inside.Results, attempt(id, fail, refused))
			outside.Results = append(outside.Results, attempt(id, fail, worked))
		}
	}
	got := map[string]string{}
	for _, r := range compare(inside, outside) {
		got[r.ID] = r.Wrong
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestVerdictIsAnErrorUnlessSomethingWasShown(t *testing.T) {
	held := row{Result: attempt("held", selftest.MustFail, selftest.Refused), Outside: selftest.Worked}
	works := row{Result: attempt("works", selftest.MustWork, selftest.Worked), Outside: selftest.Worked}
	leak := row{Result: attempt("leak", selftest.MustFail, selftest.Worked), Wrong: "leaks"}
	tests := []struct {
		name string
		rows []row
		want string // part of the error; empty: none
	}{
		{"all as promised", []row{held, works}, ""},
		{"a leak", []row{held, works, leak}, "1 of 3 rows"},
		{"nothing refused", []row{works}, "nothing was shown"},
		{"nothing at all", nil, "nothing was shown"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			err := verdict(&bytes.Buffer{}, test.rows)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

func TestFencedReport(t *testing.T) {
	const good = "ok a: expected …\n```json\n{\"results\":[{\"id\":\"a\",\"detail\":\"a fence: ```\"}],\"ok\":1}\n```\n"
	report, err := fencedReport(good)
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Results) != 1 || report.Results[0].ID != "a" {
		t.Errorf("report %+v, want the one result a", report)
	}
	for _, bad := range []string{"", "no fence", "```json\n{\"results\":[", "```json\n{}\n```", "```json\nnull\n```"} {
		if _, err := fencedReport(bad); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

func TestEnvironmentLeavesTheUsersDaemonAlone(t *testing.T) {
	got := environment([]string{"HOME=/h", "XDG_RUNTIME_DIR=/run/user/1", "AGENTCONNECT_ROOT=/theirs", "AGENTCONNECT_API_KEY=k", "PATH=/bin"}, "/ours")
	if diff := cmp.Diff([]string{"HOME=/h", "PATH=/bin", "AGENTCONNECT_ROOT=/ours"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
