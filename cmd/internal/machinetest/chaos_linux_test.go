// Everything at once, at random.

package machinetest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// TestChaos kills, stops, starts, restarts, reloads and re-executes at random with 20
// agents, for AGENTCONNECT_TEST_CHAOS (default 20s), by the seed of AGENTCONNECT_TEST_SEED
// (default: a new one, which is printed). Meanwhile nothing runs outside its scope or
// without its boundary; afterwards every wanted agent runs, nothing else does, and no unit
// is left over.
func TestChaos(t *testing.T) {
	m := newMachine(t)
	m.slow = true // the bus is killed
	length := 20 * time.Second
	if s := os.Getenv("AGENTCONNECT_TEST_CHAOS"); s != "" {
		var err error
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatal(err)
		}
	}
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("AGENTCONNECT_TEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("AGENTCONNECT_TEST_SEED=%d, for %v", seed, length)
	m.up()
	var ids []string
	for i := range 20 {
		id := fmt.Sprintf("a-%d", i)
		ids = append(ids, id)
		m.add(id)
	}
	for _, id := range ids[:15] {
		m.start(id)
	}
	killer := func(comms ...string) func(string) {
		return func(id string) {
			for _, p := range m.of(id) {
				if slices.Contains(comms, p.comm) {
					_ = p.signal(syscall.SIGKILL) // it may have ended by itself
					return
				}
			}
		}
	}
	hand := func(argv ...string) func(string) {
		return func(id string) {
			args := slices.Clone(argv)
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "ID", id)
			}
			m.run(args...)
		}
	}
	// The bus has limits of its own on being started again and again.
	bus := func() {
		m.run("systemctl", "--user", "reset-failed", "dbus.service", "dbus.socket")
		m.run("systemctl", "--user", "start", "dbus.socket")
	}
	type op struct {
		name   string
		weight int
		do     func(id string)
	}
	ops := []op{
		{"agent start", 12, hand("agentconnect", "agent", "start", "ID")},
		{"agent stop", 8, hand("agentconnect", "agent", "stop", "ID")},
		{"agent restart", 8, hand("agentconnect", "agent", "restart", "ID")},
		{"systemctl start", 8, hand("systemctl", "--user", "start", "agent@ID")},
		{"systemctl stop", 6, hand("systemctl", "--user", "stop", "agent@ID")},
		{"systemctl restart", 6, hand("systemctl", "--user", "restart", "agent@ID")},
		{"systemctl kill", 4, hand("systemctl", "--user", "kill", "-s", "KILL", "agent@ID")},
		{"stop of its slice", 2, func(id string) {
			m.run("systemctl", "--user", "stop", "agentconnect-"+strings.ReplaceAll(id, "-", `\x2d`)+".slice")
		}},
		{"command", 4, hand("agentconnect", "agent", "exec", "ID", "--", "true")},
		{"prompt", 4, hand("agentconnect", "prompt", "ID", "fork stray")},
		{"kill of the supervisor", 4, killer(commSupervisor)},
		{"kill of bubblewrap", 4, killer("bwrap")},
		{"kill of the runtime", 4, killer(commInside)},
		{"kill of the launcher", 4, killer(commLauncher)},
		{"daemon-reload", 2, hand("systemctl", "--user", "daemon-reload")},
		{"daemon-reexec", 2, hand("systemctl", "--user", "daemon-reexec")},
		{"restart", 2, hand("agentconnect", "restart")},
		{"kill of the daemon", 1, func(string) {
			m.run("systemctl", "--user", "kill", "-s", "KILL", "--kill-who=main", "agentconnect.service")
			m.run("agentconnect", "up")
		}},
		{"restart of the bus", 1, func(string) { m.run("systemctl", "--user", "restart", "dbus.service"); bus() }},
		{"probe", 1, hand("systemctl", "--user", "reload", "agentconnect-probe.service")},
	}
	if length >= 2*time.Minute {
		// It mostly costs 90 s, see commandTime.
		ops = append(ops, op{"kill of the bus", 1, func(string) {
			m.run("systemctl", "--user", "kill", "-s", "KILL", "--kill-who=main", "dbus.service")
			bus()
		}})
	}
	var lots []int
	for i, op := range ops {
		for range op.weight {
			lots = append(lots, i)
		}
	}
	looking := sample()
	end := time.Now().Add(length)
	done := make([]atomic.Int64, len(ops))
	var workers sync.WaitGroup
	for w := range 3 {
		dice := rand.New(rand.NewPCG(seed, uint64(w)))
		workers.Go(func() {
			for time.Now().Before(end) {
				op := lots[dice.IntN(len(lots))]
				ops[op].do(ids[dice.IntN(len(ids))])
				done[op].Add(1)
			}
		})
	}
	workers.Wait()
	var counts []string
	for i := range ops {
		counts = append(counts, fmt.Sprintf("%s %d", ops[i].name, done[i].Load()))
	}
	t.Log(strings.Join(counts, ", "))

	m.up()
	// What ended too often is not started again by itself, and its next start works.
	stormed := 0
	var restless []string
	rest := m.wait(func() bool {
		restless = nil
		status, wanted := m.status(), m.wanted()
		for _, a := range status.Agents {
			switch {
			case a.State == control.StateFailed && strings.Contains(a.Reason, "too often"):
				stormed++
				m.start(a.ID)
			case a.State == control.StateFailed && strings.Contains(a.Reason, "no daemon answers"):
				// Somebody started it while the daemon was dead, and was told so.
				m.mustAC("agent", "stop", a.ID)
			// One that is wanted may have its turn yet: a daemon that comes up starts them one by one.
			case a.State == control.StateRunning, a.State == control.StateStopped && !slices.Contains(wanted, a.ID):
				continue
			}
			restless = append(restless, fmt.Sprintf("%s is %s: %s", a.ID, a.State, a.Reason))
		}
		return len(restless) == 0
	})
	if !rest {
		t.Errorf("not at rest: %q", restless)
	}
	n := looking.end(t)
	wanted := m.wanted()
	t.Logf("%d looks; %d of 20 are wanted; %d had ended too often", n, len(wanted), stormed)
	if n < int(length/time.Second) {
		t.Errorf("only %d looks", n)
	}
	units := strings.Join(m.units(), "\n") + "\n"
	for _, id := range ids {
		// As whole lines: one name is the beginning of another.
		has := func(unit, state string) bool { return strings.Contains("\n"+units, "\n"+unit+" "+state+"\n") }
		if !slices.Contains(wanted, id) {
			m.becomes(id, control.StateStopped)
			if left := m.of(id); len(left) > 0 {
				t.Errorf("%s is not wanted and runs: %s", id, left)
			}
			if has(scope(id), "active") || has(scope(id), "failed") || has(service(id), "failed") {
				t.Errorf("%s has units left over", id)
			}
			continue
		}
		m.works(id)
		if !has(service(id), "active") || !has(scope(id), "active") {
			t.Errorf("%s lacks units", id)
		}
	}
	if strings.Contains(units, "agentconnect-exec-") {
		t.Errorf("scopes of commands are left over")
	}
	if t.Failed() {
		t.Logf("units:\n%s", units)
	}
	m.mustAC("down")
	for _, id := range ids {
		m.gone(id)
	}
	m.until("no unit is left", func() bool { return len(m.units()) == 0 })
}
