package figures

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestFiguresAreReadBackFromBetweenOtherLines(t *testing.T) {
	want := []Figure{
		{Key: "a", What: "first", Unit: "ms", Ours: 1.5, Wanted: "≤ 1.3"},
		Figure{Key: "b/10", What: "second", Ours: 3}.Beside(Peer{"pipe", 6}, Peer{"other", 9}),
	}
	var text bytes.Buffer
	text.WriteString("goos: linux\nBenchmarkX-2   \t")
	for _, f := range want {
		if err := Print(&text, f); err != nil {
			t.Fatal(err)
		}
		text.WriteString("PASS\n")
	}
	got, err := Read(&text)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	if _, err := Read(strings.NewReader(`figure {"key":1}`)); err == nil {
		t.Error("half a figure was read")
	}
}

func TestWhatWasWantedIsOfTheRatioOrOfOurs(t *testing.T) {
	for _, c := range []struct {
		f          Figure
		met, known bool
	}{
		{Figure{Ours: 13, Ratio: 1.3, Wanted: "≤ 1.3"}, true, true},
		{Figure{Ours: 1, Ratio: 1.31, Wanted: "≤ 1.3"}, false, true},
		{Figure{Ours: 61, Ratio: 0.1, Wanted: "≤ 60 µs"}, false, true},
		{Figure{Ours: 60, Ratio: 9, Wanted: "≤ 60 µs"}, true, true},
		{Figure{Ours: 1.05, Wanted: "≤ 1.05"}, true, true},
		{Figure{Ratio: 0.4, Wanted: "≥ 0.5"}, false, true},
		{Figure{Ratio: 0.4}, false, false},
	} {
		if met, known := c.f.Met(); met != c.met || known != c.known {
			t.Errorf("%+v: %v, %v", c.f, met, known)
		}
	}
}

func TestGuardSaysWhatSteppedBackAndWhatWasNotMeasured(t *testing.T) {
	path := filepath.Join(t.TempDir(), "accepted.json")
	if err := os.WriteFile(path, []byte(`{"slack":1.5,"ratios":{"start":1.0,"relay":0.4,"exec":2},"rising":["relay"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	a, err := ReadAccepted(path)
	if err != nil {
		t.Fatal(err)
	}
	if lines, _ := a.Worse([]Figure{{Key: "start", Ratio: 1.49}, {Key: "relay", Ratio: 0.27}, {Key: "exec", Ratio: 0.1}}); len(lines) != 0 {
		t.Errorf("noise was refused: %q", lines)
	}
	lines, keys := a.Worse([]Figure{{Key: "start", Ratio: 1.6}, {Key: "relay", Ratio: 0.2}})
	if want := []string{"exec", "relay", "start"}; !reflect.DeepEqual(keys, want) {
		t.Errorf("keys %q, want %q: %q", keys, want, lines)
	}
	if !Below("start", "start") || Below("start/default", "sta") || !Below("start/default", "start") {
		t.Error("the names that a key lies below are wrong")
	}
	for _, bad := range []string{`{"slack":2,"ratios":{"a":1},"kinds":[{"of":["a","b"],"below":1,"ratios":{"a":2}}]}`, `{"slack":1,"ratios":{"a":1}}`, `{"slack":2,"ratios":{}}`, `{"slack":2,"ratios":{"a":1},"rising":["b"]}`, `{`} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadAccepted(path); err == nil {
			t.Errorf("%s was taken", bad)
		}
	}
}

func TestKindOfMachineIsToldByThePeersAlone(t *testing.T) {
	a := &Accepted{
		Slack: 1.5, Ratios: map[string]float64{"mounts": 0.2, "exec": 2, "relay": 1}, Rising: []string{"relay"},
		Kinds: []Kind{{Name: "slow starts", Of: [2]string{"mounts", "exec"}, Below: 20, Ratios: map[string]float64{"exec": 4}}},
	}
	figures := func(mounts, exec, ours float64) []Figure {
		return []Figure{
			Figure{Key: "mounts", Ours: 0.2 * mounts}.Beside(Peer{Value: mounts}),
			Figure{Key: "exec", Ours: ours}.Beside(Peer{Value: exec}), {Key: "relay", Ratio: 1},
		}
	}
	for _, c := range []struct {
		what              string
		mounts, exec, our float64
		kind              string
		bad               []string
	}{
		{"as usual", 1000, 25, 50, "", nil},
		{"a step back", 1000, 25, 100, "", []string{"exec"}},
		{"the other kind", 300, 25, 100, "slow starts", nil},
		{"a step back there", 300, 25, 200, "slow starts", []string{"exec"}},
		{"without a peer", 0, 25, 100, "", []string{"exec", "mounts"}},
	} {
		found := figures(c.mounts, c.exec, c.our)
		on, kind := a.On(found)
		if lines, bad := on.Worse(found); kind != c.kind || !slices.Equal(bad, c.bad) {
			t.Errorf("%s: kind %q, worse %q", c.what, kind, lines)
		}
	}
	if a.Ratios["exec"] != 2 {
		t.Error("what is usual was changed")
	}
}

func TestGrowthIsTheExponent(t *testing.T) {
	for _, k := range []float64{0.5, 1, 2} {
		sizes := []float64{10, 100, 500}
		values := make([]float64, len(sizes))
		for i, n := range sizes {
			values[i] = 3 * math.Pow(n, k)
		}
		if got := Growth(sizes, values); math.Abs(got-k) > 1e-9 {
			t.Errorf("exponent %v, want %v", got, k)
		}
	}
}

func TestTablesSayTheVerdict(t *testing.T) {
	all := []Figure{
		Figure{Key: "a", What: "start", Unit: "ms", Ours: 20, Wanted: "≤ 1.3", Note: "50 pairs"}.Beside(Peer{"bwrap", 10}),
		Figure{Key: "b", What: "relay", Unit: "MB/s", Ours: 6, Wanted: "≥ 0.5"}.Beside(Peer{"pipe", 10}),
	}
	var table, document bytes.Buffer
	if err := Table(&table, all); err != nil {
		t.Fatal(err)
	}
	if err := Markdown(&document, all); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{table.String(), document.String()} {
		for _, words := range []string{"20.0 ms", "bwrap 10.0 ms", "2.00", "missed", "0.60", "met", "50 pairs"} {
			if !strings.Contains(text, words) {
				t.Errorf("no %q in %s", words, text)
			}
		}
	}
}
