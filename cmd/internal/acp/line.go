// Lines of bounded length from a stream.

package acp

import (
	"bytes"
	"errors"
	"io"
)

// ErrFrameTooLarge: more than MaxFrame bytes came without a newline. The stream
// cannot be read on.
var ErrFrameTooLarge = errors.New("more than 64 MiB without a newline")

const (
	lineStart = 64 << 10
	lineKeep  = 256 << 10 // a larger buffer is given back once it is empty
)

// LineReader cuts a stream into lines. Its memory follows the longest line in hand,
// however small the reads are.
type LineReader struct {
	r          io.Reader
	buf        []byte
	start, end int // unread bytes
	next       int // behind the first newline among them, if More has looked; 0: it has not
	max        int
	err        error
}

// NewLineReader reads lines of up to MaxFrame bytes.
func NewLineReader(r io.Reader) *LineReader { return &LineReader{r: r, max: MaxFrame} }

// Next returns the next line with its newline, valid until the next call. At the end of
// the stream it returns what is left of a last line together with the error.
func (l *LineReader) Next() ([]byte, error) {
	if l.start == l.end {
		l.start, l.end = 0, 0
		if len(l.buf) > lineKeep {
			l.buf = nil
		}
	}
	if l.next > 0 {
		line := l.buf[l.start:l.next]
		l.start, l.next = l.next, 0
		if len(line)-1 > l.max {
			return nil, ErrFrameTooLarge
		}
		return line, nil
	}
	looked := l.start
	for empty := 0; ; {
		if n := bytes.IndexByte(l.buf[looked:l.end], '\n'); n >= 0 {
			line := l.buf[l.start : looked+n+1]
			if len(line)-1 > l.max {
				return nil, ErrFrameTooLarge
			}
			l.start = looked + n + 1
			return line, nil
		}
		looked = l.end
		if l.end-l.start > l.max {
			return nil, ErrFrameTooLarge
		}
		if l.err != nil {
			line := l.buf[l.start:l.end]
			l.start = l.end
			return line, l.err
		}
		looked -= l.room()
		n, err := l.r.Read(l.buf[l.end:])
		l.end += n
		l.err = err
		if n == 0 && err == nil {
			if empty++; empty == 100 {
				l.err = io.ErrNoProgress
			}
		}
	}
}

// More says that Next has a whole line in hand and will not wait for the stream.
func (l *LineReader) More() bool {
	if l.next == 0 {
		if n := bytes.IndexByte(l.buf[l.start:l.end], '\n'); n >= 0 {
			l.next = l.start + n + 1
		}
	}
	return l.next > 0
}

// room makes space to read into and returns by how much it moved the unread bytes down.
func (l *LineReader) room() int {
	if l.end < len(l.buf) {
		return 0
	}
	moved := l.start
	if l.start > len(l.buf)/2 {
		copy(l.buf, l.buf[l.start:l.end])
	} else {
		// One byte more than the longest frame and its newline is never needed.
		size := min(max(2*len(l.buf), lineStart), l.max+2)
		if size <= l.end-l.start {
			size = l.end - l.start + 1
		}
		grown := make([]byte, size)
		copy(grown, l.buf[l.start:l.end])
		l.buf = grown
	}
	l.end -= moved
	l.start = 0
	return moved
}
