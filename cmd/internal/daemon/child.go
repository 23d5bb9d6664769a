package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// child is one supervisor process. Its goroutine sends events in order and closes
// the channel after the ended event; the owner must read them all.
type child struct {
	events chan childEvent

	mu         sync.Mutex
	terminated bool
	cancel     context.CancelFunc // ends the wait that precedes the process
	process    *os.Process        // nil before the start and after the end
}

// pid is the process, 0 when there is none.
func (c *child) pid() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.process == nil {
		return 0
	}
	return c.process.Pid
}

// childEvent is one of: started (PID set), a message of the supervisor (Note set),
// ended (End set).
type childEvent struct {
	PID  int
	Note *notification
	End  *ending
}

// ending is how a supervisor ended.
type ending struct {
	Code int    // exit code, -1 after a signal or when it never ran
	Text string // for people, without the last words: "exit status 1", "signal: killed"
}

// childStart is what a supervisor process needs.
type childStart struct {
	Program string
	Spec    *wire.Spec
	Env     []string
	Notify  string // path of its own notification socket
	Stderr  io.WriteCloser
}

// stderrGrace is how long the pipe of a supervisor's messages may outlive it, where
// something it started kept the pipe open.
const stderrGrace = 2 * time.Second

// startChild returns at once; what becomes of the child comes as events.
func startChild(s childStart) *child {
	ctx, cancel := context.WithCancel(context.Background())
	c := &child{events: make(chan childEvent), cancel: cancel}
	go func() {
		defer close(c.events)
		defer cancel()
		defer s.Stderr.Close()
		end := c.run(ctx, s)
		c.events <- childEvent{End: &end}
	}()
	return c
}

func (c *child) run(ctx context.Context, s childStart) ending {
	failed := func(err error) ending { return ending{Code: -1, Text: err.Error()} }
	// After a crash of the daemon its supervisors stop by themselves, which takes
	// until their runtime has ended. Two runtimes of one agent must not meet.
	if err := waitListenerGone(ctx, s.Spec.Socket, patience(s.Spec)); err != nil {
		return failed(err)
	}
	defer ClearInside(s.Spec.Socket)
	spec, err := json.Marshal(s.Spec)
	if err != nil {
		return failed(err)
	}
	sealed, err := sealedFile(spec)
	if err != nil {
		return failed(fmt.Errorf("sealed spec: %w", err))
	}
	defer sealed.Close()
	notify, err := listenNotify(s.Notify)
	if err != nil {
		return failed(err)
	}
	defer notify.Close()
	lifeRead, lifeWrite, err := os.Pipe()
	if err != nil {
		return failed(err)
	}
	// Held open for as long as the child may live: its end of file says that we are gone.
	defer lifeWrite.Close()
	defer lifeRead.Close()

	cmd := &exec.Cmd{
		Path:       s.Program,
		Args:       []string{s.Program},
		Env:        append([]string{"NOTIFY_SOCKET=" + s.Notify}, s.Env...),
		Dir:        "/",
		Stdout:     s.Stderr,
		Stderr:     s.Stderr,
		ExtraFiles: []*os.File{sealed, lifeRead},
		WaitDelay:  stderrGrace,
		// A session of its own: Ctrl-C in the daemon's terminal is for the daemon,
		// which then stops its agents gracefully.
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := c.start(cmd); err != nil {
		return failed(err)
	}
	pid := cmd.Process.Pid
	c.events <- childEvent{PID: pid}

	read := make(chan struct{})
	go func() {
		defer close(read)
		notify.Receive(pid, func(n notification) { c.events <- childEvent{Note: &n} })
	}()
	err = cmd.Wait()
	c.mu.Lock()
	c.process = nil
	c.mu.Unlock()
	// The last words lie in the socket's queue when the process is gone already.
	notify.Finish()
	<-read
	return endingOf(cmd.ProcessState, err)
}

// start starts cmd unless the child was told to end before.
func (c *child) start(cmd *exec.Cmd) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.terminated {
		return errors.New("stopped before its supervisor started")
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	c.process = cmd.Process
	return nil
}

// Terminate asks for a graceful stop.
func (c *child) Terminate() { c.end(syscall.SIGTERM) }

// Kill ends the supervisor at once; its boundary dies with it.
func (c *child) Kill() { c.end(syscall.SIGKILL) }

func (c *child) end(sig syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.terminated = true
	c.cancel()
	if c.process != nil {
		// os.Process holds a pidfd where the kernel has them, so this cannot hit another process.
		c.process.Signal(sig)
	}
}

func endingOf(st *os.ProcessState, err error) ending {
	if st == nil {
		return ending{Code: -1, Text: fmt.Sprint(err)}
	}
	return ending{Code: st.ExitCode(), Text: st.String()}
}

// patience is how long a supervisor may take from SIGTERM to its end by its own account.
func patience(s *wire.Spec) time.Duration {
	return time.Duration(s.StopGrace) + time.Duration(s.KillGrace)
}

// notification is one message of the sd_notify protocol, what we understand of it.
type notification struct {
	Ready    bool
	Stopping bool
	Status   string
	HasState bool // Status was in the message
}

// parseNotification reads a datagram of KEY=VALUE lines. Unknown keys are for others.
func parseNotification(b []byte) notification {
	var n notification
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		switch key {
		case "READY":
			n.Ready = n.Ready || value == "1"
		case "STOPPING":
			n.Stopping = n.Stopping || value == "1"
		case "STATUS":
			n.Status, n.HasState = printable(value), true
		}
	}
	return n
}

// maxNotification bounds one datagram, bytes; longer ones are cut.
const maxNotification = 8 << 10

// notifySocket receives the messages of one supervisor.
type notifySocket struct {
	path string
	conn *net.UnixConn
}

func listenNotify(path string) (*notifySocket, error) {
	// The directory is ours alone (0700) and so is its lock: what lies here is left over.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: path})
	if err != nil {
		return nil, err
	}
	n := &notifySocket{path: path, conn: conn}
	if err := os.Chmod(path, 0o600); err != nil {
		n.Close()
		return nil, err
	}
	if err := passCredentials(conn); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// Receive calls f for each message of the process pid until Finish, and then for
// those that still lie in the queue.
func (n *notifySocket) Receive(pid int, f func(notification)) {
	buf, oob := make([]byte, maxNotification), make([]byte, 256)
	for {
		size, oobSize, _, _, err := n.conn.ReadMsgUnix(buf, oob)
		if err != nil {
			break
		}
		if sentBy(oob[:oobSize], pid) {
			f(parseNotification(buf[:size]))
		}
	}
	raw, err := n.conn.SyscallConn()
	if err != nil {
		return
	}
	for {
		size, from := -1, false
		// Control, not Read: the deadline that Finish set would refuse a Read.
		_ = raw.Control(func(fd uintptr) {
			var oobSize int
			size, oobSize = receiveNow(int(fd), buf, oob)
			from = size >= 0 && sentBy(oob[:oobSize], pid)
		})
		if size < 0 {
			return
		}
		if from {
			f(parseNotification(buf[:size]))
		}
	}
}

// Finish makes Receive return when the queue is empty.
func (n *notifySocket) Finish() { n.conn.SetReadDeadline(time.Unix(1, 0)) }

func (n *notifySocket) Close() {
	n.conn.Close()
	os.Remove(n.path)
}
