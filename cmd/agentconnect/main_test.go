package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"

	"agentconnect.md/sandbox/cmd/internal/acp"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/programs"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"agentconnect": func() { os.Exit(run(system(), os.Args[1:])) },
	})
}

// TestScripts runs the command line as a person does, with a daemon where the script
// starts one.
func TestScripts(t *testing.T) {
	if os.Getuid() == 0 {
		t.Skip("needs an ordinary user: agents do not run as root")
	}
	libexec := siblings(t)
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "script"),
		Setup: func(e *testscript.Env) error {
			// Sockets need a short name; the script's own directory may be long.
			root, err := os.MkdirTemp("", "r")
			if err != nil {
				return err
			}
			e.Defer(func() { os.RemoveAll(root) })
			e.Vars = append(e.Vars, "AGENTCONNECT_ROOT="+root, "ROOT="+root, programs.LibexecEnv+"="+libexec)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": exits, "json": jsonHas, "daemon": startDaemon, "greet": greet,
		},
	})
}

// siblings gives the directory of our other programs, built if it is not given.
func siblings(t *testing.T) string {
	if dir := os.Getenv(programs.LibexecEnv); dir != "" {
		return dir
	}
	dir := t.TempDir()
	for _, p := range []string{"agentconnect-supervisor", "agentconnect-launch", "agentconnect-guest"} {
		cmd := exec.Command("go", "build", "-o", dir, "agentconnect.md/sandbox/cmd/"+p)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go build %s: %v\n%s", p, err, out)
		}
	}
	return dir
}

// exits CODE COMMAND…: the command ends with that code.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND…")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	err = ts.Exec(args[1], args[2:]...)
	var end *exec.ExitError
	switch {
	case errors.As(err, &end):
		got = end.ExitCode()
	case err != nil:
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// json FILE PATH VALUE: the value at a dotted path of the JSON in FILE (stdout, stderr).
func jsonHas(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 3 {
		ts.Fatalf("usage: json FILE PATH VALUE")
	}
	var v any
	if err := json.Unmarshal([]byte(ts.ReadFile(args[0])), &v); err != nil {
		ts.Fatalf("%s: %v", args[0], err)
	}
	for _, key := range strings.Split(args[1], ".") {
		switch at := v.(type) {
		case map[string]any:
			v = at[key]
		case []any:
			i, err := strconv.Atoi(key)
			if err != nil || i >= len(at) {
				ts.Fatalf("%s: no element %s of %d", args[1], key, len(at))
			}
			v = at[i]
		default:
			ts.Fatalf("%s: nothing at %q", args[1], key)
		}
	}
	if got := fmt.Sprint(v); (got == args[2]) == neg {
		ts.Fatalf("%s is %q, want %q (negated: %v)", args[1], got, args[2], neg)
	}
}

// daemon [FLAG]…: starts one for the script and waits until it answers.
func startDaemon(ts *testscript.TestScript, neg bool, args []string) {
	dir := ts.Getenv("AGENTCONNECT_ROOT")
	log, err := os.Create(ts.MkAbs("daemon.out"))
	ts.Check(err)
	defer log.Close()
	cmd := exec.Command(filepath.Join(filepath.SplitList(ts.Getenv("PATH"))[0], "agentconnect"), append([]string{"run"}, args...)...)
	cmd.Env = []string{"PATH=" + ts.Getenv("PATH"), "AGENTCONNECT_ROOT=" + dir, programs.LibexecEnv + "=" + ts.Getenv(programs.LibexecEnv), "AWS_SECRET_ACCESS_KEY=canary"}
	cmd.Stdout, cmd.Stderr = log, log
	ts.Check(cmd.Start())
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	ts.Defer(func() {
		cmd.Process.Signal(os.Interrupt)
		<-ended
	})
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { //nolint:forbidigo // looked for with a deadline; another process makes it
		if _, err := os.Stat(daemon.ControlSocket("", dir)); err == nil {
			return
		}
		select {
		case <-ended:
			raw, _ := os.ReadFile(log.Name())
			ts.Fatalf("the daemon ended: %s", raw)
		default:
		}
		if time.Now().After(end) {
			ts.Fatalf("the daemon does not listen")
		}
	}
}

// greet: a server on the loopback of the host says hello; its port is in $PORT.
func greet(ts *testscript.TestScript, neg bool, args []string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(c, "hello from the host")
			c.Close()
		}
	}()
	ts.Defer(func() { l.Close(); <-done })
	ts.Setenv("PORT", strconv.Itoa(l.Addr().(*net.TCPAddr).Port))
}

func TestRunRefusesRoot(t *testing.T) {
	var out, errs bytes.Buffer
	a := &app{in: strings.NewReader(""), out: &out, err: &errs, uid: 0}
	if got := run(a, []string{"run"}); got != 1 || !strings.Contains(errs.String(), "do not run agents as root") || out.Len() != 0 {
		t.Errorf("code %d, %q, %q", got, &out, &errs)
	}
	errs.Reset()
	a.began = false
	if got := run(a, []string{"up"}); got != 1 || !strings.Contains(errs.String(), "do not run agents as root") || out.Len() != 0 {
		t.Errorf("up: code %d, %q, %q", got, &out, &errs)
	}
	errs.Reset()
	a.began = false
	if got := run(a, []string{"run", "--json"}); got != 1 {
		t.Errorf("code %d", got)
	}
	var e struct {
		Error string
		Code  int
	}
	if err := json.Unmarshal(errs.Bytes(), &e); err != nil || e.Code != 1 || e.Error == "" {
		t.Errorf("%q: %v", &errs, err)
	}
}

func TestProjectIDs(t *testing.T) {
	for _, tt := range []struct {
		folder, runtime string
		n               int
		want            string
	}{
		{"app", "gemini", 1, "app-gemini"},
		{"My App (2)", "claude-acp", 1, "my-app-2-claude-acp"},
		{"...", "gemini", 2, "project-gemini-2"},
		{"ünï", "gemini", 1, "n-gemini"},
		{strings.Repeat("x", 100), "gemini", 1, strings.Repeat("x", 56) + "-gemini"},
	} {
		if got := projectID(tt.folder, tt.runtime, tt.n); got != tt.want || len(got) > 63 {
			t.Errorf("%q: %q, want %q", tt.folder, got, tt.want)
		}
	}
}

func TestPermissionAnswers(t *testing.T) {
	options := []acp.PermissionOption{{ID: "n", Kind: "reject_once"}, {ID: "ya", Kind: "allow_always"}, {ID: "y", Kind: "allow_once"}}
	var errs bytes.Buffer
	a := &app{err: &errs}
	if got := permission(a, true, false)(t.Context(), "x", options); got != "y" {
		t.Errorf("allow-all chose %q", got)
	}
	if got := permission(a, false, true)(t.Context(), "x", options); got != "n" {
		t.Errorf("deny-all chose %q", got)
	}
	if got := permission(a, true, false)(t.Context(), "x", options[:1]); got != "" {
		t.Errorf("allow-all chose a refusal: %q", got)
	}
	tty := struct {
		io.Reader
		io.Writer
	}{strings.NewReader("7\nyes\n3\n"), io.Discard}
	if got := askOn(t.Context(), tty, "\x1b[2Jx", options); got != "y" {
		t.Errorf("the terminal chose %q", got)
	}
}

func TestErrorsAreOneSafeLine(t *testing.T) {
	if d := cmp.Diff("a b \uFFFD[2J c", oneLine("a\nb\t\x1b[2J c\n")); d != "" {
		t.Error(d)
	}
}

// Something inside may hold the terminal of a shell that has ended, and show a prompt there.
func TestWhatIsTypedAfterAShellIsNotForItsTerminal(t *testing.T) {
	var inside strings.Builder
	over := make(chan struct{})
	to := &typed{w: &inside, over: over}
	if _, err := io.WriteString(to, "exit\n"); err != nil {
		t.Fatal(err)
	}
	close(over)
	if _, err := io.WriteString(to, "password\n"); err == nil || inside.String() != "exit\n" {
		t.Errorf("%q is heard inside, %v", inside.String(), err)
	}
}

// A follower of a log shows each line once, also one that is written while it begins.
func TestLogsShowEachLineOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.log")
	log, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	var n atomic.Int64
	stop, wrote := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				wrote <- nil
				return
			default:
			}
			if _, err := fmt.Fprintln(log, n.Add(1)); err != nil {
				wrote <- err
				return
			}
		}
	}()
	for range 50 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		seen := &inOrder{until: int(n.Load()) + 300, over: cancel}
		a := &app{out: seen, err: io.Discard}
		if err := a.logs(ctx, path, 10, true); err != nil && !errors.Is(err, io.ErrClosedPipe) {
			t.Fatal(err)
		}
		cancel()
		if seen.wrong != "" || seen.last < seen.until {
			t.Errorf("ends at %d, wanted %d: %s", seen.last, seen.until, seen.wrong)
			break
		}
	}
	close(stop)
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}
}

// The kernel shows the first part of a line before the rest, where it lies on two pages.
func TestLogsWaitForTheRestOfALine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.log")
	if err := os.WriteFile(path, []byte("1\n2\n3"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var said []string
	out := writerFunc(func(p []byte) (int, error) {
		switch said = append(said, string(p)); len(said) {
		case 1:
			log, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				return 0, err
			}
			defer log.Close()
			if _, err := log.WriteString("4\n"); err != nil {
				return 0, err
			}
		case 2:
			cancel()
		}
		return len(p), nil
	})
	if err := (&app{out: out, err: io.Discard}).logs(ctx, path, 1, true); err != nil {
		t.Fatal(err)
	}
	if want := []string{"2\n", "34\n"}; !slices.Equal(said, want) {
		t.Errorf("%q, want %q", said, want)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// inOrder checks that lines are numbers, each one more than the one before.
type inOrder struct {
	last, until int
	wrong       string
	over        func()
}

func (o *inOrder) Write(p []byte) (int, error) {
	n, err := strconv.Atoi(strings.TrimSpace(string(p)))
	if err != nil || o.last != 0 && n != o.last+1 {
		o.wrong = fmt.Sprintf("%q follows %d", p, o.last)
	}
	o.last = n
	if o.wrong != "" || n >= o.until {
		o.over()
		return 0, io.ErrClosedPipe
	}
	return len(p), nil
}

// Who is slow to read goes on, though the kernel kept no more events for him.
func TestLogsGoOnWhereEventsWereLost(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.log")
	var files [3]*os.File
	for i, name := range []string{path, filepath.Join(dir, "b.log"), filepath.Join(dir, "c.log")} {
		f, err := os.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files[i] = f
	}
	if _, err := files[0].WriteString("first\n"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		defer w.Close()
		ended <- (&app{out: w, err: io.Discard}).logs(ctx, path, 10, true)
	}()
	shown := bufio.NewScanner(r)
	next := func(want string) {
		t.Helper()
		if !shown.Scan() || shown.Text() != want {
			t.Fatalf("%q, want %q", shown.Text(), want)
		}
	}
	next("first")
	for _, line := range []string{"second\n", "third\n"} { // with the second in hand it does not look on
		if _, err := files[0].WriteString(line); err != nil {
			t.Fatal(err)
		}
	}
	for range 40_000 { // two of one kind would be one
		for _, f := range files[1:] {
			if _, err := f.WriteString("x"); err != nil {
				t.Fatal(err)
			}
		}
	}
	next("second")
	next("third")
	if _, err := files[0].WriteString("last\n"); err != nil {
		t.Fatal(err)
	}
	next("last")
	cancel()
	r.Close()
	<-ended
}
