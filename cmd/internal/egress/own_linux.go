package egress

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// ledHere asks the kernel whether what is sent to a stays on this machine though no device has a: by
// a route of type local, as clouds' agents make them for the addresses of a balancer. One that makes
// all there is local is passed over: it is that of a network namespace such as agents have.
func ledHere(a netip.Addr) (bool, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	dst := a.AsSlice()
	family := byte(unix.AF_INET)
	if a.Is6() {
		family = unix.AF_INET6
	}
	put := binary.NativeEndian
	b := make([]byte, 4096)
	size := unix.SizeofNlMsghdr + unix.SizeofRtMsg + unix.SizeofRtAttr + len(dst)
	put.PutUint32(b, uint32(size))
	put.PutUint16(b[4:], unix.RTM_GETROUTE)
	put.PutUint16(b[6:], unix.NLM_F_REQUEST)
	// rtmsg: family, lengths of destination and source, tos, table, protocol, scope, type, flags
	msg := b[unix.SizeofNlMsghdr:]
	msg[0], msg[1] = family, byte(8*len(dst))
	put.PutUint32(msg[8:], unix.RTM_F_FIB_MATCH) // of a route tell its own prefix
	attr := msg[unix.SizeofRtMsg:]
	put.PutUint16(attr, uint16(unix.SizeofRtAttr+len(dst)))
	put.PutUint16(attr[2:], unix.RTA_DST)
	copy(attr[unix.SizeofRtAttr:], dst)
	if err := unix.Sendto(fd, b[:size], 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return false, os.NewSyscallError("sendto", err)
	}
	n, err := recv(fd, b, 0)
	switch {
	case err != nil:
		return false, os.NewSyscallError("recvfrom", err)
	case n >= unix.SizeofNlMsghdr && put.Uint16(b[4:]) == unix.NLMSG_ERROR:
		return false, nil // there is no way there
	case n < unix.SizeofNlMsghdr+unix.SizeofRtMsg || put.Uint16(b[4:]) != unix.RTM_NEWROUTE:
		return false, errors.New("the kernel's answer about a route is none")
	}
	return msg[1] > 0 && msg[7] == unix.RTN_LOCAL, nil
}
