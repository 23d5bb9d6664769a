// What real servers take although no client sends it: a name that is looked at here and read
// in another way there would be another server's. Each attack works where nothing is between.

package egress

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// program runs a server of the internet that prints a line once it listens.
func (w *world) serverProgram(t *testing.T, argv ...string) {
	t.Helper()
	if _, err := exec.LookPath(argv[0]); err != nil {
		t.Skipf("%s is missing", argv[0])
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	w.internet.in(func() { err = cmd.Start() })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%s: %v: %s", argv[0], err, said.Bytes())
	}
}

// hostsServer answers with the host that it was asked for.
func hostsServer(t *testing.T, w *world, addr string) {
	t.Helper()
	var l net.Listener
	var err error
	w.internet.in(func() { l, err = net.Listen("tcp", addr) })
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprintf(rw, "page of %s", r.Host) })}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close() })
}

const pythonHosts = `
import http.server
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = 'page of %s %s' % (self.headers['Host'], self.path)
        self.send_response(200); self.send_header('Content-Length', str(len(text))); self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer.request_queue_size = 1024 # a full queue costs a client a second
s = http.server.ThreadingHTTPServer(('` + webA + `', 8080), H)
print('up', flush=True); s.serve_forever()
`

const nodeHosts = `require('http').createServer((q, r) => r.end('page of ' + q.headers.host + ' ' + q.url)).listen(5432, '` + webA + `', () => console.log('up'))`

// said sends raw and gives what comes back until the end, or until nothing more does.
func said(c net.Conn, raw string) string {
	_ = c.SetDeadline(time.Now().Add(3 * time.Second))
	if _, err := io.WriteString(c, raw); err != nil {
		return ""
	}
	var all []byte
	b := make([]byte, 4<<10)
	for {
		n, err := c.Read(b)
		if all = append(all, b[:n]...); err != nil || bytes.Contains(all, []byte("page of")) {
			return string(all)
		}
	}
}

// CASES 30.
func TestRequestsThatOnlySomeServersTake(t *testing.T) {
	w := theWorld(t)
	hostsServer(t, w, webA+":80")
	w.serverProgram(t, "/usr/bin/python3", "-u", "-c", pythonHosts)
	w.serverProgram(t, "node", "-e", nodeHosts)
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	ports := map[string]int{"go": 80, "python": 8080, "node": 5432}
	for what, test := range map[string]struct{ server, raw string }{
		"a method of any length":       {"go", strings.Repeat("M", 40) + " / HTTP/1.1\r\nHost: evil.net\r\n\r\n"},
		"a very long method":           {"go", strings.Repeat("M", 20<<10) + " / HTTP/1.1\r\nHost: evil.net\r\n\r\n"},
		"no version, and a host":       {"python", "GET http://evil.net/\r\n\r\n"},
		"no version, and no path":      {"python", "GET evil.net\r\nHost: evil.net\r\n\r\n"},
		"no version, and headers":      {"node", "POST *\r\nHost: evil.net\r\n\r\n"},
		"blanks of Latin-1":            {"python", "GET\xa0http://evil.net/\xa0HTTP/1.1\r\nHost: evil.net\r\n\r\n"},
		"next line as a blank":         {"python", "GET\x85/evil.net\x85HTTP/1.1\r\nHost: evil.net\r\n\r\n"},
		"separators of ASCII":          {"python", "GET\x1c/evil.net\x1fHTTP/1.1\r\nHost: evil.net\r\n\r\n"},
		"another protocol's version":   {"node", "GET / RTSP/1.0\r\nHost: evil.net\r\n\r\n"},
		"a source of another protocol": {"node", "SOURCE / ICE/1.0\r\nHost: evil.net\r\n\r\n"},
	} {
		t.Run(what, func(t *testing.T) {
			port := ports[test.server]
			direct, err := net.Dial("tcp", net.JoinHostPort(webA, strconv.Itoa(port)))
			if err != nil {
				t.Fatal(err)
			}
			defer direct.Close()
			if got := said(direct, test.raw); !strings.Contains(got, "page of") || !strings.Contains(got, "evil.net") {
				t.Errorf("the control: %s answered %q", test.server, got)
			}
			if got := said(a.connect("example.com", port), test.raw); strings.Contains(got, "page of") {
				t.Errorf("inside: %q", got)
			}
			// In small pieces as well, and the server has not got a whole line.
			c := a.connect("example.com", port)
			_ = c.SetNoDelay(true)
			_ = c.SetDeadline(time.Now().Add(3 * time.Second))
			step := max(1, len(test.raw)/100)
			for i := 0; i < len(test.raw); i += step {
				if _, err := io.WriteString(c, test.raw[i:min(i+step, len(test.raw))]); err != nil {
					break
				}
			}
			if got, _ := io.ReadAll(c); bytes.Contains(got, []byte("page of")) {
				t.Errorf("inside, in pieces: %q", got)
			}
		})
	}
}

// variants are requests for evil.net in every form that a server might take.
func variants() (all []string) {
	const host = "Host: evil.net\r\n"
	targets := []string{"/", "/x", "*", "x", "?", "{", "evil.net", "evil.net:80", "http:/evil.net/", "http://evil.net/", "HTTP://evil.net/x", "//evil.net/", `\evil.net`, "/ x", ""}
	for _, method := range []string{"GET", "POST", "HEAD", "OPTIONS", "SOURCE", "SEARCH", "get", "XGET", strings.Repeat("G", 33)} {
		for _, target := range targets {
			for _, version := range []string{" HTTP/1.1", " HTTP/1.0", " http/1.1", " HTTP/1.1 ", " HTTP/2.0", " HTTP/0.9", " RTSP/1.0", " ICE/1.0", " HTTP/1.1 x", " ", ""} {
				all = append(all, method+" "+target+version+"\r\n"+host+"\r\n", method+" "+target+version+"\n"+strings.TrimSuffix(host, "\r\n")+"\n\n")
			}
		}
	}
	blanks := []string{" ", "\t", "\v", "\f", "\r", "  ", "\xa0", "\x85", "\x1c", "\x00"}
	for _, a := range blanks {
		for _, b := range blanks {
			all = append(all, "GET"+a+"/"+b+"HTTP/1.1\r\n"+host+"\r\n", a+"GET /"+b+"HTTP/1.1\r\n"+host+"\r\n")
		}
		for _, name := range []string{"Host" + a, a + "Host", "X: y\r\n" + a + "Host"} {
			all = append(all, "GET / HTTP/1.1\r\n"+name+": evil.net\r\nHost: example.com\r\n\r\n", "GET / HTTP/1.1\r\nHost: example.com\r\n"+name+": evil.net\r\n\r\n",
				"GET / HTTP/1.1\r\nHost: example.com"+a+"evil.net\r\n\r\n")
		}
	}
	for i := range len(all) / 3 {
		all = append(all, get("example.com")+all[3*i]) // behind one that is allowed
	}
	return all
}

// CASES 30: whatever a request looks like, no real server takes it for another host's.
func TestNoFormOfARequestReachesAnotherHost(t *testing.T) {
	w := theWorld(t)
	hostsServer(t, w, webA+":80")
	w.serverProgram(t, "/usr/bin/python3", "-u", "-c", keepHosts)
	w.serverProgram(t, "node", "-e", nodeHosts)
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	a.addrs("example.com")
	talk := func(c net.Conn, raw string) (answer string, evil bool) {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		_, _ = io.WriteString(c, raw)
		_ = c.(*net.TCPConn).CloseWrite()
		b, _ := io.ReadAll(c)
		return string(b), bytes.Contains(b, []byte("page of evil.net")) || bytes.Contains(b, []byte("page of None"))
	}
	for what, port := range map[string]string{"go": "80", "python": "8080", "node": "5432"} {
		t.Run(what, func(t *testing.T) {
			at := net.JoinHostPort(webA, port)
			all, taken := variants(), 0
			for i, raw := range all {
				if answer, evil := talk(a.dial(at), raw); evil {
					t.Errorf("%q: %q", raw, answer)
				}
				if i%10 > 0 {
					continue
				}
				direct, err := net.Dial("tcp", at) // the control
				if err != nil {
					t.Fatal(err)
				}
				if _, evil := talk(direct, raw); evil {
					taken++
				}
			}
			t.Logf("%d forms; of every tenth %d reach evil.net without a gateway", len(all), taken)
			if taken < 10 {
				t.Error("the control: the server takes next to none of them")
			}
		})
	}
}

// keepHosts is pythonHosts with connections that are kept.
var keepHosts = strings.Replace(pythonHosts, "class H(http.server.BaseHTTPRequestHandler):", "class H(http.server.BaseHTTPRequestHandler):\n    protocol_version = 'HTTP/1.1'", 1)

// crlfServer is a server by the letter: a line ends in CR LF and in nothing else, what stands
// behind a chunk's length is passed over, and there are no trailers. evil is told of each
// request for another host.
func crlfServer(evil chan<- string) func(net.Conn) {
	return func(c net.Conn) {
		in := bufio.NewReader(c)
		line := func() (string, error) {
			var b []byte
			for !bytes.HasSuffix(b, []byte("\r\n")) {
				c, err := in.ReadByte()
				if err != nil {
					return "", err
				}
				b = append(b, c)
			}
			return string(b[:len(b)-2]), nil
		}
		for {
			length, chunked, host := 0, false, ""
			for first := true; ; first = false {
				l, err := line()
				if err != nil {
					return
				}
				if l == "" && !first {
					break
				}
				name, value, _ := strings.Cut(l, ": ")
				switch name {
				case "Host":
					host = value
				case "Content-Length":
					length, _ = strconv.Atoi(value)
				case "Transfer-Encoding":
					chunked = true
				}
			}
			for chunked {
				l, err := line()
				if err != nil {
					return
				}
				size, _, _ := strings.Cut(l, ";")
				n, _ := strconv.ParseInt(size, 16, 32)
				if n == 0 {
					break
				}
				if _, err := in.Discard(int(n) + 2); err != nil {
					return
				}
			}
			if _, err := in.Discard(length); err != nil {
				return
			}
			if host == "evil.net" {
				evil <- host
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\npage of %s", 8+len(host), host)
		}
	}
}

// CASES 30: a request that hides in another one's body, for a server that reads bodies in its
// own way.
func TestRequestsThatHideInABody(t *testing.T) {
	w := theWorld(t)
	evil := make(chan string, 8)
	w.server(t, w.internet, webA+":80", crlfServer(evil))
	w.serverProgram(t, "/usr/bin/python3", "-u", "-c", keepHosts) // reads no body of a GET
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	hidden := "GET /hidden HTTP/1.1\r\nHost: evil.net\r\n\r\n"
	last := "0\r\n\r\n" + hidden
	chunked := "POST / HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\n\r\n"
	for what, test := range map[string]struct {
		port int
		raw  string
	}{
		"in the body of a GET":                    {8080, fmt.Sprintf("GET / HTTP/1.1\r\nHost: example.com\r\nContent-Length: %d\r\n\r\n%s", len(hidden), hidden)},
		"its end left to the next one":            {8080, "GET / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 21\r\n\r\nGET /hidden HTTP/1.1\r\nHost: evil.net\r\n\r\n"},
		"behind a chunk's line that ends in LF":   {80, chunked + fmt.Sprintf("2;\nxx\r\n%02x\r\n%s\r\n0\r\n\r\n", len(last), last)},
		"behind a header that LF ends":            {80, fmt.Sprintf("POST / HTTP/1.1\r\nHost: example.com\r\nX: y\nContent-Length: %d\r\n\r\n%s", len(hidden), hidden)},
		"as a trailer, for one that has no such":  {80, chunked + "0\r\n" + hidden},
		"as a body's end that a second LF begins": {80, chunked + "0\r\n\nGET /hidden HTTP/1.1\r\nHost: evil.net\r\n\r\n"},
	} {
		t.Run(what, func(t *testing.T) {
			talk := func(c net.Conn) string {
				_ = c.SetDeadline(time.Now().Add(2 * time.Second))
				_, _ = io.WriteString(c, test.raw)
				b, _ := io.ReadAll(c)
				return string(b)
			}
			direct, err := net.Dial("tcp", net.JoinHostPort(webA, strconv.Itoa(test.port)))
			if err != nil {
				t.Fatal(err)
			}
			defer direct.Close()
			if got := talk(direct); !strings.Contains(got, "page of evil.net") {
				t.Errorf("the control: %q", got)
			}
			for len(evil) > 0 {
				<-evil
			}
			if got := talk(a.connect("example.com", test.port)); strings.Contains(got, "page of evil.net") || len(evil) > 0 {
				t.Errorf("inside: %q, %d requests", got, len(evil))
			}
		})
	}
	// Bodies that are none of that arrive whole.
	for _, body := range []string{"GET", "get /hidden HTTP", strings.Repeat("a", 70<<10), `{"query": "GET / HTTP/1.1"}`, "line\nGET / HTTP/1.1\r\n"} {
		c := a.connect("example.com", 80)
		raw := fmt.Sprintf("POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		if status, page := asked(t, c, bufio.NewReader(c), raw); status != 200 || page != "page of example.com" {
			t.Errorf("%.20q: got %d %q", body, status, page)
		}
		c.Close()
	}
}

// before puts something in front of what is first written, or changes it.
type before struct {
	net.Conn
	change func([]byte) []byte
}

func (b *before) Write(p []byte) (int, error) {
	if b.change == nil {
		return b.Conn.Write(p)
	}
	_, err := b.Conn.Write(b.change(bytes.Clone(p)))
	b.change = nil
	return len(p), err
}

// CASES 30: TLS that a server accepts and that does not begin like TLS.
func TestHellosThatOnlySomeServersTake(t *testing.T) {
	w := theWorld(t)
	cert, pool := certificate(t, "example.com", "evil.net")
	w.server(t, w.internet, webA+":443", func(c net.Conn) { echo(tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}})) })
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	for what, change := range map[string]func([]byte) []byte{
		"an alert that warns in front": func(b []byte) []byte { return append([]byte{recordAlert, 3, 1, 0, 2, 1, 90}, b...) },
		"one of another version":       func(b []byte) []byte { return append([]byte{recordAlert, 2, 0, 0, 2, 1, 90}, b...) },
		"a record of another version":  func(b []byte) []byte { b[1] = 2; return b },
		"a record of a late version":   func(b []byte) []byte { b[1] = 15; return b },
	} {
		t.Run(what, func(t *testing.T) {
			talk := func(c net.Conn) error {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(5 * time.Second))
				s := tls.Client(&before{c, change}, &tls.Config{ServerName: "evil.net", RootCAs: pool})
				if _, err := s.Write([]byte("hi")); err != nil {
					return err
				}
				_, err := io.ReadFull(s, make([]byte, 2))
				return err
			}
			direct, err := net.Dial("tcp", webA+":443")
			if err != nil {
				t.Fatal(err)
			}
			if err := talk(direct); err != nil {
				t.Errorf("the control: %v", err)
			}
			if talk(a.connect("example.com", 443)) == nil {
				t.Error("inside it reaches evil.net")
			}
		})
	}
}

// CASES 30: a protocol is known by what is said, not by its port.
func TestNamesAreJudgedOnAnyPort(t *testing.T) {
	w := theWorld(t)
	cert, pool := certificate(t, "example.com", "evil.net")
	for _, port := range []string{"80", "22"} {
		w.server(t, w.internet, webA+":"+port, func(c net.Conn) { echo(tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}})) })
	}
	hostsServer(t, w, webA+":443")
	hostsServer(t, w, webA+":5432")
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	direct := func(port int) net.Conn {
		c, err := net.Dial("tcp", net.JoinHostPort(webA, strconv.Itoa(port)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	handshake := func(c net.Conn, name string) error {
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		s := tls.Client(c, &tls.Config{ServerName: name, RootCAs: pool})
		if _, err := s.Write([]byte("hi")); err != nil {
			return err
		}
		_, err := io.ReadFull(s, make([]byte, 2))
		return err
	}
	for _, port := range []int{80, 22} {
		if err := errors.Join(handshake(direct(port), "evil.net"), handshake(a.connect("example.com", port), "example.com")); err != nil {
			t.Errorf("TLS on %d, the controls: %v", port, err)
		}
		if handshake(a.connect("example.com", port), "evil.net") == nil {
			t.Errorf("TLS on %d reaches another server's name", port)
		}
	}
	for _, port := range []int{443, 5432} {
		if got := said(direct(port), get("evil.net")); !strings.Contains(got, "page of evil.net") {
			t.Errorf("HTTP on %d, the control: %q", port, got)
		}
		if got := said(a.connect("example.com", port), get("example.com")); !strings.Contains(got, "page of example.com") {
			t.Errorf("HTTP on %d: %q", port, got)
		}
		if got := said(a.connect("example.com", port), get("evil.net")); strings.Contains(got, "page of") {
			t.Errorf("HTTP on %d reaches another server's name: %q", port, got)
		}
	}
}

// CASES 30: what goes through a proxy is judged again, and so is what goes to a server that
// only says that it is one.
func TestWhatGoesThroughAProxyIsJudged(t *testing.T) {
	w := theWorld(t)
	cert, pool := certificate(t, "good.example", "evil.net")
	hostsServer(t, w, webA+":80")                            // says yes to a CONNECT, as Go's servers do
	w.server(t, w.internet, webA+":8080", func(c net.Conn) { // a proxy, of which every way leads to one place
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil || r.Method != http.MethodConnect {
			return
		}
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
		echo(tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}}))
	})
	w.name(t, "proxy.example", "A "+webA)
	a := w.cage(t, policy("proxy.example:80", "proxy.example:8080", "good.example"))
	for what, raw := range map[string]string{
		"a yes, and another host": "CONNECT good.example:80 HTTP/1.1\r\nHost: good.example:80\r\n\r\n",
		"a way to itself":         "CONNECT proxy.example:80 HTTP/1.1\r\nHost: proxy.example:80\r\n\r\n",
	} {
		t.Run(what, func(t *testing.T) {
			talk := func(c net.Conn) string {
				_ = c.SetDeadline(time.Now().Add(3 * time.Second))
				in := bufio.NewReader(c)
				if _, err := io.WriteString(c, raw); err != nil {
					return ""
				}
				r, err := http.ReadResponse(in, nil) // with a body, since it is no proxy
				if err != nil {
					return ""
				}
				if _, err := io.Copy(io.Discard, r.Body); err != nil {
					return ""
				}
				_, body := asked(t, c, in, get("evil.net"))
				return body
			}
			direct, err := net.Dial("tcp", webA+":80")
			if err != nil {
				t.Fatal(err)
			}
			defer direct.Close()
			if got := talk(direct); got != "page of evil.net" {
				t.Errorf("the control: %q", got)
			}
			if got := talk(a.connect("proxy.example", 80)); got != "" {
				t.Errorf("inside: %q", got)
			}
		})
	}
	through := func(c *net.TCPConn, name string) error {
		return hiThrough(c, "CONNECT good.example:443 HTTP/1.1\r\nHost: good.example\r\n\r\n", name, pool)
	}
	if err := through(a.connect("proxy.example", 8080), "good.example"); err != nil {
		t.Errorf("what is allowed: %v", err)
	}
	if through(a.connect("proxy.example", 8080), "evil.net") == nil {
		t.Error("another server's name passes a proxy")
	}
	// What goes through one is cut as all else is, when a rule goes.
	live := a.connect("proxy.example", 8080)
	if err := through(live, "good.example"); err != nil {
		t.Fatal(err)
	}
	if err := a.g.SetRules(policy("proxy.example:80", "proxy.example:8080", "good.example:80")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, live); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("what is no longer allowed goes on: %v", err)
	}
	// A port of the proxy itself that no rule names.
	c := a.connect("proxy.example", 8080)
	if status, _ := asked(t, c, bufio.NewReader(c), "CONNECT proxy.example:22 HTTP/1.1\r\nHost: proxy.example:22\r\n\r\n"); status != 403 {
		t.Errorf("a port of the proxy: got %d", status)
	}
}

// hiThrough asks a proxy for a way, and says hi over TLS to the server of that name behind it.
func hiThrough(c net.Conn, request, name string, pool *x509.CertPool) error {
	if _, err := io.WriteString(c, request); err != nil {
		return err
	}
	r, err := http.ReadResponse(bufio.NewReaderSize(c, 16), &http.Request{Method: http.MethodConnect})
	if err != nil {
		return err
	}
	if r.StatusCode != http.StatusOK {
		return errors.New(r.Status)
	}
	s := tls.Client(c, &tls.Config{ServerName: name, RootCAs: pool})
	if _, err := s.Write([]byte("hi")); err != nil {
		return err
	}
	_, err = io.ReadFull(s, make([]byte, 2))
	return err
}

// A CONNECT has no body, and a proxy that passes over the length of one takes what follows as what
// goes through it.
func TestWhatGoesThroughAProxyIsJudgedWhateverItsRequestSaysOfABody(t *testing.T) {
	w := theWorld(t)
	cert, pool := certificate(t, "good.example", "evil.net")
	w.server(t, w.internet, webA+":8080", forwarder(w, map[string]string{"good.example:443": webB + ":443"}))
	w.server(t, w.internet, webB+":443", func(c net.Conn) { echo(tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}})) })
	w.name(t, "proxy.example", "A "+webA)
	a := w.cage(t, policy("proxy.example:8080", "good.example"))
	through := func(c net.Conn, header, name string) error {
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		return hiThrough(c, "CONNECT good.example:443 HTTP/1.1\r\nHost: good.example:443\r\n"+header+"\r\n", name, pool)
	}
	const body = "Content-Length: 1000000\r\n"
	direct, err := net.Dial("tcp", webA+":8080")
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	if err := through(direct, body, "evil.net"); err != nil {
		t.Errorf("the control: %v", err)
	}
	if through(a.connect("proxy.example", 8080), body, "evil.net") == nil {
		t.Error("another server's name passes a proxy as the body of a request")
	}
	if err := through(a.connect("proxy.example", 8080), "Content-Length: 0\r\n", "good.example"); err != nil {
		t.Errorf("a request that says it has none: %v", err)
	}
}

// Each way through a proxy is another layer that is looked at: a server that always says yes
// would have them grow without end.
func TestWaysThroughProxiesAreBounded(t *testing.T) {
	w := theWorld(t)
	hostsServer(t, w, webA+":80")
	w.name(t, "proxy.example", "A "+webA)
	a := w.cage(t, policy("proxy.example:80"))
	layers := func(c net.Conn) int {
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		in := bufio.NewReader(c)
		for n := range 3 * maxTunnels {
			if status, _ := asked(t, c, in, "CONNECT proxy.example:80 HTTP/1.1\r\nHost: proxy.example:80\r\n\r\n"); status != 200 {
				return n
			}
		}
		return 3 * maxTunnels
	}
	direct, err := net.Dial("tcp", webA+":80")
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	if n := layers(direct); n != 3*maxTunnels {
		t.Errorf("the control: %d", n)
	}
	if n := layers(a.connect("proxy.example", 80)); n != maxTunnels {
		t.Errorf("inside: %d, want %d", n, maxTunnels)
	}
}

// forwarder is a proxy that knows by itself where names lead.
func forwarder(w *world, where map[string]string) func(net.Conn) {
	return func(c net.Conn) {
		in := bufio.NewReader(c)
		r, err := http.ReadRequest(in)
		if err != nil || r.Method != http.MethodConnect {
			return
		}
		var on net.Conn
		w.internet.in(func() { on, err = net.Dial("tcp", where[r.Host]) })
		if err != nil {
			fmt.Fprint(c, "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
			return
		}
		defer on.Close()
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
		go func() { _, _ = io.Copy(on, in); on.Close() }()
		_, _ = io.Copy(c, on)
	}
}

// CASES 30: a connection goes on while rules allow each name on its way, not the last alone.
func TestEveryNameOnTheWayThroughProxiesIsJudgedAgain(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", forwarder(w, map[string]string{"two.example:3128": webB + ":3128"}))
	w.server(t, w.internet, webB+":3128", forwarder(w, map[string]string{"three.example:3129": webA + ":3129"}))
	w.server(t, w.internet, webA+":3129", forwarder(w, map[string]string{"end.example:80": webB + ":80"}))
	w.server(t, w.internet, webB+":80", webServer(t))
	w.name(t, "one.example", "A "+webA)
	w.name(t, "end.example", "A "+webA) // for the agent; the last proxy knows better
	way := []string{"one.example", "two.example", "three.example", "end.example"}
	live := func(a *caged) *net.TCPConn {
		t.Helper()
		a.addrs("end.example") // given for the address of the first proxy, too
		c := a.connect("one.example", 8080)
		in := bufio.NewReader(c)
		for _, to := range []string{"two.example:3128", "three.example:3129", "end.example:80"} {
			fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", to, to)
			if r, err := http.ReadResponse(in, &http.Request{Method: http.MethodConnect}); err != nil || r.StatusCode != http.StatusOK {
				t.Fatalf("%s: %+v %v", to, r, err)
			}
		}
		if status, body := asked(t, c, in, get("end.example")); status != 200 || !strings.HasPrefix(body, "GET end.example") {
			t.Fatalf("got %d %q", status, body)
		}
		return c
	}
	for i, name := range way {
		for what, away := range map[string]func(*Gateway) error{
			"its rule goes": func(g *Gateway) error { return g.SetRules(policy(slices.Delete(slices.Clone(way), i, i+1)...)) },
			"a word":        func(g *Gateway) error { return g.Deny(name, wire.EgressRun) },
		} {
			t.Run(name+" "+what, func(t *testing.T) {
				a := w.cage(t, policy(append(slices.Clone(way), "other.example")...))
				c := live(a)
				// The control: a change that is none of its own leaves it alone.
				if err := a.g.Deny("other.example", wire.EgressRun); err != nil {
					t.Fatal(err)
				}
				if status, _ := asked(t, c, bufio.NewReader(c), get("end.example")); status != 200 {
					t.Fatalf("after another change: got %d", status)
				}
				if err := away(a.g); err != nil {
					t.Fatal(err)
				}
				_ = c.SetReadDeadline(time.Now().Add(2 * time.Second)) // it is cut by now
				if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("it goes on: %v", err)
				}
			})
		}
	}
}

// The same in mode open, where what is asked of a proxy goes by its own port, too.
func TestWhatAProxyIsAskedForIsJudgedByItsPortInModeOpen(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":80", forwarder(w, map[string]string{"far.example:8443": webB + ":8443", "10.0.0.1:8443": webB + ":8443"}))
	w.server(t, w.internet, webB+":8443", webServer(t))
	w.name(t, "proxy.example", "A "+webA)
	deny := func(rule string) func(*Gateway) error {
		return func(g *Gateway) error { return g.Deny(rule, wire.EgressRun) }
	}
	for what, c := range map[string]struct {
		to     string
		before []string
		change func(*Gateway) error // after it is through
		cut    bool
	}{
		"its port":                          {"far.example:8443", nil, deny("far.example:8443"), true},
		"its name":                          {"far.example:8443", nil, deny("far.example"), true},
		"the proxy":                         {"far.example:8443", nil, deny("proxy.example"), true},
		"another port":                      {"far.example:8443", nil, deny("far.example:80"), false},
		"another port before":               {"far.example:8443", []string{"far.example:80"}, deny("other.example"), false},
		"no longer open":                    {"far.example:8443", nil, func(g *Gateway) error { return g.SetRules(policy("proxy.example")) }, true},
		"the proxy's network":               {"10.0.0.1:8443", nil, deny("other.example"), false},
		"an address of the proxy's network": {"10.0.0.1:8443", nil, deny("10.0.0.1:8443"), true},
	} {
		t.Run(what, func(t *testing.T) {
			a := w.cage(t, rules.Policy{Open: true, Deny: c.before})
			conn := a.connect("proxy.example", 80)
			in := bufio.NewReader(conn)
			fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", c.to, c.to)
			if r, err := http.ReadResponse(in, &http.Request{Method: http.MethodConnect}); err != nil || r.StatusCode != http.StatusOK {
				t.Fatalf("got %+v, %v", r, err)
			}
			if err := c.change(a.g); err != nil {
				t.Fatal(err)
			}
			if !c.cut {
				if status, _ := asked(t, conn, in, get("far.example")); status != 200 {
					t.Errorf("it is cut: %d", status)
				}
				return
			}
			_ = conn.SetReadDeadline(time.Now().Add(2 * time.Second)) // it is cut by now
			if _, err := in.ReadByte(); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("it goes on: %v", err)
			}
		})
	}
}

// A server's other name, which only mode open let be asked for, goes with the mode.
func TestWhatModeOpenLetBeAskedForEndsWithIt(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":80", halves)
	w.name(t, "one.example", "A "+webA)
	for host, cut := range map[string]bool{"one.example": false, "two.example": true} {
		t.Run(host, func(t *testing.T) {
			a := w.cage(t, rules.Policy{Open: true})
			c := a.connect("one.example", 80)
			in := bufio.NewReader(c)
			for i := range 2 {
				_, err := io.WriteString(c, get(host))
				if err == nil {
					_, err = in.ReadString('f')
				}
				if (err != nil) != (cut && i > 0) {
					t.Fatalf("request %d: %v", i, err)
				}
				if err := a.g.SetRules(policy("one.example")); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// halves answers each request, and never to the end.
func halves(c net.Conn) {
	in := bufio.NewReader(c)
	for {
		if _, err := http.ReadRequest(in); err != nil {
			return
		}
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf")
	}
}

// CASES 30: requests may follow each other without waiting, so answers to all of them may be
// under way, also those that a proxy fetches.
func TestAnswersUnderWayAreCutWithTheirRule(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", halves)
	w.name(t, "proxy.example", "A "+webA)
	w.name(t, "one.example", "A "+webA)
	w.name(t, "two.example", "A "+webA)
	fetch := func(host string) string { return "GET http://" + host + "/ HTTP/1.1\r\nHost: " + host + "\r\n\r\n" }
	allowed := []string{"proxy.example:8080", "one.example", "two.example", "far.example", "other.example"}
	without := func(name string) func(*Gateway) error {
		return func(g *Gateway) error {
			return g.SetRules(policy(slices.DeleteFunc(slices.Clone(allowed), func(r string) bool { return strings.HasPrefix(r, name) })...))
		}
	}
	deny := func(rule string) func(*Gateway) error {
		return func(g *Gateway) error { return g.Deny(rule, wire.EgressRun) }
	}
	for _, c := range []struct {
		what     string
		requests []string
		change   func(*Gateway) error
		cut      bool
		says     string // of what
	}{
		{"fetched", []string{fetch("far.example")}, without("far.example"), true, "far.example:80 was asked for, and no rule allows it"},
		{"fetched, by a word on its port", []string{fetch("far.example")}, deny("far.example:80"), true, "the rule far.example:80 denies it"},
		{"fetched, another port", []string{fetch("far.example")}, deny("far.example:8080"), false, ""},
		{"fetched before another", []string{fetch("far.example"), fetch("other.example")}, without("far.example"), true, "far.example:80 was asked for, and no rule allows it"},
		{"the proxy itself", []string{fetch("far.example")}, without("proxy.example"), true, "no rule allows it"},
		{"another", []string{fetch("far.example")}, without("other.example"), false, ""},
		{"of the server, before another", []string{get("one.example"), get("two.example")}, without("one.example"), true, "one.example:8080 was asked for, and no rule allows it"},
		{"of the server, a name that was not asked for", []string{get("two.example")}, without("one.example"), false, ""},
	} {
		t.Run(c.what, func(t *testing.T) {
			a := w.cage(t, policy(allowed...))
			for _, name := range []string{"proxy.example", "two.example", "one.example"} {
				a.addrs(name)
			}
			to := "one.example"
			if strings.HasPrefix(c.requests[0], "GET http:") {
				to = "proxy.example"
			}
			conn := a.connect(to, 8080)
			for _, r := range c.requests {
				if _, err := io.WriteString(conn, r); err != nil {
					t.Fatal(err)
				}
			}
			in := bufio.NewReader(conn)
			for range c.requests {
				if _, err := in.ReadString('f'); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.change(a.g); err != nil {
				t.Fatal(err)
			}
			if !c.cut { // what is let out anew tells
				if _, err := io.WriteString(conn, c.requests[len(c.requests)-1]); err != nil {
					t.Fatal(err)
				}
				if _, err := in.ReadString('f'); err != nil {
					t.Errorf("it is cut: %v", err)
				}
				return
			}
			_ = conn.SetReadDeadline(time.Now().Add(2 * time.Second))
			if _, err := io.Copy(io.Discard, in); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("it goes on: %v", err)
			}
			if r := a.record("its end", func(r Record) bool { return r.Verdict == Cut }); !strings.Contains(r.Reason, c.says) {
				t.Errorf("got the reason %q, want %q", r.Reason, c.says)
			}
		})
	}
}

func TestHostsOfOneConnectionAreBounded(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", webServer(t))
	w.name(t, "proxy.example", "A "+webA)
	a := w.cage(t, policy("proxy.example:8080", "*.far.example"))
	c := a.connect("proxy.example", 8080)
	in := bufio.NewReader(c)
	for i := range maxUses + 1 {
		for range 2 {
			host := fmt.Sprintf("h%d.far.example", i)
			if status, _ := asked(t, c, in, "GET http://"+host+"/ HTTP/1.1\r\nHost: "+host+"\r\n\r\n"); (status == 200) != (i < maxUses) {
				t.Fatalf("host %d: got %d", i, status)
			}
		}
	}
	a.record("the end", func(r Record) bool { return strings.Contains(r.Reason, tooManyUses) })
}

// What is kept of a request are its names, not the line that each stands in.
func TestHostsOfAConnectionKeepNoLines(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", webServer(t))
	w.name(t, "proxy.example", "A "+webA)
	a := w.cage(t, policy("proxy.example:8080", "*.far.example"))
	c := a.connect("proxy.example", 8080)
	in := bufio.NewReader(c)
	held := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	ask := func(i int) {
		host := fmt.Sprintf("h%d.far.example", i)
		if status, _ := asked(t, c, in, "GET http://"+host+"/"+strings.Repeat("x", 40<<10)+" HTTP/1.1\r\nHost: "+host+"\r\n\r\n"); status != 200 {
			t.Fatalf("host %d: got %d", i, status)
		}
	}
	ask(0)
	before := held()
	for i := range maxUses {
		ask(i)
	}
	if grown := held() - before; grown > 1<<20 {
		t.Errorf("%d hosts hold %d KB", maxUses, grown>>10)
	}
}

// CASES 30: servers that stand behind a balancer take its header from whoever sends one, and
// what comes behind it is a request like any other.
func TestNoHeaderOfABalancerHidesAName(t *testing.T) {
	w := theWorld(t)
	cert, pool := certificate(t, "good.example", "evil.net")
	const second = "\r\n\r\n\x00\r\nQUIT\n"
	behind := func(c net.Conn) (*bufio.Reader, bool) { // takes a header, where there is one
		in := bufio.NewReader(c)
		if b, _ := in.Peek(5); string(b) == "PROXY" {
			_, err := in.ReadString('\n')
			return in, err == nil
		}
		if b, _ := in.Peek(len(second)); string(b) == second {
			b, err := in.Peek(16)
			if err == nil {
				_, err = in.Discard(16 + int(b[15]))
			}
			return in, err == nil
		}
		return in, true
	}
	w.server(t, w.internet, webA+":80", func(c net.Conn) {
		if in, ok := behind(c); ok {
			if r, err := http.ReadRequest(in); err == nil {
				fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\npage of %s", r.Host)
			}
		}
	})
	w.server(t, w.internet, webA+":443", func(c net.Conn) {
		if in, ok := behind(c); ok {
			s := tls.Server(buffered{c, in}, &tls.Config{Certificates: []tls.Certificate{cert}})
			if s.Handshake() == nil {
				fmt.Fprintf(s, "page of %s", s.ConnectionState().ServerName)
			}
		}
	})
	w.name(t, "good.example", "A "+webA)
	a := w.cage(t, policy("good.example"))
	page := func(c net.Conn, header, name string, secure bool) string {
		_ = c.SetDeadline(time.Now().Add(3 * time.Second))
		for i := range len(header) { // however it comes
			if _, err := io.WriteString(c, header[i:i+1]); err != nil {
				return ""
			}
		}
		if !secure {
			return said(c, get(name))
		}
		b, _ := io.ReadAll(tls.Client(c, &tls.Config{ServerName: name, RootCAs: pool}))
		return string(b)
	}
	for what, header := range map[string]string{
		"none":      "",
		"version 1": "PROXY TCP4 93.184.216.1 93.184.216.2 1000 80\r\n",
		"unknown":   "PROXY UNKNOWN\r\n",
		"version 2": second + "\x21\x11\x00\x0c\x5d\xb8\xd8\x01\x5d\xb8\xd8\x02\x03\xe8\x00\x50",
		"local":     second + "\x20\x00\x00\x00",
	} {
		for port, secure := range map[int]bool{80: false, 443: true} {
			t.Run(fmt.Sprint(what, " ", port), func(t *testing.T) {
				direct, err := net.Dial("tcp", net.JoinHostPort(webA, fmt.Sprint(port)))
				if err != nil {
					t.Fatal(err)
				}
				defer direct.Close()
				if got := page(direct, header, "evil.net", secure); !strings.Contains(got, "page of evil.net") {
					t.Errorf("the control: %q", got)
				}
				if got := page(a.connect("good.example", port), header, "evil.net", secure); strings.Contains(got, "page of") {
					t.Errorf("inside: %q", got)
				}
				if got := page(a.connect("good.example", port), header, "good.example", secure); strings.Contains(got, "page of good.example") != (header == "") {
					t.Errorf("what is allowed: %q", got)
				}
			})
		}
	}
}

// buffered is a connection of which a reader has looked at the beginning.
type buffered struct {
	net.Conn
	in *bufio.Reader
}

func (b buffered) Read(p []byte) (int, error) { return b.in.Read(p) }
