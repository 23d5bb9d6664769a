// The broker's side towards the runtime, which may be under an attacker's control:
// every frame is judged before a client sees it.

package acp

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// readRuntime serves the runtime's stdout until it ends. All that reaches a client
// from the runtime passes through this one goroutine, so its order is kept.
func (b *Broker) readRuntime() error {
	lines := NewLineReader(b.o.RuntimeOut)
	var f Frame
	for {
		line, err := lines.Next()
		if len(trimLine(line)) > 0 {
			perr := ParseFrame(line, &f)
			if perr != nil {
				rest := behindHalf(line)
				b.junk(line[:len(line)-len(rest)], perr)
				if rest != nil {
					perr = ParseFrame(rest, &f)
				}
			}
			if perr == nil {
				b.fromRuntime(&f)
			}
		}
		if err != nil || !lines.More() {
			b.deliver()
		}
		if err != nil {
			return err
		}
	}
}

// frameStart is how every frame of the known runtimes begins.
var frameStart = []byte(`{"jsonrpc"`)

// behindHalf finds the frame that stands behind something printed without a newline (a
// banner, a frame cut short) on the same line, or nil. Without it the answer to a
// client's request would be lost with the rest of the line. Only the last start counts:
// a frame that quotes another one begins with its own.
func behindHalf(line []byte) []byte {
	i := bytes.LastIndex(line, frameStart)
	if i <= 0 {
		return nil
	}
	var f Frame
	if ParseFrame(line[i:], &f) != nil {
		return nil
	}
	return line[i:]
}

func (b *Broker) junk(line []byte, err error) {
	s := sample(line)
	b.mu.Lock()
	b.stats.Junk++
	if b.stats.Junk == 1 {
		b.stats.JunkSample = s
		if b.init.open {
			b.initWait.Reset(b.o.InitWait)
		}
	}
	b.mu.Unlock()
	b.once("junk", "runtime printed a line on its standard output that is no ACP message; it is skipped, and so are others like it", "reason", err.Error(), "line", s)
}

func (b *Broker) fromRuntime(f *Frame) {
	if f.Method != nil && !f.IsRequest() {
		b.runtimeTell(f)
		return
	}
	// Only notifications are left unsent: somebody waits for these, and serving them can wait.
	b.deliver()
	if f.IsResponse() {
		b.runtimeAnswer(f)
	} else {
		b.runtimeCall(f)
	}
	b.deliver()
}

// post sends a frame of the runtime's to a client, at the latest when no whole line of the
// runtime's is in hand. A client that is far behind is waited for.
func (b *Broker) post(c *client, parts ...[]byte) {
	ok, much := c.q.hold(b.o.ClientLimit, clientMark, parts...)
	if !ok {
		c.refused()
		return
	}
	if !slices.Contains(b.unsent, c) {
		b.unsent = append(b.unsent, c)
	}
	if much {
		b.deliver()
		c.q.settle(clientMark)
	}
}

// deliver sends what post left.
func (b *Broker) deliver() {
	for _, c := range b.unsent {
		c.q.flush()
	}
	clear(b.unsent)
	b.unsent = b.unsent[:0]
}

// relay sends the runtime's frame to a client with one span replaced.
func (b *Broker) relay(c *client, f *Frame, at Span, with []byte) {
	before, after := f.Splice(at)
	b.post(c, before, with, after, newline)
}

func (b *Broker) runtimeAnswer(f *Frame) {
	b.mu.Lock()
	call := b.take(f.Bytes(f.ID))
	if call == nil {
		b.stats.Unknown++
		b.mu.Unlock()
		b.once("unknown", "runtime answered a request that is not open; dropped", "id", sample(f.Bytes(f.ID)))
		return
	}
	ok := !f.Result.Empty()
	if call.client == nil {
		if call.method == "initialize" {
			b.initialized(f, ok) // unlocks
			return
		}
		if call.held != nil {
			b.modeSet(call, f, ok) // unlocks
			return
		}
		if s := call.closing; s != nil {
			if b.sessions[call.session] == s {
				delete(b.sessions, call.session)
			}
			close(s.closing)
		}
		b.mu.Unlock()
		return
	}
	c := call.client
	var closeFrame []byte
	var late [][]byte
	refused := ""
	id := call.session
	switch s := b.sessions[id]; {
	case call.rule.opens && ok && f.Session != nil:
		id = string(f.Session)
		s = b.sessions[id]
		switch {
		case s != nil && s.owner != nil && s.owner != c:
			refused = fmt.Sprintf("%s: the runtime answered with session %q, which client %q holds", call.method, id, s.owner.name)
		case c.gone:
			if s == nil {
				closeFrame = b.closeSession(id)
			}
		case s == nil || s.owner == nil:
			b.sessions[id] = &session{owner: c}
		}
		late = b.unhold(id)
	case call.rule.loads && s != nil && s.loading == call:
		s.loading = nil
		if !ok {
			delete(b.sessions, id)
		}
	case call.rule.loads && ok && s == nil:
		if c.gone {
			closeFrame = b.closeSession(id)
		} else {
			b.sessions[id] = &session{owner: c} // loaded twice at once, the other load failed
		}
	case call.rule.releases && ok && s != nil && s.owner == c:
		delete(b.sessions, id)
	}
	if len(b.opening) == 0 {
		b.held, b.heldSize = nil, 0
	}
	gone := c.gone
	b.mu.Unlock()

	if call.rule != (rule{}) {
		b.changed()
	}
	b.toRuntime(closeFrame)
	switch {
	case gone: // a late answer
	case refused != "":
		b.log.Warn("runtime named another client's session", "client", c.name, "reason", refused)
		c.send(errorFrame(call.id, CodeInternal, refused))
	case !ok && b.o.Sandboxed:
		c.send(errorAnswer(call.id, maskAnswer(f.Bytes(f.Error))))
	case ok && b.o.Mode != "" && (call.rule.opens || call.rule.loads) && b.enterMode(call, id, f, late):
	default:
		b.relay(c, f, f.ID, call.id)
		for _, frame := range late {
			c.send(frame)
		}
	}
}

// initialized deals the runtime's answer to initialize out. An error is not kept: the
// next client's initialize is a new try. Called with b.mu held, which it gives up.
func (b *Broker) initialized(f *Frame, ok bool) {
	waiting := b.init.waiting
	b.init.waiting, b.init.open = nil, false
	b.initWait.Stop()
	answer, frame := f.Bytes(f.Error), errorAnswer
	if ok {
		answer, frame = f.Bytes(f.Result), resultFrame
	}
	answer = bytes.Clone(answer)
	if b.o.Sandboxed {
		answer = maskAnswer(answer)
	}
	if ok {
		b.init.result = answer
		b.init.close = canClose(answer)
		b.init.mcp = mcpCapabilities(answer)
	}
	b.mu.Unlock()
	for _, w := range waiting {
		w.c.send(frame(w.id, answer))
	}
}

// receiver finds the client for a call or notification of the runtime. b.mu is held.
func (b *Broker) receiver(session []byte) (*client, string) {
	if session == nil {
		for i := len(b.clients) - 1; i >= 0; i-- {
			if b.clients[i].ready {
				return b.clients[i], ""
			}
		}
		return nil, "no client is attached"
	}
	if s := b.sessions[string(session)]; s != nil && s.owner != nil {
		return s.owner, ""
	}
	if b.sessions[string(session)] == nil && len(b.opening) == 1 && !b.opening[0].client.gone {
		return b.opening[0].client, "" // its answer, which names the session, is still to come
	}
	return nil, fmt.Sprintf("no client holds session %q", session)
}

// Calls of a runtime that ask a person, and touch nothing by themselves.
func asksPerson(method string) bool {
	return method == "session/request_permission" || strings.HasPrefix(method, "elicitation/")
}

// runs reports a method that would have the client run a command, in whatever spelling.
func runs(method string) bool {
	return strings.Contains(strings.ToLower(method), "terminal")
}

// touchesFiles is the same for files.
func touchesFiles(method string) bool {
	m := strings.TrimLeft(strings.ToLower(strings.TrimSpace(method)), "_")
	return strings.HasPrefix(m, "fs/")
}

// judge says why a sandboxed runtime may not make a call ("" if it may). For a file
// it also returns the span of the path and what to put there.
func (b *Broker) judge(f *Frame, c *client, offer fsOffer) (code int, msg string, at Span, path []byte) {
	method := oneLine(string(f.Method), 80)
	write := string(f.Method) == "fs/write_text_file"
	switch {
	case runs(string(f.Method)):
		return CodeMethodNotFound, method + ": refused: this agent is sandboxed, and its client would run the command outside the boundary; run it with the runtime's own shell tool", at, nil
	case write || string(f.Method) == "fs/read_text_file":
		if b.o.ClientFiles != "workspace" || b.o.Paths == nil {
			return CodeMethodNotFound, method + ": refused: this agent is sandboxed, and its client would reach the file outside the boundary; use the runtime's own file tools, or let the operator set acp.clientFiles to \"workspace\"", at, nil
		}
		if c != nil && (write && !offer.write || !write && !offer.read) {
			return CodeMethodNotFound, method + ": the client does not offer it", at, nil
		}
		params := f.Bytes(f.Params)
		v, ok := member(params, "path")
		given, isString := stringValue(params[v.Start:v.End])
		if !ok || !isString {
			return CodeInvalidParams, method + ": refused: params.path must be one string", at, nil
		}
		if f.Session == nil {
			return CodeInvalidParams, method + ": refused: params.sessionId must be a string", at, nil
		}
		real, err := b.o.Paths.CheckFile(string(given), write)
		if err != nil {
			return CodeInvalidParams, method + ": refused: " + err.Error(), at, nil
		}
		return 0, "", Span{f.Params.Start + v.Start, f.Params.Start + v.End}, quote(nil, real)
	case asksPerson(string(f.Method)):
		return 0, "", at, nil
	case touchesFiles(string(f.Method)) || !strings.HasPrefix(string(f.Method), "_"):
		return CodeMethodNotFound, method + ": refused: a sandboxed agent may not ask its client for this", at, nil
	}
	return 0, "", at, nil
}

// runtimeCall relays a call of the runtime to the client it concerns, or refuses it.
func (b *Broker) runtimeCall(f *Frame) {
	method := string(f.Method)
	id := bytes.Clone(f.Bytes(f.ID))
	key := idKey(id)

	b.mu.Lock()
	c, why := b.receiver(f.Session)
	// An elicitation can belong to a call (a login, before there is any session): the
	// runtime's id for that call is ours, the client knows its own.
	var scope Span
	var scopeID []byte
	if f.Session == nil && method == "elicitation/create" && !f.RequestID.Empty() {
		c, why = nil, "no client has that request open"
		if n, ok := plainInt(f.Bytes(f.RequestID)); ok {
			if u := b.up[n]; u != nil && u.client != nil && !u.client.gone {
				c, scope, scopeID = u.client, f.RequestID, u.id
			}
		}
	}
	var offer fsOffer
	if c != nil {
		offer = c.offer
	}
	repeated := b.downKey[key] != nil
	full := len(b.down) >= maxOpen
	b.mu.Unlock()

	if repeated {
		// To answer it would answer the first one.
		b.mu.Lock()
		b.stats.Unknown++
		b.mu.Unlock()
		b.once("repeated", "runtime used the id of an open request again; dropped", "id", sample(id))
		return
	}
	code, msg := 0, ""
	var path []byte
	if strings.HasPrefix(method, "$/") {
		code, msg = CodeMethodNotFound, oneLine(method, 80)+" is a notification"
	} else if b.o.Sandboxed {
		var at Span
		if code, msg, at, path = b.judge(f, c, offer); path != nil {
			scope, scopeID = at, path
		}
	}
	if msg == "" && c == nil {
		code, msg = CodeInternal, oneLine(method, 80)+": "+why
	}
	if msg == "" && full {
		code, msg = CodeInternal, oneLine(method, 80)+": too many requests are open: wait for answers"
	}
	if msg == "" {
		b.mu.Lock()
		if c.gone || b.ended != "" {
			b.mu.Unlock()
			b.toRuntime(unanswered(&downCall{id: id, method: method}))
			return
		}
		b.lastDown++
		d := &downCall{client: c, id: id, key: key, num: b.lastDown, method: method}
		b.down[d.num], b.downKey[key] = d, d
		b.mu.Unlock()
		num := strconv.AppendInt(nil, d.num, 10)
		if scopeID == nil {
			b.relay(c, f, f.ID, num)
		} else {
			b.relay2(c, f, f.ID, num, scope, scopeID)
		}
		return
	}
	b.mu.Lock()
	b.stats.Refused++
	b.mu.Unlock()
	b.once("refused "+oneLine(method, 80), "refused a request of the runtime", "method", oneLine(method, 80), "reason", msg)
	b.toRuntime(errorFrame(id, code, msg))
}

// relay2 is relay with two spans replaced.
func (b *Broker) relay2(c *client, f *Frame, at Span, with []byte, at2 Span, with2 []byte) {
	if at2.Start < at.Start {
		at, with, at2, with2 = at2, with2, at, with
	}
	b.post(c, f.Raw[:at.Start], with, f.Raw[at.End:at2.Start], with2, f.Raw[at2.End:], newline)
}

// runtimeTell relays a notification: to the holder of its session, else to all.
func (b *Broker) runtimeTell(f *Frame) {
	method := string(f.Method)
	if method == "$/cancel_request" {
		b.runtimeCancel(f)
		return
	}
	if strings.HasPrefix(method, "$/") {
		return // about the protocol itself: it may hold ids, and may be ignored
	}
	// Some clients look at the method before they look for an id.
	if b.o.Sandboxed && (runs(method) || touchesFiles(method) || asksPerson(method) && method != "elicitation/complete") {
		b.mu.Lock()
		b.stats.Refused++
		b.mu.Unlock()
		b.once("refused "+oneLine(method, 80), "dropped a request of the runtime that came without an id", "method", oneLine(method, 80))
		return
	}
	if f.Session == nil {
		b.mu.Lock()
		clients := b.clients
		b.mu.Unlock()
		for _, c := range clients {
			b.mu.Lock()
			ready := c.ready
			b.mu.Unlock()
			if ready {
				b.post(c, f.Raw, newline)
			}
		}
		return
	}
	b.mu.Lock()
	if s := b.sessions[string(f.Session)]; s != nil && s.held != nil && s.held.keep(f.Raw) {
		b.mu.Unlock()
		return
	}
	c, why := b.receiver(f.Session)
	if c != nil {
		b.mu.Unlock()
		b.post(c, f.Raw, newline)
		return
	}
	if b.sessions[string(f.Session)] == nil && len(b.opening) > 1 && len(b.held) < maxHeld && b.heldSize+len(f.Raw) <= maxHeldSize {
		frame := append(bytes.Clone(f.Raw), '\n')
		b.held = append(b.held, heldFrame{string(f.Session), frame})
		b.heldSize += len(frame)
		b.mu.Unlock()
		return
	}
	b.stats.Unheld++
	b.mu.Unlock()
	b.once("unheld", "runtime sent a notification for a session that no client holds; it is dropped, and so are others like it", "method", oneLine(method, 80), "reason", why)
}

// unhold takes out what waited for a session's holder. b.mu is held.
func (b *Broker) unhold(id string) (frames [][]byte) {
	rest := b.held[:0]
	for _, h := range b.held {
		if h.session == id {
			frames = append(frames, h.frame)
			b.heldSize -= len(h.frame)
		} else {
			rest = append(rest, h)
		}
	}
	clear(b.held[len(rest):])
	b.held = rest
	return frames
}

// runtimeCancel relays $/cancel_request under the id that the client knows.
func (b *Broker) runtimeCancel(f *Frame) {
	id := f.Bytes(f.RequestID)
	if len(id) == 0 || !isID(id) {
		return
	}
	b.mu.Lock()
	d := b.downKey[idKey(id)]
	b.mu.Unlock()
	if d != nil {
		b.relay(d.client, f, f.RequestID, strconv.AppendInt(nil, d.num, 10))
	}
}
