package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"agentconnect.md/sandbox/cmd/internal/runtimes"
)

// npmSet is the folder of the pinned runtimes; it skips where they are not installed.
func npmSet(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "agentconnect-dev", "runtimes", "current")
	if _, err := os.Stat(filepath.Join(dir, "bin")); err != nil {
		t.Skipf("missing: the ACP runtimes from npm (packaging/dev/npm-runtimes.sh): %v", err)
	}
	// The daemon finds real places; so do we.
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	return real
}

// What changes with each run, whoever runs it.
var volatile = []struct {
	what *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`), "UUID"},
	{regexp.MustCompile(`\bses_[0-9A-Za-z]+`), "SESSION"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z`), "DATE"},
}

// normal is an answer without ids, dates and the home, of which each side has its own.
func normal(t *testing.T, raw json.RawMessage, home string) any {
	t.Helper()
	text := strings.ReplaceAll(string(raw), home, "HOME")
	for _, v := range volatile {
		text = v.what.ReplaceAllString(text, v.with)
	}
	dec := json.NewDecoder(bytes.NewReader([]byte(text)))
	dec.UseNumber()
	var out any
	if err := dec.Decode(&out); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return out
}

// conversation is what a runtime answers to the first two requests of an editor.
func (e *editor) conversation(cwd, home string) map[string]any {
	t := e.s.t
	out := map[string]any{}
	// What the boundary withholds from the runtime, so that both are asked the same.
	plain := object{"protocolVersion": 1, "clientInfo": object{"name": "e2e", "version": "1"}, "clientCapabilities": object{"fs": object{"readTextFile": false, "writeTextFile": false}, "terminal": false}}
	for _, c := range []struct {
		method string
		params object
	}{{"initialize", plain}, {"session/new", object{"cwd": cwd, "mcpServers": []any{}}}} {
		r, err := e.call(c.method, c.params)
		var f *rpcError
		switch {
		case err == nil:
			out[c.method] = normal(t, r, home)
		case errors.As(err, &f):
			raw, merr := json.Marshal(f)
			if merr != nil {
				t.Fatal(merr)
			}
			out[c.method+" error"] = normal(t, raw, home)
		}
	}
	return out
}

// A real runtime behind the boundary is the one that people know from outside.
func TestRealRuntimesAnswerInsideAsTheyDoOutside(t *testing.T) {
	for _, id := range []string{"claude-acp", "codex-acp", "gemini", "opencode"} {
		t.Run(id, func(t *testing.T) {
			set := npmSet(t)
			rt, err := runtimes.NewRegistry(nil).Get(id)
			if err != nil {
				t.Fatal(err)
			}
			program := filepath.Join(set, "bin", rt.Programs[0])
			if _, err := os.Stat(program); err != nil {
				t.Skipf("missing: %s (npm install -g %s)", rt.Programs[0], rt.NPM)
			}
			s := newSite(t)
			s.env[0] = "PATH=" + filepath.Join(set, "bin") + ":/usr/local/bin:/usr/bin:/bin"
			// The host's network, which a runtime outside has, too: some ask for a list of models.
			s.ok("agent", "add", "alice", "--runtime", id, "--network", "host")
			s.start()
			ws := s.workspace("alice")
			inside := s.attach("alice").conversation(ws, s.home)

			home := s.mkdir("outside")
			direct := s.command(context.Background(), append([]string{program}, rt.Args...)...)
			direct.Dir = ws
			direct.Env = []string{s.env[0], "HOME=" + home, "LANG=C.UTF-8", "USER=" + os.Getenv("USER"), "SHELL=/bin/bash", "TMPDIR=/tmp", "PWD=" + ws}
			free := s.editor(direct)
			outside := free.conversation(ws, home)
			free.kill() // some leave processes behind when their editor goes
			if _, ok := outside["initialize"]; !ok {
				t.Errorf("outside: %v", outside)
			}
			if d := cmp.Diff(outside, inside); d != "" {
				t.Errorf("-outside +inside: %s", d)
			}
			t.Logf("session/new answers without a login: %v", outside["session/new"] != nil)
			// It runs behind the boundary, and its installation can be read and not changed.
			s.refused("alice", "cat "+filepath.Join(s.home, ".bash_logout")+" || cat "+s.write("secret", "x"))
			s.works("alice", "test -r "+filepath.Join(set, "node_modules")+" && ! touch "+filepath.Join(set, "node_modules", "x")+" 2>/dev/null")
		})
	}
}

// seen is what the script saw on one connection.
type seen struct {
	Protocol   int
	Echo       scriptTurn
	Permission scriptTurn
	Asked      []string
	Cancelled  string
	Error      string
	Replay     []string
	Stop       string
	Code       int
}

type scriptTurn struct {
	Answer string
	Chunks int
	Stop   string
	Same   bool
}

// The client is npm's SDK, which nobody here wrote.
func TestClientOnTheSDKHoldsTwoSessionsWithOneAgentAtOnce(t *testing.T) {
	set := npmSet(t)
	s := newSite(t)
	s.add("alice")
	s.start()
	script, err := filepath.Abs("testdata/client.mjs")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := s.command(ctx, filepath.Join(set, "bin", "node"), script, filepath.Join(set, "node_modules/@agentclientprotocol/sdk/dist/v1/stable/acp.js"),
		s.workspace("alice"), filepath.Join(s.bin, "agentconnect"), "acp", "alice")
	var errs output
	cmd.Stderr = &errs
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := newLines(out)
	defer func() { cancel(); cmd.Wait() }()
	if line, ok := said.next(patience); !ok || line != "kill" {
		t.Fatalf("the client said %q; %s", line, &errs)
	}
	if n := s.agent("alice").Clients; n != 2 {
		t.Errorf("%d clients, want 2", n)
	}
	s.runtime().kill()
	if _, err := io.WriteString(in, "done\n"); err != nil {
		t.Fatal(err)
	}
	line, ok := said.next(patience)
	var got map[string]seen
	if !ok || json.Unmarshal([]byte(line), &got) != nil {
		t.Fatalf("the client said %q; %s", line, &errs)
	}
	for _, name := range []string{"one", "two"} {
		g := got[name]
		if !strings.Contains(g.Error, "loaded again") {
			t.Errorf("%s: the open turn ended with %q", name, g.Error)
		}
		replayed := strings.Join(g.Replay, "\n")
		for _, want := range []string{"user_message_chunk: echo this is what " + name + " said", "agent_message_chunk: this is what " + name + " said"} {
			if !strings.Contains(replayed, want) {
				t.Errorf("%s: the loaded session lacks %q: %s", name, want, replayed)
			}
		}
		if !strings.HasSuffix(strings.ReplaceAll(replayed, "\nagent_message_chunk: ", ""), name+" is back") {
			t.Errorf("%s: after the load: %s", name, replayed)
		}
		if g.Echo.Chunks < 2 {
			t.Errorf("%s: nothing was streamed: %+v", name, g.Echo)
		}
		g.Error, g.Replay, g.Echo.Chunks, g.Permission.Chunks = "", nil, 0, 0
		want := seen{Protocol: 1, Asked: []string{"for " + name}, Cancelled: "cancelled", Stop: "end_turn",
			Echo: scriptTurn{"this is what " + name + " said", 0, "end_turn", true}, Permission: scriptTurn{"permission: selected allow", 0, "end_turn", true}}
		if d := cmp.Diff(want, g); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}
