package daemon

import (
	"context"
	"errors"
	"time"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// Supervision keeps the supervisors of agents running. The daemon says what it
// wishes and reads what is; restarting after a failure is the supervision's own work.
// One implementation runs plain child processes (direct); a service manager is another.
//
// A wish is in force when the call returns, in the order of the calls: whoever calls
// Start and then Stop gets a stopped agent. The Pending tells how it went.
type Supervision interface {
	// Name is what status calls it: "direct" or "systemd".
	Name() string
	// Start wishes the agent to run. A running one stays as it is.
	Start(id string, spec *wire.Spec) Pending
	// Stop wishes it stopped; it stays so until the next Start.
	Stop(id string) Pending
	// Restart wishes a fresh start with spec, also if it runs.
	Restart(id string, spec *wire.Spec) Pending
	// State says how the agent is now; the zero Unit for one never started.
	State(id string) Unit
	// Exec starts a supervisor for spec.ExecOnly and returns when spec.Socket serves.
	Exec(ctx context.Context, id string, spec *wire.Spec) error
	// Forget stops the agent and every exec of it and drops what is known of it.
	Forget(ctx context.Context, id string) error
	// Close ends what must not outlive the daemon, and returns when it has ended.
	Close(ctx context.Context) error
}

// Pending delivers one value: nil when the wish took effect, else why it did not.
type Pending <-chan error

// Wait returns the outcome, or the context's error; the wish stays in force then.
func (p Pending) Wait(ctx context.Context) error {
	select {
	case err := <-p:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Unit is the state of one agent's supervisor.
type Unit struct {
	State    string // one of control.State*, empty: never started
	Reason   string // why it does not run, or ended last, in the user's terms
	Line     string // the supervisor's status line
	PID      int
	Since    time.Time
	Restarts int
	Socket   string // while it runs
}

// ErrSuperseded: a later wish took the place of this one.
var ErrSuperseded = errors.New("stopped before it was up: a later request to stop it won")

// Refusal says that something must not be started as things are, and what to do. It
// is an answer, not a failure: nothing is tried again by itself.
type Refusal struct {
	Code int // exit code of the command line: 69 or 78
	Text string
	Err  error // the cause, for callers that tell causes apart; may be nil
}

func (r *Refusal) Error() string { return r.Text }

func (r *Refusal) Unwrap() error { return r.Err }

// EndError is a start that ended before the agent was ready.
type EndError struct {
	Code   int // the supervisor's exit code, -1 after a signal
	Reason string
}

func (e *EndError) Error() string { return e.Reason }

// Exit codes of the supervisor that mean "do not try again".
const (
	exitRefused = 69 // the boundary is unavailable or refused
	exitBadSpec = 78
)

// Pace holds the numbers of direct supervision.
type Pace struct {
	FirstDelay   time.Duration // before the first restart; doubles with each further one
	MaxDelay     time.Duration
	Healthy      time.Duration // after running this long, the delay starts over
	Burst        int           // so many failures within Window are a failed agent
	Window       time.Duration
	StartTimeout time.Duration // from the start of the supervisor to READY
	StopMargin   time.Duration // beyond the agent's own graces, before SIGKILL
}

// DefaultPace is the pace of a daemon.
func DefaultPace() Pace {
	return Pace{
		FirstDelay:   time.Second,
		MaxDelay:     time.Minute,
		Healthy:      5 * time.Minute,
		Burst:        5,
		Window:       2 * time.Minute,
		StartTimeout: time.Minute,
		StopMargin:   5 * time.Second,
	}
}

// Clock is the time source of supervision.
type Clock interface {
	Now() time.Time
	// Timer delivers once after d; stop releases it.
	Timer(d time.Duration) (c <-chan time.Time, stop func())
}

// WallClock is the real time.
type WallClock struct{}

// Now returns the current time.
func (WallClock) Now() time.Time { return time.Now() }

// Timer starts a time.Timer.
func (WallClock) Timer(d time.Duration) (<-chan time.Time, func()) {
	t := time.NewTimer(d)
	return t.C, func() { t.Stop() }
}
