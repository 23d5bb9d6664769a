package e2e

import (
	"fmt"
	"strings"
	"testing"
)

func TestTwoEditorsWithTheSameRequestIDs(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	ws := s.workspace("alice")
	one, two := s.attach("alice"), s.attach("alice")
	a, b := one.session(ws), two.session(ws)
	if a == b {
		t.Fatalf("both have session %s", a)
	}
	for _, id := range []string{`7`, `"same"`, `"7"`, `-1`, `9007199254740993`} {
		x := one.beginAs(id, "session/prompt", say(a, "echo for one "+id))
		y := two.beginAs(id, "session/prompt", say(b, "echo for two "+id))
		for _, c := range []*call{x, y} {
			if r, err := c.end(); err != nil || !strings.Contains(string(r), "end_turn") {
				t.Errorf("id %s: %s %v", id, r, err)
			}
		}
		if got := one.said(a); !strings.HasSuffix(got, "for one "+id) {
			t.Errorf("id %s: the first was told %q", id, got)
		}
		if got := two.said(b); !strings.HasSuffix(got, "for two "+id) {
			t.Errorf("id %s: the second was told %q", id, got)
		}
	}
	if one.said(b) != "" || two.said(a) != "" {
		t.Errorf("told of the other's session: %q, %q", one.said(b), two.said(a))
	}
	// Requests of the runtime go to the owner of the session, both at once.
	x, y := one.begin("session/prompt", say(a, "permission first")), two.begin("session/prompt", say(b, "permission second"))
	for _, c := range []*call{x, y} {
		if _, err := c.end(); err != nil {
			t.Error(err)
		}
	}
	for _, c := range []struct {
		e    *editor
		want string
	}{{one, "permission first"}, {two, "permission second"}} {
		asked := 0
		for _, f := range c.e.got() {
			if f.Method == "session/request_permission" {
				asked++
				if !strings.Contains(string(f.Params), strings.TrimPrefix(c.want, "permission ")) {
					t.Errorf("asked the wrong editor: %s", f.Params)
				}
			}
		}
		if asked != 1 {
			t.Errorf("%s: asked %d times", c.want, asked)
		}
	}
	// A session belongs to who opened it.
	for _, method := range []string{"session/prompt", "session/load"} {
		params := say(a, "echo stolen")
		params["cwd"], params["mcpServers"] = ws, []any{}
		if r, err := two.call(method, params); err == nil {
			t.Errorf("%s in another's session: %s", method, r)
		}
	}
}

func TestEditorGoesAwayMidRequestAndTheOtherDoesNotNotice(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	ws := s.workspace("alice")
	one, two := s.attach("alice"), s.attach("alice")
	a, b := one.session(ws), two.session(ws)
	one.begin("session/prompt", say(a, "sleep 100"))
	steady := two.begin("session/prompt", say(b, "sleep 1"))
	// It also goes away while the agent waits for its answer.
	three := s.attach("alice")
	c := three.session(ws)
	three.answer = func(frame) string { return silence }
	three.begin("session/prompt", say(c, "permission never answered"))
	three.until("the agent asks", func(f frame) bool { return f.Method == "session/request_permission" })
	one.cmd.Process.Kill()
	three.cmd.Process.Kill()
	s.until("they are gone", func() bool { return s.agent("alice").Clients == 1 })
	if r, err := steady.end(); err != nil || two.said(b) != "slept 1 s" {
		t.Errorf("the other: %s %v %q", r, err, two.said(b))
	}
	if got := two.prompt(b, "echo still here"); !strings.HasSuffix(got, "still here") {
		t.Errorf("%q", got)
	}
	// What they left can be taken up: their turns have ended.
	for _, id := range []string{a, c} {
		s.until("session "+id+" can be prompted", func() bool {
			if _, err := two.call("session/load", object{"sessionId": id, "cwd": ws, "mcpServers": []any{}}); err != nil {
				return false
			}
			_, err := two.call("session/prompt", say(id, "echo taken up"))
			return err == nil
		})
	}
}

func TestNotificationsForSessionsNobodyHolds(t *testing.T) {
	s := newSite(t)
	// A runtime that talks of sessions which nobody opened, before and while it works.
	s.script("alice", `
say() { printf '%s\n' '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"nobodys","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"SECRET"}}}}'; }
say; say
printf '%s\n' '{"jsonrpc":"2.0","method":"no/such/thing","params":{}}' '{"jsonrpc":"2.0","id":99,"method":"session/request_permission","params":{"sessionId":"nobodys","toolCall":{"toolCallId":"x"},"options":[]}}'
exec $guest selftest`)
	s.start()
	ws := s.workspace("alice")
	one, two := s.attach("alice"), s.attach("alice")
	a, b := one.session(ws), two.session(ws)
	// And editors that talk of such sessions.
	one.notify("session/cancel", object{"sessionId": "nobodys"})
	one.notify("session/cancel", object{"sessionId": b})
	one.raw(`{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"nobodys"}}`)
	one.raw(`{"jsonrpc":"2.0","id":99,"result":{}}`)
	slow := two.begin("session/prompt", say(b, "sleep 1"))
	one.notify("session/cancel", object{"sessionId": b})
	if r, err := slow.end(); err != nil || !strings.Contains(string(r), "end_turn") {
		t.Errorf("another's cancel ended it: %s %v", r, err)
	}
	if got := one.prompt(a, "echo fine"); got != "fine" {
		t.Errorf("%q", got)
	}
	for i, e := range []*editor{one, two} {
		for _, f := range e.got() {
			if strings.Contains(string(f.Params), "nobodys") || strings.Contains(string(f.Params), "SECRET") {
				t.Errorf("editor %d was told of a session that is not its own: %s", i, f.Params)
			}
		}
	}
	// The owner's cancel is one.
	slow = two.begin("session/prompt", say(b, "sleep 100"))
	two.notify("session/cancel", object{"sessionId": b})
	if r, err := slow.end(); err != nil || !strings.Contains(string(r), "cancelled") {
		t.Errorf("%s %v", r, err)
	}
}

func TestRuntimeThatPrintsOtherThingsOnItsStdout(t *testing.T) {
	s := newSite(t)
	s.script("alice", `printf 'Welcome!\n\033[2Jred\n{"half":'; printf '\n'; exec $guest selftest`)
	s.start()
	e := s.attach("alice")
	id := e.session(s.workspace("alice"))
	for _, junk := range []string{"banner", "escape", "half"} {
		e.call("session/prompt", say(id, "junk "+junk))
	}
	if got := e.prompt(id, "echo fine"); !strings.HasSuffix(got, "fine") {
		t.Errorf("%q", got)
	}
	e.prompt(id, fmt.Sprintf("big %d", 8<<20)) // a large frame is no junk
	if got := s.ok("agent", "logs", "alice"); !strings.Contains(got, "Welcome!") || strings.Contains(got, "\x1b") {
		t.Errorf("the log: %q", got)
	}
	// 100 MB without a newline is the end, with a reason, and the next start works.
	if r, err := e.call("session/prompt", say(id, "junk mb 100")); err == nil || !strings.Contains(err.Error(), "64") {
		t.Errorf("%s %v", r, err)
	}
	if got := s.ok("prompt", "alice", "echo again"); got != "again\n" {
		t.Errorf("%q", got)
	}
}

// `acp --runtime` in a project folder: the agent is made, runs there, and is found again.
func TestEditorInAProjectFolderGetsAnAgentForIt(t *testing.T) {
	s := newSite(t)
	project := s.mkdir("src/my app")
	s.mkdir(s.root)
	s.write("r/config.json", `{"projects":["`+s.path("src")+`"]}`)
	s.start()
	for range 2 {
		cmd := s.agentconnect(t.Context(), "acp", "--runtime", "selftest")
		cmd.Dir = project
		e := s.editor(cmd)
		if got := e.prompt(e.session(project), "write f text"); !strings.Contains(got, "wrote 4 bytes") {
			t.Errorf("%q", got)
		}
		e.close()
	}
	if st := s.status(); len(st.Agents) != 1 || st.Agents[0].ID != "my-app-selftest" || !st.Agents[0].Sandboxed {
		t.Errorf("%+v", st.Agents)
	}
	s.works("my-app-selftest", "touch x")
	if s.read("src/my app/f") != "text" {
		t.Error("the agent wrote elsewhere")
	}
}
