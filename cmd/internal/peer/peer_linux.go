package peer

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// UID returns the user id of the process at the other end of a Unix connection,
// as the kernel recorded it at connect or listen.
func UID(c *net.UnixConn) (int, error) {
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
		return -1, fmt.Errorf("credentials of the peer: %w", sockErr)
	}
	return int(cred.Uid), nil
}
