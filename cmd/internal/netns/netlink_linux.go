package netns

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

// The few netlink messages that a set-up takes are written by hand: the launcher starts
// once per program, and each library would cost every one of these starts.

var native = binary.NativeEndian

func u16(n uint16) []byte     { return native.AppendUint16(nil, n) }
func u32(n uint32) []byte     { return native.AppendUint32(nil, n) }
func be32(n uint32) []byte    { return binary.BigEndian.AppendUint32(nil, n) }
func cstring(s string) []byte { return append([]byte(s), 0) }

// attr is one attribute; of several parts, each padded by itself, it is a nest.
func attr(typ uint16, parts ...[]byte) []byte {
	size := unix.SizeofNlAttr
	for i, p := range parts {
		if i < len(parts)-1 {
			size += align(len(p))
		} else {
			size += len(p)
		}
	}
	out := append(u16(uint16(size)), u16(typ)...)
	for _, p := range parts {
		out = pad(append(out, p...))
	}
	return pad(out)
}

func nest(typ uint16, parts ...[]byte) []byte { return attr(typ|unix.NLA_F_NESTED, parts...) }

func align(n int) int { return (n + 3) &^ 3 }

func pad(b []byte) []byte {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// batch is a run of messages that the kernel answers one by one.
type batch struct {
	b    []byte
	seq  uint32
	acks int
}

func (t *batch) add(typ, flags uint16, parts ...[]byte) {
	size := unix.SizeofNlMsghdr
	for _, p := range parts {
		size += align(len(p))
	}
	t.seq++
	if flags&unix.NLM_F_ACK != 0 {
		t.acks++
	}
	t.b = append(t.b, u32(uint32(size))...)
	t.b = append(t.b, u16(typ)...)
	t.b = append(t.b, u16(flags|unix.NLM_F_REQUEST)...)
	t.b = append(t.b, u32(t.seq)...)
	t.b = append(t.b, u32(0)...)
	for _, p := range parts {
		t.b = pad(append(t.b, p...))
	}
}

// send sends all and returns the first error that the kernel answers. It answers while it
// is told, so nothing here waits.
func (t *batch) send(protocol int) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, t.b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 16<<10)
	for got := 0; got < t.acks; {
		n, from, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if nl, ok := from.(*unix.SockaddrNetlink); !ok || nl.Pid != 0 {
			continue // not the kernel's
		}
		for b := buf[:n]; len(b) >= unix.SizeofNlMsghdr; {
			size := int(native.Uint32(b))
			if size < unix.SizeofNlMsghdr || size > len(b) {
				return errors.New("malformed answer of the kernel")
			}
			if native.Uint16(b[4:]) == unix.NLMSG_ERROR {
				if size < unix.SizeofNlMsghdr+4 {
					return errors.New("malformed answer of the kernel")
				}
				if code := int32(native.Uint32(b[unix.SizeofNlMsghdr:])); code != 0 {
					return unix.Errno(-code)
				}
				got++
			}
			b = b[min(align(size), len(b)):]
		}
	}
	return nil
}
