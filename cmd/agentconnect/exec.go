// agent exec and agent shell: a command inside the agent's boundary.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// drain is how long output may go on after the command's end, where something that it
// left behind holds the pipe open. Who is slow to take what was said has all the time.
const drain = time.Second

// What may lie between a command and us, in bytes: in the buffer of io.Copy, and in a terminal or
// a pipe, where it does not say what it holds.
const (
	inCopy = 32 << 10
	inPipe = 64 << 10
)

// errLater ends a copy of what was said after the command's end.
var errLater = errors.New("said after the command's end")

// taker is a writer that tells whether somebody is waited for who takes what is written.
type taker struct {
	w     io.Writer
	n     atomic.Int64          // writes begun and ended: odd during one
	lost  atomic.Pointer[error] // why what was said could not be written
	taken atomic.Int64          // bytes
	most  atomic.Int64          // bytes that were said before the command's end, at most; 0: it goes on
}

func (t *taker) Write(p []byte) (int, error) {
	if most := t.most.Load(); most > 0 && t.taken.Load() >= most {
		return 0, errLater
	}
	t.n.Add(1)
	defer t.n.Add(1)
	n, err := t.w.Write(p)
	t.taken.Add(int64(n))
	if err != nil {
		t.lost.Store(&err)
	}
	return n, err
}

// ended is said when the command has, and left bytes lay between it and us, at most: what comes
// after them is not its own, and may come without end.
func (t *taker) ended(left int) { t.most.Store(t.taken.Load() + inCopy + int64(left)) }

// drained waits for the copies to the takers, each of which says on copied that it is over.
func drained(ctx context.Context, copied <-chan struct{}, takers ...*taker) {
	interrupted := ctx.Done()
	if ctx.Err() != nil {
		interrupted = nil // it is what ended the command
	}
	was := make([]int64, len(takers))
	late := time.NewTimer(drain)
	defer late.Stop()
	for left := len(takers); left > 0; {
		select {
		case <-copied:
			left--
			continue
		case <-interrupted:
			return
		case <-late.C:
		}
		busy := false
		for i, t := range takers {
			now := t.n.Load()
			busy = busy || now%2 == 1 || was[i]%2 == 1 && now != was[i]
			was[i] = now
		}
		if !busy || ctx.Err() != nil {
			return
		}
		late.Reset(drain)
	}
}

func (a *app) agentExec() *cobra.Command {
	c := &cobra.Command{
		Use: "exec ID -- CMD [ARG]…", Short: "run a command inside the agent's boundary", Args: a.idArgs(2, -1),
		RunE: func(c *cobra.Command, args []string) error {
			if a.json {
				return &usageError{text: "--json is not for exec: its output is the command's own", see: c.CommandPath()}
			}
			argv, err := commandOf(c, args[1:])
			if err != nil {
				return err
			}
			if len(argv) == 0 {
				return &usageError{text: "give a command after --", see: c.CommandPath()}
			}
			where, err := a.execWhere(args[0])
			if err != nil {
				return err
			}
			if argv[0] == "" { // as in a shell
				fmt.Fprintln(a.err, `agentconnect: "": not found`)
				return exitStatus(127)
			}
			return a.exec(c.Context(), where, argv)
		},
	}
	c.Flags().SetInterspersed(false) // what follows the id is the command's
	return c
}

// commandOf drops the "--" before a command; one that follows is the command's own. What would reach
// the supervisor as another word, since JSON holds UTF-8 alone, is an error.
func commandOf(c *cobra.Command, args []string) ([]string, error) {
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	for _, arg := range args {
		if !utf8.ValidString(arg) {
			return nil, &usageError{text: fmt.Sprintf("%q is not UTF-8; have a shell inside write it: sh -c with printf", arg), see: c.CommandPath()}
		}
	}
	return args, nil
}

// execWhere is where commands of the agent are served.
func (a *app) execWhere(id string) (where, error) {
	s, err := a.site()
	if err != nil {
		return nil, err
	}
	if err := s.known(id); err != nil {
		return nil, err
	}
	return func(ctx context.Context) (*control.Attach, error) { return s.client().Exec(ctx, id) }, nil
}

// exec runs argv on pipes of our own making. Our own descriptors never go inside: one
// opened for reading could be opened again for writing there, by its name in /proc.
func (a *app) exec(ctx context.Context, at where, argv []string) error {
	var ours, theirs [3]*os.File
	defer func() {
		closeAll(nonNil(ours[:]))
		closeAll(nonNil(theirs[:]))
	}()
	for i := range ours {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		if i == 0 {
			theirs[i], ours[i] = r, w
		} else {
			ours[i], theirs[i] = r, w
		}
	}
	c, extra, err := reach(ctx, at, wire.Request{Op: wire.OpExec, Client: "exec", Argv: argv}, theirs[:]...)
	closeAll(extra)
	if err != nil {
		return err
	}
	defer c.Close()
	for i := range theirs {
		theirs[i].Close()
		theirs[i] = nil
	}
	// Ends with the process if stdin never does: a read of a terminal cannot be taken back.
	var unread atomic.Pointer[error]
	go func() {
		from := &source{r: a.in}
		_, _ = io.Copy(ours[0], from)
		if err := from.err; err != nil && !errors.Is(err, io.EOF) && !a.without(err) {
			unread.Store(&err) // before the command can take what it got for all of it
		}
		ours[0].Close()
	}()
	copied := make(chan struct{}, 2)
	takers := []*taker{{w: a.out}, {w: a.err}}
	for i, to := range takers {
		go func() {
			_, _ = io.Copy(to, ours[i+1])
			ours[i+1].Close() // our reader is gone: so is the command's
			copied <- struct{}{}
		}()
	}
	end, err := execEnd(ctx, c)
	for i, t := range takers {
		t.ended(held(ours[i+1]))
	}
	drained(ctx, copied, takers...)
	err = execResult(ctx, end, err)
	const out = "what the command said is not written"
	for _, lost := range []struct {
		what string
		why  *error
	}{{out, takers[0].lost.Load()}, {out, takers[1].lost.Load()}, {"the command got a part of its input, not all", unread.Load()}} {
		switch {
		case lost.why == nil:
		case err == nil: // nobody must take a part for all of it
			err = fmt.Errorf("%s: %w", lost.what, *lost.why)
		default:
			a.warn("%s: %v", lost.what, *lost.why)
		}
	}
	return err
}

// source tells an error of reading from one of writing what was read.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (n int, err error) {
	n, s.err = s.r.Read(p)
	return n, s.err
}

// without reports whether err of reading stdin says no more than that we have none, or are behind a
// terminal that has gone.
func (a *app) without(err error) bool {
	return errors.Is(err, syscall.EBADF) || errors.Is(err, syscall.EIO) && terminal(a.in)
}

func nonNil(files []*os.File) []*os.File {
	var out []*os.File
	for _, f := range files {
		if f != nil {
			out = append(out, f)
		}
	}
	return out
}

// execEnd waits for the command's end. When ctx ends first, it closes our side, which
// ends the command, and waits on for its code.
func execEnd(ctx context.Context, c *net.UnixConn) (wire.ExecEnd, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.CloseWrite() })
	defer stop()
	var end wire.ExecEnd
	line, extra, err := readLine(c)
	closeAll(extra)
	if err != nil {
		return end, err
	}
	return end, json.Unmarshal(line, &end)
}

func execResult(ctx context.Context, end wire.ExecEnd, err error) error {
	switch {
	case ctx.Err() != nil:
		var sig syscall.Signal = syscall.SIGTERM
		if n := code(context.Cause(ctx)); n > 128 {
			sig = syscall.Signal(n - 128)
		}
		return exitStatus(128 + int(sig))
	case err != nil:
		return fmt.Errorf("the command's end is not known: %w", err)
	case end.Error != "":
		return errors.New(oneLine(end.Error))
	case end.Code != 0:
		return exitStatus(end.Code)
	}
	return nil
}

func (a *app) agentShell() *cobra.Command {
	c := &cobra.Command{
		Use: "shell ID [-- CMD [ARG]…]", Short: "a shell, or a command, on a terminal inside the agent's boundary", Args: a.idArgs(1, -1),
		RunE: func(c *cobra.Command, args []string) error {
			in, ok := a.in.(*os.File)
			if a.json || !ok || !terminal(in) || !terminal(a.out) {
				return &usageError{text: "a shell needs a terminal; use `agentconnect agent exec " + args[0] + " -- CMD`", see: c.CommandPath()}
			}
			argv, err := commandOf(c, args[1:])
			if err != nil {
				return err
			}
			if len(argv) == 0 {
				argv = []string{"/bin/sh", "-c", `exec "${SHELL:-/bin/sh}"`}
			}
			where, err := a.execWhere(args[0])
			if err != nil {
				return err
			}
			return a.shell(c.Context(), where, in, argv)
		},
	}
	c.Flags().SetInterspersed(false)
	return c
}

// shell joins our terminal to one that lies inside. The two are never the same: what is
// typed into the one inside by its programs does not reach ours.
func (a *app) shell(ctx context.Context, at where, in *os.File, argv []string) error {
	req := wire.Request{Op: wire.OpExec, Client: "shell", Argv: argv, TTY: windowSize(in)}
	if t := a.getenv("TERM"); t != "" {
		req.Env = []string{"TERM=" + t}
	}
	c, files, err := reach(ctx, at, req)
	if err != nil {
		return err
	}
	defer c.Close()
	defer closeAll(files)
	if len(files) != 1 {
		return fmt.Errorf("the supervisor sent %d terminals, want 1", len(files))
	}
	master := files[0]
	restore, err := makeRaw(in)
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	defer restore()

	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	over := make(chan struct{})
	sized := make(chan struct{})
	go func() {
		defer close(sized)
		for {
			setSize(master, windowSize(in)) // also once at the start: it may have changed meanwhile
			select {
			case <-resized:
			case <-over:
				return
			}
		}
	}()
	// Ends with the process: a read of a terminal cannot be taken back.
	go func() { _, _ = io.Copy(&typed{w: master, over: over}, in) }()
	copied := make(chan struct{})
	out := &taker{w: a.out}
	go func() {
		defer close(copied)
		_, _ = io.Copy(out, master) // EIO when the last program inside has gone
	}()
	end, err := execEnd(ctx, c)
	close(over)
	out.ended(inPipe)
	<-sized
	drained(ctx, copied, out)
	return execResult(ctx, end, err)
}

// typed is the terminal inside for as long as the command runs: what is typed after it is not for
// whatever else inside may hold that terminal.
type typed struct {
	w    io.Writer
	over <-chan struct{}
}

func (t *typed) Write(p []byte) (int, error) {
	select {
	case <-t.over:
		return 0, errLater
	default:
		return t.w.Write(p)
	}
}

// makeRaw makes the terminal raw until restore is called, or a signal ends us: SIGHUP, or the
// second of those that end a command.
func makeRaw(in *os.File) (restore func(), err error) {
	old, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return nil, err
	}
	fatal := make(chan os.Signal, 4)
	signal.Notify(fatal, endings...)
	if !signal.Ignored(syscall.SIGHUP) {
		signal.Notify(fatal, syscall.SIGHUP)
	}
	go func() {
		first := true
		for s := range fatal {
			if first && s != syscall.SIGHUP {
				first = false
				continue
			}
			_ = term.Restore(int(in.Fd()), old)
			signal.Reset(s)
			_ = syscall.Kill(os.Getpid(), s.(syscall.Signal))
		}
	}()
	return func() {
		signal.Stop(fatal)
		close(fatal)
		_ = term.Restore(int(in.Fd()), old)
	}, nil
}

func windowSize(f *os.File) *wire.WinSize {
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil || cols <= 0 || rows <= 0 || cols > 1<<15 || rows > 1<<15 {
		return &wire.WinSize{Rows: 24, Cols: 80}
	}
	return &wire.WinSize{Rows: uint16(rows), Cols: uint16(cols)}
}

func setSize(master *os.File, s *wire.WinSize) {
	raw, err := master.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: s.Rows, Col: s.Cols})
	})
}
