package launch

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/vfork"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// begun is a launcher. Where it was begun before its plan was made, it waits for that.
type begun struct {
	of      *Expect // what it was begun for; nil: for its plan
	p       *Process
	gate    *os.File
	infoR   *os.File      // where bubblewrap tells of its first process
	plan    *os.File      // what the launcher reads
	private *os.File      // the private environment, if there may be one
	started chan struct{} // closed when it runs, or has failed to
	failed  error         // why; valid after started
	placed  chan error    // what came of the placing
	giveUp  func()        // ends that
}

// allows reports whether a launcher that was begun for e can carry the spec out.
func (e *Expect) allows(spec *wire.Launch) bool {
	return spec.Plan != nil && e.Network == spec.Plan.Network && e.DieWithParent == spec.Plan.DieWithParent
}

// begin starts the launcher: for what is expected, or where that is nil, for the spec.
func (s *Start) begin(of *Expect, spec *wire.Launch) (_ *begun, err error) {
	b := &begun{of: of, started: make(chan struct{})}
	var its []*os.File // the launcher's alone
	defer func() {
		if err != nil {
			closeAll(its)
			b.close()
		}
	}()
	start := &vfork.Start{
		Path: s.Launcher, Args: []string{"agentconnect-launch"},
		// What the program gets is in the spec. The launcher works on one thread, and starts
		// sooner where Go's runtime makes no others.
		Env: []string{"GOMAXPROCS=1"},
	}
	boundary := true
	switch {
	case of != nil:
		start.Args = append(start.Args, wire.AheadArg)
	case spec.Plan != nil:
		of = &Expect{Network: spec.Plan.Network, DieWithParent: spec.Plan.DieWithParent}
	default:
		of, boundary = &Expect{}, false
	}
	if b.plan, err = memfd("launch"); err != nil {
		return nil, err
	}
	if spec == nil || spec.PassEnv {
		if b.private, err = memfd("env"); err != nil {
			return nil, err
		}
	}
	if spec != nil {
		if err = b.write(spec, s.Private); err != nil {
			return nil, err
		}
	}
	theirs, gate, err := gatePair()
	if err != nil {
		return nil, err
	}
	b.gate, its = gate, append(its, theirs)
	infoR, infoW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	b.infoR, its = infoR, append(its, infoW)
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	its = append(its, null)
	start.Files = []*os.File{cmp.Or(s.Stdin, null), cmp.Or(s.Stdout, null), cmp.Or(s.Stderr, null), b.plan, theirs, infoW}
	if s.Pass != nil || s.Join != nil || b.private != nil {
		start.Files = append(start.Files, s.Pass) // nil is a closed one
	}
	switch {
	case s.Join != nil:
		start.Files = append(start.Files, s.Join.User, s.Join.Net)
	case b.private != nil:
		start.Files = append(start.Files, nil, nil)
	}
	if b.private != nil {
		start.Files = append(start.Files, b.private)
	}
	if boundary && s.Join == nil {
		start.Namespaces = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS
		start.Capabilities = []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SYS_RESOURCE}
		if of.Network != sandbox.NetworkHost {
			start.Namespaces |= syscall.CLONE_NEWNET
			start.Capabilities = append(start.Capabilities, unix.CAP_NET_ADMIN)
		}
		if of.Network.Gated() {
			start.Capabilities = append(start.Capabilities, unix.CAP_NET_BIND_SERVICE)
		}
	}
	nested := boundary && of.DieWithParent
	if s.DieWithParent || nested {
		start.Death = syscall.SIGKILL // own keeps the thread that it hangs on
	}
	if nested && s.Join == nil {
		// The death signal ends bubblewrap's outer process alone, and its first one asks for its
		// own too late: killed in between, the outer one leaves it behind, waiting for ever or
		// with the sandbox going on. As the first process of a namespace it leaves nothing.
		start.Namespaces |= syscall.CLONE_NEWPID
	}
	b.p = &Process{boundary: boundary, nested: nested, initFD: -1, reaped: make(chan struct{}), done: make(chan struct{}), told: make(chan struct{})}
	var first *os.File // where the number of the one who joined is said
	if s.Join != nil {
		first = gate
	}
	go b.p.own(start, first, its, func(err error) {
		b.failed = err
		close(b.started)
	})
	return b, nil
}

// write seals what the launcher reads.
func (b *begun) write(spec *wire.Launch, private []string) error {
	if err := seal(b.plan, spec.Encode()); err != nil || !spec.PassEnv {
		return err
	}
	return seal(b.private, []byte(strings.Join(private, "\x00")+"\x00"))
}

// tell gives a launcher that waits its plan.
func (b *begun) tell(spec *wire.Launch, private []string) error {
	if err := b.write(spec, private); err != nil {
		b.drop()
		return err
	}
	// Where nobody reads it, there is no launcher: what became of it says the next look.
	_, _ = b.gate.Write([]byte{wire.PlanThere})
	return nil
}

// place places the launcher, beside all else. What came of it passGate asks for.
func (b *begun) place(ctx context.Context, place func(context.Context, int) error) {
	ctx, b.giveUp = context.WithCancel(ctx)
	placed := make(chan error, 1)
	b.placed = placed
	go func() {
		var err error
		// The number of one that has ended may be another's by now. What ended it says the gate.
		if <-b.started; b.failed == nil && place != nil && !b.ended() {
			err = place(ctx, b.p.PID)
		}
		placed <- err
	}()
}

// passGate waits until the launcher is ready and placed, both at once; then it opens the gate and
// waits for the exec. What the launcher has to say goes before what came of the placing.
func (b *begun) passGate(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { b.gate.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err := b.p.ready(b.gate)
	if err != nil {
		var le *wire.LaunchError
		if !errors.As(err, &le) {
			err = b.p.gateError(ctx, err)
		}
		b.giveUp()
	}
	if perr := <-b.placed; err == nil {
		err = perr
	}
	b.giveUp()
	if err != nil {
		return err
	}
	if _, err := b.gate.Write([]byte{wire.GateOpen}); err != nil {
		return b.p.gateError(ctx, err)
	}
	rest, err := io.ReadAll(io.LimitReader(b.gate, 64<<10))
	if err != nil {
		return b.p.gateError(ctx, err)
	}
	if len(rest) > 0 {
		return launchError(rest)
	}
	return nil
}

// drop ends a launcher that is not needed. Nothing of it is left.
func (b *begun) drop() {
	close(b.p.told)
	if b.placed != nil {
		b.giveUp()
		_ = <-b.placed // of what is not needed
	}
	if <-b.started; !b.ended() {
		signalChild(b.p.PID, syscall.SIGKILL)
	}
	<-b.p.done
	b.close()
}

// ended reports whether it runs no more, or never did.
func (b *begun) ended() bool {
	select {
	case <-b.p.reaped:
		return true
	default:
		return false
	}
}

func (b *begun) close() {
	if b.giveUp != nil {
		b.giveUp()
	}
	for _, f := range []*os.File{b.gate, b.infoR, b.plan, b.private} {
		if f != nil {
			f.Close()
		}
	}
}

// Ahead is a launcher that was begun before all of its start was known.
type Ahead struct {
	b  *begun // nil when it was taken or dropped
	of Start
}

// Begin begins a launcher for a Start with the same Launcher, Stdin, Stdout, Stderr and Expect as s.
// It is dropped when it is not needed after all.
func (s *Start) Begin() (*Ahead, error) {
	b, err := s.begin(s.Expect, nil)
	if err != nil {
		return nil, err
	}
	return &Ahead{b: b, of: *s}, nil
}

// take gives the launcher, or drops it where it is another start's, or has ended while it waited:
// that says nothing of a start which had not come so far.
func (a *Ahead) take(s *Start) *begun {
	fits := s.Launcher == a.of.Launcher && s.Stdin == a.of.Stdin && s.Stdout == a.of.Stdout && s.Stderr == a.of.Stderr &&
		s.Compile != nil && s.Join == nil && s.Pass == nil && !s.DieWithParent && s.Expect != nil && *s.Expect == *a.of.Expect
	if !fits || a.b == nil || a.b.ended() {
		a.Drop()
		return nil
	}
	b := a.b
	a.b = nil
	return b
}

// Drop ends the launcher, unless a start took it. It may be called more than once.
func (a *Ahead) Drop() {
	if a != nil && a.b != nil {
		a.b.drop()
		a.b = nil
	}
}
