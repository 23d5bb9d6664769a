package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// FuzzDNS: whatever an agent sends, the answer is a packet of bounded size, and no name that
// no rule allows is looked up.
func FuzzDNS(f *testing.F) {
	for _, name := range []string{"example.com.", "evil.net.", "34.216.184.93.in-addr.arpa.", "host.", "localhost."} {
		for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypePTR, dns.TypeHTTPS, dns.TypeANY, dns.TypeTXT} {
			m := new(dns.Msg)
			m.SetQuestion(name, kind)
			m.SetEdns0(4096, true)
			b, err := m.Pack()
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b)
		}
	}
	g, err := New(Config{Agent: "alice", Egress: wire.Egress{Policy: rules.Policy{Allow: []string{"example.com", "host:1"}}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { g.Close() })
	g.resolvConf = "/dev/null" // no name servers
	g.lookups.ask = func(_ context.Context, name string) ([]netip.Addr, error) {
		if name != "example.com" {
			f.Errorf("%q is looked up", name)
		}
		return []netip.Addr{netip.MustParseAddr("93.184.216.34"), netip.MustParseAddr("10.0.0.1")}, nil
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, tcp := range []bool{false, true} {
			out := g.reply(t.Context(), raw, tcp)
			if out == nil {
				continue
			}
			if !tcp && len(out) > maxUDP {
				t.Fatalf("%d bytes over UDP", len(out))
			}
			var m dns.Msg
			if err := m.Unpack(out); err != nil {
				t.Fatalf("the answer cannot be read: %v", err)
			}
			if !m.Response || m.Id != uint16(raw[0])<<8|uint16(raw[1]) {
				t.Fatalf("got %v", &m)
			}
			if bytes.Contains(out, []byte{10, 0, 0, 1}) && !bytes.Contains(raw, []byte{10, 0, 0, 1}) {
				t.Fatalf("a private address is given: %v", &m)
			}
		}
	})
}

// captured is what a real client begins with.
func captured(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	here, there := net.Pipe()
	defer here.Close()
	go func() {
		_ = tls.Client(there, cfg).Handshake()
		there.Close()
	}()
	head := make([]byte, 5)
	if _, err := io.ReadFull(here, head); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, binary.BigEndian.Uint16(head[3:]))
	if _, err := io.ReadFull(here, body); err != nil {
		t.Fatal(err)
	}
	return slices.Concat(head, body)
}

// taken gives the server's name of a ClientHello that a real server of Go's takes.
func taken(raw []byte) (name string, ok bool) {
	c := &heard{says: bytes.NewReader(raw)}
	_ = tls.Server(c, &tls.Config{GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
		name, ok = i.ServerName, true
		return nil, errors.New("that is all")
	}}).Handshake()
	return name, ok
}

// never reports whether look never says that it is something else, however much of raw there is.
func never(look func([]byte) likeness, raw []byte) bool {
	for i := 1; i <= len(raw); i += 1 + i/16 {
		if look(raw[:i]) == unlike {
			return false
		}
	}
	return look(raw) != unlike
}

// FuzzHello: what is read of a ClientHello does not depend on how it is split, and is inside
// what was read. What a real server takes is not passed over, and names the same server.
func FuzzHello(f *testing.F) {
	real := captured(f, &tls.Config{ServerName: "example.com"})
	f.Add(real, uint8(100))
	f.Add(append([]byte{recordAlert, 3, 1, 0, 2, 1, 90}, real...), uint8(50))
	f.Add(append([]byte{recordHandshake, 9}, real[2:]...), uint8(250))
	f.Add([]byte("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"), uint8(1))
	f.Add([]byte("\x16\x03\x01\x00\x04\x01\x00\x00\x00"), uint8(3))
	f.Add([]byte("\x80\x2e\x01\x03\x01"), uint8(1))
	body := "\x03\x03" + strings.Repeat("r", 32) + "\x00\x00\x02\x13\x01\x01\x00\x00\x14\x00\x00\x00\x10\x00\x0e\x00\x00\x0bexample.com"
	f.Add([]byte("\x16\x03\x01\x00"+string(rune(len(body)+4))+"\x01\x00\x00"+string(rune(len(body)))+body), uint8(7))
	f.Fuzz(func(t *testing.T, raw []byte, step uint8) {
		h, n, err := new(helloParser).parse(raw)
		if name, ok := taken(raw); ok {
			if !never(looksLikeTLS, raw) {
				t.Fatalf("Go takes %q, for %q, and it is passed over", raw, name)
			}
			if ascii, valid := rules.ASCIIName(name); err == nil && (h.name != ascii || name != "" && !valid) {
				t.Fatalf("%q is for %q there and for %q here", raw, name, h.name)
			}
		}
		if err == nil {
			if n <= 0 || n > len(raw) || h.name != "" && !bytes.Contains(bytes.ToLower(raw), []byte(h.name[:1])) {
				t.Fatalf("%+v, %d of %d", h, n, len(raw))
			}
			if name, ok := rules.ASCIIName(h.name); h.name != "" && (!ok || name != h.name) {
				t.Fatalf("%q is no host name", h.name)
			}
		}
		var p helloParser
		for i := 0; ; i = min(i+int(step)+1, len(raw)) {
			h2, n2, err2 := p.parse(raw[:i])
			if !errors.Is(err2, errShort) {
				if h2 != h || n2 != n || (err2 == nil) != (err == nil) {
					t.Fatalf("in pieces: %+v, %d, %v; at once: %+v, %d, %v", h2, n2, err2, h, n, err)
				}
				return
			}
			if i == len(raw) {
				if !errors.Is(err, errShort) {
					t.Fatalf("in pieces it is never enough; at once: %v", err)
				}
				return
			}
		}
	})
}

// FuzzRequest: what passes is read in the same way by the standard library, and is for the
// same host. What that reads as a request is not passed over.
func FuzzRequest(f *testing.F) {
	for _, s := range []string{
		"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", "POST /x HTTP/1.0\r\nHost: a:80\r\nContent-Length: 5\r\n\r\n",
		"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", "GET / HTTP/1.1\r\nHost: [::1]:80\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Add([]byte(strings.Repeat("M", 100) + " / HTTP/1.1\r\nHost: a\r\n\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		like := looksLikeHTTP(raw)
		if r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(raw))); err == nil && !never(looksLikeHTTP, raw) {
			t.Fatalf("Go takes %q, for %q, and it is passed over", raw, r.Host)
		}
		end := headEnd(raw, 0)
		if end == 0 {
			return
		}
		r, err := parseRequest(raw[:end])
		if err != nil {
			return
		}
		if like != alike {
			t.Fatalf("%q passes as a request and does not look like one", raw[:end])
		}
		got, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(r.passOn(raw[:end]))))
		if err != nil {
			return // stricter than we are
		}
		host, _, err := hostPort(got.Host)
		if got.Method != r.method || !r.through && (err != nil || host != r.host) {
			t.Fatalf("%q is for %q %q here, and for %q %q there", raw[:end], r.method, r.host, got.Method, got.Host)
		}
		if got.ContentLength != r.length && !(r.length == -1 && len(got.TransferEncoding) == 1) {
			t.Fatalf("%q has a body of %d here, %d there", raw[:end], r.length, got.ContentLength)
		}
	})
}

// heard is a side of a connection that has said all it will, and keeps what it is told.
type heard struct {
	net.Conn
	says  *bytes.Reader
	total bytes.Buffer
}

func (h *heard) Read(b []byte) (int, error)       { return h.says.Read(b[:min(len(b), 7)]) }
func (h *heard) Write(b []byte) (int, error)      { return h.total.Write(b) }
func (h *heard) CloseWrite() error                { return nil }
func (h *heard) Close() error                     { return nil }
func (h *heard) SetWriteDeadline(time.Time) error { return nil }

// FuzzAnswer: whatever a server says before it says whether the connection stays HTTP, the
// client gets the same bytes in the same order, and only a final answer ends the look.
func FuzzAnswer(f *testing.F) {
	for _, s := range []string{
		"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nbytes", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 No\r\n\r\n",
		"HTTP/1.1 103 Early\n\nHTTP/1.0 200\n\n", "HTTP/1.1 +20 OK\r\n\r\n", "SSH-2.0-x\r\n", "\r\n\r\n", "HTTP/1.1 99\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		server, client := &heard{says: bytes.NewReader(raw)}, &heard{}
		g := newGate()
		g.want()
		in := newIntake(server)
		var count atomic.Uint64
		err := g.look(in, client, &count)
		if got := client.total.Bytes(); !bytes.HasPrefix(raw, got) || count.Load() != uint64(len(got)) {
			t.Fatalf("%q came as %q, counted %d", raw, got, count.Load())
		}
		if err == nil {
			status := <-g.status
			if g.wants() || status < 100 || status > 999 || status/100 == 1 && status != 101 {
				t.Fatalf("ends with %d", status)
			}
			if len(in.held()) != 0 {
				t.Fatalf("%q is kept back", in.held())
			}
		}
		in.release()
	})
}
