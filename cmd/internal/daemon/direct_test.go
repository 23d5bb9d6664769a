package daemon

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// stepClock stands still until a test fires one of its timers.
type stepClock struct {
	mu     sync.Mutex
	cond   *sync.Cond
	now    time.Time
	timers map[*stepTimer]bool
}

type stepTimer struct {
	d time.Duration
	c chan time.Time
}

func newStepClock() *stepClock {
	c := &stepClock{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), timers: map[*stepTimer]bool{}}
	c.cond = sync.NewCond(&c.mu)
	return c
}

func (c *stepClock) Now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.now }

func (c *stepClock) Timer(d time.Duration) (<-chan time.Time, func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &stepTimer{d: d, c: make(chan time.Time, 1)}
	c.timers[t] = true
	c.cond.Broadcast()
	return t.c, func() { c.mu.Lock(); delete(c.timers, t); c.mu.Unlock() }
}

// fire waits for a timer of length d, moves the time there and lets it ring.
func (c *stepClock) fire(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		for t := range c.timers {
			if t.d == d {
				delete(c.timers, t)
				c.now = c.now.Add(d)
				t.c <- c.now
				return
			}
		}
		c.cond.Wait()
	}
}

func (c *stepClock) advance(d time.Duration) { c.mu.Lock(); c.now = c.now.Add(d); c.mu.Unlock() }

func (c *stepClock) armed() int { c.mu.Lock(); defer c.mu.Unlock(); return len(c.timers) }

// bench is a direct supervision of fake supervisors.
type bench struct {
	*Direct
	t     *testing.T
	dir   string
	clock *stepClock
	log   *syncBuffer

	mu     sync.Mutex
	cond   *sync.Cond
	states []string
	renew  func() (*wire.Spec, error)
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}
func (s *syncBuffer) Close() error   { return nil }
func (s *syncBuffer) String() string { s.mu.Lock(); defer s.mu.Unlock(); return s.b.String() }

const testGrace = 3 * time.Second

// shortDir is a directory whose sockets have names short enough.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "d")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func newBench(t *testing.T) *bench {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, dir: shortDir(t), clock: newStepClock(), log: &syncBuffer{}}
	b.cond = sync.NewCond(&b.mu)
	b.renew = func() (*wire.Spec, error) { return nil, errors.New("no spec to renew") }
	b.Direct = NewDirect(DirectOptions{
		Program: exe, Dir: b.dir, Env: []string{fakeEnv}, Clock: b.clock,
		Renew: func(string) (*wire.Spec, error) { b.mu.Lock(); f := b.renew; b.mu.Unlock(); return f() },
		Changed: func(_ string, u Unit) {
			b.mu.Lock()
			defer b.mu.Unlock()
			if n := len(b.states); n == 0 || b.states[n-1] != u.State {
				b.states = append(b.states, u.State)
			}
			b.cond.Broadcast()
		},
		Stderr: func(string) io.WriteCloser { return b.log },
		Log:    slog.New(slog.DiscardHandler),
	})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
		defer cancel()
		if err := b.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		if _, err := os.Stat(filepath.Join(b.dir, "double")); err == nil {
			t.Error("two supervisors of one agent ran at once")
		}
		if left, _ := filepath.Glob(filepath.Join(b.dir, "n-*")); len(left) > 0 {
			t.Errorf("left over: %v", left)
		}
	})
	return b
}

func (b *bench) spec(words ...string) *wire.Spec {
	return &wire.Spec{Version: wire.Version, Agent: "a", Argv: words, Dir: b.dir, Socket: filepath.Join(b.dir, "a.sock"),
		StopGrace: wire.Duration(testGrace)}
}

func (b *bench) seen() []string { b.mu.Lock(); defer b.mu.Unlock(); return slices.Clone(b.states) }

func (b *bench) renewWith(f func() (*wire.Spec, error)) { b.mu.Lock(); b.renew = f; b.mu.Unlock() }

func (b *bench) same(words ...string) *wire.Spec {
	s := b.spec(words...)
	b.renewWith(func() (*wire.Spec, error) { return s, nil })
	return s
}

// until waits for the agent's state.
func (b *bench) until(state string) Unit {
	b.t.Helper()
	return b.untilUnit(state, func(u Unit) bool { return u.State == state })
}

func (b *bench) untilUnit(what string, is func(Unit) bool) Unit {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	stop := time.AfterFunc(90*time.Second, func() { b.cond.Broadcast() })
	defer stop.Stop()
	end := time.Now().Add(90 * time.Second)
	for !is(b.State("a")) {
		if time.Now().After(end) {
			b.t.Fatalf("%s never came; states %v", what, b.states)
		}
		b.cond.Wait()
	}
	return b.State("a")
}

func wait(t *testing.T, p Pending) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	return p.Wait(ctx)
}

func (b *bench) runs() int {
	raw, _ := os.ReadFile(filepath.Join(b.dir, "runs"))
	return strings.Count(string(raw), "\n")
}

func TestStartAndStop(t *testing.T) {
	b := newBench(t)
	if err := wait(t, b.Start("a", b.spec("say:on the way", "ready", "say:up", "wait"))); err != nil {
		t.Fatal(err)
	}
	u := b.State("a")
	if u.State != control.StateRunning || u.PID == 0 || u.Socket == "" {
		t.Errorf("running unit: %+v", u)
	}
	if err := wait(t, b.Stop("a")); err != nil {
		t.Fatal(err)
	}
	u = b.State("a")
	if u.State != control.StateStopped || u.Reason != "ended by SIGTERM" || u.PID != 0 {
		t.Errorf("stopped unit: %+v", u)
	}
	if d := cmp.Diff([]string{"starting", "running", "stopping", "stopped"}, b.seen()); d != "" {
		t.Error(d)
	}
}

func TestIdleHasNoTimer(t *testing.T) {
	b := newBench(t)
	if err := wait(t, b.Start("a", b.spec("ready", "wait"))); err != nil {
		t.Fatal(err)
	}
	if n := b.clock.armed(); n != 0 {
		t.Errorf("%d timers while running", n)
	}
	wait(t, b.Stop("a"))
	if n := b.clock.armed(); n != 0 {
		t.Errorf("%d timers while stopped", n)
	}
}

func TestTheSupervisorGetsNothingOfOurs(t *testing.T) {
	t.Setenv("GITHUB_TOKEN", "secret")
	b := newBench(t)
	env := filepath.Join(b.dir, "env")
	if err := wait(t, b.Start("a", b.spec("env:"+env, "writespec", "ready", "wait"))); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(env)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(raw), "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "NOTIFY_SOCKET="+b.dir+"/n-") || lines[1] != fakeEnv {
		t.Errorf("environment %q", lines)
	}
	wait(t, b.Stop("a"))
	if !strings.Contains(b.log.String(), "operation not permitted") {
		t.Errorf("the spec could be written: %s", b.log.String())
	}
}

func TestEndsThatAreNotTriedAgain(t *testing.T) {
	for _, tt := range []struct {
		name  string
		words []string
		state string
		why   string
	}{
		{"boundary refused", []string{"say:bwrap is gone; install bubblewrap", "exit:69"}, control.StateRefused, "bwrap is gone; install bubblewrap"},
		{"bad spec", []string{"exit:78"}, control.StateFailed, "supervisor: exit status 78"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			err := wait(t, b.Start("a", b.spec(tt.words...)))
			var end *EndError
			if !errors.As(err, &end) || end.Reason != tt.why {
				t.Errorf("start: %v", err)
			}
			if u := b.State("a"); u.State != tt.state || u.Reason != tt.why || b.clock.armed() != 0 {
				t.Errorf("%+v, %d timers", u, b.clock.armed())
			}
		})
	}
}

func TestARuntimeThatEndsWellIsNotRestarted(t *testing.T) {
	b := newBench(t)
	wait(t, b.Start("a", b.spec("ready", "say:the runtime ended with 0", "exit:0")))
	if u := b.until(control.StateStopped); u.Reason != "the runtime ended with 0" {
		t.Errorf("%+v", u)
	}
}

func TestRestartStormEndsFailed(t *testing.T) {
	b := newBench(t)
	if err := wait(t, b.Start("a", b.same("say:runtime: exit status 3", "exit:1"))); err == nil {
		t.Error("a start that ends at once reported success")
	}
	for _, d := range []time.Duration{1, 2, 4, 8} {
		b.clock.fire(d * time.Second)
	}
	u := b.until(control.StateFailed)
	if !strings.Contains(u.Reason, "failed 5 times") || !strings.Contains(u.Reason, "runtime: exit status 3") || !strings.Contains(u.Reason, "agentconnect agent logs a") {
		t.Errorf("reason %q", u.Reason)
	}
	if n := b.runs(); n != 5 {
		t.Errorf("%d runs", n)
	}
	if n := b.clock.armed(); n != 0 {
		t.Errorf("%d timers after giving up", n)
	}
	// A person's start forgives.
	if err := wait(t, b.Start("a", b.spec("ready", "wait"))); err != nil {
		t.Error(err)
	}
}

func TestDelayGrowsToItsBoundAndStartsOver(t *testing.T) {
	b := newBench(t)
	s := b.same("ready", "wait", "exit:1")
	if err := wait(t, b.Start("a", s)); err != nil {
		t.Fatal(err)
	}
	fail := func(ran, delay time.Duration) {
		t.Helper()
		b.clock.advance(ran)
		syscall.Kill(b.until(control.StateRunning).PID, syscall.SIGKILL)
		u := b.until(control.StateBackoff)
		if !strings.Contains(u.Reason, "killed") {
			t.Errorf("reason %q", u.Reason)
		}
		b.clock.fire(delay)
		b.until(control.StateRunning)
	}
	// Far enough apart never to be a burst.
	for _, d := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		fail(time.Minute, d*time.Second)
	}
	fail(5*time.Minute, time.Second)
	if u := b.State("a"); u.Restarts != 9 {
		t.Errorf("%d restarts", u.Restarts)
	}
}

func TestARestartAsksWhetherItMay(t *testing.T) {
	b := newBench(t)
	b.renewWith(func() (*wire.Spec, error) { return nil, &Refusal{Code: 69, Text: "bwrap is gone"} })
	wait(t, b.Start("a", b.spec("ready", "exit:1")))
	b.clock.fire(time.Second)
	if u := b.until(control.StateRefused); u.Reason != "bwrap is gone" || b.runs() != 1 {
		t.Errorf("%+v after %d runs", u, b.runs())
	}
}

func TestNeverReadyIsKilled(t *testing.T) {
	b := newBench(t)
	p := b.Start("a", b.spec("say:waiting for the gate", "term:ignore", "wait"))
	b.untilUnit(`the line "waiting for the gate"`, func(u Unit) bool { return u.Line == "waiting for the gate" })
	b.clock.fire(time.Minute)
	if err := wait(t, p); err == nil || !strings.Contains(err.Error(), "not ready within 1m0s (it said: waiting for the gate)") {
		t.Errorf("start: %v", err)
	}
	b.until(control.StateBackoff)
}

func TestStopEscalatesToSIGKILL(t *testing.T) {
	b := newBench(t)
	if err := wait(t, b.Start("a", b.spec("term:ignore", "ready", "wait"))); err != nil {
		t.Fatal(err)
	}
	p := b.Stop("a")
	b.clock.fire(testGrace + DefaultPace().StopMargin)
	if err := wait(t, p); err != nil {
		t.Fatal(err)
	}
	if u := b.State("a"); u.State != control.StateStopped || !strings.Contains(u.Reason, "killed") {
		t.Errorf("%+v", u)
	}
}

func TestStopInTheMiddleOfAStart(t *testing.T) {
	b := newBench(t)
	start := b.Start("a", b.spec("wait")) // never ready
	stop := b.Stop("a")
	if err := wait(t, start); !errors.Is(err, ErrSuperseded) {
		t.Errorf("start: %v", err)
	}
	if err := wait(t, stop); err != nil {
		t.Errorf("stop: %v", err)
	}
	if u := b.State("a"); u.State != control.StateStopped {
		t.Errorf("%+v", u)
	}
}

func TestStartInTheMiddleOfAStop(t *testing.T) {
	b := newBench(t)
	s := b.same("ready", "wait")
	wait(t, b.Start("a", s))
	first := b.State("a").PID
	stop, start := b.Stop("a"), b.Start("a", s)
	if err := wait(t, stop); err != nil {
		t.Errorf("stop: %v", err)
	}
	if err := wait(t, start); err != nil {
		t.Errorf("start: %v", err)
	}
	if u := b.State("a"); u.State != control.StateRunning || u.PID == first {
		t.Errorf("%+v, first pid %d", u, first)
	}
}

func TestTwoStartsAtOnceAreOneRuntime(t *testing.T) {
	b := newBench(t)
	s := b.spec("ready", "wait")
	var all []Pending
	for range 20 {
		all = append(all, b.Start("a", s))
	}
	for _, p := range all {
		if err := wait(t, p); err != nil {
			t.Error(err)
		}
	}
	if n := b.runs(); n != 1 {
		t.Errorf("%d supervisors", n)
	}
}

func TestRestartTakesTheNewSpec(t *testing.T) {
	b := newBench(t)
	wait(t, b.Start("a", b.spec("ready", "say:old", "wait")))
	fresh := b.same("say:new", "ready", "wait")
	if err := wait(t, b.Restart("a", fresh)); err != nil {
		t.Fatal(err)
	}
	if u := b.State("a"); u.Line != "new" || b.runs() != 2 {
		t.Errorf("%+v after %d runs", u, b.runs())
	}
}

func TestStopDuringTheDelay(t *testing.T) {
	b := newBench(t)
	wait(t, b.Start("a", b.same("exit:1")))
	b.until(control.StateBackoff)
	if err := wait(t, b.Stop("a")); err != nil {
		t.Fatal(err)
	}
	if u := b.State("a"); u.State != control.StateStopped || b.clock.armed() != 0 {
		t.Errorf("%+v, %d timers", u, b.clock.armed())
	}
}

// Any order of wishes from several callers: one runtime at a time (the fakes note a
// second one), every wish is answered, and the last one wins.
func TestLastWishWins(t *testing.T) {
	b := newBench(t)
	s := b.same("ready", "wait")
	r := rand.New(rand.NewPCG(1, 2))
	for round := range 15 {
		var all []Pending
		for range 1 + r.IntN(6) {
			switch r.IntN(3) {
			case 0:
				all = append(all, b.Start("a", s))
			case 1:
				all = append(all, b.Stop("a"))
			case 2:
				all = append(all, b.Restart("a", s))
			}
		}
		want := control.StateRunning
		if r.IntN(2) == 0 {
			want = control.StateStopped
			all = append(all, b.Stop("a"))
		} else {
			all = append(all, b.Start("a", s))
		}
		for _, p := range all {
			if err := wait(t, p); err != nil && !errors.Is(err, ErrSuperseded) {
				t.Fatal(err)
			}
		}
		if u := b.State("a"); u.State != want && !(want == control.StateStopped && u.State == "") {
			t.Fatalf("round %d: %+v, want %s", round, u, want)
		}
	}
}

func TestForgetThenStartAgain(t *testing.T) {
	b := newBench(t)
	s := b.same("ready", "wait")
	wait(t, b.Start("a", s))
	if err := b.Forget(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if u := b.State("a"); u != (Unit{}) {
		t.Errorf("%+v", u)
	}
	if err := wait(t, b.Start("a", s)); err != nil {
		t.Error(err)
	}
}

func TestExecSupervisorServesAndEndsWithUs(t *testing.T) {
	b := newBench(t)
	s := b.spec("listen", "ready", "wait")
	s.ExecOnly = true
	if err := b.Exec(t.Context(), "a", s); err != nil {
		t.Fatal(err)
	}
	c, err := control.DialAgent(t.Context(), s.Socket)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if u := b.State("a"); u.State != "" {
		t.Errorf("an exec changed the agent's state: %+v", u)
	}
	bad := b.spec("say:no bwrap", "exit:69")
	bad.Socket += "x"
	bad.Dir = shortDir(t)
	var end *EndError
	if err := b.Exec(t.Context(), "a", bad); !errors.As(err, &end) || end.Code != 69 || end.Reason != "no bwrap" {
		t.Errorf("exec: %v", err)
	}
}

func TestMessagesAreSafeToPrint(t *testing.T) {
	b := newBench(t)
	wait(t, b.Start("a", b.spec("say:\x1b]0;owned\x07", "ready", "wait")))
	if got, want := b.State("a").Line, `\x1b]0;owned\a`; got != want {
		t.Errorf("line %q, want %q", got, want)
	}
}

// A daemon that was killed leaves supervisors that still end their runtimes. The next
// daemon's start waits for them.
func TestAnOlderSupervisorIsWaitedFor(t *testing.T) {
	b := newBench(t)
	s := b.spec("listen", "term:ignore", "wait")
	older, life := startOlder(t, b, s)
	p := b.Start("a", b.spec("listen", "ready", "wait"))
	select {
	case err := <-p:
		t.Fatalf("started beside the older one: %v", err)
	case <-time.After(200 * time.Millisecond): // long enough to have started if it did not wait
	}
	life.Close() // the older daemon is gone
	if err := wait(t, p); err != nil {
		t.Error(err)
	}
	older.Wait()
	if raw, _ := os.ReadFile(filepath.Join(b.dir, "lifeline")); len(raw) == 0 {
		t.Error("the older one did not end by its lifeline")
	}
}

// startOlder runs a fake supervisor of another daemon, and waits until it listens.
func startOlder(t *testing.T, b *bench, s *wire.Spec) (*exec.Cmd, *os.File) {
	t.Helper()
	raw := []byte(`{"argv":["` + strings.Join(s.Argv, `","`) + `"],"dir":"` + s.Dir + `","socket":"` + s.Socket + `","stopGrace":"0s","killGrace":"0s"}`)
	f, err := sealedFile(raw)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	n, err := listenNotify(filepath.Join(b.dir, "older"))
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	exe, _ := os.Executable()
	cmd := exec.Command(exe)
	cmd.Env = []string{fakeEnv, "NOTIFY_SOCKET=" + n.path}
	cmd.ExtraFiles = []*os.File{f, r}
	s.Argv = append([]string{}, s.Argv...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.Close()
	t.Cleanup(func() { w.Close(); cmd.Process.Kill() })
	for range 20_000 {
		if c, err := control.DialAgent(t.Context(), s.Socket); err == nil {
			c.Close()
			return cmd, w
		}
		time.Sleep(5 * time.Millisecond) //nolint:forbidigo // looked for with a bound; another process makes it
	}
	t.Fatal("the older supervisor never listened")
	return nil, nil
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"plain · täxt\there":           "plain · täxt\there",
		"\x1b[2J\r":                    `\x1b[2J\r`,
		"\xff\uFFFD":                   "\\xff\uFFFD",
		"a\u202eb":                     `a\u202eb`,
		strings.Repeat("x", maxWord+1): strings.Repeat("x", maxWord) + "…",
	} {
		if got := printable(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
