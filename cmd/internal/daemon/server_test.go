package daemon

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// idle answers every operation and records which one was asked for.
type idle struct{ asked []string }

func (d *idle) did(format string, args ...any) {
	d.asked = append(d.asked, fmt.Sprintf(format, args...))
}

func (d *idle) status(context.Context, bool) *control.Status {
	d.did("status")
	return &control.Status{State: "running"}
}
func (d *idle) agentNow(_ context.Context, id string) (*control.AgentStatus, error) {
	d.did("agent %s", id)
	return &control.AgentStatus{ID: id}, nil
}
func (d *idle) probeAgain(context.Context) control.Probe { d.did("probe"); return control.Probe{} }
func (d *idle) reload(string) error                      { d.did("reload"); return nil }
func (d *idle) start(id string, again bool) (Pending, error) {
	d.did("start %s %v", id, again)
	return d.done(), nil
}
func (d *idle) stop(id string) (Pending, error) { d.did("stop %s", id); return d.done(), nil }
func (d *idle) attach(_ context.Context, id string) (string, error) {
	d.did("attach %s", id)
	return "", nil
}
func (d *idle) exec(_ context.Context, id string) (string, error) {
	d.did("exec %s", id)
	return "", nil
}
func (d *idle) placedConfig(id string) (json.RawMessage, error) {
	d.did("placed %s", id)
	return json.RawMessage("{}"), nil
}
func (d *idle) egressWord(_ context.Context, id string, w control.Egress) error {
	d.did("egress %s %v %s %s", id, w.Allow, w.Host, w.Scope)
	return nil
}
func (d *idle) end(context.Context) error { d.did("end"); return nil }

func (*idle) done() Pending { c := make(chan error, 1); c <- nil; return c }

func TestRequestsOutsideTheProtocol(t *testing.T) {
	for _, tt := range []struct {
		method, path, body string
		status             int
	}{
		{"GET", "/v1/nothing", "", 404},
		{"GET", "/", "", 404},
		{"GET", "/v1/agents/a/start", "", 404}, // a wish is a POST
		{"DELETE", "/v1/agents/a", "", 404},
		{"POST", "/v1/agents/a/start/", "", 404},
		{"POST", "/v1//shutdown", "", 404},
		{"POST", "/v1/shutdown", "not json", 400},
		{"POST", "/v1/shutdown", `{"force":true}`, 400},
		{"POST", "/v1/shutdown", `{} {}`, 400},
		{"POST", "/v1/shutdown", `null`, 400},
		{"POST", "/v1/shutdown", strings.Repeat(" ", maxBody+1), 400},
	} {
		t.Run(tt.method+tt.path+tt.body[:min(len(tt.body), 10)], func(t *testing.T) {
			d := &idle{}
			w := serve(d, tt.method+" "+tt.path+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "+fmt.Sprint(len(tt.body))+"\r\n\r\n"+tt.body)
			if w.StatusCode != tt.status {
				t.Errorf("status %d, want %d", w.StatusCode, tt.status)
			}
			var e control.Error
			if err := json.NewDecoder(w.Body).Decode(&e); err != nil || e.Message == "" || e.Code == 0 {
				t.Errorf("body: %+v, %v", e, err)
			}
			if len(d.asked) != 0 {
				t.Errorf("it did %v", d.asked)
			}
		})
	}
}

// serve gives one raw request to the server, over a pipe, and reads the answer; nil if
// the server closed without one.
func serve(d operations, raw string) *http.Response {
	near, far := net.Pipe()
	defer near.Close()
	srv := &http.Server{Handler: handler(d), ReadTimeout: time.Second, MaxHeaderBytes: maxHeader, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	l := &oneConn{c: make(chan net.Conn, 1), done: make(chan struct{})}
	l.c <- far
	served := make(chan struct{})
	go func() { defer close(served); srv.Serve(l) }()
	defer func() { srv.Close(); <-served }()
	go func() {
		near.SetWriteDeadline(time.Now().Add(2 * time.Second))
		io.WriteString(near, raw)
	}()
	near.SetReadDeadline(time.Now().Add(5 * time.Second))
	res, err := http.ReadResponse(bufio.NewReader(near), nil)
	if err != nil {
		return nil
	}
	body, _ := io.ReadAll(res.Body)
	res.Body = io.NopCloser(bytes.NewReader(body))
	return res
}

type oneConn struct {
	c    chan net.Conn
	done chan struct{}
}

func (l *oneConn) Accept() (net.Conn, error) {
	select {
	case c := <-l.c:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}
func (l *oneConn) Close() error {
	select {
	case <-l.done:
	default:
		close(l.done)
	}
	return nil
}
func (l *oneConn) Addr() net.Addr { return &net.UnixAddr{} }

func TestEveryRequestOfTheProtocol(t *testing.T) {
	for req, want := range map[string]string{
		"GET /v1/status": "status", "POST /v1/probe": "probe", "POST /v1/reload": "reload", "POST /v1/shutdown": "end",
		"GET /v1/agents/a": "agent a", "POST /v1/agents/a/start": "start a false", "POST /v1/agents/a/restart": "start a true",
		"POST /v1/agents/a/stop": "stop a", "POST /v1/agents/a/attach": "attach a", "POST /v1/agents/a/exec": "exec a",
	} {
		d := &idle{}
		w := serve(d, req+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if w == nil || w.StatusCode != http.StatusOK || len(d.asked) == 0 || d.asked[0] != want {
			t.Errorf("%s: did %v", req, d.asked)
		}
	}
}

func TestTheOperatorsWordAboutAHost(t *testing.T) {
	for body, want := range map[string]string{
		`{"allow":true,"host":"example.com:443","scope":"once"}`: "egress a true example.com:443 once",
		`{"allow":false,"host":"*.evil.net","scope":"run"}`:      "egress a false *.evil.net run",
		`{"host":"10.0.0.0/8","scope":"always"}`:                 "egress a false 10.0.0.0/8 always",
		``:                                                       "",
		`{}`:                                                     "",
		`{"allow":true}`:                                         "",
		`{"allow":true,"host":""}`:                               "",
		`{"allow":true,"host":"http://example.com/","scope":"run"}`:                  "",
		`{"allow":true,"host":"example.com","scope":"ever"}`:                         "",
		`{"allow":true,"host":"example.com","scope":"run","policy":{"mode":"open"}}`: "",
		`{"allow":true,"allow":false,"host":"example.com","scope":"run"}`:            "",
		`{"allow":true,"host":"example.com","scope":"run"} x`:                        "",
		`{"allow":true,"host":"` + strings.Repeat("a", maxBody) + `","scope":"run"}`: "",
	} {
		d := &idle{}
		w := serve(d, fmt.Sprintf("POST /v1/agents/a/egress HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
		switch {
		case w == nil:
			t.Errorf("%.80s: no answer", body)
		case want == "" && (w.StatusCode != http.StatusBadRequest || len(d.asked) != 0):
			t.Errorf("%.80s: %d, did %v", body, w.StatusCode, d.asked)
		case want != "" && (w.StatusCode != http.StatusOK || len(d.asked) != 1 || d.asked[0] != want):
			t.Errorf("%s: %d, did %v", body, w.StatusCode, d.asked)
		}
	}
}

func TestConnectionsOfAnotherUserAreClosed(t *testing.T) {
	path := filepath.Join(shortDir(t), "s")
	for _, tt := range []struct {
		uid int
		ok  bool
	}{{os.Getuid(), true}, {os.Getuid() + 1, false}} {
		l, err := listenControl(path, tt.uid, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(path)
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v", st.Mode(), err)
		}
		srv := &http.Server{Handler: handler(&idle{})}
		served := make(chan struct{})
		go func() { defer close(served); srv.Serve(l) }()
		_, err = control.NewClient(path).Status(t.Context())
		if (err == nil) != tt.ok {
			t.Errorf("uid %d: %v", tt.uid, err)
		}
		srv.Close()
		<-served
	}
}

// FuzzControlRequest: whatever bytes come, the server answers in the protocol's form or
// closes, and does only what a well-formed request asks for.
func FuzzControlRequest(f *testing.F) {
	for _, s := range []string{
		"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /v1/agents/a/start HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
		"POST /v1/agents/..%2f..%2fx/exec HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /v1/shutdown HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"a\":\r\n0\r\n\r\n",
		"POST /v1/agents/a/egress HTTP/1.1\r\nHost: x\r\nContent-Length: 51\r\n\r\n{\"allow\":true,\"host\":\"example.com\",\"scope\":\"once\"}",
		"GARBAGE\r\n\r\n", "\x00\xff", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		d := &idle{}
		w := httpAnswer(d, raw)
		if w == nil {
			return
		}
		body, err := io.ReadAll(w.Body)
		if err != nil {
			t.Fatal(err)
		}
		if w.Header.Get("Content-Type") != "application/json" {
			return // net/http's own answer to what is no HTTP
		}
		if !json.Valid(body) {
			t.Errorf("answer %q", body)
		}
		if w.StatusCode/100 != 2 {
			var e control.Error
			if json.Unmarshal(body, &e) != nil || e.Message == "" || e.Code == 0 {
				t.Errorf("answer %d %q", w.StatusCode, body)
			}
			if len(d.asked) != 0 {
				t.Errorf("refused, but did %v", d.asked)
			}
		}
	})
}

// httpAnswer parses raw as a request and gives it to the handler directly: as the server
// does, without its sockets, which a fuzz run would wait on.
func httpAnswer(d operations, raw string) *http.Response {
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(raw)))
	if err != nil || r.URL == nil {
		return nil
	}
	w := &recorder{header: http.Header{}}
	handler(d).ServeHTTP(w, r)
	return &http.Response{StatusCode: w.status, Header: w.header, Body: io.NopCloser(&w.body)}
}

type recorder struct {
	header http.Header
	body   bytes.Buffer
	status int
}

func (w *recorder) Header() http.Header         { return w.header }
func (w *recorder) Write(p []byte) (int, error) { return w.body.Write(p) }
func (w *recorder) WriteHeader(status int)      { w.status = status }

func FuzzNotification(f *testing.F) {
	f.Add([]byte("READY=1\nSTATUS=x\n"))
	f.Add([]byte("STATUS=\x1b[2J\xff\n=\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := parseNotification(b)
		if printable(n.Status) != n.Status && len(n.Status) <= maxWord {
			// Escapes are made of printable ASCII: doing it twice changes nothing.
			t.Errorf("status %q is not safe", n.Status)
		}
	})
}

func FuzzStateFiles(f *testing.F) {
	f.Add([]byte(`{"agents":["a"]}`))
	f.Add([]byte(`{"pid":12,"program":"agentconnect-sandbox"}`))
	f.Add([]byte("4711\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if rec := parseLock(b); rec.PID < 0 {
			t.Errorf("pid %d", rec.PID)
		}
		ids, err := parseWanted(b)
		if err != nil {
			return
		}
		for _, id := range ids {
			if strings.ContainsAny(id, "/.") || id == "" {
				t.Errorf("id %q", id)
			}
		}
	})
}
