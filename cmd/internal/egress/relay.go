package egress

import (
	"errors"
	"io"
	"sync/atomic"
)

// pumpCopy is pump through our own memory, where a side is no TCP socket (TLS to a proxy).
func pumpCopy(dst, src stream, count *atomic.Uint64, g *gate) error {
	in := newIntake(src)
	defer in.release()
	for {
		if err := in.more(); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if g.wants() {
			if err := g.look(in, dst, count); err != nil {
				return err
			}
			continue
		}
		n, err := dst.Write(in.held())
		count.Add(uint64(n))
		if err != nil {
			return &writeError{err}
		}
		in.take(n)
	}
}

func pumpCopyN(dst, src stream, n int64, count *atomic.Uint64) error {
	buf := make([]byte, 16<<10)
	for n > 0 {
		got, err := src.Read(buf[:min(n, int64(len(buf)))])
		if got > 0 {
			m, werr := dst.Write(buf[:got])
			count.Add(uint64(m))
			if werr != nil {
				return &writeError{werr}
			}
			n -= int64(got)
		}
		if err != nil && n > 0 {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

// writeError is the error of the side that was written to. What that side sent itself may
// still be on its way.
type writeError struct{ err error }

func (e *writeError) Error() string { return e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// gate looks at the answers of a server of which one will say whether the connection stays
// HTTP: to an Upgrade or a CONNECT.
type gate struct {
	wanted atomic.Bool
	status chan int // of the answer that says it; 0: it is not HTTP
}

func newGate() *gate { return &gate{status: make(chan int, 1)} }

// want is called before the request is passed on, and after every answer before it.
func (g *gate) want() { g.wanted.Store(true) }

func (g *gate) wants() bool { return g != nil && g.wanted.Load() }

// look passes on what comes until the final answer's head. A status that only says "go on"
// comes before it.
func (g *gate) look(in *intake, dst stream, count *atomic.Uint64) error {
	seen := 0
	for {
		end := headEnd(in.held(), seen)
		if end == 0 {
			if seen = len(in.held()); seen > maxHead {
				return errTooLong
			}
			if err := in.more(); err != nil {
				return err
			}
			continue
		}
		status, err := responseStatus(in.held()[:end])
		if err != nil {
			return err
		}
		interim := status/100 == 1 && status != 101
		if !interim {
			g.wanted.Store(false)
			end = len(in.held())
			g.status <- status
		}
		n, err := dst.Write(in.held()[:end])
		count.Add(uint64(n))
		if err != nil {
			return &writeError{err}
		}
		in.take(n)
		if seen = 0; !interim {
			return nil
		}
	}
}
