// Package listeners is the outer half of package netns: the sockets that a launcher passed
// out of a sandbox's network namespace, and where each connection that arrives on them
// wanted to go. It judges none.
package listeners

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"agentconnect.md/sandbox/cmd/internal/netns"
	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// most is how many connections of one sandbox are open at once; more wait in the kernel.
const most = 4096

// Set is the sockets of one network namespace.
type Set struct {
	// Redirected: every connection arrives; otherwise those to the ports that were asked for.
	Redirected bool
	// Weaker says why not.
	Weaker string
	// UDP and TCP serve names, port 53 of every address.
	UDP []*net.UDPConn
	TCP []net.Listener

	conns []*tcp.Listener
	slots chan struct{} // one for each connection that is open
	kept  []bool        // of conns: a connection's local address is where it wanted to go
	wg    sync.WaitGroup
}

// New takes over the descriptors that a set-up gave; it closes files.
func New(kinds string, files []*os.File, weaker string) (*Set, error) {
	s := &Set{Redirected: weaker == "", Weaker: weaker, slots: make(chan struct{}, most)}
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	if len(kinds) != len(files) {
		return nil, fmt.Errorf("the launcher passed %d sockets and named %d", len(files), len(kinds))
	}
	for i, kind := range kinds {
		if err := s.take(kind, files[i]); err != nil {
			s.Close()
			return nil, fmt.Errorf("a socket that the launcher passed: %w", err)
		}
	}
	if len(s.UDP) == 0 || len(s.TCP) == 0 || s.Redirected && len(s.conns) == 0 {
		s.Close()
		return nil, errors.New("the launcher passed no sockets")
	}
	return s, nil
}

func (s *Set) take(kind rune, f *os.File) error {
	if kind == netns.NameUDP {
		p, err := net.FilePacketConn(f)
		if err != nil {
			return err
		}
		udp, ok := p.(*net.UDPConn)
		if !ok {
			_ = p.Close()
			return fmt.Errorf("%T in place of a UDP socket", p)
		}
		s.UDP = append(s.UDP, udp)
		return nil
	}
	l, err := net.FileListener(f)
	if err != nil {
		return err
	}
	stream, ok := l.(*net.TCPListener)
	switch {
	case !ok:
		err = fmt.Errorf("%T in place of a TCP listener", l)
	case kind == netns.NameTCP:
		s.TCP = append(s.TCP, stream)
	case kind == netns.Assigned && s.Redirected, kind == netns.Redirected && s.Redirected, kind == netns.Port && !s.Redirected:
		var conns *tcp.Listener
		if conns, err = tcp.Listen(stream); err != nil {
			return err
		}
		s.conns, s.kept = append(s.conns, conns), append(s.kept, kind != netns.Redirected)
	default:
		err = fmt.Errorf("a kind %q that does not belong", kind)
	}
	if err != nil {
		l.Close()
	}
	return err
}

// Accept gives each connection to handle, in a goroutine of its own, until the set is
// closed or ctx ends; then it waits for them. handle owns the connection. One that wanted to go to
// the loopback, or of which that is not known, is reset.
func (s *Set) Accept(ctx context.Context, handle func(ctx context.Context, conn tcp.Conn, dst netip.AddrPort)) {
	for i, l := range s.conns {
		s.wg.Go(func() {
			for {
				select {
				case s.slots <- struct{}{}:
				case <-ctx.Done():
					return
				}
				conn, err := l.Accept()
				if err != nil {
					<-s.slots
				}
				if errors.Is(err, os.ErrClosed) {
					return
				}
				if err != nil {
					// Out of descriptors: wait for one to come free, not in a tight loop.
					select {
					case <-ctx.Done():
						return
					case <-time.After(50 * time.Millisecond):
					}
					continue
				}
				dst, err := destination(conn, s.kept[i])
				if err != nil {
					tcp.Reset(conn)
					<-s.slots
					continue
				}
				s.wg.Go(func() {
					defer func() { <-s.slots }()
					handle(ctx, conn, dst)
				})
			}
		})
	}
	s.wg.Wait()
}

// Close closes every socket that is still open.
func (s *Set) Close() {
	if s == nil {
		return
	}
	for _, l := range s.conns {
		_ = l.Close()
	}
	for _, u := range s.UDP {
		u.Close()
	}
	for _, l := range s.TCP {
		l.Close()
	}
}

// destination is where a connection wanted to go.
func destination(conn tcp.Conn, kept bool) (netip.AddrPort, error) {
	local := addrPort(conn.LocalAddr())
	dst := local
	if !kept {
		var err error
		if dst, err = original(conn, local.Addr().Is6()); err != nil {
			return netip.AddrPort{}, err
		}
	}
	return judged(dst)
}

// judged passes on what can be a destination at all.
func judged(dst netip.AddrPort) (netip.AddrPort, error) {
	a := dst.Addr().Unmap().WithZone("")
	dst = netip.AddrPortFrom(a, dst.Port())
	if !a.IsValid() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || dst.Port() == 0 {
		return netip.AddrPort{}, fmt.Errorf("%s is no destination", dst)
	}
	return dst, nil
}

func addrPort(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	p := t.AddrPort()
	return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
}
