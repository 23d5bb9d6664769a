package accounting

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/cgroup"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// Read reads the files of a group.
func Read(g cgroup.Group) *Usage {
	u := &Usage{
		Memory: count(g, "memory.current"), MemoryPeak: count(g, "memory.peak"), Tasks: count(g, "pids.current"),
		CPU: event(g, "cpu.stat", "usage_usec"), OOMKills: OOMKills(g),
		MemoryPressure: pressure(g, "memory.pressure"), CPUPressure: pressure(g, "cpu.pressure"),
		Frozen: g.Events("cgroup.events")["frozen"] == 1,
		Limits: InForce(g),
	}
	return u
}

// OOMKills reads how many processes of a group, and of those below it, were killed for memory.
func OOMKills(g cgroup.Group) *uint64 { return event(g, "memory.events", "oom_kill") }

// InForce reads the limits of a group.
func InForce(g cgroup.Group) Limits {
	l := Limits{Memory: count(g, "memory.max"), Tasks: count(g, "pids.max")}
	if v, ok := g.Value("cpu.max"); ok {
		l.CPUQuota = quota(v)
	}
	return l
}

func count(g cgroup.Group, file string) *uint64 {
	if n, ok := g.Count(file); ok {
		return &n
	}
	return nil // no such file, or "max"
}

func event(g cgroup.Group, file, key string) *uint64 {
	if n, ok := g.Events(file)[key]; ok {
		return &n
	}
	return nil
}

// quota reads cpu.max, "QUOTA PERIOD" in µs, as µs per second; nil is none.
func quota(v string) *uint64 {
	q, period, _ := strings.Cut(v, " ")
	n, err := strconv.ParseUint(q, 10, 32)
	if err != nil {
		return nil // "max"
	}
	per, err := strconv.ParseUint(period, 10, 32)
	if err != nil || per == 0 {
		return nil
	}
	n = n * 1_000_000 / per
	return &n
}

// pressure reads the line "some avg10=1.23 …" of a pressure file.
func pressure(g cgroup.Group, file string) *float64 {
	v, ok := g.Value(file)
	if !ok {
		return nil
	}
	for line := range strings.Lines(v) {
		if rest, ok := strings.CutPrefix(line, "some avg10="); ok {
			number, _, _ := strings.Cut(rest, " ")
			if f, err := strconv.ParseFloat(number, 64); err == nil && f >= 0 && f <= 100 {
				return &f
			}
		}
	}
	return nil
}

// kinds of limits: how wire and Usage call them, and people.
var kinds = []struct {
	name string
	want func(wire.Limits) uint64
	got  func(Limits) *uint64
	text func(uint64) string
	// rounding is what the kernel may change of a value: memory goes by pages, of 64 KiB at most.
	rounding uint64
	asked    string // in wire.Limits.Asked
	remove   string // what takes the limit away
}{
	{"memory limit", func(l wire.Limits) uint64 { return l.MemoryMax }, func(l Limits) *uint64 { return l.Memory }, Bytes, 1 << 16, "memory", "--memory ''"},
	{"cpu limit", func(l wire.Limits) uint64 { return l.CPUQuota }, func(l Limits) *uint64 { return l.CPUQuota }, Percent, 1000, "cpu", "--cpu ''"},
	{"limit of tasks", func(l wire.Limits) uint64 { return l.TasksMax }, func(l Limits) *uint64 { return l.Tasks }, number, 0, "tasks", "--tasks 0"},
}

func number(n uint64) string { return strconv.FormatUint(n, 10) }

// Unmet compares what was wanted with what is in force in the group of the unit: an
// administrator's drop-in wins over what we pass, so that a limit is never assumed. A
// limit that an operator asked for and the group lacks is an error; a default that it
// lacks, or another value, is a note.
func Unmet(unit string, in Limits, want wire.Limits) (notes []string, err error) {
	for _, k := range kinds {
		w, got := k.want(want), k.got(in)
		switch {
		case w == 0 || got != nil && max(*got, w)-min(*got, w) <= k.rounding:
		case got != nil:
			notes = append(notes, fmt.Sprintf("the %s is %s, not %s: a drop-in of this machine's administrator changed it", k.name, k.text(*got), k.text(w)))
		case !slices.Contains(want.Asked, k.asked):
			notes = append(notes, fmt.Sprintf("no %s, though %s is the default: this user's control groups have no controller for it", k.name, k.text(w)))
		case err == nil:
			err = fmt.Errorf("the %s of %s that was asked for is not in force: %s has none (its controller is not delegated to this user, or a drop-in took it away); see `systemctl cat user@.service` for Delegate=, or take the limit away with `agentconnect agent edit ID %s`", k.name, k.text(w), unit, k.remove)
		}
	}
	return notes, err
}
