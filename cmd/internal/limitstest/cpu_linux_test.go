package limitstest

import (
	"testing"
	"time"
)

// share is how much processor time an agent got per time, in percent, while it did nothing
// but compute.
func (m *machine) share(id string, window time.Duration) float64 {
	m.t.Helper()
	scope := m.group("agent-" + id + ".scope")
	used := func() uint64 {
		n, ok := scope.Events("cpu.stat")["usage_usec"]
		if !ok {
			m.t.Fatal("no cpu.stat")
		}
		return n
	}
	began, before := time.Now(), used()
	time.Sleep(window) //nolint:forbidigo // what is measured, not a wait for something
	return float64(used()-before) / float64(time.Since(began).Microseconds()) * 100
}

func TestCPUQuota(t *testing.T) {
	m := realLimits(t)
	const busy = `1 while 1`
	m.start("alice", append(perl(busy), "--cpu", "20%")...)
	scope := m.group("agent-alice.scope")
	m.value(scope, "cpu.max", "20000 100000")
	got := m.share("alice", 4*time.Second)
	t.Logf("with a quota of 20%%: %.1f%%, throttled in %d of %d periods", got, scope.Events("cpu.stat")["nr_throttled"], scope.Events("cpu.stat")["nr_periods"])
	if got < 5 || got > 23 { // less where the machine itself got less
		t.Errorf("with a quota of 20%%: %.1f%%", got)
	}
	if scope.Events("cpu.stat")["nr_throttled"] == 0 {
		t.Error("never throttled")
	}
	// Live, and what the same loop takes when it may.
	runtime := m.runtime("alice")
	m.must("agentconnect", "agent", "edit", "alice", "--cpu", "60%")
	got = m.share("alice", 4*time.Second)
	t.Logf("with a quota of 60%%: %.1f%%", got)
	if got <= 23 || got > 66 {
		t.Errorf("with a quota of 60%%: %.1f%%", got)
	}
	if now := m.runtime("alice"); now != runtime {
		t.Error("it was started anew")
	}
	m.must("agentconnect", "agent", "stop", "alice")
}
