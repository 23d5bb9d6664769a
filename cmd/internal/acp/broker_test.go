package acp

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestTwoClientsWithTheSameRequestIDs(t *testing.T) {
	r := newRig(t, nil)
	a, b := r.ready("a"), r.ready("b")
	r.session(a, "sa")
	r.session(b, "sb")
	// The same number, the same digits as a string, and forms that only bytes tell apart.
	ids := []string{`7`, `"7"`, `7.0`, `"\u0037"`, `null`, `-0`}
	seen := map[string]bool{}
	type open struct{ up, id, who string }
	var opens []open
	for _, id := range ids {
		for who, c := range map[string]*end{"a": a, "b": b} {
			c.call(id, "session/prompt", `{"sessionId":"s`+who+`"}`)
			m := r.rt.want("session/prompt")
			if seen[string(m.ID)] {
				t.Fatalf("id %s used twice towards the runtime", m.ID)
			}
			seen[string(m.ID)] = true
			opens = append(opens, open{string(m.ID), id, who})
		}
	}
	for i := len(opens) - 1; i >= 0; i-- {
		o := opens[i]
		r.rt.result(o.up, `{"for":"`+o.who+`"}`)
		c := map[string]*end{"a": a, "b": b}[o.who]
		c.wantRaw(`{"jsonrpc":"2.0","id":` + o.id + `,"result":{"for":"` + o.who + `"}}`)
	}
}

func TestRuntimeRequestIDsComeBackByteExactToTheOwner(t *testing.T) {
	r := newRig(t, nil)
	a, b := r.ready("a"), r.ready("b")
	r.session(a, "sa")
	r.session(b, "sb")
	var downs []string
	for _, id := range []string{`1`, `"1"`, `"\u0031x"`, `null`} {
		r.rt.call(id, "session/request_permission", `{"sessionId":"sa","options":[]}`)
		m := a.want("session/request_permission")
		downs = append(downs, string(m.ID))
		// Another client cannot answer it.
		b.result(string(m.ID), `{"outcome":{"outcome":"selected","optionId":"allow"}}`)
		a.result(string(m.ID), `{"n":1}`)
		r.rt.wantRaw(`{"jsonrpc":"2.0","id":` + id + `,"result":{"n":1}}`)
		// Nor can it be answered twice.
		a.result(string(m.ID), `{"n":2}`)
	}
	// An id that the runtime has open is not opened again.
	r.rt.call(`5`, "session/request_permission", `{"sessionId":"sa"}`)
	first := a.want("session/request_permission")
	r.rt.call(`5`, "session/request_permission", `{"sessionId":"sb"}`)
	sent := r.update("sb", "after")
	b.wantRaw(sent)
	a.result(string(first.ID), `{}`)
	r.rt.wantRaw(`{"jsonrpc":"2.0","id":5,"result":{}}`)
	if len(downs) != 4 || downs[0] == downs[1] {
		t.Errorf("ids towards the client: %v", downs)
	}
}

func TestCancelRequestIDsAreRewrittenBothWays(t *testing.T) {
	r := newRig(t, nil)
	a, b := r.ready("a"), r.ready("b")
	r.session(a, "sa")
	r.session(b, "sb")
	a.call(`"x"`, "session/prompt", `{"sessionId":"sa"}`)
	upA := r.rt.want("session/prompt")
	b.call(`"x"`, "session/prompt", `{"sessionId":"sb"}`)
	upB := r.rt.want("session/prompt")
	b.call("", "$/cancel_request", `{"requestId":"nothing open"}`)
	b.call("9", "$/cancel_request", `{"requestId":`+string(upA.ID)+`}`) // not its own id, and as a call
	b.wantError("9", CodeMethodNotFound)
	b.call("", "$/cancel_request", `{"requestId":`+string(upA.ID)+`}`)
	b.call("", "$/cancel_request", `{"requestId":"x","_meta":null}`)
	r.rt.wantRaw(`{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":` + string(upB.ID) + `,"_meta":null}}`)

	r.rt.call(`"q"`, "session/request_permission", `{"sessionId":"sa"}`)
	down := a.want("session/request_permission")
	r.rt.call("", "$/cancel_request", `{"requestId":"other"}`)
	r.rt.call("", "$/cancel_request", `{"requestId":"q"}`)
	a.wantRaw(`{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":` + string(down.ID) + `}}`)
}

func TestInitializeIsMasked(t *testing.T) {
	offered := `{"protocolVersion":1,"clientInfo":{"name":"zed"},"clientCapabilities":{"fs":{"readTextFile":true,"writeTextFile":true},"terminal":true,` +
		`"auth":{"terminal":true,"_meta":{"gateway":true}},"elicitation":{"form":{}},"_meta":{"terminal-auth":true,"terminal_output":true,"Shell-Exec":1,"parameterizedModelPicker":true}}}`
	for _, c := range []struct {
		name  string
		set   func(*Options)
		caps  string
		exact bool
	}{
		{"sandboxed", nil, `{"fs":{"readTextFile":false,"writeTextFile":false},"terminal":false,"auth":{"_meta":{"gateway":true}},"elicitation":{"form":{}},"_meta":{"parameterizedModelPicker":true}}`, false},
		{"client files", func(o *Options) { o.ClientFiles = "workspace" }, `{"fs":{"readTextFile":true,"writeTextFile":true},"terminal":false,"auth":{"_meta":{"gateway":true}},"elicitation":{"form":{}},"_meta":{"parameterizedModelPicker":true}}`, false},
		{"no sandbox", func(o *Options) { o.Sandboxed = false }, "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, c.set)
			a, _ := r.client("a")
			a.call("1", "initialize", offered)
			m := r.rt.want("initialize")
			if c.exact {
				if d := cmp.Diff(offered, string(m.Params)); d != "" {
					t.Error(d)
				}
				return
			}
			var got struct {
				ClientCapabilities json.RawMessage `json:"clientCapabilities"`
				ClientInfo         json.RawMessage `json:"clientInfo"`
			}
			if err := json.Unmarshal(m.Params, &got); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.caps, string(got.ClientCapabilities)); d != "" {
				t.Error(d)
			}
			if string(got.ClientInfo) != `{"name":"zed"}` {
				t.Errorf("clientInfo: %s", got.ClientInfo)
			}
		})
	}
}

// A login method that the client would run as a command is a way out, whether or not
// the client offered to run one.
func TestLoginCommandsOfTheRuntimeDoNotReachTheClient(t *testing.T) {
	methods := `[{"id":"key","name":"API key"},{"type":"terminal","id":"t","name":"Log in","args":["-c","evil"],"env":{"LD_PRELOAD":"/ws/x.so"}},` +
		`{"id":"m","name":"Log in","_meta":{"terminal-auth":{"command":"/bin/sh","args":["-c","evil"]},"x":{"cmd":"evil"},"ok":1}},{"id":"c","name":"n","command":"/ws/evil"}]`
	want := `[{"id":"key","name":"API key"},{"id":"m","name":"Log in","_meta":{"ok":1}},{"id":"c","name":"n"}]`
	r := newRig(t, nil)
	a, _ := r.client("a")
	a.call("1", "initialize", initParams)
	m := r.rt.want("initialize")
	r.rt.result(string(m.ID), `{"protocolVersion":1,"authMethods":`+methods+`,"agentInfo":{"name":"x"}}`)
	a.wantRaw(`{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":1,"authMethods":` + want + `,"agentInfo":{"name":"x"}}}`)
	a.call("2", "session/new", `{"cwd":"/ws"}`)
	m = r.rt.want("session/new")
	r.rt.send(`{"jsonrpc":"2.0","id":` + string(m.ID) + `,"error":{"code":-32000,"message":"login","data":{"authMethods":` + methods + `}}}`)
	a.wantRaw(`{"jsonrpc":"2.0","id":2,"error":{"code":-32000,"message":"login","data":{"authMethods":` + want + `}}}`)
}

func TestInitializeIsAskedOnceAndAnErrorIsNotKept(t *testing.T) {
	r := newRig(t, nil)
	a, _ := r.client("a")
	b, _ := r.client("b")
	a.call(`"i"`, "initialize", initParams)
	m := r.rt.want("initialize")
	b.call(`1`, "initialize", initParams)
	b.call(`2`, "x/sync", `{}`) // once this is through, b's initialize waits
	sync := r.rt.want("x/sync")
	r.rt.send(`{"jsonrpc":"2.0","id":` + string(m.ID) + `,"error":{"code":-32603,"message":"not yet"}}`)
	a.wantError(`"i"`, -32603, "not yet")
	b.wantError(`1`, -32603, "not yet")
	r.rt.result(string(sync.ID), `{}`)
	b.recv()

	b.call(`3`, "initialize", initParams)
	m = r.rt.want("initialize")
	result := `{"protocolVersion":1,"agentInfo":{"name":"x","version":"1"}}`
	r.rt.result(string(m.ID), result)
	b.wantRaw(`{"jsonrpc":"2.0","id":3,"result":` + result + `}`)
	a.call(`"again"`, "initialize", initParams)
	a.wantRaw(`{"jsonrpc":"2.0","id":"again","result":` + result + `}`)
}

func TestInitializerLeavesAndTheOtherStillGetsTheAnswer(t *testing.T) {
	r := newRig(t, nil)
	a, left := r.client("a")
	b, _ := r.client("b")
	a.call(`1`, "initialize", initParams)
	m := r.rt.want("initialize")
	b.call(`1`, "initialize", initParams)
	b.call("", "x/sync", `{}`)
	r.rt.want("x/sync")
	a.conn.Close()
	if err := <-left; err != nil {
		t.Errorf("Attach: %v", err)
	}
	r.rt.result(string(m.ID), `{"protocolVersion":1}`)
	b.wantRaw(`{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":1}}`)
}

func TestUpdatesGoToTheOwnerInOrder(t *testing.T) {
	r := newRig(t, nil)
	a, b := r.ready("a"), r.ready("b")

	// Before the answer to session/new that names the session, and right behind it.
	a.call("1", "session/new", `{"cwd":"/ws"}`)
	m := r.rt.want("session/new")
	early := r.update("sa", "early")
	a.wantRaw(early)
	go func() {
		r.rt.result(string(m.ID), `{"sessionId":"sa"}`)
		r.update("sa", "behind")
	}()
	a.wantRaw(`{"jsonrpc":"2.0","id":1,"result":{"sessionId":"sa"}}`)
	if got := a.recv().raw; !strings.Contains(got, "behind") {
		t.Errorf("got %s", got)
	}

	// History comes before the answer to session/load.
	b.call("1", "session/load", `{"sessionId":"old","cwd":"/ws"}`)
	m = r.rt.want("session/load")
	b.wantRaw(r.update("old", "history"))
	r.rt.result(string(m.ID), `null`)
	b.wantRaw(`{"jsonrpc":"2.0","id":1,"result":null}`)
	b.wantRaw(r.update("old", "more"))
	a.wantRaw(r.update("sa", "mine"))

	// Two openings at once: an early update waits until its owner is known.
	a.call("2", "session/new", `{"cwd":"/ws"}`)
	ma := r.rt.want("session/new")
	b.call("2", "session/fork", `{"cwd":"/ws","sessionId":"old"}`)
	mb := r.rt.want("session/fork")
	held := r.update("sb2", "held")
	r.rt.result(string(ma.ID), `{"sessionId":"sa2"}`)
	a.wantRaw(`{"jsonrpc":"2.0","id":2,"result":{"sessionId":"sa2"}}`)
	r.rt.result(string(mb.ID), `{"sessionId":"sb2"}`)
	b.wantRaw(`{"jsonrpc":"2.0","id":2,"result":{"sessionId":"sb2"}}`)
	b.wantRaw(held)
}

func TestSessionOfAnotherClientIsRefused(t *testing.T) {
	r := newRig(t, nil)
	a, b := r.ready("zed"), r.ready("b")
	r.session(a, "s")
	for i, method := range []string{"session/load", "session/resume", "session/fork", "session/prompt", "session/set_mode", "session/set_model", "session/set_config_option", "session/close", "session/delete", "_x/y", "session/set_title"} {
		id := fmt.Sprint(i)
		b.call(id, method, `{"sessionId":"s","cwd":"/ws"}`)
		b.wantError(id, CodeInvalidRequest, method, `held by client "zed"`)
	}
	b.call("20", "session/prompt", `{"sessionId":"unknown"}`)
	b.wantError("20", CodeInvalidRequest, "load it first")
	b.call("21", "session/prompt", `{"sessionId":21}`)
	b.wantError("21", CodeInvalidParams, "sessionId")
	b.call("", "session/cancel", `{"sessionId":"s"}`)
	b.call("", "session/cancel", `{}`)
	b.call("", "session/new", `{"cwd":"/"}`) // a call disguised as a notification
	a.call("", "session/cancel", `{"sessionId":"s"}`)
	if m := r.rt.recv(); m.raw != `{"jsonrpc":"2.0","method":"session/cancel","params":{"sessionId":"s"}}` {
		t.Errorf("runtime got %s", m.raw)
	}
	// Closed by its owner, it is free.
	a.call("1", "session/close", `{"sessionId":"s"}`)
	m := r.rt.want("session/close")
	r.rt.result(string(m.ID), `{}`)
	a.recv()
	b.call("30", "session/load", `{"sessionId":"s","cwd":"/ws"}`)
	r.rt.want("session/load")
}

func TestFailedLoadIsRolledBack(t *testing.T) {
	r := newRig(t, nil)
	a, b := r.ready("a"), r.ready("b")
	a.call("1", "session/load", `{"sessionId":"s","cwd":"/ws"}`)
	m := r.rt.want("session/load")
	b.call("1", "session/load", `{"sessionId":"s","cwd":"/ws"}`)
	b.wantError("1", CodeInvalidRequest, `client "a"`)
	r.rt.send(`{"jsonrpc":"2.0","id":` + string(m.ID) + `,"error":{"code":-32002,"message":"no such session"}}`)
	a.wantError("1", CodeNotFound, "no such session")
	b.call("2", "session/load", `{"sessionId":"s","cwd":"/ws"}`)
	m = r.rt.want("session/load")
	r.rt.result(string(m.ID), `{}`)
	b.recv()
	// Loaded again by its holder, a failure leaves it held.
	b.call("3", "session/load", `{"sessionId":"s","cwd":"/ws"}`)
	m = r.rt.want("session/load")
	r.rt.send(`{"jsonrpc":"2.0","id":` + string(m.ID) + `,"error":{"code":-1,"message":"busy"}}`)
	b.recv()
	b.wantRaw(r.update("s", "still"))
}

func TestRuntimeCannotHandOutAnotherClientsSession(t *testing.T) {
	r := newRig(t, nil)
	a, b := r.ready("a"), r.ready("b")
	r.session(a, "s")
	b.call("1", "session/new", `{"cwd":"/ws"}`)
	m := r.rt.want("session/new")
	r.rt.result(string(m.ID), `{"sessionId":"s"}`)
	b.wantError("1", CodeInternal, `client "a" holds`)
	a.wantRaw(r.update("s", "still a's"))
}

func TestNotificationForASessionNobodyHolds(t *testing.T) {
	r := newRig(t, nil)
	a := r.ready("a")
	r.session(a, "s")
	for range 3 {
		r.update("ghost", "boo")
	}
	a.wantRaw(r.update("s", "mine"))
	if n := r.b.Stats().Unheld; n != 3 {
		t.Errorf("%d counted", n)
	}
	if n := strings.Count(r.log.String(), "no client holds; it is dropped"); n != 1 {
		t.Errorf("logged %d times", n)
	}
	r.rt.call("1", "session/request_permission", `{"sessionId":"ghost"}`)
	r.rt.wantError("1", CodeInternal, `no client holds session "ghost"`)
}

func TestRuntimeCallsWithoutASession(t *testing.T) {
	r := newRig(t, nil)
	r.rt.call("1", "_x/ask", `{}`)
	r.rt.wantError("1", CodeInternal, "no client is attached")
	a := r.ready("a")
	r.rt.call("2", "_x/ask", `{}`)
	a.want("_x/ask")
	b := r.ready("b")
	r.rt.call("3", "_x/ask", `{}`)
	b.want("_x/ask")
	// A notification without a session is for all.
	line := `{"jsonrpc":"2.0","method":"_x/news","params":{}}`
	r.rt.send(line)
	a.wantRaw(line)
	b.wantRaw(line)
	// An elicitation within a call goes to the caller, under the caller's id.
	a.call(`"auth"`, "authenticate", `{"methodId":"m"}`)
	m := r.rt.want("authenticate")
	r.rt.call("4", "elicitation/create", `{"requestId":`+string(m.ID)+`,"mode":"url","message":"go"}`)
	if e := a.want("elicitation/create"); string(e.Params) != `{"requestId":"auth","mode":"url","message":"go"}` {
		t.Errorf("params: %s", e.Params)
	}
	r.rt.call("5", "elicitation/create", `{"requestId":999,"message":"go"}`)
	r.rt.wantError("5", CodeInternal, "open")
}

func TestSessionDirectoryIsChecked(t *testing.T) {
	r := newRig(t, nil)
	a := r.ready("a")
	for i, c := range []struct{ params, say string }{
		{`{"cwd":"/"}`, `"/" is outside`},
		{`{"cwd":"/ws/../etc/x","cwd":"/ws"}`, "each member once"},
		{`{"cwd":"/ws","Cwd":"/"}`, "each member once"},
		{`{"cwd":"/ws","c\u0077d":"/"}`, "each member once"},
		{`{"cwd":5}`, "cwd must be a path"},
		{`{"cwd":"/ws","additionalDirectories":["/ws/a","/etc"]}`, `additionalDirectories: "/etc"`},
		{`{"cwd":"/ws","additionalDirectories":"/etc"}`, "list of paths"},
		{`{"cwd":"/ws","additionalDirectories":[{}]}`, "must be a path"},
		{`["/"]`, "object"},
	} {
		for _, method := range []string{"session/new", "session/load", "session/resume", "session/fork"} {
			params := c.params
			if params[0] == '{' {
				params = `{"sessionId":"s",` + params[1:]
			}
			id := fmt.Sprint(i)
			a.call(id, method, params)
			a.wantError(id, CodeInvalidParams, method, c.say)
		}
	}
	a.call("99", "session/new", `{"cwd":"/ws","additionalDirectories":["/ws/a"],"mcpServers":[]}`)
	if m := r.rt.want("session/new"); string(m.Params) != `{"cwd":"/ws","additionalDirectories":["/ws/a"],"mcpServers":[]}` {
		t.Errorf("params: %s", m.Params)
	}
	none := newRig(t, func(o *Options) { o.Paths = nil })
	b := none.ready("b")
	b.call("1", "session/new", `{"cwd":"/ws"}`)
	b.wantError("1", CodeInvalidParams, "no directory")
}

func TestRuntimeAsksForATerminal(t *testing.T) {
	r := newRig(t, func(o *Options) { o.ClientFiles = "workspace" })
	a := r.ready("a")
	r.session(a, "s")
	for i, method := range []string{"terminal/create", "terminal/output", "terminal/kill", "terminal/release", "terminal/wait_for_exit", "terminal/new_thing", "Terminal/Create", " terminal/create", "terminal\\/create", "term\\u0069nal/create", "_terminal/create", "_zed/terminal_run"} {
		id := fmt.Sprint(i)
		r.rt.call(id, method, `{"sessionId":"s","command":"touch","args":["/etc/x"]}`)
		r.rt.wantError(id, CodeMethodNotFound, "sandboxed", "refused")
	}
	r.rt.call("null", "terminal/create", `{"sessionId":"s","command":"x"}`)
	r.rt.wantError("null", CodeMethodNotFound, "refused")
	r.rt.call("", "terminal/create", `{"sessionId":"s","command":"x"}`)
	r.rt.call("", "fs/write_text_file", `{"sessionId":"s","path":"/ws/x","content":""}`)
	a.wantRaw(r.update("s", "nothing came before"))
}

func TestRuntimeAsksForFilesWithoutTheOperatorsWord(t *testing.T) {
	r := newRig(t, nil)
	a := r.ready("a")
	r.session(a, "s")
	for i, method := range []string{"fs/read_text_file", "fs/write_text_file"} {
		id := fmt.Sprint(i)
		r.rt.call(id, method, `{"sessionId":"s","path":"/ws/x","content":"x"}`)
		r.rt.wantError(id, CodeMethodNotFound, "clientFiles")
	}
	for i, method := range []string{"fs/write_text_file ", "FS/Write_Text_File", "fs/delete_file", "_fs/write_text_file", "session/other", "mcp/message", "session/update", "authenticate"} {
		id := fmt.Sprint(i)
		r.rt.call(id, method, `{"sessionId":"s","path":"/ws/x"}`)
		r.rt.wantError(id, CodeMethodNotFound, "may not ask")
	}
	a.wantRaw(r.update("s", "nothing came before"))
	if n := r.b.Stats().Refused; n != 10 {
		t.Errorf("%d refused", n)
	}
}

func TestRuntimeAsksForFilesWithTheOperatorsWord(t *testing.T) {
	r := newRig(t, func(o *Options) { o.ClientFiles = "workspace"; o.Paths = upper{anyPath{[]string{"/ws"}}} })
	a := r.ready("a")
	r.session(a, "s")
	r.rt.call(`"w"`, "fs/write_text_file", `{"path":"/ws/\u0061","sessionId":"s","content":"a\tb"}`)
	m := a.want("fs/write_text_file")
	if got := string(m.Params); got != `{"path":"/resolved/ws/a","sessionId":"s","content":"a\tb"}` {
		t.Errorf("params: %s", got)
	}
	a.result(string(m.ID), `null`)
	r.rt.wantRaw(`{"jsonrpc":"2.0","id":"w","result":null}`)
	r.rt.send(`{"jsonrpc":"2.0","method":"fs/read_text_file","params":{"sessionId":"s","path":"/ws/b"},"id":3}`)
	if got := string(a.want("fs/read_text_file").Params); got != `{"sessionId":"s","path":"/resolved/ws/b"}` {
		t.Errorf("params: %s", got)
	}
	for i, c := range []struct{ params, say string }{
		{`{"sessionId":"s","path":"/etc/x"}`, "outside"},
		{`{"sessionId":"s","path":"/ws/a","path":"/etc/x"}`, "one string"},
		{`{"sessionId":"s","path":"/ws/a","Path":"/etc/x"}`, "one string"},
		{`{"sessionId":"s","path":["/ws/a"]}`, "one string"},
		{`{"sessionId":"s"}`, "one string"},
		{`{"path":"/ws/a"}`, "sessionId"},
	} {
		id := fmt.Sprint(10 + i)
		r.rt.call(id, "fs/write_text_file", c.params)
		r.rt.wantError(id, CodeInvalidParams, "refused", c.say)
	}
	// A client that offered no files is not asked for any.
	b, _ := r.client("b")
	b.call("1", "initialize", `{"protocolVersion":1,"clientCapabilities":{}}`)
	b.recv()
	r.session(b, "sb")
	r.rt.call("20", "fs/read_text_file", `{"sessionId":"sb","path":"/ws/a"}`)
	r.rt.wantError("20", CodeMethodNotFound, "does not offer")
}

type upper struct{ anyPath }

func (u upper) CheckFile(path string, write bool) (string, error) {
	p, err := u.check(path)
	return "/resolved" + p, err
}

func TestWithoutSandboxNothingIsRefused(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Sandboxed, o.Paths = false, nil })
	a := r.ready("a")
	a.call("1", "session/new", `{"cwd":"/"}`)
	m := r.rt.want("session/new")
	r.rt.result(string(m.ID), `{"sessionId":"s"}`)
	a.recv()
	for _, method := range []string{"terminal/create", "fs/write_text_file", "session/other"} {
		r.rt.call(`"`+method+`"`, method, `{"sessionId":"s","path":"/etc/x"}`)
		if m := a.want(method); string(m.Params) != `{"sessionId":"s","path":"/etc/x"}` {
			t.Errorf("params: %s", m.Params)
		}
	}
}

func TestClientGoesAwayMidRequest(t *testing.T) {
	r := newRig(t, nil)
	a, left := r.client("a")
	r.initialize(a)
	b := r.ready("b")
	r.session(a, "s")
	r.session(b, "sb")
	a.call("1", "session/prompt", `{"sessionId":"s"}`)
	prompt := r.rt.want("session/prompt")
	r.rt.call(`"p"`, "session/request_permission", `{"sessionId":"s"}`)
	a.want("session/request_permission")
	r.rt.call(`"e"`, "elicitation/create", `{"sessionId":"s"}`)
	a.want("elicitation/create")
	r.rt.call(`"x"`, "_x/ask", `{"sessionId":"s"}`)
	a.want("_x/ask")
	a.call("2", "session/new", `{"cwd":"/ws"}`)
	opening := r.rt.want("session/new")
	a.call("3", "session/load", `{"cwd":"/ws","sessionId":"old"}`)
	loading := r.rt.want("session/load")
	go a.conn.Close()

	if got := r.rt.want("session/cancel"); string(got.Params) != `{"sessionId":"s"}` {
		t.Errorf("cancel: %s", got.raw)
	}
	answers := map[string]string{}
	var closing message
	for range 4 {
		m := r.rt.recv()
		if m.Method == "session/close" {
			closing = m
			continue
		}
		answers[string(m.ID)] = string(m.Result)
		if m.Error != nil {
			answers[string(m.ID)] = m.Error.Message
		}
	}
	if d := cmp.Diff(map[string]string{
		`"p"`: `{"outcome":{"outcome":"cancelled"}}`, `"e"`: `{"action":"cancel"}`, `"x"`: "_x/ask: the client has disconnected",
	}, answers); d != "" {
		t.Error(d)
	}
	if string(closing.Params) != `{"sessionId":"s"}` {
		t.Errorf("close: %s", closing.raw)
	}
	if err := <-left; err != nil {
		t.Errorf("Attach: %v", err)
	}

	// Late answers: dropped; a session that they bring is closed too.
	r.rt.result(string(prompt.ID), `{"stopReason":"cancelled"}`)
	r.rt.result(string(opening.ID), `{"sessionId":"late"}`)
	if got := r.rt.want("session/close"); string(got.Params) != `{"sessionId":"late"}` {
		t.Errorf("close: %s", got.raw)
	}
	r.rt.result(string(loading.ID), `{}`)
	if got := r.rt.want("session/close"); string(got.Params) != `{"sessionId":"old"}` {
		t.Errorf("close: %s", got.raw)
	}
	// The other client has noticed nothing; it can load the session once it is closed.
	b.call("9", "session/load", `{"sessionId":"s","cwd":"/ws"}`)
	r.rt.call(`"y"`, "session/request_permission", `{"sessionId":"sb"}`)
	b.want("session/request_permission")
	c := r.ready("c")
	c.call("1", "session/list", `{}`)
	r.rt.want("session/list") // and not the load, which waits for the close
	r.rt.result(string(closing.ID), `{}`)
	m := r.rt.want("session/load")
	r.rt.result(string(m.ID), `{}`)
	b.wantRaw(`{"jsonrpc":"2.0","id":9,"result":{}}`)
	b.wantRaw(r.update("s", "b's now"))
	if n := r.b.Stats().Unknown; n != 0 {
		t.Errorf("%d answers counted as unknown", n)
	}
}

func TestClientLeavesARuntimeThatCannotCloseSessions(t *testing.T) {
	r := newRig(t, nil)
	a, left := r.client("a")
	a.call("1", "initialize", initParams)
	m := r.rt.want("initialize")
	r.rt.result(string(m.ID), `{"protocolVersion":1}`)
	a.recv()
	r.session(a, "s")
	a.conn.Close()
	<-left
	b := r.ready("b")
	b.call("1", "session/load", `{"sessionId":"s","cwd":"/ws"}`)
	r.rt.want("session/load") // the next thing it hears
}

func TestRuntimeEndsAndEveryOpenRequestSaysWhy(t *testing.T) {
	r := newRig(t, nil)
	a, leftA := r.client("a")
	r.initialize(a)
	b, leftB := r.client("b")
	r.initialize(b)
	r.session(a, "s")
	a.call(`"p"`, "session/prompt", `{"sessionId":"s"}`)
	r.rt.want("session/prompt")
	b.call(`8`, "session/list", `{}`)
	r.rt.want("session/list")
	r.rt.conn.Close()
	r.rt.in.Close()
	if err := <-r.run; !errors.Is(err, io.EOF) {
		t.Errorf("Run: %v", err)
	}
	r.run <- nil
	// Between the runtime's end and the word about it a request waits.
	b.call(`9`, "session/list", `{}`)
	why := "agent runtime ended: killed by signal 9; the session can be loaded again"
	failed := make(chan struct{})
	go func() { r.b.Fail(why); close(failed) }()
	a.wantError(`"p"`, CodeInternal, why)
	a.wantEnd()
	got := map[string]bool{}
	for {
		m, err := b.next()
		if err != nil {
			break
		}
		if m.Error == nil || m.Error.Message != why {
			t.Errorf("b got %s", m.raw)
		}
		got[string(m.ID)] = true
	}
	if !got["8"] {
		t.Errorf("b's answers: %v", got)
	}
	<-failed
	for _, left := range []chan error{leftA, leftB} {
		var ended *EndedError
		if err := <-left; !errors.As(err, &ended) || ended.Reason != why {
			t.Errorf("Attach: %v", err)
		}
	}
	mine, its := net.Pipe()
	defer mine.Close()
	if err := r.b.Attach(t.Context(), its, "late"); err == nil || err.Error() != why {
		t.Errorf("late Attach: %v", err)
	}
	if d := cmp.Diff([2]int{0, 0}, r.changes[len(r.changes)-1]); d != "" {
		t.Error(d)
	}
}

func TestRuntimePrintsSomethingElseOnItsStdout(t *testing.T) {
	r := newRig(t, nil)
	a, _ := r.client("a")
	a.call("1", "initialize", initParams)
	m := r.rt.want("initialize")
	r.rt.send("\x1b[1mWelcome to agent 3.0\x1b[0m")
	r.rt.send("")
	r.rt.send(`{"level":"info"}`)
	r.rt.send(`[]`)
	r.rt.send("{\"jsonrpc\":\"2.0\",\"method\":\"\xff\"}")
	r.rt.send(`{"jsonrpc":"2.0","id":` + string(m.ID) + `,"id":0,"result":{}}`)
	r.rt.result(string(m.ID), `{"protocolVersion":1}`)
	a.wantRaw(`{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":1}}`)
	s := r.b.Stats()
	if s.Junk != 5 || s.JunkSample != `"\x1b[1mWelcome to agent 3.0\x1b[0m"` {
		t.Errorf("%+v", s)
	}
	if log := r.log.String(); strings.Count(log, "is no ACP message") != 1 || strings.Contains(log, "\x1b") {
		t.Errorf("log: %s", log)
	}
	// Half a line at the end.
	if _, err := io.WriteString(r.rt.conn, `{"jsonrpc":"2.0","meth`); err != nil {
		t.Fatal(err)
	}
	r.rt.conn.Close()
	if err := <-r.run; !errors.Is(err, io.EOF) {
		t.Errorf("Run: %v", err)
	}
	r.run <- nil
	if n := r.b.Stats().Junk; n != 6 {
		t.Errorf("%d lines of junk", n)
	}
}

func TestInitializeThatFailsNamesTheJunk(t *testing.T) {
	r := newRig(t, nil)
	a, _ := r.client("a")
	a.call("1", "initialize", initParams)
	r.rt.want("initialize")
	r.rt.send("npm ERR! code E404")
	r.rt.conn.Close()
	<-r.run
	r.run <- nil
	go r.b.Fail("agent runtime ended: exit status 1")
	a.wantError("1", CodeInternal, "exit status 1", "npm ERR! code E404")

	r = newRig(t, func(o *Options) { o.InitWait = time.Millisecond })
	a, _ = r.client("a")
	a.call("1", "initialize", initParams)
	r.rt.want("initialize")
	r.rt.send("Select a login: [1] key [2] web")
	a.wantError("1", CodeInternal, "has not answered", "Select a login")
}

func TestRuntimePrintsWithoutEnd(t *testing.T) {
	r := newRig(t, nil)
	a := r.ready("a")
	r.session(a, "s")
	go func() {
		mb := strings.Repeat("z", 1<<20)
		for range 100 {
			if _, err := io.WriteString(r.rt.conn, mb); err != nil {
				return
			}
		}
	}()
	if err := <-r.run; !errors.Is(err, ErrFrameTooLarge) {
		t.Errorf("Run: %v", err)
	}
	r.run <- nil
}

func TestRuntimeClosesItsStdin(t *testing.T) {
	r := newRig(t, nil)
	a, _ := r.client("a")
	r.rt.in.Close()
	a.call("1", "initialize", initParams)
	if err := <-r.run; err == nil || !strings.Contains(err.Error(), "no longer reads") {
		t.Errorf("Run: %v", err)
	}
	r.run <- nil
}

func TestFrameOf64MiBPassesBothWays(t *testing.T) {
	r := newRig(t, nil)
	a := r.ready("a")
	r.session(a, "s")
	head := `{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","x":"`
	line := head + strings.Repeat("y", MaxFrame-len(head)-3) + `"}}`
	go r.rt.send(line)
	if got := a.recv().raw; got != line {
		t.Errorf("got %d bytes", len(got))
	}
	head = `{"jsonrpc":"2.0","method":"_x/big","params":{"sessionId":"s","x":"`
	line = head + strings.Repeat("y", MaxFrame-len(head)-3) + `"}}`
	go a.send(line)
	if got := r.rt.recv().raw; got != line {
		t.Errorf("got %d bytes", len(got))
	}
}

func TestAnswersToNothingAreDropped(t *testing.T) {
	r := newRig(t, nil)
	a := r.ready("a")
	r.session(a, "s")
	for _, id := range []string{"99", `"1"`, "1.0", "null", "-1", "00", "1e0", "99999999999999999999"} {
		if id == "00" {
			continue
		}
		r.rt.result(id, `{}`)
		a.result(id, `{}`)
	}
	a.call("5", "session/list", `{}`)
	m := r.rt.want("session/list")
	r.rt.result(string(m.ID), `{}`)
	r.rt.result(string(m.ID), `{"second":true}`)
	a.wantRaw(`{"jsonrpc":"2.0","id":5,"result":{}}`)
	a.wantRaw(r.update("s", "next"))
	if n := r.b.Stats().Unknown; n != 15 {
		t.Errorf("%d counted", n)
	}
}

func TestClientSendsJunk(t *testing.T) {
	r := newRig(t, nil)
	a, left := r.client("a")
	r.initialize(a)
	a.send("hello")
	a.wantError("null", CodeParse, "not JSON")
	a.send(`[{"jsonrpc":"2.0","id":1,"method":"session/list"}]`)
	a.wantError("null", CodeInvalidRequest, "batch")
	a.send(`{"jsonrpc":"2.0","id":1,"id":2,"method":"session/list"}`)
	a.wantError("null", CodeInvalidRequest, "twice")
	a.call("1", "session/list", `{}`)
	r.rt.want("session/list")
	for range maxJunkRow {
		go io.WriteString(a.conn, "x\n")
		a.wantError("null", CodeParse)
	}
	a.wantEnd()
	if err := <-left; err == nil || !strings.Contains(err.Error(), "100 lines in a row") {
		t.Errorf("Attach: %v", err)
	}
}

func TestClientThatNeverReadsIsCutAndStallsNobody(t *testing.T) {
	r := newRig(t, func(o *Options) { o.ClientLimit = 1 << 20 })
	slow, left := r.client("slow")
	r.initialize(slow)
	b := r.ready("b")
	r.session(slow, "ss")
	r.session(b, "sb")
	text := strings.Repeat("x", 64<<10)
	for i := range 20 {
		r.update("ss", text)
		b.wantRaw(r.update("sb", fmt.Sprint(i)))
	}
	if err := <-left; !errors.Is(err, errClientSlow) {
		t.Errorf("Attach: %v", err)
	}
	if n := r.b.Stats().Cut; n != 1 {
		t.Errorf("%d cut", n)
	}
	if !strings.Contains(r.log.String(), "it does not read") {
		t.Error("not logged")
	}
	r.rt.want("session/close")
	b.wantRaw(r.update("sb", "still there"))
}

// A client that reads, but more slowly than a runtime can print, is waited for.
func TestClientThatReadsSlowlyIsWaitedFor(t *testing.T) {
	q := newQueue()
	rd, wr := osPipe(t)
	done := make(chan error, 1)
	go func() { done <- q.run(wr) }()
	frame := make([]byte, 1<<20)
	const frames = 100
	var got int64
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 256<<10)
		for got < frames<<20 {
			n, err := rd.Read(buf)
			got += int64(n)
			if err != nil {
				return
			}
		}
	}()
	most := 0
	for range frames {
		if !q.push(clientLimit, frame) {
			t.Fatal("cut off")
		}
		q.settle(clientMark)
		q.mu.Lock()
		most = max(most, q.bytes)
		q.mu.Unlock()
	}
	<-read
	q.close()
	if err := <-done; err != nil || got != frames<<20 {
		t.Errorf("%d bytes, %v", got, err)
	}
	if most > clientMark+(2<<20) {
		t.Errorf("%d bytes were queued", most)
	}
}

func TestQueueWaitsOnlySoLongForAReaderThatDoesNotRead(t *testing.T) {
	q := newQueue()
	_, wr := osPipe(t)
	done := make(chan error, 1)
	go func() { done <- q.run(wr) }()
	began := time.Now()
	for range 50 {
		q.push(clientLimit, make([]byte, 1<<20))
		q.settle(clientMark)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("stalled for %v", took)
	}
	wr.Close()
	q.close()
	<-done
}

func TestClientsAndSessionsAreCounted(t *testing.T) {
	r := newRig(t, nil)
	a, left := r.client("a")
	r.initialize(a)
	r.session(a, "s1")
	r.session(a, "s2")
	if s := r.b.Stats(); s.Clients != 1 || s.Sessions != 2 {
		t.Errorf("%+v", s)
	}
	go a.conn.Close()
	r.rt.want("session/close")
	r.rt.want("session/close")
	<-left
	r.mu.Lock()
	defer r.mu.Unlock()
	if d := cmp.Diff([][2]int{{1, 0}, {1, 1}, {1, 2}, {0, 0}}, r.changes); d != "" {
		t.Error(d)
	}
}

func TestStopWhileEverythingIsStuck(t *testing.T) {
	r := newRig(t, nil)
	a := r.ready("a")
	r.session(a, "s")
	// The runtime does not read, a client writes more than is kept for it, another
	// client does not read: the rig's cleanup sees that all of it ends.
	b := r.ready("b")
	r.session(b, "sb")
	big := strings.Repeat("x", 5<<20)
	go func() {
		for {
			a.conn.SetWriteDeadline(time.Now().Add(must))
			if _, err := fmt.Fprintf(a.conn, `{"jsonrpc":"2.0","method":"_x","params":{"sessionId":"s","x":"%s"}}`+"\n", big); err != nil {
				return
			}
		}
	}()
	go fmt.Fprintf(r.rt.conn, `{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"sb","x":"%s"}}`+"\n", big)
	r.b.mu.Lock()
	in := r.b.in
	r.b.mu.Unlock()
	in.mu.Lock()
	for in.bytes < runtimeMark {
		in.mu.Unlock()
		runtime.Gosched()
		in.mu.Lock()
	}
	in.mu.Unlock()
}

// The runtime chooses how what it says is nested; looking through it must not take longer for that.
func TestAnErrorThatIsNestedDeeplyCostsNoMoreThanAFlatOne(t *testing.T) {
	text := strings.Repeat("[1,2,3,4,5,6,7,8,9,0],", 50_000) + "0"
	nested := func(deep int) []byte {
		return []byte(`{"code":1,"message":"x","data":` + strings.Repeat(`{"a":`, deep) + "[" + text + "]" + strings.Repeat("}", deep) + "}")
	}
	took := func(deep int) time.Duration {
		v := nested(deep)
		began := time.Now()
		maskAnswer(v)
		return time.Since(began)
	}
	flat := min(took(1), took(1), took(1))
	if deep := took(500); deep > 60*flat {
		t.Errorf("500 deep %v, flat %v", deep, flat)
	}
	v := maskAnswer([]byte(`{"code":1,"data":` + strings.Repeat(`{"a":`, 100) + `{"authMethods":[{"id":"x","type":"terminal"}]}` + strings.Repeat("}", 101)))
	if strings.Contains(string(v), "terminal") || !json.Valid(v) {
		t.Errorf("masked: %s", v)
	}
	if v := maskAnswer([]byte(`{"code":1,"data":{"a":{"b":{"c":{"kept":[1]}}}}}`)); !strings.Contains(string(v), `"kept":[1]`) {
		t.Errorf("masked: %s", v)
	}
}
