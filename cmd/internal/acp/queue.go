// The byte-bounded queue between whoever has a frame to send and the one goroutine
// that writes to a stream.

package acp

import (
	"io"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	chunkSize = 32 << 10
	writeSize = 1 << 20 // the most one Write carries, so that progress can be seen

	// A reader that drains at least drainRate bytes per second is waited for; one that
	// does not uses up patience, once, and is then left to fill its queue.
	drainRate = 4 << 20
	patience  = 250 * time.Millisecond

	// lookEvery is how often whoever waits for a reader looks whether its own sender has left: a
	// stream of which somebody reads no more does not tell.
	lookEvery = time.Second
)

// queue holds whole frames. Small ones share a chunk, so that a backlog goes out in
// few writes; a frame is never split over chunks.
type queue struct {
	mu       sync.Mutex
	filled   sync.Cond
	drained  sync.Cond
	chunks   [][]byte
	spare    []byte
	bytes    int  // queued or being written
	writing  bool // what stood before all chunks is with a Write
	draining bool
	closed   bool
	credit   time.Duration // patience left

	// now writes without waiting, for flush; nil where the stream cannot.
	now func([]byte) (int, error)
}

func newQueue() *queue {
	q := &queue{credit: patience}
	q.filled.L = &q.mu
	q.drained.L = &q.mu
	return q
}

// push adds one frame, given in parts. limit 0 means no limit; over a limit nothing is
// added and push returns false. A single frame always fits an empty queue.
func (q *queue) push(limit int, parts ...[]byte) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	defer q.filled.Signal()
	return q.add(limit, parts)
}

// hold is push that leaves the frame to a later flush, but for what fills a chunk. much says that
// more than mark bytes are queued.
func (q *queue) hold(limit, mark int, parts ...[]byte) (ok, much bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if last := len(q.chunks) - 1; last >= 0 && cap(q.chunks[last])-len(q.chunks[last]) < size(parts) {
		q.flushLocked()
	}
	ok = q.add(limit, parts)
	if q.bytes <= mark/2 {
		q.credit = patience
	}
	return ok, q.bytes > mark
}

// flush writes what the stream takes at once, and leaves the rest to run: to wake another
// thread for a frame costs more than to write it.
func (q *queue) flush() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.flushLocked()
}

func (q *queue) flushLocked() {
	for q.now != nil && len(q.chunks) > 0 && !q.writing && !q.closed {
		c := q.chunks[0]
		q.chunks = slices.Delete(q.chunks, 0, 1)
		q.writing = true
		q.mu.Unlock()
		n, err := q.now(c[:min(len(c), writeSize)])
		q.mu.Lock()
		q.writing = false
		if q.closed {
			return
		}
		if n > 0 {
			q.bytes -= n
			q.drained.Broadcast()
		}
		if n < len(c) {
			q.chunks = slices.Insert(q.chunks, 0, c[n:])
		} else {
			q.keep(c)
		}
		if err != nil || n < len(c) {
			break // run waits for the stream, or meets the error
		}
	}
	if len(q.chunks) > 0 || q.draining {
		q.filled.Signal()
	}
}

// keep has a chunk filled again.
func (q *queue) keep(c []byte) {
	if cap(c) == chunkSize {
		q.spare = c[:0]
	}
}

// pushWait is push that first waits until at most mark bytes are queued. gone, if any, says
// whether whoever sent the frame has left; then there is nothing to wait for.
func (q *queue) pushWait(mark int, gone func() bool, parts ...[]byte) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.bytes > mark && !q.closed && !q.draining {
		if gone != nil && gone() {
			return false
		}
		q.filled.Signal() // what is held, too, has to leave
		if gone == nil {
			q.drained.Wait()
		} else {
			q.waitDrained(lookEvery)
		}
	}
	defer q.filled.Signal()
	return q.add(0, parts)
}

// waitDrained waits until some of the queue has left it, for d at most. q.mu is held.
func (q *queue) waitDrained(d time.Duration) {
	wake := time.AfterFunc(d, func() {
		q.mu.Lock() // not before Wait below listens
		defer q.mu.Unlock()
		q.drained.Broadcast()
	})
	defer wake.Stop()
	q.drained.Wait()
}

// settle waits while more than mark bytes are queued, as long as the reader on the
// other side is worth waiting for.
func (q *queue) settle(mark int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.bytes > mark && q.credit > 0 && !q.closed && !q.draining {
		began, had := time.Now(), q.bytes
		q.filled.Signal()
		q.waitDrained(q.credit)
		q.credit -= time.Since(began)
		if got := had - q.bytes; got > 0 {
			q.credit += time.Duration(got) * time.Second / drainRate
		}
		q.credit = min(q.credit, patience)
	}
}

func (q *queue) add(limit int, parts [][]byte) bool {
	if q.closed || q.draining {
		return false
	}
	n := size(parts)
	if limit > 0 && q.bytes > 0 && q.bytes+n > limit {
		return false
	}
	last := len(q.chunks) - 1
	if last < 0 || cap(q.chunks[last])-len(q.chunks[last]) < n {
		c := q.spare
		q.spare = nil
		if cap(c) < n {
			c = make([]byte, 0, max(n, chunkSize))
		}
		q.chunks = append(q.chunks, c)
		last++
	}
	c := q.chunks[last]
	for _, p := range parts {
		c = append(c, p...)
	}
	q.chunks[last] = c
	q.bytes += n
	return true
}

func size(parts [][]byte) (n int) {
	for _, p := range parts {
		n += len(p)
	}
	return n
}

// run writes until the queue is closed (nil) or a write fails.
func (q *queue) run(w io.Writer) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for (len(q.chunks) == 0 && !q.draining || q.writing) && !q.closed {
			q.filled.Wait()
		}
		if q.closed || len(q.chunks) == 0 {
			q.closed = true
			q.drained.Broadcast()
			return nil
		}
		c := q.chunks[0]
		q.chunks = slices.Delete(q.chunks, 0, 1)
		for rest := c; len(rest) > 0; {
			part := rest[:min(len(rest), writeSize)]
			rest = rest[len(part):]
			q.writing = true
			q.mu.Unlock()
			n, err := w.Write(part)
			if err == nil && n < len(part) {
				err = io.ErrShortWrite
			}
			q.mu.Lock()
			q.writing = false
			if err != nil {
				q.shut()
				return err
			}
			q.bytes -= len(part)
			q.drained.Broadcast()
			if q.closed {
				return nil
			}
		}
		q.keep(c)
	}
}

// takes reports whether there is still somebody to write to.
func (q *queue) takes() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !q.closed && !q.draining
}

func (q *queue) shut() {
	q.closed = true
	q.chunks, q.spare, q.bytes = nil, nil, 0
	q.filled.Broadcast()
	q.drained.Broadcast()
}

// close drops what is queued; a Write in progress is ended by closing its stream.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.shut()
}

// finish lets run write what is queued and then return. Nothing more is taken.
func (q *queue) finish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.draining = true
	q.filled.Broadcast()
	q.drained.Broadcast()
}

// hungUp gives a way to ask whether the other end of a stream has closed both ways, or this one is
// closed; nil where that cannot be known.
func hungUp(stream any) func() bool {
	file, ok := stream.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := file.SyscallConn()
	if err != nil {
		return nil
	}
	return func() (gone bool) {
		err := raw.Control(func(fd uintptr) {
			p := []unix.PollFd{{Fd: int32(fd)}}
			n, err := unix.Poll(p, 0)
			gone = n > 0 && err == nil && p[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0
		})
		return gone || err != nil
	}
}

// atOnce gives a way to write to a stream without waiting, nil where it has none. What is not
// taken at once is no error.
func atOnce(stream any) func([]byte) (int, error) {
	file, ok := stream.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := file.SyscallConn()
	if err != nil {
		return nil
	}
	var p []byte
	var n int
	var failed error
	write := func(fd uintptr) bool {
		n, failed = syscall.Write(int(fd), p)
		return true // also when it would block: who waits is run
	}
	return func(b []byte) (int, error) {
		p, n, failed = b, 0, nil
		err := raw.Write(write)
		p = nil
		if err == nil && failed != syscall.EAGAIN && failed != syscall.EINTR {
			err = failed
		}
		return max(n, 0), err
	}
}
