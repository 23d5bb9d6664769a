// The agent socket: who may connect, and what they may ask.

package supervisor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/peer"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// errNoRequest: the other end has closed where a request could have begun.
var errNoRequest = errors.New("request: the connection ended")

// helloTime is how long a peer may take to say what it wants.
const helloTime = 10 * time.Second

// server accepts connections on the agent socket.
type server struct {
	l    *net.UnixListener
	path string
	lock *os.File
}

// listen takes the agent socket over. One supervisor holds it at a time: the lock file
// beside it is held for as long as the process lives, so a socket left by a killed one
// is known as such.
func (s *Supervisor) listen() (*server, error) {
	path := s.spec.Socket
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	if err := takeLock(lock); err != nil {
		lock.Close()
		return nil, fmt.Errorf("agent %s is running already: another supervisor holds %s; stop it with `agentconnect agent stop %s`", s.spec.Agent, path, s.spec.Agent)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		lock.Close()
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	// The directory is 0700; the mode of the socket itself is set before anyone is told.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		lock.Close()
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	return &server{l: l, path: path, lock: lock}, nil
}

// lockWait is how long whoever clears up after a killed supervisor may hold its lock.
const lockWait = time.Second

func takeLock(f *os.File) error {
	for end := time.Now().Add(lockWait); ; time.Sleep(5 * time.Millisecond) { //nolint:forbidigo // a lock cannot be waited for with a bound
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil || !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) || time.Now().After(end) {
			return err
		}
	}
}

// refuse removes the socket, so that nobody new comes; connections live on.
func (v *server) refuse() { v.l.Close() } // it unlinks

// Close gives the socket up for the next supervisor; connections live on.
func (v *server) Close() {
	v.refuse()
	os.Remove(v.path + ".lock")
	v.lock.Close()
}

// serve accepts connections until the server closes, each with a goroutine of its own
// that ends with ctx.
func (s *Supervisor) serve(ctx context.Context, v *server) {
	s.wg.Go(func() {
		for {
			conn, err := v.l.AcceptUnix()
			if err != nil {
				if errors.Is(err, net.ErrClosed) {
					return
				}
				// Out of descriptors: wait for one to come free, not in a tight loop.
				s.opts.Log.Warn("a connection could not be accepted", "error", err)
				select {
				case <-ctx.Done():
					return
				case <-time.After(100 * time.Millisecond):
				}
				continue
			}
			s.wg.Go(func() {
				defer conn.Close()
				stop := context.AfterFunc(ctx, func() {
					// Let what was written for a client last reach it.
					conn.SetReadDeadline(time.Unix(1, 0))
				})
				defer stop()
				if err := s.handle(ctx, conn); err != nil {
					s.opts.Log.Debug("client", "error", err)
				}
			})
		}
	})
}

// handle serves one connection. Who asked for the status may ask again: a daemon with many
// agents does, and to connect costs both more than the question.
func (s *Supervisor) handle(ctx context.Context, conn *net.UnixConn) error {
	if err := peer.Check(conn); err != nil {
		return err
	}
	conn.SetReadDeadline(time.Now().Add(helloTime))
	for first := true; ; first = false {
		req, files, err := readRequest(conn)
		if errors.Is(err, errNoRequest) && !first {
			return nil
		}
		if err == nil && req.Op == wire.OpStatus && req.Version == wire.Version && len(files) == 0 {
			err := writeLine(conn, wire.Reply{Version: wire.Version, OK: true, Status: s.status()})
			conn.SetReadDeadline(time.Time{})
			if err = cmp.Or(err, ctx.Err()); err != nil {
				return err
			}
			continue
		}
		return s.request(ctx, conn, req, files, err)
	}
}

// request serves the last request of a connection; err is how reading it went.
func (s *Supervisor) request(ctx context.Context, conn *net.UnixConn, req *wire.Request, files []*os.File, err error) error {
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	if err != nil {
		return errors.Join(err, writeLine(conn, wire.Reply{Version: wire.Version, Error: err.Error()}))
	}
	conn.SetReadDeadline(time.Time{})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if req.Version != wire.Version {
		older := "this agent still runs an older build; restart it with `agentconnect agent restart " + s.spec.Agent + "`"
		if req.Version < wire.Version {
			older = "this program is older than the running agent; use the installed agentconnect"
		}
		return writeLine(conn, wire.Reply{Version: wire.Version, Error: fmt.Sprintf("protocol version %d, want %d: %s", req.Version, wire.Version, older)})
	}
	switch req.Op {
	case wire.OpEgress:
		if err := s.word(req.Egress); err != nil {
			return writeLine(conn, wire.Reply{Version: wire.Version, Error: err.Error()})
		}
		return writeLine(conn, wire.Reply{Version: wire.Version, OK: true, Status: s.status()})
	case wire.OpAttach:
		s.mu.Lock()
		broker := s.broker
		s.mu.Unlock()
		if broker == nil {
			return writeLine(conn, wire.Reply{Version: wire.Version, Error: "no runtime is running here"})
		}
		if err := writeLine(conn, wire.Reply{Version: wire.Version, OK: true}); err != nil {
			return err
		}
		return broker.Attach(ctx, conn, clientName(req.Client))
	case wire.OpForward:
		return s.forward(ctx, conn, req)
	case wire.OpSecret:
		if req.Secret == nil {
			return writeLine(conn, wire.Reply{Version: wire.Version, Error: "no secret is named"})
		}
		if err := s.changeSecret(*req.Secret); err != nil {
			return errors.Join(err, writeLine(conn, wire.Reply{Version: wire.Version, Error: err.Error()}))
		}
		return writeLine(conn, wire.Reply{Version: wire.Version, OK: true})
	case wire.OpExec:
		return s.exec(ctx, conn, req, files)
	}
	return writeLine(conn, wire.Reply{Version: wire.Version, Error: fmt.Sprintf("unknown operation %q", req.Op)})
}

// clientName bounds what a client calls itself.
func clientName(name string) string {
	name = oneLine(name)
	if len(name) > 64 {
		name = name[:64]
	}
	if name == "" {
		name = "client"
	}
	return name
}

// writeLine says v. Whoever does not read it in time goes without: our end waits for nobody.
func writeLine(conn *net.UnixConn, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := conn.SetWriteDeadline(time.Now().Add(helloTime)); err != nil {
		return err
	}
	_, err = conn.Write(append(b, '\n'))
	return cmp.Or(err, conn.SetWriteDeadline(time.Time{}))
}
