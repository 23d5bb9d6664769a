// A session that ends at an odd moment.

package machinetest

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"agentconnect.md/sandbox/units"
)

// The end of a session is nobody's wish, also not of an agent that is about to start.
func TestRootSessionEndsInTheMiddleOfStarts(t *testing.T) {
	m := newRootMachine(t)
	m.up()
	ids := []string{"a", "b", "c", "d", "e", "f"}
	for _, id := range ids {
		m.add(id)
	}
	drop := dropins + "/agentconnect-probe.service.d/slow.conf"
	for i, how := range []string{
		"systemctl stop user@1000.service", "systemctl kill -s KILL --kill-who=main user@1000.service", "loginctl terminate-user tester",
	} {
		m.start(ids...)
		for _, id := range ids[:3] {
			m.mustAC("agent", "stop", id)
		}
		waiting := i%2 == 0
		if waiting { // the starts wait for the probe
			m.file(drop, "[Service]\nExecReload=/bin/sleep 3\n", 0o644)
			m.mustCTL("daemon-reload")
			m.mustCTL("reload", "--no-block", units.Probe)
		}
		for _, id := range ids[:3] {
			m.begin("agentconnect", "agent", "start", id)
		}
		for _, id := range ids[3:] {
			m.begin("systemctl", "--user", "restart", service(id))
		}
		m.until("all are wanted", func() bool { return len(m.wanted()) == len(ids) })
		began := time.Now()
		m.endSession("sh", "-c", fmt.Sprintf("sleep 0.%03d; %s", 40*i, how))
		if d := time.Since(began); d > 20*time.Second {
			t.Errorf("%s: the end took %v", how, d)
		}
		m.until("nothing is left", func() bool {
			return !slices.ContainsFunc(processes(), process.agents)
		})
		if w := m.wanted(); !slices.Equal(w, ids) {
			t.Errorf("%s: wanted %q", how, w)
		}
		if waiting {
			if err := os.Remove(drop); err != nil {
				t.Fatal(err)
			}
		}
		m.beginSession()
		for _, id := range ids {
			m.works(id)
		}
		if left, err := os.ReadDir(root + "/state/stopped"); err == nil && len(left) > 0 {
			t.Errorf("%s: taken for a person's wish: %v", how, left)
		}
	}
}
