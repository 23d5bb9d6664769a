package dbusctl

import (
	"strings"
	"testing"

	"github.com/godbus/dbus/v5"
	"github.com/google/go-cmp/cmp"

	"agentconnect.md/sandbox/units"
)

func uidText(p Place) string { return units.Uint32(p.UID).String() }

func TestEveryValueHasTheTypeItPromises(t *testing.T) {
	for _, value := range []units.Value{
		units.String("x"), units.Bool(true), units.Uint32(1), units.Infinity, units.Strings{"a"}, units.Strings(nil),
		units.Commands{{Path: "/bin/true", Args: []string{"true"}}}, units.Commands(nil), units.ExitStatuses{69, 78}, units.ExitStatuses(nil),
		units.LogFields{"AGENT_ID=a"}, units.LogFields(nil), units.PIDs{2}, units.PIDFDs{0},
	} {
		v, err := variant(value)
		if err != nil {
			t.Errorf("%T: %v", value, err)
			continue
		}
		if got := v.Signature().String(); got != value.Signature() {
			t.Errorf("%T is %s, not %s", value, got, value.Signature())
		}
	}
}

func TestProcessesThatMustNotBeMoved(t *testing.T) {
	for _, value := range []units.Value{units.PIDs{0}, units.PIDs{1}, units.PIDs{4711, 1}, units.PIDFDs{-1}} {
		if _, err := variant(value); err == nil {
			t.Errorf("%T %v passes", value, value)
		}
	}
}

func TestUnsetCountersAreNotNumbers(t *testing.T) {
	p := Properties{m: map[string]dbus.Variant{
		"MemoryCurrent": dbus.MakeVariant(uint64(1<<64 - 1)), "CPUUsageNSec": dbus.MakeVariant(uint64(7)), "Id": dbus.MakeVariant("a.service"),
	}}
	if v, ok := p.Uint64("MemoryCurrent"); ok {
		t.Errorf("memory nobody counts reads %d", v)
	}
	if v, ok := p.Uint64("CPUUsageNSec"); !ok || v != 7 {
		t.Errorf("7 ns reads %d, %v", v, ok)
	}
	for _, name := range []string{"Id", "MemoryPeak"} {
		if v, ok := p.Uint64(name); ok {
			t.Errorf("%s reads %d", name, v)
		}
	}
}

func TestChangesThatBecomeOne(t *testing.T) {
	state := func(word string) Change {
		return Change{Properties: Properties{m: map[string]dbus.Variant{"ActiveState": dbus.MakeVariant(word)}}}
	}
	for _, c := range []struct {
		name   string
		events []Change
		want   string
	}{
		{"the last value wins", []Change{state("activating"), state("active")}, "active"},
		{"unloaded", []Change{state("active"), {Gone: true}}, "active gone"},
		{"unloaded and loaded again", []Change{{Gone: true}, {Look: true}}, "look"},
		{"loaded and unloaded again", []Change{{Look: true}, {Gone: true}}, "look gone"},
		{"a value that is not known any more", []Change{state("active"), {Stale: []string{"ActiveState"}}}, "stale:ActiveState"},
		{"a value that is known again", []Change{{Stale: []string{"ActiveState"}}, state("failed")}, "failed"},
		{"nothing", nil, ""},
	} {
		var got Change
		for _, e := range c.events {
			got.merge(e)
		}
		var words []string
		if s, ok := got.Properties.String("ActiveState"); ok {
			words = append(words, s)
		}
		if got.Look {
			words = append(words, "look")
		}
		if got.Gone {
			words = append(words, "gone")
		}
		for _, name := range got.Stale {
			words = append(words, "stale:"+name)
		}
		if diff := cmp.Diff(c.want, strings.Join(words, " ")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
		if got.empty() != (c.want == "") {
			t.Errorf("%s: empty is %v", c.name, got.empty())
		}
	}
}

func TestCauseInWords(t *testing.T) {
	for _, c := range []struct {
		result string
		code   int32
		status int32
		text   string
		want   string
	}{
		{"success", 0, 0, "", ""},
		{"exit-code", 1, 69, "sandbox unavailable: userns-disabled", "exit status 69: sandbox unavailable: userns-disabled"},
		{"signal", 2, 9, "", "killed by SIGKILL"},
		{"oom-kill", 2, 9, "", "out of memory"},
		{"start-limit-hit", 1, 1, "", "started too often"},
		{"protocol", 1, 0, "", "it ended without saying that it is ready (exit status 0)"},
		{"timeout", 0, 0, "", "timeout"},
	} {
		got := Cause(Properties{m: map[string]dbus.Variant{
			"LoadState": dbus.MakeVariant("loaded"), "Result": dbus.MakeVariant(c.result), "ExecMainCode": dbus.MakeVariant(c.code),
			"ExecMainStatus": dbus.MakeVariant(c.status), "StatusText": dbus.MakeVariant(c.text),
		}})
		if got != c.want {
			t.Errorf("%s: %q; want %q", c.result, got, c.want)
		}
	}
	if got := Cause(Properties{m: map[string]dbus.Variant{"LoadState": dbus.MakeVariant("not-found")}}); got != "its unit file is not-found" {
		t.Errorf("got %q", got)
	}
}
