// The transient units of one agent, as properties.
package units

import (
	"fmt"
	"strings"
)

// Transient is a unit to be made over the bus.
type Transient struct {
	Name       string
	Properties []Property
	Lost       []Loss // what this version of systemd cannot do
}

// Limits bound a unit's cgroup, as systemd takes them. Nil: no word about it.
type Limits struct {
	MemoryHigh    *uint64 // bytes; above, the kernel slows down and reclaims
	MemoryMax     *uint64 // bytes; above, the kernel kills
	MemorySwapMax *uint64 // bytes; 0 is no swap
	CPUQuota      *uint64 // µs of processor time per second; 1,000,000 is one processor
	CPUWeight     *uint64 // 1 to 10,000; 100 is everyone's
	TasksMax      *uint64 // processes and threads
}

// Properties are the limits by their names on the bus; SetProperties takes them live.
func (l Limits) Properties() []Property {
	var p []Property
	for _, limit := range []struct {
		name  string
		value *uint64
	}{
		{"MemoryHigh", l.MemoryHigh},
		{"MemoryMax", l.MemoryMax},
		{"MemorySwapMax", l.MemorySwapMax},
		{"CPUQuotaPerSecUSec", l.CPUQuota},
		{"CPUWeight", l.CPUWeight},
		{"TasksMax", l.TasksMax},
	} {
		if limit.value != nil {
			p = append(p, Property{limit.name, Uint64(*limit.value)})
		}
	}
	return p
}

// Agent is what the units of one agent are built from. Everything in it is shown to whoever
// asks the bus: no secret may be in it.
type Agent struct {
	ID        string
	Sandboxed bool // it needs the probe
	// Supervisor is the program of agent@ID.service, with its arguments.
	Supervisor Command
	Runtime    Limits // of the scope that holds the runtime, and of each exec scope
	Total      Limits // of everything the agent has running
	// Unbound scopes hang on no service: commands of an agent that does not run.
	Unbound bool
}

// Process is what a scope is made around.
type Process struct {
	PID uint32
	// FD is a pidfd of it, or negative. It stays the caller's. With it, systemd 255 and later
	// cannot be made to adopt a stranger that got the number meanwhile.
	FD int
}

// How the supervisor is started again, stopped, and given up on.
const (
	second = 1_000_000 // µs

	restartDelay    = 1 * second
	restartMaxDelay = 30 * second
	restartSteps    = 5
	startBurst      = 5
	startInterval   = 300 * second

	startTimeout = 90 * second
	stopTimeout  = 30 * second
	// What is in a scope when systemd stops it lost its supervisor, which ends it in order
	// otherwise. A sandbox that still came up does not hear of SIGTERM and waits this long,
	// and the next start with it.
	scopeStopTimeout = 3 * second

	// storedFDs is room for the sealed spec and what may join it.
	storedFDs = 8
)

// Exit codes that another start would only repeat: no sandbox, neither a spec nor a daemon
// (75), bad configuration. Wrong usage
// (2) is not among them, for a Go program that panics ends with 2, too.
var noRestart = ExitStatuses{69, 75, 78}

// Slice is agentconnect-ID.slice. It wants the service, so that a stopped agent stays loaded,
// and `systemctl --user status` and `start` know it; so to start the slice starts the agent.
func (a Agent) Slice(v Version) Transient {
	return build(SliceName(a.ID), v, nil, []Property{
		{"Description", String("AgentConnect agent " + a.ID + ", all of it")},
		{"Wants", Strings{ServiceName(a.ID)}},
		{"CPUAccounting", Bool(true)},
		{"MemoryAccounting", Bool(true)},
		{"TasksAccounting", Bool(true)},
	}, a.Total.Properties())
}

// Service is agent@ID.service, the supervisor.
func (a Agent) Service(v Version) Transient {
	// The bus has to be there for as long as the agent, at logout too.
	after := Strings{"dbus.service"}
	var requires []Property
	if a.Sandboxed {
		// Where the probe failed, no process of the agent ever exists.
		after = append(after, Probe)
		requires = []Property{{"Requires", Strings{Probe}}}
	}
	return build(ServiceName(a.ID), v, nil, []Property{
		{"Description", String("AgentConnect agent " + a.ID)},
		{"Slice", String(SliceName(a.ID))},
		{"After", after},
	}, requires, []Property{
		// Stays loaded after a failure, so that status can say why.
		{"CollectMode", String("inactive")},
		{"Type", String("notify")},
		{"NotifyAccess", String("main")},
		{"ExecStart", Commands{a.Supervisor}},
		{"WorkingDirectory", String("/")},
		{"StandardInput", String("null")},
		{"StandardOutput", String("journal")},
		{"StandardError", String("journal")},
		{"SyslogIdentifier", String("agent@" + a.ID)},
		{"TimeoutStartUSec", Uint64(startTimeout)},
		{"TimeoutStopUSec", Uint64(stopTimeout)},
		// TERM for the supervisor alone, which ends the rest in order.
		{"KillMode", String("mixed")},
		{"Restart", String("on-failure")},
		{"RestartUSec", Uint64(restartDelay)},
		{"RestartSteps", Uint32(restartSteps)},
		{"RestartMaxDelayUSec", Uint64(restartMaxDelay)},
		{"RestartPreventExitStatus", noRestart},
		{"StartLimitIntervalUSec", Uint64(startInterval)},
		{"StartLimitBurst", Uint32(startBurst)},
		{"FileDescriptorStoreMax", Uint32(storedFDs)},
		// Kept over a restart, gone at a stop: the spec holds secrets.
		{"FileDescriptorStorePreserve", String("restart")},
	})
}

// Scope is agent-ID.scope, made around the launcher before it becomes the runtime.
func (a Agent) Scope(v Version, p Process) Transient {
	return a.scope(ScopeName(a.ID), "Runtime of AgentConnect agent "+a.ID, v, p)
}

// Exec is agentconnect-exec-ID-N.scope, made around a command in the agent's boundary.
func (a Agent) Exec(v Version, n uint64, p Process) Transient {
	return a.scope(ExecName(a.ID, n), fmt.Sprintf("Command %d in AgentConnect agent %s", n, a.ID), v, p)
}

func (a Agent) scope(name, description string, v Version, p Process) Transient {
	if p.PID <= 1 {
		panic(fmt.Sprintf("units: %s around process %d: the caller has no process", name, p.PID))
	}
	process := Property{"PIDs", PIDs{p.PID}}
	if p.FD >= 0 && v >= gates["PIDFDs"].since {
		process = Property{"PIDFDs", PIDFDs{p.FD}}
	}
	service := Strings{ServiceName(a.ID)}
	// Gone when the supervisor is, and Before=, not After=: the supervisor makes this scope
	// while its own start job still runs (After= would wait for that for ever), and a stop
	// must reach the supervisor first, which ends the runtime in order.
	bound := []Property{{"BindsTo", service}, {"Before", service}}
	if a.Unbound {
		bound = nil
	}
	return build(name, v, scopeGates, []Property{
		{"Description", String(description)},
		process,
		{"Slice", String(SliceName(a.ID))},
	}, bound, []Property{
		// A failed scope must not be in the way of the next start.
		{"CollectMode", String("inactive-or-failed")},
		{"KillMode", String("control-group")},
		{"TimeoutStopUSec", Uint64(scopeStopTimeout)},
		{"OOMPolicy", String("kill")},
		{"CPUAccounting", Bool(true)},
		{"MemoryAccounting", Bool(true)},
		{"TasksAccounting", Bool(true)},
	}, a.Runtime.Properties())
}

// build leaves out what v lacks and says so.
func build(name string, v Version, extra map[string]gate, parts ...[]Property) Transient {
	t := Transient{Name: name}
	for _, part := range parts {
		for _, p := range part {
			g, gated := gates[p.Name]
			if own, ok := extra[p.Name]; ok {
				g, gated = own, true
			}
			if !gated || v >= g.since {
				t.Properties = append(t.Properties, p)
				continue
			}
			if g.why != "" {
				t.Lost = append(t.Lost, Loss{Unit: name, Property: p.Name, Since: g.since, Why: g.why})
			}
		}
	}
	return t
}

// Get is the value of the property of that name, or nil.
func (t Transient) Get(name string) Value {
	for _, p := range t.Properties {
		if p.Name == name {
			return p.Value
		}
	}
	return nil
}

// String is the unit in the form of a unit file, less sections: for people and for golden files.
func (t Transient) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s\n", t.Name)
	for _, p := range t.Properties {
		fmt.Fprintf(&b, "%s=%s\n", p.Name, p.Value)
	}
	for _, l := range t.Lost {
		fmt.Fprintf(&b, "# lost: %s\n", l)
	}
	return b.String()
}
