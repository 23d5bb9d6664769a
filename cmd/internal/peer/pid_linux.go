package peer

import (
	"net"

	"golang.org/x/sys/unix"
)

// PID returns the process at the other end of a Unix connection, as the kernel recorded it
// at connect or listen. It may have ended since.
func PID(c *net.UnixConn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	var cred *unix.Ucred
	var sockErr error
	if err := raw.Control(func(fd uintptr) {
		cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return -1, err
	}
	if sockErr != nil {
		return -1, sockErr
	}
	return int(cred.Pid), nil
}
