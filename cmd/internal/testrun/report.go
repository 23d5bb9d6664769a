package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// event is one line of `go test -json` (see `go doc test2json`).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build-output
	Test        string
	Output      string
	FailedBuild string
	Elapsed     float64 // seconds
}

// testID names one test or subtest.
type testID struct{ Package, Test string }

func (id testID) String() string { return id.Package + " " + id.Test }

// compare orders by package, then by name.
func (id testID) compare(other testID) int {
	return cmp.Or(cmp.Compare(id.Package, other.Package), cmp.Compare(id.Test, other.Test))
}

// outcome is how a test ended: "pass", "fail" or "skip".
type outcome struct {
	Action string
	Reason string  // of a skip: what the test said
	Took   float64 // seconds
}

// report collects the events of any number of `go test -json` runs.
type report struct {
	module string // import path prefix left out in what people read
	out    io.Writer
	tests  map[testID]outcome
	// broken are packages that failed without a failing test: a build error, a
	// panic in TestMain, a timeout.
	broken []string
	// unsteady are tests that failed and passed when they ran once more.
	unsteady []string
	// leftOut says what did not run, and why.
	leftOut []string

	machines map[testID]bool     // tests that ran in a machine of their own, by the package's plain name
	running  map[string]bool     // packages whose end has not been said
	output   map[testID][]string // of tests that have not ended, and of packages (Test "")
	builds   map[string][]string // compiler output by import path
	failed   map[string]bool     // packages with a failing test
	counts   map[string]map[string]int
}

func newReport(module string, out io.Writer) *report {
	return &report{
		module: module, out: out,
		tests:  map[testID]outcome{},
		output: map[testID][]string{}, builds: map[string][]string{},
		failed: map[string]bool{}, counts: map[string]map[string]int{},
		machines: map[testID]bool{}, running: map[string]bool{},
	}
}

// inMachine tells the package and the machine of a name such as dbusctl@bookworm.
func inMachine(pkg string) (plain string, yes bool) {
	plain, _, yes = strings.Cut(pkg, "@")
	return plain, yes
}

// readMachines reads what ran in machines of their own before: the events of their test
// programs, in files NAME.json of dir. A file left-out says what could not run there.
func (r *report) readMachines(dir string) error {
	names, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return err
	}
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = r.read(f)
		f.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		for pkg := range r.running {
			fmt.Fprintf(r.out, "%s: its end was not said\n", pkg)
			r.endPackage(pkg, event{Action: "fail"})
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "left-out"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if len(text) > 0 {
		r.leftOut = strings.Split(strings.TrimSpace(string(text)), "\n")
	}
	if len(names) == 0 && len(text) == 0 {
		return fmt.Errorf("%s holds neither the events of a test nor what was left out", dir)
	}
	return nil
}

// read consumes one `go test -json` stream. A line that is no event (the go
// command's own words) is printed as it is.
func (r *report) read(stream io.Reader) error {
	lines := bufio.NewReader(stream)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) == nil && e.Action != "" {
				r.add(e)
			} else {
				fmt.Fprint(r.out, line)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("go test output: %w", err)
		}
	}
}

func (r *report) short(pkg string) string {
	return cmp.Or(strings.TrimPrefix(strings.TrimPrefix(pkg, r.module), "/"), ".")
}

func (r *report) add(e event) {
	id := testID{r.short(e.Package), e.Test}
	switch e.Action {
	case "start":
		r.running[id.Package] = true
	case "build-output":
		r.builds[e.ImportPath] = append(r.builds[e.ImportPath], e.Output)
	case "output":
		r.output[id] = append(r.output[id], e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			r.endPackage(id.Package, e)
			return
		}
		r.endTest(id, e)
	}
}

func (r *report) endTest(id testID, e event) {
	action := e.Action
	result := outcome{Action: action, Took: e.Elapsed}
	switch action {
	case "skip":
		result.Reason = skipReason(r.output[id])
	case "fail":
		r.failed[id.Package] = true
		fmt.Fprintf(r.out, "--- FAIL %s\n%s", id, strings.Join(r.output[id], ""))
	}
	delete(r.output, id)
	// What a machine of its own has shown need not be skipped here.
	if plain, yes := inMachine(id.Package); yes {
		r.machines[testID{plain, id.Test}] = true
	} else if action == "skip" && r.machines[id] {
		return
	}
	// A test that runs twice (a fuzz target's seeds, then the target) counts once, by its worse end.
	if before, ok := r.tests[id]; ok && (before.Action == "fail" || before.Action == "skip" && action == "pass") {
		return
	}
	r.tests[id] = result
	if r.counts[id.Package] == nil {
		r.counts[id.Package] = map[string]int{}
	}
	r.counts[id.Package][action]++
}

func (r *report) endPackage(pkg string, e event) {
	counts := r.counts[pkg]
	switch e.Action {
	case "pass":
		fmt.Fprintf(r.out, "ok   %-40s %7s  %d passed", pkg, seconds(e.Elapsed), counts["pass"])
		if n := counts["skip"]; n > 0 {
			fmt.Fprintf(r.out, ", %d skipped", n)
		}
		fmt.Fprintln(r.out)
	case "fail":
		fmt.Fprintf(r.out, "FAIL %-40s %7s\n", pkg, seconds(e.Elapsed))
		fmt.Fprint(r.out, strings.Join(r.builds[e.FailedBuild], ""))
		// The tests that had not ended: a panic, a timeout or os.Exit took them along.
		cut := slices.SortedFunc(maps.Keys(r.output), testID.compare)
		for _, id := range cut {
			if id.Package != pkg || id.Test == "" {
				continue
			}
			fmt.Fprintf(r.out, "--- CUT OFF %s\n%s", id, strings.Join(r.output[id], ""))
			r.tests[id] = outcome{Action: "fail"}
			r.failed[pkg] = true
			delete(r.output, id)
		}
		if !r.failed[pkg] {
			r.broken = append(r.broken, pkg)
			fmt.Fprint(r.out, strings.Join(r.output[testID{Package: pkg}], ""))
		}
	}
	delete(r.output, testID{Package: pkg})
	delete(r.running, pkg)
}

// forgive takes the results of tests of a package from a second run in which they passed whole.
func (r *report) forgive(pkg string, tests []string, second *report) {
	for _, test := range tests {
		passed := second.tests[testID{pkg, test}].Action == "pass"
		for id, result := range second.tests {
			passed = passed && (!id.within(pkg, test) || result.Action != "fail")
		}
		if !passed {
			continue
		}
		for id := range r.tests {
			if id.within(pkg, test) {
				delete(r.tests, id)
			}
		}
		for id, result := range second.tests {
			if id.within(pkg, test) {
				r.tests[id] = result
			}
		}
		r.unsteady = append(r.unsteady, testID{pkg, test}.String())
	}
}

// within reports whether id is the test or one of its subtests.
func (id testID) within(pkg, test string) bool {
	return id.Package == pkg && (id.Test == test || strings.HasPrefix(id.Test, test+"/"))
}

func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(10 * time.Millisecond).String()
}

// logLine is a line that t.Log or t.Skip wrote: "    file_test.go:12: text".
var logLine = regexp.MustCompile(`^\s+\S+\.go:\d+: (.*)`)

// skipReason finds what t.Skip said: the last log line, with the lines that continue it.
func skipReason(output []string) string {
	var reason []string
	for _, line := range output {
		if m := logLine.FindStringSubmatch(line); m != nil {
			reason = []string{strings.TrimSpace(m[1])}
		} else if reason != nil && !strings.HasPrefix(strings.TrimSpace(line), "---") {
			reason = append(reason, strings.TrimSpace(line))
		}
	}
	return cmp.Or(strings.TrimSpace(strings.Join(reason, " ")), "no reason given")
}

// mustRun is one line of the must-run file.
type mustRun struct {
	testID
	Line int
}

// parseMustRun reads lines "PACKAGE TEST", where PACKAGE is a folder of the module
// and TEST may name a subtest. '#' starts a comment.
func parseMustRun(r io.Reader) ([]mustRun, error) {
	var list []mustRun
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		fields := strings.Fields(line)
		switch len(fields) {
		case 0:
		case 2:
			list = append(list, mustRun{testID{fields[0], fields[1]}, n})
		default:
			return nil, fmt.Errorf("line %d: want PACKAGE TEST, got %q", n, strings.TrimSpace(line))
		}
	}
	return list, lines.Err()
}

// missed tells which of the tests that must run did not, and why. A test with a
// skipped subtest has not run either. A machine of its own lacks nothing that a test needs.
func (r *report) missed(list []mustRun) []string {
	var missed []string
	for _, id := range slices.SortedFunc(maps.Keys(r.tests), testID.compare) {
		if _, yes := inMachine(id.Package); yes && r.tests[id].Action == "skip" {
			missed = append(missed, fmt.Sprintf("%s: skipped: %s", id, r.tests[id].Reason))
		}
	}
	for _, must := range list {
		result, ok := r.tests[must.testID]
		if !ok {
			missed = append(missed, fmt.Sprintf("%s: no such test ran (must-run line %d)", must.testID, must.Line))
			continue
		}
		if result.Action == "skip" {
			missed = append(missed, fmt.Sprintf("%s: skipped: %s", must.testID, result.Reason))
			continue
		}
		for _, id := range slices.SortedFunc(maps.Keys(r.tests), testID.compare) {
			if id.Package == must.Package && strings.HasPrefix(id.Test, must.Test+"/") && r.tests[id].Action == "skip" {
				missed = append(missed, fmt.Sprintf("%s: skipped: %s", id, r.tests[id].Reason))
			}
		}
	}
	return missed
}

// totals counts tests and subtests; a package that broke counts as one failure.
func (r *report) totals() (passed, failed, skipped int) {
	for _, result := range r.tests {
		switch result.Action {
		case "pass":
			passed++
		case "fail":
			failed++
		case "skip":
			skipped++
		}
	}
	return passed, failed + len(r.broken), skipped
}

// longest are the tests that took longest and at least 10 seconds, ten at most: where to look for a
// shorter run.
func (r *report) longest() (lines []string) {
	ids := slices.DeleteFunc(slices.Collect(maps.Keys(r.tests)), func(id testID) bool {
		return strings.Contains(id.Test, "/") || r.tests[id].Took < 10
	})
	slices.SortFunc(ids, func(a, b testID) int {
		return cmp.Or(cmp.Compare(r.tests[b].Took, r.tests[a].Took), a.compare(b))
	})
	for _, id := range ids[:min(10, len(ids))] {
		lines = append(lines, fmt.Sprintf("%7s  %s", seconds(r.tests[id].Took), id))
	}
	return lines
}

// summary prints the skips with their reasons, the failures, and the totals last.
func (r *report) summary(missed []string) {
	var skips, failures []string
	for _, id := range slices.SortedFunc(maps.Keys(r.tests), testID.compare) {
		switch result := r.tests[id]; result.Action {
		case "skip":
			skips = append(skips, fmt.Sprintf("%s: %s", id, result.Reason))
		case "fail":
			failures = append(failures, id.String())
		}
	}
	for _, pkg := range r.broken {
		failures = append(failures, pkg+" (the package itself)")
	}
	for _, part := range []struct {
		title string
		lines []string
	}{{"skipped", skips}, {"failed", failures}, {"unsteady: failed, and passed when run once more", r.unsteady}, {"left out", r.leftOut}, {"must run, but did not", missed}, {"longest", r.longest()}} {
		if len(part.lines) == 0 {
			continue
		}
		fmt.Fprintf(r.out, "\n%s:\n", part.title)
		for _, line := range part.lines {
			fmt.Fprintf(r.out, "  %s\n", line)
		}
	}
	passed, failed, skipped := r.totals()
	fmt.Fprintf(r.out, "\n%d passed, %d failed, %d skipped\n", passed, failed, skipped)
}
