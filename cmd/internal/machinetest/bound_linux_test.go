// Whatever is killed, nothing of an agent runs outside its scope or without its
// boundary, nothing is orphaned, and the next start works.

package machinetest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
)

func TestNothingOutlivesAKill(t *testing.T) {
	m := newMachine(t)
	m.slow = true // the bus is killed
	m.up()
	m.add("alice")
	m.add("bob")
	m.start("alice", "bob")
	killed := func(find func() process) func() {
		return func() {
			t.Helper()
			p := find()
			if err := p.signal(syscall.SIGKILL); err != nil {
				t.Fatalf("%s: %v", p, err)
			}
			m.until("the end of what was killed", func() bool { now, ok := look(p.pid); return !ok || now.comm != p.comm })
		}
	}
	named := func(comm string) func() process {
		return func() process { t.Helper(); return m.one("alice", comm) }
	}
	tree := func(depth int) func() process {
		return func() process {
			t.Helper()
			p := m.one("alice", "bwrap") // the outer one is the oldest
			for range depth {
				i := slices.IndexFunc(m.of("alice"), func(c process) bool { return c.ppid == p.pid })
				if i < 0 {
					t.Fatalf("nothing below %s", p)
				}
				p = m.of("alice")[i]
			}
			return p
		}
	}
	for _, c := range []struct {
		name  string
		do    func()
		fresh bool // alice has to come up anew
	}{
		{"the daemon", m.killDaemon, false},
		{"the supervisor", killed(named(commSupervisor)), true},
		{"bubblewrap outside", killed(tree(0)), true},
		{"the sandbox's first process", killed(tree(1)), true},
		{"the runtime", killed(tree(2)), true},
		{"the bus", func() { m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "dbus.service") }, false},
		{"daemon-reload", func() { m.mustCTL("daemon-reload") }, false},
		{"daemon-reexec", func() { m.mustCTL("daemon-reexec") }, false},
		{"stop of the slice", func() {
			m.mustCTL("stop", "agentconnect.slice")
			m.gone("alice")
			m.gone("bob")
			m.start("alice", "bob")
		}, true},
		{"the daemon again", m.killDaemon, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Failures of the machine's own are the outer test's.
			m.mustAC("agent", "restart", "alice") // a fresh count of starts
			m.works("alice")
			m.mustAC("prompt", "alice", "fork stray-"+strings.ReplaceAll(c.name, " ", "-"))
			before := m.show(service("alice"), "MainPID")
			looking := sample()
			c.do()
			if c.fresh {
				m.until("alice came up anew", func() bool {
					now := m.show(service("alice"), "MainPID")
					return now != "0" && now != before
				})
				m.until("what it had started is gone", func() bool { return !strings.Contains(m.list(), "linger stray") })
			}
			m.works("alice")
			m.works("bob")
			looking.end(t)
			if now := m.show(service("alice"), "MainPID"); !c.fresh && now != before {
				t.Errorf("the supervisor changed from %s to %s", before, now)
			}
			m.mustAC("agent", "stop", "alice")
			m.gone("alice")
			m.mustCTL("start", "agent@alice")
			m.works("alice")
		})
	}
}

func TestLauncherKilledDuringAStart(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	looking := sample()
	hits := 0
	for range 40 {
		done := make(chan result, 1)
		go func() { done <- m.ac("agent", "restart", "alice") }()
		hit := false
		for ended := false; !ended; {
			select {
			case r := <-done:
				ended = true
				if hit && r.code == 0 {
					// The restart that systemd makes came up before the answer was given.
					m.works("alice")
				}
			default:
			}
			for _, p := range processes() {
				if !hit && p.comm == commLauncher {
					hit = p.signal(syscall.SIGKILL) == nil
				}
			}
		}
		if hit {
			hits++
		}
		m.works("alice") // by itself
		if hits == 5 {
			break
		}
	}
	if hits == 0 {
		t.Error("no launcher was met")
	}
	looking.end(t)
	t.Logf("%d launchers killed", hits)
}

// clock is a runtime whose first act is to say where and when it runs.
const clock = `#!/bin/bash
echo $EPOCHREALTIME $(</proc/self/cgroup) >>%s
exec cat
`

// The launcher waits until it is in the scope: the runtime's first act happens there. In a
// sandbox the group's name is relative to where bubblewrap stood when it began: it says
// "/" only if that was the scope, too.
func TestRuntimeRunsNoInstructionOutsideItsScope(t *testing.T) {
	m := newMachine(t)
	m.up()
	for _, c := range []struct {
		id, want string
		flags    []string
	}{
		{"confined", "0::/", nil},
		{"free", "0::/user.slice/user-1000.slice/user@1000.service/agentconnect.slice/agentconnect-free.slice/agent-free.scope", []string{"--no-sandbox"}},
	} {
		work, bin := home+"/work-"+c.id, home+"/bin-"+c.id
		log := work + "/log"
		m.file(log, "", 0o644)
		m.file(bin+"/clock", strings.ReplaceAll(clock, "%s", log), 0o755)
		t.Cleanup(func() { os.RemoveAll(work); os.RemoveAll(bin) })
		m.add(c.id, append(c.flags, "--command", bin+"/clock", "--workspace", work)...)
		const starts = 100
		for i := range starts {
			m.mustAC("agent", "restart", c.id)
			var lines []string
			m.until("the runtime said where it is", func() bool {
				b, err := os.ReadFile(log)
				lines = slices.Collect(strings.Lines(string(b)))
				return err == nil && len(lines) == i+1 && strings.HasSuffix(lines[i], "\n")
			})
			if f := strings.Fields(lines[i]); f[len(f)-1] != c.want {
				t.Fatalf("start %d of %s: it ran in %s", i, c.id, f[len(f)-1])
			}
			for _, p := range m.of(c.id) {
				if (p.comm == "cat" || p.comm == "bwrap") && filepath.Base(p.group) != scope(c.id) {
					t.Fatalf("start %d: %s", i, p)
				}
			}
		}
		m.mustAC("agent", "stop", c.id)
		m.gone(c.id)
	}
}

func TestRestartStormEndsAsFailed(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice", "--command", "/usr/bin/false")
	m.ac("agent", "start", "alice")
	m.becomes("alice", control.StateFailed)
	if a := m.agent("alice"); !strings.HasPrefix(a.Reason, "it ended too often") || !strings.Contains(a.Reason, "exit status 1") {
		t.Errorf("the reason: %q", a.Reason)
	}
	n := m.show(service("alice"), "NRestarts")
	if n == "0" || len(n) > 1 {
		t.Errorf("%s restarts", n)
	}
	m.gone("alice")
	// A failed one is started by hand as any other.
	m.mustAC("agent", "edit", "alice", "--runtime", "selftest")
	m.start("alice")
	m.works("alice")
}

// Many wishes at once, from both hands: one runtime, no stale unit, the last wish wins.
func TestRacingWishes(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	start, stop, restart := []string{"agentconnect", "agent", "start", "alice"}, []string{"agentconnect", "agent", "stop", "alice"}, []string{"agentconnect", "agent", "restart", "alice"}
	cstart, cstop, crestart := []string{"systemctl", "--user", "start", "agent@alice"}, []string{"systemctl", "--user", "stop", "agent@alice"}, []string{"systemctl", "--user", "restart", "agent@alice"}
	looking := sample()
	for _, c := range []struct {
		name        string
		running     bool // before
		first, last []string
		run         bool // afterwards
	}{
		{"stop in the middle of a start", false, start, stop, false},
		{"start in the middle of a stop", true, stop, start, true},
		{"two starts", false, start, start, true},
		{"restart while the old one ends", true, stop, restart, true},
		{"two restarts", true, restart, restart, true},
		{"systemctl stop in the middle of a start", false, start, cstop, false},
		{"systemctl start in the middle of a stop", true, stop, cstart, true},
		{"start in the middle of a systemctl stop", true, cstop, start, true},
		{"stop in the middle of a systemctl start", false, cstart, stop, false},
		{"systemctl restart and restart", true, crestart, restart, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			for i := range 5 {
				if c.running {
					m.mustAC("agent", "restart", "alice")
				} else {
					m.mustAC("agent", "restart", "alice") // so that the units are loaded, with a fresh count
					m.mustAC("agent", "stop", "alice")
				}
				before := m.show(service("alice"), "StateChangeTimestampMonotonic")
				var wg sync.WaitGroup
				begun := make(chan struct{})
				wg.Go(func() { defer close(begun); m.run(c.first...) })
				ordered := i >= 3
				if ordered {
					// Only what has begun to take effect is surely the first of the two.
					m.until("the first takes effect", func() bool {
						select {
						case <-begun:
							return true
						default:
							return m.show(service("alice"), "StateChangeTimestampMonotonic") != before
						}
					})
				} else {
					time.Sleep(time.Duration(i) * 8 * time.Millisecond) //nolint:forbidigo // somewhere within the first
				}
				m.run(c.last...)
				wg.Wait()
				if ordered {
					m.becomes("alice", map[bool]string{true: control.StateRunning, false: control.StateStopped}[c.run])
				} else {
					m.until("it is settled", func() bool {
						s := m.agent("alice").State
						return s == control.StateRunning && m.show(service("alice"), "ActiveState") == "active" || s == control.StateStopped && m.show(service("alice"), "ActiveState") == "inactive"
					})
				}
				if m.agent("alice").State == control.StateRunning {
					m.works("alice")
				} else {
					m.gone("alice")
				}
				if t.Failed() || m.t.Failed() {
					t.FailNow()
				}
			}
		})
	}
	looking.end(t)
}

// The bus goes away while an agent stops: the stop needs none.
func TestBusGoesAwayDuringAStop(t *testing.T) {
	m := newMachine(t)
	m.slow = true
	m.up()
	m.add("alice")
	for range 3 {
		m.mustAC("agent", "restart", "alice")
		// A runtime that does not end with its stdin, nor soon.
		e := m.attach("alice")
		e.ask("sleep 60")
		supervisor := m.one("alice", commSupervisor)
		began := time.Now()
		if err := supervisor.signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "dbus.service")
		m.gone("alice")
		if d := time.Since(began); d > 20*time.Second {
			t.Errorf("the stop took %v", d)
		}
		m.becomes("alice", control.StateStopped)
	}
	m.start("alice")
	m.works("alice")
}

// A daemon that its manager started waits for the manager instead of doing without: it
// would be a second hand on the agents.
func TestDaemonInItsUnitWaitsForTheBus(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	pid := m.show(service("alice"), "MainPID")
	bus, aside := "/run/user/1000/bus", "/run/user/1000/bus.aside"
	t.Cleanup(func() { os.Rename(aside, bus) })
	if err := os.Rename(bus, aside); err != nil {
		t.Fatal(err)
	}
	m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "agentconnect.service")
	m.until("the daemon is started again", func() bool {
		return m.show("agentconnect.service", "NRestarts") == "1" && m.show("agentconnect.service", "ActiveState") == "activating"
	})
	time.Sleep(time.Second) //nolint:forbidigo // long enough for a daemon that would do without
	if s := m.status(); s.State == control.StateRunning {
		t.Errorf("it runs, with supervision %s: %s", s.Supervisor, s.SupervisorNote)
	}
	if err := os.Rename(aside, bus); err != nil {
		t.Fatal(err)
	}
	m.until("the daemon is up", func() bool { return m.status().State == control.StateRunning })
	m.works("alice")
	if s := m.status(); s.Supervisor != "systemd" {
		t.Errorf("supervision %s", s.Supervisor)
	}
	if now := m.show(service("alice"), "MainPID"); now != pid {
		t.Error("the agent was restarted")
	}
}

// No runtime ends because the thread that started it does: here all threads of its parent
// end, while the manager, which then ends the scope, is halted.
func TestRuntimeDoesNotDieOfItsParentsThread(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice", "--command", "/usr/bin/sleep", "--arg", "300") // unmoved by the end of its stdin
	m.start("alice")
	supervisor := m.one("alice", commSupervisor)
	alive := func() bool {
		return slices.ContainsFunc(m.of("alice"), func(p process) bool { return p.cmdline == "/usr/bin/sleep 300" })
	}
	m.until("the runtime runs", alive)
	goOn := m.haltManager()
	defer goOn()
	if err := supervisor.signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	m.until("the supervisor is dead", func() bool { _, ok := look(supervisor.pid); return !ok })
	// A death signal is sent as the thread ends, before its process is dead.
	for range 20 {
		if !alive() {
			t.Fatalf("the runtime died of its parent:\n%s", m.list())
		}
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // time for the signal to do its work
	}
	m.sound()
	goOn()
	m.until("another supervisor", func() bool {
		now := m.show(service("alice"), "MainPID")
		return now != "0" && now != fmt.Sprint(supervisor.pid)
	})
	m.becomes("alice", control.StateRunning)
	m.mustAC("agent", "stop", "alice")
	m.gone("alice")
}

// What leaves the runtime's process group and session stays in its scope, and ends with it.
func TestWhatLeavesGroupAndSessionEndsWithTheScope(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("confined")
	m.add("free", "--no-sandbox")
	m.free = []string{"free"}
	for _, id := range []string{"confined", "free"} {
		for _, c := range []struct {
			name string
			end  func()
			runs bool // by itself
		}{
			{"stop", func() { m.mustAC("agent", "stop", id) }, false},
			{"systemctl stop", func() { m.mustCTL("stop", "agent@"+id) }, false},
			{"kill of the supervisor", func() { m.mustCTL("kill", "-s", "KILL", "agent@"+id) }, true},
			{"end of the runtime", func() { m.ac("prompt", id, "exit 1") }, true},
		} {
			m.mustAC("agent", "restart", id)
			m.works(id)
			for range 3 {
				m.mustAC("prompt", id, "fork stray")
			}
			strays := func() (out []process) {
				for _, p := range processes() {
					if strings.Contains(p.cmdline, "linger stray") {
						out = append(out, p)
					}
				}
				return out
			}
			for _, p := range strays() {
				if filepath.Base(p.group) != scope(id) {
					t.Errorf("%s: %s of %s", id, p, c.name)
				}
			}
			if n := len(strays()); n != 3 {
				t.Fatalf("%s: %d processes have left, want 3:\n%s", id, n, m.list())
			}
			before := m.show(service(id), "MainPID")
			c.end()
			m.until(c.name+": the end of what had left", func() bool { return len(strays()) == 0 })
			if !c.runs {
				m.gone(id)
				continue
			}
			m.until(c.name+": it runs anew", func() bool {
				now := m.show(service(id), "MainPID")
				return now != "0" && now != before
			})
			m.becomes(id, control.StateRunning)
		}
		m.mustAC("agent", "stop", id)
	}
}

// Whatever a runtime prints in place of frames is logged under the agent's unit, or is the
// end with a reason, and the next start works.
func TestRuntimeThatPrintsOtherThingsOnItsStdout(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	for _, junk := range []string{"banner", "escape", "half"} {
		m.mustAC("prompt", "alice", "junk "+junk)
	}
	m.works("alice")
	m.logged("Welcome to the self-test agent!", "-u", service("alice"))
	if log := m.journal("AGENT_ID=alice"); strings.Contains(log, "\x1b") {
		t.Errorf("an escape sequence is in the log: %q", log)
	}
	before := m.show(service("alice"), "MainPID")
	if r := m.ac("prompt", "alice", "junk mb 100"); r.code == 0 || !strings.Contains(r.out+r.err, "64 MiB") {
		t.Errorf("100 MB without a newline: exit code %d: %s%s", r.code, r.out, r.err)
	}
	m.until("it runs anew", func() bool {
		now := m.show(service("alice"), "MainPID")
		return now != "0" && now != before
	})
	m.logged("64 MiB", "-u", service("alice"))
	m.works("alice")
}
