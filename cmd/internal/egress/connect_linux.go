package egress

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/netns"
	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// A server on this machine or near it answers within a moment. To wait for it in one call
// saves several changes of threads, which is most of what a connection costs here.
const (
	nearWait = 1000 // µs
	nearMost = 8    // that wait so at once: each holds a thread
)

var nearNow atomic.Int32

// beginTCP begins to connect to addr, and waits for a moment. now: finish, which has to be
// called, will not wait.
func beginTCP(addr netip.AddrPort) (finish func(ctx context.Context) (tcp.Conn, error), now bool) {
	fail := func(err error) error {
		return &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(addr), Err: err}
	}
	conn, pending, err := startTCP(addr)
	if err != nil {
		return func(context.Context) (tcp.Conn, error) { return nil, fail(err) }, true
	}
	return func(ctx context.Context) (tcp.Conn, error) {
		if !pending {
			return conn, nil
		}
		if err := waitConnected(ctx, conn); err != nil {
			conn.Close()
			return nil, fail(err)
		}
		return conn, nil
	}, !pending
}

func startTCP(addr netip.AddrPort) (conn tcp.Conn, pending bool, err error) {
	var to unix.Sockaddr
	family := unix.AF_INET
	if a := addr.Addr(); a.Is4() {
		to = &unix.SockaddrInet4{Port: int(addr.Port()), Addr: a.As4()}
	} else {
		family, to = unix.AF_INET6, &unix.SockaddrInet6{Port: int(addr.Port()), Addr: a.As16()}
	}
	// It does not block while others wait already.
	near := nearNow.Add(1) <= nearMost
	defer nearNow.Add(-1)
	kind := unix.SOCK_STREAM | unix.SOCK_CLOEXEC
	if !near {
		kind |= unix.SOCK_NONBLOCK
	}
	fd, err := unix.Socket(family, kind, 0)
	if err != nil {
		return nil, false, os.NewSyscallError("socket", err)
	}
	defer func() {
		if conn == nil {
			unix.Close(fd)
		}
	}()
	if near {
		// Connecting goes on when that time is over.
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Usec: nearWait}); err != nil {
			return nil, false, os.NewSyscallError("setsockopt", err)
		}
	}
	if addr.Addr().IsLoopback() {
		// Nothing is to be paced on this machine. Without it all is slower, no more.
		_ = unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, netns.Unpaced)
	}
	err = unix.Connect(fd, to)
	if pending = errors.Is(err, unix.EINPROGRESS) || errors.Is(err, unix.EINTR); !pending && err != nil {
		return nil, false, os.NewSyscallError("connect", err)
	}
	// What is said is to be sent at once. Whoever stays is kept alive, see watch.
	if err := tcp.NoDelay(fd); err != nil {
		return nil, false, err
	}
	if near {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_NONBLOCK); err != nil {
			return nil, false, os.NewSyscallError("fcntl", err)
		}
	}
	return tcp.New(fd), pending, nil
}

func waitConnected(ctx context.Context, conn tcp.Conn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 0); n == 0 || err != nil {
			return false
		}
		failed = soError(int(fd))
		return true
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err == nil && failed != nil {
		err = os.NewSyscallError("connect", failed)
	}
	return err
}

func soError(fd int) error {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && n != 0 {
		err = unix.Errno(n)
	}
	return err
}
