package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tools writes the MCP servers of config.json and an agent's list.
func (s *site) tools(config, id, list string) {
	s.t.Helper()
	s.write(filepath.Join(s.root, "config.json"), `{"mcpServers": `+config+`}`)
	file := filepath.Join(s.agentDir(id), "agent.json")
	var a map[string]json.RawMessage
	if err := json.Unmarshal([]byte(s.read(file)), &a); err != nil {
		s.t.Fatal(err)
	}
	a["mcpServers"] = json.RawMessage(list)
	text, err := json.Marshal(a)
	if err != nil {
		s.t.Fatal(err)
	}
	s.write(file, string(text))
}

func TestMCPServersInsideAndOutside(t *testing.T) {
	s := newSite(t)
	const token = "mcp-canary-3301"
	s.write("private/notes", "what only the user reads")
	server := s.write("servers/server", `#!/bin/sh
read -r line
echo "got=$line token=$API_TOKEN plain=$PLAIN pid=$$ notes=$(cat `+filepath.Join(s.base, "private/notes")+` 2>/dev/null) tmp=$(ls /tmp | wc -l) work=$(pwd)"
echo "to the log" >&2
`)
	s.executable(server)
	s.add("kim")
	s.secret(token, "kim", "TOK", "--outside")
	inside := s.write("servers/inside", "#!/bin/sh\nread -r line; echo inside $line $PLAIN $(cat /run/agentconnect/secrets/x 2>/dev/null)\n")
	s.executable(inside)
	s.tools(`{
 "outside": {"command": "`+server+`", "host": true, "env": [{"name": "API_TOKEN", "secret": "TOK"}, {"name": "PLAIN", "value": "p"}]},
 "boxed": {"command": "`+server+`", "host": true, "sandbox": true, "env": {"API_TOKEN": {"secret": "TOK"}, "PLAIN": "p"}},
 "Inside": {"command": "`+inside+`", "env": [{"name": "PLAIN", "value": "p"}]},
 "web": {"transport": "http", "url": "https://mcp.example/"},
 "unused": {"command": "/bin/true", "host": true}}`, "kim", `["outside", "boxed", "Inside", "web", {"name": "inline", "command": "/bin/cat"}]`)
	s.start()
	e := s.attach("kim")
	id := e.session(s.workspace("kim"))
	given := e.prompt(id, "servers")
	for _, want := range []string{`"outside"`, `"boxed"`, `"Inside"`, `"inline"`, `["mcp","outside"]`, "/run/agentconnect/guest"} {
		if !strings.Contains(given, want) {
			t.Errorf("the session's servers lack %s: %s", want, given)
		}
	}
	if strings.Contains(given, token) || strings.Contains(given, `"unused"`) || strings.Contains(given, `"web"`) {
		t.Errorf("the session's servers have too much: %s", given)
	}
	outside := e.prompt(id, "server outside hello there")
	if !strings.Contains(outside, "got=hello there token="+token+" plain=p") || !strings.Contains(outside, "notes=what only the user reads") {
		t.Errorf("outside: %s", outside)
	}
	boxed := e.prompt(id, "server boxed hi")
	if !strings.Contains(boxed, "got=hi token="+token) || strings.Contains(boxed, "only the user reads") || !strings.Contains(boxed, "tmp=0") || strings.Contains(boxed, s.workspace("kim")) {
		t.Errorf("in a boundary of its own: %s", boxed)
	}
	if got := e.prompt(id, "server Inside x"); got != "inside x p\n" {
		t.Errorf("inside: %q", got)
	}
	if got := e.prompt(id, "server inline echoed"); got != "echoed\n" {
		t.Errorf("defined by the agent: %q", got)
	}
	// From inside, past the session: servers that are not the agent's, and bad names.
	for _, name := range []string{"unused", "Inside", "nobody", "../outside", "", "outside\n", strings.Repeat("x", 20000)} {
		if r := s.run("agent", "exec", "kim", "--", "/run/agentconnect/guest", "mcp", name); r.code == 0 {
			t.Errorf("server %.20q was started: %s", name, r.out)
		}
	}
	// Where the token may not be: whatever the agent can look at.
	if r := s.sh("kim", "grep -rs --exclude=.agentconnect-selftest.json "+token+" /proc/*/environ /proc/*/cmdline $HOME /tmp . /run; true"); strings.Contains(r.out, token) {
		t.Errorf("inside: %s", r.out)
	}
	log := s.read(filepath.Join(s.root, "logs/agents/kim.audit.jsonl"))
	for _, want := range []string{`"event":"started"`, `"event":"ended"`, `"where":"sandboxed"`, `"where":"outside"`} {
		if !strings.Contains(log, want) {
			t.Errorf("the audit log lacks %s: %s", want, log)
		}
	}
	if show := s.ok("agent", "show", "kim", "--json"); strings.Contains(show, token) {
		t.Error("show has the token")
	}
}

func TestAClientCannotTakeTheNameOfAnAgentsServer(t *testing.T) {
	s := newSite(t)
	s.add("lea")
	s.tools(`{"tool": {"command": "/bin/cat"}}`, "lea", `["tool"]`)
	s.start()
	e := s.attach("lea")
	res, err := e.call("session/new", map[string]any{"cwd": s.workspace("lea"), "mcpServers": []any{
		map[string]any{"name": "Tool", "command": "/bin/false", "args": []string{}, "env": []any{}},
		map[string]any{"name": "mine", "command": "/bin/cat", "args": []string{}, "env": []any{}},
	}})
	var opened struct {
		SessionID string `json:"sessionId"`
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(res, &opened); err != nil || opened.SessionID == "" {
		t.Fatalf("%+v %v", res, err)
	}
	if got := e.prompt(opened.SessionID, "servers"); strings.Contains(got, "/bin/false") || !strings.Contains(got, `"mine"`) || !strings.Contains(got, `"tool"`) {
		t.Errorf("the session has %s", got)
	}
	for _, name := range []string{"agentconnect", "AgentConnect-x"} {
		_, err := e.call("session/new", map[string]any{"cwd": s.workspace("lea"), "mcpServers": []any{map[string]any{"name": name, "command": "/bin/cat"}}})
		if err == nil || !strings.Contains(err.Error(), "reserved") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := e.call("session/load", map[string]any{"sessionId": opened.SessionID, "cwd": s.workspace("lea")}); err != nil {
		t.Errorf("load without servers: %v", err)
	}
	if got := e.prompt(opened.SessionID, "servers"); !strings.Contains(got, `"tool"`) || strings.Contains(got, `"mine"`) {
		t.Errorf("the loaded session has %s", got)
	}
}

func TestServersThatCannotBe(t *testing.T) {
	s := newSite(t)
	evil := s.write("shared/evil", "#!/bin/sh\n")
	s.add("max", "--grant", filepath.Dir(evil)+":rw")
	s.executable(evil)
	s.start()
	for config, want := range map[string]struct{ list, word string }{
		`{}`:                                   {`["nobody"]`, "no server"},
		`{"a": {"command": "x", "hots": 1}}`:   {`["a"]`, "host"},
		`{"agentconnect": {"command": "cat"}}`: {`["agentconnect"]`, "reserved"},
		`{"a": {"command": "` + evil + `", "host": true}}`:                                                             {`["a"]`, "an agent can write"},
		`{"a": {"command": "/bin/sh", "args": ["` + evil + `"], "host": true}}`:                                        {`["a"]`, "an agent can write"},
		`{"a": {"command": "/bin/cat", "host": true, "env": {"T": {"secret": "NONE"}}}}`:                               {`["a"]`, "secret set max NONE"},
		`{"a": {"command": "/bin/cat", "host": true, "sandbox": true, "network": "open-ish"}}`:                         {`["a"]`, "none, allowlist, open or host"},
		`{"a": {"command": "/bin/cat", "host": true, "sandbox": true, "network": "allowlist", "allow": ["http://x"]}}`: {`["a"]`, "network"},
		`{"a": {"command": "/bin/cat", "host": true, "sandbox": true, "allow": ["x.example"]}}`:                        {`["a"]`, "allowlist or open"},
		`{"a": {"command": "/bin/cat", "host": true, "network": "allowlist", "allow": ["x.example"]}}`:                 {`["a"]`, "network goes with sandbox"},
	} {
		s.tools(config, "max", want.list)
		if err := s.client().Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r := s.run("agent", "start", "max"); r.code != 78 || !strings.Contains(r.err, want.word) {
			t.Errorf("%s %s: exit %d: %s", config, want.list, r.code, r.err)
		}
	}
}

// A server in a boundary of its own has rules of its own: what they name it reaches, by bytes,
// and nothing else, whatever the agent may reach itself.
func TestServerInABoundaryOfItsOwnHasItsOwnNetworkRules(t *testing.T) {
	s := newSite(t)
	mine, agents := hostServer(t, "tcp4", "127.0.0.1:0"), hostServer(t, "tcp4", "127.0.0.1:0")
	// It does what it is told to: a server that somebody inside has taken over.
	server := s.write("servers/obeys", "#!/bin/sh\nread -r line; eval \"$line\"\n")
	s.executable(server)
	s.add("kim", "--network", "allowlist", "--allow", "host:"+agents)
	box := func(more string) string {
		return `{"command": "` + server + `", "host": true, "sandbox": true` + more + `}`
	}
	s.tools(`{"ruled": `+box(`, "network": "allowlist", "allow": ["host:`+mine+`"]`)+`,
 "shut": `+box(``)+`, "empty": `+box(`, "network": "allowlist"`)+`,
 "barred": `+box(`, "network": "open", "allow": ["host:`+mine+`", "host:`+agents+`"], "deny": ["host:`+mine+`"]`)+`,
 "free": `+box(`, "network": "host"`)+`}`, "kim", `["ruled", "shut", "empty", "barred", "free"]`)
	s.start()
	e := s.attach("kim")
	id := e.session(s.workspace("kim"))
	fetch := func(host, port string) string { return "curl -fsS --max-time 20 http://" + host + ":" + port + "/" }
	for _, c := range []struct {
		server, host, port string
		reaches            bool
	}{
		{"ruled", "host", mine, true}, {"ruled", "host", agents, false}, {"ruled", "127.0.0.1", mine, false}, {"ruled", "127.0.0.1", agents, false},
		{"shut", "host", mine, false}, {"empty", "host", mine, false},
		{"barred", "host", mine, false}, {"barred", "host", agents, true},
		{"free", "127.0.0.1", mine, true}, {"free", "127.0.0.1", agents, true}, // the control
	} {
		got := e.prompt(id, "server "+c.server+" "+fetch(c.host, c.port))
		if reached := strings.Contains(got, "served "+c.port); reached != c.reaches {
			t.Errorf("%s to %s:%s: reaches %v: %s", c.server, c.host, c.port, reached, got)
		}
	}
	// The agent's own rules are its own.
	if r := s.sh("kim", fetch("host", mine)); r.code == 0 {
		t.Errorf("the agent reaches what its server may: %s", r.out)
	}
	if got := s.works("kim", fetch("host", agents)); got != "served "+agents {
		t.Errorf("control: %q", got)
	}
	// A connection that is done is "cut" where the server ends before it is closed.
	record := s.ok("egress", "kim")
	for _, want := range []string{"(MCP server ruled) host:" + mine, "(MCP server barred) host:" + agents, "allowed host:" + agents} {
		if !strings.Contains(strings.Join(strings.Fields(record), " "), want) {
			t.Errorf("the record lacks %q:\n%s", want, record)
		}
	}
	// What servers reached is no reason for a rule of the agent's.
	if got := s.ok("egress", "kim", "--suggest"); strings.Contains(got, mine) {
		t.Errorf("suggested: %s", got)
	}
}

// Servers outside are beyond the agent's limits, and so is what it costs to start them.
func TestAnAgentCannotHaveServersStartedWithoutEnd(t *testing.T) {
	s := newSite(t)
	s.add("fay")
	s.tools(`{"cat": {"command": "/bin/cat", "host": true}}`, "fay", `["cat"]`)
	s.start()
	s.ok("agent", "start", "fay")
	s.write(filepath.Join(s.workspace("fay"), "flood.py"), `import socket,time
end,n=time.time()+4,0
while time.time()<end:
  c=socket.socket(socket.AF_UNIX);c.connect("/run/agentconnect/channel/socket")
  c.sendall(b'{"v":1,"op":"mcp","name":"cat"}\n')
  n+=b'"ok":true' in c.recv(4096)
  c.close()
print(n)
`)
	var n int
	if _, err := fmt.Sscan(s.works("fay", "python3 flood.py"), &n); err != nil || n == 0 || n > 120 {
		t.Errorf("%d servers were started in four seconds, %v", n, err)
	}
}

func TestServersOutsideEndWithTheAgent(t *testing.T) {
	s := newSite(t)
	marks := s.mkdir("marks")
	server := s.write("servers/stays", `#!/bin/sh
trap '' TERM HUP
echo $$ > `+marks+`/direct
( setsid sh -c 'echo $$ > `+marks+`/away; trap "" TERM HUP; sleep 600 & wait; sleep 600' < /dev/null > /dev/null 2>&1 & )
while :; do sleep 600; done
`)
	s.executable(server)
	do := s.deputy("ned")
	s.tools(`{"stays": {"command": "`+server+`", "host": true}}`, "ned", `["stays"]`)
	s.start()
	s.ok("prompt", "ned", "echo hello")
	do("(sleep 600 | /run/agentconnect/guest mcp stays) > /dev/null 2>&1 & echo started")
	var pids []process
	s.until("both run", func() bool {
		pids = nil
		for _, name := range []string{"direct", "away"} {
			b, err := os.ReadFile(filepath.Join(marks, name))
			var pid int
			if _, serr := fmt.Sscan(string(b), &pid); err != nil || serr != nil {
				return false
			}
			p, ok := processOf(pid)
			if !ok {
				return false
			}
			pids = append(pids, p)
		}
		return true
	})
	if !slices.ContainsFunc(s.family(), func(p process) bool { return p == pids[0] }) {
		t.Error("the control: the server does not belong to the daemon's processes")
	}
	s.ok("agent", "stop", "ned")
	s.gone(pids)
}
