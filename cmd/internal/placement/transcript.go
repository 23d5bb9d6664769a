// What a turn said, as messages: text in pieces is one message, a tool call is one that
// changes.

package placement

import (
	"encoding/json"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

type transcript struct {
	store   *Sessions
	session cp.Session
	name    string
	seq     int64
	text    *cp.Message           // the message being spoken
	tools   map[string]cp.Message // by tool call id
}

func newTranscript(store *Sessions, session cp.Session, name string) *transcript {
	return &transcript{store: store, session: session, name: name, tools: map[string]cp.Message{}}
}

func stampMS(t time.Time) string { return strconv.FormatInt(t.UnixMilli(), 10) }

func (t *transcript) prompt(text, sender string, now time.Time) {
	t.seq++
	_ = t.write(cp.Message{Seq: t.seq, Sender: sender, TS: stampMS(now), Kind: "text", Text: cut(text, MaxText)}, nil)
}

// write keeps the first error for the end: a full disk does not stop the turn.
func (t *transcript) write(m cp.Message, body map[string]json.RawMessage) error {
	m.Text = fit(m.Text, 2*MaxText)
	return t.store.Write(t.session.SessionID, []cp.Message{m}, body)
}

// fit cuts a text to so many bytes as they stand in a message: a control character takes six, and a
// text of them would be a message that no page can carry.
func fit(s string, most int) string {
	n := 0
	for i, r := range s {
		switch {
		case r == '"' || r == '\\' || r == '\n' || r == '\t' || r == '\r':
			n += 2
		case r < ' ' || r == utf8.RuneError || r == '\u2028' || r == '\u2029':
			n += 6
		default:
			n += utf8.RuneLen(r)
		}
		if n > most {
			return s[:i] + "…"
		}
	}
	return s
}

// Bounds of the tool calls of one session that are followed: how many, and the bytes of an id,
// which is kept with each.
const (
	mostTools  = 5000
	mostToolID = 1 << 10
)

// mostRead is how much of a text is read, in bytes as it is written: enough for what is kept of it,
// however it is escaped. A runtime's update may be 64 MiB long.
const mostRead = 6 * (MaxText + 1)

// text is a string of which no more is read than mostRead.
type text string

// UnmarshalJSON is called with text that is JSON.
func (t *text) UnmarshalJSON(raw []byte) error {
	if len(raw) > mostRead && raw[0] == '"' {
		end := 1
		for end < mostRead {
			switch {
			case raw[end] != '\\':
				end++
			case raw[end+1] == 'u':
				end += 6
			default:
				end += 2
			}
		}
		raw = append(slices.Clone(raw[:end]), '"')
	}
	return json.Unmarshal(raw, (*string)(t))
}

// part is a member that is kept if it is short enough for a tool call's body.
type part struct {
	raw  json.RawMessage
	long bool
}

// UnmarshalJSON keeps a copy of what it is called with.
func (p *part) UnmarshalJSON(raw []byte) error {
	if p.long = len(raw) > MaxBody; !p.long {
		p.raw = slices.Clone(raw)
	}
	return nil
}

// content is a message's, or a tool call's.
type content struct {
	part
	text text // of a message's
}

// UnmarshalJSON passes over content that is not a message's text.
func (c *content) UnmarshalJSON(raw []byte) error {
	var m struct {
		Text text `json:"text"`
	}
	if raw[0] == '{' && json.Unmarshal(raw, &m) == nil {
		c.text = m.Text
	}
	return c.part.UnmarshalJSON(raw)
}

// said is what is read of a session/update.
type said struct {
	Kind       text    `json:"sessionUpdate"`
	Content    content `json:"content"`
	ToolCallID text    `json:"toolCallId"`
	Title      *text   `json:"title"`
	Status     *text   `json:"status"`
	ToolKind   *text   `json:"kind"`
	RawInput   part    `json:"rawInput"`
	RawOutput  part    `json:"rawOutput"`
	Locations  part    `json:"locations"`
}

// update takes one session/update.
func (t *transcript) update(params json.RawMessage, now time.Time) error {
	var u struct {
		Update said `json:"update"`
	}
	if json.Unmarshal(params, &u) != nil {
		return nil //nolint:nilerr // a runtime's odd update is not the turn's failure
	}
	switch u.Update.Kind {
	case "agent_message_chunk":
		words := string(u.Update.Content.text)
		if words == "" {
			return nil
		}
		if t.text == nil {
			t.seq++
			t.text = &cp.Message{Seq: t.seq, Sender: t.session.AgentID, SenderName: t.name, TS: stampMS(now), Kind: "text"}
		}
		if room := MaxText - len(t.text.Text); room > 0 {
			t.text.Text = cut(t.text.Text+words, MaxText)
		}
		return nil // written when it is whole
	case "tool_call", "tool_call_update":
		if err := t.flush(); err != nil {
			return err
		}
		return t.tool(&u.Update, now)
	}
	return nil
}

func (t *transcript) tool(u *said, now time.Time) error {
	id := string(u.ToolCallID)
	if id == "" || len(id) > mostToolID {
		return nil
	}
	m, known := t.tools[id]
	if !known {
		if len(t.tools) >= mostTools {
			return nil
		}
		t.seq++
		m = cp.Message{Seq: t.seq, Sender: t.session.AgentID, SenderName: t.name, TS: stampMS(now), Kind: "tool", ToolCallID: id, ToolStatus: "pending"}
	}
	if u.Title != nil {
		m.Text = cut(string(*u.Title), 1024)
	}
	if u.Status != nil {
		switch *u.Status {
		case "pending", "in_progress", "completed", "failed":
			m.ToolStatus = string(*u.Status)
		}
	}
	if u.ToolKind != nil {
		m.ToolKind = cut(string(*u.ToolKind), 64)
	}
	t.tools[id] = m
	return t.write(m, map[string]json.RawMessage{id: toolBody(u)})
}

// toolBody is what a tool call had and gave, as JSON of at most MaxBody bytes.
func toolBody(u *said) json.RawMessage {
	body := map[string]any{"toolCallId": u.ToolCallID}
	for name, v := range map[string]*text{"kind": u.ToolKind, "status": u.Status} {
		if v != nil {
			body[name] = v
		}
	}
	long := false
	for name, p := range map[string]part{"rawInput": u.RawInput, "rawOutput": u.RawOutput, "content": u.Content.part, "locations": u.Locations} {
		long = long || p.long
		if p.raw != nil {
			body[name] = p.raw
		}
	}
	if !long {
		if raw, err := json.Marshal(body); err == nil && len(raw) <= MaxBody {
			return raw
		}
	}
	raw, err := json.Marshal(struct {
		ID        string `json:"toolCallId"`
		Truncated bool   `json:"truncated"`
	}{cut(string(u.ToolCallID), 256), true})
	if err != nil {
		return json.RawMessage("{}")
	}
	return raw
}

// flush writes the message being spoken.
func (t *transcript) flush() error {
	if t.text == nil {
		return nil
	}
	m := *t.text
	t.text = nil
	return t.write(m, nil)
}

func (t *transcript) end(time.Time) error { return t.flush() }

// revision is how far there is something to read.
func (t *transcript) revision() string { return strconv.FormatInt(t.seq, 10) }
