package limitstest

import (
	"bufio"
	"os/exec"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// climb is what an agent does that may make namespaces: it mounts the control groups in one of
// its own, and writes its limits: from the namespace whose root its group is, which the kernel
// refuses where they are delegated, and from one further in, whose root is another.
const climb = `
limits='memory.max memory.high memory.swap.max pids.max cpu.max'
attack() {
	for f in $limits; do
		{ echo max >"/tmp/cg/$f"; } 2>/dev/null && echo "worked $1: $f"
	done
	{ echo +memory +pids +cpu >/tmp/cg/cgroup.subtree_control; } 2>/dev/null && echo "worked $1: controllers"
	[ -z "$(find /tmp/cg -name memory.max)" ] || echo "worked $1: a group with limits is shown"
}
mkdir -p /tmp/cg
mount -t cgroup2 none /tmp/cg && echo mounted
attack root
mkdir /tmp/cg/{1..300} 2>/dev/null || echo bounded
rmdir /tmp/cg/1; mkdir /tmp/cg/below && echo $$ >/tmp/cg/below/cgroup.procs && echo moved
export limits
unshare -C sh -c "$(declare -f attack); attack below"
echo done
read x
`

func TestAgentThatMountsControlGroupsChangesNoLimit(t *testing.T) {
	m := realLimits(t)
	m.start("alice", "--nesting", "on", "--memory", "200M", "--tasks", "100", "--cpu", "50%")
	cmd := exec.Command("agentconnect", "agent", "exec", "alice", "--", "unshare", "-UrmC", "bash", "-c", climb)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	for lines := bufio.NewScanner(out); lines.Scan() && lines.Text() != "done"; {
		said.WriteString(lines.Text() + "\n")
	}
	m.says("the attack", said.String(), "mounted\n", "bounded\n", "moved\n") // it comes to its end
	for _, unit := range []string{"agent-alice.scope", "agentconnect-exec-alice-1.scope"} {
		g := m.group(unit)
		m.value(g, "memory.max", "209715200")
		m.value(g, "pids.max", "100")
		m.value(g, "cpu.max", "50000 100000")
	}
	if strings.Contains(said.String(), "worked") {
		t.Errorf("it changed its limits:\n%s", &said)
	}
	// The control: outside the same user may.
	g := m.group("agentconnect-exec-alice-1.scope")
	m.must("sh", "-c", `echo max >"$1/memory.max"`, "sh", g.Path)
	m.value(g, "memory.max", "max")
	in.Close()
	_ = cmd.Wait()
}

// The limits of an agent that may make namespaces lie above the group that it runs in, and
// hold all the same.
func TestAgentThatMayMakeNamespacesIsHeldToItsLimits(t *testing.T) {
	m := realLimits(t)
	m.dropIn("agent@alice.service", "slow.conf", "[Service]\nRestartSec=6s\n")
	m.start("alice", "--nesting", "on", "--memory", "100M", "--tasks", "60")
	said, _ := m.run("agentconnect", "agent", "exec", "alice", "--", "bash", "-c", `cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/pids.max; for i in {1..100}; do sleep 60 & done 2>&1 | grep -m1 -i resource; kill $(jobs -p)`)
	m.says("a command", said, "104857600\n60\n", "Resource temporarily unavailable")
	said, code := m.run("agentconnect", "prompt", "alice", "eat 200")
	m.says("the prompt that ate too much", said, "out of memory: 100 MiB limit")
	if code != 1 {
		t.Errorf("the prompt that ate too much: exit code %d", code)
	}
	m.until("alice runs again", func() bool { return m.agent("alice").State == control.StateRunning })
	m.says("a prompt after the restart", m.must("agentconnect", "prompt", "alice", "echo back again"), "back again")
}
