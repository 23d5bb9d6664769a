package egress

import (
	"bytes"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// joined are the ends of two connections that Join joins, with a deadline.
func joined(t *testing.T) (client, server *net.TCPConn) {
	t.Helper()
	theWorld(t) // it has a loopback
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	pair := func() (dialled, accepted *net.TCPConn) {
		d, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		a, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []net.Conn{d, a} {
			if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		}
		return d.(*net.TCPConn), a.(*net.TCPConn)
	}
	client, out := pair()
	in, server := pair()
	over := make(chan struct{})
	go func() { defer close(over); Join(out, in) }()
	t.Cleanup(func() { client.Close(); server.Close(); <-over })
	return client, server
}

// A server that answers and ends before it has read all, as one does that refuses an upload.
func TestJoinPassesAnAnswerOnThatCameEarly(t *testing.T) {
	answer := bytes.Repeat([]byte("too large "), 2000)
	for range 50 {
		client, server := joined(t)
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			_, _ = io.Copy(client, io.LimitReader(zeros{}, 4<<20)) // breaks off
		}()
		if _, err := io.ReadFull(server, make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		if _, err := server.Write(answer); err != nil {
			t.Fatal(err)
		}
		server.Close()
		<-sent
		var got bytes.Buffer
		_, _ = got.ReadFrom(client)
		if got.Len() != len(answer) {
			t.Fatalf("%d bytes of the answer came, of %d", got.Len(), len(answer))
		}
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// An end that is none must not look like one: half a file would be taken for all of it.
func TestJoinPassesOnThatAConnectionBroke(t *testing.T) {
	for name, turned := range map[string]bool{"the server": false, "the client": true} {
		t.Run(name, func(t *testing.T) {
			breaks, reads := joined(t)
			if !turned {
				breaks, reads = reads, breaks
			}
			if _, err := io.WriteString(breaks, "half"); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(reads, make([]byte, 4)); err != nil {
				t.Fatal(err)
			}
			tcp.Reset(breaks)
			if b, err := io.ReadAll(reads); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%q and %v, want a reset", b, err)
			}
		})
	}
}

func TestJoinPassesEachEndOnByItself(t *testing.T) {
	client, server := joined(t)
	for _, way := range [][2]*net.TCPConn{{client, server}, {server, client}} {
		if _, err := io.WriteString(way[0], "last words"); err != nil {
			t.Fatal(err)
		}
		if err := way[0].CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(way[1]); string(b) != "last words" || err != nil {
			t.Errorf("%q, %v", b, err)
		}
	}
}

// The pipes of a user are counted, and those of a forward are the user's own.
func TestJoinHoldsNoPipeWhileNothingIsSaid(t *testing.T) {
	before := descriptors(t)
	const many = 50
	for range many {
		client, server := joined(t)
		for _, way := range [][2]*net.TCPConn{{client, server}, {server, client}} {
			if _, err := io.WriteString(way[0], "a word"); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(way[1], make([]byte, 6)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := descriptors(t) - before - 4*many; n > 2*maxFreePipes+2 {
		t.Errorf("%d connections that idle hold %d descriptors besides their own", many, n)
	}
}
