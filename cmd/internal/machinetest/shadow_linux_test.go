// What is not the manager's daemon: an older program's unit file in the place of ours, and the daemon
// of another ROOT.

package machinetest

import (
	"os"
	"strings"
	"syscall"
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

// One user may have daemons of several ROOTs, and the manager keeps one of them: what is said to
// another is not done to that one.
func TestDaemonOfAnotherROOTIsNotTheManagers(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	pid, supervisor := m.show("agentconnect.service", "MainPID"), m.show(service("alice"), "MainPID")
	untouched := func(after string) {
		t.Helper()
		if now := m.show("agentconnect.service", "MainPID"); now != pid {
			t.Errorf("%s: the manager's daemon was %s, is %s", after, pid, now)
		}
		if now := m.show(service("alice"), "MainPID"); now != supervisor {
			t.Errorf("%s: alice's supervisor was %s, is %s", after, supervisor, now)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	other := home + "/other"
	t.Cleanup(func() { os.RemoveAll(other) })
	cmd := m.command(t.Context(), "agentconnect", "--root", other, "run", "--supervisor", "direct")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
	})
	m.until("the other daemon answers", func() bool { return strings.Contains(m.ac("--root", other, "status").out, "running (pid") })
	m.fails(m.ac("--root", other, "restart"), 1, "is no unit of a user manager")
	untouched("restart of the other")
	m.fails(m.ac("--root", other, "down"), 0, "have stopped")
	untouched("down of the other")
	if err := cmd.Wait(); err != nil {
		t.Errorf("the other daemon: %v", err)
	}

	// It does not run any more, and the manager's does.
	m.fails(m.ac("--root", other, "down"), 75)
	for _, word := range []string{"up", "restart"} {
		m.fails(m.ac("--root", other, word), 1, other, "--supervisor direct")
		untouched(word)
	}
	m.works("alice")

	// Nor does the manager's start in its place.
	m.mustAC("down")
	m.fails(m.ac("--root", other, "up"), 1, other, "--supervisor direct")
	if s := m.show("agentconnect.service", "ActiveState"); s != "inactive" {
		t.Errorf("the manager's daemon is %s", s)
	}
	m.up()
	m.works("alice")
}
