package e2e

import (
	"strings"
	"testing"
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
