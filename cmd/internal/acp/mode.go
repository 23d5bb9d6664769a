// The operator's permission mode: each session that opens is put into it before its client
// hears of the session.

package acp

import (
	"bytes"
	"fmt"
	"strings"
)

// heldAnswer is the answer to a client's session/new or session/load that waits for the
// session's mode.
type heldAnswer struct {
	client *client
	id     []byte // the client's own
	result []byte
	late   [][]byte // notifications that come behind it
	size   int      // of late, in bytes
}

// keep adds a notification to those behind the answer; false: there are too many.
func (h *heldAnswer) keep(frame []byte) bool {
	if len(h.late) >= maxHeld || h.size+len(frame) > maxHeldSize {
		return false
	}
	h.late, h.size = append(h.late, append(bytes.Clone(frame), '\n')), h.size+len(frame)
	return true
}

// modesOf reads the modes of a new session's answer: the current one and the ids of all.
// known is false where the answer has none.
func modesOf(result []byte) (current string, ids []string, known bool) {
	modes, ok := member(result, "modes")
	if !ok || modes.Empty() || result[modes.Start] != '{' {
		return "", nil, false
	}
	obj := result[modes.Start:modes.End]
	text := func(obj []byte, name string) string {
		v, ok := member(obj, name)
		if !ok {
			return ""
		}
		s, _ := stringValue(obj[v.Start:v.End])
		return string(s)
	}
	list, ok := member(obj, "availableModes")
	if !ok {
		return "", nil, false
	}
	elements(obj[list.Start:list.End], func(m []byte) {
		if id := text(m, "id"); id != "" && len(ids) < 100 {
			ids = append(ids, id)
		}
	})
	return text(obj, "currentModeId"), ids, true
}

// withMode is result with its current mode replaced.
func withMode(result []byte, mode string) []byte {
	modes, ok := member(result, "modes")
	if !ok || modes.Empty() {
		return result
	}
	obj := result[modes.Start:modes.End]
	cur, ok := member(obj, "currentModeId")
	if !ok || cur.Empty() {
		return result
	}
	out := append([]byte(nil), result[:modes.Start+cur.Start]...)
	out = quote(out, mode)
	return append(out, result[modes.Start+cur.End:]...)
}

// modeMissing says why a session's modes cannot be the operator's; "" when they can, and
// asks is false when the session is in it already.
func (b *Broker) modeMissing(result []byte) (why string, asks bool) {
	current, ids, known := modesOf(result)
	switch {
	case !known:
		return "", true // it may know the call all the same
	case current == b.o.Mode:
		return "", false
	}
	for _, id := range ids {
		if id == b.o.Mode {
			return "", true
		}
	}
	if len(ids) == 0 {
		return "it has none", true
	}
	return "it has " + oneLine(strings.Join(ids, ", "), 400), true
}

// modeRefused is the error that a client gets instead of a session in another mode.
func (b *Broker) modeRefused(method, why string) string {
	return fmt.Sprintf("%s: permissionMode %q of this agent is no mode of this session: %s; change it with `agentconnect agent edit ID --permission-mode MODE`", method, b.o.Mode, why)
}

// setMode asks the runtime for the operator's mode; the client's answer waits. b.mu is held;
// the caller sends the frame after unlocking.
func (b *Broker) setMode(session string, held *heldAnswer) []byte {
	id := b.open(&upCall{method: "session/set_mode", session: session, held: held})
	frame := append([]byte(`{"jsonrpc":"2.0","id":`), id...)
	frame = append(frame, `,"method":"session/set_mode","params":{"sessionId":`...)
	frame = quote(frame, session)
	frame = append(frame, `,"modeId":`...)
	frame = quote(frame, b.o.Mode)
	return append(frame, "}}\n"...)
}

// modeSet gives the client its answer, now that the mode is what it is to be. b.mu is held,
// and given up.
func (b *Broker) modeSet(call *upCall, f *Frame, ok bool) {
	h := call.held
	gone := h.client.gone
	var closeFrame []byte
	if s := b.sessions[call.session]; s != nil && s.owner == h.client && !gone {
		if s.held == h {
			s.held = nil
		}
		if !ok {
			delete(b.sessions, call.session)
			closeFrame = b.closeSession(call.session)
		}
	}
	b.mu.Unlock()
	b.changed()
	b.toRuntime(closeFrame)
	switch {
	case gone:
	case !ok:
		why := "the runtime refused"
		if m, found := member(f.Bytes(f.Error), "message"); found && !m.Empty() {
			text, _ := stringValue(f.Bytes(f.Error)[m.Start:m.End])
			why += ": " + oneLine(string(text), 400)
		}
		b.log.Warn("session not opened", "mode", b.o.Mode, "reason", why)
		h.client.send(errorFrame(h.id, CodeInternal, b.modeRefused("session", why)))
	default:
		h.client.send(resultFrame(h.id, withMode(h.result, b.o.Mode)))
		for _, frame := range h.late {
			h.client.send(frame)
		}
	}
}

// enterMode stands between a session's answer and its client where the operator chose a
// mode. It reports whether it took the answer over.
func (b *Broker) enterMode(call *upCall, session string, f *Frame, late [][]byte) bool {
	result := f.Bytes(f.Result)
	why, asks := b.modeMissing(result)
	if !asks {
		return false
	}
	c := call.client
	b.mu.Lock()
	s := b.sessions[session]
	if c.gone || b.ended != "" || s == nil || s.owner != c {
		b.mu.Unlock()
		return false
	}
	if why != "" {
		delete(b.sessions, session)
		closeFrame := b.closeSession(session)
		b.mu.Unlock()
		b.changed()
		b.toRuntime(closeFrame)
		b.log.Warn("session not opened", "mode", b.o.Mode, "reason", why)
		c.send(errorFrame(call.id, CodeInternal, b.modeRefused(call.method, why)))
		return true
	}
	held := &heldAnswer{client: c, id: call.id, result: bytes.Clone(result), late: late}
	if call.rule.opens {
		s.held = held
	}
	frame := b.setMode(session, held)
	b.mu.Unlock()
	b.toRuntime(frame)
	return true
}
