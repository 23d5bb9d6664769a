package launch

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"agentconnect.md/sandbox/sandbox"
)

// ahead begins a launcher for a start of this box, whose output comes out of the pipe.
func (b *box) ahead(expect Expect, argv ...string) (*Start, *os.File) {
	b.t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { r.Close(); w.Close() })
	s := b.start(argv...)
	s.Stdout, s.Stderr = w, w
	first := *s
	first.Expect = &expect
	if s.Ahead, err = first.Begin(); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(s.Ahead.Drop)
	return s, r
}

// said runs the start to its end and gives what its program printed.
func (b *box) said(s *Start, r *os.File) (string, *Process) {
	b.t.Helper()
	p, err := s.Run(b.t.Context())
	s.Stdout.Close()
	if err != nil {
		b.t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		b.t.Fatal(err)
	}
	<-p.Done()
	return string(out), p
}

func TestLauncherBegunAheadBecomesTheProgram(t *testing.T) {
	b := newBox(t)
	b.policy.DieWithParent = false
	s, r := b.ahead(*b.start().Expect, "/bin/sh", "-c", `echo "$GIVEN" "$SECRET"; test -e "$HOME/.ssh/id" || echo hidden`)
	begun := s.Ahead.b
	s.Env, s.Private = append(s.Env, "GIVEN=yes"), []string{"SECRET=word"}
	out, p := b.said(s, r)
	if out != "yes word\nhidden\n" {
		t.Errorf("it said %q", out)
	}
	if p != begun.p {
		t.Error("another launcher was taken")
	}
}

// What counts is the plan: a launcher in other namespaces is not for it.
func TestLauncherBegunForAnotherStartIsNotTaken(t *testing.T) {
	b := newBox(t)
	b.policy.DieWithParent = false
	other := Expect{Network: sandbox.NetworkHost}
	for name, change := range map[string]func(*Start){
		"that is expected otherwise":  func(*Start) {},
		"whose plan is otherwise":     func(s *Start) { s.Expect = &other },
		"of which nothing is known":   func(s *Start) { s.Expect = nil },
		"that ends with who began it": func(s *Start) { s.DieWithParent = true },
	} {
		t.Run(name, func(t *testing.T) {
			s, r := b.ahead(other, "/bin/readlink", "/proc/self/ns/net")
			begun := s.Ahead.b
			change(s)
			out, p := b.said(s, r)
			host, err := os.Readlink("/proc/self/ns/net")
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(out, "net:[") || strings.TrimSpace(out) == host {
				t.Errorf("it runs in %q, the host is %q", out, host)
			}
			if p == begun.p {
				t.Error("the launcher was taken")
			}
			gone(t, begun.p)
		})
	}
}

// gone waits for the end of a launcher, of which nothing is to be left.
func gone(t *testing.T, p *Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-t.Context().Done():
		t.Fatal("it still runs")
	}
	if err := syscall.Kill(p.PID, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d: %v", p.PID, err)
	}
}

func TestLauncherThatIsNotNeededIsEnded(t *testing.T) {
	b := newBox(t)
	s, _ := b.ahead(*b.start().Expect)
	p := s.Ahead.b.p
	s.Ahead.Drop()
	gone(t, p)
	s.Ahead.Drop() // nothing more
}

func TestLauncherOfAStartThatIsGivenUpBeforeIsEnded(t *testing.T) {
	b := newBox(t)
	s, _ := b.ahead(*b.start().Expect)
	p := s.Ahead.b.p
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	gone(t, p)
}

// Whoever began it may be killed: it has the gate's word for that, and no plan.
func TestLauncherEndsWithWhoeverBeganIt(t *testing.T) {
	b := newBox(t)
	b.policy.DieWithParent = false
	s, r := b.ahead(*b.start().Expect)
	p := s.Ahead.b.p
	<-s.Ahead.b.started
	s.Ahead.b.gate.Close()
	s.Stdout.Close()
	// Its last word comes before its end, and nobody else has the pipe.
	if out, err := io.ReadAll(r); err != nil || !strings.Contains(string(out), "wait for the plan: the supervisor is gone") {
		t.Errorf("it said %q, %v", out, err)
	}
	s.Ahead.Drop()
	gone(t, p)
	if p.End().Code != 1 {
		t.Errorf("it ended with %s", p.End().Text)
	}
}

func TestRefusedPlanLeavesNoLauncher(t *testing.T) {
	b := newBox(t)
	s := b.start("/bin/true")
	refused := errors.New("no such plan")
	pids := make(chan int, 1)
	s.Compile = func() (*sandbox.Plan, error) { return nil, refused }
	s.Place = func(ctx context.Context, pid int) error {
		pids <- pid
		<-ctx.Done()
		return errors.New("not placed")
	}
	if _, err := s.Run(t.Context()); !errors.Is(err, refused) {
		t.Errorf("%v", err)
	}
	select {
	case pid := <-pids:
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("launcher %d: %v", pid, err)
		}
	default: // it was not placed yet
	}
	if left := tagged(t, "agentconnect-launch\x00"+"ahead"); len(left) > 0 {
		for _, pid := range left {
			if of, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat"); err == nil && strings.Contains(string(of), ") S "+strconv.Itoa(os.Getpid())+" ") {
				t.Errorf("launcher %d is left", pid)
			}
		}
	}
}

// It may have waited for as long as the daemon took.
func TestLauncherThatEndedWhileItWaitedIsReplaced(t *testing.T) {
	b := newBox(t)
	b.policy.DieWithParent = false
	missing := *b.start()
	missing.Launcher = filepath.Join(t.TempDir(), "agentconnect-launch")
	for name, end := range map[string]func(*Start){
		"killed": func(s *Start) {
			p := s.Ahead.b.p
			<-s.Ahead.b.started
			signalChild(p.PID, syscall.SIGKILL)
			<-p.reaped
		},
		"never there": func(s *Start) {
			s.Ahead.Drop()
			first := *s
			first.Launcher = missing.Launcher
			var err error
			if s.Ahead, err = first.Begin(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(s.Ahead.Drop)
			<-s.Ahead.b.started
			// It comes to be there, as in the middle of an update.
			if err := os.Symlink(s.Launcher, missing.Launcher); err != nil {
				t.Fatal(err)
			}
			s.Launcher = missing.Launcher
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, r := b.ahead(*b.start().Expect, "/bin/echo", "runs")
			placed := make(chan int, attempts)
			s.Place = func(_ context.Context, pid int) error {
				placed <- pid
				return nil
			}
			end(s)
			out, p := b.said(s, r)
			if out != "runs\n" {
				t.Errorf("it said %q", out)
			}
			if len(placed) != 1 || <-placed != p.PID {
				t.Error("something else was placed")
			}
		})
	}
}
