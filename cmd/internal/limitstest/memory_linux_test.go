package limitstest

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/control"
)

func TestRuntimeThatEatsMemory(t *testing.T) {
	m := realLimits(t)
	// Time to look at the agent while it is down.
	m.dropIn("agent@alice.service", "slow.conf", "[Service]\nRestartSec=6s\n")
	m.start("bob", "--memory", "100M")
	m.start("alice", "--memory", "100M")
	bob, supervisor := m.runtime("bob"), m.show("agent@alice.service", "MainPID")

	m.says("a prompt within the limit", m.must("agentconnect", "prompt", "alice", "eat 40"), "ate 40 MiB")
	said, code := m.run("agentconnect", "prompt", "alice", "eat 200")
	const words = "out of memory: 100 MiB limit"
	m.says("the prompt that ate too much", said, words)
	if code != 1 {
		t.Errorf("the prompt that ate too much: exit code %d", code)
	}

	m.until("the end of the supervisor", func() bool { return m.show("agent@alice.service", "SubState") == "auto-restart" })
	unit, _ := m.run("systemctl", "--user", "status", "--no-pager", "agent@alice")
	m.says("systemctl status", unit, `Status: "the runtime ended: `+words)
	a := m.agent("alice")
	if a.State != control.StateBackoff {
		t.Errorf("alice is %s", a.State)
	}
	m.says("status", a.Reason, words)
	m.says("the journal", m.must("journalctl", "--user", "-u", "agent@alice", "_PID="+supervisor, "-o", "cat"), words)
	// 1 is "exited": the supervisor was not killed, it said its word and left.
	if how := m.show("agent@alice.service", "ExecMainCode"); how != "1" {
		t.Errorf("the supervisor's end: %s, want that it exited", how)
	}
	if left, _ := m.run("systemctl", "--user", "is-active", "agent-alice.scope"); strings.TrimSpace(left) != "inactive" {
		t.Errorf("the scope is %s", left)
	}

	m.until("alice runs again", func() bool { return m.agent("alice").State == control.StateRunning })
	m.says("a prompt after the restart", m.must("agentconnect", "prompt", "alice", "echo back again"), "back again")
	a = m.used("alice")
	// From systemd 253 on the kernel ends the processes of the scope together.
	if kills := a.Usage.OOMKills; kills == nil || *kills < 1 || *kills > 3 {
		t.Errorf("alice's OOM kills: %+v", a.Usage)
	}
	if a.Restarts != 1 {
		t.Errorf("alice was restarted %d times", a.Restarts)
	}
	m.says("status", m.must("agentconnect", "status"), " killed for memory", "restarted 1 times")

	b := m.used("bob")
	if now := m.runtime("bob"); now != bob || b.Restarts != 0 || b.State != control.StateRunning {
		t.Errorf("bob: runtime %d, was %d: %+v", now, bob, b)
	}
	is(t, "bob's OOM kills", b.Usage.OOMKills, 0)
	m.says("bob", m.must("agentconnect", "prompt", "bob", "echo not disturbed"), "not disturbed")
}

// The manager removes the empty scope at the same time as the supervisor asks why it ended.
func TestEveryOOMKillIsCalledSo(t *testing.T) {
	m := realLimits(t)
	m.start("alice", "--memory", "32M")
	for i := range 12 {
		said, _ := m.run("agentconnect", "prompt", "alice", "eat 64")
		m.says("end "+strconv.Itoa(i), said, "out of memory: 32 MiB limit")
		m.must("agentconnect", "agent", "restart", "alice")
	}
}

func TestAgentThatEatsMemoryAgainAndAgain(t *testing.T) {
	m := realLimits(t)
	m.start("alice", "--memory", "32M")
	m.until("systemd gives up", func() bool {
		a := m.agent("alice")
		if a.State == control.StateRunning {
			m.run("agentconnect", "prompt", "alice", "eat 64")
		}
		return a.State == control.StateFailed
	})
	m.says("status", m.agent("alice").Reason, "it ended too often", "out of memory: 32 MiB limit")
	unit, _ := m.run("systemctl", "--user", "status", "--no-pager", "agent@alice")
	m.says("systemctl status", unit, "out of memory: 32 MiB limit")
	m.must("agentconnect", "agent", "start", "alice")
	m.says("a prompt after a start by hand", m.must("agentconnect", "prompt", "alice", "echo back"), "back")
}

func TestTotalLimitOfAllAgents(t *testing.T) {
	m := realLimits(t)
	m.start("bob")
	m.start("alice", "--memory", "500M")
	m.must("systemctl", "--user", "set-property", "--runtime", "agentconnect.slice", "MemoryMax=120M", "MemorySwapMax=0")
	bob := m.runtime("bob")
	said, _ := m.run("agentconnect", "prompt", "alice", "eat 200")
	// Its own limit is far away, and is not to be blamed.
	m.says("the prompt", said, "out of memory: a limit above this agent's")
	if now := m.runtime("bob"); now != bob {
		t.Errorf("bob was started anew")
	}
	total := m.status().Usage
	if total == nil {
		t.Fatal("no word about all agents together")
	}
	is(t, "the total limit", total.Limits.Memory, 120*mib)
	m.says("status", m.must("agentconnect", "status"), "all agents", "limit 120 MiB")
}

func TestLimitsAreWhatTheControlGroupSays(t *testing.T) {
	m := realLimits(t)
	m.start("alice", "--memory", "200M", "--cpu", "50%", "--tasks", "77")
	scope := m.group("agent-alice.scope")
	m.value(scope, "memory.max", strconv.Itoa(200*mib))
	m.value(scope, "memory.swap.max", "0")
	// No throttling below the limit: without swap the agent would crawl, not end.
	m.value(scope, "memory.high", "max")
	m.value(scope, "cpu.max", "50000 100000")
	m.value(scope, "pids.max", "77")
	m.must("agentconnect", "prompt", "alice", "eat 50")
	u := m.used("alice").Usage
	is(t, "memory limit", u.Limits.Memory, 200*mib)
	is(t, "cpu limit", u.Limits.CPUQuota, 500_000)
	is(t, "tasks limit", u.Limits.Tasks, 77)
	for _, c := range []struct {
		what     string
		got      *uint64
		from, to uint64
	}{
		{"memory", u.Memory, 50 * mib, 80 * mib},
		{"memory peak", u.MemoryPeak, 50 * mib, 80 * mib},
		{"cpu", u.CPU, 10_000, 60_000_000},
		{"tasks", u.Tasks, 3, 20},
	} {
		if c.got == nil || *c.got < c.from || *c.got > c.to {
			t.Errorf("%s: %v, want %d to %d", c.what, c.got, c.from, c.to)
		}
	}
	s := m.status()
	if s.Usage == nil || s.Usage.Memory == nil || *s.Usage.Memory < *u.Memory {
		t.Errorf("all agents use less than one: %+v", s.Usage)
	}
	m.says("status", m.must("agentconnect", "status"), "limit 200 MiB", "limit 50%", "limit 77")

	// A command in the agent's boundary has a scope of its own with the limits of the moment,
	// and reads them where programs look for them.
	m.must("agentconnect", "agent", "edit", "alice", "--memory", "150M")
	inside := m.must("agentconnect", "agent", "exec", "alice", "--", "sh", "-c", "cd /sys/fs/cgroup; cat memory.max cpu.max pids.max")
	if want := strconv.Itoa(150*mib) + "\n50000 100000\n77\n"; inside != want {
		t.Errorf("a command reads the limits\n%swant\n%s", inside, want)
	}
	cmd := exec.Command("agentconnect", "agent", "exec", "alice", "--", "sh", "-c", "echo up; exec cat")
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
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "up\n" {
		t.Errorf("the command says %q, %v", line, err)
	}
	command := m.group("agentconnect-exec-alice-2.scope")
	m.value(command, "memory.max", strconv.Itoa(150*mib))
	m.value(command, "cpu.max", "50000 100000")
	m.value(command, "pids.max", "77")
	if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
		t.Error(err)
	}
}

func TestAgentWithoutLimits(t *testing.T) {
	m := realLimits(t)
	m.start("alice")
	m.value(m.group("agent-alice.scope"), "memory.max", "max")
	a := m.used("alice")
	if a.Usage.Limits.Memory != nil || a.Usage.Limits.CPUQuota != nil {
		t.Errorf("limits that nobody asked for: %+v", a.Usage.Limits)
	}
	is(t, "the default of tasks", a.Usage.Limits.Tasks, 4096)
	if len(a.Unmet) > 0 {
		t.Errorf("limits not in force: %q", a.Unmet)
	}
	m.must("agentconnect", "agent", "stop", "alice")
	if a := m.agent("alice"); a.Usage != nil {
		t.Errorf("a stopped agent uses %+v", a.Usage)
	}
	if all := m.status().Usage; all != nil {
		t.Errorf("without a running agent all use %+v", all)
	}
}

func storm(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(b)
}
