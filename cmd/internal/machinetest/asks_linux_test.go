package machinetest

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
)

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
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	monitor := m.command(ctx, "busctl", "--user", "monitor", "--json=short")
	heard, err := os.Create(t.TempDir() + "/heard")
	if err != nil {
		t.Fatal(err)
	}
	defer heard.Close()
	monitor.Stdout = heard
	if err := monitor.Start(); err != nil {
		t.Fatal(err)
	}
	// What it sees of a question of ours says that it listens, and that it has seen all before.
	text := func() string {
		b, err := os.ReadFile(heard.Name())
		if err != nil {
			t.Fatal(err)
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
	m.add("alice")
	m.mustAC("agent", "edit", "other0", "--memory", "1G")
	hears("after-all")
	cancel()
	_ = monitor.Wait()
	asked := map[string]int{}
	for line := range strings.Lines(text()) {
		if i := strings.Index(line, "agent_40other"); i >= 0 && strings.Contains(line, `"method_call"`) {
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
