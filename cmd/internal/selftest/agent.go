// The ACP agent: frames, sessions, and the words of a prompt.

package selftest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// JSON-RPC and ACP error codes.
const (
	codeParse         = -32700
	codeInvalid       = -32600
	codeNoMethod      = -32601
	codeBadParams     = -32602
	codeInternal      = -32603
	codeNoSuchSession = -32002
)

// rpcError is an error of JSON-RPC, ours or the client's.
type rpcError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

func (e *rpcError) Error() string { return fmt.Sprintf("%d: %s", e.Code, e.Message) }

// message is every frame there is. An ID that is present makes it a request or an answer.
type message struct {
	Version string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *rpcError       `json:"error,omitempty"`
}

// agent serves one client.
type agent struct {
	out     io.Writer
	stderr  io.Writer
	build   string
	state   string // the sessions' file
	writing sync.Mutex

	mu       sync.Mutex
	sessions map[string]*session
	waiting  map[string]chan message // our requests to the client
	nextID   int
	eaten    [][]byte
	prompts  sync.WaitGroup
}

// session is one conversation; all but its cancel is kept in the state file.
type session struct {
	CWD     string `json:"cwd"`
	History []turn `json:"history"`
	cancel  context.CancelFunc
	servers json.RawMessage // the mcpServers that it was opened with
}

// turn is one prompt and what it was answered.
type turn struct {
	User  string `json:"user"`
	Agent string `json:"agent"`
}

// Serve answers one client on in and out until in ends, and waits for the prompts
// it cancels then. build is its version. The words of a prompt are in the package's doc.
func Serve(ctx context.Context, in io.Reader, out, stderr io.Writer, build string) error {
	ctx, stop := context.WithCancel(ctx)
	a := &agent{
		out: out, stderr: stderr, build: build,
		state:    filepath.Join(os.Getenv("HOME"), ".agentconnect-selftest.json"),
		sessions: map[string]*session{},
		waiting:  map[string]chan message{},
	}
	defer a.prompts.Wait()
	defer stop()
	r := bufio.NewReaderSize(in, 1<<16)
	for {
		line, err := r.ReadBytes('\n')
		if line = bytes.TrimSpace(line); len(line) > 0 {
			if werr := a.frame(ctx, line); werr != nil {
				return fmt.Errorf("selftest agent: write to the client: %w", werr)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("selftest agent: read from the client: %w", err)
		}
	}
}

// frame takes one line of the client's. The error is that of writing.
func (a *agent) frame(ctx context.Context, line []byte) error {
	var m message
	if err := json.Unmarshal(line, &m); err != nil {
		return a.send(message{ID: json.RawMessage("null"), Error: &rpcError{codeParse, "this is no JSON-RPC message: " + err.Error()}})
	}
	switch {
	case m.Method == "" && len(m.ID) > 0:
		a.mu.Lock()
		ch := a.waiting[string(m.ID)]
		delete(a.waiting, string(m.ID))
		a.mu.Unlock()
		if ch != nil {
			ch <- m // has room for the one answer
		}
		return nil
	case m.Method == "":
		return a.send(message{ID: json.RawMessage("null"), Error: &rpcError{codeInvalid, "neither a method nor an id"}})
	case m.Method == "session/prompt" && len(m.ID) > 0:
		return a.prompt(ctx, m)
	}
	result, err := a.call(m)
	if len(m.ID) == 0 {
		return nil
	}
	return a.answer(m.ID, result, err)
}

func (a *agent) answer(id json.RawMessage, result any, err error) error {
	if err != nil {
		var re *rpcError
		if !errors.As(err, &re) {
			re = &rpcError{codeInternal, err.Error()}
		}
		return a.send(message{ID: id, Error: re})
	}
	b, err := json.Marshal(result)
	if err != nil {
		return a.send(message{ID: id, Error: &rpcError{codeInternal, err.Error()}})
	}
	return a.send(message{ID: id, Result: b})
}

func (a *agent) send(m message) error {
	m.Version = "2.0"
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return a.raw(append(b, '\n'))
}

// raw writes whole frames, and junk, one at a time.
func (a *agent) raw(b []byte) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	_, err := a.out.Write(b)
	return err
}

// call answers every method but session/prompt.
func (a *agent) call(m message) (any, error) {
	switch m.Method {
	case "initialize":
		return map[string]any{
			"protocolVersion": 1,
			"agentInfo":       map[string]any{"name": "agentconnect-selftest", "title": "AgentConnect self-test", "version": a.build},
			"agentCapabilities": map[string]any{
				"loadSession":        true,
				"promptCapabilities": map[string]any{"image": false, "audio": false, "embeddedContext": true},
				"mcpCapabilities":    map[string]any{"http": false, "sse": false},
			},
			"authMethods": []any{},
		}, nil
	case "authenticate":
		return map[string]any{}, nil
	case "session/new":
		var p struct {
			CWD     string          `json:"cwd"`
			Servers json.RawMessage `json:"mcpServers"`
		}
		if err := decode(m.Params, &p); err != nil {
			return nil, err
		}
		if !filepath.IsAbs(p.CWD) {
			return nil, &rpcError{codeBadParams, fmt.Sprintf("cwd %q is not absolute", p.CWD)}
		}
		id := fmt.Sprintf("selftest-%d-%d", os.Getpid(), time.Now().UnixNano())
		a.mu.Lock()
		defer a.mu.Unlock()
		a.sessions[id] = &session{CWD: p.CWD, servers: p.Servers}
		return map[string]any{"sessionId": id}, a.save(id)
	case "session/load":
		return a.load(m.Params)
	case "session/cancel":
		var p struct {
			SessionID string `json:"sessionId"`
		}
		if err := decode(m.Params, &p); err != nil {
			return nil, err
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		if s := a.sessions[p.SessionID]; s != nil && s.cancel != nil {
			s.cancel()
		}
		return nil, nil
	}
	return nil, &rpcError{codeNoMethod, "method not found: " + m.Method}
}

func decode(params json.RawMessage, into any) error {
	if len(params) == 0 {
		params = json.RawMessage("{}")
	}
	if err := json.Unmarshal(params, into); err != nil {
		return &rpcError{codeBadParams, err.Error()}
	}
	return nil
}

// load takes a session from the state file and replays it.
func (a *agent) load(params json.RawMessage) (any, error) {
	var p struct {
		SessionID string          `json:"sessionId"`
		CWD       string          `json:"cwd"`
		Servers   json.RawMessage `json:"mcpServers"`
	}
	if err := decode(params, &p); err != nil {
		return nil, err
	}
	kept, err := a.kept()
	if err != nil {
		return nil, err
	}
	s := kept[p.SessionID]
	if s == nil {
		return nil, &rpcError{codeNoSuchSession, "no such session: " + p.SessionID}
	}
	if filepath.IsAbs(p.CWD) {
		s.CWD = p.CWD
	}
	s.servers = p.Servers
	a.mu.Lock()
	if old := a.sessions[p.SessionID]; old != nil {
		s.cancel = old.cancel
	}
	a.sessions[p.SessionID] = s
	a.mu.Unlock()
	for _, t := range s.History {
		if err := a.update(p.SessionID, "user_message_chunk", t.User); err != nil {
			return nil, err
		}
		if err := a.update(p.SessionID, "agent_message_chunk", t.Agent); err != nil {
			return nil, err
		}
	}
	return map[string]any{}, nil
}

// kept reads the state file; a missing one holds nothing.
func (a *agent) kept() (map[string]*session, error) {
	all := map[string]*session{}
	b, err := os.ReadFile(a.state)
	if errors.Is(err, os.ErrNotExist) {
		return all, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("sessions: %s: %w; remove the file to begin anew", a.state, err)
	}
	return all, nil
}

// save writes one session to the state file, atomically. a.mu is held.
func (a *agent) save(id string) error {
	all, err := a.kept()
	if err != nil {
		return err
	}
	all[id] = a.sessions[id]
	b, err := json.Marshal(all)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(a.state), ".agentconnect-selftest-*")
	if err != nil {
		return fmt.Errorf("sessions: %w", err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), a.state)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("sessions: %w", err)
	}
	dir, err := os.Open(filepath.Dir(a.state))
	if err != nil {
		return fmt.Errorf("sessions: %w", err)
	}
	return errors.Join(dir.Sync(), dir.Close())
}

func (a *agent) update(id, kind, text string) error {
	params, err := json.Marshal(map[string]any{
		"sessionId": id,
		"update":    map[string]any{"sessionUpdate": kind, "content": map[string]any{"type": "text", "text": text}},
	})
	if err != nil {
		return err
	}
	return a.send(message{Method: "session/update", Params: params})
}

// request asks the client and waits for its answer, or for ctx.
func (a *agent) request(ctx context.Context, method string, params, into any) error {
	b, err := json.Marshal(params)
	if err != nil {
		return err
	}
	ch := make(chan message, 1)
	a.mu.Lock()
	a.nextID++
	id := strconv.Itoa(a.nextID)
	a.waiting[id] = ch
	a.mu.Unlock()
	if err := a.send(message{ID: json.RawMessage(id), Method: method, Params: b}); err != nil {
		return err
	}
	select {
	case m := <-ch:
		if m.Error != nil {
			return m.Error
		}
		if into == nil || len(m.Result) == 0 {
			return nil
		}
		return json.Unmarshal(m.Result, into)
	case <-ctx.Done():
		a.mu.Lock()
		delete(a.waiting, id)
		a.mu.Unlock()
		return ctx.Err()
	}
}

// prompt starts a turn; the answer comes when it ends.
func (a *agent) prompt(ctx context.Context, m message) error {
	var p struct {
		SessionID string `json:"sessionId"`
		Prompt    []struct {
			Type string `json:"type"`
			Text string `json:"text"`
		} `json:"prompt"`
	}
	if err := decode(m.Params, &p); err != nil {
		return a.answer(m.ID, nil, err)
	}
	a.mu.Lock()
	s := a.sessions[p.SessionID]
	busy := s != nil && s.cancel != nil
	if s == nil || busy {
		a.mu.Unlock()
		if busy {
			return a.answer(m.ID, nil, &rpcError{codeInvalid, "a prompt is running in session " + p.SessionID})
		}
		return a.answer(m.ID, nil, &rpcError{codeNoSuchSession, "no such session: " + p.SessionID + "; session/load brings it back"})
	}
	ctx, cancel := context.WithCancel(ctx)
	s.cancel = cancel
	a.mu.Unlock()

	var text strings.Builder
	for _, b := range p.Prompt {
		if b.Type == "text" {
			text.WriteString(b.Text)
		}
	}
	t := &turnWriter{agent: a, id: p.SessionID, cwd: s.CWD}
	a.prompts.Go(func() {
		defer cancel()
		word, rest, _ := strings.Cut(strings.TrimSpace(text.String()), " ")
		err := t.do(ctx, word, strings.TrimSpace(rest))
		if err != nil && ctx.Err() == nil {
			err = t.say(word + ": error: " + err.Error())
		}
		stop := "end_turn"
		if ctx.Err() != nil {
			stop = "cancelled"
		}
		a.mu.Lock()
		s := a.sessions[p.SessionID] // a load may have put another in its place
		s.cancel = nil
		s.History = append(s.History, turn{text.String(), t.said.String()})
		err = errors.Join(err, a.save(p.SessionID))
		a.mu.Unlock()
		if err != nil && stop == "cancelled" {
			err = nil // a cancel is answered as one, whatever it broke off
		}
		if werr := a.answer(m.ID, map[string]any{"stopReason": stop}, err); werr != nil {
			fmt.Fprintln(a.stderr, "selftest agent: write to the client:", werr)
		}
	})
	return nil
}

// mostKept bounds what a session remembers of one answer.
const mostKept = 1 << 16

// turnWriter is one turn's way to the client.
type turnWriter struct {
	*agent
	id   string
	cwd  string
	said strings.Builder
}

func (t *turnWriter) say(text string) error {
	if room := mostKept - t.said.Len(); room > 0 {
		t.said.WriteString(text[:min(room, len(text))])
	}
	return t.update(t.id, "agent_message_chunk", text)
}

const help = "attack [JSON], echo TEXT, permission TEXT, write REL TEXT, client-read PATH, client-write PATH TEXT, client-terminal CMD, big N, junk banner|escape|half|mb N, fork [TAG], exit N, crash SIG, sleep N, eat N, stderr TEXT, env, servers, server NAME TEXT, help"

// do carries one word out. An error is told to the client as the word's.
func (t *turnWriter) do(ctx context.Context, word, rest string) error {
	switch word {
	case "attack":
		return t.attack(ctx, rest)
	case "echo":
		for _, chunk := range pieces(rest, 4) {
			if err := t.say(chunk); err != nil {
				return err
			}
		}
		return nil
	case "permission":
		return t.permission(ctx, rest)
	case "write":
		rel, text, _ := strings.Cut(rest, " ")
		if rel == "" || filepath.IsAbs(rel) {
			return errors.New("usage: write REL TEXT, REL relative to the session's cwd")
		}
		path := filepath.Join(t.cwd, rel)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
		return t.say(fmt.Sprintf("wrote %d bytes to %s", len(text), path))
	case "client-read":
		var got struct {
			Content string `json:"content"`
		}
		err := t.request(ctx, "fs/read_text_file", map[string]any{"sessionId": t.id, "path": rest}, &got)
		return t.outcome(word, got.Content, err)
	case "client-write":
		path, text, _ := strings.Cut(rest, " ")
		err := t.request(ctx, "fs/write_text_file", map[string]any{"sessionId": t.id, "path": path, "content": text}, nil)
		return t.outcome(word, "", err)
	case "client-terminal":
		out, err := t.terminal(ctx, rest)
		return t.outcome(word, out, err)
	case "big":
		n, err := number(rest, 1<<30)
		if err != nil {
			return err
		}
		return t.say(strings.Repeat("x", n))
	case "junk":
		return t.junk(rest)
	case "fork":
		pid, err := detach(rest)
		if err != nil {
			return err
		}
		return t.say(fmt.Sprintf("forked %d", pid))
	case "exit":
		n, err := number(rest, 255)
		if err != nil {
			return err
		}
		os.Exit(n)
	case "crash":
		return dieOf(rest)
	case "sleep":
		n, err := number(rest, 1<<20)
		if err != nil {
			return err
		}
		timer := time.NewTimer(time.Duration(n) * time.Second)
		defer timer.Stop()
		select {
		case <-timer.C:
			return t.say(fmt.Sprintf("slept %d s", n))
		case <-ctx.Done():
			return ctx.Err()
		}
	case "eat":
		n, err := number(rest, 1<<20)
		if err != nil {
			return err
		}
		if err := t.eat(ctx, n); err != nil {
			return err
		}
		return t.say(fmt.Sprintf("ate %d MiB", n))
	case "stderr":
		if _, err := fmt.Fprintln(t.stderr, rest); err != nil {
			return err
		}
		return t.say("said it on stderr")
	case "env":
		env := os.Environ()
		slices.Sort(env)
		return t.say(strings.Join(env, "\n"))
	case "servers":
		return t.say(string(t.given()))
	case "server":
		name, text, _ := strings.Cut(rest, " ")
		out, err := t.server(ctx, name, text)
		if err != nil {
			return err
		}
		return t.say(out)
	case "help":
		return t.say(help)
	}
	return t.say("This is AgentConnect's self-test agent. It knows these words: " + help)
}

// given are the mcpServers of the session.
func (t *turnWriter) given() json.RawMessage {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.sessions[t.id]; s != nil && s.servers != nil {
		return s.servers
	}
	return json.RawMessage("[]")
}

// server starts one of the session's servers on stdio as a runtime does, gives it one line,
// ends its stdin and reads what it says.
func (t *turnWriter) server(ctx context.Context, name, text string) (string, error) {
	var list []struct {
		Name    string   `json:"name"`
		Command string   `json:"command"`
		Args    []string `json:"args"`
		Env     []struct {
			Name  string `json:"name"`
			Value string `json:"value"`
		} `json:"env"`
	}
	if err := json.Unmarshal(t.given(), &list); err != nil {
		return "", err
	}
	for _, s := range list {
		if s.Name != name || s.Command == "" {
			continue
		}
		cmd := exec.CommandContext(ctx, s.Command, s.Args...)
		cmd.Env = os.Environ()
		for _, e := range s.Env {
			cmd.Env = append(cmd.Env, e.Name+"="+e.Value)
		}
		cmd.Stdin = strings.NewReader(text + "\n")
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Sprintf("server %s: %v: %s", name, err, out), nil
		}
		return string(out), nil
	}
	return "", fmt.Errorf("no server %q was given", name)
}

func number(s string, most int) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n > most {
		return 0, fmt.Errorf("%q is no number from 0 to %d", s, most)
	}
	return n, nil
}

// pieces cuts s into parts of n characters.
func pieces(s string, n int) []string {
	var out []string
	for part := range slices.Chunk([]rune(s), n) {
		out = append(out, string(part))
	}
	return out
}

// outcome streams what the client answered. Its refusal is a result, not a failure of the word.
func (t *turnWriter) outcome(word, good string, err error) error {
	var re *rpcError
	switch {
	case errors.As(err, &re):
		return t.say(fmt.Sprintf("%s: error %d: %s", word, re.Code, re.Message))
	case err != nil:
		return err
	case good == "":
		return t.say(word + ": ok")
	}
	return t.say(word + ": ok: " + good)
}

func (t *turnWriter) permission(ctx context.Context, title string) error {
	var got struct {
		Outcome struct {
			Outcome  string `json:"outcome"`
			OptionID string `json:"optionId"`
		} `json:"outcome"`
	}
	err := t.request(ctx, "session/request_permission", map[string]any{
		"sessionId": t.id,
		"toolCall":  map[string]any{"toolCallId": "selftest-call", "title": title, "kind": "other", "status": "pending"},
		"options": []any{
			map[string]any{"optionId": "allow", "name": "Allow", "kind": "allow_once"},
			map[string]any{"optionId": "reject", "name": "Reject", "kind": "reject_once"},
		},
	}, &got)
	if err != nil {
		return t.outcome("permission", "", err)
	}
	return t.say(strings.TrimSpace("permission: " + got.Outcome.Outcome + " " + got.Outcome.OptionID))
}

// terminal runs cmd on the client, as ACP's terminals go.
func (t *turnWriter) terminal(ctx context.Context, cmd string) (string, error) {
	var made struct {
		TerminalID string `json:"terminalId"`
	}
	if err := t.request(ctx, "terminal/create", map[string]any{"sessionId": t.id, "command": "sh", "args": []string{"-c", cmd}, "cwd": t.cwd}, &made); err != nil {
		return "", err
	}
	ref := map[string]any{"sessionId": t.id, "terminalId": made.TerminalID}
	var exit struct {
		ExitCode *int    `json:"exitCode"`
		Signal   *string `json:"signal"`
	}
	if err := t.request(ctx, "terminal/wait_for_exit", ref, &exit); err != nil {
		return "", err
	}
	var output struct {
		Output string `json:"output"`
	}
	if err := t.request(ctx, "terminal/output", ref, &output); err != nil {
		return "", err
	}
	if err := t.request(ctx, "terminal/release", ref, nil); err != nil {
		return "", err
	}
	how := "no status"
	switch {
	case exit.ExitCode != nil:
		how = "exit " + strconv.Itoa(*exit.ExitCode)
	case exit.Signal != nil:
		how = "signal " + *exit.Signal
	}
	return how + ": " + output.Output, nil
}

// junk puts on stdout what no ACP agent should.
func (t *turnWriter) junk(what string) error {
	kind, count, _ := strings.Cut(what, " ")
	switch kind {
	case "banner":
		return t.raw([]byte("Welcome to the self-test agent! A new version is available.\n"))
	case "escape":
		return t.raw([]byte("\x1b]0;title\a\x1b[2J\x1b[31mred\x1b[0m\n"))
	case "half":
		return t.raw([]byte(`{"jsonrpc":"2.0","method":"session/upd`))
	case "mb":
		n, err := number(count, 1<<12)
		if err != nil {
			return err
		}
		block := bytes.Repeat([]byte("y"), 1<<20)
		for range n {
			if err := t.raw(block); err != nil {
				return err
			}
		}
		return nil
	}
	return errors.New("usage: junk banner|escape|half|mb N")
}

// eat takes n MiB in steps, so that a cancel is heard, and keeps them.
func (t *turnWriter) eat(ctx context.Context, n int) error {
	for range n {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1 // untouched pages cost nothing
		}
		t.mu.Lock()
		t.eaten = append(t.eaten, b)
		t.mu.Unlock()
	}
	return nil
}

func (t *turnWriter) attack(ctx context.Context, targets string) error {
	var aim Targets
	if targets != "" {
		dec := json.NewDecoder(strings.NewReader(targets))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&aim); err != nil {
			return fmt.Errorf("targets: %w", err)
		}
	}
	if aim.Workspace == "" {
		aim.Workspace = t.cwd
	}
	var said error
	report, err := Run(ctx, aim, func(r Result) {
		said = errors.Join(said, t.say(r.Line()+"\n"))
	})
	if err = errors.Join(err, said); err != nil {
		return err
	}
	b, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	return t.say("\n```json\n" + string(b) + "\n```\n")
}
