package limitstest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
)

func TestLimitsChangeWithoutARestart(t *testing.T) {
	m := realLimits(t)
	m.start("alice", "--memory", "200M")
	runtime, supervisor := m.runtime("alice"), m.agent("alice").PID
	scope := m.group("agent-alice.scope")
	same := func(what string) {
		t.Helper()
		a := m.used("alice")
		if now := m.runtime("alice"); now != runtime || a.PID != supervisor || a.Restarts != 0 {
			t.Fatalf("%s: started anew: runtime %d, was %d: %+v", what, now, runtime, a)
		}
		if a.Changed || strings.Contains(strings.Join(a.Notes, "; "), "configuration changed") {
			t.Errorf("%s: status asks for a restart: %+v", what, a)
		}
		if len(a.Unmet) > 0 {
			t.Errorf("%s: limits not in force: %q", what, a.Unmet)
		}
	}
	said := m.must("agentconnect", "agent", "edit", "alice", "--memory", "300M", "--tasks", "99")
	m.says("edit", said, "it runs on with", "limit 300 MiB", "limit 99")
	m.value(scope, "memory.max", strconv.Itoa(300*mib))
	m.value(scope, "pids.max", "99")
	same("raised")
	is(t, "status", m.used("alice").Usage.Limits.Memory, 300*mib)
	m.says("a prompt above the old limit", m.must("agentconnect", "prompt", "alice", "eat 230"), "ate 230 MiB")

	m.must("agentconnect", "agent", "edit", "alice", "--memory", "", "--cpu", "70%")
	m.value(scope, "memory.max", "max")
	m.value(scope, "cpu.max", "70000 100000")
	same("taken away")

	// By the defaults of everybody.
	config := filepath.Join("/home/tester/.agentconnect", "config.json")
	if err := os.WriteFile(config, []byte(`{"limits":{"memory":"400M"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	m.until("the default is in force", func() bool { v, _ := scope.Value("memory.max"); return v == strconv.Itoa(400*mib) })
	same("by default")

	// The manager keeps what was set.
	m.must("systemctl", "--user", "daemon-reload")
	m.value(scope, "memory.max", strconv.Itoa(400*mib))
	m.must("systemctl", "--user", "daemon-reexec")
	m.value(scope, "memory.max", strconv.Itoa(400*mib))

	// Changed while nobody looks.
	m.must("systemctl", "--user", "stop", "agentconnect.service")
	m.must("agentconnect", "agent", "edit", "alice", "--memory", "350M")
	m.must("systemctl", "--user", "start", "agentconnect.service")
	m.until("the change is in force", func() bool { v, _ := scope.Value("memory.max"); return v == strconv.Itoa(350*mib) })
	same("after the daemon came back")

	m.must("systemctl", "--user", "kill", "-s", "KILL", "agent@alice.service")
	m.until("it runs again", func() bool { a := m.agent("alice"); return a.State == control.StateRunning && a.PID != supervisor })
	is(t, "after a restart", m.used("alice").Usage.Limits.Memory, 350*mib)
	is(t, "after a restart", m.used("alice").Usage.Limits.Tasks, 99)

	// The new limit is the one that is named.
	end, _ := m.run("agentconnect", "prompt", "alice", "eat 500")
	m.says("a prompt above the new limit", end, "out of memory: 350 MiB limit")
}

func TestOtherChangesStillNeedARestart(t *testing.T) {
	m := realLimits(t)
	m.start("alice", "--memory", "200M")
	said := m.must("agentconnect", "agent", "edit", "alice", "--memory", "300M", "--env", "A=1")
	m.says("edit", said, "agentconnect agent restart alice")
	m.value(m.group("agent-alice.scope"), "memory.max", strconv.Itoa(200*mib))
	if a := m.agent("alice"); !a.Changed {
		t.Errorf("status does not say that it is to be restarted: %+v", a)
	}
	// To start what runs changes nothing of what runs.
	m.must("agentconnect", "agent", "start", "alice")
	if a := m.agent("alice"); !a.Changed {
		t.Errorf("after a start that did nothing, status does not say that it is to be restarted: %+v", a)
	}
	m.must("agentconnect", "agent", "restart", "alice")
	if a := m.used("alice"); a.Changed {
		t.Errorf("still to be restarted: %+v", a)
	}
	m.value(m.group("agent-alice.scope"), "memory.max", strconv.Itoa(300*mib))
}

func TestAdministratorsDropInWins(t *testing.T) {
	m := realLimits(t)
	file := m.dropIn("agent-.scope", "10-admin.conf", "[Scope]\nMemoryMax=77M\nTasksMax=50\n")
	m.start("alice", "--memory", "200M", "--tasks", "60")
	scope := m.group("agent-alice.scope")
	theirs := func(what string) {
		t.Helper()
		m.value(scope, "memory.max", strconv.Itoa(77*mib))
		m.value(scope, "pids.max", "50")
		a := m.used("alice")
		is(t, what+": memory", a.Usage.Limits.Memory, 77*mib)
		m.says(what+": status", strings.Join(a.Unmet, "; "), "the memory limit is 77 MiB, not ", "the limit of tasks is 50, not ", "a drop-in of this machine's administrator")
		if len(a.DropIns) != 1 || a.DropIns[0] != file {
			t.Errorf("%s: drop-ins: %q", what, a.DropIns)
		}
	}
	theirs("at the start")
	m.says("status", m.must("agentconnect", "status"), "its units are changed by "+file)
	m.says("explain", m.must("agentconnect", "explain", "alice"), "its units are changed by "+file)
	m.says("the journal", m.must("journalctl", "--user", "-u", "agent@alice", "-o", "cat"), "the memory limit is 77 MiB, not 200 MiB")

	// A change of ours does not undo theirs, and what they left alone is changed.
	m.must("agentconnect", "agent", "edit", "alice", "--memory", "300M", "--tasks", "70", "--cpu", "40%")
	theirs("after a live change")
	m.value(scope, "cpu.max", "40000 100000")
	m.must("agentconnect", "restart")
	theirs("after a restart of the daemon")

	said, _ := m.run("agentconnect", "prompt", "alice", "eat 120")
	m.says("a prompt above their limit", said, "out of memory: 77 MiB limit")
}

func TestAdministratorsDropInsForServiceAndSlice(t *testing.T) {
	m := realLimits(t)
	service := m.dropIn("agent@.service", "nice.conf", "[Service]\nNice=5\n")
	slice := m.dropIn("agentconnect-alice.slice", "total.conf", "[Slice]\nMemoryMax=90M\n")
	m.start("alice", "--memory", "200M")
	m.value(m.group("agentconnect-alice.slice"), "memory.max", strconv.Itoa(90*mib))
	got := strings.Join(m.used("alice").DropIns, " ")
	if got != service+" "+slice {
		t.Errorf("drop-ins: %s", got)
	}
	said, _ := m.run("agentconnect", "prompt", "alice", "eat 120")
	m.says("a prompt above the slice's limit", said, "out of memory: a limit above this agent's")
}

func TestFrozenSlice(t *testing.T) {
	m := realLimits(t)
	m.start("bob")
	m.start("my-bot") // its slice has an escaped name
	slice := `agentconnect-my\x2dbot.slice`
	runtime := m.runtime("my-bot")
	began := time.Now()
	m.used("my-bot")
	running := time.Since(began)
	m.must("systemctl", "--user", "freeze", slice)
	began = time.Now()
	a := m.used("my-bot")
	if took := time.Since(began); took > running+900*time.Millisecond {
		t.Errorf("status waited for a frozen supervisor: %v, and %v while it ran", took, running)
	}
	if !a.Usage.Frozen || a.State != control.StateRunning {
		t.Errorf("frozen agent: %+v", a)
	}
	m.says("status", strings.Join(a.Notes, "; "), "systemctl --user thaw '"+slice+"'")
	m.says("bob", m.must("agentconnect", "prompt", "bob", "echo awake"), "awake")

	prompt := exec.Command("agentconnect", "prompt", "my-bot", "echo thawed")
	var out strings.Builder
	prompt.Stdout, prompt.Stderr = &out, &out
	if err := prompt.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- prompt.Wait() }()
	select {
	case err := <-done:
		t.Errorf("a frozen agent answered: %v: %s", err, &out)
	case <-time.After(time.Second): // that it does not answer has no event
	}
	m.must("systemctl", "--user", "thaw", slice)
	select {
	case err := <-done:
		if err != nil || !strings.Contains(out.String(), "thawed") {
			t.Errorf("after the thaw: %v: %s", err, &out)
		}
	case <-time.After(patience):
		t.Fatal("no answer after the thaw")
	}
	if now := m.runtime("my-bot"); now != runtime {
		t.Error("it was started anew")
	}
	if a := m.used("my-bot"); a.Usage.Frozen {
		t.Errorf("still frozen: %+v", a)
	}
}
