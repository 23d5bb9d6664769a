package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// sample is what `go test -json` wrote for a package with each kind of end, shortened.
const sample = `{"Action":"start","Package":"example.org/m/a"}
{"Action":"output","Package":"example.org/m/a","Test":"TestGood","Output":"=== RUN   TestGood\n"}
{"Action":"pass","Package":"example.org/m/a","Test":"TestGood","Elapsed":0.1}
{"Action":"output","Package":"example.org/m/a","Test":"TestSkipped","Output":"=== RUN   TestSkipped\n"}
{"Action":"output","Package":"example.org/m/a","Test":"TestSkipped","Output":"    a_test.go:7: looking\n"}
{"Action":"output","Package":"example.org/m/a","Test":"TestSkipped","Output":"    a_test.go:9: no user namespaces:\n"}
{"Action":"output","Package":"example.org/m/a","Test":"TestSkipped","Output":"        sysctl says 0\n"}
{"Action":"output","Package":"example.org/m/a","Test":"TestSkipped","Output":"--- SKIP: TestSkipped (0.00s)\n"}
{"Action":"skip","Package":"example.org/m/a","Test":"TestSkipped","Elapsed":0}
{"Action":"pass","Package":"example.org/m/a","Test":"TestTable/one","Elapsed":12.5}
{"Action":"skip","Package":"example.org/m/a","Test":"TestTable/two","Elapsed":0}
{"Action":"pass","Package":"example.org/m/a","Test":"TestTable","Elapsed":12.5}
{"Action":"output","Package":"example.org/m/a","Test":"TestBad","Output":"    a_test.go:20: got 1, want 2\n"}
{"Action":"fail","Package":"example.org/m/a","Test":"TestBad","Elapsed":0}
{"Action":"output","Package":"example.org/m/a","Output":"FAIL\n"}
{"Action":"fail","Package":"example.org/m/a","Elapsed":0.5}
{"Action":"build-output","ImportPath":"example.org/m/b [example.org/m/b.test]","Output":"b.go:3: undefined: x\n"}
{"Action":"fail","Package":"example.org/m/b","Elapsed":0,"FailedBuild":"example.org/m/b [example.org/m/b.test]"}
{"Action":"output","Package":"example.org/m/c","Test":"TestPanics","Output":"panic: boom\n"}
{"Action":"fail","Package":"example.org/m/c","Elapsed":0.2}
go: a line that is no event
`

func read(t *testing.T, stream string) (*report, *bytes.Buffer) {
	t.Helper()
	out := &bytes.Buffer{}
	r := newReport("example.org/m", out)
	if err := r.read(strings.NewReader(stream)); err != nil {
		t.Fatal(err)
	}
	return r, out
}

func TestReportCountsEachKindOfEnd(t *testing.T) {
	r, out := read(t, sample)
	want := map[testID]outcome{
		{"a", "TestGood"}:      {Action: "pass", Took: 0.1},
		{"a", "TestSkipped"}:   {Action: "skip", Reason: "no user namespaces: sysctl says 0"},
		{"a", "TestTable"}:     {Action: "pass", Took: 12.5},
		{"a", "TestTable/one"}: {Action: "pass", Took: 12.5},
		{"a", "TestTable/two"}: {Action: "skip", Reason: "no reason given"},
		{"a", "TestBad"}:       {Action: "fail"},
		{"c", "TestPanics"}:    {Action: "fail"},
	}
	if diff := cmp.Diff(want, r.tests); diff != "" {
		t.Errorf("tests (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"b"}, r.broken); diff != "" {
		t.Errorf("broken packages (-want +got):\n%s", diff)
	}
	for _, text := range []string{"got 1, want 2", "b.go:3: undefined: x", "panic: boom", "go: a line that is no event"} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("output lacks %q:\n%s", text, out)
		}
	}
	out.Reset()
	r.summary([]string{"a TestX: skipped: y"})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if got, want := lines[len(lines)-1], "3 passed, 3 failed, 2 skipped"; got != want {
		t.Errorf("last line %q, want %q", got, want)
	}
	for _, text := range []string{"a TestSkipped: no user namespaces: sysctl says 0", "b (the package itself)", "a TestX: skipped: y", "longest:\n    12.5s  a TestTable\n\n"} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("summary lacks %q:\n%s", text, out)
		}
	}
}

func TestMustRunNamesWhatDidNotRun(t *testing.T) {
	r, _ := read(t, sample)
	list, err := parseMustRun(strings.NewReader("# why\n\na TestGood\na TestSkipped # kernel\na TestTable\na TestTable/one\na TestGone\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"a TestSkipped: skipped: no user namespaces: sysctl says 0",
		"a TestTable/two: skipped: no reason given",
		"a TestGone: no such test ran (must-run line 7)",
	}
	if diff := cmp.Diff(want, r.missed(list)); diff != "" {
		t.Errorf("missed (-want +got):\n%s", diff)
	}
}

func TestMustRunRefusesALineThatNamesNoTest(t *testing.T) {
	_, err := parseMustRun(strings.NewReader("a TestGood\nTestAlone\n"))
	if err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Errorf("error %v, want one that names line 2", err)
	}
}

// module writes a module with one package and makes it the working directory.
func module(t *testing.T, test string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":      "module example.org/m\n\ngo 1.26\n",
		"a/a.go":      "package a\n",
		"a/a_test.go": test,
		"must.txt":    "a TestA\n",
	} {
		if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
}

func TestSkippedMustRunTestFailsOnlyWhereCIIsSet(t *testing.T) {
	module(t, "package a\nimport \"testing\"\nfunc TestA(t *testing.T) { t.Skip(\"no bwrap\") }\n")
	for _, ci := range []bool{false, true} {
		var out bytes.Buffer
		ok, err := options{must: "must.txt", ci: ci}.testrun(context.Background(), &out)
		if err != nil {
			t.Fatal(err)
		}
		if ok == ci {
			t.Errorf("CI=%v: ok=%v, want %v\n%s", ci, ok, !ci, &out)
		}
		if !strings.Contains(out.String(), "a TestA: skipped: no bwrap") {
			t.Errorf("CI=%v: the reason is missing:\n%s", ci, &out)
		}
	}
}

func TestRaceListThatNamesNoPackageIsAnError(t *testing.T) {
	module(t, "package a\nimport \"testing\"\nfunc TestA(t *testing.T) {}\n")
	_, err := options{race: "gone"}.testrun(context.Background(), &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "gone") {
		t.Errorf("error %v, want one that names the package", err)
	}
}

func TestFailedTestRunsOnceMore(t *testing.T) {
	dir := t.TempDir()
	module(t, `package a
import ("os"; "testing")
func TestUnsteady(t *testing.T) {
	t.Run("sub", func(t *testing.T) {
		if _, err := os.Stat("`+dir+`/ran"); err != nil {
			os.WriteFile("`+dir+`/ran", nil, 0o600)
			t.Fatal("the first time")
		}
	})
}
func TestBad(t *testing.T) { t.Error("every time") }
`)
	var out bytes.Buffer
	ok, err := options{}.testrun(context.Background(), &out)
	if err != nil {
		t.Fatal(err)
	}
	if ok {
		t.Error("a test that failed twice passed")
	}
	for _, text := range []string{"once more: a TestBad TestUnsteady", "failed:\n  a TestBad\n", "once more:\n  a TestUnsteady\n", "\n2 passed, 1 failed, 0 skipped\n"} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("output lacks %q:\n%s", text, &out)
		}
	}
}

func TestEngineThatRanOutOfTimeIsNoFinding(t *testing.T) {
	for text, want := range map[string]bool{
		"fuzz: elapsed: 5s, execs: 17 (3/sec)\n--- FAIL: FuzzA (5.02s)\n    context deadline exceeded\nFAIL\nexit status 1\nFAIL\tm/a\t5.041s\n":                    true,
		"--- FAIL: FuzzA (5.02s)\n    --- FAIL: FuzzA (0.00s)\n        a_test.go:5: context deadline exceeded\n    \n    Failing input written to testdata\nFAIL\n": false,
		"--- FAIL: FuzzA (5.02s)\n    fuzzing process hung or terminated unexpectedly: exit status 2\nFAIL\n":                                                       false,
		"context deadline exceeded\nFAIL\n": false,
	} {
		if got := endedByItsClock(text); got != want {
			t.Errorf("%v for\n%s", got, text)
		}
	}
}

func TestFuzzShowsTheFailingInput(t *testing.T) {
	module(t, `package a
import "testing"
func FuzzGood(f *testing.F) { f.Fuzz(func(t *testing.T, b []byte) {}) }
func FuzzBad(f *testing.F) {
	f.Add("seed")
	f.Fuzz(func(t *testing.T, s string) { if s != "seed" { t.Fatal("bad input") } })
}
`)
	var out bytes.Buffer
	ok, err := options{onlyFuzz: true, fuzz: time.Second}.testrun(context.Background(), &out)
	if err != nil {
		t.Fatal(err)
	}
	if ok {
		t.Error("a failing target passed")
	}
	for _, text := range []string{"ok   a FuzzGood", "--- FAIL a FuzzBad", "go test fuzz v1\nstring(", "1 passed, 1 failed, 0 skipped"} {
		if !strings.Contains(out.String(), text) {
			t.Errorf("output lacks %q:\n%s", text, &out)
		}
	}
}

// inMachines is what test programs in machines of their own wrote: one to its end, one cut off.
var inMachines = map[string]string{
	"1.json": `{"Action":"start","Package":"example.org/m/a@old"}
{"Action":"pass","Package":"example.org/m/a@old","Test":"TestThere","Elapsed":1}
{"Action":"skip","Package":"example.org/m/a@old","Test":"TestLacks","Elapsed":0}
{"Action":"pass","Package":"example.org/m/a@old","Elapsed":90}
`,
	"2.json": `{"Action":"start","Package":"example.org/m/b@old"}
{"Action":"output","Package":"example.org/m/b@old","Output":"the machine did not come up\n"}
`,
	"left-out": "a@new: no root here\n",
}

func TestMachinesCountAndWhatTheyShowedIsNotSkipped(t *testing.T) {
	dir := t.TempDir()
	out := &bytes.Buffer{}
	r := newReport("example.org/m", out)
	if err := r.readMachines(dir); err == nil {
		t.Error("a folder without anything is no error")
	}
	for name, text := range inMachines {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.readMachines(dir); err != nil {
		t.Fatal(err)
	}
	if err := r.read(strings.NewReader(`{"Action":"start","Package":"example.org/m/a"}
{"Action":"skip","Package":"example.org/m/a","Test":"TestThere","Elapsed":0}
{"Action":"skip","Package":"example.org/m/a","Test":"TestNowhere","Elapsed":0}
{"Action":"pass","Package":"example.org/m/a","Elapsed":0.5}
`)); err != nil {
		t.Fatal(err)
	}
	missed := r.missed([]mustRun{{testID{"a@old", "TestThere"}, 1}, {testID{"b@old", "TestOther"}, 2}})
	if diff := cmp.Diff([]string{"a@old TestLacks: skipped: no reason given", "b@old TestOther: no such test ran (must-run line 2)"}, missed); diff != "" {
		t.Errorf("missed: (-want +got)\n%s", diff)
	}
	r.summary(missed)
	for _, want := range []string{"the machine did not come up", "b@old (the package itself)", "left out:\n  a@new: no root here\n", "\n1 passed, 1 failed, 2 skipped\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("it does not say %q:\n%s", want, out)
		}
	}
	if strings.Contains(out.String(), "a TestThere") {
		t.Errorf("what ran in a machine is called skipped:\n%s", out)
	}
}
