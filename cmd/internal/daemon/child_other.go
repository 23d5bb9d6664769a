//go:build !linux

package daemon

import (
	"context"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"
)

// sealedFile returns an unlinked temporary file, 0600, with content, at offset 0. This
// system has no seals; nobody else can open it. The caller closes it.
func sealedFile(content []byte) (*os.File, error) {
	f, err := os.CreateTemp("", "agentconnect-spec-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	if _, err := f.Write(content); err != nil {
		f.Close()
		return nil, err
	}
	if _, err := f.Seek(0, 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// passCredentials does nothing: the socket's directory is ours alone.
func passCredentials(*net.UnixConn) error { return nil }

func sentBy([]byte, int) bool { return true }

// receiveNow takes one message out of the queue without waiting; size -1: none.
func receiveNow(fd int, buf, _ []byte) (size, oobSize int) {
	n, _, err := syscall.Recvfrom(fd, buf, syscall.MSG_DONTWAIT)
	if err != nil {
		return -1, 0
	}
	return n, 0
}

// waitListenerGone refuses while another process listens on the socket at path.
func waitListenerGone(ctx context.Context, path string, _ time.Duration) error {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil
	}
	c.Close()
	return fmt.Errorf("an older supervisor of this agent still runs; wait until it has ended and start the agent again")
}

// waitProcess returns when the process pid has ended. This system has no descriptor of
// another's process to wait on, so it looks again and again.
func waitProcess(ctx context.Context, pid int) error {
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for alive(pid) {
		select {
		case <-again.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}
