package machinetest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// calls are the methods called on the user's bus while f runs, each as the monitor says it.
func (m *machine) calls(f func()) (calls []string) {
	m.t.Helper()
	ctx, cancel := context.WithCancel(m.t.Context())
	defer cancel()
	monitor := m.command(ctx, "busctl", "--user", "monitor", "--json=short")
	heard, err := os.Create(m.t.TempDir() + "/heard")
	if err != nil {
		m.t.Fatal(err)
	}
	defer heard.Close()
	monitor.Stdout = heard
	if err := monitor.Start(); err != nil {
		m.t.Fatal(err)
	}
	// What it sees of a question of ours says that it listens, and that it has seen all before.
	text := func() string {
		b, err := os.ReadFile(heard.Name())
		if err != nil {
			m.t.Fatal(err)
		}
		return string(b)
	}
	hears := func(word string) {
		m.until("the monitor hears "+word, func() bool {
			m.run("busctl", "--user", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager", "GetUnit", "s", word+".service")
			return strings.Contains(text(), word)
		})
	}
	hears("before-all")
	f()
	hears("after-all")
	cancel()
	_ = monitor.Wait()
	for line := range strings.Lines(text()) {
		if strings.Contains(line, `"method_call"`) && !strings.Contains(line, "before-all") && !strings.Contains(line, "after-all") && !strings.Contains(line, `"member":"Hello"`) {
			calls = append(calls, line)
		}
	}
	return calls
}

// A change of one agent must not cost more the more agents there are: the manager answers a
// question about one unit in a millisecond, and 500 agents would be seconds of every command.
func TestAddingAnAgentAsksNothingAboutTheOthers(t *testing.T) {
	m := newMachine(t)
	m.up()
	const many = 8
	for i := range many {
		m.add(fmt.Sprintf("other%d", i))
		m.start(fmt.Sprintf("other%d", i))
	}
	for i := range many {
		m.works(fmt.Sprintf("other%d", i))
	}
	asked := map[string]int{}
	for _, line := range m.calls(func() {
		m.add("alice")
		m.mustAC("agent", "edit", "other0", "--memory", "1G")
	}) {
		if i := strings.Index(line, "agent_40other"); i >= 0 {
			asked[line[i+len("agent_40"):][:len("other0")]]++
		}
	}
	if asked["other0"] == 0 {
		t.Errorf("nothing was asked about the agent that was changed: this test hears nothing: %v", asked)
	}
	delete(asked, "other0")
	if len(asked) > 0 {
		t.Errorf("an agent was added and another changed, and the manager was asked about others: %v", asked)
	}
}

func TestStatusAsksTheManagerOnce(t *testing.T) {
	m := newMachine(t)
	m.up()
	const many = 8
	for i := range many {
		m.add(fmt.Sprintf("a%d", i))
		m.start(fmt.Sprintf("a%d", i))
	}
	for i := range many {
		m.works(fmt.Sprintf("a%d", i))
	}
	m.mustAC("agent", "stop", "a0")
	// A reload asks, too: those that the files bring about are to be over.
	noticed := func() int {
		return strings.Count(m.journal("--unit", "agentconnect.service"), `why="a file changed"`)
	}
	m.becomes("a0", control.StateStopped)
	before := noticed()
	m.add("never-started")
	m.until("its file was noticed", func() bool { return noticed() > before })
	m.status() // asks what has not been asked of these starts
	calls := m.calls(func() { m.mustAC("status") })
	if len(calls) != 1 || !strings.Contains(calls[0], "ListUnitsByPatterns") {
		t.Errorf("%d calls for a status of %d agents, want one for a list: %s", len(calls), many+1, strings.Join(calls, ""))
	}
}

// A daemon may have had thousands of agents, one after the other.
func TestNobodyListensForARemovedAgent(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	m.works("alice")
	rules := func() int {
		all := m.must("busctl", "--user", "--json=short", "call", "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus.Debug.Stats", "GetAllMatchRules")
		return strings.Count(all, service("alice"))
	}
	if rules() == 0 {
		t.Fatal("no rule of the bus is about an agent that runs: this test sees nothing")
	}
	for range 2 { // and it can be watched again
		m.mustAC("agent", "rm", "alice")
		m.until("no rule of the bus is about an agent that was removed", func() bool { return rules() == 0 })
		m.add("alice")
		m.start("alice")
		m.works("alice")
		m.mustCTL("stop", service("alice"))
		m.until("a stop by hand is noticed", func() bool { return len(m.wanted()) == 0 })
	}
}

// What is kept of the manager's answers must not be older than what was done before the question.
func TestStatusIsTrueRightAfterAChange(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.add("bob")
	m.start("alice", "bob")
	m.works("alice")
	m.works("bob")
	folder := home + "/.config/systemd/user/" + scope("alice") + ".d"
	t.Cleanup(func() { os.RemoveAll(folder) })
	same := func(what string) {
		t.Helper()
		for _, id := range []string{"alice", "bob"} {
			a := m.agent(id)
			active, pid := m.show(service(id), "ActiveState"), m.show(service(id), "MainPID")
			want := map[string]string{"active": control.StateRunning, "inactive": control.StateStopped, "failed": control.StateFailed}[active]
			if want == "" || a.State != want || a.State == control.StateRunning && fmt.Sprint(a.PID) != pid {
				t.Errorf("%s: %s is said to be %s with pid %d (%s); the manager has %s, %s", what, id, a.State, a.PID, strings.Join(a.Notes, "; "), active, pid)
			}
			if strings.Contains(strings.Join(a.Notes, "; "), "does not answer") {
				t.Errorf("%s: %s: %q", what, id, a.Notes)
			}
		}
	}
	for round := range 3 {
		same("at the start")
		m.mustCTL("stop", service("alice"))
		same("stopped by hand")
		m.mustCTL("start", service("alice"))
		same("started by hand")
		m.mustCTL("restart", service("alice"), service("bob"))
		same("restarted by hand")
		m.mustAC("agent", "restart", "alice")
		same("restarted")
		m.mustAC("agent", "stop", "bob")
		same("stopped")
		m.mustAC("agent", "start", "bob")
		same("started")
		if a := m.agent("alice"); len(a.DropIns) > 0 {
			t.Errorf("drop-ins of nobody: %q", a.DropIns)
		}
		file := filepath.Join(folder, fmt.Sprintf("%d.conf", round))
		m.file(file, "[Scope]\nTasksMax=400\n", 0o644)
		m.mustCTL("daemon-reload")
		if a := m.agent("alice"); len(a.DropIns) != 1 || a.DropIns[0] != file {
			t.Errorf("a drop-in was added: %q, want %s", a.DropIns, file)
		}
		same("read anew")
		if err := os.RemoveAll(folder); err != nil {
			t.Fatal(err)
		}
		m.mustCTL("daemon-reload")
		if a := m.agent("alice"); len(a.DropIns) > 0 {
			t.Errorf("the drop-in was removed: %q", a.DropIns)
		}
		m.mustCTL("daemon-reexec")
		same("the manager was executed anew")
		m.mustCTL("kill", "-s", "KILL", "--kill-who=main", service("bob"))
		// Until the manager has noticed, and until it starts it again.
		m.until("bob is back", func() bool {
			return m.show(service("bob"), "ActiveState") == "active" && m.show(service("bob"), "NRestarts") != "0"
		})
		same("killed")
		if a := m.agent("bob"); fmt.Sprint(a.Restarts) != m.show(service("bob"), "NRestarts") {
			t.Errorf("bob was started anew, and that is said %d times", a.Restarts)
		}
		m.mustAC("agent", "restart", "bob") // counts from nought again
	}
}

// A supervisor that stands still keeps nobody waiting for the time that an answer may take.
func TestFrozenSupervisorsAreSaidAtOnce(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	m.start("alice")
	m.works("alice")
	for _, c := range []struct{ unit, says string }{
		{"agentconnect-alice.slice", "frozen: it goes on after"},
		{service("alice"), "its supervisor is frozen: it goes on after"},
	} {
		m.mustCTL("freeze", c.unit)
		t.Cleanup(func() { m.ctl("thaw", c.unit) })
		began := time.Now()
		a := m.agent("alice")
		if took := time.Since(began); took > 800*time.Millisecond {
			t.Errorf("%s: status took %v", c.unit, took)
		}
		if notes := strings.Join(a.Notes, "; "); a.State != control.StateRunning || !strings.Contains(notes, c.says) {
			t.Errorf("%s: %s: %q, want %q", c.unit, a.State, notes, c.says)
		}
		m.mustCTL("thaw", c.unit)
		if a := m.agent("alice"); strings.Contains(strings.Join(a.Notes, "; "), "frozen") {
			t.Errorf("%s was thawed: %q", c.unit, a.Notes)
		}
	}
}
