package supervisor

import (
	"os"
	"path/filepath"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/sandbox"
)

// launcherName is the launcher's, beside our own program.
const launcherName = "agentconnect-launch"

// Ahead is the runtime's launcher, begun before the agent's spec is there: it starts while the daemon
// makes that, and waits. Where the spec wants another one, it does nothing.
type Ahead struct {
	in, out, stderr *pipe
	launcher        *launch.Ahead
}

// Begin begins the launcher of an agent whose network is expected to be of this mode.
func Begin(network sandbox.NetworkMode) (*Ahead, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	a := &Ahead{}
	if a.in, a.out, a.stderr, err = newPipes(); err != nil {
		return nil, err
	}
	st := launch.Start{
		Launcher: filepath.Join(filepath.Dir(self), launcherName), Expect: &launch.Expect{Network: network},
		Stdin: a.in.r, Stdout: a.out.w, Stderr: a.stderr.w,
	}
	if a.launcher, err = st.Begin(); err != nil {
		a.close()
		return nil, err
	}
	return a, nil
}

// Drop ends the launcher, unless the runtime was started by it. Nil is none.
func (a *Ahead) Drop() {
	if a != nil {
		a.launcher.Drop()
		a.close()
	}
}

func (a *Ahead) close() {
	a.in.close()
	a.out.close()
	a.stderr.close()
}

// newPipes makes those of a program's stdin, stdout and stderr.
func newPipes() (in, out, stderr *pipe, err error) {
	var made [3]*pipe
	for i := range made {
		if made[i], err = newPipe(); err != nil {
			for _, p := range made[:i] {
				p.close()
			}
			return nil, nil, nil, err
		}
	}
	return made[0], made[1], made[2], nil
}
