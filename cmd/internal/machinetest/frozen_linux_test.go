// Agents that an operator halts, and what goes on meanwhile.

package machinetest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/sandbox"
)

// pending is a command that goes on while others run.
type pending struct {
	m     *machine
	argv  []string
	out   bytes.Buffer
	cmd   *exec.Cmd
	ended chan error
}

func (m *machine) begin(argv ...string) *pending {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandTime)
	m.t.Cleanup(cancel)
	p := &pending{m: m, argv: argv, cmd: m.command(ctx, argv...), ended: make(chan error, 1)}
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if err := p.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	go func() { p.ended <- p.cmd.Wait() }()
	return p
}

// waits checks that it has not ended yet.
func (p *pending) waits() {
	p.m.t.Helper()
	select {
	case err := <-p.ended:
		p.m.t.Fatalf("%q ended while the agent stood still: %v: %s", p.argv, err, &p.out)
	default:
	}
}

// says waits for its end and checks what it said.
func (p *pending) says(want string) {
	p.m.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case err := <-p.ended:
		if err != nil || !strings.Contains(p.out.String(), want) {
			p.m.t.Errorf("%q: %v: %q, want %q", p.argv, err, &p.out, want)
		}
	case <-timer.C:
		p.m.t.Fatalf("%q does not end", p.argv)
	}
}

// frozen is the kernel's word on a group, stands on that of a unit.
func frozen(group string) bool {
	b, err := os.ReadFile("/sys/fs/cgroup" + group + "/cgroup.events")
	return err == nil && strings.Contains(string(b), "frozen 1")
}

func (m *machine) stands(unit string) bool {
	m.t.Helper()
	return frozen(m.show(unit, "ControlGroup"))
}

// repository makes one with a commit.
func (m *machine) repository(dir string) {
	m.t.Helper()
	m.file(dir+"/file", "text\n", 0o644)
	m.t.Cleanup(func() { os.RemoveAll(dir) })
	m.must("sh", "-c", `cd "$1" && git init -q -b main && git config user.name a && git config user.email a@b && git add -A && git commit -q -m first`, "sh", dir)
}

func TestFrozenAgentGoesOnWhereItStoodStill(t *testing.T) {
	m := newMachine(t)
	repo := home + "/repo"
	m.repository(repo)
	m.up()
	m.must("git", "-C", repo, "remote", "add", "origin", "/nowhere")
	m.add("alice", "--workspace", repo, "--git-config", "branch.*")
	m.add("bob")
	m.add("carol")
	m.start("alice", "bob")
	m.works("alice") // so that its runtime has begun
	runtime := m.one("alice", commInside)
	for _, unit := range []string{"agentconnect-alice.slice", scope("alice")} {
		t.Run(unit, func(t *testing.T) {
			whole := unit != scope("alice") // its supervisor stands still, too
			m.mustCTL("freeze", unit)
			t.Cleanup(func() { m.ctl("thaw", unit) })
			prompt := m.begin("agentconnect", "prompt", "alice", "echo thawed")
			command := m.begin("agentconnect", "agent", "exec", "alice", "--", "sh", "-c", "echo commanded; git config user.name; echo x >>.git/config || echo sealed")
			config := m.begin("git", "-C", repo, "config", "user.name", "after-"+strings.ReplaceAll(unit, `\`, ""))
			// Others are not halted with it, and can be started.
			m.works("bob")
			m.start("carol")
			m.works("carol")
			m.mustAC("agent", "stop", "carol")
			if a := m.agent("alice"); a.State != control.StateRunning || !strings.Contains(strings.Join(a.Notes, "; "), "frozen") {
				t.Errorf("status: %+v", a)
			}
			prompt.waits()
			if whole {
				command.waits()
			} else {
				// The supervisor goes on: commands run, and the host's change is sealed anew.
				command.says("sealed")
				config.says("")
				// A change that it makes for the agent halts and lets go on what nobody else halted.
				said := m.mustAC("agent", "exec", "alice", "--", "sh", "-c", "/run/agentconnect/guest git-config branch.topic.remote origin && git config branch.topic.remote")
				if said != "origin\n" {
					t.Errorf("a variable set for the agent: %q", said)
				}
			}
			if !m.stands(unit) {
				t.Error("somebody let it go on")
			}
			m.mustCTL("thaw", unit)
			prompt.says("thawed")
			if whole {
				command.says("sealed")
				config.says("")
			}
			m.until("the host's change is sealed", func() bool {
				return strings.Contains(m.mustAC("agent", "exec", "alice", "--", "sh", "-c", "git config user.name; echo x 2>/dev/null >>.git/config || echo sealed"), "after-"+strings.ReplaceAll(unit, `\`, "")+"\nsealed")
			})
			m.works("alice")
			if now := m.one("alice", commInside); now.pid != runtime.pid {
				t.Error("it was started anew")
			}
		})
	}
}

// stopTime is systemd's own bound for a stop, after which it kills; a halted process hears of
// nothing else.
const stopTime = 35 * time.Second

func TestFrozenAgentIsStoppedAndStartsAgain(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	for _, c := range []struct {
		unit string
		stop []string
	}{
		{"agentconnect-alice.slice", []string{"agentconnect", "agent", "stop", "alice"}},
		{"agentconnect-alice.slice", []string{"systemctl", "--user", "stop", "agent@alice"}},
		{scope("alice"), []string{"agentconnect", "agent", "stop", "alice"}},
	} {
		t.Run(c.unit+" "+c.stop[0], func(t *testing.T) {
			m.start("alice")
			m.mustAC("prompt", "alice", "fork stray")
			m.mustCTL("freeze", c.unit)
			began := time.Now()
			if r := m.run(c.stop...); r.code != 0 {
				// systemd 257 itself stops no frozen unit, and says so; the other hand thaws it first.
				if c.stop[0] != "systemctl" || !strings.Contains(r.err, "frozen") {
					t.Errorf("%q: exit code %d: %s%s", c.stop, r.code, r.out, r.err)
				}
				m.mustCTL("thaw", c.unit)
				m.must(c.stop...)
			}
			if took := time.Since(began); took > stopTime {
				t.Errorf("%q took %v", c.stop, took)
			}
			m.gone("alice")
			m.until("what it had started is gone", func() bool { return !strings.Contains(m.list(), "linger stray") })
			m.becomes("alice", control.StateStopped)
			m.start("alice")
			m.works("alice")
			m.mustAC("agent", "restart", "alice")
			m.works("alice")
		})
	}
}

// unfreeze looks for a way to the agent's own group, and to let it go on, from beside it: by
// the groups as they are shown, and as they can be mounted where namespaces may be made.
const unfreeze = `
exec 2>/dev/null
unfreeze() {
	for f in $(find "$1" -name cgroup.freeze); do
		(echo 0 >$f) && echo "wrote $f"
		[ "$(cat "${f%freeze}events" | grep frozen)" = "frozen 1" ] && echo "found $f"
	done
	for f in $(find "$1" -name cgroup.procs); do
		for pid in $(cat $f); do [ $pid = $$ ] || kill -CONT $pid; done
	done
}
unfreeze /sys/fs/cgroup
mkdir -p /tmp/cg
export -f unfreeze
unshare -UrmC bash -c 'mount -t cgroup2 none /tmp/cg && echo mounted; mkdir /tmp/cg/below && echo $$ >/tmp/cg/below/cgroup.procs && echo moved
unfreeze /tmp/cg; unshare -C bash -c "unfreeze /tmp/cg"; ls -d /tmp/cg/../*.scope'
`

// An operator's halt is not the agent's to end: not by a command beside it, nor by groups that
// it mounts itself.
func TestFrozenAgentIsLetGoOnByNothingInside(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("off", "--nesting", "off")
	m.add("on", "--nesting", "on")
	m.add("bob")
	m.start("off", "on", "bob")
	for _, id := range []string{"off", "on"} {
		m.mustCTL("freeze", scope(id))
		prompt := m.begin("agentconnect", "prompt", id, "echo thawed")
		said := m.mustAC("agent", "exec", id, "--", "bash", "-c", unfreeze+"true")
		if mounted := strings.Contains(said, "mounted\nmoved\n"); mounted != (id == "on") {
			t.Errorf("%s: it mounted the groups: %v: %s", id, mounted, said)
		}
		if strings.Contains(said, "found") || strings.Contains(said, ".scope") {
			t.Errorf("%s: it found the agent's group: %s", id, said)
		}
		if !m.stands(scope(id)) {
			t.Errorf("%s goes on", id)
		}
		prompt.waits()
		m.works("bob")
		// The control: outside the same user lets it go on by the same file.
		m.must("sh", "-c", `echo 0 >/sys/fs/cgroup"$1"/cgroup.freeze`, "sh", m.show(scope(id), "ControlGroup"))
		prompt.says("thawed")
		m.mustCTL("thaw", scope(id))
	}
}

// An agent may halt itself, where it may make namespaces. It is stopped all the same.
func TestAgentThatHaltsItselfIsStopped(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice", "--nesting", "on")
	m.start("alice")
	halted := m.begin("agentconnect", "agent", "exec", "alice", "--", "unshare", "-UrmC", "bash", "-c",
		`mkdir -p /tmp/cg; mount -t cgroup2 none /tmp/cg; mkdir /tmp/cg/below; echo $$ >/tmp/cg/below/cgroup.procs; exec unshare -C bash -c 'echo 1 >/tmp/cg/cgroup.freeze; echo went on'`)
	m.until("it stands still", func() bool {
		return slices.ContainsFunc(m.of("alice"), func(p process) bool {
			return strings.HasPrefix(filepath.Base(p.group), "agentconnect-exec-") && frozen(p.group+"/"+sandbox.CgroupBelow)
		})
	})
	halted.waits()
	m.works("alice")
	m.mustAC("agent", "stop", "alice")
	m.gone("alice")
	m.until("the command's scope is gone", func() bool { return !strings.Contains(strings.Join(m.units(), " "), "exec") })
}

// What the manager does to units leaves an agent in the group below its scope's, and nothing of
// that remains when the agent has ended.
func TestAgentStaysInTheGroupBelowItsScopes(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice", "--nesting", "on")
	m.start("alice")
	m.works("alice")
	runtime := m.one("alice", commInside)
	group := m.show(scope("alice"), "ControlGroup")
	for _, args := range [][]string{{"--version"}, {"daemon-reload"}, {"daemon-reexec"}, {"set-property", "--runtime", scope("alice"), "CPUWeight=50", "TasksMax=200"}, {"daemon-reload"}} {
		m.mustCTL(args...)
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", runtime.pid))
		if err != nil || !strings.HasSuffix(string(b), "0::"+group+"/"+sandbox.CgroupBelow+"\n") {
			t.Fatalf("after systemctl %q: %s%v", args, b, err)
		}
		m.works("alice")
	}
	m.mustCTL("stop", "agent@alice")
	m.gone("alice")
	m.until("its groups are gone", func() bool { _, err := os.Stat("/sys/fs/cgroup" + group); return os.IsNotExist(err) })
	// As they are when it is killed.
	m.start("alice")
	m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "agent@alice")
	m.until("it came up anew", func() bool { return m.show(service("alice"), "NRestarts") == "1" })
	m.works("alice")
}
