// The socket where supervisors ask: those that the service manager started for their spec,
// any for the credentials that the control plane has.

package daemon

import (
	"bufio"
	"context"
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
	"agentconnect.md/sandbox/cmd/internal/gitcred"
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
	stopped := make(chan struct{})
	wg.Go(func() {
		for {
			conn, err := l.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return // by stop
			}
			if err != nil {
				// Out of descriptors: wait for one to come free.
				d.log.Warn("a supervisor's connection could not be accepted", "error", err)
				select {
				case <-stopped:
				case <-time.After(100 * time.Millisecond):
				}
				continue
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
		close(stopped)
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
	if req.Op == wire.OpCredential && req.Version == wire.Version {
		return d.giveCredential(conn, &req)
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
	// It may have been stopped meanwhile, and that was the last word.
	if err := inService(conn, req.Agent); err != nil {
		return err
	}
	// Whoever started it, a person with systemctl perhaps, wants it to run. The start does not
	// wait for the disk, but a stop that follows does, so that the last word is the last.
	if sup, ok := d.sup.(listener); ok {
		sup.Asked(req.Agent)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, _, err = conn.WriteMsgUnix(append(answer, '\n'), unix.UnixRights(int(sealed.Fd())), nil); err != nil {
		return err
	}
	return d.wanted.heard(req.Agent, true)
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
	if err := inService(conn, req.Agent); err != nil {
		return nil, err
	}
	spec, err := d.renew(req.Agent)
	if err != nil {
		d.refuse(req.Agent, d.record(req.Agent), err)
	}
	return spec, err
}

// inService refuses a peer that is not of the agent's own service.
func inService(conn *net.UnixConn, id string) error {
	pid, err := peer.PID(conn)
	if err != nil {
		return err
	}
	group, err := cgroup.Of(pid)
	if err != nil {
		return err
	}
	if want := units.ServiceName(id); group.Unit() != want {
		return &Refusal{Code: 78, Text: fmt.Sprintf("process %d is in %s, not in %s; supervisors are started by systemd", pid, group.Unit(), want)}
	}
	return nil
}

// credentialAnswerTime bounds the answer to a question for credentials: the control plane
// has ten seconds, and another question for the same repository may come before this one.
const credentialAnswerTime = 25 * time.Second

// giveCredential answers a supervisor with what the control plane gives for a repository
// that it assigned to the agent. Only a supervisor of that very agent is answered.
func (d *Daemon) giveCredential(conn *net.UnixConn, req *wire.Request) error {
	reply := wire.Reply{Version: wire.Version}
	var err error
	reply.Username, reply.Password, err = d.credentialFor(conn, req)
	reply.OK = err == nil
	if err != nil {
		reply.Error = err.Error()
	}
	line, merr := json.Marshal(reply)
	if merr != nil {
		return merr
	}
	if derr := conn.SetDeadline(time.Now().Add(specRequestTime)); derr != nil {
		return derr
	}
	_, werr := conn.Write(append(line, '\n'))
	if err != nil {
		err = fmt.Errorf("credentials for agent %.64q: %w", req.Agent, err)
	}
	return errors.Join(err, werr)
}

func (d *Daemon) credentialFor(conn *net.UnixConn, req *wire.Request) (username, password string, err error) {
	if err := agent.ValidateID(req.Agent); err != nil {
		return "", "", err
	}
	timer := time.NewTimer(specRequestTime)
	defer timer.Stop()
	select {
	case <-d.probed: // what the control plane placed is known from then on
	case <-timer.C:
		return "", "", errors.New("the daemon is still starting")
	}
	pid, err := peer.PID(conn)
	if err != nil {
		return "", "", err
	}
	if !d.direct.Supervises(req.Agent, pid) {
		if err := inService(conn, req.Agent); err != nil {
			return "", "", err
		}
	}
	q := req.Credential
	if q == nil {
		return "", "", errors.New("the request names no repository")
	}
	repo, err := gitcred.Parse(q.Protocol, q.Host, q.Path)
	if err != nil {
		return "", "", err
	}
	if q.Action == "erase" {
		d.remote.placement.Rejected(req.Agent, repo)
		return "", "", nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), credentialAnswerTime)
	defer cancel()
	return d.remote.placement.Credential(ctx, req.Agent, repo)
}
