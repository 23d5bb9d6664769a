package accounting

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"agentconnect.md/sandbox/cmd/internal/cgroup"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// group is a control group with those files.
func group(t *testing.T, files map[string]string) cgroup.Group {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "agent-alice.scope")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cgroup.Group{Path: dir, Name: "/agent-alice.scope"}
}

func TestWhatTheFilesSay(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  Usage
	}{
		{"everything", map[string]string{
			"memory.current": "1000\n", "memory.peak": "2000\n", "memory.max": "4096\n", "pids.current": "3\n", "pids.max": "100\n",
			"cpu.max": "150000 100000\n", "cpu.stat": "usage_usec 77\nuser_usec 70\n", "memory.events": "low 0\noom 1\noom_kill 2\n",
			"memory.pressure": "some avg10=1.25 avg60=0.00 avg300=0.00 total=5\nfull avg10=9.00 avg60=0.00 avg300=0.00 total=5\n",
			"cpu.pressure":    "some avg10=100.00 avg60=0.00 avg300=0.00 total=5\n", "cgroup.events": "populated 1\nfrozen 1\n",
		}, Usage{
			Memory: new(uint64(1000)), MemoryPeak: new(uint64(2000)), CPU: new(uint64(77)), Tasks: new(uint64(3)), OOMKills: new(uint64(2)),
			MemoryPressure: new(1.25), CPUPressure: new(100.0), Frozen: true,
			Limits: Limits{Memory: new(uint64(4096)), CPUQuota: new(uint64(1_500_000)), Tasks: new(uint64(100))},
		}},
		{"no limits", map[string]string{"memory.max": "max\n", "pids.max": "max\n", "cpu.max": "max 100000\n"}, Usage{}},
		{"no controllers", map[string]string{"cpu.stat": "usage_usec 5\n", "cgroup.events": "populated 1\nfrozen 0\n"}, Usage{CPU: new(uint64(5))}},
		{"no group", nil, Usage{}},
		{"another form", map[string]string{
			"memory.current": "-1", "pids.current": "", "cpu.max": "100000 0", "cpu.stat": "usage_usec\n\n=", "memory.pressure": "some avg10=x", "cpu.pressure": "some avg10=NaN avg60=0",
		}, Usage{}},
		{"a quota beyond sense", map[string]string{"cpu.max": "18446744073709551615 100000"}, Usage{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(&c.want, Read(group(t, c.files))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestLimitsThatAreNotInForce(t *testing.T) {
	want := wire.Limits{MemoryMax: 200 << 20, CPUQuota: 500_000, TasksMax: 100}
	all := []string{"cpu", "memory", "tasks"}
	set := func(memory, cpu, tasks string) map[string]string {
		return map[string]string{"memory.max": memory, "cpu.max": cpu, "pids.max": tasks}
	}
	for _, c := range []struct {
		name  string
		files map[string]string
		asked []string
		notes []string
		err   string
	}{
		{"as asked for", set("209715200", "50000 100000", "100"), all, nil, ""},
		{"rounded to pages", set("209711104", "50000 100000", "100"), all, nil, ""},
		{"other values", set("100000000", "49000 100000", "99"), all, []string{"the memory limit is 95.4 MiB, not 200 MiB", "the cpu limit is 49%, not 50%", "the limit of tasks is 99, not 100"}, ""},
		{"no memory controller", map[string]string{"cpu.max": "50000 100000", "pids.max": "100"}, all, nil, "the memory limit of 200 MiB that was asked for is not in force"},
		{"taken away by a drop-in", set("209715200", "max 100000", "100"), all, nil, "the cpu limit of 50% that was asked for is not in force"},
		{"no controller, defaults", nil, nil, []string{"no memory limit", "no cpu limit", "no limit of tasks"}, ""},
		{"no controller, one asked for", nil, []string{"tasks"}, []string{"no memory limit", "no cpu limit"}, "agentconnect agent edit ID --tasks 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := want
			w.Asked = c.asked
			notes, err := Unmet("agent-alice.scope", InForce(group(t, c.files)), w)
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if len(notes) != len(c.notes) {
				t.Fatalf("notes %q, want %q", notes, c.notes)
			}
			for i, n := range c.notes {
				if !strings.HasPrefix(notes[i], n) {
					t.Errorf("note %q, want %q", notes[i], n)
				}
			}
		})
	}
	if notes, err := Unmet("agent-alice.scope", InForce(group(t, nil)), wire.Limits{}); len(notes) > 0 || err != nil {
		t.Errorf("nothing wanted: %q, %v", notes, err)
	}
}
