package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What runs inside reads the sandbox's first process as it reads itself: the agent's
// secrets are in the runtime's environment, and nowhere else.
func TestPIDOneInsideShowsNoSecret(t *testing.T) {
	s := newSite(t)
	const secret = "s3cret-0f-carol-5512"
	s.script("carol", `for f in environ cmdline; do tr '\0' '\n' < /proc/1/$f > $f.1; done
ls -l /proc/1/fd > fd.1
ls /proc/self/fd > fd.self
tr '\0' '\n' < /proc/self/environ > environ.self
exec "$guest" selftest`, "--env", "API_KEY=here")
	file := s.path(s.agentDir("carol") + "/agent.json")
	s.write(file, strings.Replace(s.read(file), `"here"`, `"`+secret+`"`, 1))
	s.start()
	s.ok("prompt", "carol", "echo hello")
	at := func(name string) string { return s.read(s.workspace("carol") + "/" + name) }
	if !strings.Contains(at("environ.self"), "API_KEY="+secret) {
		t.Fatalf("the control: the runtime does not have it: %s", at("environ.self"))
	}
	if !strings.Contains(at("environ.1"), "PATH=") {
		t.Fatalf("the control: the environment of pid 1 cannot be read, which proves nothing: %q", at("environ.1"))
	}
	for _, f := range []string{"environ.1", "cmdline.1", "fd.1"} {
		if strings.Contains(at(f), secret) || strings.Contains(at(f), "API_KEY") {
			t.Errorf("%s: %s", f, at(f))
		}
	}
	// bubblewrap's pid 1 holds the runtime's three pipes and its own event descriptor.
	for line := range strings.Lines(at("fd.1")) {
		if strings.Contains(line, "memfd:") {
			t.Errorf("pid 1 holds %s", line)
		}
	}
	if got := strings.Fields(at("fd.self")); len(got) != 4 { // 0, 1, 2 and the one that lists
		t.Errorf("descriptors of the runtime: %v", got)
	}
	for id, env := range map[string]string{"a command": s.works("carol", "tr '\\0' '\\n' < /proc/1/environ"), "its first process": at("environ.1")} {
		if strings.Contains(env, secret) || !strings.Contains(env, "PATH=") {
			t.Errorf("%s: %s", id, env)
		}
	}
	if env := s.works("carol", "env"); !strings.Contains(env, "API_KEY="+secret) {
		t.Errorf("a command lacks what the operator gave the agent: %s", env)
	}
}

// feed runs agentconnect with a value on stdin.
func (s *site) feed(value string, args ...string) result {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := s.agentconnect(ctx, args...)
	cmd.Stdin = strings.NewReader(value)
	return s.finish(cmd)
}

// secret sets one.
func (s *site) secret(value string, args ...string) string {
	s.t.Helper()
	r := s.feed(value, append([]string{"secret", "set"}, args...)...)
	if r.code != 0 {
		s.t.Fatalf("secret set %q: exit %d: %s", args, r.code, r.err)
	}
	return r.out
}

// deputy is a runtime whose sandbox also does what the test writes into its workspace's
// pipe: it stands for an agent that has been running all along.
func (s *site) deputy(id string, flags ...string) func(script string) string {
	s.t.Helper()
	s.script(id, `( while IFS= read -r line < orders; do { eval "$line"; } > answers 2>&1; done ) &
exec "$guest" selftest`, flags...)
	for _, name := range []string{"orders", "answers"} {
		if err := unix.Mkfifo(filepath.Join(s.workspace(id), name), 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
	return func(script string) string {
		s.t.Helper()
		out := s.outside(fmt.Sprintf("cd %s && printf '%%s\\n' '%s' > orders && timeout 20 cat answers", s.workspace(id), strings.ReplaceAll(script, "'", `'\''`)))
		return strings.TrimSuffix(out, "\n")
	}
}

func TestSecretsAsFilesRotateWithoutARestart(t *testing.T) {
	s := newSite(t)
	do := s.deputy("dora")
	s.add("eve")
	const file = "/run/agentconnect/secrets/TOKEN"
	if out := s.secret("first-value\n", "dora", "TOKEN"); !strings.Contains(out, file) || strings.Contains(out, "first-value") {
		t.Errorf("set says %q", out)
	}
	s.secret("line one\nline two\n", "dora", "kube", "--path-env", "KUBECONFIG")
	s.secret(`{"auths":{}}`, "dora", "docker", "--path-env", "DOCKER_CONFIG")
	s.secret("env-value", "dora", "KEY", "--env", "API_KEY")
	s.secret("stays-outside", "dora", "PUSH", "--outside")
	s.start()
	s.ok("prompt", "dora", "echo hello")

	if got := do("cat " + file); got != "first-value" {
		t.Fatalf("the file inside: %q", got)
	}
	if got := do("cat $KUBECONFIG; cat $DOCKER_CONFIG/config.json"); got != "line one\nline two\n{\"auths\":{}}" {
		t.Errorf("by the variables: %q", got)
	}
	if got := do("stat -c %a " + file + "; stat -c %a /run/agentconnect/secrets; ls /run/agentconnect/secrets"); got != "400\n700\nTOKEN\ndocker\nkube" {
		t.Errorf("modes and names: %q", got)
	}
	// The environment is the runtime's alone.
	if got := do("echo $API_KEY"); got != "env-value" {
		t.Errorf("in the runtime: %q", got)
	}
	if got := s.works("dora", "env; tr '\\0' '\\n' < /proc/1/environ"); strings.Contains(got, "env-value") || !strings.Contains(got, "KUBECONFIG=/run/agentconnect/secrets/kube") {
		t.Errorf("in a command beside it: %s", got)
	}
	if got := do("tr '\\0' '\\n' < /proc/1/environ"); strings.Contains(got, "env-value") || strings.Contains(got, "API_KEY") || !strings.Contains(got, "PATH=") {
		t.Errorf("in pid 1: %s", got)
	}
	// Nobody inside can change or replace it, nor find the ones that stay outside.
	for _, script := range []string{"echo x > " + file, "rm -f " + file, "mv " + file + " " + file + "2", "chmod 600 " + file, "touch /run/agentconnect/secrets/x",
		"mv /run/agentconnect/secrets /run/agentconnect/other", "ln -s /etc/passwd /run/agentconnect/secrets/p"} {
		if r := s.sh("dora", script); r.code == 0 {
			t.Errorf("inside it worked: %s", script)
		}
	}
	if got := do("grep -rs stays-outside /run /proc/self/environ /proc/1/environ $HOME /tmp; true"); got != "" {
		t.Errorf("a secret that stays outside was found: %s", got)
	}
	if r := s.sh("eve", "ls -A /run/agentconnect/secrets; cat "+file); strings.TrimSpace(r.out) != "" || r.code == 0 {
		t.Errorf("another agent: %q %d", r.out, r.code)
	}
	before := do("stat -c %i " + file)
	s.secret("second-value", "dora", "TOKEN") // where it goes stays as it was
	if got := do("cat " + file); got != "second-value" {
		t.Errorf("after the rotation: %q", got)
	}
	if after := do("stat -c %i " + file); after == before {
		t.Error("the value was written into the old file: a reader could have seen half of it")
	}
	// A file that becomes a directory of its own, and the other way round.
	s.secret("as a file", "dora", "docker", "--file")
	if got := do("cat /run/agentconnect/secrets/docker"); got != "as a file" {
		t.Errorf("a secret whose directory became a file: %q", got)
	}
	s.secret("in a directory", "dora", "docker", "--path-env", "DOCKER_CONFIG")
	if got := do("cat $DOCKER_CONFIG/config.json"); got != "in a directory" {
		t.Errorf("a secret whose file became a directory: %q", got)
	}
	s.ok("secret", "rm", "dora", "docker")
	s.secret("elsewhere-now", "dora", "TOKEN", "--outside")
	if got := do("ls /run/agentconnect/secrets"); got != "kube" {
		t.Errorf("after they were taken away: %q", got)
	}
	// What a person is shown.
	list := s.ok("secret", "list", "dora")
	for _, want := range []string{"TOKEN", "outside the sandbox alone", "KUBECONFIG holds its path", "API_KEY of the runtime"} {
		if !strings.Contains(list, want) {
			t.Errorf("list does not say %q: %s", want, list)
		}
	}
	for _, v := range []string{"second-value", "elsewhere-now", "env-value", "stays-outside"} {
		if strings.Contains(list+s.ok("secret", "list", "dora", "--json"), v) {
			t.Errorf("list shows %q", v)
		}
	}
	inside := filepath.Join(s.root, "run")
	if n := strings.Count(s.outside("find "+inside+" -path '*/s/*' -type f"), "\n"); n != 1 {
		t.Errorf("the control: %d secrets lie in the directory of the running agent", n)
	}
	s.ok("agent", "stop", "dora")
	if found := s.outside("find " + inside + " -name 'in-*'"); strings.Count(found, "\n") > 0 {
		t.Errorf("left behind after the stop: %s", found)
	}
	log := s.read(filepath.Join(s.root, "logs/agents/dora.audit.jsonl"))
	for _, want := range []string{`"event":"set"`, `"event":"changed"`, `"event":"removed"`, "PUSH"} {
		if !strings.Contains(log, want) {
			t.Errorf("the audit log lacks %s: %s", want, log)
		}
	}
	if strings.Contains(log, "-value") || strings.Contains(log, "elsewhere-now") {
		t.Errorf("the audit log has a value: %s", log)
	}
	token := s.write(filepath.Join(s.root, "mcp/dora/tool/home/token"), "what a server kept")
	s.ok("agent", "rm", "dora", "--purge")
	if exists(token) {
		t.Error("what its MCP server kept is there for the next agent of its id")
	}
	if exists(filepath.Join(s.root, "secrets", "dora")) {
		t.Error("purged, and its secrets are still there")
	}
}

func TestSecretsAreRefusedWhereTheyMakeNoSense(t *testing.T) {
	s := newSite(t)
	s.add("fay")
	for _, c := range []struct {
		code  int
		value string
		word  string
		args  []string
	}{
		{66, "v", "nobody", []string{"set", "nobody", "T"}},
		{2, "v", "a name is", []string{"set", "fay", "../x"}},
		{2, "v", "a name is", []string{"set", "fay", ".hidden"}},
		{2, "v", "contradict", []string{"set", "fay", "T", "--outside", "--env", "X"}},
		{2, "v", "boundary", []string{"set", "fay", "T", "--env", "LD_PRELOAD"}},
		{2, "v", "boundary", []string{"set", "fay", "T", "--env", "PATH"}},
		{2, "v", "not a digit first", []string{"set", "fay", "T", "--env", "1X"}},
		{1, "", "empty", []string{"set", "fay", "T"}},
		{1, "a\x00b", "NUL", []string{"set", "fay", "T", "--env", "X"}},
		{1, strings.Repeat("x", 128<<10+1), "longer", []string{"set", "fay", "T"}},
		{1, "", "no such secret", []string{"rm", "fay", "T"}},
		{2, "v", "argument", []string{"set", "fay", "T", "value"}},
	} {
		r := s.feed(c.value, append([]string{"secret"}, c.args...)...)
		if r.code != c.code || !strings.Contains(r.err, c.word) {
			t.Errorf("secret %q: exit %d, %s", c.args, r.code, r.err)
		}
	}
	s.secret("v", "fay", "T", "--env", "X")
	if r := s.feed("v", "secret", "set", "fay", "U", "--env", "X"); r.code != 1 || !strings.Contains(r.err, "already") {
		t.Errorf("one variable for two secrets: %d %s", r.code, r.err)
	}
	s.ok("agent", "edit", "fay", "--env", "X=y")
	s.start()
	s.fails(78, []string{"secret T", "agent.json"}, "agent", "start", "fay")
	// A file in another's place is not taken for it.
	s.ok("agent", "edit", "fay", "--env", "X")
	dir := filepath.Join(s.root, "secrets", "fay")
	s.write(filepath.Join(dir, "V.json"), s.read(filepath.Join(dir, "T.json")))
	s.fails(78, []string{"V.json", "secret \"T\""}, "agent", "start", "fay")
}

func TestMemoryIsADirectoryThatSurvivesRestarts(t *testing.T) {
	s := newSite(t)
	s.add("oda")
	s.add("pia", "--agent-memory", "none")
	s.start()
	dir := filepath.Join(s.agentDir("oda"), "memory")
	if env := s.ok("prompt", "oda", "env"); !strings.Contains(env, "AGENTCONNECT_MEMORY_DIR="+dir+"\n") {
		t.Errorf("the runtime is not told of it: %s", env)
	}
	s.works("oda", `echo learnt > "$AGENTCONNECT_MEMORY_DIR/MEMORY.md"`)
	s.ok("agent", "restart", "oda")
	if got := s.works("oda", `cat "$AGENTCONNECT_MEMORY_DIR/MEMORY.md"`); got != "learnt\n" {
		t.Errorf("after a restart: %q", got)
	}
	if got := s.read(filepath.Join(dir, "MEMORY.md")); got != "learnt\n" {
		t.Errorf("on the host: %q", got)
	}
	other := filepath.Join(s.agentDir("pia"), "memory")
	s.write(filepath.Join(other, "MEMORY.md"), "old\n")
	s.refused("pia", "cat "+other+"/MEMORY.md")
	s.refused("oda", "cat "+other+"/MEMORY.md")
	if env := s.works("pia", "env"); strings.Contains(env, "MEMORY_DIR") {
		t.Errorf("an agent without memory is told of one: %s", env)
	}
}

func TestARuntimesKeyComesFromASecret(t *testing.T) {
	s := newSite(t)
	path := s.write("runtimes/fake", "#!/bin/sh\necho \"key=$OPENAI_API_KEY\" > seen\nexec /run/agentconnect/guest selftest\n")
	s.executable(path)
	s.write(filepath.Join(s.root, "config.json"), `{"runtimes": {"codex-acp": {"command": "`+path+`"}}}`)
	s.ok("agent", "add", "sue", "--runtime", "codex-acp", "--nesting", "off")
	s.start()
	s.ok("secret", "list", "sue")
	if r := s.run("agent", "edit", "sue", "--credentials", "secret"); r.code != 78 || !strings.Contains(r.err, "secret set sue KEY --env") {
		t.Errorf("without the secret: exit %d: %s", r.code, r.err)
	}
	s.secret("sk-canary-8", "sue", "KEY", "--env", "OPENAI_API_KEY")
	s.ok("agent", "edit", "sue", "--credentials", "secret")
	s.ok("prompt", "sue", "echo hello")
	if got := s.read(filepath.Join(s.workspace("sue"), "seen")); got != "key=sk-canary-8\n" {
		t.Errorf("the runtime has %q", got)
	}
	if show := s.ok("agent", "show", "sue"); strings.Contains(show, "not logged in") || strings.Contains(show, "canary") {
		t.Errorf("show: %s", show)
	}
}
