// The socket where supervisors that the service manager started ask for their spec.

package daemon

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/cgroup"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/peer"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/units"
)

// specRequestTime is how long a supervisor may take to ask, maxSpecRequest how much it may say.
const (
	specRequestTime = 10 * time.Second
	maxSpecRequest  = 4 << 10
	// firstProbeTime is how long a supervisor waits for the probe of a daemon that starts: one
	// that systemd starts again in that moment is not to be refused for want of a result.
	firstProbeTime = 45 * time.Second
)

// serveSpecs answers supervisors until stop is called.
func (d *Daemon) serveSpecs(path string) (stop func(), err error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("spec socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("spec socket: %w", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				return // closed by stop
			}
			wg.Go(func() {
				defer conn.Close()
				if err := d.giveSpec(conn); err != nil {
					d.log.Warn("spec request", "error", err)
				}
			})
		}
	})
	return func() {
		l.Close()
		wg.Wait()
	}, nil
}

// giveSpec answers one request. The spec holds secrets, so it goes to the main process of
// the very service alone, which systemd started from what we gave it.
func (d *Daemon) giveSpec(conn *net.UnixConn) error {
	if err := peer.Check(conn); err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Now().Add(specRequestTime)); err != nil {
		return err
	}
	line, err := bufio.NewReader(io.LimitReader(conn, maxSpecRequest)).ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("it is cut short: %w", err)
	}
	var req wire.Request
	if err := json.Unmarshal(line, &req); err != nil {
		return err
	}
	if req.Op == wire.OpStopped && req.Version == wire.Version {
		answer, err := json.Marshal(wire.Reply{Version: wire.Version, OK: d.watching.Load()})
		if err != nil {
			return err
		}
		_, err = conn.Write(append(answer, '\n'))
		return err
	}
	timer := time.NewTimer(firstProbeTime)
	select {
	case <-d.probed:
	case <-timer.C:
	}
	timer.Stop()
	if err := conn.SetDeadline(time.Now().Add(specRequestTime)); err != nil {
		return err
	}
	spec, err := d.specFor(conn, &req)
	if err != nil {
		answer, merr := json.Marshal(wire.Reply{Version: wire.Version, Error: err.Error(), Code: Code(err)})
		if merr != nil {
			return merr
		}
		_, werr := conn.Write(append(answer, '\n'))
		return errors.Join(err, werr)
	}
	sealed, err := launch.Sealed("spec", spec)
	if err != nil {
		return err
	}
	defer sealed.Close()
	answer, err := json.Marshal(wire.Reply{Version: wire.Version, OK: true})
	if err != nil {
		return err
	}
	_, _, err = conn.WriteMsgUnix(append(answer, '\n'), unix.UnixRights(int(sealed.Fd())), nil)
	return err
}

func (d *Daemon) specFor(conn *net.UnixConn, req *wire.Request) (*wire.Spec, error) {
	switch {
	case req.Version != wire.Version:
		return nil, &Refusal{Code: 78, Text: fmt.Sprintf("the supervisor speaks version %d, the daemon %d; restart the daemon with `agentconnect restart`", req.Version, wire.Version)}
	case req.Op != wire.OpSpec:
		return nil, &Refusal{Code: 78, Text: fmt.Sprintf("unknown operation %q", req.Op)}
	}
	if err := agent.ValidateID(req.Agent); err != nil {
		return nil, &Refusal{Code: 78, Text: err.Error()}
	}
	pid, err := peer.PID(conn)
	if err != nil {
		return nil, err
	}
	group, err := cgroup.Of(pid)
	if err != nil {
		return nil, err
	}
	if want := units.ServiceName(req.Agent); group.Unit() != want {
		return nil, &Refusal{Code: 78, Text: fmt.Sprintf("process %d is in %s, not in %s; supervisors are started by systemd", pid, group.Unit(), want)}
	}
	spec, err := d.renew(req.Agent)
	if err != nil {
		d.refuse(req.Agent, d.record(req.Agent), err)
		return nil, err
	}
	// Whoever started it, a person with systemctl perhaps, wants it to run.
	d.mu.Lock()
	err = d.wanted.set(req.Agent, true)
	d.mu.Unlock()
	return spec, err
}
