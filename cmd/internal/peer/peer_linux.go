package peer

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// UID returns the user id of the process at the other end of a Unix connection,
// as the kernel recorded it at connect or listen.
func UID(c *net.UnixConn) (int, error) {
	cred, err := credentials(c)
	if err != nil {
		return -1, err
	}
	return int(cred.Uid), nil
}

// PID returns the process at the other end of a Unix connection, as the kernel recorded it
// at connect or listen. It may have ended since.
func PID(c *net.UnixConn) (int, error) {
	cred, err := credentials(c)
	if err != nil {
		return -1, err
	}
	return int(cred.Pid), nil
}

func credentials(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var sockErr error
	if err := raw.Control(func(fd uintptr) {
		cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, err
	}
	if sockErr != nil {
		return nil, fmt.Errorf("credentials of the peer: %w", sockErr)
	}
	return cred, nil
}
