// Connections to servers inside, for whoever holds the agent socket.

package supervisor

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// inside are the namespaces of the running agent; nil where none runs behind a network of
// its own.
func (s *Supervisor) inside() *launch.Inside {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return nil
	}
	return s.process.Inside
}

// forward serves one OpForward until its client or the agent goes away.
func (s *Supervisor) forward(ctx context.Context, conn *net.UnixConn, req *wire.Request) error {
	refuse := func(format string, args ...any) error {
		return writeLine(conn, wire.Reply{Version: wire.Version, Error: fmt.Sprintf(format, args...)})
	}
	in := s.inside()
	switch {
	case req.Port == 0:
		return refuse("no port to connect to")
	case !s.spec.Sandboxed || s.spec.Policy.Network == "host":
		return refuse("agent %s shares the host's network: connect to port %d of this machine itself", s.spec.Agent, req.Port)
	case in == nil:
		return refuse("no runtime is running here")
	}
	d, err := launch.NewDialer(ctx, s.spec.Launcher, in)
	if err != nil && ctx.Err() != nil {
		return refuse("agent %s is ending: nothing is led into it any more", s.spec.Agent)
	}
	if err != nil {
		return refuse("agent %s: nobody can be let into its network: %v", s.spec.Agent, err)
	}
	defer d.Close()
	if err := writeLine(conn, wire.Reply{Version: wire.Version, OK: true}); err != nil {
		return err
	}
	for {
		var one [1]byte
		if n, err := conn.Read(one[:]); n == 0 || err != nil {
			return nil // the client is gone, or the agent is (it sets a deadline)
		}
		if err := s.connect(conn, d, req.Port); err != nil {
			return err
		}
	}
}

// connect answers with one connection, or with why there is none.
func (s *Supervisor) connect(conn *net.UnixConn, d *launch.Dialer, port uint16) error {
	var answer wire.Forwarded
	var rights []byte
	f, err := d.Dial(port)
	if err != nil {
		answer.Error = err.Error()
	} else {
		defer f.Close()
		rights = unix.UnixRights(int(f.Fd()))
	}
	line, err := json.Marshal(answer)
	if err != nil {
		return err
	}
	if err := conn.SetWriteDeadline(time.Now().Add(helloTime)); err != nil {
		return err
	}
	_, _, err = conn.WriteMsgUnix(append(line, '\n'), rights, nil)
	return err
}
