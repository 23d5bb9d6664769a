// Commands inside the agent's boundary, beside the runtime: each in a sandbox of its
// own, built from the same policy.

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// exec serves one OpExec to its end.
func (s *Supervisor) exec(ctx context.Context, conn *net.UnixConn, req *wire.Request, files []*os.File) error {
	refuse := func(format string, args ...any) error {
		return writeLine(conn, wire.Reply{Version: wire.Version, Error: fmt.Sprintf(format, args...)})
	}
	if len(req.Argv) == 0 || req.Argv[0] == "" {
		return refuse("no command to run")
	}
	for _, a := range slices.Concat(req.Argv, req.Env, []string{req.Dir}) {
		if strings.ContainsRune(a, 0) {
			return refuse("the command holds a NUL byte")
		}
	}
	for _, e := range req.Env {
		if i := strings.IndexByte(e, '='); i <= 0 {
			return refuse("environment %q: not NAME=VALUE", e)
		}
	}
	dir := s.spec.Dir
	if req.Dir != "" {
		dir = req.Dir
	}
	s.mu.Lock()
	s.execs++
	s.served = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.execs--
		s.mu.Unlock()
		select {
		case s.execDone <- struct{}{}:
		default:
		}
	}()
	// Our guest becomes the command, and tells one that cannot be started from one that fails.
	guest := sandbox.GuestPath
	if !s.spec.Sandboxed {
		guest = s.spec.Policy.Guest
	}
	st := s.start(append([]string{guest, "exec", "--"}, req.Argv...), wire.MergeEnv(s.spec.Env, req.Env), dir)
	st.Join = s.inside()
	st.Private = wire.WithoutEnv(s.spec.Given, req.Env)
	if s.spec.Sandboxed {
		compile := st.Compile
		st.Compile = func() (*sandbox.Plan, error) {
			plan, err := compile()
			if err == nil && (!filepath.IsAbs(dir) || plan.Explain(dir).Access == sandbox.Hidden) {
				err = fmt.Errorf("%s: not part of the agent's view; use the workspace %s or a folder below a grant", dir, s.spec.Dir)
			}
			return plan, err
		}
	}
	if req.TTY != nil {
		return s.execTTY(ctx, conn, req, st)
	}
	if len(files) != 3 {
		return refuse("a command takes three pipes, got %d descriptors", len(files))
	}
	for _, f := range files {
		// Anything else could be opened again inside by its name in /proc, for more than
		// it was opened for here; a directory would even lead out.
		mode, err := fileType(f)
		if err != nil || mode != unix.S_IFIFO {
			return refuse("a command's stdin, stdout and stderr must be pipes")
		}
	}
	st.Stdin, st.Stdout, st.Stderr = files[0], files[1], files[2]
	process, err := s.run(ctx, st, Placement{Exec: s.lastExec.n.Add(1)}, s.ownGateway())
	for _, f := range files {
		f.Close()
	}
	if err != nil {
		return refuse("%v", s.whyNot(ctx, err))
	}
	if err := writeLine(conn, wire.Reply{Version: wire.Version, OK: true}); err != nil {
		process.Kill()
		return err
	}
	return s.follow(ctx, conn, process)
}

// execTTY gives the command a terminal that is made inside; its master goes to the client.
func (s *Supervisor) execTTY(ctx context.Context, conn *net.UnixConn, req *wire.Request, st launch.Start) error {
	refuse := func(err error) error {
		return writeLine(conn, wire.Reply{Version: wire.Version, Error: err.Error()})
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return refuse(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "terminal")
	defer theirs.Close()
	if err := unix.SetNonblock(pair[0], true); err != nil {
		unix.Close(pair[0])
		return refuse(err)
	}
	ours := os.NewFile(uintptr(pair[0]), "terminal")
	defer ours.Close()
	st.Pass = theirs
	st.Argv = append([]string{st.Argv[0], "pty", "--rows", strconv.Itoa(int(req.TTY.Rows)), "--cols", strconv.Itoa(int(req.TTY.Cols)), strconv.Itoa(wire.ExtraFD), "--"}, st.Argv...)
	stderr, err := newPipe()
	if err != nil {
		return refuse(err)
	}
	defer stderr.close()
	st.Stderr = stderr.w
	process, err := s.run(ctx, st, Placement{Exec: s.lastExec.n.Add(1)}, s.ownGateway())
	if err != nil {
		stderr.closeWrite()
		s.logStderr(stderr.r)
		return refuse(s.whyNot(ctx, err))
	}
	theirs.Close()
	stderr.closeWrite()
	said := make(chan string, 1)
	s.wg.Go(func() { said <- s.logStderr(stderr.r) })
	master, err := receiveMaster(ours)
	if err != nil {
		process.Kill()
		select {
		case last := <-said:
			if last != "" {
				err = errors.New(last)
			}
		case <-time.After(time.Second): // something else holds it
		}
		return refuse(s.whyNot(ctx, fmt.Errorf("no terminal inside: %w", err)))
	}
	defer master.Close()
	reply := []byte(`{"v":` + strconv.Itoa(wire.Version) + `,"ok":true}` + "\n")
	if _, _, err := conn.WriteMsgUnix(reply, unix.UnixRights(int(master.Fd())), nil); err != nil {
		process.Kill()
		return err
	}
	return s.follow(ctx, conn, process)
}

// whyNot is err of a start, unless the agent's end cut it off.
func (s *Supervisor) whyNot(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return fmt.Errorf("agent %s is ending: the command was not started; try again once it has ended, or runs again", s.spec.Agent)
}

// receiveMaster takes the terminal that the guest made.
func receiveMaster(from *os.File) (*os.File, error) {
	if err := from.SetReadDeadline(time.Now().Add(helloTime)); err != nil {
		return nil, err
	}
	raw, err := from.SyscallConn()
	if err != nil {
		return nil, err
	}
	var files []*os.File
	var opErr error
	err = raw.Read(func(fd uintptr) bool {
		buf, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
		n, on, _, _, err := unix.Recvmsg(int(fd), buf, oob, unix.MSG_CMSG_CLOEXEC)
		switch {
		case err == unix.EAGAIN:
			return false
		case err != nil:
			opErr = err
		case n == 0:
			opErr = errors.New("it ended before it had one")
		default:
			files, opErr = launch.Passed(oob[:on])
		}
		return true
	})
	if err = errors.Join(err, opErr); err == nil && len(files) != 1 {
		err = errors.New("it sent none")
	}
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		return nil, err
	}
	// What comes from inside is checked: only a terminal is handed on.
	if _, err := unix.IoctlGetWinsize(int(files[0].Fd()), unix.TIOCGWINSZ); err != nil {
		files[0].Close()
		return nil, fmt.Errorf("it sent no terminal: %w", err)
	}
	return files[0], nil
}

// follow waits for the command's end and tells it; a client that goes away ends it.
func (s *Supervisor) follow(ctx context.Context, conn *net.UnixConn, process *program) error {
	defer process.close()
	gone := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		var b [1]byte
		for {
			if n, err := conn.Read(b[:]); n == 0 || err != nil {
				close(gone)
				return
			}
		}
	}()
	select {
	case <-process.Done():
	case <-gone:
		process.Signal(syscall.SIGHUP)
		process.stop(ctx, 0, execKillGrace)
	case <-ctx.Done():
		process.stop(ctx, 0, execKillGrace)
	}
	<-process.Done()
	process.sweep()
	end := process.End()
	err := writeLine(conn, wire.ExecEnd{Code: end.Code})
	_ = conn.CloseRead() // ends the watcher
	<-watched
	return err
}

func fileType(f *os.File) (uint32, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var st unix.Stat_t
	var serr error
	if err := raw.Control(func(fd uintptr) { serr = unix.Fstat(int(fd), &st) }); err != nil {
		return 0, err
	}
	return st.Mode & unix.S_IFMT, serr
}
