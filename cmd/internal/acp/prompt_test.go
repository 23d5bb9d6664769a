package acp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

type turn struct {
	res PromptResult
	err error
}

func startTurn(t *testing.T, ctx context.Context, o PromptOptions) (*end, chan turn) {
	mine, its := net.Pipe()
	done := make(chan turn, 1)
	o.Cwd, o.Text = "/ws", "hi \x00 <there>"
	go func() {
		res, err := Prompt(ctx, its, o)
		done <- turn{res, err}
	}()
	return newEnd(t, "agent", mine, mine), done
}

func openTurn(t *testing.T, a *end) message {
	m := a.want("initialize")
	a.result(string(m.ID), `{"protocolVersion":1}`)
	m = a.want("session/new")
	if string(m.Params) != `{"cwd":"/ws","mcpServers":[]}` {
		t.Errorf("session/new: %s", m.Params)
	}
	a.result(string(m.ID), `{"sessionId":"s"}`)
	m = a.want("session/prompt")
	var p struct {
		Prompt []struct{ Text string }
	}
	if err := json.Unmarshal(m.Params, &p); err != nil || len(p.Prompt) != 1 || p.Prompt[0].Text != "hi \x00 <there>" {
		t.Errorf("prompt: %s", m.Params)
	}
	return m
}

func agentSays(a *end, update string) {
	a.call("", "session/update", `{"sessionId":"s","update":`+update+`}`)
}

func TestPromptStreamsTheAnswer(t *testing.T) {
	var out, notes strings.Builder
	var asked []string
	a, done := startTurn(t, t.Context(), PromptOptions{Out: &out, Notes: &notes, Terminal: true,
		Permission: func(_ context.Context, title string, o []PermissionOption) string {
			asked = append(asked, title, o[0].Name, o[1].Name)
			return o[1].ID
		}})
	m := openTurn(t, a)
	agentSays(a, `{"sessionUpdate":"agent_thought_chunk","content":{"type":"text","text":"hm"}}`)
	agentSays(a, `{"sessionUpdate":"agent_thought_chunk","content":{"type":"text","text":"m"}}`)
	agentSays(a, `{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"Hel\u001b]52;c;ZXZpbA==\u0007lo\n"}}`)
	agentSays(a, `{"sessionUpdate":"tool_call","toolCallId":"t","title":"rm\u001b[2J -rf\nx","status":"pending"}`)
	a.call(`"p"`, "session/request_permission", `{"sessionId":"s","toolCall":{"toolCallId":"t"},"options":[{"optionId":"a","name":"Allow\u001b[0m","kind":"allow_once"},{"optionId":"r\n","name":"Reject","kind":"reject_once"}]}`)
	a.wantRaw(`{"jsonrpc":"2.0","id":"p","result":{"outcome":{"outcome":"selected","optionId":"r\n"}}}`)
	agentSays(a, `{"sessionUpdate":"tool_call_update","toolCallId":"t","status":"failed"}`)
	agentSays(a, `{"sessionUpdate":"agent_message_chunk","content":{"type":"image","data":"AAAA"}}`)
	agentSays(a, `{"sessionUpdate":"from_the_future","content":7}`)
	a.call("9", "fs/read_text_file", `{"path":"/etc/passwd"}`)
	a.wantError("9", CodeMethodNotFound)
	a.result(string(m.ID), `{"stopReason":"end_turn"}`)
	got := <-done
	if got.err != nil || got.res != (PromptResult{"s", "end_turn"}) {
		t.Errorf("%+v", got)
	}
	if d := cmp.Diff("Hel]52;c;ZXZpbA==lo\n[image]", out.String()); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff("thinking: hmm\ntool: rm[2J -rf x (pending)\ntool: rm[2J -rf x (failed)\n", notes.String()); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"rm[2J -rf x", "Allow[0m", "Reject"}, asked); d != "" {
		t.Error(d)
	}
}

func TestPromptGivesRawUpdatesAndCancelsWithoutAnAsker(t *testing.T) {
	var got []string
	a, done := startTurn(t, t.Context(), PromptOptions{OnUpdate: func(p json.RawMessage) error { got = append(got, string(p)); return nil }})
	m := openTurn(t, a)
	agentSays(a, `{"x":1.0}`)
	a.call("1", "session/request_permission", `{"options":[]}`)
	a.wantRaw(`{"jsonrpc":"2.0","id":1,"result":{"outcome":{"outcome":"cancelled"}}}`)
	a.result(string(m.ID), `{"stopReason":"refusal"}`)
	if r := <-done; r.err != nil || r.res.StopReason != "refusal" {
		t.Errorf("%+v", r)
	}
	if d := cmp.Diff([]string{`{"sessionId":"s","update":{"x":1.0}}`}, got); d != "" {
		t.Error(d)
	}
}

func TestPromptIsCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	asking := make(chan struct{})
	a, done := startTurn(t, ctx, PromptOptions{Permission: func(ctx context.Context, _ string, _ []PermissionOption) string {
		close(asking)
		<-ctx.Done()
		return "a"
	}})
	m := openTurn(t, a)
	a.call("1", "session/request_permission", `{"options":[{"optionId":"a","name":"Allow"}]}`)
	<-asking
	cancel()
	seen := map[string]bool{}
	for range 2 {
		seen[a.recv().raw] = true
	}
	if !seen[`{"jsonrpc":"2.0","method":"session/cancel","params":{"sessionId":"s"}}`] || !seen[`{"jsonrpc":"2.0","id":1,"result":{"outcome":{"outcome":"cancelled"}}}`] {
		t.Errorf("agent got %v", seen)
	}
	a.result(string(m.ID), `{"stopReason":"cancelled"}`)
	if r := <-done; r.err != nil || r.res.StopReason != "cancelled" {
		t.Errorf("%+v", r)
	}

	ctx, cancel = context.WithCancel(t.Context())
	a, done = startTurn(t, ctx, PromptOptions{CancelWait: 1})
	openTurn(t, a)
	cancel()
	a.want("session/cancel")
	if r := <-done; !errors.Is(r.err, context.Canceled) || !strings.Contains(r.err.Error(), "did not end") {
		t.Errorf("%+v", r)
	}
}

func TestPromptErrors(t *testing.T) {
	a, done := startTurn(t, t.Context(), PromptOptions{})
	m := a.want("initialize")
	a.result(string(m.ID), `{}`)
	m = a.want("session/new")
	a.send(`{"jsonrpc":"2.0","id":` + string(m.ID) + `,"error":{"code":-32000,"message":"Authentication\u001b[2J required","data":{"x":1}}}`)
	r := <-done
	var rpc *RPCError
	if !errors.As(r.err, &rpc) || rpc.Code != CodeAuthRequired || strings.Contains(r.err.Error(), "\x1b") {
		t.Errorf("%v", r.err)
	}

	a, done = startTurn(t, t.Context(), PromptOptions{})
	openTurn(t, a)
	a.conn.Close()
	if r := <-done; r.err == nil || !strings.Contains(r.err.Error(), "closed the connection") {
		t.Errorf("%v", r.err)
	}
}

// A runtime asks as often and as much as it likes; a person decides one thing at a time.
func TestQuestionsThatWaitForAPersonAreBounded(t *testing.T) {
	const huge = 256 << 10
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	asked := make(chan string, 1)
	a, done := startTurn(t, ctx, PromptOptions{Out: io.Discard, CancelWait: time.Millisecond,
		Permission: func(ctx context.Context, title string, _ []PermissionOption) string {
			asked <- title
			<-ctx.Done()
			return ""
		}})
	openTurn(t, a)
	question := func(n int, more, options string) {
		a.call(strconv.Itoa(n), "session/request_permission", `{"sessionId":"s","toolCall":{"toolCallId":"t","title":"`+more+`","content":"`+more+`"},"options":[`+options+`]}`)
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	long := strings.Repeat("x", huge)
	for n := range 40 {
		question(n, long, `{"optionId":"y","name":"`+long+`","kind":"allow_once"}`)
	}
	for n := range 40 {
		agentSays(a, fmt.Sprintf(`{"sessionUpdate":"tool_call","toolCallId":"%d","title":"%s"}`, n, long))
		agentSays(a, fmt.Sprintf(`{"sessionUpdate":"tool_call","toolCallId":"%d%s","title":"x"}`, n, long))
	}
	<-asked
	if grown := int64(heap()) - int64(before); grown > 16*huge {
		t.Errorf("%d KiB are kept for what waits", grown>>10)
	}
	for n := 40; n <= maxAsks; n++ {
		question(n, "x", `{"optionId":"y","name":"y","kind":"allow_once"}`)
	}
	if m, err := a.next(); err != nil || m.Error == nil || !strings.Contains(m.Error.Message, "too many") {
		t.Errorf("one question too many: %+v %v", m, err)
	}
	cancel()
	go func() { // what is answered now is of no interest
		for {
			if _, err := a.next(); err != nil {
				return
			}
		}
	}()
	<-done
}

func TestAQuestionWithoutAnOptionIsNobodysToAnswer(t *testing.T) {
	a, done := startTurn(t, t.Context(), PromptOptions{Out: io.Discard,
		Permission: func(ctx context.Context, _ string, _ []PermissionOption) string {
			t.Error("a person is asked, and there is nothing to choose")
			return ""
		}})
	m := openTurn(t, a)
	a.call("7", "session/request_permission", `{"sessionId":"s","toolCall":{"toolCallId":"t","title":"x"},"options":[]}`)
	if got, err := a.next(); err != nil || !strings.Contains(string(got.Result), "cancelled") {
		t.Errorf("%+v %v", got, err)
	}
	a.result(string(m.ID), `{"stopReason":"end_turn"}`)
	if d := <-done; d.err != nil {
		t.Error(d.err)
	}
}

// A question of 64 MiB can hold twenty million options, each of two bytes.
func TestAQuestionCostsNoMoreThanWhatAPersonIsShown(t *testing.T) {
	p := &prompter{titles: map[string]string{}}
	const size = 6 << 20
	for name, params := range map[string]string{
		"options": `{"options":[` + strings.Repeat(`{},`, size/3) + `{}]}`,
		"title":   `{"toolCall":{"title":"` + strings.Repeat(`a `, size/2) + `"},"options":[{"optionId":"x"}]}`,
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		q, err := p.question([]byte(params))
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 3*size {
			t.Errorf("%s: %d bytes took %d of memory", name, len(params), got)
		}
		switch name {
		case "options":
			if err == nil || !strings.Contains(err.Error(), "more than 64 options") {
				t.Errorf("options: %v", err)
			}
		case "title":
			if want := strings.Repeat("a ", 250) + "…"; err != nil || q.title != want || len(q.shown) != 1 {
				t.Errorf("title: %q, %d options, %v", q.title, len(q.shown), err)
			}
		}
	}
}

func TestOneLine(t *testing.T) {
	for in, want := range map[string]string{
		"":                        "",
		" \n a\tb\r\x1b \u00a0c ": "a b c",
		"abcdef":                  "abcdef",
		"abcdefg":                 "abcdef…",
		"abcde fg":                "abcde …",
		"abcdef   ":               "abcdef",
		"äöü\xffé\u202eßx":        "äöüéßx",
	} {
		if got := oneLine(in, 6); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
