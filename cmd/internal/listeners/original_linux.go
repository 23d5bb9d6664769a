package listeners

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// ip6tOriginalDst is IP6T_SO_ORIGINAL_DST, which x/sys lacks; it has IPv4's number.
const ip6tOriginalDst = unix.SO_ORIGINAL_DST

// original asks the kernel where a redirected connection wanted to go.
func original(conn tcp.Conn, six bool) (dst netip.AddrPort, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return dst, err
	}
	var opErr error
	err = raw.Control(func(fd uintptr) {
		// x/sys asks for no sockaddr by getsockopt. These two of its calls give as many bytes
		// back as a sockaddr_in and a sockaddr_in6 have, or more.
		if six {
			var v *unix.IPv6MTUInfo
			if v, opErr = unix.GetsockoptIPv6MTUInfo(int(fd), unix.IPPROTO_IPV6, ip6tOriginalDst); opErr == nil {
				dst = netip.AddrPortFrom(netip.AddrFrom16(v.Addr.Addr), swap(v.Addr.Port))
			}
			return
		}
		var v *unix.IPv6Mreq
		if v, opErr = unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, unix.SO_ORIGINAL_DST); opErr == nil {
			// sockaddr_in: family, port, address
			b := v.Multiaddr
			dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4]))
		}
	})
	if err == nil {
		err = opErr
	}
	if err != nil {
		return dst, fmt.Errorf("original destination: %w", err)
	}
	return dst, nil
}

// swap turns a port in network order, read as a native number, into the port.
func swap(n uint16) uint16 {
	return binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, n))
}
