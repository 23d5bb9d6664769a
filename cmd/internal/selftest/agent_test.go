// The ACP agent, spoken to over pipes as a client does.

package selftest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// client is the test's end of a served agent.
type client struct {
	t      *testing.T
	in     io.WriteCloser
	out    *bufio.Reader
	stderr *bytes.Buffer
	done   chan error
	once   sync.Once
	nextID int
	// answer replies to the agent's own requests.
	answer func(m message) message
}

// serve starts an agent whose state lies in home, and stops it with the test.
func serve(t *testing.T, home string) *client {
	t.Helper()
	t.Setenv("HOME", home)
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	c := &client{t: t, in: inW, out: bufio.NewReader(outR), stderr: &bytes.Buffer{}, done: make(chan error, 1)}
	go func() {
		err := Serve(t.Context(), inR, outW, c.stderr, "test")
		outW.Close()
		c.done <- err
	}()
	t.Cleanup(func() { c.end() })
	return c
}

// end closes the agent's input and waits for it. A second call does nothing.
func (c *client) end() {
	c.once.Do(func() {
		c.in.Close()
		io.Copy(io.Discard, c.out) // what is still written must not block the agent
		if err := <-c.done; err != nil {
			c.t.Errorf("agent ended: %v", err)
		}
	})
}

func (c *client) send(m message) {
	c.t.Helper()
	m.Version = "2.0"
	b, err := json.Marshal(m)
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := c.in.Write(append(b, '\n')); err != nil {
		c.t.Fatal(err)
	}
}

func (c *client) line() []byte {
	c.t.Helper()
	b, err := c.out.ReadBytes('\n')
	if err != nil {
		c.t.Fatalf("read from the agent: %v", err)
	}
	return b
}

func (c *client) message() message {
	c.t.Helper()
	var m message
	if b := c.line(); json.Unmarshal(b, &m) != nil {
		c.t.Fatalf("no JSON: %q", b)
	}
	return m
}

// call sends a request and returns its answer and the texts that were streamed before.
func (c *client) call(method string, params any) (message, []string) {
	c.t.Helper()
	return c.await(c.start(method, params))
}

func (c *client) start(method string, params any) string {
	c.t.Helper()
	b, err := json.Marshal(params)
	if err != nil {
		c.t.Fatal(err)
	}
	c.nextID++
	id := fmt.Sprintf(`"c%d"`, c.nextID)
	c.send(message{ID: json.RawMessage(id), Method: method, Params: b})
	return id
}

func (c *client) await(id string) (message, []string) {
	c.t.Helper()
	var chunks []string
	for {
		m := c.message()
		switch {
		case m.Method == "session/update":
			var u struct {
				Update struct {
					SessionUpdate string
					Content       struct{ Text string }
				}
			}
			if err := json.Unmarshal(m.Params, &u); err != nil {
				c.t.Fatal(err)
			}
			kind := strings.TrimSuffix(u.Update.SessionUpdate, "_message_chunk")
			if kind == "agent" {
				chunks = append(chunks, u.Update.Content.Text)
			} else {
				chunks = append(chunks, kind+": "+u.Update.Content.Text)
			}
		case m.Method != "":
			if c.answer == nil {
				c.t.Fatalf("unexpected request %s", m.Method)
			}
			r := c.answer(m)
			r.ID = m.ID
			c.send(r)
		case string(m.ID) == id:
			return m, chunks
		default:
			c.t.Fatalf("an answer to %s, waiting for %s", m.ID, id)
		}
	}
}

func (c *client) session(cwd string) string {
	c.t.Helper()
	m, _ := c.call("session/new", map[string]any{"cwd": cwd, "mcpServers": []any{}})
	var r struct{ SessionID string }
	if m.Error != nil || json.Unmarshal(m.Result, &r) != nil || r.SessionID == "" {
		c.t.Fatalf("session/new: %s %v", m.Result, m.Error)
	}
	return r.SessionID
}

func promptOf(id, text string) map[string]any {
	return map[string]any{"sessionId": id, "prompt": []any{map[string]any{"type": "text", "text": text}}}
}

// prompt returns the chunks and the stop reason (or the error).
func (c *client) prompt(id, text string) ([]string, string) {
	c.t.Helper()
	m, chunks := c.call("session/prompt", promptOf(id, text))
	return chunks, stopReason(c.t, m)
}

func stopReason(t *testing.T, m message) string {
	t.Helper()
	if m.Error != nil {
		return m.Error.Error()
	}
	var r struct{ StopReason string }
	if err := json.Unmarshal(m.Result, &r); err != nil {
		t.Fatal(err)
	}
	return r.StopReason
}

func TestWords(t *testing.T) {
	dir := t.TempDir()
	c := serve(t, t.TempDir())
	m, _ := c.call("initialize", map[string]any{"protocolVersion": 1})
	var init struct {
		ProtocolVersion   int
		AgentCapabilities struct{ LoadSession bool }
	}
	if err := json.Unmarshal(m.Result, &init); err != nil || init.ProtocolVersion != 1 || !init.AgentCapabilities.LoadSession {
		t.Fatalf("initialize: %s %v", m.Result, err)
	}
	id := c.session(dir)
	c.answer = func(m message) message {
		switch m.Method {
		case "session/request_permission":
			return message{Result: json.RawMessage(`{"outcome":{"outcome":"selected","optionId":"reject"}}`)}
		case "fs/read_text_file":
			return message{Result: json.RawMessage(`{"content":"text of the file"}`)}
		case "fs/write_text_file":
			return message{Error: &rpcError{-32000, "outside the workspace"}}
		case "terminal/create":
			return message{Result: json.RawMessage(`{"terminalId":"t1"}`)}
		case "terminal/wait_for_exit":
			return message{Result: json.RawMessage(`{"exitCode":3}`)}
		case "terminal/output":
			return message{Result: json.RawMessage(`{"output":"out","truncated":false}`)}
		}
		return message{Result: json.RawMessage("null")}
	}
	t.Setenv("SELFTEST_WORDS", "seen")
	cases := []struct {
		text string
		want []string
	}{
		{"echo one two", []string{"one ", "two"}},
		{"echo Größe", []string{"Größ", "e"}},
		{"permission delete it", []string{"permission: selected reject"}},
		{"write a.txt some text", []string{"wrote 9 bytes to " + filepath.Join(dir, "a.txt")}},
		{"write /a text", []string{"write: error: usage: write REL TEXT, REL relative to the session's cwd"}},
		{"client-read /x", []string{"client-read: ok: text of the file"}},
		{"client-write /x y z", []string{"client-write: error -32000: outside the workspace"}},
		{"client-terminal id", []string{"client-terminal: ok: exit 3: out"}},
		{"big 100000", []string{strings.Repeat("x", 100000)}},
		{"big many", []string{`big: error: "many" is no number from 0 to 1073741824`}},
		{"eat 2", []string{"ate 2 MiB"}},
		{"sleep 0", []string{"slept 0 s"}},
		{"stderr a word", []string{"said it on stderr"}},
		{"junk", []string{"junk: error: usage: junk banner|escape|half|mb N"}},
		{"help", []string{help}},
		{"hello there", []string{"This is AgentConnect's self-test agent. It knows these words: " + help}},
		{"attack {\"nonsense\":1}", []string{`attack: error: targets: json: unknown field "nonsense"`}},
	}
	for _, tc := range cases {
		chunks, stop := c.prompt(id, tc.text)
		if d := cmp.Diff(tc.want, chunks); d != "" || stop != "end_turn" {
			t.Errorf("%s: %s\n%s", tc.text, stop, d)
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, "a.txt")); err != nil || string(b) != "some text" {
		t.Errorf("write: %q %v", b, err)
	}
	if chunks, _ := c.prompt(id, "env"); !strings.Contains(chunks[0], "\nSELFTEST_WORDS=seen") {
		t.Errorf("env: %q", chunks)
	}
	if c.stderr.String() != "a word\n" {
		t.Errorf("stderr: %q", c.stderr)
	}
}

func TestJunkIsJunk(t *testing.T) {
	c := serve(t, t.TempDir())
	id := c.session("/")
	c.start("session/prompt", promptOf(id, "junk banner"))
	if b := c.line(); json.Valid(b) {
		t.Errorf("a banner that is JSON: %q", b)
	}
	c.message()
	c.start("session/prompt", promptOf(id, "junk half"))
	if b := c.line(); json.Valid(b) || !bytes.Contains(b, []byte("stopReason")) {
		t.Errorf("half a line and the answer behind it: %q", b)
	}
	c.start("session/prompt", promptOf(id, "junk mb 3"))
	if b := c.line(); len(b) < 3<<20 || json.Valid(b) {
		t.Errorf("%d bytes without a newline", len(b))
	}
}

func TestLoadAfterKill(t *testing.T) {
	home, dir := t.TempDir(), t.TempDir()
	first := serve(t, home)
	id := first.session("/")
	first.prompt(id, "echo kept")
	first.end()

	second := serve(t, home)
	if _, stop := second.prompt(id, "echo x"); !strings.HasPrefix(stop, "-32002:") {
		t.Errorf("prompt before load: %s", stop)
	}
	m, chunks := second.call("session/load", map[string]any{"sessionId": id, "cwd": dir, "mcpServers": []any{}})
	if d := cmp.Diff([]string{"user: echo kept", "kept"}, chunks); d != "" || m.Error != nil {
		t.Errorf("load: %v\n%s", m.Error, d)
	}
	if chunks, _ := second.prompt(id, "write f x"); chunks[0] != "wrote 1 bytes to "+filepath.Join(dir, "f") {
		t.Errorf("cwd after load: %q", chunks)
	}
	if m, _ := second.call("session/load", map[string]any{"sessionId": "other", "cwd": dir}); m.Error == nil || m.Error.Code != codeNoSuchSession {
		t.Errorf("load of an unknown session: %v", m.Error)
	}
}

func TestCancelEndsSleep(t *testing.T) {
	c := serve(t, t.TempDir())
	id := c.session("/")
	req := c.start("session/prompt", promptOf(id, "sleep 600"))
	if _, stop := c.prompt(id, "echo second"); !strings.HasPrefix(stop, "-32600:") {
		t.Errorf("a second prompt in the same session: %s", stop)
	}
	c.send(message{Method: "session/cancel", Params: json.RawMessage(`{"sessionId":"` + id + `"}`)})
	m, _ := c.await(req)
	if stop := stopReason(t, m); stop != "cancelled" {
		t.Errorf("stop reason %s", stop)
	}
	if chunks, _ := c.prompt(id, "echo on"); len(chunks) != 1 || chunks[0] != "on" {
		t.Errorf("after the cancel: %q", chunks)
	}
}

func TestEndOfInputCancels(t *testing.T) {
	c := serve(t, t.TempDir())
	c.start("session/prompt", promptOf(c.session("/"), "sleep 600"))
	ended := make(chan struct{})
	go func() { c.end(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("the agent waits for its prompt")
	}
}

func TestBadFramesAreAnswered(t *testing.T) {
	c := serve(t, t.TempDir())
	for _, tc := range []struct {
		line string
		code int
	}{
		{"hello", codeParse},
		{"[]", codeParse},
		{"{}", codeInvalid},
		{`{"id":1,"method":"session/set_mode","params":{}}`, codeNoMethod},
		{`{"id":1,"method":"nonsense"}`, codeNoMethod},
		{`{"id":1,"method":"session/new","params":{"cwd":"relative"}}`, codeBadParams},
		{`{"id":1,"method":"session/new","params":[1]}`, codeBadParams},
		{`{"id":1,"method":"session/prompt","params":{"sessionId":"none"}}`, codeNoSuchSession},
	} {
		if _, err := io.WriteString(c.in, tc.line+"\n"); err != nil {
			t.Fatal(err)
		}
		if m := c.message(); m.Error == nil || m.Error.Code != tc.code {
			t.Errorf("%s: %v, want %d", tc.line, m.Error, tc.code)
		}
	}
	if m, _ := c.call("initialize", nil); m.Error != nil {
		t.Errorf("afterwards: %v", m.Error)
	}
}

// FuzzFrames: whatever a client sends, the agent answers or ignores it, in whole
// JSON lines, and goes on.
func FuzzFrames(f *testing.F) {
	f.Add([]byte(`{"id":1,"method":"initialize"}`))
	f.Add([]byte(`{"id":1,"method":"session/new","params":{"cwd":"/"}}`))
	f.Add([]byte(`{"method":"session/cancel","params":{"sessionId":"x"}}`))
	f.Add([]byte(`{"id":"7","result":{}}`))
	f.Add([]byte(`{"id":null,"method":"session/prompt","params":{"prompt":[{}]}}`))
	home := f.TempDir()
	f.Setenv("HOME", home)
	f.Fuzz(func(t *testing.T, frame []byte) {
		var out bytes.Buffer
		in := append(append([]byte{}, frame...), "\n{\"id\":\"last\",\"method\":\"initialize\"}\n"...)
		if err := Serve(context.Background(), bytes.NewReader(in), &out, io.Discard, "fuzz"); err != nil {
			t.Fatal(err)
		}
		last := false
		for _, line := range bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n")) {
			var m message
			if err := json.Unmarshal(line, &m); err != nil {
				t.Fatalf("answer %q: %v", line, err)
			}
			last = last || string(m.ID) == `"last"`
		}
		if !last {
			t.Fatalf("no answer to the last frame: %q", out.Bytes())
		}
		if err := os.Remove(filepath.Join(home, ".agentconnect-selftest.json")); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	})
}
