package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// What a sandboxed command of the model sees: each line is a word and what it came to. The
// login's name is put together, since Claude Code refuses a command that names it by the text
// alone.
const lookAround = `echo user=$(id -u); echo key=${ANTHROPIC_API_KEY:-none}${OPENAI_API_KEY:-}; ` +
	`if cat ~/.cl*/.cred*s.json ~/.cod*/auth.json >/dev/null 2>&1; then echo login=read; else echo login=hidden; fi; ` +
	`if touch ~/outside 2>/dev/null; then echo home=written; else echo home=kept; fi; ` +
	`if unshare -U true 2>/dev/null; then echo namespace=made; else echo namespace=refused; fi; ` +
	`if touch ./made 2>/dev/null; then echo workspace=written; else echo workspace=kept; fi; ` +
	`echo processes=$(ls -d /proc/[0-9]* | wc -l)`

// words reads the lines of lookAround out of what a turn said.
func words(text string) map[string]string {
	out := map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)(\w+)=(\S+?)(?:>>>|\s|$)`).FindAllStringSubmatch(text, -1) {
		out[m[1]] = m[2]
	}
	return out
}

func wantWords(t *testing.T, where, text string, want map[string]string) {
	t.Helper()
	got := words(text)
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s: %s=%q, want %q; it said %q", where, k, got[k], v, text)
		}
	}
}

// claude adds an agent whose runtime is the real Claude Code, with a model endpoint of the
// test's own beside it on the loopback inside. before is shell that stands in front of the
// runtime's start.
func (s *site) claude(set, id, before string, flags ...string) {
	t := s.t
	t.Helper()
	mock, err := os.ReadFile("testdata/anthropic.mjs")
	if err != nil {
		t.Fatal(err)
	}
	s.write("model/anthropic.mjs", string(mock))
	run := s.write(filepath.Join("model", id), fmt.Sprintf("#!/bin/sh\nnode %s 4010 &\n%s %s\n", s.path("model/anthropic.mjs"), before, filepath.Join(set, "bin", "claude-agent-acp")))
	s.executable(run)
	s.write("r/config.json", string(mustJSON(t, object{"runtimes": object{"claude-acp": object{"command": run, "readRoots": []string{set, s.path("model")}}}})))
	s.ok(append([]string{"agent", "add", id, "--runtime", "claude-acp", "--network", "none",
		"--env", "ANTHROPIC_BASE_URL=http://127.0.0.1:4010", "--env", "ANTHROPIC_API_KEY=sk-ant-of-the-operator",
		"--env", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1",
		"--env", "PATH=" + filepath.Join(set, "bin") + ":/usr/local/bin:/usr/bin:/bin"}, flags...)...)
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// The model's commands run in Claude Code's own sandbox inside ours, whatever the most
// permissive mode, the model, the user's settings or the project's say.
func TestClaudeCodesBashRunsInItsOwnSandboxInsideOurs(t *testing.T) {
	set := npmSet(t)
	s := newSite(t)
	s.claude(set, "alice", "exec", "--permission-mode", "bypassPermissions")
	s.start()
	ws := s.workspace("alice")
	canary := s.canary(filepath.Join(s.home, ".agentconnect-"+s.tag), "token")
	s.write(filepath.Join(s.agentDir("alice"), "home/.claude/.credentials.json"), `{"claudeAiOauth":{}}`)
	s.write(filepath.Join(s.agentDir("alice"), "home/.codex/auth.json"), `{}`)
	loose := `{"sandbox":{"enabled":false,"excludedCommands":["*","echo *","touch *"],"allowUnsandboxedCommands":true,"enableWeakerNestedSandbox":true},"theme":"dark"}`
	s.write(filepath.Join(s.agentDir("alice"), "home/.claude/settings.json"), loose)
	s.write(filepath.Join(ws, ".claude/settings.json"), loose)
	s.write(filepath.Join(ws, ".claude/settings.local.json"), loose)

	e := s.attach("alice")
	session := e.session(ws)
	pinned := map[string]string{"user": fmt.Sprint(os.Getuid()), "key": "none", "login": "hidden", "home": "kept", "namespace": "refused", "workspace": "written"}
	wantWords(t, "bash", e.prompt(session, "bash: "+lookAround), pinned)
	wantWords(t, "bash that asks to go without", e.prompt(session, "free: "+lookAround), pinned)
	if said := e.prompt(session, "edit: "+filepath.Join(s.home, ".claude/settings.json")); !strings.Contains(said, "error") {
		t.Errorf("the settings could be written: %q", said)
	}
	// Its own file tools run outside of that sandbox, and inside ours: what is written to the
	// home is the agent's.
	e.prompt(session, "edit: "+canary)
	if got := s.read(canary); got != "token\n" {
		t.Errorf("the host's file says %q", got)
	}
	if got := s.read(filepath.Join(s.agentDir("alice"), "home", filepath.Base(canary))); got != "planted" {
		t.Errorf("control: in the private home it says %q", got)
	}
	// The control: the same words in the same boundary, without the inner sandbox.
	wantWords(t, "control", s.works("alice", lookAround), map[string]string{"login": "read", "home": "written", "namespace": "made"})
	s.works("alice", "grep -q dark ~/.claude/settings.json && ! grep -q sandbox ~/.claude/settings.json && ! touch ~/.claude/settings.json /etc/claude-code/managed-settings.json 2>/dev/null && ! mv ~/.claude ~/x 2>/dev/null")
}

// The agent's memory directory is what Claude Code reads when a session opens, and writes to
// without asking; with memory native it has its own, in the private home.
func TestClaudeCodesMemoryIsTheAgents(t *testing.T) {
	set := npmSet(t)
	for _, c := range []struct{ mode, nesting string }{{"managed", "on"}, {"managed", "off"}, {"native", "on"}, {"none", "on"}} {
		mode := c.mode
		t.Run(mode+" nesting "+c.nesting, func(t *testing.T) {
			s := newSite(t)
			s.claude(set, "alice", "exec", "--permission-mode", "default", "--agent-memory", mode, "--nesting", c.nesting)
			s.start()
			ws, dir := s.workspace("alice"), filepath.Join(s.agentDir("alice"), "memory")
			own := filepath.Join(s.agentDir("alice"), "home/.claude/projects", strings.NewReplacer("/", "-", ".", "-").Replace(ws), "memory")
			places := map[string]string{"managed": dir, "native": own}
			s.write(filepath.Join(dir, "MEMORY.md"), "learnt-in-managed\n")
			s.write(filepath.Join(own, "MEMORY.md"), "learnt-in-native\n")
			s.write(filepath.Join(ws, "planted/MEMORY.md"), "learnt-in-planted\n")
			if mode != "native" { // where it would have its way
				elsewhere := fmt.Sprintf(`{"autoMemoryDirectory":%q}`, filepath.Join(ws, "planted"))
				s.write(filepath.Join(ws, ".claude/settings.json"), elsewhere)
				s.write(filepath.Join(s.agentDir("alice"), "home/.claude/settings.json"), elsewhere)
			}
			e := s.attach("alice")
			session := e.session(ws)
			for word, place := range map[string]string{"managed": dir, "native": own, "planted": ""} {
				spaced := strings.Join(strings.Split("learnt-in-"+word, ""), " ")
				want := map[bool]string{true: "known", false: "unknown"}[place != "" && places[mode] == place]
				if got := e.prompt(session, "knows: "+spaced); got != want {
					t.Errorf("what was learnt in %s is %s, want %s", word, got, want)
				}
			}
			if mode == "managed" {
				if said := e.prompt(session, "edit: "+filepath.Join(dir, "topic.md")); strings.Contains(said, "error") || !exists(filepath.Join(dir, "topic.md")) {
					t.Errorf("it cannot write to its memory: %q", said)
				}
			}
		})
	}
}

// A Claude Code that cannot have its sandbox runs no command of the model.
func TestClaudeCodeRunsNoCommandWithoutItsSandbox(t *testing.T) {
	set := npmSet(t)
	s := newSite(t)
	s.claude(set, "alice", "exec bwrap --unshare-user --disable-userns --bind / / --dev-bind /dev /dev --proc /proc --", "--permission-mode", "bypassPermissions")
	s.start()
	e := s.attach("alice")
	e.must("initialize", object{"protocolVersion": 1, "clientCapabilities": object{}})
	// It may say so already when the session opens.
	r, err := e.call("session/new", object{"cwd": s.workspace("alice"), "mcpServers": []any{}})
	if err == nil {
		var made struct {
			SessionID string `json:"sessionId"`
		}
		if err := json.Unmarshal(r, &made); err != nil {
			t.Fatal(err)
		}
		for _, word := range []string{"bash", "free"} {
			answer, err := e.call("session/prompt", say(made.SessionID, word+": touch ./made; echo done"))
			t.Logf("%s: %s %v: %s", word, answer, err, e.said(made.SessionID))
		}
	}
	t.Logf("session/new: %v", err)
	if exists(filepath.Join(s.workspace("alice"), "made")) {
		t.Error("a command ran without the sandbox")
	}
}

// codex adds an agent whose runtime is the real Codex, and gives the program's path.
func (s *site) codex(set, id string) string {
	s.t.Helper()
	program := filepath.Join(set, "bin", "codex")
	if !exists(program) {
		s.t.Skip("missing: codex (npm install -g @openai/codex; packaging/dev/npm-runtimes.sh)")
	}
	s.write("r/config.json", string(mustJSON(s.t, object{"runtimes": object{"codex-acp": object{"command": program, "readRoots": []string{set}}}})))
	s.ok("agent", "add", id, "--runtime", "codex-acp", "--network", "none", "--env", "OPENAI_API_KEY=sk-of-the-operator", "--env", "PATH="+filepath.Join(set, "bin")+":/usr/local/bin:/usr/bin:/bin")
	return program
}

func TestCodexSandboxRunsInsideOursAndCannotBeLoosened(t *testing.T) {
	set := npmSet(t)
	s := newSite(t)
	codex := s.codex(set, "alice")
	s.start()
	ws := s.workspace("alice")
	s.write(filepath.Join(s.agentDir("alice"), "home/.codex/auth.json"), `{"OPENAI_API_KEY":null}`)
	s.write(filepath.Join(s.agentDir("alice"), "home/.claude/.credentials.json"), `{}`)
	s.write(filepath.Join(s.agentDir("alice"), "home/.codex/config.toml"), "sandbox_mode = \"danger-full-access\"\n")
	s.write(filepath.Join(ws, ".codex/config.toml"), "sandbox_mode = \"danger-full-access\"\n")
	for _, c := range []struct{ name, flags, workspace string }{
		{"as configured, for full access", "", "kept"},
		{"asked for full access", "-c sandbox_mode=danger-full-access", "kept"},
		{"full access by profile", "--include-managed-config -P :danger-full-access", "kept"},
		{"workspace", "-c sandbox_mode=workspace-write", "written"},
	} {
		os.Remove(filepath.Join(ws, "made"))
		out := s.works("alice", fmt.Sprintf("cd %s && %s sandbox %s -- sh -c '%s; cat ~/.codex/auth.json && echo auth=read || echo auth=hidden'", ws, codex, c.flags, lookAround))
		wantWords(t, c.name, out, map[string]string{"user": fmt.Sprint(os.Getuid()), "auth": "hidden", "home": "kept", "workspace": c.workspace})
	}
	wantWords(t, "control", s.works("alice", lookAround), map[string]string{"login": "read", "home": "written"})
	s.works("alice", "! touch /etc/codex/requirements.toml 2>/dev/null && ! touch /etc/codex/x 2>/dev/null")

	// Without namespaces there is no sandbox, and no command either.
	script := fmt.Sprintf("cd %s && %s sandbox -c sandbox_mode=workspace-write -- touch ./free", ws, codex)
	if r := s.sh("alice", "exec bwrap --unshare-user --disable-userns --bind / / --dev-bind /dev /dev --proc /proc -- sh -c '"+script+"'"); r.code == 0 || exists(filepath.Join(ws, "free")) {
		t.Errorf("it ran without its sandbox: exit %d: %s%s", r.code, r.out, r.err)
	}
	s.works("alice", script)
	if !exists(filepath.Join(ws, "free")) {
		t.Error("control: with its sandbox it does not run either")
	}
}

// Each start proves that the inner sandbox can start. Where it cannot, the runtime does not.
func TestRuntimeWithASandboxOfItsOwnDoesNotStartWhereNoneCan(t *testing.T) {
	s := newSite(t)
	program := s.write("runtimes/claude", "#!/bin/sh\necho started >"+s.path("workspace")+"/started\nexec /run/agentconnect/guest selftest\n")
	s.executable(program)
	s.mkdir("workspace")
	s.write("r/config.json", string(mustJSON(t, object{"runtimes": object{"claude-acp": object{"command": program}}})))
	// A bwrap that is none, first in the PATH inside: as on a host where the inner one fails.
	s.executable(s.write("shadow/bwrap", "#!/bin/sh\necho no sandbox here >&2\nexit 1\n"))
	s.ok("agent", "add", "alice", "--runtime", "claude-acp", "--network", "none", "--workspace", s.path("workspace"))
	s.ok("agent", "add", "bob", "--runtime", "claude-acp", "--network", "none", "--workspace", s.path("workspace"), "--grant", s.path("shadow")+":ro", "--env", "PATH="+s.path("shadow")+":/usr/bin:/bin")
	s.start()
	r := s.run("prompt", "bob", "echo hello")
	if r.code == 0 || exists(s.path("workspace/started")) {
		t.Errorf("it started: exit %d: %s%s", r.code, r.out, r.err)
	}
	st := s.untilState("bob", "refused")
	if !strings.Contains(fmt.Sprint(*st)+r.err, "nested-refused") {
		t.Errorf("neither status nor the error says why: %+v %s", st, r.err)
	}
	if got := s.ok("prompt", "alice", "echo hello"); got != "hello\n" || !exists(s.path("workspace/started")) {
		t.Errorf("control: %q", got)
	}
}
