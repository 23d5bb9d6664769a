package placement

import (
	"encoding/json"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

// newSession is a transcript in a store of its own.
func newSession(t *testing.T) (*Sessions, *transcript) {
	t.Helper()
	st, err := OpenSessions(filepath.Join(t.TempDir(), "s.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	session := cp.Session{SessionID: "s", AgentID: cp.NewID()}
	if err := st.Put(session); err != nil {
		t.Fatal(err)
	}
	return st, newTranscript(st, session, "demo")
}

// An update may be 64 MiB long, and the runtime that sends it is behind the boundary while the
// daemon that reads it has every agent to care for.
func TestALongUpdateIsNotCopiedWhole(t *testing.T) {
	const size = 16 << 20
	long := strings.Repeat("a", size)
	for name, update := range map[string]string{
		"text":     `{"update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"` + long + `"}}}`,
		"escaped":  `{"update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"` + strings.Repeat(`\u00e9`, size/6) + `"}}}`,
		"title":    `{"update":{"sessionUpdate":"tool_call","toolCallId":"1","title":"` + long + `"}}`,
		"output":   `{"update":{"sessionUpdate":"tool_call_update","toolCallId":"1","rawOutput":{"text":"` + long + `"}}}`,
		"contents": `{"update":{"sessionUpdate":"tool_call_update","toolCallId":"1","content":[` + strings.Repeat(`{},`, size/3) + `{}]}}`,
		"unknown":  `{"update":{"sessionUpdate":"tool_call","toolCallId":"1","_meta":{"x":"` + long + `"}}}`,
	} {
		st, tr := newSession(t)
		params := json.RawMessage(update)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := tr.update(params, time.Now())
		runtime.ReadMemStats(&after)
		if err != nil {
			t.Fatal(err)
		}
		if got := after.TotalAlloc - before.TotalAlloc; got > size/4 {
			t.Errorf("%s: %d bytes took %d of memory", name, len(params), got)
		}
		if err := tr.end(time.Now()); err != nil {
			t.Fatal(err)
		}
		p, err := st.History(cp.HistoryRequest{AgentID: tr.session.AgentID, SessionID: "s", Limit: 10})
		if err != nil || len(p.Messages) != 1 {
			t.Fatalf("%s: %d messages, %v", name, len(p.Messages), err)
		}
		got, want := p.Messages[0].Text, 0
		switch name {
		case "text", "escaped":
			want = MaxText
		case "title":
			want = 1024
		}
		if want > 0 && (len(got) < want || len(got) > want+len("…") || !strings.HasSuffix(got, "…") || !utf8.ValidString(got) || strings.ContainsRune(got, utf8.RuneError)) {
			t.Errorf("%s: %d bytes are kept, want %d and a mark that it was cut", name, len(got), want)
		}
	}
}

func TestBodyOfAToolCallIsKeptAsItWas(t *testing.T) {
	for update, want := range map[string]string{
		`{"sessionUpdate":"tool_call","toolCallId":"1","kind":"read","status":"pending","title":"t","rawInput":{"path":"/x"},"locations":[{"path":"/x"}],"_meta":{"x":1}}`: `{"kind":"read","locations":[{"path":"/x"}],"rawInput":{"path":"/x"},"status":"pending","toolCallId":"1"}`,
		`{"sessionUpdate":"tool_call_update","toolCallId":"1","content":[{"type":"content"}],"rawOutput":"done"}`:                                                          `{"content":[{"type":"content"}],"rawOutput":"done","toolCallId":"1"}`,
		`{"sessionUpdate":"tool_call_update","toolCallId":"1","rawOutput":"` + strings.Repeat("a", MaxBody) + `"}`:                                                         `{"toolCallId":"1","truncated":true}`,
		`{"sessionUpdate":"tool_call","toolCallId":"1","rawOutput":"` + strings.Repeat("a", MaxBody-20) + `"}`:                                                             `{"toolCallId":"1","truncated":true}`,
		`{"sessionUpdate":"tool_call","toolCallId":"1","_meta":{"x":"` + strings.Repeat("a", MaxBody) + `"},"rawOutput":7}`:                                                `{"rawOutput":7,"toolCallId":"1"}`,
	} {
		st, tr := newSession(t)
		if err := tr.update(json.RawMessage(`{"update":`+update+`}`), time.Now()); err != nil {
			t.Fatal(err)
		}
		r, fe := st.toolBody(cp.ToolBodyRequest{AgentID: tr.session.AgentID, SessionID: "s", ToolCallID: "1"})
		if fe != nil {
			t.Fatal(fe)
		}
		if got := r.Payload.(map[string]any)["data"]; got != want {
			t.Errorf("%.120s: got %.120v, want %.120s", update, got, want)
		}
	}
}
