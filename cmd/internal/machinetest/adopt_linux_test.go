// Agents outlive their daemon, and the next one takes them over.

package machinetest

import (
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// An editor in the middle of a turn notices nothing of what happens to the daemon, the
// manager and the bus.
func TestClientLosesNoFrame(t *testing.T) {
	m := newMachine(t)
	m.slow = true // the bus is killed
	m.up()
	m.add("alice")
	m.start("alice")
	before := m.show(service("alice"), "MainPID")
	e := m.attach("alice")
	text := strings.Repeat("0123456789abcdef", 1<<10)
	for _, c := range []struct {
		name string
		do   func()
	}{
		{"restart", func() { m.mustAC("restart") }},
		{"kill of the daemon", m.killDaemon},
		{"daemon-reexec", func() { m.mustCTL("daemon-reexec") }},
		{"daemon-reload", func() { m.mustCTL("daemon-reload") }},
		{"kill of the bus", func() { m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "dbus.service") }},
	} {
		// One turn that begins before and ends after, and many while it happens.
		began := e.ask("sleep 3")
		other := m.attach("alice")
		done := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() { defer close(done); c.do() })
		for turns := 0; ; turns++ {
			other.answer(other.ask("echo "+text), text)
			select {
			case <-done:
			default:
				if turns < 1000 && !t.Failed() {
					continue
				}
			}
			t.Logf("%s: %d turns meanwhile", c.name, turns+1)
			break
		}
		wg.Wait()
		e.answer(began, "slept 3 s")
	}
	m.works("alice")
	if now := m.show(service("alice"), "MainPID"); now != before {
		t.Errorf("the supervisor changed from %s to %s", before, now)
	}
	a := m.agent("alice")
	if a.Clients < 1 {
		t.Errorf("the adopting daemon sees %d clients", a.Clients)
	}
}

func TestRequiredModeStopsAgentsWithoutBoundary(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("free", "--no-sandbox")
	m.free = []string{"free"}
	m.add("alice")
	m.start("free", "alice")
	m.becomes("free", control.StateRunning)
	confined := m.show(service("alice"), "MainPID")
	required := `{"security":{"requireSandbox":true}}`
	// Turned on while no daemon looks: the next one finds the agent running.
	m.mustCTL("stop", "agentconnect.service")
	m.file(root+"/config.json", required, 0o600)
	m.up()
	m.gone("free")
	m.until("status says why", func() bool {
		a := m.agent("free")
		return a.State == control.StateRefused && strings.Contains(a.Reason, "required")
	})
	m.works("alice")
	if now := m.show(service("alice"), "MainPID"); now != confined {
		t.Error("the sandboxed agent was restarted")
	}
	m.fails(m.ac("agent", "start", "free"), 69, "required")
	m.logged("free", "-u", "agentconnect.service")
	m.fails(m.ctl("start", "agent@free"), 1)
	m.gone("free")
	// Off and on again under the daemon's eyes.
	m.file(root+"/config.json", `{}`, 0o600)
	m.mustAC("restart")
	m.start("free")
	m.becomes("free", control.StateRunning)
	m.file(root+"/config.json", required, 0o600)
	m.mustAC("restart")
	m.gone("free")
	m.works("alice")
}

func TestAgentsOfAnOlderBuildAreNamed(t *testing.T) {
	m := newMachine(t)
	drop := dropins + "/agentconnect.service.d/older.conf"
	m.file(drop, "[Service]\nEnvironment=AGENTCONNECT_LIBEXEC=/usr/libexec/agentconnect-older\n", 0o644)
	m.mustCTL("daemon-reload")
	m.up()
	m.add("alice")
	m.add("bob")
	m.start("alice")
	if err := os.Remove(drop); err != nil {
		t.Fatal(err)
	}
	m.mustCTL("daemon-reload")
	m.mustAC("restart") // what an update does
	m.start("bob")
	m.works("alice")
	if a, b := m.agent("alice"), m.agent("bob"); a.Build != "old" || b.Build != "" {
		t.Errorf("builds that differ: alice %q, bob %q", a.Build, b.Build)
	}
	m.fails(m.ac("status"), 0, "still runs the older build old", "agentconnect agent restart alice")
	m.mustAC("agent", "restart", "alice")
	if a := m.agent("alice"); a.Build != "" {
		t.Errorf("after the restart it still runs build %q", a.Build)
	}
}

func TestSupervisorWithoutDaemonOrSpecStartsNothing(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	m.mustCTL("stop", "agentconnect.service")
	m.mustCTL("stop", "agent@alice")
	m.fails(m.ctl("start", "agent@alice"), 1)
	if code := m.show(service("alice"), "ExecMainStatus"); code != "75" {
		t.Errorf("exit status %s", code)
	}
	m.logged("start the daemon with `agentconnect up`", "-u", service("alice"))
	m.gone("alice")
	if n := m.show(service("alice"), "NRestarts"); n != "0" {
		t.Errorf("%s restarts", n)
	}
	m.up()
	m.start("alice")
	m.works("alice")
	// With the spec kept, a crash is over without a daemon.
	m.mustCTL("stop", "agentconnect.service")
	m.mustCTL("kill", "-s", "KILL", "agent@alice")
	m.until("it is back", func() bool {
		return m.show(service("alice"), "NRestarts") == "1" && m.show(service("alice"), "ActiveState") == "active"
	})
	m.sound()
	m.up()
	m.works("alice")
	if !slices.Contains(m.wanted(), "alice") {
		t.Error("alice is not wanted any more")
	}
}

// A daemon that dies over a stop leaves it to the next.
func TestStopOutlivesTheDaemonThatWasToDoIt(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.add("bob")
	m.start("alice", "bob")
	m.mustCTL("stop", "agentconnect.service")
	m.file(root+"/state/wanted.json", `{"agents":["bob"]}`, 0o600)
	m.up()
	m.becomes("alice", control.StateStopped)
	m.works("bob")
	// Without any list, what runs goes on.
	m.start("alice")
	m.mustCTL("stop", "agentconnect.service")
	if err := os.Remove(root + "/state/wanted.json"); err != nil {
		t.Fatal(err)
	}
	m.up()
	m.works("alice")
	m.works("bob")
	if w := m.wanted(); !slices.Equal(w, []string{"alice", "bob"}) {
		t.Errorf("wanted: %q", w)
	}
}
