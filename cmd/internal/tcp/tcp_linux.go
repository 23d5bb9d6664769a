package tcp

import (
	"errors"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// New makes a Conn of a TCP socket that does not block. It owns fd, and sets nothing on it. Errors of
// reading and writing are *os.PathError.
func New(fd int) Conn { return conn{os.NewFile(uintptr(fd), "tcp")} }

type conn struct{ f *os.File }

func (c conn) Read(b []byte) (int, error)            { return c.f.Read(b) }
func (c conn) Write(b []byte) (int, error)           { return c.f.Write(b) }
func (c conn) Close() error                          { return c.f.Close() }
func (c conn) SetDeadline(t time.Time) error         { return c.f.SetDeadline(t) }
func (c conn) SetReadDeadline(t time.Time) error     { return c.f.SetReadDeadline(t) }
func (c conn) SetWriteDeadline(t time.Time) error    { return c.f.SetWriteDeadline(t) }
func (c conn) SyscallConn() (syscall.RawConn, error) { return c.f.SyscallConn() }
func (c conn) LocalAddr() net.Addr                   { return c.address(syscall.Getsockname) }
func (c conn) RemoteAddr() net.Addr                  { return c.address(syscall.Getpeername) }
func (c conn) CloseWrite() error                     { return c.control(shutdown) }
func (c conn) SetLinger(seconds int) error {
	return c.control(func(fd int) error {
		l := unix.Linger{Linger: int32(max(seconds, 0))} //nolint:gosec // seconds
		if seconds >= 0 {
			l.Onoff = 1
		}
		return os.NewSyscallError("setsockopt", unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &l))
	})
}

func shutdown(fd int) error { return os.NewSyscallError("shutdown", unix.Shutdown(fd, unix.SHUT_WR)) }

// address is nil for a connection that has ended. By package syscall: x/sys asks for the protocol of
// each socket whose address it reads.
func (c conn) address(of func(fd int) (syscall.Sockaddr, error)) net.Addr {
	var a syscall.Sockaddr
	err := c.control(func(fd int) (err error) {
		a, err = of(fd)
		return err
	})
	if err != nil {
		return nil
	}
	switch a := a.(type) {
	case *syscall.SockaddrInet4:
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port}
	case *syscall.SockaddrInet6:
		zone := ""
		if a.ZoneId != 0 {
			if i, err := net.InterfaceByIndex(int(a.ZoneId)); err == nil {
				zone = i.Name
			}
		}
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port, Zone: zone}
	}
	return nil
}

func (c conn) control(f func(fd int) error) error { return control(c.f, f) }

func control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var ferr error
	if err := raw.Control(func(fd uintptr) { ferr = f(int(fd)) }); err != nil {
		return err
	}
	return ferr
}

// Listener accepts connections of New.
type Listener struct{ f *os.File }

// Listen takes l over: l is closed. What it accepts sends at once and is kept alive, which it
// inherits.
func Listen(l *net.TCPListener) (*Listener, error) {
	defer func() { _ = l.Close() }() // f is another descriptor
	f, err := l.File()
	if err != nil {
		return nil, err
	}
	if err := control(f, func(fd int) error { return errors.Join(NoDelay(fd), keepAlive(fd)) }); err != nil {
		f.Close()
		return nil, err
	}
	return &Listener{f}, nil
}

// Accept waits for a connection; os.ErrClosed once l is closed.
func (l *Listener) Accept() (Conn, error) {
	raw, err := l.f.SyscallConn()
	if err != nil {
		return nil, os.ErrClosed
	}
	fd := -1
	var aerr error
	err = raw.Read(func(of uintptr) bool {
		for {
			fd, _, aerr = syscall.Accept4(int(of), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			if aerr != syscall.EINTR && aerr != syscall.ECONNABORTED { // one that was given up again
				return aerr != syscall.EAGAIN
			}
		}
	})
	if err != nil {
		return nil, os.ErrClosed // it has no deadline: there is no other reason
	}
	if aerr != nil {
		return nil, os.NewSyscallError("accept4", aerr)
	}
	return New(fd), nil
}

// Close ends Accept.
func (l *Listener) Close() error { return l.f.Close() }

// NoDelay has a socket send at once what is written.
func NoDelay(fd int) error {
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
}

// KeepAlive has the kernel find out when the peer of a silent connection is gone.
func KeepAlive(c Conn) error { return control(c, keepAlive) }

func keepAlive(fd int) error {
	for _, o := range []struct{ level, name, value int }{
		{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(keepIdle.Seconds())},
		{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(keepInterval.Seconds())},
		{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, keepCount},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	return nil
}
