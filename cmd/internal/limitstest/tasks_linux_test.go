package limitstest

import (
	"fmt"
	"strings"
	"testing"
)

func TestForkStormHitsTheLimitAndNothingElse(t *testing.T) {
	m := realLimits(t)
	m.start("bob")
	bob := m.runtime("bob")
	// 200 children at most, which wait for the end of the agent's stdin.
	m.start("alice", append(perl(`my ($n, $why); for (1..200) { my $p = fork(); if (!defined $p) { $why = $!; last } if (!$p) { sleep 600; exit } $n++ }`+
		` open(my $f, ">", "storm.part"); print $f "forked $n: $why"; close $f; rename "storm.part", "storm"`), "--tasks", "40")...)
	const file = "/home/tester/.agentconnect/agents/alice/workspace/storm"
	m.until("the end of the storm", func() bool { return storm(t, file) != "" })
	var n int
	if _, err := fmt.Sscanf(storm(t, file), "forked %d: Resource temporarily unavailable", &n); err != nil || n < 20 || n >= 40 {
		t.Errorf("the storm: %q, %v", storm(t, file), err)
	}
	scope := m.group("agent-alice.scope")
	m.value(scope, "pids.current", "40")
	if hits := scope.Events("pids.events")["max"]; hits == 0 {
		t.Error("the kernel counted no refused fork")
	}
	a := m.used("alice")
	is(t, "alice's tasks", a.Usage.Tasks, 40)
	m.says("status", m.must("agentconnect", "status"), "40 tasks (limit 40)")

	// The supervisor is not in the scope: it goes on, and others fork as they like.
	if st, _ := m.run("systemctl", "--user", "is-active", "agent@alice"); strings.TrimSpace(st) != "active" {
		t.Errorf("alice is %s", st)
	}
	m.says("bob", m.must("agentconnect", "prompt", "bob", "fork sibling"), "forked ")
	if now := m.runtime("bob"); now != bob {
		t.Error("bob was started anew")
	}
	m.says("a command in alice's boundary", m.must("agentconnect", "agent", "exec", "alice", "--", "/bin/sh", "-c", "echo $(echo still here)"), "still here")
	m.must("agentconnect", "agent", "stop", "alice")
}
