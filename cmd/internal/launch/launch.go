// Package launch starts one program behind the boundary, through agentconnect-launch and
// bubblewrap, and ends it again. It is what the supervisor, the probe and the benchmarks
// share; it knows no agent and no protocol.
package launch

import (
	"context"
	"errors"
	"fmt"
	"os"

	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// Start is one program to start.
type Start struct {
	// Launcher is the path of agentconnect-launch.
	Launcher string
	// Compile makes the plan; it is called again when the host's tree changed while the
	// view was built. Nil starts the program without a boundary.
	Compile func() (*sandbox.Plan, error)
	// Expect is what the plan will be like, where that is known: then the launcher starts while the
	// plan is made. A plan that is otherwise is carried out, too, by another launcher.
	Expect *Expect
	// Ahead is a launcher that was begun for this start, which Run takes over; nil begins one.
	Ahead *Ahead
	Bwrap string
	// BwrapIs is what is known of it; where the file is another one, it is asked anew.
	BwrapIs wire.BwrapIs
	Argv    []string
	Env     []string
	// Private is environment for the program alone: the sandbox's first process, whose
	// environment is open to everything inside, does not have it.
	Private []string
	// Dir is the working directory inside.
	Dir string
	// Stdin, Stdout and Stderr go to the program; the caller still owns them.
	Stdin, Stdout, Stderr *os.File
	// Pass is one more descriptor for the program, number wire.ExtraFD there; may be nil.
	Pass *os.File
	// Ports are what is listened on, in a gated network, where the kernel cannot lead all
	// connections to one listener.
	Ports []uint16
	// Join starts the program in the namespaces of a sandbox that runs, beside what is there:
	// it shares the loopback, and its connections arrive where that one's do. Nil makes new
	// ones.
	Join *Inside
	// DieWithParent ends the program with the process that started it, where there is no
	// boundary; with one, the plan says.
	DieWithParent bool
	// Calm, where it is set, has whatever may change the host's tree stand still until the
	// function that it returns is called: for a start that others keep from success.
	Calm func() (resume func())
	// Place runs between the fork and the opened gate, with the launcher's pid: here the
	// process is put where its limits are, while the plan is made and the launcher builds the
	// view. An error ends the start, after theirs if they have one; nothing has run. Its context
	// ends when they fail. Nil places nothing.
	Place func(ctx context.Context, pid int) error
	// Behind runs behind the closed gate, when the plan is made and the launcher builds the view.
	Behind func()
}

// Expect is what a launcher's own namespaces and rights depend on.
type Expect struct {
	Network       sandbox.NetworkMode
	DieWithParent bool
}

// Inside are the namespaces of a sandbox, by which others are let in.
type Inside struct{ User, Net *os.File }

// Close lets go of them.
func (i *Inside) Close() {
	if i != nil {
		i.User.Close()
		i.Net.Close()
	}
}

// attempts bounds how often a start is tried again because the host's tree changed.
const attempts = 50

// calmAfter is how many attempts are made while all others go on.
const calmAfter = 3

// UnavailableError says that the boundary cannot start on this host as it is now.
type UnavailableError struct{ Err error }

func (e *UnavailableError) Error() string {
	return "the boundary cannot start: " + e.Err.Error() + "; run `agentconnect probe` to see why and what to do"
}
func (e *UnavailableError) Unwrap() error { return e.Err }

// Run starts the program and returns when it was executed (not when it ended). An error
// is an *UnavailableError, a *sandbox.RefusedError, a *wire.LaunchError or says which
// step failed; then nothing of the program has run and nothing is left.
func (s *Start) Run(ctx context.Context) (*Process, error) {
	var last error
	defer s.Ahead.Drop() // if it never came to it
	for n := range attempts {
		if err := ctx.Err(); err != nil {
			return nil, errors.Join(err, last)
		}
		resume := func() {}
		if n >= calmAfter && s.Calm != nil {
			resume = s.Calm()
		}
		p, err := s.once(ctx)
		resume()
		if err == nil {
			return p, nil
		}
		var le *wire.LaunchError
		switch {
		case errors.As(err, new(*sandbox.ChangedError)):
		case !errors.As(err, &le):
			return nil, err
		case !le.Retry:
			return nil, &UnavailableError{Err: err}
		}
		last = err
	}
	return nil, fmt.Errorf("the folders that the agent sees kept changing during %d starts: %w; start it again when they are at rest", attempts, last)
}

// End is how a program ended.
type End struct {
	Code   int    // exit code, or 128+n after signal n
	Signal int    // 0, or the signal that ended it
	Text   string // "exit status 1", "killed by signal 9 (killed)"
}
