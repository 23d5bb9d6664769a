// A state folder that cannot be written for a while.

package machinetest

import (
	"os"
	"slices"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// What a person did by systemctl while nothing could be written down counts when it can be again.
func TestWordsOfAPersonWhileTheStateCannotBeWritten(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.add("bob")
	m.start("alice", "bob")
	m.works("bob")
	m.mustCTL("stop", service("alice"))
	m.staysStopped("alice")
	state := root + "/state"
	t.Cleanup(func() { os.Chmod(state, 0o700) })
	if err := os.Chmod(state, 0o500); err != nil {
		t.Fatal(err)
	}
	m.mustCTL("start", service("alice"))
	m.works("alice")
	supervisor := m.show(service("alice"), "MainPID")
	m.mustCTL("stop", "agentconnect-bob.slice")
	m.gone("bob")
	m.logged("a stop by hand is not remembered", "-u", "agentconnect.service")
	if err := os.Chmod(state, 0o700); err != nil {
		t.Fatal(err)
	}
	m.mustAC("restart")
	m.works("alice")
	if now := m.show(service("alice"), "MainPID"); now != supervisor {
		t.Errorf("the supervisor changed from %s to %s", supervisor, now)
	}
	m.becomes("bob", control.StateStopped)
	if w := m.wanted(); !slices.Equal(w, []string{"alice"}) {
		t.Errorf("wanted: %q", w)
	}
}
