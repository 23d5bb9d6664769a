package acp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// patience of a test for something that must come.
const must = 2 * time.Minute

// end is one side of a conversation, as a test sees it.
type end struct {
	t     *testing.T
	name  string
	conn  net.Conn // written to
	lines *LineReader
	in    net.Conn
}

func newEnd(t *testing.T, name string, in, out net.Conn) *end {
	t.Cleanup(func() { in.Close(); out.Close() })
	return &end{t: t, name: name, conn: out, in: in, lines: NewLineReader(in)}
}

func (e *end) send(line string) {
	e.t.Helper()
	e.conn.SetWriteDeadline(time.Now().Add(must))
	if _, err := io.WriteString(e.conn, line+"\n"); err != nil {
		e.t.Errorf("%s: send %.200s: %v", e.name, line, err)
	}
}

// call is send with the version put in.
func (e *end) call(id, method, params string) {
	e.t.Helper()
	if id != "" {
		id = `"id":` + id + `,`
	}
	if params != "" {
		params = `,"params":` + params
	}
	e.send(`{"jsonrpc":"2.0",` + id + `"method":"` + method + `"` + params + `}`)
}

func (e *end) result(id, result string) {
	e.t.Helper()
	e.send(`{"jsonrpc":"2.0","id":` + id + `,"result":` + result + `}`)
}

type message struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *RPCError       `json:"error"`
	raw    string
}

func (e *end) next() (m message, err error) {
	e.in.SetReadDeadline(time.Now().Add(must))
	line, err := e.lines.Next()
	if err != nil {
		return m, err
	}
	m.raw = strings.TrimSuffix(string(line), "\n")
	if err := json.Unmarshal(bytes.Clone(line), &m); err != nil {
		return m, fmt.Errorf("%q: %w", m.raw, err)
	}
	return m, nil
}

func (e *end) recv() message {
	e.t.Helper()
	m, err := e.next()
	if err != nil {
		e.t.Fatalf("%s: receive: %v", e.name, err)
	}
	return m
}

// want receives a call and returns it.
func (e *end) want(method string) message {
	e.t.Helper()
	m := e.recv()
	if m.Method != method {
		e.t.Fatalf("%s: got %.300s, want a %s", e.name, m.raw, method)
	}
	return m
}

func (e *end) wantRaw(raw string) {
	e.t.Helper()
	if d := cmp.Diff(raw, e.recv().raw); d != "" {
		e.t.Fatalf("%s: %s", e.name, d)
	}
}

// wantError receives an error answer to id whose message holds every part.
func (e *end) wantError(id string, code int, parts ...string) {
	e.t.Helper()
	m := e.recv()
	if m.Error == nil || string(m.ID) != id || m.Error.Code != code {
		e.t.Fatalf("%s: got %.600s, want error %d to %s", e.name, m.raw, code, id)
	}
	for _, p := range parts {
		if !strings.Contains(m.Error.Message, p) {
			e.t.Errorf("%s: error %q does not say %q", e.name, m.Error.Message, p)
		}
	}
}

// wantEnd sees the other side close.
func (e *end) wantEnd() {
	e.t.Helper()
	if m, err := e.next(); !errors.Is(err, io.EOF) {
		e.t.Fatalf("%s: got %.300s, %v; want the end", e.name, m.raw, err)
	}
}

// rig is a broker between a runtime and clients that the test plays.
type rig struct {
	t      *testing.T
	b      *Broker
	rt     *end
	log    *logBuffer
	cancel context.CancelFunc
	run    chan error
	attach sync.WaitGroup

	mu      sync.Mutex
	changes [][2]int
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

type anyPath struct{ roots []string }

func (a anyPath) check(path string) (string, error) {
	for _, r := range a.roots {
		if within(path, r) {
			return path, nil
		}
	}
	return "", fmt.Errorf("%q is outside the workspace", path)
}
func (a anyPath) CheckDir(path string) (string, error)          { return a.check(path) }
func (a anyPath) CheckFile(path string, _ bool) (string, error) { return a.check(path) }

func newRig(t *testing.T, change func(*Options)) *rig {
	t.Helper()
	brokerIn, rtIn := net.Pipe()
	rtOut, brokerOut := net.Pipe()
	r := &rig{t: t, log: &logBuffer{}, run: make(chan error, 1)}
	o := Options{
		RuntimeIn: brokerIn, RuntimeOut: brokerOut, Sandboxed: true,
		Paths: anyPath{[]string{"/ws"}},
		Log:   slog.New(slog.NewTextHandler(r.log, nil)),
		OnChange: func(c, s int) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.changes = append(r.changes, [2]int{c, s})
		},
	}
	if change != nil {
		change(&o)
	}
	r.b = NewBroker(o)
	r.rt = newEnd(t, "runtime", rtIn, rtOut)
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() { r.run <- r.b.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case <-r.run:
		case <-time.After(must):
			t.Error("Run does not return")
		}
		over := make(chan struct{})
		go func() { r.b.Fail("test over"); r.attach.Wait(); close(over) }()
		select {
		case <-over:
		case <-time.After(must):
			t.Error("Fail or Attach does not return")
		}
		if t.Failed() {
			t.Log("broker's log:\n" + r.log.String())
		}
	})
	return r
}

// client attaches one more client; its Attach result comes on the channel.
func (r *rig) client(name string) (*end, chan error) {
	mine, its := net.Pipe()
	done := make(chan error, 1)
	r.b.mu.Lock()
	before := len(r.b.clients)
	r.b.mu.Unlock()
	r.attach.Go(func() { done <- r.b.Attach(context.Background(), its, name) })
	for range 10000 {
		r.b.mu.Lock()
		n := len(r.b.clients)
		r.b.mu.Unlock()
		if n > before {
			break
		}
		runtime.Gosched()
	}
	return newEnd(r.t, name, mine, mine), done
}

const initParams = `{"protocolVersion":1,"clientCapabilities":{"fs":{"readTextFile":true,"writeTextFile":true},"terminal":true}}`

// ready attaches a client and initializes it.
func (r *rig) ready(name string) *end {
	r.t.Helper()
	c, _ := r.client(name)
	r.initialize(c)
	return c
}

func (r *rig) initialize(c *end) {
	r.t.Helper()
	r.b.mu.Lock()
	cached := r.b.init.result != nil
	r.b.mu.Unlock()
	c.call("0", "initialize", initParams)
	if !cached {
		m := r.rt.want("initialize")
		r.rt.result(string(m.ID), `{"protocolVersion":1,"agentCapabilities":{"loadSession":true,"sessionCapabilities":{"close":{}}}}`)
	}
	if m := c.recv(); string(m.ID) != "0" || m.Result == nil {
		r.t.Fatalf("initialize: %s", m.raw)
	}
}

// session opens one for c.
func (r *rig) session(c *end, name string) {
	r.t.Helper()
	c.call(`"new"`, "session/new", `{"cwd":"/ws","mcpServers":[]}`)
	m := r.rt.want("session/new")
	r.rt.result(string(m.ID), `{"sessionId":"`+name+`"}`)
	c.wantRaw(`{"jsonrpc":"2.0","id":"new","result":{"sessionId":"` + name + `"}}`)
}

func (r *rig) update(session, text string) string {
	line := `{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"` + session + `","update":{"text":"` + text + `"}}}`
	r.rt.send(line)
	return line
}

func osPipe(tb testing.TB) (r, w *os.File) {
	r, w, err := os.Pipe()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}
