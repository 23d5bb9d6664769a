// The guest's socket: what runs inside may ask a few things of the supervisor here. Whoever
// is inside can ask, so every word is judged as an attacker's: bounded, parsed strictly,
// answered from what the operator configured and from nothing that the request says.

package supervisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"agentconnect.md/sandbox/cmd/internal/peer"
	"agentconnect.md/sandbox/cmd/internal/strictjson"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// maxGuests bounds the connections from inside at one time. Those above it are closed
// without a word: an agent that floods the socket waits for itself.
const maxGuests = 32

// listenGuest opens the guest's socket; nil where there is no directory for it.
func (s *Supervisor) listenGuest() (*net.UnixListener, error) {
	if s.spec.Inside == "" {
		return nil, nil
	}
	path := s.channelSocket()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("guest socket: %w", err)
	}
	// The directory is 0700; nobody has been told of the socket before its mode is set.
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("guest socket: %w", err)
	}
	return l, nil
}

// channelSocket is the guest's socket on the host.
func (s *Supervisor) channelSocket() string {
	return filepath.Join(s.spec.Policy.ChannelDir, filepath.Base(sandbox.ChannelSocket))
}

// serveGuests answers from inside until ctx ends; it closes the listener then. The
// connections' goroutines belong to the supervisor.
func (s *Supervisor) serveGuests(ctx context.Context, l *net.UnixListener) {
	if l == nil {
		return
	}
	context.AfterFunc(ctx, func() { l.Close() })
	s.wg.Go(func() {
		seats := make(chan struct{}, maxGuests)
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
					return
				}
				s.opts.Log.Warn("a connection from inside could not be accepted", "error", err)
				select {
				case <-ctx.Done():
					return
				case <-time.After(100 * time.Millisecond):
				}
				continue
			}
			select {
			case seats <- struct{}{}:
			default:
				conn.Close()
				continue
			}
			s.wg.Go(func() {
				defer func() { <-seats }()
				defer conn.Close()
				stop := context.AfterFunc(ctx, func() { conn.Close() })
				defer stop()
				if err := s.guest(ctx, conn); err != nil {
					s.opts.Log.Debug("guest", "error", err)
				}
			})
		}
	})
}

// guest serves one connection from inside.
func (s *Supervisor) guest(ctx context.Context, conn *net.UnixConn) error {
	if err := peer.Check(conn); err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Now().Add(helloTime)); err != nil {
		return err
	}
	req, err := readGuestRequest(conn)
	if err != nil {
		return errors.Join(err, refuseGuest(conn, err))
	}
	switch req.Op {
	case wire.OpCredential:
		err = s.credential(ctx, conn, *req.Credential)
	case wire.OpMCP:
		err = s.mcp(ctx, conn, req.Name)
	case wire.OpGitConfig:
		err = s.gitConfig(conn, *req.Setting)
	case wire.OpPush:
		err = s.push(ctx, conn)
	default:
		err = fmt.Errorf("unknown operation %q", req.Op)
	}
	if err != nil {
		return errors.Join(err, refuseGuest(conn, err))
	}
	return nil
}

// refuseGuest tells why nothing is given.
func refuseGuest(conn *net.UnixConn, err error) error {
	return answerGuest(conn, wire.GuestReply{Error: oneLine(err.Error())})
}

// answerGuest sends a reply.
func answerGuest(conn *net.UnixConn, r wire.GuestReply) error {
	r.Version = wire.GuestVersion
	return writeLine(conn, r)
}

// readGuestRequest reads the one line that opens a connection. Nothing follows it before the
// reply: a server's own stream begins behind that. It is read in pieces, since each read costs us
// more than the agent a byte. Descriptors that come along are never taken over: read(2) drops them.
func readGuestRequest(r io.Reader) (*wire.GuestRequest, error) {
	var line []byte
	for {
		line = slices.Grow(line, 512)
		n, err := r.Read(line[len(line):cap(line)])
		line = line[:len(line)+n]
		switch i := bytes.IndexByte(line, '\n'); {
		case i >= 0 && i != len(line)-1:
			return nil, errors.New("request: more than one line before the reply")
		case i >= 0:
			return parseGuestRequest(line[:i])
		case len(line) > wire.MaxGuestRequest:
			return nil, fmt.Errorf("request: longer than %d bytes", wire.MaxGuestRequest)
		case err != nil:
			return nil, fmt.Errorf("request: %w", err)
		}
	}
}

// parseGuestRequest reads a request strictly.
func parseGuestRequest(line []byte) (*wire.GuestRequest, error) {
	line = bytes.TrimSuffix(line, []byte("\r"))
	var req wire.GuestRequest
	if err := strictjson.Decode(line, wire.MaxGuestRequest, &req); err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	switch {
	case req.Version != wire.GuestVersion:
		return nil, fmt.Errorf("the guest speaks version %d, this supervisor %d: restart the agent after the upgrade", req.Version, wire.GuestVersion)
	case (req.Op == wire.OpCredential) != (req.Credential != nil):
		return nil, errors.New("request: credential goes with the operation of that name, and only with it")
	case (req.Op == wire.OpGitConfig) != (req.Setting != nil):
		return nil, errors.New("request: setting goes with the operation git-config, and only with it")
	case (req.Op == wire.OpMCP) != (req.Name != ""):
		return nil, errors.New("request: name goes with the operation mcp, and only with it")
	}
	return &req, nil
}
