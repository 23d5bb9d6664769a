// A person's word that comes while the daemon, the manager or the bus is elsewhere.

package machinetest

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/units"
)

// staysStopped checks that an agent is stopped, and that the daemon took that for a person's wish.
func (m *machine) staysStopped(id string) {
	m.t.Helper()
	m.until("the stop of "+id+" is remembered", func() bool {
		return !slices.Contains(m.wanted(), id) && m.agent(id).State == control.StateStopped
	})
	m.gone(id)
}

// A start may wait for its turn, as behind a probe, and be stopped before anything ran.
func TestStopByHandOfAStartThatWaits(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	m.works("alice")
	m.mustAC("agent", "stop", "alice")
	drop := dropins + "/agentconnect-probe.service.d/slow.conf"
	m.file(drop, "[Service]\nExecReload=/bin/sleep 3\n", 0o644)
	m.mustCTL("daemon-reload")
	m.mustCTL("reload", "--no-block", units.Probe)
	start := m.begin("agentconnect", "agent", "start", "alice")
	m.until("its start waits", func() bool { return m.show(service("alice"), "Job") != "" && m.show(service("alice"), "Job") != "0" })
	start.waits()
	m.mustCTL("stop", service("alice"))
	<-start.ended
	m.staysStopped("alice")
	m.mustAC("restart")
	m.staysStopped("alice")
	m.start("alice")
	m.works("alice")
}

// A restart may wait between its stop and its start; that is no wish to be remembered, and a
// daemon that dies meanwhile leaves the agent wanted.
func TestRestartByHandThatWaits(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	m.works("alice")
	drop := dropins + "/agentconnect-probe.service.d/slow.conf"
	m.file(drop, "[Service]\nExecReload=/bin/sleep 4\n", 0o644)
	m.mustCTL("daemon-reload")
	for _, last := range []string{"start", "stop"} {
		m.mustCTL("reload", "--no-block", units.Probe)
		m.mustCTL("restart", "--no-block", service("alice"))
		m.until("its start waits", func() bool { return m.show(service("alice"), "ActiveState") == "inactive" })
		if last == "stop" {
			m.mustCTL("stop", service("alice"))
			m.staysStopped("alice")
			continue
		}
		// The daemon looks at the agent more than once before the start has its turn.
		m.until("the start has its turn", func() bool {
			if !slices.Contains(m.wanted(), "alice") {
				t.Fatal("a restart is taken for a stop")
			}
			return m.show(service("alice"), "ActiveState") != "inactive"
		})
		m.works("alice")
	}
	// It goes on for a start that was given up, and cannot be stopped by hand.
	m.until("the probe is done", func() bool { return m.show(units.Probe, "ActiveState") != "reloading" })
}

// A stop may take a while, and a daemon may come up meanwhile.
func TestStopByHandThatANewDaemonFindsUnderWay(t *testing.T) {
	m := newMachine(t)
	m.up()
	// Without a boundary, for else the probe of the daemon that comes up waits for the stop.
	m.add("alice", "--no-sandbox", "--command", "/bin/sh", "--arg", "-c", "--arg", "trap '' TERM; while :; do sleep 1; done")
	m.free = []string{"alice"}
	for _, unit := range []string{service("alice"), "agentconnect-alice.slice"} {
		m.start("alice")
		m.becomes("alice", control.StateRunning)
		m.mustCTL("stop", "agentconnect.service")
		m.mustCTL("stop", "--no-block", unit)
		m.until("it stops", func() bool { return m.show(service("alice"), "ActiveState") == "deactivating" })
		m.until("somebody wrote it down", func() bool {
			list, _ := os.ReadDir(root + "/state/stopped")
			return len(list) > 0
		})
		m.up()
		m.until("the stop is over", func() bool { return len(m.of("alice")) == 0 })
		m.staysStopped("alice")
		m.mustAC("restart")
		m.staysStopped("alice")
	}
}

// With no daemon, a stop may come before the supervisor can write it down.
func TestStopByHandInTheMiddleOfAStartWithoutADaemon(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	service := units.ServiceName("alice")
	for i := range 10 {
		m.start("alice")
		m.works("alice")
		m.mustCTL("stop", "agentconnect.service")
		// Its spec is kept over the restart, which needs no daemon.
		m.run("sh", "-c", fmt.Sprintf("systemctl --user kill -s KILL --kill-who=main '%[1]s'; while [ \"$(systemctl --user show --value -p SubState '%[1]s')\" != start ]; do :; done; sleep 0.%03[2]d; systemctl --user stop '%[1]s'", service, 3*i))
		m.up()
		m.staysStopped("alice")
	}
}

// A start that the manager does not hear of leaves no unit that says why: the daemon does.
func TestStartThatTheManagerDoesNotTakeSaysWhy(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	goOn := m.haltManager()
	defer goOn()
	m.fails(m.ac("agent", "start", "alice"), 1)
	goOn()
	if a := m.agent("alice"); a.State != control.StateFailed || !strings.Contains(a.Reason, "does not answer") {
		t.Errorf("after a start that failed alice is %s: %q", a.State, a.Reason)
	}
	m.start("alice")
	m.works("alice")
	m.mustCTL("stop", service("alice"))
	m.staysStopped("alice")
	if a := m.agent("alice"); a.Reason != "" {
		t.Errorf("after a stop alice is %s: %q", a.State, a.Reason)
	}
}
