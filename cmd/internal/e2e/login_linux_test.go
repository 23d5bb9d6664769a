package e2e

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/audit"
)

// codexLogin is a login of Codex as its file has it; nobody's.
func codexLogin(t *testing.T, tag, sub string, at time.Time) string {
	t.Helper()
	part := func(v any) string { return base64.RawURLEncoding.EncodeToString(mustJSON(t, v)) }
	jwt := part(object{"alg": "none"}) + "." + part(object{"sub": sub, "https://api.openai.com/auth": object{"chatgpt_account_id": "acc"}}) + ".c2ln"
	return string(mustJSON(t, object{"auth_mode": "chatgpt", "OPENAI_API_KEY": nil, "last_refresh": at.Format(time.RFC3339Nano),
		"tokens": object{"id_token": jwt, "access_token": "access-" + tag, "refresh_token": "refresh-" + tag, "account_id": "acc"}}))
}

// The user's login serves the agent without the folder it lies in: a refresh comes back, a
// change goes in, and what the agent plants stays where it is.
func TestHostsLoginServesTheAgentAndOnlyARefreshComesBack(t *testing.T) {
	s := newSite(t)
	dir := filepath.Join(s.home, ".codex")
	host, config := filepath.Join(dir, "auth.json"), filepath.Join(dir, "config.toml")
	if exists(host) || exists(config) {
		t.Skipf("missing: a home without a Codex login; %s is not to be touched", dir)
	}
	t.Cleanup(func() {
		os.Remove(host)
		os.Remove(config)
		os.Remove(dir) // unless something else lies there
	})
	put := func(text string) {
		t.Helper()
		s.write(host+".new", text)
		if err := os.Rename(host+".new", host); err != nil {
			t.Fatal(err)
		}
	}
	begun := time.Now()
	put(codexLogin(t, "host", "me", begun.Add(-time.Hour)))
	s.write(config, "notify = [\"a program of the host\"]\n")
	program := s.write("runtimes/codex", "#!/bin/sh\nexec /run/agentconnect/guest selftest\n")
	s.executable(program)
	s.write("r/config.json", string(mustJSON(t, object{"runtimes": object{"codex-acp": object{"command": program}}})))
	s.ok("agent", "add", "alice", "--runtime", "codex-acp", "--network", "none", "--credentials", "host")
	s.start()
	if got := s.ok("prompt", "alice", "echo up"); got != "up\n" {
		t.Fatalf("%q", got)
	}
	s.works("alice", "grep -q refresh-host ~/.codex/auth.json && test $(stat -c %a ~/.codex/auth.json) = 600 && ! test -e ~/.codex/config.toml")

	refresh := func(text string) {
		t.Helper()
		s.works("alice", fmt.Sprintf("printf %%s '%s' >~/.codex/auth.new && mv ~/.codex/auth.new ~/.codex/auth.json", text))
	}
	refresh(codexLogin(t, "inside", "me", begun))
	s.until("the refresh is the host's", func() bool { return strings.Contains(s.read(host), "refresh-inside") })
	if st, err := os.Stat(host); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", st, err)
	}

	refused := func() int {
		n := 0
		audit.Read(audit.Path(s.root, "alice"), func(line []byte) error {
			if strings.Contains(string(line), "login-refused") {
				n++
			}
			if strings.Contains(string(line), "refresh-") {
				t.Errorf("a token in the audit log: %s", line)
			}
			return nil
		})
		return n
	}
	before := s.read(host)
	for i, text := range []string{codexLogin(t, "planted", "somebody else", begun.Add(time.Second)), `{"tokens":{"refresh_token":"planted"}}`, codexLogin(t, "planted", "me", begun.Add(-2*time.Hour))} {
		refresh(text)
		s.until("it is refused", func() bool { return refused() > i })
	}
	s.works("alice", "cd ~/.codex && rm auth.json && mkfifo auth.json && rm auth.json && mkdir auth.json && rmdir auth.json && truncate -s 1T auth.json && rm auth.json && ln -s config.toml auth.json")
	if got := s.read(host); got != before {
		t.Errorf("the host has %s", got)
	}
	put(codexLogin(t, "again", "me", time.Now()))
	s.until("the host's change is the agent's", func() bool { return s.sh("alice", "grep -q refresh-again ~/.codex/auth.json").code == 0 })

	// At the stop the last refresh is carried over.
	refresh(codexLogin(t, "last", "me", time.Now().Add(time.Second)))
	s.ok("agent", "stop", "alice")
	if got := s.read(host); !strings.Contains(got, "refresh-last") {
		t.Errorf("after the stop the host has %s", got)
	}
}

func TestMissingLoginIsSaidWithTheWayToOne(t *testing.T) {
	s := newSite(t)
	program := s.write("runtimes/any", "#!/bin/sh\nexit 3\n")
	s.executable(program)
	def := object{"command": program}
	s.write("r/config.json", string(mustJSON(t, object{"runtimes": object{"codex-acp": def, "gemini": def}})))
	s.ok("agent", "add", "alice", "--runtime", "codex-acp")
	s.fails(78, []string{"credentials host", "Claude Code and Codex"}, "agent", "add", "bob", "--runtime", "gemini", "--credentials", "host")
	s.fails(78, []string{"credentials", "write host or private or secret"}, "agent", "add", "bob", "--runtime", "codex-acp", "--credentials", "mine")
	s.fails(78, []string{"without the sandbox"}, "agent", "add", "bob", "--runtime", "codex-acp", "--no-sandbox", "--credentials", "host")
	s.start()
	words := []string{"Codex is not logged in", "agentconnect agent shell alice", "--credentials host", "--env OPENAI_API_KEY"}
	shown := s.ok("agent", "show", "alice")
	if asked := s.ok("agent", "show", "alice", "--json"); !strings.Contains(asked, `"login"`) {
		t.Errorf("nor does --json:\n%s", asked)
	}
	for _, w := range words {
		if !strings.Contains(shown, w) {
			t.Errorf("show does not say %q:\n%s", w, shown)
		}
	}
	s.run("prompt", "alice", "echo hello")
	s.until("the failed start says it", func() bool { return strings.Contains(s.agent("alice").Reason, words[0]) })
	s.write(filepath.Join(s.agentDir("alice"), "home/.codex/auth.json"), "{}")
	// The reason of the last end may say it still; the line about the login does not.
	if shown := s.ok("agent", "show", "alice", "--json"); strings.Contains(shown, `"login"`) {
		t.Errorf("show still says it:\n%s", shown)
	}
}
