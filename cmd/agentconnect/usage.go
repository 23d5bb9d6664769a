// What agents use, in a line for people.

package main

import (
	"fmt"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/accounting"
)

// usageLine says what is counted here, each with its limit.
func usageLine(u *accounting.Usage) string {
	var parts []string
	say := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	number := func(n uint64) string { return fmt.Sprint(n) }
	of := func(limit *uint64, text func(uint64) string, more ...string) string {
		if limit != nil {
			more = append(more, "limit "+text(*limit))
		}
		if len(more) == 0 {
			return ""
		}
		return " (" + strings.Join(more, ", ") + ")"
	}
	if u.Memory != nil {
		var peak []string
		if u.MemoryPeak != nil {
			peak = []string{"peak " + accounting.Bytes(*u.MemoryPeak)}
		}
		say("memory %s%s", accounting.Bytes(*u.Memory), of(u.Limits.Memory, accounting.Bytes, peak...))
	}
	if u.CPU != nil {
		used := time.Duration(*u.CPU) * time.Microsecond //nolint:gosec // 292,000 years
		say("cpu %s%s", used.Round(10*time.Millisecond), of(u.Limits.CPUQuota, accounting.Percent))
	}
	if u.Tasks != nil {
		say("%d tasks%s", *u.Tasks, of(u.Limits.Tasks, number))
	}
	if u.OOMKills != nil && *u.OOMKills > 0 {
		say("%d killed for memory", *u.OOMKills)
	}
	for _, p := range []struct {
		name  string
		share *float64
	}{{"memory", u.MemoryPressure}, {"cpu", u.CPUPressure}} {
		if p.share != nil && *p.share > 0 {
			say("waits for %s %.1f%% of the time", p.name, *p.share)
		}
	}
	if u.Frozen {
		say("frozen")
	}
	if len(parts) == 0 {
		return "nothing is counted here: this user's control groups have no controllers"
	}
	return strings.Join(parts, " · ")
}

// dropInsLine names the files by which somebody changes an agent's units.
func dropInsLine(files []string) string {
	return "its units are changed by " + strings.Join(files, ", ")
}
