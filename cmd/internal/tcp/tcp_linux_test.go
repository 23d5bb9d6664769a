package tcp

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pair is an accepted connection and its client's end.
func pair(t *testing.T) (accepted Conn, client *net.TCPConn) {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr)
	listener, err := Listen(l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	if client, err = net.DialTCP("tcp", nil, at); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if accepted, err = listener.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { accepted.Close() })
	for _, c := range []Conn{accepted, client} {
		if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	return accepted, client
}

func TestAcceptedConnectionsHaveWhatPackageNetSets(t *testing.T) {
	accepted, client := pair(t)
	for _, o := range []struct {
		what        string
		level, name int
	}{
		{"TCP_NODELAY", unix.IPPROTO_TCP, unix.TCP_NODELAY},
		{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE},
		{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE},
		{"TCP_KEEPINTVL", unix.IPPROTO_TCP, unix.TCP_KEEPINTVL},
		{"TCP_KEEPCNT", unix.IPPROTO_TCP, unix.TCP_KEEPCNT},
	} {
		var got [2]int
		for i, c := range []Conn{accepted, client} {
			if err := control(c, func(fd int) (err error) {
				got[i], err = unix.GetsockoptInt(fd, o.level, o.name)
				return err
			}); err != nil {
				t.Fatal(err)
			}
		}
		if got[0] != got[1] || got[0] == 0 {
			t.Errorf("%s is %d, and of a connection of package net %d", o.what, got[0], got[1])
		}
	}
	for _, a := range [][2]net.Addr{{accepted.LocalAddr(), client.RemoteAddr()}, {accepted.RemoteAddr(), client.LocalAddr()}} {
		if a[0].String() != a[1].String() {
			t.Errorf("the address %s, and from the other end %s", a[0], a[1])
		}
	}
}

func TestDirectionsEndByThemselves(t *testing.T) {
	accepted, client := pair(t)
	if _, err := io.WriteString(accepted, "last words"); err != nil {
		t.Fatal(err)
	}
	if err := accepted.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(client); string(got) != "last words" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := io.WriteString(client, "an answer"); err != nil {
		t.Fatal(err)
	}
	client.Close()
	if got, err := io.ReadAll(accepted); string(got) != "an answer" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

func TestResetIsToldToThePeer(t *testing.T) {
	accepted, client := pair(t)
	Reset(accepted)
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v", err)
	}
}

func TestDeadlineEndsARead(t *testing.T) {
	accepted, _ := pair(t)
	if err := accepted.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	_, err := accepted.Read(make([]byte, 1))
	var timeout net.Error
	if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("%v", err)
	}
}

func TestCloseEndsAccept(t *testing.T) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := Listen(l)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := listener.Accept()
		ended <- err
	}()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, os.ErrClosed) {
		t.Errorf("%v", err)
	}
}
