// Lifecycle by either hand: systemctl and agentconnect.

package machinetest

import (
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
)

func TestStartedAndStoppedByEitherHand(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	byAC := func(verb string) func() { return func() { t.Helper(); m.mustAC("agent", verb, "alice") } }
	byCTL := func(args ...string) func() {
		return func() { t.Helper(); m.mustCTL(append(args, service("alice"))...) }
	}
	manager := func(verb string) func() { return func() { t.Helper(); m.mustCTL(verb) } }
	type step struct {
		name  string
		do    func()
		state string
		fresh bool // the supervisor is another one afterwards
	}
	run, stopped := control.StateRunning, control.StateStopped
	for _, steps := range [][]step{{
		{"agentconnect start", byAC("start"), run, true},
		{"systemctl stop", byCTL("stop"), stopped, false},
		{"systemctl start", byCTL("start"), run, true},
		{"agentconnect stop", byAC("stop"), stopped, false},
		{"systemctl restart of a stopped agent", byCTL("restart"), run, true},
		{"agentconnect start of a running agent", byAC("start"), run, false},
		{"systemctl start of a running agent", byCTL("start"), run, false},
	}, {
		{"agentconnect restart", byAC("restart"), run, true},
		{"systemctl restart", byCTL("restart"), run, true},
		{"systemctl kill", byCTL("kill"), stopped, false},
		{"agentconnect restart of a stopped agent", byAC("restart"), run, true},
		{"systemctl kill -s KILL", byCTL("kill", "-s", "KILL"), run, true},
	}, {
		{"agentconnect restart", byAC("restart"), run, true},
		{"daemon-reload", manager("daemon-reload"), run, false},
		{"systemctl stop", byCTL("stop"), stopped, false},
		{"daemon-reload of a stopped agent", manager("daemon-reload"), stopped, false},
		{"systemctl start", byCTL("start"), run, true},
		{"daemon-reexec", manager("daemon-reexec"), run, false},
		{"systemctl stop", byCTL("stop"), stopped, false},
		{"daemon-reexec of a stopped agent", manager("daemon-reexec"), stopped, false},
		{"systemctl start", byCTL("start"), run, true},
		{"agentconnect stop", byAC("stop"), stopped, false},
		{"daemon-reexec of a stopped agent", manager("daemon-reexec"), stopped, false},
		{"agentconnect start", byAC("start"), run, true},
	}} {
		for _, s := range steps {
			before := m.show(service("alice"), "MainPID")
			s.do()
			if s.fresh {
				m.until(s.name+": a new supervisor", func() bool {
					now := m.show(service("alice"), "MainPID")
					return now != before && now != "0"
				})
			}
			m.becomes("alice", s.state)
			if s.state == run {
				m.works("alice")
			} else {
				m.gone("alice")
			}
			if now := m.show(service("alice"), "MainPID"); s.state == run && !s.fresh && now != before {
				t.Errorf("%s: the supervisor changed from %s to %s", s.name, before, now)
			}
			m.until(s.name+": the daemon remembers it", func() bool { return slices.Contains(m.wanted(), "alice") == (s.state == run) })
			if load := m.show(service("alice"), "LoadState"); load != "loaded" {
				t.Errorf("%s: the service is %s", s.name, load)
			}
			if t.Failed() {
				t.Fatalf("after: %s", s.name)
			}
		}
	}
	r := m.ctl("status", "--no-pager", "agent@alice")
	m.fails(r, 0, "Status: \"sandboxed · 0 clients · network open", "agentconnect-alice.slice")
	m.mustCTL("stop", "agent@alice")
	m.fails(m.ctl("status", "--no-pager", "agent@alice"), 3, "inactive (dead)", "AgentConnect agent alice")
}

func TestStopByAPersonIsRemembered(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.add("bob")
	stays := func(after string) {
		t.Helper()
		m.works("bob")
		m.becomes("alice", control.StateStopped)
		if w := m.wanted(); !slices.Equal(w, []string{"bob"}) {
			t.Errorf("wanted after %s: %q", after, w)
		}
		m.gone("alice")
	}
	m.start("alice", "bob")
	m.mustCTL("stop", "agent@alice")
	m.until("the daemon remembers the stop", func() bool { return slices.Equal(m.wanted(), []string{"bob"}) })
	m.mustAC("restart")
	stays("restart of the daemon")
	m.killDaemon()
	stays("kill of the daemon")

	// Stopped while no daemon looks.
	m.start("alice")
	m.mustCTL("stop", "agentconnect.service")
	m.mustCTL("stop", "agent@alice")
	m.up()
	stays("a stop while the daemon was down")

	// Started by hand it is wanted again.
	m.mustCTL("start", "agent@alice")
	m.until("alice is wanted again", func() bool { return slices.Contains(m.wanted(), "alice") })
	m.mustAC("down")
	m.gone("alice")
	m.gone("bob")
	if left := m.units(); len(left) > 0 {
		t.Errorf("units after down: %q", left)
	}
	m.up()
	m.works("alice")
	m.works("bob")
}

// With no daemon to see it, a stop is remembered by the supervisor that was stopped, however
// much of the units went with it.
func TestStopWithoutADaemonIsRemembered(t *testing.T) {
	m := newMachine(t)
	m.up()
	ids := []string{"alice", "b-c"}
	for _, id := range ids {
		m.add(id)
	}
	for _, stop := range [][]string{
		{"agentconnect.slice"},
		{"agentconnect-alice.slice", `agentconnect-b\x2dc.slice`},
		{"agent@alice", "agent@b-c"},
	} {
		m.start(ids...)
		m.mustCTL("stop", "agentconnect.service")
		m.mustCTL(append([]string{"stop"}, stop...)...)
		for _, id := range ids {
			m.gone(id)
		}
		m.up()
		m.until("the daemon remembers it", func() bool { return len(m.wanted()) == 0 })
		for _, id := range ids {
			m.becomes(id, control.StateStopped)
			m.gone(id)
		}
		if t.Failed() {
			t.Fatalf("after a stop of %q", stop)
		}
	}
	if left, err := os.ReadDir(root + "/state/stopped"); err != nil || len(left) > 0 {
		t.Errorf("stops remembered for too long: %v, %v", left, err)
	}
	// It is remembered until somebody starts it.
	m.start(ids...)
	m.mustCTL("stop", "agentconnect.service")
	m.ctl("restart", "agent@alice")
	m.up()
	m.works("alice")
	m.works("b-c")
	// No bus, no word on who stops it: that is in time, and taken for nobody's wish. The units
	// that stay in place still say that it was one.
	m.mustCTL("stop", "agentconnect.service")
	bus, aside := "/run/user/1000/bus", "/run/user/1000/bus.aside"
	t.Cleanup(func() { os.Rename(aside, bus) })
	if err := os.Rename(bus, aside); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := m.one("alice", commSupervisor).signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	m.gone("alice")
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("the stop took %v", d)
	}
	if left, err := os.ReadDir(root + "/state/stopped"); err != nil || len(left) > 0 {
		t.Errorf("remembered without a word from the manager: %v, %v", left, err)
	}
	if err := os.Rename(aside, bus); err != nil {
		t.Fatal(err)
	}
	m.up()
	m.becomes("alice", control.StateStopped)
	m.works("b-c")
}

// A stop that a start follows at once is no wish to be remembered.
func TestRestartByAPersonKeepsTheAgentWanted(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	for range 40 {
		m.ctl("reset-failed", "agent@alice") // systemd counts starts by hand, too
		m.mustCTL("restart", "agent@alice")
		m.becomes("alice", control.StateRunning)
		m.until("alice is wanted", func() bool { return slices.Contains(m.wanted(), "alice") })
	}
}

func TestStoppedSliceStopsAllAgents(t *testing.T) {
	m := newMachine(t)
	m.up()
	ids := []string{"a", "b-c", "d"}
	for _, id := range ids {
		m.add(id)
	}
	m.start(ids...)
	m.mustCTL("stop", "agentconnect.slice")
	for _, id := range ids {
		m.gone(id)
		m.until(id+" is stopped", func() bool { return m.agent(id).State == control.StateStopped })
	}
	m.until("the daemon remembers the stop", func() bool { return len(m.wanted()) == 0 })
	m.mustAC("restart")
	if w := m.wanted(); len(w) != 0 {
		t.Errorf("wanted: %q", w)
	}
	for _, id := range ids {
		m.start(id)
		m.works(id)
	}
	// One agent's slice alone.
	m.mustCTL("stop", `agentconnect-b\x2dc.slice`)
	m.gone("b-c")
	m.until("the daemon remembers the stop", func() bool { return !slices.Contains(m.wanted(), "b-c") })
	m.works("a")
	m.start("b-c")
	m.works("b-c")
}

func TestUnitsHaveTheAgentsNameWhateverItIs(t *testing.T) {
	m := newMachine(t)
	m.up()
	ids := []string{"my-bot", "a_b", "0day", "9-_-", strings.Repeat("x", 63), "a" + strings.Repeat("-", 62), "exec-my-bot-1"}
	for _, id := range ids {
		m.add(id)
		m.start(id)
		m.works(id)
		if out := m.mustAC("agent", "exec", id, "--", "echo", "inside"); out != "inside\n" {
			t.Errorf("%s: exec says %q", id, out)
		}
	}
	m.mustCTL("daemon-reload")
	for _, id := range ids {
		m.mustCTL("stop", "agent@"+id)
		m.becomes(id, control.StateStopped)
		m.mustCTL("start", "agent@"+id)
		m.works(id)
	}
	for _, id := range []string{"../x", "a@b", "x.service", "A", "-a", "ü", strings.Repeat("x", 64), ""} {
		m.fails(m.ac("agent", "add", "--runtime", "selftest", "--", id), 2)
	}
	for _, id := range ids {
		m.mustAC("agent", "rm", "--purge", id)
	}
	m.until("no unit is left", func() bool { return len(m.units()) == 0 })
}

func TestLeftOverScopeDoesNotHinderAStart(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	failed := func() {
		t.Helper()
		m.ctl("reset-failed", scope("alice"))
		m.run("systemd-run", "--user", "--scope", "--quiet", "--unit="+scope("alice"), "-p", "RuntimeMaxSec=100ms", "-p", "TimeoutStopSec=200ms",
			"sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
		m.until("the scope is left over as failed", func() bool { return m.show(scope("alice"), "ActiveState") == "failed" })
	}
	failed()
	m.start("alice")
	m.works("alice")
	m.mustCTL("stop", "agent@alice")
	failed()
	m.mustCTL("start", "agent@alice")
	m.works("alice")
	m.mustAC("agent", "stop", "alice")
	// One that somebody's process is in is no agent's either.
	r := m.run("systemd-run", "--user", "--scope", "--quiet", "--unit="+scope("alice"), "sh", "-c", "sleep 300 >/dev/null 2>&1 & exit 0")
	m.fails(r, 0)
	m.start("alice")
	m.works("alice")
	m.until("the stranger is gone", func() bool { return !strings.Contains(m.list(), "sleep 300") })
}

func TestRemovedAgentLeavesNoUnit(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.add("bob")
	m.start("alice", "bob")
	m.mustAC("agent", "rm", "--purge", "alice")
	m.gone("alice")
	m.until("alice's units are gone", func() bool { return !strings.Contains(strings.Join(m.units(), " "), "alice") })
	m.works("bob")
	// Removed while no daemon looks: one that runs, one that does not.
	m.add("carol")
	m.start("carol")
	m.mustCTL("stop", "agent@carol")
	m.mustCTL("stop", "agentconnect.service")
	m.mustAC("agent", "rm", "--purge", "bob")
	m.mustAC("agent", "rm", "--purge", "carol")
	m.up()
	m.gone("bob")
	m.until("their units are gone", func() bool { return len(m.units()) == 0 })
	if w := m.wanted(); len(w) > 0 {
		t.Errorf("wanted: %q", w)
	}
}
