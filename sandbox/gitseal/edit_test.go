package gitseal

import (
	"slices"
	"strings"
	"testing"
)

const editable = "[core]\n\tbare = false\n[remote \"origin\"]\n\turl = /x\n[branch \"main\"] remote = old ; why\n\tmerge = refs/heads/a\n\tmerge = refs/heads/b\n# end"

func TestOneVariableIsChangedAndNothingElse(t *testing.T) {
	for _, s := range []Setting{
		{Key: "branch.main.remote", Value: "origin"}, {Key: "branch.main.merge", Value: "refs/heads/x/y"}, {Key: "branch.a/b.merge", Value: "refs/heads/c"},
		{Key: "Branch.main.Rebase", Value: "true"}, {Key: "pull.ff", Value: "only"}, {Key: "branch.main.merge", Unset: true}, {Key: "branch.v1.2.remote", Value: "."},
	} {
		out, err := Edit(editable, s)
		if err != nil {
			t.Errorf("%+v: %v", s, err)
			continue
		}
		got, err := ParseConfig(out)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := Edit(out, s); err != nil || again != out && !s.Unset {
			t.Errorf("%+v: a second time it is another: %q %q %v", s, out, again, err)
		}
		n := 0
		for _, e := range got {
			if strings.EqualFold(e.Key(), s.Key) {
				if n++; e.Value != s.Value {
					t.Errorf("%+v: %q", s, e.Value)
				}
			}
		}
		if want := map[bool]int{true: 0, false: 1}[s.Unset]; n != want {
			t.Errorf("%+v: it is there %d times:\n%s", s, n, out)
		}
	}
}

func TestVariablesAndValuesThatCouldRunSomethingAreRefused(t *testing.T) {
	for _, s := range []Setting{
		{Key: "core.fsmonitor", Value: "x"}, {Key: "core.hooksPath", Value: "x"}, {Key: "include.path", Value: "x"}, {Key: "alias.x", Value: "!x"}, {Key: "credential.helper", Value: "x"},
		{Key: "remote.origin.url", Value: "ext::x"}, {Key: "remote.origin.fetch", Value: "+refs/heads/*:refs/heads/*"}, {Key: "remote.origin.uploadpack", Value: "x"}, {Key: "user.name", Value: "x"},
		{Key: "branch.main.remote", Value: "ext::sh -c x"}, {Key: "branch.main.remote", Value: "../evil"}, {Key: "branch.main.remote", Value: "evil"}, {Key: "branch.main.remote", Value: "-x"}, {Key: "branch.main.remote", Value: "/evil"},
		{Key: "branch.main.remote", Value: "origin\n[core]\n\tfsmonitor = x"}, {Key: "branch.main.merge", Value: "refs/heads/a\n[core]"}, {Key: "branch.main.merge", Value: "refs/heads/a\\"}, {Key: "branch.main.merge", Value: "refs/heads/a ; x"}, {Key: "branch.main.merge", Value: "refs/heads/../x"}, {Key: "branch.main.merge", Value: "x"},
		{Key: "branch.main\"]\n[core]\nfsmonitor=x\n[a \"b.merge", Value: "refs/heads/a"}, {Key: "branch.a\\.merge", Value: "refs/heads/a"}, {Key: "branch..merge", Value: "refs/heads/a"}, {Key: "branch.merge", Value: "refs/heads/a"}, {Key: "branch.-x.merge", Value: "refs/heads/a"},
		{Key: "branch.main.description", Value: "x"}, {Key: "branch.main.rebase", Value: "interactive"}, {Key: "pull.ff", Value: "x"}, {Key: "pull.ff", Value: "true # x"}, {Key: "", Value: ""}, {Key: "branch.main.mergeOptions", Value: "-s x"}, {Key: "core.fsmonitor", Unset: true}, {Key: "core.bare", Unset: true},
	} {
		if out, err := Edit(editable, s); err == nil {
			t.Errorf("%+v:\n%s", s, out)
		}
	}
	if _, err := Edit("[broken", Setting{Key: "pull.ff", Value: "only"}); err == nil {
		t.Error("a broken configuration is changed")
	}
}

// FuzzEdit: whatever is asked and wherever, the rest reads as before, and nothing that runs a
// program is new.
func FuzzEdit(f *testing.F) {
	f.Add(editable, "branch.main.remote", "origin", false)
	f.Add("[a]b=c\\\n d", "branch.x.merge", "refs/heads/a", true)
	f.Add("\ufeff[branch \"x\"]merge=1[core]", "pull.ff", "only", false)
	f.Fuzz(func(t *testing.T, text, key, value string, unset bool) {
		s := Setting{Key: key, Value: value, Unset: unset}
		out, err := Edit(text, s)
		if err != nil {
			return
		}
		before, _ := ParseConfig(text)
		after, err := ParseConfig(out)
		if err != nil {
			t.Fatalf("%q: %v", out, err)
		}
		other := func(e Entry) bool { return strings.EqualFold(e.Key(), key) }
		if !slices.Equal(slices.DeleteFunc(before, other), slices.DeleteFunc(slices.Clone(after), other)) {
			t.Errorf("%q became %q", text, out)
		}
	})
}
