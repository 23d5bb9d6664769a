package egress

import (
	"errors"
	"sync"
	"sync/atomic"

	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// Join copies both ways between two connections until both have ended, and closes them. Each end is
// passed on by itself. That one broke is told to the other: an end that is none must not look like one.
func Join(a, b tcp.Conn) {
	var broke atomic.Bool
	var both sync.WaitGroup
	for _, way := range [2][2]tcp.Conn{{a, b}, {b, a}} {
		both.Go(func() {
			from, to := way[0], way[1]
			var n atomic.Uint64
			err := pump(to, from, &n, nil)
			if err == nil {
				_ = to.CloseWrite() // it may be gone
				return
			}
			broke.Store(true)
			var unread *writeError
			if !errors.As(err, &unread) {
				tcp.Reset(a)
				tcp.Reset(b)
			} // else it reads no more; what it has sent still gets through
		})
	}
	both.Wait()
	if broke.Load() {
		tcp.Reset(a)
		tcp.Reset(b)
	}
	a.Close()
	b.Close()
}
