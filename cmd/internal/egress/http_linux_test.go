package egress

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
)

// webServer answers with what it was asked for; it keeps connections.
func webServer(t testing.TB) func(net.Conn) {
	return func(c net.Conn) {
		in := bufio.NewReader(c)
		for {
			r, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			if r.Header.Get("Upgrade") == "websocket" && r.URL.Path == "/ws" {
				fmt.Fprint(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
				_, _ = in.WriteTo(c)
				return
			}
			if r.Header.Get("Expect") == "100-continue" {
				fmt.Fprint(c, "HTTP/1.1 100 Continue\r\n\r\n")
			}
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			answer := fmt.Sprintf("%s %s %s upgrade=%q body=%d", r.Method, r.Host, r.URL, r.Header.Get("Upgrade"), len(body))
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(answer), answer)
		}
	}
}

// ask sends raw and reads one answer; empty: the connection ended.
func asked(t *testing.T, c net.Conn, in *bufio.Reader, raw string) (status int, body string) {
	t.Helper()
	if _, err := c.Write([]byte(raw)); err != nil {
		return 0, ""
	}
	r, err := http.ReadResponse(in, nil)
	if err != nil {
		return 0, ""
	}
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

func get(host string) string { return "GET /x HTTP/1.1\r\nHost: " + host + "\r\n\r\n" }

func TestEachRequestOfAConnectionIsJudged(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":80", webServer(t))
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))

	c := a.connect("example.com", 80)
	in := bufio.NewReader(c)
	big := strings.Repeat("b", 100_000)
	for _, raw := range []string{
		get("example.com"), get("EXAMPLE.com.:80"), "\r\n" + get("example.com"),
		"POST /x HTTP/1.1\r\nHost: example.com\r\nContent-Length: 100000\r\n\r\n" + big,
		"POST /x HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\n\r\n5;e=1\r\nhello\r\n186a0\r\n" + big + "\r\n0\r\nTrailer: x\r\n\r\n",
		"GET http://example.com/abs HTTP/1.1\r\nHost: example.com\r\n\r\n",
		"OPTIONS * HTTP/1.1\r\nHost: example.com\r\n\r\n",
	} {
		status, body := asked(t, c, in, raw)
		if status != 200 || !strings.Contains(strings.ToLower(body), "example.com") {
			t.Fatalf("%.80q: got %d %q", raw, status, body)
		}
	}
	// The same connection, another server's name.
	if status, body := asked(t, c, in, get("evil.net")); status != 0 {
		t.Fatalf("the second host: got %d %q", status, body)
	}
	a.record("the second host", func(r Record) bool {
		return r.Verdict == Denied && r.Seen == "evil.net" && r.Name == "example.com" && r.Sent > 200_000
	})

	for what, raw := range map[string]string{
		"another host":             get("evil.net"),
		"no host":                  "GET / HTTP/1.1\r\n\r\n",
		"two hosts":                "GET / HTTP/1.1\r\nHost: example.com\r\nHost: evil.net\r\n\r\n",
		"a target elsewhere":       "GET http://evil.net/ HTTP/1.1\r\nHost: example.com\r\n\r\n",
		"a blank before a colon":   "GET / HTTP/1.1\r\nHost : evil.net\r\nHost: example.com\r\n\r\n",
		"a continued line":         "GET / HTTP/1.1\r\nHost: example.com\r\n .evil.net\r\n\r\n",
		"a lone CR":                "GET / HTTP/1.1\r\nHost: example.com\rHost: evil.net\r\n\r\n",
		"both lengths":             "POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
		"two lengths":              "POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
		"a strange coding":         "POST / HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: xchunked\r\n\r\n",
		"a signed length":          "POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: +5\r\n\r\n",
		"a blank in front":         " GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
		"a tab between":            "GET\t/\tHTTP/1.1\r\nHost: example.com\r\n\r\n",
		"HTTP/0.9":                 "GET /\r\n",
		"HTTP/2 without TLS":       "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"a port behind a userinfo": "GET / HTTP/1.1\r\nHost: example.com@evil.net\r\n\r\n",
		"its address":              get(webB),
		"too long":                 "GET / HTTP/1.1\r\nHost: example.com\r\nX: " + strings.Repeat("x", 60<<10) + "\r\n\r\n",
	} {
		c := a.connect("example.com", 80)
		status, body := asked(t, c, bufio.NewReader(c), raw)
		if status != 403 || !strings.Contains(body, "egress allow alice") {
			t.Errorf("%s: got %d %q", what, status, body)
		}
	}

	// An address that no rule names, by the page.
	c = a.dial(webB + ":80")
	status, body := asked(t, c, bufio.NewReader(c), get("evil.net"))
	if status != 403 || !strings.Contains(body, "no rule allows it") || !strings.Contains(body, "evil.net:80") {
		t.Errorf("got %d %q", status, body)
	}
}

func TestAHalfHeadReachesNobody(t *testing.T) {
	w := theWorld(t)
	got := make(chan string, 8)
	w.server(t, w.internet, webA+":80", func(c net.Conn) {
		b, _ := io.ReadAll(c)
		got <- string(b)
	})
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	// Byte by byte, with the name of another last.
	c := a.connect("example.com", 80)
	raw := get("evil.net")
	for i := range raw {
		if _, err := c.Write([]byte(raw[i : i+1])); err != nil {
			break
		}
	}
	if b, _ := io.ReadAll(c); !bytes.HasPrefix(b, []byte("HTTP/1.1 403")) {
		t.Errorf("got %q", b)
	}
	if s := <-got; strings.Contains(s, "\n") {
		t.Errorf("the server got %q", s)
	}
	// A head that never ends is held for a bounded time.
	c = a.connect("example.com", 80)
	if _, err := c.Write([]byte("GET / HTTP/1.1\r\nHost: exam")); err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(c); !bytes.Contains(b, []byte("did not come to an end")) {
		t.Errorf("got %q", b)
	}
	<-got
	// A request without its last newline, and then the end.
	c = a.connect("example.com", 80)
	if _, err := c.Write([]byte("GET /")); err != nil {
		t.Fatal(err)
	}
	_ = c.CloseWrite()
	if b, _ := io.ReadAll(c); !bytes.HasPrefix(b, []byte("HTTP/1.1 403")) {
		t.Errorf("got %q", b)
	}
	<-got
}

func TestUpgrades(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":80", webServer(t))
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))

	c := a.connect("example.com", 80)
	in := bufio.NewReader(c)
	if status, _ := asked(t, c, in, "GET /ws HTTP/1.1\r\nHost: example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"); status != 101 {
		t.Fatalf("got %d", status)
	}
	const frame = "\x81\x05GET / HTTP/1.1\r\nHost: evil.net\r\n\r\n" // no longer HTTP
	if _, err := c.Write([]byte(frame)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len(frame))
	if _, err := io.ReadFull(in, b); err != nil || string(b) != frame {
		t.Fatalf("got %q, %v", b, err)
	}

	// A server that passes over the offer goes on in HTTP, and so does the gateway.
	c = a.connect("example.com", 80)
	in = bufio.NewReader(c)
	if status, _ := asked(t, c, in, "GET /no HTTP/1.1\r\nHost: example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"); status != 200 {
		t.Fatalf("got %d", status)
	}
	if status, _ := asked(t, c, in, get("example.com")); status != 200 {
		t.Fatalf("after it: got %d", status)
	}
	if status, _ := asked(t, c, in, get("evil.net")); status != 0 {
		t.Fatalf("another host after it: got %d", status)
	}

	// curl offers HTTP/2 so; the server must not take it, as its requests could not be read.
	c = a.connect("example.com", 80)
	status, body := asked(t, c, bufio.NewReader(c), "GET /h2c HTTP/1.1\r\nHost: example.com\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n")
	if status != 200 || !strings.Contains(body, `upgrade=""`) {
		t.Errorf("got %d %q", status, body)
	}
	// TLS in the middle of a connection, of which the name would not be looked at.
	c = a.connect("example.com", 80)
	status, body = asked(t, c, bufio.NewReader(c), "GET /tls HTTP/1.1\r\nHost: example.com\r\nConnection: Upgrade\r\nUpgrade: foo, TLS/1.0\r\n\r\n")
	if status != 200 || !strings.Contains(body, `upgrade=""`) {
		t.Errorf("got %d %q", status, body)
	}
}

// CASES 30.
func TestAProxyThatIsAllowedReachesWhatIsAllowed(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webB+":80", echo)
	w.server(t, w.internet, webA+":8080", func(c net.Conn) { // a proxy
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		if err != nil || r.Method != http.MethodConnect {
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nproxied")
			return
		}
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
		_, _ = in.WriteTo(c)
	})
	w.name(t, "proxy.example", "A "+webA)
	for _, test := range []struct {
		rules []string
		raw   string
		want  int
		seen  string
	}{
		{[]string{"proxy.example"}, "CONNECT evil.net:80 HTTP/1.1\r\nHost: evil.net:80\r\n\r\n", 403, "evil.net"},
		{[]string{"proxy.example"}, "CONNECT evil.net:80 HTTP/1.1\r\nHost: proxy.example\r\n\r\n", 403, "evil.net"},
		{[]string{"proxy.example"}, "CONNECT 10.0.0.1:80 HTTP/1.1\r\nHost: 10.0.0.1:80\r\n\r\n", 403, "10.0.0.1"},
		{[]string{"proxy.example"}, "GET http://evil.net/ HTTP/1.1\r\nHost: evil.net\r\n\r\n", 403, "evil.net"},
		{[]string{"proxy.example", "evil.net:443"}, "CONNECT evil.net:80 HTTP/1.1\r\nHost: evil.net:80\r\n\r\n", 403, "evil.net"},
		{[]string{"proxy.example", "good.example"}, "CONNECT good.example:80 HTTP/1.1\r\nHost: good.example:80\r\n\r\n", 200, "good.example"},
		{[]string{"proxy.example", "good.example"}, "GET http://good.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n", 200, "good.example"},
		{[]string{"proxy.example any-sni"}, "CONNECT evil.net:80 HTTP/1.1\r\nHost: evil.net:80\r\n\r\n", 200, ""},
	} {
		t.Run(strings.Join(test.rules, ",")+" "+test.raw[:20], func(t *testing.T) {
			a := w.cage(t, rules.Policy{Allow: test.rules})
			c := a.connect("proxy.example", 8080)
			in := bufio.NewReader(c)
			status, body := 0, ""
			if _, err := c.Write([]byte(test.raw)); err != nil {
				t.Fatal(err)
			}
			r, err := http.ReadResponse(in, &http.Request{Method: test.raw[:strings.IndexByte(test.raw, ' ')]})
			if err == nil {
				status = r.StatusCode
				if r.ContentLength > 0 {
					b, _ := io.ReadAll(r.Body)
					body = string(b)
				}
			}
			if status != test.want {
				t.Fatalf("got %d %q", status, body)
			}
			if remedy := "egress allow alice " + net.JoinHostPort(test.seen, "80") + "\n"; status == 403 && !strings.Contains(body, remedy) {
				t.Errorf("got %q, want %q", body, remedy)
			}
			if status == 200 && strings.HasPrefix(test.raw, "CONNECT") {
				if _, err := c.Write([]byte("tunnel")); err != nil {
					t.Fatal(err)
				}
				b := make([]byte, 6)
				if _, err := io.ReadFull(in, b); err != nil || string(b) != "tunnel" {
					t.Fatalf("got %q, %v", b, err)
				}
			}
			c.Close()
			r2 := a.record("the proxy", func(r Record) bool { return r.Kind == kindTCP })
			if r2.Name != "proxy.example" || r2.Address != webA || r2.Seen != test.seen || (r2.Verdict == Allowed) != (test.want == 200) {
				t.Errorf("got %+v", r2)
			}
		})
	}
}

func TestOpenModeLetsStrangeRequestsPassAndDeniesNames(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":80", webServer(t))
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, rules.Policy{Open: true, Deny: []string{"evil.net", "bad.net:8443"}})
	// A proxy on another port than the one that is denied.
	for _, request := range []string{"CONNECT bad.net:8443 HTTP/1.1\r\nHost: bad.net:8443\r\n\r\n", "GET http://bad.net:8443/ HTTP/1.1\r\nHost: bad.net:8443\r\n\r\n"} {
		c := a.connect("example.com", 80)
		if status, body := asked(t, c, bufio.NewReader(c), request); status != 403 || !strings.Contains(body, "the rule bad.net:8443 denies it") {
			t.Errorf("%q: got %d %q", request, status, body)
		}
	}
	c := a.connect("example.com", 80)
	if status, _ := asked(t, c, bufio.NewReader(c), "GET http://bad.net:8444/ HTTP/1.1\r\nHost: bad.net:8444\r\n\r\n"); status != 200 {
		t.Errorf("another port: got %d", status)
	}
	c = a.connect("example.com", 80)
	if status, _ := asked(t, c, bufio.NewReader(c), get("whatever.example")); status != 200 {
		t.Errorf("got %d", status)
	}
	c = a.dial(webA + ":80") // no name at all
	if status, _ := asked(t, c, bufio.NewReader(c), get("example.com")); status != 200 {
		t.Errorf("got %d", status)
	}
	c = a.dial(webA + ":80")
	if status, body := asked(t, c, bufio.NewReader(c), get("evil.net")); status != 403 || !strings.Contains(body, "the rule evil.net denies it") {
		t.Errorf("got %d %q", status, body)
	}
	a.refused("10.0.0.1:22")
	a.refused("169.254.169.254:8080")
}
