// Where the user manager has no controllers.

package limitstest

import (
	"os"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/control"
)

func TestMissingControllerOfALimitThatWasAskedFor(t *testing.T) {
	noControllers(t)
	for _, c := range []struct{ name, flag, value, limit, remove string }{
		{"memory", "--memory", "200M", "memory limit of 200 MiB", "--memory ''"},
		{"cpu", "--cpu", "50%", "cpu limit of 50%", "--cpu ''"},
		{"tasks", "--tasks", "100", "limit of tasks of 100", "--tasks 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := &machine{t}
			// It would leave a mark if it ran for one instruction.
			m.add(c.name, append(perl(`open(my $f, ">", "ran")`), c.flag, c.value)...)
			said, code := m.run("agentconnect", "agent", "start", c.name)
			if code != 78 {
				t.Errorf("exit code %d, want 78", code)
			}
			m.says("start", said, c.limit+" that was asked for is not in force", "systemctl cat user@.service", c.remove)
			a := m.agent(c.name)
			if a.State != control.StateRefused || a.Restarts != 0 {
				t.Errorf("it is %s after %d restarts", a.State, a.Restarts)
			}
			m.says("status", a.Reason, c.limit)
			m.says("the journal", m.must("journalctl", "--user", "-u", "agent@"+c.name, "-o", "cat"), c.limit)
			if _, err := os.Stat("/home/tester/.agentconnect/agents/" + c.name + "/workspace/ran"); err == nil {
				t.Error("the runtime has run")
			}
			// The remedy that was named.
			flag, value, _ := strings.Cut(c.remove, " ")
			m.must("agentconnect", "agent", "edit", c.name, flag, strings.Trim(value, "'"))
			m.must("agentconnect", "agent", "start", c.name)
			if a := m.agent(c.name); a.State != control.StateRunning {
				t.Errorf("without the limit it is %s: %s", a.State, a.Reason)
			}
		})
	}
}

func TestMissingControllerOfADefault(t *testing.T) {
	m := noControllers(t)
	m.start("alice")
	a := m.used("alice")
	m.says("status", strings.Join(a.Unmet, "; "), "no limit of tasks, though 4096 is the default")
	if a.Usage.Memory != nil || a.Usage.Tasks != nil || a.Usage.OOMKills != nil {
		t.Errorf("numbers that nobody counts: %+v", a.Usage)
	}
	if a.Usage.CPU == nil {
		t.Error("processor time is counted without a controller, too")
	}
}

func TestMissingControllerOfALiveChange(t *testing.T) {
	m := noControllers(t)
	m.start("alice")
	runtime := m.runtime("alice")
	said := m.must("agentconnect", "agent", "edit", "alice", "--memory", "300M")
	const words = "the memory limit of 300 MiB that was asked for is not in force"
	m.says("edit", said, words)
	m.says("status", strings.Join(m.agent("alice").Unmet, "; "), words)
	if now := m.runtime("alice"); now != runtime {
		t.Error("it was started anew")
	}
}
