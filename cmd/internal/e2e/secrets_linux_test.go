package e2e

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSecretsOfAnAgentAreInItsEnvironmentAndNowhereElse(t *testing.T) {
	s := newSite(t)
	const secret = "s3cret-0f-alice-8471"
	s.add("alice", "--env", "API_KEY=here")
	s.add("bob")
	file := filepath.Join(s.agentDir("alice"), "agent.json")
	s.write(file, strings.Replace(s.read(file), `"here"`, `"`+secret+`"`, 1))
	// As service managers start programs: with dumps of any size.
	s.within = []string{"/bin/sh", "-c", `ulimit -c "$(ulimit -Hc)"; exec "$@"`, "sh"}
	s.start()
	s.within = nil
	e := s.attach("alice")
	id := e.session(s.workspace("alice"))
	if got := e.prompt(id, "env"); !strings.Contains(got, "API_KEY="+secret) {
		t.Fatalf("the control: the agent does not have it: %s", got)
	}
	s.ok("prompt", "bob", "echo hello")
	hold := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "sleep", "600")
	if err := hold.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hold.Process.Kill(); hold.Wait() })
	s.one("sleep")

	// Arguments: of every process of the machine, those inside included.
	own := 0
	for _, pid := range allPIDs() {
		p, ok := processOf(pid)
		if !ok || pid == os.Getpid() {
			continue
		}
		if strings.Contains(p.cmdline(), secret) {
			t.Errorf("in the arguments of %d %s", pid, p.name())
		}
		exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if err != nil || !strings.HasPrefix(exe, s.bin+"/agentconnect") || filepath.Base(exe) == "agentconnect-guest" {
			continue // another's, or inside: there the secret belongs
		}
		own++
		if strings.Contains(p.environ(), secret) {
			t.Errorf("in the environment of %d %s", pid, exe)
		}
	}
	if own < 4 { // daemon, supervisor, the editor's bridge, exec
		t.Errorf("only %d processes of ours were looked at", own)
	}
	// A crash of who holds it writes no dump.
	for _, p := range append(s.family(), process{pid: s.daemon.Process.Pid}) {
		if name := p.name(); !strings.HasPrefix(name, "agentconnect") || strings.HasPrefix(name, "agentconnect-gu") {
			continue
		}
		limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", p.pid))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(limits)) {
			if f := strings.Fields(line); strings.HasPrefix(line, "Max core file size") && (f[4] != "0" && f[4] != "1" || f[5] != f[4]) {
				t.Errorf("a crash of %s would be dumped: %s", p.name(), line)
			}
		}
	}
	// What people and programs are shown.
	for _, args := range [][]string{{"status"}, {"status", "--json"}, {"agent", "list", "--json"}, {"agent", "show", "alice"}, {"agent", "show", "alice", "--json"},
		{"explain", "alice"}, {"explain", "alice", "--json"}, {"config"}, {"config", "--json"}, {"agent", "logs", "alice"}} {
		r := s.run(args...)
		if strings.Contains(r.out+r.err, secret) {
			t.Errorf("agentconnect %q shows it", args)
		}
	}
	s.ok("agent", "stop", "alice")
	s.ok("down")
	s.wait()
	// On disk: agent.json, 0600, in directories that are closed to others; no other file.
	err := filepath.WalkDir(s.base, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		private := strings.Contains(path, "/agents/alice/home/") || strings.Contains(path, "/agents/bob/home/") // behind a closed directory
		if !private && st.Mode()&fs.ModeSymlink == 0 && st.Mode().Perm()&0o077 != 0 && strings.HasPrefix(path, s.root) {
			t.Errorf("%s is open to others: %v", path, st.Mode())
		}
		if !st.Mode().IsRegular() || path == file || strings.HasSuffix(path, ".agentconnect-selftest.json") {
			return nil // the last is what the agent itself was told to say
		}
		if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), secret) {
			t.Errorf("it is in %s", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(s.out.String(), secret) {
		t.Error("the daemon said it")
	}
}

func TestTheDaemonsOwnEnvironmentIsNotTheAgents(t *testing.T) {
	s := newSite(t)
	names := []string{"SSH_AUTH_SOCK", "SSH_AGENT_PID", "DBUS_SESSION_BUS_ADDRESS", "DOCKER_HOST", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "GITHUB_TOKEN", "GH_TOKEN", "OPENAI_API_KEY",
		"ANTHROPIC_API_KEY", "KUBECONFIG", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "NOTIFY_SOCKET", "LD_PRELOAD", "LD_LIBRARY_PATH", "BASH_ENV", "ENV", "NODE_OPTIONS", "PYTHONPATH",
		"GIT_SSH_COMMAND", "npm_config_registry", "HTTP_PROXY", "https_proxy", "TMUX", "VAULT_TOKEN", "CREDENTIALS_DIRECTORY"}
	for _, n := range names {
		s.env = append(s.env, n+"=from-the-daemon")
	}
	s.env = append(s.env, "LC_TIME=C", "TZ=UTC")
	s.add("alice")
	s.add("bob", "--env", "GITHUB_TOKEN=given")
	s.start()
	for id, env := range map[string]string{"alice in a turn": s.ok("prompt", "alice", "env"), "alice's command": s.works("alice", "env"), "bob in a turn": s.ok("prompt", "bob", "env"), "bob's command": s.works("bob", "env")} {
		if strings.Contains(env, "from-the-daemon") || strings.Contains(strings.ReplaceAll(env, "AGENTCONNECT_MEMORY_DIR=", ""), "AGENTCONNECT_") {
			t.Errorf("%s: %s", id, env)
		}
		if !strings.Contains(env, "TZ=UTC") || !strings.Contains(env, "LC_TIME=C") {
			t.Errorf("%s lacks what says how text looks: %s", id, env)
		}
		if given := strings.Contains(env, "GITHUB_TOKEN=given"); given != strings.HasPrefix(id, "bob") {
			t.Errorf("%s: GITHUB_TOKEN given: %v", id, given)
		}
	}
}
