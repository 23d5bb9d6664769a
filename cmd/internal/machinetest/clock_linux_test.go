// What happens to the clock.

package machinetest

import (
	"os"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/units"
)

// A clock that was ahead and is set right makes the next probe's result older than the last one.
// It counts all the same.
func TestProbeThatPassesAfterTheClockWasSetBackCounts(t *testing.T) {
	m := newMachine(t)
	drop := m.brokenProbe()
	// The machine's own clock is the host's: the result is given another time.
	m.file(drop, "[Service]\nExecReload=/bin/sed -i 's/\"at\": \"..../\"at\": \"2001/' "+root+"/state/probe.json\n", 0o644)
	m.mustCTL("daemon-reload")
	m.mustCTL("reload", units.Probe)
	if b, err := os.ReadFile(root + "/state/probe.json"); err != nil || !strings.Contains(string(b), `"at": "2001`) {
		t.Fatalf("the result: %v: %s", err, b)
	}
	m.mustCTL("start", service("alice"))
	m.becomes("alice", control.StateRunning)
	m.works("alice")
	m.works("bob")
}
