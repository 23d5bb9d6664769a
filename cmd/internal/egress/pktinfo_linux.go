package egress

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// answerFrom is the control message that sends an answer from the address that was asked,
// out of the one that a query came with.
func answerFrom(oob []byte) []byte {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for _, m := range msgs {
		switch {
		case m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			info := *(*unix.Inet4Pktinfo)(unsafe.Pointer(&m.Data[0]))
			return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: info.Addr})
		case m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			info := *(*unix.Inet6Pktinfo)(unsafe.Pointer(&m.Data[0]))
			return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: info.Addr})
		}
	}
	return nil
}
