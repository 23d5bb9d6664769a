// What a turn said, as messages: text in pieces is one message, a tool call is one that
// changes.

package placement

import (
	"encoding/json"
	"strconv"
	"time"

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
	return t.store.Write(t.session.SessionID, []cp.Message{m}, body)
}

// Bounds of the tool calls of one session that are followed: how many, and the bytes of an id,
// which is kept with each.
const (
	mostTools  = 5000
	mostToolID = 1 << 10
)

// update takes one session/update.
func (t *transcript) update(params json.RawMessage, now time.Time) error {
	var u struct {
		Update struct {
			Kind       string          `json:"sessionUpdate"`
			Content    json.RawMessage `json:"content"`
			ToolCallID string          `json:"toolCallId"`
			Title      *string         `json:"title"`
			Status     *string         `json:"status"`
			ToolKind   *string         `json:"kind"`
		} `json:"update"`
	}
	if json.Unmarshal(params, &u) != nil {
		return nil //nolint:nilerr // a runtime's odd update is not the turn's failure
	}
	switch u.Update.Kind {
	case "agent_message_chunk":
		var c struct {
			Text string `json:"text"`
		}
		_ = json.Unmarshal(u.Update.Content, &c) // content of another kind has no text
		if c.Text == "" {
			return nil
		}
		if t.text == nil {
			t.seq++
			t.text = &cp.Message{Seq: t.seq, Sender: t.session.AgentID, SenderName: t.name, TS: stampMS(now), Kind: "text"}
		}
		if room := MaxText - len(t.text.Text); room > 0 {
			t.text.Text = cut(t.text.Text+c.Text, MaxText)
		}
		return nil // written when it is whole
	case "tool_call", "tool_call_update":
		if err := t.flush(); err != nil {
			return err
		}
		return t.tool(u.Update.ToolCallID, u.Update.Title, u.Update.Status, u.Update.ToolKind, params, now)
	}
	return nil
}

func (t *transcript) tool(id string, title, status, kind *string, params json.RawMessage, now time.Time) error {
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
	if title != nil {
		m.Text = cut(*title, 1024)
	}
	if status != nil {
		switch *status {
		case "pending", "in_progress", "completed", "failed":
			m.ToolStatus = *status
		}
	}
	if kind != nil {
		m.ToolKind = cut(*kind, 64)
	}
	t.tools[id] = m
	return t.write(m, map[string]json.RawMessage{id: toolBody(id, params)})
}

// toolBody is what a tool call had and gave, as JSON of at most MaxBody bytes.
func toolBody(id string, params json.RawMessage) json.RawMessage {
	var u struct {
		Update map[string]json.RawMessage `json:"update"`
	}
	_ = json.Unmarshal(params, &u)
	body := map[string]json.RawMessage{}
	for _, name := range []string{"toolCallId", "kind", "status", "rawInput", "rawOutput", "content", "locations"} {
		if v, ok := u.Update[name]; ok {
			body[name] = v
		}
	}
	raw, err := json.Marshal(body)
	if err == nil && len(raw) <= MaxBody {
		return raw
	}
	raw, err = json.Marshal(struct {
		ID        string `json:"toolCallId"`
		Truncated bool   `json:"truncated"`
	}{cut(id, 256), true})
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
