// What is said where: exec scopes, the journal, and secrets nowhere.

package machinetest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
)

func TestCommandHasAScopeOfItsOwn(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("my-bot")
	m.start("my-bot")
	for _, running := range []bool{true, false} {
		if !running {
			m.mustAC("agent", "stop", "my-bot")
			m.gone("my-bot")
			m.mustAC("agent", "exec", "my-bot", "--", "true")
		}
		for _, code := range []int{0, 7} {
			cmd := m.command(context.Background(), "agentconnect", "agent", "exec", "my-bot", "--", "sh", "-c", fmt.Sprintf("echo up; read x; exit %d", code))
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var unit string
			m.until("the command's scope", func() bool {
				for _, p := range m.of("my-bot") {
					if p.comm == "sh" {
						unit = filepath.Base(p.group)
					}
				}
				return unit != ""
			})
			if !strings.HasPrefix(unit, "agentconnect-exec-my-bot-") || m.show(unit, "Slice") != `agentconnect-my\x2dbot.slice` {
				t.Errorf("running %v: the command is in %s of %s", running, unit, m.show(unit, "Slice"))
			}
			fmt.Fprintln(in)
			in.Close()
			_ = cmd.Wait() // its code is looked at
			if got := cmd.ProcessState.ExitCode(); got != code {
				t.Errorf("running %v: exit code %d, want %d", running, got, code)
			}
			m.until("the scope is gone", func() bool { return !strings.Contains(strings.Join(m.units(), " "), "exec") })
			m.sound()
		}
	}
	if state := m.agent("my-bot").State; state != control.StateStopped {
		t.Errorf("commands in a stopped agent left it %s", state)
	}
	m.start("my-bot")
	// The agent's stop ends its commands.
	cmd := m.command(context.Background(), "agentconnect", "agent", "exec", "my-bot", "--", "sleep", "300")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	m.until("the command", func() bool {
		return strings.Contains(m.list(), "exec-my-bot-") && strings.Contains(m.list(), `"sleep 300"`)
	})
	m.mustCTL("stop", "agent@my-bot")
	if err := cmd.Wait(); err == nil {
		t.Error("the command outlived its agent")
	}
	m.gone("my-bot")
	m.until("the scope is gone", func() bool { return !strings.Contains(strings.Join(m.units(), " "), "exec") })
}

// In an agent that does not run, each command has a supervisor of its own that counts commands.
func TestCommandsOfOneAgentLeaveEachOtherAlone(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	cmd := m.command(context.Background(), "agentconnect", "agent", "exec", "alice", "--", "sh", "-c", "echo up; read x; echo $x")
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
	said := bufio.NewReader(out)
	if line, err := said.ReadString('\n'); line != "up\n" {
		t.Fatal(line, err)
	}
	m.mustAC("agent", "exec", "alice", "--", "true")
	m.mustAC("agent", "exec", "alice", "--", "true")
	fmt.Fprintln(in, "well")
	in.Close()
	rest, _ := io.ReadAll(said)
	if err := cmd.Wait(); err != nil || string(rest) != "well\n" {
		t.Errorf("%q, %v", rest, err)
	}
	m.until("the scopes are gone", func() bool { return !strings.Contains(strings.Join(m.units(), " "), "exec") })
}

// What is shown of the control groups inside is the one that the program is in, and nothing
// of it can be written; outside, the same user can.
func TestOwnControlGroupIsShownReadOnly(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice", "--nesting", "on")
	m.start("alice")
	m.works("alice") // so that its runtime has begun
	runtime := m.runtimes("alice")
	if len(runtime) != 1 {
		t.Fatalf("runtimes: %v", runtime)
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", runtime[0].pid))
	if err != nil {
		t.Fatal(err)
	}
	shown := 0
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if len(f) < 6 || !strings.HasPrefix(f[4], "/sys/fs") {
			continue
		}
		shown++
		if f[4] != "/sys/fs/cgroup" || !strings.HasSuffix(f[3], "/agentconnect-alice.slice/agent-alice.scope") || !strings.HasPrefix(f[5], "ro,nosuid,nodev,noexec") {
			t.Errorf("shown inside: %s", line)
		}
	}
	if shown != 1 {
		t.Errorf("%d mounts below /sys/fs", shown)
	}

	// A command has a scope, and so a group, of its own.
	said := m.mustAC("agent", "exec", "alice", "--", "sh", "-c", `
grep ^0:: /proc/self/cgroup
grep -c . /sys/fs/cgroup/inside/cgroup.procs
ls /sys/fs
cd /sys/fs/cgroup
for try in 'echo 1 >cgroup.freeze' 'echo 1 >cgroup.kill' 'echo $$ >cgroup.procs' 'mkdir below' \
	'mount -o remount,bind,rw /sys/fs/cgroup' 'umount /sys/fs/cgroup' \
	'unshare -Urm sh -c "mount -o remount,bind,rw /sys/fs/cgroup"' 'unshare -Urm umount /sys/fs/cgroup'; do
	if (eval "$try") 2>/dev/null; then echo "worked: $try"; fi
done`)
	lines := strings.Split(strings.TrimSpace(said), "\n")
	if len(lines) != 3 || lines[0] != "0::/" || lines[1] == "0" || lines[2] != "cgroup" {
		t.Errorf("inside:\n%s", said)
	}
	group := filepath.Join("/sys/fs/cgroup", runtime[0].group)
	m.must("sh", "-c", `echo 0 >"$1/cgroup.freeze" && mkdir "$1/below" && rmdir "$1/below"`, "sh", group)
}

// entry is a line of the journal with its fields.
type entry struct {
	Message  any    `json:"MESSAGE"`
	Agent    string `json:"AGENT_ID"`
	Source   string `json:"AGENT_SOURCE"`
	Priority string `json:"PRIORITY"`
	Unit     string `json:"USER_UNIT"`
	Ident    string `json:"SYSLOG_IDENTIFIER"`
}

func (m *machine) entry(words string) entry {
	m.t.Helper()
	var found entry
	m.until(fmt.Sprintf("%q in the journal", words), func() bool {
		for line := range strings.Lines(m.journal("-o", "json")) {
			var e entry
			if json.Unmarshal([]byte(line), &e) == nil && strings.Contains(fmt.Sprint(e.Message), words) {
				found = e
				return true
			}
		}
		return false
	})
	return found
}

func TestJournalTellsTheAgentsStory(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	m.mustAC("prompt", "alice", "stderr a word from the runtime")
	m.logged("a word from the runtime", "-u", "agent@alice")
	m.logged("a word from the runtime", "AGENT_ID=alice")
	if e := m.entry("a word from the runtime"); e.Agent != "alice" || e.Source != "runtime" || e.Priority != "6" || e.Unit != service("alice") || e.Ident != "agent@alice" {
		t.Errorf("a line of the runtime's: %+v", e)
	}
	// A runtime cannot write to the terminal of whoever reads the log, nor fake a priority.
	m.mustAC("prompt", "alice", "stderr <0>not an emergency \x1b[31m")
	if e := m.entry("not an emergency"); e.Priority != "6" || strings.Contains(fmt.Sprint(e.Message), "\x1b") {
		t.Errorf("a line that the runtime tried to dress up: %+v", e)
	}
	for _, c := range []struct {
		name, words, priority string
		do                    func()
	}{
		{"crash", "the runtime ended: killed by signal 11 (segmentation fault)", "3", func() { m.ac("prompt", "alice", "crash SEGV") }},
		{"exit", "the runtime ended: exit status 7", "3", func() { m.ac("prompt", "alice", "exit 7") }},
		{"stop", "stopped", "6", func() { m.mustCTL("stop", "agent@alice") }},
	} {
		m.mustAC("agent", "restart", "alice")
		m.works("alice")
		m.since = time.Now()
		c.do()
		if e := m.entry(c.words); e.Agent != "alice" || e.Priority != c.priority || e.Unit != service("alice") {
			t.Errorf("%s: %+v", c.name, e)
		}
		if n := strings.Count(m.journal("AGENT_ID=alice", "-o", "cat"), c.words+"\n"); n != 1 {
			t.Errorf("%s: said %d times", c.name, n)
		}
	}
	m.fails(m.ctl("status", "--no-pager", "agent@alice"), 3, `Status: "stopped"`)
	if out := m.mustAC("agent", "logs", "alice"); !strings.Contains(out, "a word from the runtime") {
		t.Errorf("agent logs: %q", out)
	}
	m.start("alice")
	m.ac("prompt", "alice", "exit 0")
	m.becomes("alice", control.StateStopped)
	if a := m.agent("alice"); !strings.Contains(a.Reason, "exit status 0") {
		t.Errorf("after a good end the reason is %q", a.Reason)
	}
}
