// Talking to an agent's supervisor: the request line, the reply line, and the
// descriptors that go along.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// maxReply bounds a line of a supervisor, bytes.
const maxReply = 1 << 20

// replyTimeout is how long a supervisor may take to answer; starting a boundary for an
// exec is part of it.
const replyTimeout = 2 * time.Minute

// Until the daemon has heard that a supervisor ended, it names its socket. So a client
// that comes just then asks anew, every againEvery, for at most againFor.
const (
	againFor   = 10 * time.Second
	againEvery = 20 * time.Millisecond
)

// where asks the daemon for the socket of a supervisor.
type where = func(context.Context) (*control.Attach, error)

// reach is ask at the socket that the daemon names.
func reach(ctx context.Context, socketOf where, req wire.Request, files ...*os.File) (*net.UnixConn, []*os.File, error) {
	patience, cancel := context.WithTimeout(ctx, againFor)
	defer cancel()
	for {
		at, err := socketOf(ctx)
		if err != nil {
			return nil, nil, err
		}
		c, got, err := ask(ctx, at.Socket, req, files...)
		// Where nobody listens nothing has been asked. Without an answer nobody knows: a
		// command might run twice, an attach is simply lost.
		none := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
		lost := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
		if !none && (!lost || req.Op != wire.OpAttach) {
			return c, got, err
		}
		select {
		case <-time.After(againEvery):
		case <-patience.Done():
			return nil, nil, err
		}
	}
}

// ask connects to a supervisor, sends req with files, and returns the connection behind
// the reply, with the descriptors that came with it. The caller closes both; files stay
// the caller's.
func ask(ctx context.Context, socket string, req wire.Request, files ...*os.File) (*net.UnixConn, []*os.File, error) {
	req.Version = wire.Version
	line, err := json.Marshal(req)
	if err != nil {
		return nil, nil, err
	}
	if len(line) >= wire.MaxRequest {
		return nil, nil, fmt.Errorf("the command with its arguments is %d bytes long as it is sent, %d at most: give it the rest on stdin (xargs), or in a file of the workspace", len(line), wire.MaxRequest-1)
	}
	c, err := control.DialAgent(ctx, socket)
	if err != nil {
		return nil, nil, fmt.Errorf("agent socket: %w; has the agent just stopped? see `agentconnect status`", err)
	}
	got, err := exchange(ctx, c, append(line, '\n'), files)
	if err != nil {
		closeAll(got)
		c.Close()
		return nil, nil, err
	}
	return c, got, nil
}

func exchange(ctx context.Context, c *net.UnixConn, line []byte, files []*os.File) ([]*os.File, error) {
	if err := c.SetDeadline(time.Now().Add(replyTimeout)); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	n, _, err := c.WriteMsgUnix(line, rights, nil)
	if err == nil && n < len(line) {
		_, err = c.Write(line[n:])
	}
	if err != nil {
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	answer, got, err := readLine(c)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return got, fmt.Errorf("agent socket: %w", err)
	}
	var r wire.Reply
	if err := json.Unmarshal(answer, &r); err != nil {
		return got, fmt.Errorf("agent socket: reply: %w", err)
	}
	if !r.OK {
		return got, errors.New(oneLine(r.Error))
	}
	if !stop() { // the deadline is in the past for good
		return got, context.Cause(ctx)
	}
	return got, c.SetDeadline(time.Time{})
}

// readLine reads one line, byte by byte: what follows it belongs to another protocol.
// Descriptors that come along are the caller's to close.
func readLine(c *net.UnixConn) ([]byte, []*os.File, error) {
	var line []byte
	var files []*os.File
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4*4))
	for len(line) < maxReply {
		n, oobn, _, _, err := c.ReadMsgUnix(b, oob)
		if oobn > 0 {
			files = append(files, passed(oob[:oobn])...)
		}
		if err != nil {
			return nil, files, err
		}
		if n == 0 {
			return nil, files, errors.New("the supervisor closed the connection; see `agentconnect agent logs ID`")
		}
		if b[0] == '\n' {
			return line, files, nil
		}
		line = append(line, b[0])
	}
	return nil, files, fmt.Errorf("a line above %d bytes", maxReply)
}

func passed(oob []byte) []*os.File {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			// Non-blocking, so that a read of it can be ended.
			_ = unix.SetNonblock(fd, true)
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
