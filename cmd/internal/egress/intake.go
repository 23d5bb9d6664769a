package egress

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
)

// maxIntake bounds what is held of a connection before it is judged, in bytes: a
// ClientHello with its records' headers.
const maxIntake = maxHello + 2<<10

var errTooLong = errors.New("longer than is looked at")

// firstBytes is what an intake begins with; most heads and hellos fit.
const firstBytes = 4 << 10

// maxLarge is how many may hold more than that at once: some 34 MiB, however many connections
// an agent has.
const maxLarge = 512

var largeNow atomic.Int32

var intakes = sync.Pool{New: func() any { b := make([]byte, firstBytes); return &b }}

// intake reads what a client sends and holds it until it is judged.
type intake struct {
	c      net.Conn
	pooled *[]byte
	buf    []byte
	at, to int // buf[at:to] is held
	gone   int // of what is held, bytes that were passed on already
}

func newIntake(c net.Conn) *intake {
	in := &intake{c: c}
	in.pooled = intakes.Get().(*[]byte)
	in.buf = *in.pooled
	return in
}

// release gives the memory back; what is held is lost.
func (in *intake) release() {
	if in.pooled != nil {
		intakes.Put(in.pooled)
	}
	in.shrink()
	in.pooled, in.buf, in.at, in.to, in.gone = nil, nil, 0, 0, 0
}

// held is what was read and not taken. It is valid until the next call.
func (in *intake) held() []byte { return in.buf[in.at:in.to] }

// take gives up the first n bytes of what is held.
func (in *intake) take(n int) {
	in.gone = max(0, in.gone-n)
	if in.at += n; in.at == in.to {
		in.at, in.to = 0, 0
		in.shrink() // do not keep a large one while the connection idles
	}
}

// shrink gives up a large buffer; what is in it is lost.
func (in *intake) shrink() {
	if len(in.buf) > firstBytes {
		in.buf = *in.pooled
		largeNow.Add(-1)
	}
}

// more reads at least one byte.
func (in *intake) more() error {
	if in.to == len(in.buf) {
		switch {
		case in.at > 0:
			in.to = copy(in.buf, in.held())
			in.at = 0
		case len(in.buf) >= maxIntake:
			return errTooLong
		default:
			if len(in.buf) == firstBytes && largeNow.Add(1) > maxLarge {
				largeNow.Add(-1)
				return errTooLong
			}
			grown := make([]byte, min(maxIntake, 4*len(in.buf)))
			in.to = copy(grown, in.held())
			in.buf = grown
		}
	}
	n, err := in.c.Read(in.buf[in.to:])
	in.to += n
	if n > 0 {
		return nil
	}
	return err
}
