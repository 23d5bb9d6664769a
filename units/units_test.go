package units

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden files and packaging/systemd/user")

// golden compares with a file, or writes it.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v: go test ./units -update writes it", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

func TestNamesOfAnAgentsUnits(t *testing.T) {
	for _, c := range []struct {
		id, service, scope, slice, exec string
	}{
		{"alice", "agent@alice.service", "agent-alice.scope", "agentconnect-alice.slice", "agentconnect-exec-alice-7.scope"},
		{"my-bot", "agent@my-bot.service", "agent-my-bot.scope", `agentconnect-my\x2dbot.slice`, "agentconnect-exec-my-bot-7.scope"},
		{"0_a-", "agent@0_a-.service", "agent-0_a-.scope", `agentconnect-0_a\x2d.slice`, "agentconnect-exec-0_a--7.scope"},
		{"exec-a-1", "agent@exec-a-1.service", "agent-exec-a-1.scope", `agentconnect-exec\x2da\x2d1.slice`, "agentconnect-exec-exec-a-1-7.scope"},
		{"x2d", "agent@x2d.service", "agent-x2d.scope", "agentconnect-x2d.slice", "agentconnect-exec-x2d-7.scope"},
	} {
		got := []string{ServiceName(c.id), ScopeName(c.id), SliceName(c.id), ExecName(c.id, 7)}
		if diff := cmp.Diff([]string{c.service, c.scope, c.slice, c.exec}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.id, diff)
		}
	}
}

func TestIDOfNothingButDashesStillNamesASlice(t *testing.T) {
	for _, dashes := range []int{57, 58, 62} {
		id := "a" + strings.Repeat("-", dashes)
		name := SliceName(id)
		if len(name) > maxName {
			t.Errorf("%d dashes: %d bytes: systemd takes %d", dashes, len(name), maxName)
		}
		if got, ok := ParseName(name); !ok || got.ID != id {
			t.Errorf("%d dashes: %s reads back as %+v, %v", dashes, name, got, ok)
		}
	}
}

func TestIDsThatAreRefused(t *testing.T) {
	for _, id := range []string{"", "-a", "_a", "A", "a.b", "a@b", "../x", "x.service", "a/b", `a\x2db`, "ä", "a b", "a\x00", "a:b", "a%i", strings.Repeat("a", 64)} {
		if ValidID(id) {
			t.Errorf("%q is allowed", id)
		}
		for kind, name := range map[Kind]func(string) string{Service: ServiceName, Scope: ScopeName, Slice: SliceName} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("a %s was named after %q", kind, id)
					}
				}()
				name(id)
			}()
		}
	}
	if !ValidID(strings.Repeat("a", 63)) {
		t.Error("63 characters are refused")
	}
}

func TestNamesThatAreNoAgents(t *testing.T) {
	for _, name := range []string{
		"", "agent@.service", "agent@a.b.service", "agent@A.service", "agent@a.scope", "agent-a.service", "agent-.scope",
		"agentconnect.service", "agentconnect-probe.service", "agentconnect.slice", "agentconnect-.slice",
		"agentconnect-a-b.slice", `agentconnect-a\x2Db.slice`, `agentconnect-a\x2d.service`, "agentconnect-a:b.slice",
		"agentconnect-exec-a.scope", "agentconnect-exec-a-.scope", "agentconnect-exec-a-01.scope", "agentconnect-exec-a-+1.scope",
		"agentconnect-exec--1.scope", "agentconnect-exec-a-18446744073709551616.scope", "agent@a.service\n", "run-u1.scope",
	} {
		if n, ok := ParseName(name); ok {
			t.Errorf("%q reads as %+v", name, n)
		}
	}
}

func anyID() *rapid.Generator[string] { return rapid.StringMatching(`[a-z0-9][a-z0-9_-]{0,62}`) }

func TestEveryNameReadsBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := Name{
			Kind: rapid.SampledFrom([]Kind{Service, Scope, Slice, Exec}).Draw(t, "kind"),
			ID:   anyID().Draw(t, "id"),
		}
		if want.Kind == Exec {
			want.N = rapid.Uint64().Draw(t, "n")
		}
		name := want.String()
		got, ok := ParseName(name)
		if !ok || got != want {
			t.Fatalf("%s: %+v, %v; want %+v", name, got, ok, want)
		}
		if len(name) > maxName {
			t.Fatalf("%s has %d bytes", name, len(name))
		}
		// A dash in a slice's name is a level: ours are one below agentconnect.slice.
		if want.Kind == Slice && strings.Count(name, "-") != 1 {
			t.Fatalf("%s lies deeper than one level below %s", name, Root)
		}
	})
}

func TestNoTwoAgentsShareAUnit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := anyID().Draw(t, "a"), anyID().Draw(t, "b")
		if a == b {
			return
		}
		seen := map[string]string{Daemon: "", Probe: "", Root: ""}
		for _, id := range []string{a, b} {
			for _, name := range []string{ServiceName(id), ScopeName(id), SliceName(id), ExecName(id, 1), ExecName(id, 11)} {
				if other, ok := seen[name]; ok {
					t.Fatalf("%s is a unit of %q and of %q", name, other, id)
				}
				seen[name] = id
			}
		}
	})
}

func FuzzParseName(f *testing.F) {
	for _, seed := range []string{"agent@alice.service", "agent-a-b.scope", `agentconnect-a\x2db.slice`, "agentconnect-exec-a-1.scope", "agentconnect-:.slice"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, unit string) {
		n, ok := ParseName(unit)
		if !ok {
			if n != (Name{}) {
				t.Fatalf("%q is refused, yet reads as %+v", unit, n)
			}
			return
		}
		if !ValidID(n.ID) || n.String() != unit {
			t.Fatalf("%q reads as %+v, which is %s", unit, n, n)
		}
	})
}

func FuzzParseVersion(f *testing.F) {
	f.Add("252.39-1~deb12u2")
	f.Add("v257~rc1")
	f.Fuzz(func(t *testing.T, s string) {
		v, err := ParseVersion(s)
		if err == nil && (v < 1 || !strings.Contains(s, fmt.Sprint(int(v)))) && !strings.Contains(s, "0") {
			t.Fatalf("%q reads as %d", s, v)
		}
	})
}

func TestVersionsAsDistributionsWriteThem(t *testing.T) {
	for s, want := range map[string]Version{
		"249": 249, "252.39-1~deb12u2": 252, "255.4-1ubuntu8.10": 255, "257.9-1~deb13u1": 257, "v256.7-3.fc41": 256, "258~rc2": 258,
	} {
		if got, err := ParseVersion(s); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "v", "systemd 252", "-1", "0", "99999999999999999999"} {
		if v, err := ParseVersion(s); err == nil {
			t.Errorf("%q reads as %d", s, v)
		}
	}
}

// sample is an agent with every setting.
func sample() Agent {
	return Agent{
		ID:         "my-bot",
		Sandboxed:  true,
		Supervisor: Command{Path: "/usr/libexec/agentconnect/agentconnect-supervisor", Args: []string{"agentconnect-supervisor", "my-bot"}},
		Runtime: Limits{
			MemoryHigh: new(uint64(1536 << 20)), MemoryMax: new(uint64(2 << 30)), MemorySwapMax: new(uint64(0)),
			CPUQuota: new(uint64(2_000_000)), CPUWeight: new(uint64(50)), TasksMax: new(uint64(512)),
		},
		Total: Limits{MemoryMax: new(uint64(3 << 30)), TasksMax: new(uint64(Infinity))},
	}
}

func TestPropertiesForEachVersionOfSystemd(t *testing.T) {
	// The versions at which anything changes, with one on either side, and one yet to come.
	for _, v := range []Version{249, 252, 253, 254, 255, 257, 300} {
		var b strings.Builder
		a := sample()
		plain := Agent{ID: "plain", Supervisor: a.Supervisor}
		for _, unit := range []Transient{
			a.Slice(v), a.Service(v), a.Scope(v, Process{PID: 4711, FD: 9}), a.Exec(v, 3, Process{PID: 4712, FD: -1}),
			plain.Slice(v), plain.Service(v), plain.Scope(v, Process{PID: 4713, FD: -1}),
		} {
			fmt.Fprintf(&b, "%s\n", unit)
		}
		golden(t, fmt.Sprintf("testdata/properties-%d.txt", v), b.String())
	}
}

func TestOrderThatTheLifeCycleRestsOn(t *testing.T) {
	a := sample()
	rapid.Check(t, func(t *rapid.T) {
		a.ID = anyID().Draw(t, "id")
		v := Version(rapid.IntRange(int(Oldest), 300).Draw(t, "version"))
		service, slice := ServiceName(a.ID), SliceName(a.ID)
		for _, scope := range []Transient{a.Scope(v, Process{PID: 2, FD: 3}), a.Exec(v, 1, Process{PID: 2, FD: -1})} {
			want := map[string]Value{"BindsTo": Strings{service}, "Before": Strings{service}, "Slice": String(slice), "CollectMode": String("inactive-or-failed"), "After": Value(nil)}
			for name, value := range want {
				if diff := cmp.Diff(value, scope.Get(name)); diff != "" {
					t.Fatalf("%s %s (-want +got):\n%s", scope.Name, name, diff)
				}
			}
			if pids, fds := scope.Get("PIDs") != nil, scope.Get("PIDFDs") != nil; pids == fds {
				t.Fatalf("%s on %d: pids %v, pidfds %v: want one of them", scope.Name, v, pids, fds)
			}
		}
		if diff := cmp.Diff(Value(Strings{service}), a.Slice(v).Get("Wants")); diff != "" {
			t.Fatalf("a stopped agent would be unloaded:\n%s", diff)
		}
		for _, unit := range []Transient{a.Slice(v), a.Service(v), a.Scope(v, Process{PID: 2, FD: 3})} {
			seen := map[string]bool{}
			for _, p := range unit.Properties {
				if seen[p.Name] {
					t.Fatalf("%s has two %s", unit.Name, p.Name)
				}
				seen[p.Name] = true
				// Settings that systemd stores in clear, and that secrets tend to be put in.
				if strings.HasPrefix(p.Name, "Environment") || strings.Contains(p.Name, "Credential") {
					t.Fatalf("%s has %s", unit.Name, p.Name)
				}
			}
		}
	})
}

func TestOnlyASandboxedAgentNeedsTheProbe(t *testing.T) {
	a := sample()
	for _, sandboxed := range []bool{true, false} {
		a.Sandboxed = sandboxed
		text := a.Service(252).String()
		for _, line := range []string{"Requires=" + Probe, "After=dbus.service " + Probe} {
			if got := strings.Contains(text, line+"\n"); got != sandboxed {
				t.Errorf("sandboxed %v: %q there: %v", sandboxed, line, got)
			}
		}
		if !strings.Contains(text, "After=dbus.service") {
			t.Errorf("sandboxed %v: the bus would go first at logout", sandboxed)
		}
	}
}

func TestScopeAroundNoProcessIsAFaultOfTheCaller(t *testing.T) {
	for _, pid := range []uint32{0, 1} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("a scope around process %d", pid)
				}
			}()
			sample().Scope(252, Process{PID: pid, FD: -1})
		}()
	}
}

func TestShippedUnitFiles(t *testing.T) {
	for _, file := range Files("/usr/bin/agentconnect") {
		golden(t, filepath.Join("..", "packaging", "systemd", "user", file.Name), file.Text)
	}
	for _, file := range Files("/home/dev/bin/agentconnect") {
		if strings.Contains(file.Text, "/usr/bin/") || strings.Contains(file.Text, "@") {
			t.Errorf("%s of a build tree:\n%s", file.Name, file.Text)
		}
	}
}
