// Where a started process is put before its gate opens: the seam to a service manager.

package supervisor

import (
	"context"
	"sync/atomic"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/sealguard"
	"agentconnect.md/sandbox/sandbox"
)

// execKillGrace is how long a command or a server beside the runtime may take to end
// after SIGTERM.
const execKillGrace = 3 * time.Second

// Placement says what is placed.
type Placement struct {
	// Exec numbers a command beside the runtime; 0 is the runtime.
	Exec uint64
}

// Placer puts processes into scopes of their own. Under direct supervision there is none.
type Placer interface {
	// Place returns when pid is in its scope and the scope's limits were read back. An
	// error ends the start; nothing of the program has run then.
	Place(ctx context.Context, p Placement, pid int) (Scope, error)
}

// LimitError: a limit that the operator asked for is not in force here. Another start would
// end the same.
type LimitError struct{ Err error }

func (e *LimitError) Error() string { return e.Err.Error() }
func (e *LimitError) Unwrap() error { return e.Err }

// Scope is where a program runs. Its stop needs no bus and no manager.
type Scope interface {
	Signal(sig syscall.Signal) error
	Kill() error
	// Freeze halts all that runs in it; already: it was frozen before, by somebody else.
	Freeze() (already bool, err error)
	Thaw() error
	// Why says in the user's terms what the scope knows of the program's end ("out of
	// memory: 2 GiB limit"), or nothing.
	Why() string
	// Notes are things that the operator should know, true for as long as it runs.
	Notes() []string
	// Unmet are limits that were not in force as it started. They can change live: for the
	// log, not for status.
	Unmet() []string
	Close()
}

// program is one process with its scope.
type program struct {
	*launch.Process
	scope Scope // nil under direct supervision
}

// execsApart is how far apart the numbers of supervisors begin that may serve one agent at once: of
// two scopes by one name the second ended the first. The agent's own begins at zero.
const execsApart = 1_000_000

// lastExec numbers the commands of this supervisor.
type lastExec struct{ n atomic.Uint64 }

// run starts a program of this agent and puts it in its scope. Its connections, where it has
// a network of its own that is gated, go through out.
func (s *Supervisor) run(ctx context.Context, st launch.Start, at Placement, out *egress.Gateway) (*program, error) {
	p := &program{}
	var plan *sandbox.Plan
	var expected *sealguard.Expected
	if compile := st.Compile; compile != nil {
		st.Compile = func() (_ *sandbox.Plan, err error) {
			expected.Failed() // of a start that was tried before
			expected = nil
			plan, err = compile()
			return plan, err
		}
	}
	st.Place = func(ctx context.Context, pid int) (err error) {
		if p.scope != nil {
			p.scope.Close() // of a start that was tried before
			p.scope = nil
		}
		if s.opts.Placer != nil {
			p.scope, err = s.opts.Placer.Place(ctx, at, pid)
		}
		return err
	}
	st.Behind = func() {
		s.remember()
		// Only in the agent's own view are its folders, and its seals. Others start as often as the
		// agent likes, and while a start is expected the host's git waits.
		if st.Calm != nil {
			expected = s.expect(plan)
		}
	}
	process, err := st.Run(ctx)
	if err != nil {
		expected.Failed()
		if p.scope != nil {
			p.scope.Close()
		}
		return nil, err
	}
	p.Process = process
	if err := s.watched(p, expected); err != nil {
		p.close()
		return nil, err
	}
	s.serveNetwork(process, out)
	return p, nil
}

// stop ends the program in steps. What is left in its scope ends with it.
func (p *program) stop(ctx context.Context, grace, killGrace time.Duration) {
	if p.scope == nil || p.Plan != nil {
		p.Stop(ctx, grace, killGrace)
	} else {
		// Without a boundary the scope knows better than the tree of processes what belongs.
		p.StopWith(ctx, grace, killGrace, func(sig syscall.Signal) { _ = p.scope.Signal(sig) })
	}
	p.sweep()
}

// sweep ends what is left in the scope when the program has ended.
func (p *program) sweep() {
	if p.scope != nil {
		_ = p.scope.Kill() // what cannot be killed is the manager's, which stops the scope
	}
}

// why is the scope's word on the end, or the process's own.
func (p *program) why() string {
	if p.scope != nil {
		if w := p.scope.Why(); w != "" {
			return w
		}
	}
	return p.End().Text
}

// close lets go of the scope.
func (p *program) close() {
	if p.scope != nil {
		p.scope.Close()
	}
}
