package egress

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

const proxyUser, proxyPassword = "operator", "s3cr3t-canary"

// httpProxy is an operator's proxy: it answers CONNECT by its own table of names.
func httpProxy(got chan<- string, routes map[string]string) func(net.Conn) {
	return func(c net.Conn) {
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		want := "Basic " + base64.StdEncoding.EncodeToString([]byte(proxyUser+":"+proxyPassword))
		if r.Header.Get("Proxy-Authorization") != want {
			fmt.Fprint(c, "HTTP/1.1 407 No\r\n\r\n")
			return
		}
		got <- r.Host
		if _, ok := routes[r.Host]; !ok {
			fmt.Fprint(c, "HTTP/1.1 403 No\r\n\r\n")
			return
		}
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nVia: x\r\n\r\n")
		_, _ = in.WriteTo(c) // it is the server, too
	}
}

func socksProxy(got chan<- string) func(net.Conn) {
	return func(c net.Conn) {
		b := make([]byte, 512)
		_, _ = io.ReadFull(c, b[:2])
		_, _ = io.ReadFull(c, b[:b[1]])
		_, _ = c.Write([]byte{5, 2})
		_, _ = io.ReadFull(c, b[:2])
		user := make([]byte, b[1])
		_, _ = io.ReadFull(c, user)
		_, _ = io.ReadFull(c, b[:1])
		password := make([]byte, b[0])
		_, _ = io.ReadFull(c, password)
		if string(user) != proxyUser || string(password) != proxyPassword {
			_, _ = c.Write([]byte{1, 1})
			return
		}
		_, _ = c.Write([]byte{1, 0})
		_, _ = io.ReadFull(c, b[:4])
		var host string
		if b[3] == 3 {
			_, _ = io.ReadFull(c, b[:1])
			name := make([]byte, b[0])
			_, _ = io.ReadFull(c, name)
			host = string(name)
		} else {
			_, _ = io.ReadFull(c, b[:4])
			host = net.IP(b[:4]).String()
		}
		_, _ = io.ReadFull(c, b[:2])
		got <- fmt.Sprintf("%s:%d", host, binary.BigEndian.Uint16(b))
		_, _ = c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
		echo(c)
	}
}

func TestTheOperatorsProxy(t *testing.T) {
	w := theWorld(t)
	got := make(chan string, 8)
	w.server(t, nil, "127.0.0.1:3128", httpProxy(got, map[string]string{"example.com:8080": "", "onlyproxy.example:8080": ""}))
	w.server(t, nil, "127.0.0.1:1080", socksProxy(got))
	w.server(t, w.internet, webB+":8080", echo)
	w.name(t, "example.com", "A "+webA) // where nobody listens: only the proxy gets there
	w.name(t, "direct.example", "A "+webB)
	for _, scheme := range []string{"http://%s:%s@127.0.0.1:3128", "socks5://%s:%s@127.0.0.1:1080"} {
		t.Run(scheme[:5], func(t *testing.T) {
			var log bytes.Buffer
			a := w.cage(t, policy("example.com", "direct.example", "onlyproxy.example", "refused.example"), func(c *Config) {
				c.Proxy = wire.Proxy{All: fmt.Sprintf(scheme, proxyUser, proxyPassword), No: "direct.example,10.0.0.0/8"}
				c.Log = slog.New(slog.NewTextHandler(&log, nil))
			})
			exchange(t, a.connect("example.com", 8080), "hi", "hi")
			if at := <-got; at != "example.com:8080" {
				t.Errorf("the proxy was asked for %s", at)
			}
			exchange(t, a.connect("direct.example", 8080), "hi", "hi")
			if len(got) > 0 {
				t.Errorf("NO_PROXY: the proxy was asked for %s", <-got)
			}
			// A name that the host's resolver does not know.
			addrs := a.addrs("onlyproxy.example")
			if len(addrs) != 1 || !inventedRange.Contains(parseAddr(addrs[0])) {
				t.Fatalf("got %v", addrs)
			}
			exchange(t, a.dial(addrs[0]+":8080"), "hi", "hi")
			if at := <-got; at != "onlyproxy.example:8080" {
				t.Errorf("the proxy was asked for %s", at)
			}
			if len(a.addrs("unlisted.example")) > 0 {
				t.Error("a name that no rule allows has an address")
			}
			a.refused("198.18.77.77:8080") // never given
			if strings.HasPrefix(scheme, "http:") {
				a.refused(a.addrs("refused.example")[0] + ":8080")
				r := a.record("the proxy's no", func(r Record) bool { return r.Verdict == Failed })
				if !strings.Contains(r.Reason, "it answered 403") {
					t.Errorf("got %+v", r)
				}
				<-got
			}
			raw, err := os.ReadFile(a.records)
			if err != nil {
				t.Fatal(err)
			}
			for _, secret := range []string{proxyPassword, proxyUser} {
				if bytes.Contains(raw, []byte(secret)) || strings.Contains(log.String(), secret) {
					t.Errorf("%s is on record", secret)
				}
			}
		})
	}
}

func TestProxiesThatAreNone(t *testing.T) {
	for _, bad := range []string{"ftp://u:" + proxyPassword + "@x:1", "http://u:" + proxyPassword + "@", "http://u:" + proxyPassword + "@[::1", "http://%zz:" + proxyPassword + "@x"} {
		_, err := New(Config{Egress: wire.Egress{Proxy: wire.Proxy{HTTPS: bad}}})
		if err == nil || strings.Contains(err.Error(), proxyPassword) {
			t.Errorf("got %v", err)
		}
	}
}
