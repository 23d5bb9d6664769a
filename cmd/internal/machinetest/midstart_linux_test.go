// A person's systemctl between two moments of a start.

package machinetest

import (
	"fmt"
	"slices"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/units"
)

// A stop is the last word at whatever moment of a start it comes: also before the supervisor can
// say that it was stopped.
func TestStopByHandInTheMiddleOfAStart(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	m.works("alice")
	service := units.ServiceName("alice")
	m.mustCTL("stop", service)
	m.becomes("alice", control.StateStopped)
	m.until("the stop is remembered", func() bool { return !slices.Contains(m.wanted(), "alice") })
	for i := range 30 {
		// In one shell: what lies between is the moment.
		m.run("sh", "-c", fmt.Sprintf("systemctl --user reset-failed '%[1]s'; systemctl --user start --no-block '%[1]s'; sleep 0.%03[2]d; systemctl --user stop '%[1]s'", service, 2*i))
		m.until(fmt.Sprintf("the stop %d ms after the start is remembered", 2*i), func() bool {
			return !slices.Contains(m.wanted(), "alice") && m.agent("alice").State == control.StateStopped
		})
	}
	m.mustCTL("start", service)
	m.works("alice")
	if !slices.Contains(m.wanted(), "alice") {
		t.Error("a start by hand is not remembered")
	}
}

// A person may stop an agent while the manager waits to start it again.
func TestStopByHandBetweenAnEndAndTheNextStart(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	service := units.ServiceName("alice")
	for _, end := range []string{
		fmt.Sprintf("systemctl --user kill -s KILL --kill-who=main '%s'", service),
		fmt.Sprintf("systemctl --user kill -s KILL '%s'", units.ScopeName("alice")), // the runtime
	} {
		m.start("alice")
		m.works("alice")
		m.run("sh", "-c", end)
		m.until("the manager waits", func() bool { return m.show(service, "SubState") == "auto-restart" })
		m.mustCTL("stop", service)
		m.until("the stop is remembered", func() bool {
			return !slices.Contains(m.wanted(), "alice") && m.agent("alice").State == control.StateStopped
		})
	}
}
