// Command testrun runs the module's tests for `make test` and says in the end what
// passed, what failed and what was skipped, with each skip's reason.
//
//	testrun [-race PACKAGE,…] [-must FILE] [-machines DIR] [-run REGEXP] [-fuzz DURATION] [-only-fuzz] [PACKAGE]…
//
// The packages given to -race run under the race detector, the others without it.
// The must-run file names the tests that may not be skipped where CI is set: a
// boundary test that quietly stops running would look like a boundary that holds.
// The tests on real systemd ran before, as root, in machines of their own; -machines says
// where their events are, of packages with names such as dbusctl@bookworm. They count as all
// others, and a test that passed there is not missed here.
// A few tests that failed run once more, alone; what passes then counts as passed and is named
// in the end as unsteady: the machines that run this are shared, and a test that needs two tries
// is a fault to be mended, not one that stops everybody.
// With -fuzz it runs each fuzz target for that long, after the tests; with -only-fuzz no tests.
//
// It installs nothing and knows nothing of users or packages of the system.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

type options struct {
	race     string
	must     string
	machines string
	onlyFuzz bool
	run      string
	fuzz     time.Duration
	patterns []string
	ci       bool
}

func main() {
	var o options
	flag.StringVar(&o.race, "race", "", "comma-separated folders of packages to run under the race detector")
	flag.StringVar(&o.must, "must", "", "file of tests that must not be skipped where CI is set")
	flag.StringVar(&o.run, "run", "", "run only tests that match")
	flag.StringVar(&o.machines, "machines", "", "folder with the events of tests that ran in machines of their own")
	flag.BoolVar(&o.onlyFuzz, "only-fuzz", false, "run no tests")
	flag.DurationVar(&o.fuzz, "fuzz", 0, "run each fuzz target for this long, after the tests")
	flag.Parse()
	o.patterns = flag.Args()
	o.ci = os.Getenv("CI") != ""

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := o.testrun(ctx, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
	if !ok {
		os.Exit(1)
	}
}

// testrun reports whether everything that ran passed and everything that must run did.
func (o options) testrun(ctx context.Context, out io.Writer) (bool, error) {
	whole := len(o.patterns) == 0 && o.run == ""
	patterns := o.patterns
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	module, err := goOutput(ctx, "list", "-m")
	if err != nil {
		return false, err
	}
	listed, err := goOutput(ctx, append([]string{"list"}, patterns...)...)
	if err != nil {
		return false, err
	}
	r := newReport(strings.TrimSpace(module), out)
	packages := strings.Fields(listed)
	var must []mustRun
	if o.must != "" && whole {
		f, err := os.Open(o.must)
		if err != nil {
			return false, fmt.Errorf("must-run file: %w", err)
		}
		defer f.Close()
		if must, err = parseMustRun(f); err != nil {
			return false, fmt.Errorf("%s: %w", o.must, err)
		}
	}

	if o.machines != "" {
		if err := r.readMachines(o.machines); err != nil {
			return false, fmt.Errorf("tests in machines of their own: %w", err)
		}
	}
	if !o.onlyFuzz {
		if err := o.testAll(ctx, r, packages); err != nil {
			return false, err
		}
	}
	if o.fuzz > 0 {
		if err := o.fuzzAll(ctx, r, packages); err != nil {
			return false, err
		}
	}
	missed := r.missed(must)
	r.summary(missed)
	_, failed, _ := r.totals()
	return failed == 0 && (len(missed) == 0 || !o.ci), nil
}

// testAll runs the tests of the packages.
func (o options) testAll(ctx context.Context, r *report, packages []string) error {
	plain, raced, err := o.split(r, packages)
	if err != nil {
		return err
	}
	for _, group := range []struct {
		flags    []string
		packages []string
	}{{nil, plain}, {[]string{"-race"}, raced}} {
		if len(group.packages) == 0 {
			continue
		}
		// -count=1: tests of a kernel boundary are not a function of the source alone.
		args := slices.Concat([]string{"test", "-json", "-count=1", "-timeout=15m"}, group.flags)
		if o.run != "" {
			args = append(args, "-run="+o.run)
		}
		if err := r.goTest(ctx, append(args, group.packages...)); err != nil {
			return err
		}
		if err := r.again(ctx, args, group.packages); err != nil {
			return err
		}
	}
	return nil
}

// mostAgain is how many failed tests run once more. More than that is no bad luck.
const mostAgain = 5

// again runs the failed tests of the packages once more. A package that broke as a whole does not.
func (r *report) again(ctx context.Context, args, packages []string) error {
	failed := map[string][]string{} // by package
	n := 0
	for _, id := range slices.SortedFunc(maps.Keys(r.tests), testID.compare) {
		if r.tests[id].Action != "fail" || strings.Contains(id.Test, "/") || strings.HasPrefix(id.Test, "Fuzz") {
			continue
		}
		for _, pkg := range packages {
			if r.short(pkg) == id.Package {
				failed[pkg] = append(failed[pkg], id.Test)
				n++
			}
		}
	}
	if n == 0 || n > mostAgain || len(r.broken) > 0 {
		return nil
	}
	for _, pkg := range slices.Sorted(maps.Keys(failed)) {
		fmt.Fprintf(r.out, "once more: %s %s\n", r.short(pkg), strings.Join(failed[pkg], " "))
		second := newReport(r.module, r.out)
		run := "-run=^(" + strings.Join(failed[pkg], "|") + ")$"
		if err := second.goTest(ctx, slices.Concat(args, []string{run, pkg})); err != nil {
			return err
		}
		r.forgive(r.short(pkg), failed[pkg], second)
	}
	return nil
}

// split separates the packages that run under the race detector. A folder that is no
// package is an error when the whole module is tested: the list would rot silently.
func (o options) split(r *report, packages []string) (plain, raced []string, err error) {
	want := strings.FieldsFunc(o.race, func(c rune) bool { return c == ',' })
	for _, pkg := range packages {
		if slices.Contains(want, r.short(pkg)) {
			raced = append(raced, pkg)
		} else {
			plain = append(plain, pkg)
		}
	}
	if len(o.patterns) == 0 && len(raced) != len(want) {
		return nil, nil, fmt.Errorf("-race names %d packages, of which %d exist: %s", len(want), len(raced), o.race)
	}
	return plain, raced, nil
}

// goTest runs `go test -json` into the report. A failing test is no error: the report has it.
func (r *report) goTest(ctx context.Context, args []string) error {
	cmd := goCommand(ctx, args...)
	cmd.Stderr = r.out
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("go test: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("go test: %w", err)
	}
	readErr := r.read(stdout)
	err = cmd.Wait()
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	if readErr != nil {
		return readErr
	}
	_, failed, _ := r.totals()
	if err != nil && failed == 0 {
		return fmt.Errorf("go test: %w, without naming a failure", err)
	}
	return nil
}

// fuzzAll runs each fuzz target of the packages for o.fuzz, one after the other.
func (o options) fuzzAll(ctx context.Context, r *report, packages []string) error {
	found := 0
	for _, pkg := range packages {
		list, err := goOutput(ctx, "test", "-list=^Fuzz", pkg)
		if err != nil {
			return err
		}
		for target := range strings.Lines(list) {
			target = strings.TrimSpace(target)
			if !strings.HasPrefix(target, "Fuzz") {
				continue
			}
			found++
			id := testID{r.short(pkg), target}
			before := corpus(id)
			// A target may need longer than asked for its first, instrumented build and its
			// seeds; a hang is a finding.
			output, err := goCommand(ctx, "test", "-run=^$", "-fuzz=^"+target+"$", "-fuzztime="+o.fuzz.String(),
				"-timeout="+(o.fuzz+5*time.Minute).String(), pkg).CombinedOutput()
			out := string(output)
			if ctx.Err() != nil {
				return errors.New("interrupted")
			}
			if err == nil || endedByItsClock(out) && len(corpus(id)) == len(before) {
				if r.tests[id].Action != "fail" { // as a test, with its seeds
					r.tests[id] = outcome{Action: "pass"}
				}
				fmt.Fprintf(r.out, "ok   %-40s %s\n", id, lastExecs(out))
				continue
			}
			r.tests[id] = outcome{Action: "fail"}
			fmt.Fprintf(r.out, "--- FAIL %s\n%s", id, out)
			// The tree may be a copy that the next run replaces: show the input itself.
			for _, name := range corpus(id) {
				if slices.Contains(before, name) {
					continue
				}
				input, err := os.ReadFile(name)
				if err != nil {
					return fmt.Errorf("failing input: %w", err)
				}
				fmt.Fprintf(r.out, "failing input, to be kept as %s:\n%s\n", name, input)
			}
		}
	}
	if found == 0 {
		return errors.New("no fuzz target found")
	}
	return nil
}

// endedByItsClock reports whether a fuzz target's failure was only that -fuzztime ran out while
// the engine waited for a worker: it then names its own deadline as the failure, and no input
// (golang.org/issue/75804). A target's own failure says more than that line.
func endedByItsClock(out string) bool {
	_, after, found := strings.Cut(out, "--- FAIL: ")
	if !found {
		return false
	}
	_, after, _ = strings.Cut(after, "\n")
	said, _, _ := strings.Cut(after, "FAIL\n")
	return strings.TrimSpace(said) == context.DeadlineExceeded.Error()
}

// corpus lists the saved inputs of a fuzz target.
func corpus(id testID) []string {
	names, _ := filepath.Glob(filepath.Join(id.Package, "testdata", "fuzz", id.Test, "*"))
	return names
}

// lastExecs finds the last progress line's part behind "fuzz: ".
func lastExecs(out string) string {
	last := ""
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "fuzz: ") && strings.Contains(line, "execs:") {
			last = strings.TrimSpace(strings.TrimPrefix(line, "fuzz: "))
		}
	}
	return last
}

// goCommand makes a go command that is interrupted, not killed, when ctx ends, so that
// the tests below it can end what they started.
func goCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	// Without cgo, as the programs are built; only the race detector needs it.
	cgo := "CGO_ENABLED=0"
	if slices.Contains(args, "-race") {
		cgo = "CGO_ENABLED=1"
	}
	cmd.Env = append(os.Environ(), cgo)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	return cmd
}

func goOutput(ctx context.Context, args ...string) (string, error) {
	cmd := goCommand(ctx, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go %s: %w\n%s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	return string(out), nil
}
