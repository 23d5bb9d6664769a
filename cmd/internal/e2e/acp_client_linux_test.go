// An ACP client of the tests' own: what it sends and gets is under their control, byte
// by byte, where a library would tidy it up.

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"time"
)

// lines reads lines as they come, without keeping whoever waits for one for ever.
type lines struct{ c chan string }

func newLines(r io.Reader) *lines {
	l := &lines{c: make(chan string, 1<<12)}
	go func() {
		defer close(l.c)
		in := bufio.NewReaderSize(r, 1<<16)
		for {
			line, err := in.ReadString('\n')
			if line != "" {
				l.c <- strings.TrimRight(line, "\n")
			}
			if err != nil {
				return
			}
		}
	}()
	return l
}

// next gives the next line; false after the last one, or when none came in time.
func (l *lines) next(within time.Duration) (string, bool) {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case line, ok := <-l.c:
		return line, ok
	case <-timer.C:
		return "", false
	}
}

// frame is any JSON-RPC message.
type frame struct {
	ID     json.RawMessage `json:"id,omitempty"`
	Method string          `json:"method,omitempty"`
	Params json.RawMessage `json:"params,omitempty"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  *rpcError       `json:"error,omitempty"`
}

type rpcError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

func (e *rpcError) Error() string { return fmt.Sprintf("%d: %s", e.Code, e.Message) }

// update is a session/update.
type update struct {
	SessionID string `json:"sessionId"`
	Update    struct {
		Kind    string `json:"sessionUpdate"`
		Content struct {
			Text string `json:"text"`
		} `json:"content"`
	} `json:"update"`
}

// editor is one `agentconnect acp ID` process, and the editor in front of it.
type editor struct {
	s     *site
	cmd   *exec.Cmd
	in    io.WriteCloser
	errs  *output
	ended chan struct{}
	// answer answers what the agent asks of its client, or keeps silent; nil: permission
	// is given, all else is an error.
	answer func(frame) (result string)

	mu      sync.Mutex
	next    int
	waiting map[string]chan frame
	frames  []frame           // every message that came
	text    map[string]string // what each session's agent said
	changed chan struct{}     // closed and made anew with every frame
}

// attach starts `agentconnect acp ID`.
func (s *site) attach(id string) *editor {
	s.t.Helper()
	return s.editor(s.agentconnect(context.Background(), "acp", id))
}

// editor starts cmd, which speaks ACP on its stdio.
func (s *site) editor(cmd *exec.Cmd) *editor {
	s.t.Helper()
	e := &editor{s: s, cmd: cmd, errs: &output{}, ended: make(chan struct{}), waiting: map[string]chan frame{}, text: map[string]string{}, changed: make(chan struct{})}
	cmd.Stderr = e.errs
	in, err := cmd.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	e.in = in
	go func() {
		defer close(e.ended)
		r := bufio.NewReaderSize(out, 1<<16)
		for {
			line, err := r.ReadBytes('\n')
			if len(line) > 0 {
				e.take(line)
			}
			if err != nil {
				break
			}
		}
		cmd.Wait()
	}()
	s.t.Cleanup(func() {
		in.Close()
		select {
		case <-e.ended:
		case <-time.After(patience):
			s.t.Errorf("%q does not end with its editor", cmd.Args)
			e.kill()
		}
	})
	return e
}

func (e *editor) take(line []byte) {
	var f frame
	if err := json.Unmarshal(line, &f); err != nil {
		e.s.t.Errorf("no JSON-RPC came: %.200q", line)
		return
	}
	e.mu.Lock()
	e.frames = append(e.frames, f)
	if f.Method == "session/update" {
		var u update
		if json.Unmarshal(f.Params, &u) == nil && u.Update.Kind == "agent_message_chunk" {
			e.text[u.SessionID] += u.Update.Content.Text
		}
	}
	ch := e.waiting[string(f.ID)]
	if f.Method == "" && ch != nil {
		delete(e.waiting, string(f.ID))
		ch <- f
	}
	close(e.changed)
	e.changed = make(chan struct{})
	e.mu.Unlock()
	if f.Method != "" && len(f.ID) > 0 {
		e.reply(f)
	}
}

func (e *editor) reply(f frame) {
	result := ""
	switch {
	case e.answer != nil:
		result = e.answer(f)
	case f.Method == "session/request_permission":
		result = `{"outcome":{"outcome":"selected","optionId":"allow"}}`
	}
	switch result {
	case silence:
	case "":
		e.raw(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"error":{"code":-32601,"message":"the client does not know %s"}}`, f.ID, f.Method))
	default:
		e.raw(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":%s}`, f.ID, result))
	}
}

// silence is an answer that never comes.
const silence = "never"

// raw sends one line.
func (e *editor) raw(line string) { io.WriteString(e.in, line+"\n") }

// call is a request under way.
type call struct {
	e      *editor
	method string
	c      chan frame
}

// begin sends a request with an id of the editor's own counting, from 1 on.
func (e *editor) begin(method string, params any) *call {
	e.s.t.Helper()
	e.mu.Lock()
	e.next++
	id := fmt.Sprint(e.next)
	e.mu.Unlock()
	return e.beginAs(id, method, params)
}

// beginAs sends a request with this id, as JSON.
func (e *editor) beginAs(id, method string, params any) *call {
	e.s.t.Helper()
	b, err := json.Marshal(params)
	if err != nil {
		e.s.t.Fatal(err)
	}
	c := &call{e, method, make(chan frame, 1)}
	e.mu.Lock()
	e.waiting[id] = c.c
	e.mu.Unlock()
	e.raw(fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"method":%q,"params":%s}`, id, method, b))
	return c
}

// end waits for the answer.
func (c *call) end() (json.RawMessage, error) {
	c.e.s.t.Helper()
	select {
	case f := <-c.c:
		if f.Error != nil {
			return nil, f.Error
		}
		return f.Result, nil
	case <-time.After(patience):
		c.e.s.t.Fatalf("no answer to %s; %s", c.method, c.e.errs)
	}
	return nil, nil
}

// call sends a request and waits for its answer.
func (e *editor) call(method string, params any) (json.RawMessage, error) {
	e.s.t.Helper()
	return e.begin(method, params).end()
}

// must is call for what has to work.
func (e *editor) must(method string, params any) json.RawMessage {
	e.s.t.Helper()
	r, err := e.call(method, params)
	if err != nil {
		e.s.t.Fatalf("%s: %v", method, err)
	}
	return r
}

func (e *editor) notify(method string, params any) {
	e.s.t.Helper()
	b, err := json.Marshal(params)
	if err != nil {
		e.s.t.Fatal(err)
	}
	e.raw(fmt.Sprintf(`{"jsonrpc":"2.0","method":%q,"params":%s}`, method, b))
}

type object map[string]any

// hello is what an editor with everything on offer says first.
var hello = object{"protocolVersion": 1, "clientCapabilities": object{"fs": object{"readTextFile": true, "writeTextFile": true}, "terminal": true}}

// session opens a session in cwd, after initialize.
func (e *editor) session(cwd string) string {
	e.s.t.Helper()
	e.must("initialize", hello)
	return e.open(cwd)
}

func (e *editor) open(cwd string) string {
	e.s.t.Helper()
	var r struct {
		SessionID string `json:"sessionId"`
	}
	if err := json.Unmarshal(e.must("session/new", object{"cwd": cwd, "mcpServers": []any{}}), &r); err != nil || r.SessionID == "" {
		e.s.t.Fatalf("session/new: %+v %v", r, err)
	}
	return r.SessionID
}

func say(session, text string) object {
	return object{"sessionId": session, "prompt": []any{object{"type": "text", "text": text}}}
}

// prompt takes one turn and gives what was said in it.
func (e *editor) prompt(session, text string) string {
	e.s.t.Helper()
	before := len(e.said(session))
	r := e.must("session/prompt", say(session, text))
	if !strings.Contains(string(r), `"end_turn"`) {
		e.s.t.Fatalf("the turn ended with %s", r)
	}
	return e.said(session)[before:]
}

func (e *editor) said(session string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.text[session]
}

// got lists the frames that came so far.
func (e *editor) got() []frame {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]frame(nil), e.frames...)
}

// until waits for a frame that is so.
func (e *editor) until(what string, is func(frame) bool) frame {
	e.s.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for seen := 0; ; {
		e.mu.Lock()
		all, changed := e.frames, e.changed
		e.mu.Unlock()
		for ; seen < len(all); seen++ {
			if is(all[seen]) {
				return all[seen]
			}
		}
		select {
		case <-changed:
		case <-timer.C:
			e.s.t.Fatalf("never came: %s; %s", what, e.errs)
		}
	}
}

// close closes the editor's pipe and gives the exit code of `agentconnect acp`.
func (e *editor) close() int {
	e.s.t.Helper()
	e.in.Close()
	select {
	case <-e.ended:
	case <-time.After(patience):
		e.s.t.Fatalf("%q does not end with its editor", e.cmd.Args)
	}
	return e.cmd.ProcessState.ExitCode()
}

// kill is kill -9 of `agentconnect acp`, and of what else cmd may have started.
func (e *editor) kill() {
	children := below(e.cmd.Process.Pid)
	e.cmd.Process.Kill()
	for _, p := range children {
		p.kill()
	}
	<-e.ended
}

// up reports whether `agentconnect acp` still runs.
func (e *editor) up() bool {
	select {
	case <-e.ended:
		return false
	default:
		return true
	}
}
