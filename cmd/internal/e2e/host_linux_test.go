package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// marker adds an agent whose runtime leaves a mark the moment it runs: "inside", or "free"
// without a boundary.
func (s *site) marker(id string, flags ...string) (mark string) {
	s.t.Helper()
	mark = filepath.Join(s.workspace(id), "ran")
	s.script(id, "where=inside\n[ -x $guest ] || { where=free; "+s.free()+"; }\necho $where >>"+mark+"\nexec $guest selftest", flags...)
	return mark
}

// noBoundary is a host where no boundary can start: what each line takes away.
const noBoundary = "echo 0 > /proc/sys/user/max_user_namespaces"

func TestRequiredModeWithAFailingProbeStartsNothingAndSaysWhyWhenItIsDown(t *testing.T) {
	s := newSite(t)
	mark := s.marker("alice")
	s.start()
	s.ok("prompt", "alice", "echo hello") // from now on it is wanted
	s.ok("down")
	s.wait()
	if err := os.Remove(mark); err != nil {
		t.Fatal("the control: with a boundary it did not run: ", err)
	}
	s.namespace(noBoundary)
	s.launch("--require-sandbox")
	family := s.family()
	if code := s.wait(); code != 69 {
		t.Errorf("exit %d, want 69: %s", code, s.out)
	}
	s.gone(family)
	if exists(mark) {
		t.Error("the agent ran")
	}
	st := s.status()
	if st.State != "refused" || st.ExitCode != 69 || !strings.Contains(st.Reason, "userns-disabled") || !strings.Contains(st.Reason, "`") {
		t.Errorf("status: %s, %d, %q: want refused, 69, the code and a command to run", st.State, st.ExitCode, st.Reason)
	}
	if st.Probe == nil || st.Probe.OK || st.Probe.Code != "userns-disabled" {
		t.Errorf("the recorded probe: %+v", st.Probe)
	}
	if text := s.ok("status"); !strings.Contains(text, "refused to start") || !strings.Contains(text, "userns-disabled") {
		t.Errorf("for people: %s", text)
	}
	// The probe alone says the same, with the same code.
	if r := s.run("probe"); r.code != 69 || !strings.Contains(r.out, "userns-disabled") {
		t.Errorf("probe: exit %d: %s", r.code, r.out)
	}
}

func TestRequiredBeatsTheEnvironmentAndConfigShowsWhereItCameFrom(t *testing.T) {
	s := newSite(t)
	s.write(filepath.Join(s.root, "config.json"), `{"security":{"requireSandbox":true}}`)
	s.env = append(s.env, "AGENTCONNECT_REQUIRE_SANDBOX=0")
	var values []struct{ Key, Value, Source string }
	raw := s.ok("config", "--json")
	if err := json.Unmarshal([]byte(raw), &values); err != nil {
		t.Fatalf("%v: %s", err, raw)
	}
	found := false
	for _, v := range values {
		if v.Key == "security.requireSandbox" {
			found = true
			if v.Value != "true" || !strings.Contains(v.Source, filepath.Join(s.root, "config.json")) {
				t.Errorf("%+v", v)
			}
		}
	}
	if !found {
		t.Errorf("not listed: %s", raw)
	}
	s.fails(69, []string{"sandbox is required"}, "agent", "add", "free", "--runtime", "selftest", "--no-sandbox")
	s.namespace(noBoundary)
	s.launch()
	if code := s.wait(); code != 69 {
		t.Errorf("exit %d, want 69: %s", code, s.out)
	}
	// The flag alone says it as well.
	s.write(filepath.Join(s.root, "config.json"), `{"security":{"requireSandbox":false}}`)
	s.launch("--require-sandbox")
	if code := s.wait(); code != 69 {
		t.Errorf("by flag: exit %d, want 69: %s", code, s.out)
	}
}

func TestWithoutABoundaryASandboxedAgentNeverRunsAndOneThatWasSetFreeDoes(t *testing.T) {
	s := newSite(t)
	mark := s.marker("alice")
	free := s.marker("bob", "--no-sandbox")
	s.namespace(noBoundary)
	s.start()
	s.fails(69, []string{"userns-disabled", "`"}, "agent", "start", "alice")
	s.fails(69, []string{"userns-disabled"}, "agent", "exec", "alice", "--", "/usr/bin/touch", mark)
	s.fails(69, []string{"userns-disabled"}, "prompt", "alice", "echo hello")
	e := s.attach("alice")
	if _, err := e.call("initialize", hello); err == nil || !strings.Contains(err.Error(), "userns-disabled") {
		t.Errorf("an editor is told %v", err)
	}
	s.ok("prompt", "bob", "echo hello")
	if st := s.agent("alice"); st.State != control.StateRefused || !strings.Contains(st.Reason, "userns-disabled") {
		t.Errorf("alice: %s: %s", st.State, st.Reason)
	}
	if exists(mark) {
		t.Error("the sandboxed agent ran")
	}
	if !exists(free) {
		t.Error("the free agent did not run")
	}
	if st := s.agent("bob"); st.State != control.StateRunning || st.Sandboxed || len(st.Notes) == 0 {
		t.Errorf("bob: %+v", st)
	}
	// Required from now on: the free one has to stop, too.
	s.write(filepath.Join(s.root, "config.json"), `{"security":{"requireSandbox":true}}`)
	s.until("bob is stopped", func() bool { return s.agent("bob").State == control.StateRefused })
	s.fails(69, []string{"sandbox is required"}, "agent", "start", "bob")
}

func TestBwrapUnusableAfterTheProbeIsAnErrorAndNoStart(t *testing.T) {
	s := newSite(t)
	mark := s.marker("alice")
	do := s.namespace("true")
	s.start()
	s.ok("prompt", "alice", "echo hello")
	s.ok("agent", "stop", "alice")
	if err := os.Remove(mark); err != nil {
		t.Fatal("the control: with bwrap it did not run: ", err)
	}
	for _, c := range []struct{ name, over string }{
		{"not a program", "/dev/null"},
		{"a program that fails", "/bin/false"},
		{"a program that does nothing and says all is well", "/bin/true"},
	} {
		do("mount --bind " + c.over + " /usr/bin/bwrap")
		r := s.run("agent", "start", "alice")
		if r.code == 0 {
			t.Errorf("%s: it started: %s", c.name, r.out)
		}
		if r.code != 69 || !strings.Contains(r.err, "bwrap") || !strings.Contains(r.err, "agentconnect probe") {
			t.Errorf("%s: exit %d: %s", c.name, r.code, r.err)
		}
		if r := s.sh("alice", "touch "+mark); r.code == 0 {
			t.Errorf("%s: a command seems to have run", c.name)
		}
		if exists(mark) {
			t.Errorf("%s: the agent ran", c.name)
		}
		s.run("agent", "stop", "alice")
		do("umount /usr/bin/bwrap")
	}
	s.ok("agent", "start", "alice")
	s.until("with bwrap back it runs", func() bool { return exists(mark) })
}

func TestPolicyReloadWithAnErrorKeepsTheOldPolicyAndOpensNothing(t *testing.T) {
	s := newSite(t)
	config := filepath.Join(s.root, "config.json")
	s.write(config, `{"security":{"requireSandbox":true}}`)
	mark := s.marker("alice")
	s.start()
	agentJSON := s.read(filepath.Join(s.agentDir("alice"), "agent.json"))
	for _, broken := range []string{
		`{"security":{"requireSandbx":false}}`,
		`{"security":{"requireSandbox":"no"}}`,
		`{"security":{"requireSandbox":false}`,
		``,
	} {
		s.write(config, broken)
		s.until("the error shows in status", func() bool { return s.status().ConfigError != "" })
		st := s.status()
		if st.State != "running" || !st.RequireSandbox {
			t.Errorf("%q: %s, required %v", broken, st.State, st.RequireSandbox)
		}
		if text := s.ok("status"); !strings.Contains(text, "ERROR") {
			t.Errorf("%q: for people: %s", broken, text)
		}
		// By hand, past the command line: the daemon itself refuses.
		s.write(filepath.Join(s.agentDir("alice"), "agent.json"), strings.Replace(agentJSON, `"runInSandbox": true`, `"runInSandbox": false`, 1))
		var refusal *control.Error
		if _, err := s.client().Start(context.Background(), "alice"); !errors.As(err, &refusal) || refusal.Code != 69 || !strings.Contains(refusal.Message, "sandbox is required") {
			t.Errorf("%q: the daemon says %v", broken, err)
		}
		s.write(filepath.Join(s.agentDir("alice"), "agent.json"), agentJSON)
		if b, err := os.ReadFile(mark); err == nil && strings.Contains(string(b), "free") {
			t.Fatalf("%q: the agent ran unconfined", broken)
		}
		s.write(config, `{"security":{"requireSandbox":true}}`)
		s.until("the error is gone", func() bool { return s.status().ConfigError == "" })
	}
	s.ok("agent", "start", "alice")
	s.until("it runs inside", func() bool { return exists(mark) })
	// The control: with the requirement gone it is this very start that the daemon allows.
	s.write(config, `{}`)
	s.write(filepath.Join(s.agentDir("alice"), "agent.json"), strings.Replace(agentJSON, `"runInSandbox": true`, `"runInSandbox": false`, 1))
	s.until("the new policy is in force", func() bool { return !s.status().RequireSandbox })
	s.ok("agent", "restart", "alice")
	s.until("it runs free", func() bool { return strings.Contains(s.read(mark), "free") })
}
