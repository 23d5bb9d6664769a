package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/peer"
)

// sealedFile returns a memory file with content, at offset 0, that nobody can change
// any more: what the daemon checked is what the supervisor reads. The caller closes it.
func sealedFile(content []byte) (*os.File, error) {
	// MFD_NOEXEC_SEAL (Linux 6.3) first: some hosts refuse memory files without it.
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("agentconnect-spec", flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate("agentconnect-spec", flags)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), "agentconnect-spec")
	if _, err := f.Write(content); err != nil {
		f.Close()
		return nil, err
	}
	if _, err := f.Seek(0, 0); err != nil {
		f.Close()
		return nil, err
	}
	seals := unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		f.Close()
		return nil, fmt.Errorf("seal: %w", err)
	}
	return f, nil
}

// passCredentials makes the kernel say who sent each message.
func passCredentials(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var sockErr error
	if err := raw.Control(func(fd uintptr) {
		sockErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
	}); err != nil {
		return err
	}
	return sockErr
}

// sentBy reports whether the control data name pid as the sender: a runtime that the
// operator runs without a boundary must not speak in its supervisor's name by accident.
func sentBy(oob []byte, pid int) bool {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return false
	}
	ok := false
	for i := range messages {
		if cred, err := unix.ParseUnixCredentials(&messages[i]); err == nil {
			ok = int(cred.Pid) == pid
		}
		// Descriptors that came along uninvited are closed, or they would pile up here.
		if fds, err := unix.ParseUnixRights(&messages[i]); err == nil {
			for _, fd := range fds {
				unix.Close(fd)
			}
		}
	}
	return ok
}

// receiveNow takes one message out of the queue without waiting; size -1: none.
func receiveNow(fd int, buf, oob []byte) (size, oobSize int) {
	for {
		n, oobn, _, _, err := unix.Recvmsg(fd, buf, oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return -1, 0
		}
		return n, oobn
	}
}

// waitListenerGone returns when no process listens on the socket at path: at once if
// none does, else when that process has ended.
func waitListenerGone(ctx context.Context, path string, patience time.Duration) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil // nothing there, or left over without a listener
	}
	defer c.Close()
	pid, err := listenerPID(c.(*net.UnixConn))
	if err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, patience+leftoverMargin)
	defer cancel()
	err = waitProcess(wait, pid)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return errors.New("stopped while waiting for an older supervisor to end")
	case wait.Err() != nil:
		return fmt.Errorf("an older supervisor (pid %d) of this agent still runs; end it with `kill %d` and start the agent again", pid, pid)
	}
	return fmt.Errorf("an older supervisor (pid %d) of this agent: %w", pid, err)
}

// waitProcess returns when the process pid has ended, at once if there is none.
func waitProcess(ctx context.Context, pid int) error {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("pidfd_open: %w", err)
	}
	// A non-blocking pidfd is in the runtime's poller: readable when the process has ended.
	process := os.NewFile(uintptr(fd), "pidfd")
	defer process.Close()
	raw, err := process.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { process.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	err = raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n == 1
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// leftoverMargin is what an older supervisor gets beyond its own graces.
const leftoverMargin = 5 * time.Second

func listenerPID(c *net.UnixConn) (int, error) {
	if err := peer.Check(c); err != nil {
		return 0, fmt.Errorf("%s: %w; remove it", c.RemoteAddr(), err)
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	pid := 0
	var sockErr error
	if err := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); sockErr == nil {
			pid = int(cred.Pid)
		}
	}); err != nil {
		return 0, err
	}
	return pid, sockErr
}
