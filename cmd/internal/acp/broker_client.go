// The broker's side towards its clients: who is attached, and what they may send.

package acp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// rule says how a client's call is judged.
type rule struct {
	opens    bool // its answer names a new session, which the client then holds
	loads    bool // the client holds params.sessionId from now on
	needs    bool // params.sessionId must be held by the client
	releases bool // after success nobody holds params.sessionId
	paths    bool // cwd and additionalDirectories are checked
}

// ruleOf knows the methods that change who holds a session. Any other call may name a
// session that the client holds or that nobody holds.
func ruleOf(method []byte) rule {
	switch string(method) {
	case "session/new", "session/fork":
		return rule{opens: true, paths: true}
	case "session/load", "session/resume":
		return rule{loads: true, paths: true}
	case "session/prompt", "session/cancel", "session/set_mode", "session/set_model", "session/set_config_option":
		return rule{needs: true}
	case "session/close", "session/delete":
		return rule{releases: true}
	}
	return rule{}
}

type client struct {
	b    *Broker
	name string
	conn io.ReadWriteCloser
	q    *queue
	left func() bool // the other end has closed; nil where it cannot be known

	endOnce sync.Once
	ending  chan struct{}
	why     error // set before ending is closed

	// Under b.mu.
	open      map[string]int64 // open calls by their id's key; the newest where ids repeat
	openCount int
	ready     bool // it has sent initialize
	offer     fsOffer
	gone      bool
}

// send queues a frame of the broker's own, or one relayed in parts. A client that has
// too much waiting is cut off.
func (c *client) send(parts ...[]byte) {
	if !c.q.push(c.b.o.ClientLimit, parts...) {
		c.refused()
	}
}

// refused looks why the queue took no more.
func (c *client) refused() {
	if c.q.takes() {
		c.cut(errClientSlow)
	}
}

// cut ends the connection now.
func (c *client) cut(err error) {
	c.endOnce.Do(func() {
		c.why = err
		if errors.Is(err, errClientSlow) {
			c.b.mu.Lock()
			c.b.stats.Cut++
			c.b.mu.Unlock()
			c.b.log.Warn("client disconnected: it does not read", "client", c.name, "limit", c.b.o.ClientLimit)
		}
		close(c.ending)
	})
	c.q.close()
	c.conn.Close()
}

// end lets the client take what is queued, then ends the connection.
func (c *client) end(err error) {
	c.endOnce.Do(func() {
		c.why = err
		close(c.ending)
	})
	c.q.finish()
}

// Attach serves one client on conn, which it closes, until either side is done. It
// returns nil when the client left, *EndedError when the runtime did. name is for
// messages and the log.
func (b *Broker) Attach(ctx context.Context, conn io.ReadWriteCloser, name string) error {
	c := &client{b: b, name: oneLine(name, 60), conn: conn, q: newQueue(), ending: make(chan struct{}), open: map[string]int64{}}
	b.mu.Lock()
	if b.ended != "" {
		defer b.mu.Unlock()
		conn.Close()
		return &EndedError{b.ended}
	}
	b.clients = append(b.clients[:len(b.clients):len(b.clients)], c)
	b.attached.Add(1)
	b.mu.Unlock()
	defer b.attached.Done()
	b.changed()

	var wg sync.WaitGroup
	done := make(chan struct{})
	c.q.now, c.left = atOnce(conn), hungUp(conn)
	wg.Go(func() {
		err := c.q.run(conn)
		if err != nil {
			c.cut(nil) // it does not take what it is sent: it is gone
		}
		conn.Close() // after its last words; also ends the reading below
	})
	wg.Go(func() {
		select {
		case <-ctx.Done():
			c.cut(context.Cause(ctx))
			return
		case <-done:
			return
		case <-c.ending:
		}
		timer := time.NewTimer(lastWords)
		defer timer.Stop()
		select {
		case <-done:
			return
		case <-timer.C:
		case <-ctx.Done():
		}
		c.cut(nil)
	})
	err := c.read()
	c.endOnce.Do(func() {
		c.why = err
		close(c.ending)
	})
	c.q.finish()
	b.detach(c)
	// A client that closed only its sending side still gets what is queued.
	close(done)
	stop := time.AfterFunc(lastWords, func() { c.cut(nil) })
	wg.Wait()
	stop.Stop()
	conn.Close()
	b.changed()
	return c.why
}

// read serves the client's frames until its stream ends.
func (c *client) read() error {
	lines := NewLineReader(c.conn)
	var f Frame
	for junk := 0; ; {
		line, err := lines.Next()
		if len(trimLine(line)) > 0 {
			if perr := ParseFrame(line, &f); perr != nil {
				junk++
				c.send(errorFrame(nullID, frameErrorCode(perr), "client sent a line that is "+perr.Error()))
				if junk >= maxJunkRow {
					err := fmt.Errorf("client sent %d lines in a row that are not ACP, the last: %s", junk, sample(line))
					c.b.log.Warn("client disconnected", "client", c.name, "reason", err.Error())
					return err
				}
			} else {
				junk = 0
				c.handle(&f)
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, ErrFrameTooLarge):
			c.b.log.Warn("client disconnected", "client", c.name, "reason", err.Error())
			c.send(errorFrame(nullID, CodeInvalidRequest, "client sent "+err.Error()))
			return err
		default:
			return nil // it left; how is its own matter
		}
	}
}

func trimLine(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t' || b[0] == '\r' || b[0] == '\n') {
		b = b[1:]
	}
	return b
}

func (c *client) handle(f *Frame) {
	switch {
	case f.IsResponse():
		c.answer(f)
	case f.IsRequest():
		if string(f.Method) == "initialize" {
			c.initialize(f)
		} else {
			c.call(f)
		}
	default:
		c.tell(f)
	}
}

var newline = []byte{'\n'}

// forward sends the client's frame on with one span replaced, verbatim otherwise. False: it was
// not sent, since the client left before the runtime read what came before.
func (c *client) forward(f *Frame, at Span, with []byte) bool {
	before, after := f.Splice(at)
	return c.pass(before, with, after, newline)
}

// pass sends a frame of the client's to the runtime, as forward does.
func (c *client) pass(parts ...[]byte) bool {
	return c.b.in.pushWait(runtimeMark, c.left, parts...)
}

// answer relays the client's answer to a call of the runtime.
func (c *client) answer(f *Frame) {
	b := c.b
	n, ok := plainInt(f.Bytes(f.ID))
	b.mu.Lock()
	d := b.down[n]
	if !ok || d == nil || d.client != c {
		b.stats.Unknown++
		b.mu.Unlock()
		b.once("unknown "+c.name, "client answered a request that is not open; dropped", "client", c.name, "id", sample(f.Bytes(f.ID)))
		return
	}
	b.drop(d)
	b.mu.Unlock()
	if !c.forward(f, f.ID, d.id) {
		b.part(unanswered(d))
	}
}

// drop forgets a call of the runtime. b.mu is held.
func (b *Broker) drop(d *downCall) {
	delete(b.down, d.num)
	delete(b.downKey, d.key)
}

// refuse answers the client's call with an error.
func (c *client) refuse(f *Frame, code int, msg string) {
	c.send(errorFrame(f.Bytes(f.ID), code, msg))
}

// initialize is sent to the runtime once. Its answer serves every client.
func (c *client) initialize(f *Frame) {
	b := c.b
	id := append([]byte(nil), f.Bytes(f.ID)...)
	params := f.Bytes(f.Params)
	if len(params) == 0 || params[0] != '{' {
		c.refuse(f, CodeInvalidParams, "initialize: params must be an object")
		return
	}
	b.mu.Lock()
	c.ready, c.offer = true, offerOf(params)
	if b.ended != "" {
		b.mu.Unlock()
		c.refuse(f, CodeInternal, b.ended)
		return
	}
	if b.init.result != nil {
		result := b.init.result
		b.mu.Unlock()
		c.send(resultFrame(id, result))
		return
	}
	if len(b.init.waiting) >= maxOpen {
		b.mu.Unlock()
		c.refuse(f, CodeInternal, "initialize: too many are waiting")
		return
	}
	b.init.waiting = append(b.init.waiting, waiter{c, id})
	if b.stats.Junk > 0 {
		b.initWait.Reset(b.o.InitWait)
	}
	if b.init.open {
		b.mu.Unlock()
		return
	}
	b.init.open = true
	upID := b.open(&upCall{method: "initialize"})
	b.mu.Unlock()

	if b.o.Sandboxed {
		params = maskInitialize(params, b.o.ClientFiles == "workspace")
	}
	frame := append([]byte(`{"jsonrpc":"2.0","id":`), upID...)
	frame = append(frame, `,"method":"initialize","params":`...)
	frame = append(append(frame, params...), '}')
	// Also of a client that leaves meanwhile: others wait for the answer.
	b.in.pushWait(runtimeMark, nil, frame, newline)
}

// holder says who stands in the way of a client's use of a session. b.mu is held.
func (c *client) holder(id string, r rule) string {
	s := c.b.sessions[id]
	switch {
	case s != nil && s.owner == c:
		return ""
	case s != nil && s.owner != nil:
		return fmt.Sprintf("session %q is held by client %q: close it there first", id, s.owner.name)
	case r.needs:
		return fmt.Sprintf("session %q is not open in this client: load it first (session/load)", id)
	}
	return ""
}

func (c *client) call(f *Frame) {
	b := c.b
	r := ruleOf(f.Method)
	method := string(f.Method)
	if strings.HasPrefix(method, "$/") {
		// Relayed as a call, $/cancel_request would name another client's request.
		c.refuse(f, CodeMethodNotFound, oneLine(method, 80)+" is a notification")
		return
	}
	if r.paths {
		if msg := b.checkPaths(f); msg != "" {
			c.refuse(f, CodeInvalidParams, method+": "+msg)
			return
		}
	}
	var params []byte
	if r.opens || r.loads {
		var msg string
		if params, msg = b.addServers(f); msg != "" {
			c.refuse(f, CodeInvalidParams, method+": "+msg)
			return
		}
	}
	if f.Session == nil && (r.loads || r.needs || r.releases) {
		c.refuse(f, CodeInvalidParams, method+": params.sessionId must be a string")
		return
	}
	id := string(f.Session)
	call := &upCall{client: c, id: append([]byte(nil), f.Bytes(f.ID)...), method: method, rule: r, session: id}

	b.mu.Lock()
	if f.Session != nil {
		if r.loads {
			b.awaitClosed(c, id)
		}
		if why := c.holder(id, r); why != "" {
			b.mu.Unlock()
			c.refuse(f, CodeInvalidRequest, oneLine(method, 80)+": "+why)
			return
		}
	}
	switch {
	case b.ended != "":
		b.mu.Unlock()
		c.refuse(f, CodeInternal, b.ended)
		return
	case c.openCount >= maxOpen || len(b.up) >= maxOpenAll:
		b.mu.Unlock()
		c.refuse(f, CodeInternal, oneLine(method, 80)+": too many requests are open: wait for answers")
		return
	case c.gone:
		b.mu.Unlock()
		return
	}
	registered := false
	if r.loads && b.sessions[id] == nil {
		// Updates come before the answer, and belong to whoever loads.
		b.sessions[id] = &session{owner: c, loading: call}
		registered = true
	}
	upID := b.open(call)
	b.mu.Unlock()
	if registered {
		b.changed()
	}
	var sent bool
	if params != nil {
		frame := append([]byte(`{"jsonrpc":"2.0","id":`), upID...)
		frame = append(quote(append(frame, `,"method":`...), method), `,"params":`...)
		sent = c.pass(frame, params, []byte{'}'}, newline)
	} else {
		sent = c.forward(f, f.ID, upID)
	}
	b.mu.Lock()
	call.unsent = !sent
	b.mu.Unlock()
}

// awaitClosed waits, for a while, until the runtime has closed a session that an
// earlier client left: a load that overtakes the close would be closed by it. b.mu is
// held, and given up while waiting.
func (b *Broker) awaitClosed(c *client, id string) {
	s := b.sessions[id]
	if s == nil || s.closing == nil {
		return
	}
	b.mu.Unlock()
	timer := time.NewTimer(closeWait)
	defer timer.Stop()
	select {
	case <-s.closing:
	case <-timer.C:
	case <-c.ending:
	}
	b.mu.Lock()
	if b.sessions[id] == s {
		delete(b.sessions, id)
	}
}

// checkPaths judges the directories a session is opened with; "" means they pass.
func (b *Broker) checkPaths(f *Frame) string {
	params := f.Bytes(f.Params)
	check := func(field string, v []byte) string {
		path, ok := stringValue(v)
		switch {
		case !ok:
			return field + " must be a path"
		case b.o.Paths != nil:
			if _, err := b.o.Paths.CheckDir(string(path)); err != nil {
				return field + ": " + err.Error()
			}
		case b.o.Sandboxed:
			return field + ": no directory is open to this agent"
		}
		return ""
	}
	cwd, ok := member(params, "cwd")
	dirs, ok2 := member(params, "additionalDirectories")
	if !ok || !ok2 {
		return "params must be an object with each member once"
	}
	if !cwd.Empty() {
		if msg := check("cwd", params[cwd.Start:cwd.End]); msg != "" {
			return msg
		}
	}
	list := params[dirs.Start:dirs.End]
	if len(list) == 0 || string(list) == "null" {
		return ""
	}
	msg := ""
	if !elements(list, func(v []byte) {
		if msg == "" {
			msg = check("additionalDirectories", v)
		}
	}) {
		return "additionalDirectories must be a list of paths"
	}
	return msg
}

// tell relays a notification of the client.
func (c *client) tell(f *Frame) {
	b := c.b
	r := ruleOf(f.Method)
	if string(f.Method) == "$/cancel_request" {
		c.cancel(f)
		return
	}
	if bytes.HasPrefix(f.Method, []byte("$/")) {
		return // about the protocol itself: it may hold ids, and may be ignored
	}
	// A call disguised as a notification would open a session that nobody holds, in a
	// directory that nobody checked.
	if r.opens || r.loads || r.releases || string(f.Method) == "initialize" {
		b.once("tell "+c.name, "client sent a request without an id; dropped", "client", c.name, "method", sample(f.Method))
		return
	}
	if f.Session != nil || r.needs {
		b.mu.Lock()
		why := c.holder(string(f.Session), r)
		b.mu.Unlock()
		if why != "" {
			b.once("tell "+c.name, "client sent a notification for a session it does not hold; dropped", "client", c.name, "method", sample(f.Method), "reason", why)
			return
		}
	}
	c.pass(f.Raw, newline)
}

// cancel relays $/cancel_request under the id that the runtime knows.
func (c *client) cancel(f *Frame) {
	b := c.b
	id := f.Bytes(f.RequestID)
	if len(id) == 0 || !isID(id) {
		return
	}
	b.mu.Lock()
	n, ok := c.open[idKey(id)]
	b.mu.Unlock()
	if ok {
		c.forward(f, f.RequestID, fmt.Append(nil, n))
	}
}

// detach takes a client out: its turns are cancelled, what the runtime asked it is
// answered, its sessions are closed. Nobody else notices.
func (b *Broker) detach(c *client) {
	var frames [][]byte
	b.mu.Lock()
	c.gone = true
	rest := make([]*client, 0, len(b.clients))
	for _, o := range b.clients {
		if o != c {
			rest = append(rest, o)
		}
	}
	b.clients = rest
	b.init.waiting = slices.DeleteFunc(b.init.waiting, func(w waiter) bool { return w.c == c })
	cancelled := map[string]bool{}
	loading := map[string]bool{}
	for id, u := range b.up {
		switch {
		case u.client == c && u.unsent:
			b.take(strconv.AppendInt(nil, id, 10)) // nobody will answer it
		case u.held != nil && u.held.client == c:
			u.held = &heldAnswer{client: c} // what waits for its mode is nobody's
		case u.client != c:
		case u.method == "session/prompt" && !cancelled[u.session]:
			cancelled[u.session] = true
			frames = append(frames, sessionFrame(nil, "session/cancel", u.session))
		case u.rule.loads:
			loading[u.session] = true
		}
	}
	for _, d := range b.down {
		if d.client == c {
			b.drop(d)
			frames = append(frames, unanswered(d))
		}
	}
	for id, s := range b.sessions {
		if s.owner != c {
			continue
		}
		delete(b.sessions, id)
		if !loading[id] { // else when the load is answered
			if frame := b.closeSession(id); frame != nil {
				frames = append(frames, frame)
			}
		}
	}
	b.mu.Unlock()
	for _, frame := range frames {
		b.part(frame)
	}
}

// unanswered is the answer to a runtime whose client left before it answered.
func unanswered(d *downCall) []byte {
	switch d.method {
	case "session/request_permission":
		return resultFrame(d.id, []byte(`{"outcome":{"outcome":"cancelled"}}`))
	case "elicitation/create":
		return resultFrame(d.id, []byte(`{"action":"cancel"}`))
	}
	return errorFrame(d.id, CodeInternal, d.method+": the client has disconnected")
}
