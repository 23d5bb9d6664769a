// What a person can do to an agent's units that is neither a start nor a stop.

package machinetest

import (
	"slices"
	"testing"
)

// Whatever else ends an agent, it comes back; what does not end it leaves it alone.
func TestWhatIsNoStopLeavesTheAgentWanted(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	m.works("alice")
	for _, c := range []struct {
		args  []string
		fresh bool // the supervisor is another one afterwards
	}{
		{[]string{"kill", "-s", "HUP", "--kill-who=main", service("alice")}, false},
		{[]string{"kill", "-s", "QUIT", "--kill-who=main", service("alice")}, true},
		{[]string{"stop", scope("alice")}, true},
		{[]string{"restart", "agentconnect-alice.slice"}, true},
		{[]string{"restart", "agentconnect.slice"}, true},
		{[]string{"try-restart", service("alice")}, true},
	} {
		m.ctl("reset-failed", service("alice"))
		before := m.show(service("alice"), "MainPID")
		m.mustCTL(c.args...)
		if c.fresh {
			m.until("a new supervisor", func() bool {
				now := m.show(service("alice"), "MainPID")
				return now != before && now != "0"
			})
		}
		m.works("alice")
		if now := m.show(service("alice"), "MainPID"); now != before && !c.fresh {
			t.Errorf("%q: the supervisor changed from %s to %s", c.args, before, now)
		}
		if !slices.Contains(m.wanted(), "alice") {
			t.Errorf("%q: alice is not wanted", c.args)
		}
	}
}
