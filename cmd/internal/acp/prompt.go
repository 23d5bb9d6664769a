// One turn for a command line: open a session, send a prompt, show what comes back.

package acp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// PermissionOption is one answer that the runtime offers.
type PermissionOption struct {
	ID   string `json:"optionId"`
	Name string `json:"name"`
	Kind string `json:"kind"` // allow_once, allow_always, reject_once, reject_always
}

// PermissionFunc asks a person. It returns the chosen option's id, or "" for
// cancelled, and returns soon after ctx is done. Its texts are cleaned of what could
// drive a terminal.
type PermissionFunc func(ctx context.Context, title string, options []PermissionOption) (optionID string)

// PromptOptions of one turn.
type PromptOptions struct {
	Cwd  string // absolute
	Text string
	// Out gets the answer's text, Notes (may be nil) a line for each tool call and the
	// runtime's thoughts.
	Out, Notes io.Writer
	// Terminal says that Out is one: what could drive it is taken out of the answer.
	Terminal bool
	// OnUpdate, if set, gets each session/update's params instead of Out and Notes. The
	// bytes are the callee's only during the call.
	OnUpdate func(params json.RawMessage) error
	// Permission answers permission requests; nil: cancelled.
	Permission PermissionFunc
	// Client names us to the runtime.
	Client, Version string
	// CancelWait is how long a cancelled turn may take to end; 0: 5 s.
	CancelWait time.Duration
}

// PromptResult is how a turn ended.
type PromptResult struct {
	SessionID  string `json:"sessionId"`
	StopReason string `json:"stopReason"`
}

// Bounds of what waits for a person: a runtime asks as often and as much as it likes.
const (
	maxAsks    = 256
	maxOptions = 64
)

type answer struct {
	result json.RawMessage
	err    error
}

type prompter struct {
	o    PromptOptions
	conn io.ReadWriteCloser

	wmu     sync.Mutex
	ask     sync.Mutex // one question at a time
	asks    sync.WaitGroup
	waiting atomic.Int64 // questions

	mu      sync.Mutex
	next    int
	calls   map[string]chan answer
	over    error
	thought bool
	written error // the first error of Out, Notes or OnUpdate
	stop    context.CancelCauseFunc
	titles  map[string]string
}

// Prompt runs one turn on a connection to an agent and closes it. When ctx is
// cancelled the turn is cancelled with the runtime, which gets CancelWait to end it;
// the result then holds its stop reason. An error answer is an *RPCError.
func Prompt(ctx context.Context, conn io.ReadWriteCloser, o PromptOptions) (PromptResult, error) {
	if o.CancelWait == 0 {
		o.CancelWait = 5 * time.Second
	}
	life, stop := context.WithCancelCause(ctx)
	p := &prompter{o: o, conn: conn, calls: map[string]chan answer{}, stop: stop, titles: map[string]string{}}
	read := make(chan struct{})
	go func() {
		defer close(read)
		p.read(life)
	}()
	res, err := p.turn(life)
	stop(nil)
	conn.Close()
	<-read
	p.asks.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.written != nil {
		err = p.written
	}
	return res, err
}

func (p *prompter) turn(ctx context.Context) (res PromptResult, err error) {
	if _, err = p.call(ctx, "initialize", map[string]any{
		"protocolVersion":    1,
		"clientCapabilities": map[string]any{"fs": map[string]bool{"readTextFile": false, "writeTextFile": false}, "terminal": false},
		"clientInfo":         map[string]string{"name": p.o.Client, "version": p.o.Version},
	}); err != nil {
		return res, fmt.Errorf("initialize: %w", err)
	}
	raw, err := p.call(ctx, "session/new", map[string]any{"cwd": p.o.Cwd, "mcpServers": []any{}})
	if err != nil {
		return res, fmt.Errorf("session/new: %w", err)
	}
	if err := json.Unmarshal(raw, &res); err != nil || res.SessionID == "" {
		return res, fmt.Errorf("session/new: the runtime's answer names no session: %s", sample(raw))
	}
	id, ch, err := p.start("session/prompt", map[string]any{
		"sessionId": res.SessionID,
		"prompt":    []any{map[string]string{"type": "text", "text": p.o.Text}},
	})
	if err != nil {
		return res, err
	}
	var a answer
	select {
	case a = <-ch:
	case <-ctx.Done():
		if p.send(sessionFrame(nil, "session/cancel", res.SessionID)) != nil {
			return res, context.Cause(ctx)
		}
		timer := time.NewTimer(p.o.CancelWait)
		defer timer.Stop()
		select {
		case a = <-ch:
		case <-timer.C:
			p.forget(id)
			return res, fmt.Errorf("turn cancelled, but the runtime did not end it within %v: %w", p.o.CancelWait, context.Cause(ctx))
		}
	}
	if a.err != nil {
		return res, fmt.Errorf("session/prompt: %w", a.err)
	}
	if err := json.Unmarshal(a.result, &res); err != nil {
		return res, fmt.Errorf("session/prompt: the runtime's answer: %w", err)
	}
	res.StopReason = oneLine(res.StopReason, 200)
	return res, nil
}

func (p *prompter) send(frame []byte) error {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	_, err := p.conn.Write(frame)
	return err
}

func (p *prompter) start(method string, params any) (string, chan answer, error) {
	body, err := json.Marshal(params)
	if err != nil {
		return "", nil, err
	}
	ch := make(chan answer, 1)
	p.mu.Lock()
	if p.over != nil {
		defer p.mu.Unlock()
		return "", nil, p.over
	}
	p.next++
	id := strconv.Itoa(p.next)
	p.calls[id] = ch
	p.mu.Unlock()
	frame := fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%s,"method":%q,"params":`, id, method)
	return id, ch, p.sendOr(id, append(append(frame, body...), "}\n"...))
}

// sendOr sends; when that fails the reader tells better than the write error why.
func (p *prompter) sendOr(id string, frame []byte) error {
	err := p.send(frame)
	if err == nil {
		return nil
	}
	p.forget(id)
	return fmt.Errorf("connection to the agent: %w", err)
}

func (p *prompter) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.calls, id)
}

func (p *prompter) call(ctx context.Context, method string, params any) (json.RawMessage, error) {
	id, ch, err := p.start(method, params)
	if err != nil {
		return nil, err
	}
	select {
	case a := <-ch:
		return a.result, a.err
	case <-ctx.Done():
		p.forget(id)
		return nil, context.Cause(ctx)
	}
}

func (p *prompter) read(ctx context.Context) {
	lines := NewLineReader(p.conn)
	var f Frame
	for {
		line, err := lines.Next()
		if len(line) > 0 && ParseFrame(line, &f) == nil {
			p.frame(ctx, &f)
		}
		if err == nil {
			continue
		}
		over := errors.New("the agent closed the connection")
		if !errors.Is(err, io.EOF) {
			over = fmt.Errorf("connection to the agent: %w", err)
		}
		p.mu.Lock()
		p.over = over
		for _, ch := range p.calls {
			ch <- answer{err: over}
		}
		p.calls = map[string]chan answer{}
		p.mu.Unlock()
		return
	}
}

func (p *prompter) frame(ctx context.Context, f *Frame) {
	switch {
	case f.IsResponse():
		p.mu.Lock()
		ch := p.calls[string(f.Bytes(f.ID))]
		delete(p.calls, string(f.Bytes(f.ID)))
		p.mu.Unlock()
		if ch == nil {
			return
		}
		if f.Error.Empty() {
			ch <- answer{result: bytes.Clone(f.Bytes(f.Result))}
			return
		}
		e := new(RPCError)
		if err := json.Unmarshal(f.Bytes(f.Error), e); err != nil {
			e = &RPCError{Code: CodeInternal, Message: "error of unknown form: " + sample(f.Bytes(f.Error))}
		}
		ch <- answer{err: e}
	case f.IsRequest():
		id := bytes.Clone(f.Bytes(f.ID))
		if string(f.Method) != "session/request_permission" {
			p.reply(errorFrame(id, CodeMethodNotFound, oneLine(string(f.Method), 80)+": this client does not do that"))
			return
		}
		q, err := p.question(f.Bytes(f.Params))
		if err != nil {
			p.reply(errorFrame(id, CodeInvalidParams, "session/request_permission: "+err.Error()))
			return
		}
		if p.waiting.Add(1) > maxAsks {
			p.waiting.Add(-1)
			p.reply(errorFrame(id, CodeInternal, "session/request_permission: too many questions are open: wait for answers"))
			return
		}
		p.asks.Go(func() {
			defer p.waiting.Add(-1)
			p.permission(ctx, id, q)
		})
	case string(f.Method) == "session/update":
		if err := p.update(f.Bytes(f.Params)); err != nil {
			p.mu.Lock()
			if p.written == nil {
				p.written = err
			}
			p.mu.Unlock()
			p.stop(err)
		}
	}
}

// reply answers the runtime; if that fails the connection is over, which read notices.
func (p *prompter) reply(frame []byte) {
	if p.send(frame) != nil {
		p.conn.Close()
	}
}

// question is a runtime's question, as much of it as is kept until a person has the time.
type question struct {
	title string
	real  []string           // the options' ids
	shown []PermissionOption // what the person is shown, in the same order
}

// options are those of a question. More than are shown are not read: an empty one is two bytes in
// the frame and a hundred in memory.
type options []PermissionOption

// UnmarshalJSON is called with text that is JSON.
func (o *options) UnmarshalJSON(list []byte) (err error) {
	n := 0
	if !elements(list, func(v []byte) {
		if n++; n > maxOptions || err != nil {
			return
		}
		var one PermissionOption
		err = json.Unmarshal(v, &one)
		*o = append(*o, one)
	}) {
		return errors.New("options must be a list")
	}
	if n > maxOptions {
		return fmt.Errorf("more than %d options", maxOptions)
	}
	return err
}

func (p *prompter) question(params []byte) (q question, err error) {
	var req struct {
		Title    string `json:"title"`
		ToolCall struct {
			ID    string `json:"toolCallId"`
			Title string `json:"title"`
			Kind  string `json:"kind"`
		} `json:"toolCall"`
		Options options `json:"options"`
	}
	if err := json.Unmarshal(params, &req); err != nil {
		return q, err
	}
	title := req.ToolCall.Title
	if title == "" {
		p.mu.Lock()
		title = p.titles[req.ToolCall.ID]
		p.mu.Unlock()
	}
	if title == "" {
		title = req.Title
	}
	if title == "" {
		title = req.ToolCall.Kind
	}
	q.title = oneLine(title, 500)
	for i, o := range req.Options {
		if len(o.ID) > maxName {
			return q, fmt.Errorf("an option's id is longer than %d bytes", maxName)
		}
		show := PermissionOption{ID: strconv.Itoa(i), Name: oneLine(o.Name, 200), Kind: oneLine(o.Kind, 40)}
		if o.ID == oneLine(o.ID, 200) {
			show.ID = o.ID
		}
		q.real, q.shown = append(q.real, o.ID), append(q.shown, show)
	}
	return q, nil
}

func (p *prompter) permission(ctx context.Context, id []byte, q question) {
	chosen := ""
	if p.o.Permission != nil && len(q.shown) > 0 {
		p.ask.Lock()
		if ctx.Err() == nil {
			chosen = p.o.Permission(ctx, q.title, q.shown)
		}
		p.ask.Unlock()
	}
	for i := range q.shown {
		if chosen != "" && q.shown[i].ID == chosen && ctx.Err() == nil {
			out := quote([]byte(`{"outcome":{"outcome":"selected","optionId":`), q.real[i])
			p.reply(resultFrame(id, append(out, "}}"...)))
			return
		}
	}
	p.reply(resultFrame(id, []byte(`{"outcome":{"outcome":"cancelled"}}`)))
}

func (p *prompter) update(params []byte) error {
	if p.o.OnUpdate != nil {
		return p.o.OnUpdate(params)
	}
	var u struct {
		Update struct {
			Kind    string          `json:"sessionUpdate"`
			Content json.RawMessage `json:"content"`
			ID      string          `json:"toolCallId"`
			Title   string          `json:"title"`
			Status  string          `json:"status"`
		} `json:"update"`
	}
	if err := json.Unmarshal(params, &u); err != nil {
		return nil //nolint:nilerr // a kind of update that this client does not know
	}
	up := &u.Update
	text := func() string {
		var c struct{ Type, Text string }
		if json.Unmarshal(up.Content, &c) != nil {
			return ""
		}
		if c.Type != "" && c.Type != "text" {
			return "[" + oneLine(c.Type, 40) + "]"
		}
		return c.Text
	}
	if p.thought && up.Kind != "agent_thought_chunk" {
		p.thought = false
		if err := p.note("\n"); err != nil {
			return err
		}
	}
	switch up.Kind {
	case "agent_message_chunk":
		t := text()
		if p.o.Terminal {
			t = CleanText(t)
		}
		_, err := io.WriteString(p.o.Out, t)
		return err
	case "agent_thought_chunk":
		lead := ""
		if !p.thought {
			lead = "thinking: "
		}
		p.thought = true
		return p.note(lead + CleanText(text()))
	case "tool_call", "tool_call_update":
		p.mu.Lock()
		if up.Title == "" {
			up.Title = p.titles[up.ID]
		} else if len(p.titles) < maxOpen && len(up.ID) <= maxName {
			p.titles[up.ID] = oneLine(up.Title, 500)
		}
		p.mu.Unlock()
		if up.Kind == "tool_call_update" && up.Status != "completed" && up.Status != "failed" {
			return nil
		}
		status := ""
		if up.Status != "" {
			status = " (" + oneLine(up.Status, 20) + ")"
		}
		return p.note("tool: " + oneLine(up.Title, 200) + status + "\n")
	}
	return nil
}

func (p *prompter) note(s string) error {
	if p.o.Notes == nil || s == "" {
		return nil
	}
	_, err := io.WriteString(p.o.Notes, s)
	return err
}
