// An older program's unit file in the place of ours.

package machinetest

import (
	"strings"
	"testing"
)

func TestShadowedUnitIsRefused(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	daemon := m.show("agentconnect.service", "MainPID")
	file := dropins + "/agentconnect.service"
	m.file(file, "[Service]\nExecStart=/usr/bin/sleep 1000\n", 0o644)
	m.mustCTL("daemon-reload")
	words := []string{file, "systemctl --user disable --now agentconnect.service; rm " + file}
	m.fails(m.ac("restart"), 1, words...)
	if now := m.show("agentconnect.service", "MainPID"); now != daemon {
		t.Error("the daemon was restarted")
	}
	m.mustCTL("stop", "agentconnect.service")
	m.fails(m.ac("up"), 1, words...)
	if s := m.show("agentconnect.service", "ActiveState"); s != "inactive" {
		t.Errorf("the other program's unit is %s", s)
	}
	// The command that it printed does it.
	r := m.ac("up")
	_, remedy, ok := strings.Cut(strings.TrimSpace(r.err), "to move over: ")
	if !ok {
		t.Fatalf("no remedy in %q", r.err)
	}
	m.must("sh", "-c", remedy)
	m.works("alice")
}
