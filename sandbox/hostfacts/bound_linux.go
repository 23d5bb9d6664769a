package hostfacts

import (
	"bytes"
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// The words of sock_diag(7) that are needed here.
const (
	diagByFamily  = 20
	diagShow      = diagShowName | diagShowVFS
	diagShowName  = 1 << 0
	diagShowVFS   = 1 << 1
	diagName      = 0
	diagVFS       = 1
	diagRequest   = 24 // struct unix_diag_req
	diagMessage   = 16 // struct unix_diag_msg
	netlinkHeader = 16
)

// boundTo gives, by the name that sockets of this network namespace were bound by, the inodes of
// the files that this made. A kernel that does not tell gives none.
func boundTo() map[string][]uint32 {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	native := binary.NativeEndian
	req := make([]byte, netlinkHeader+diagRequest)
	native.PutUint32(req[0:], netlinkHeader+diagRequest)
	native.PutUint16(req[4:], diagByFamily)
	native.PutUint16(req[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	req[netlinkHeader] = unix.AF_UNIX
	native.PutUint32(req[netlinkHeader+4:], ^uint32(0)) // in each state
	native.PutUint32(req[netlinkHeader+12:], diagShow)
	if err := unix.Sendto(fd, req, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil
	}
	bound := map[string][]uint32{}
	for buf := make([]byte, 64<<10); ; {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n == 0 {
			return nil
		}
		for b := buf[:n]; len(b) >= netlinkHeader; {
			size := int(native.Uint32(b))
			if size < netlinkHeader || size > len(b) {
				return nil
			}
			switch native.Uint16(b[4:]) {
			case unix.NLMSG_DONE:
				return bound
			case diagByFamily:
				if name, ino, ok := parseBound(b[netlinkHeader:size]); ok {
					bound[name] = append(bound[name], ino)
				}
			default:
				return nil // an error: the kernel lacks it
			}
			b = b[min(align4(size), len(b)):]
		}
	}
}

// parseBound reads one socket: its name, and the inode of the file that it was bound to.
func parseBound(b []byte) (name string, ino uint32, ok bool) {
	if len(b) < diagMessage {
		return "", 0, false
	}
	native := binary.NativeEndian
	for b = b[diagMessage:]; len(b) >= 4; {
		size := int(native.Uint16(b))
		if size < 4 || size > len(b) {
			return "", 0, false
		}
		switch value := b[4:size]; native.Uint16(b[2:]) {
		case diagName:
			value, _, _ = bytes.Cut(value, []byte{0})
			name = string(value)
		case diagVFS:
			if len(value) >= 4 {
				ino, ok = native.Uint32(value), true
			}
		}
		b = b[min(align4(size), len(b)):]
	}
	return name, ino, ok && name != ""
}

func align4(n int) int { return (n + 3) &^ 3 }
