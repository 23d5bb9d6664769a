package egress

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// How much a pipe holds, in bytes. A stream that fills a plain one goes on with a wide one:
// fewer calls and fewer wake-ups for the same bytes.
const (
	plainPipe = 64 << 10
	widePipe  = 1 << 20
)

// kernelPipe is where bytes are between two sockets. It is held only while there are some:
// a thousand connections that idle hold none, and the pipes of a user are counted.
type kernelPipe struct {
	r, w int
	most int // that it holds
}

// pipes keeps a few that are empty.
var pipes = struct {
	mu    sync.Mutex
	free  []kernelPipe
	wide  []kernelPipe
	wides int // that there are, used or free
}{}

const (
	maxFreePipes = 16
	// A user has 16,384 pages for pipes (fs.pipe-user-pages-soft), and a wide one counts as 256. So
	// there are few, and where no connection is left none is kept.
	maxWidePipes     = 16
	maxFreeWidePipes = 1
)

// takePipe gives an empty pipe; a wide one if that is asked for and there can be one more.
func takePipe(wide bool) (kernelPipe, error) {
	pipes.mu.Lock()
	from := &pipes.free
	if wide = wide && (len(pipes.wide) > 0 || pipes.wides < maxWidePipes); wide {
		from = &pipes.wide
	}
	if n := len(*from); n > 0 {
		p := (*from)[n-1]
		*from = (*from)[:n-1]
		pipes.mu.Unlock()
		return p, nil
	}
	if wide {
		pipes.wides++
	}
	pipes.mu.Unlock()
	var fds [2]int
	err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK)
	p := kernelPipe{fds[0], fds[1], plainPipe}
	if wide {
		if err == nil {
			// The kernel may have none to give: then it is a plain one.
			if n, werr := unix.FcntlInt(uintptr(p.w), unix.F_SETPIPE_SZ, widePipe); werr == nil {
				p.most = n
			}
		}
		if p.most == plainPipe {
			pipes.mu.Lock()
			pipes.wides--
			pipes.mu.Unlock()
		}
	}
	return p, err
}

// givePipe takes a pipe back. One that is not empty is closed.
func givePipe(p kernelPipe, empty bool) {
	pipes.mu.Lock()
	kept, most := &pipes.free, maxFreePipes
	wide := p.most > plainPipe
	if wide {
		kept, most = &pipes.wide, maxFreeWidePipes
	}
	keep := empty && len(*kept) < most
	if keep {
		*kept = append(*kept, p)
	} else if wide {
		pipes.wides--
	}
	pipes.mu.Unlock()
	if !keep {
		p.close()
	}
}

// dropPipes closes those that are kept.
func dropPipes() {
	pipes.mu.Lock()
	all := append(pipes.free, pipes.wide...)
	pipes.wides -= len(pipes.wide)
	pipes.free, pipes.wide = nil, nil
	pipes.mu.Unlock()
	for _, p := range all {
		p.close()
	}
}

func (p kernelPipe) close() {
	unix.Close(p.r)
	unix.Close(p.w)
}

// pump copies src to dst until src ends, which is no error, or one of them breaks. count is
// the number of bytes; g, which may be nil, looks at what comes when it wants to. Between two
// TCP sockets the bytes stay in the kernel.
func pump(dst, src stream, count *atomic.Uint64, g *gate) error {
	d, ok := dst.(tcp.Conn)
	s, ok2 := src.(tcp.Conn)
	if !ok || !ok2 {
		return pumpCopy(dst, src, count, g)
	}
	from, err := s.SyscallConn()
	if err != nil {
		return err
	}
	to, err := d.SyscallConn()
	if err != nil {
		return err
	}
	look := func() (bool, error) {
		if !g.wants() {
			return false, nil
		}
		in := newIntake(src)
		defer in.release()
		return true, g.look(in, dst, count)
	}
	if end, err := pumpLittle(d, s, from, count, g); end || err != nil {
		return err
	}
	return splicePump(to, from, -1, count, look)
}

// little is what a copy is cheaper for than a pipe, in bytes.
const little = firstBytes

// pumpLittle copies until there is more at once, or the end. Many connections never have more.
func pumpLittle(dst, src tcp.Conn, from syscall.RawConn, count *atomic.Uint64, g *gate) (end bool, err error) {
	for {
		in, err := readLittle(src, from)
		if in == nil {
			return err == nil, err
		}
		n := len(in.held())
		if g.wants() {
			err = g.look(in, dst, count)
		} else {
			var m int
			m, err = dst.Write(in.held())
			count.Add(uint64(m))
			if err != nil {
				err = &writeError{err}
			}
		}
		in.release()
		if err != nil || n == little {
			return false, err
		}
	}
}

// readLittle waits until there is something, and reads some of it; nil without an error: the
// end. Whoever waits holds no memory.
func readLittle(src tcp.Conn, from syscall.RawConn) (in *intake, err error) {
	var rerr error
	err = from.Read(func(fd uintptr) bool {
		in = newIntake(src)
		if in.to, rerr = recv(int(fd), in.buf, 0); in.to > 0 {
			return true
		}
		in.release()
		in = nil
		return !errors.Is(rerr, unix.EAGAIN)
	})
	if err == nil && in == nil {
		err = rerr
	}
	return in, err
}

// pumpN copies n bytes; io.ErrUnexpectedEOF when src ends before.
func pumpN(dst, src stream, n int64, count *atomic.Uint64) error {
	d, ok := dst.(tcp.Conn)
	s, ok2 := src.(tcp.Conn)
	if !ok || !ok2 {
		return pumpCopyN(dst, src, n, count)
	}
	from, err := s.SyscallConn()
	if err != nil {
		return err
	}
	to, err := d.SyscallConn()
	if err != nil {
		return err
	}
	return splicePump(to, from, n, count, nil)
}

// splicePump is both; n < 0: until the end.
func splicePump(to, from syscall.RawConn, n int64, count *atomic.Uint64, look func() (bool, error)) error {
	wide := false
	for n != 0 {
		if end, err := waitReadable(from); end || err != nil {
			if end && n > 0 {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		if look != nil {
			if looked, err := look(); looked || err != nil {
				if err != nil {
					return err
				}
				continue
			}
		}
		moved, err := spliceSome(to, from, n, wide, count)
		wide = wide || moved >= plainPipe
		if err != nil {
			return err
		}
		if n > 0 {
			n -= moved
		}
	}
	return nil
}

// waitReadable waits until there is something to read; end: there will not be.
func waitReadable(from syscall.RawConn) (end bool, err error) {
	var one [1]byte
	var n int
	var rerr error
	err = from.Read(func(fd uintptr) bool {
		n, rerr = recv(int(fd), one[:], unix.MSG_PEEK)
		return !errors.Is(rerr, unix.EAGAIN)
	})
	if err != nil {
		return false, err
	}
	return n == 0 && rerr == nil, rerr
}

// recv does not wait.
func recv(fd int, b []byte, flags int) (int, error) {
	for {
		n, _, err := unix.Recvfrom(fd, b, flags|unix.MSG_DONTWAIT)
		if err != unix.EINTR {
			return n, err
		}
	}
}

// spliceSome moves what is there, n bytes at most where n is not negative, and with a plain
// pipe not much more than that holds.
func spliceSome(to, from syscall.RawConn, n int64, wide bool, count *atomic.Uint64) (moved int64, err error) {
	p, err := takePipe(wide)
	if err != nil {
		return 0, err
	}
	left := 0
	defer func() { givePipe(p, left == 0) }()
	for moved != n {
		most := p.most
		if n >= 0 {
			most = int(min(int64(most), n-moved))
		}
		var got int
		var serr error
		if err := from.Control(func(fd uintptr) { got, serr = splice(int(fd), p.w, most) }); err != nil {
			return moved, err
		}
		if errors.Is(serr, unix.EAGAIN) || serr == nil && got == 0 { // the end is found by the next wait
			return moved, nil
		}
		if serr != nil {
			return moved, serr
		}
		for left = got; left > 0; {
			var out int
			err := to.Write(func(fd uintptr) bool {
				out, serr = splice(p.r, int(fd), left)
				return !errors.Is(serr, unix.EAGAIN)
			})
			if err == nil {
				err = serr
			}
			if err == nil && out == 0 {
				err = io.ErrShortWrite
			}
			if err != nil {
				return moved, &writeError{err}
			}
			left -= out
			moved += int64(out)
			count.Add(uint64(out))
		}
		if got < 4<<10 || !wide && moved >= plainPipe {
			break // mostly all there was, or more than is done this way
		}
	}
	return moved, nil
}

func splice(from, to, most int) (int, error) {
	for {
		n, err := unix.Splice(from, nil, to, nil, most, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		if err != unix.EINTR {
			return int(n), err
		}
	}
}
