//go:build !linux

package egress

import "sync/atomic"

// pump copies src to dst until src ends, which is no error, or one of them breaks.
func pump(dst, src stream, count *atomic.Uint64, g *gate) error {
	return pumpCopy(dst, src, count, g)
}

// pumpN copies n bytes; io.ErrUnexpectedEOF when src ends before.
func pumpN(dst, src stream, n int64, count *atomic.Uint64) error {
	return pumpCopyN(dst, src, n, count)
}

func dropPipes() {}
