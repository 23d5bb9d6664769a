package egress

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// inRecords splits a ClientHello into records of size bytes.
func inRecords(hello []byte, size int) []byte {
	var out []byte
	for rest := hello[5:]; len(rest) > 0; {
		n := min(size, len(rest))
		out = append(out, recordHandshake, 3, 1, byte(n>>8), byte(n))
		out = append(out, rest[:n]...)
		rest = rest[n:]
	}
	return out
}

// withExtension adds an extension to a ClientHello of one record.
func withExtension(hello []byte, kind uint16, body []byte) []byte {
	out := bytes.Clone(hello)
	ext := binary.BigEndian.AppendUint16(nil, kind)
	ext = binary.BigEndian.AppendUint16(ext, uint16(len(body)))
	out = append(out, append(ext, body...)...)
	n := len(ext) + len(body)
	binary.BigEndian.PutUint16(out[3:], binary.BigEndian.Uint16(out[3:])+uint16(n))
	size := int(out[6])<<16 + int(out[7])<<8 + int(out[8]) + n
	out[6], out[7], out[8] = byte(size>>16), byte(size>>8), byte(size)
	at := 9 + 2 + 32
	at += 1 + int(out[at])
	at += 2 + int(binary.BigEndian.Uint16(out[at:]))
	at += 1 + int(out[at])
	binary.BigEndian.PutUint16(out[at:], binary.BigEndian.Uint16(out[at:])+uint16(n))
	return out
}

func TestHelloOfRealClients(t *testing.T) {
	for _, cfg := range []*tls.Config{
		{ServerName: "Example.com"},
		{ServerName: "example.com", MaxVersion: tls.VersionTLS12},
		{ServerName: "example.com", NextProtos: []string{"h2", "http/1.1"}},
	} {
		raw := captured(t, cfg)
		for _, size := range []int{1 << 14, 100, 7, 1} {
			var p helloParser
			split := inRecords(raw, size)
			h, n, err := p.parse(append(bytes.Clone(split), "rest"...))
			if err != nil || h.name != "example.com" || h.encrypted || n != len(split) {
				t.Errorf("records of %d: got %+v, %d, %v", size, h, n, err)
			}
			p = helloParser{} // byte by byte
			for i := range split {
				h, _, err = p.parse(split[:i+1])
				if errors.Is(err, errShort) != (i+1 < len(split)) {
					t.Fatalf("records of %d, %d bytes of %d: %v", size, i+1, len(split), err)
				}
			}
			if h.name != "example.com" {
				t.Errorf("byte by byte: got %+v", h)
			}
		}
		if h, _, err := new(helloParser).parse(withExtension(raw, extECH, []byte{0})); err != nil || !h.encrypted {
			t.Errorf("ECH: got %+v, %v", h, err)
		}
		if _, _, err := new(helloParser).parse(withExtension(raw, extServerName, []byte("\x00\x0b\x00\x00\x08evil.net"))); err == nil {
			t.Error("two names are taken")
		}
	}
	none := captured(t, &tls.Config{InsecureSkipVerify: true})
	for name, ok := range map[string]bool{"evil.net": true, "127.0.0.1": false, "a\x00b": false, "": false, "a..b": false} {
		body := append([]byte{0, byte(len(name) + 3), 0, 0, byte(len(name))}, name...)
		h, _, err := new(helloParser).parse(withExtension(none, extServerName, body))
		if ok != (err == nil) || ok && h.name != name {
			t.Errorf("%q: got %+v, %v", name, h, err)
		}
	}
}

func TestHellosThatAreRefused(t *testing.T) {
	w := theWorld(t)
	cert, pool := certificate(t, "example.com")
	reached := make(chan int64, 16)
	w.server(t, w.internet, webA+":443", func(c net.Conn) {
		n, _ := io.Copy(io.Discard, c)
		reached <- n
	})
	w.server(t, w.internet, webA+":8080", func(c net.Conn) {
		echo(tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}}))
	})
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	good := captured(t, &tls.Config{ServerName: "example.com"})
	for what, test := range map[string]struct {
		raw []byte
		why string
	}{
		"ECH":                {withExtension(good, extECH, []byte{0}), "ECH"},
		"old ESNI":           {withExtension(good, extESNI, nil), "ECH"},
		"two names":          {withExtension(good, extServerName, []byte("\x00\x0b\x00\x00\x08evil.net")), "not a valid"},
		"another record":     {append(inRecords(good[:40], 20)[:25], recordAlert, 3, 1, 0, 2, 1, 0), "not a valid"},
		"an empty record":    {[]byte{recordHandshake, 3, 1, 0, 0}, "not a valid"},
		"SSL 2":              {[]byte{0x80, 46, 1, 3, 1, 0, 21, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0}, "not a valid"},
		"it never ends":      {good[:len(good)-1], "in time"},
		"endless small ones": {inRecords(append(good[:5:5], append([]byte{1, 0, 0xff, 0}, bytes.Repeat([]byte{0}, 60<<10)...)...), 1), "longer than"},
	} {
		t.Run(what, func(t *testing.T) {
			c := a.connect("example.com", 443)
			go func() { _, _ = c.Write(test.raw) }()
			b, _ := io.ReadAll(c)
			if len(b) != 7 || b[0] != recordAlert {
				t.Errorf("got %q, want an alert", b)
			}
			a.record(what, func(r Record) bool { return r.Verdict == Denied && strings.Contains(r.Reason, test.why) })
			if n := <-reached; n > 2 {
				t.Errorf("%d bytes reached the server", n)
			}
		})
	}
	// On another port as well, in pieces, and all of it arrives.
	raw := a.connect("example.com", 8080)
	client := tls.Client(&pieces{TCPConn: raw}, &tls.Config{ServerName: "example.com", RootCAs: pool})
	if _, err := client.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(client, b); err != nil || string(b) != "hello" {
		t.Fatalf("got %q, %v", b, err)
	}
}

// pieces writes in small segments.
type pieces struct{ *net.TCPConn }

func (p *pieces) Write(b []byte) (int, error) {
	for i := range b {
		if _, err := p.TCPConn.Write(b[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(b), nil
}

func TestASecondHelloMustNameTheSameServer(t *testing.T) {
	w := theWorld(t)
	w.name(t, "example.com", "A "+webA)
	w.name(t, "two.example", "A "+webA)
	got := make(chan []byte, 1)
	w.server(t, w.internet, webA+":443", func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(3 * time.Second))
		b, err := io.ReadAll(c)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("the connection was neither ended nor cut")
		}
		got <- b
	})
	a := w.cage(t, policy("example.com", "two.example"))
	first := captured(t, &tls.Config{ServerName: "example.com"})
	second := captured(t, &tls.Config{ServerName: "two.example"}) // allowed, but not what was begun
	a.addrs("two.example")
	c := a.connect("example.com", 443)
	ccs := []byte{recordChangeCipherSpec, 3, 3, 0, 1, 1}
	if _, err := c.Write(bytes.Join([][]byte{first, ccs, second}, nil)); err != nil {
		t.Fatal(err)
	}
	if b := <-got; bytes.Contains(b, []byte("two.example")) {
		t.Errorf("the second name reached the server")
	}
	a.record("the second name", func(r Record) bool { return r.Verdict == Denied && r.Seen == "two.example" })
	// The same name again, as after a real HelloRetryRequest.
	c = a.connect("example.com", 443)
	if _, err := c.Write(bytes.Join([][]byte{first, ccs, first, []byte("rest")}, nil)); err != nil {
		t.Fatal(err)
	}
	_ = c.CloseWrite()
	if b := <-got; len(b) != 2*len(first)+len(ccs)+4 {
		t.Errorf("%d bytes reached the server, want all", len(b))
	}
}

func TestARealHelloRetryRequest(t *testing.T) {
	w := theWorld(t)
	cert, pool := certificate(t, "example.com")
	w.server(t, w.internet, webA+":443", func(c net.Conn) {
		echo(tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}, CurvePreferences: []tls.CurveID{tls.CurveP521}}))
	})
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	c := tls.Client(a.connect("example.com", 443), &tls.Config{ServerName: "example.com", RootCAs: pool, CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP521}})
	if _, err := c.Write([]byte("hi")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 2)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hi" {
		t.Fatalf("got %q, %v", b, err)
	}
	if s := c.ConnectionState(); !s.HelloRetryRequest {
		t.Error("there was no HelloRetryRequest")
	}
}
