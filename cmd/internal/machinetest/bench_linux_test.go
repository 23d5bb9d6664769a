// What it costs, beside what does the same by hand. Figures, not assertions.

package machinetest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/dbusctl"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/units"
)

// clocked adds an agent whose runtime says when it runs, and gives that file.
func (m *machine) clocked(id string, flags ...string) (log, program string) {
	m.t.Helper()
	work, bin := home+"/clocked/"+id, home+"/bin"
	log, program = work+"/log", bin+"/clock-"+id
	m.file(log, "", 0o644)
	m.file(program, strings.ReplaceAll(clock, "%s", log), 0o755)
	m.t.Cleanup(func() { os.RemoveAll(home + "/clocked"); os.RemoveAll(bin) })
	m.add(id, append(flags, "--command", program, "--workspace", work)...)
	return log, program
}

// said waits for the n-th time in the file.
func (m *machine) said(log string, n int) time.Time {
	m.t.Helper()
	var at time.Time
	m.until("the runtime said when it runs", func() bool {
		b, err := os.ReadFile(log)
		lines := strings.SplitAfter(string(b), "\n")
		if err != nil || len(lines) <= n || !strings.HasSuffix(lines[n-1], "\n") {
			return false
		}
		word, _, _ := strings.Cut(lines[n-1], " ")
		seconds, err := strconv.ParseFloat(word, 64)
		at = time.UnixMicro(int64(seconds * 1e6))
		return err == nil
	})
	return at
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// BenchmarkStart is from StartTransientUnit to the first instruction of the runtime, beside
// systemd-run making a scope around bubblewrap with the same mounts and no network: 50 pairs.
// An agent of network mode open has a gateway besides, which the peer has not.
func BenchmarkStart(b *testing.B) {
	for _, network := range []string{"none", "open"} {
		b.Run(network, func(b *testing.B) { benchmarkStart(b, network) })
	}
}

func benchmarkStart(b *testing.B, network string) {
	m := newMachine(b)
	m.up()
	log, program := m.clocked("alice", "--network", network)
	m.start("alice") // makes its directories
	m.said(log, 1)
	ctx := context.Background()
	conn, err := dbusctl.Connect(ctx, dbusctl.Here(os.Getenv("XDG_RUNTIME_DIR"), "tester"), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	var explained struct {
		Plan *sandbox.Plan `json:"plan"`
	}
	if err := json.Unmarshal([]byte(m.mustAC("explain", "alice", "--json")), &explained); err != nil || explained.Plan == nil {
		b.Fatalf("explain: %v", err)
	}
	agent := units.Agent{ID: "alice", Sandboxed: true, Supervisor: units.Command{
		Path: "/usr/libexec/agentconnect-sandbox/agentconnect-supervisor", Args: []string{"agentconnect-supervisor", "alice", "/run/user/1000/agentconnect/spec.sock"},
	}}
	args := slices.Concat([]string{"systemd-run", "--user", "--scope", "--quiet", "--collect", "bwrap"}, bwrapArgs(explained.Plan), []string{"--", program})
	var ours, peers []time.Duration
	said := 1
	for range 50 {
		m.mustCTL("stop", "agentconnect-alice.slice")
		m.until("the units are gone", func() bool { return len(m.units()) == 0 })
		began := time.Now()
		if err := conn.StartTransient(ctx, agent.Service(conn.Version()), dbusctl.Replace, agent.Slice(conn.Version())); err != nil {
			b.Fatal(err)
		}
		said++
		ours = append(ours, m.said(log, said).Sub(began))

		cmd := m.command(ctx, args...)
		in, err := cmd.StdinPipe()
		if err != nil {
			b.Fatal(err)
		}
		cmd.Stderr = os.Stderr
		began = time.Now()
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		said++
		peers = append(peers, m.said(log, said).Sub(began))
		in.Close()
		_ = cmd.Wait() // its end is its input's
	}
	b.ReportMetric(float64(median(ours).Microseconds())/1e3, "ms/agent")
	b.ReportMetric(float64(median(peers).Microseconds())/1e3, "ms/systemd-run")
	b.ReportMetric(float64(median(ours))/float64(median(peers)), "ratio")
}

// bwrapArgs asks bubblewrap to make the plan's mounts itself.
func bwrapArgs(plan *sandbox.Plan) []string {
	var args []string
	for _, mount := range plan.Mounts {
		switch mount.Op {
		case sandbox.OpBind:
			flag := "--ro-bind"
			if mount.Access == sandbox.ReadWrite {
				flag = "--bind"
			}
			args = append(args, flag, mount.Source, mount.Target)
		case sandbox.OpTmpfs, sandbox.OpCover:
			args = append(args, "--tmpfs", mount.Target)
		case sandbox.OpLink:
			args = append(args, "--symlink", mount.Source, mount.Target)
		case sandbox.OpDir:
			args = append(args, "--dir", mount.Target)
		case sandbox.OpFile:
			args = append(args, "--dir", filepath.Dir(mount.Target))
		}
	}
	return append(args, "--proc", "/proc", "--dev", "/dev", "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL")
}

// BenchmarkHundred starts 100 agents together, as a login does, and looks at what the
// daemon and the supervisors do while nobody wants anything.
func BenchmarkHundred(b *testing.B) {
	m := newMachine(b)
	m.file(root+"/config.json", `{"limits":{"maxAgents":200}}`, 0o600)
	if err := os.Chmod(root, 0o700); err != nil {
		b.Fatal(err)
	}
	m.up()
	const many, rest = 100, 60 * time.Second
	logs := make([]string, many)
	for i := range many {
		logs[i], _ = m.clocked(fmt.Sprintf("a%d", i))
		m.start(fmt.Sprintf("a%d", i))
	}
	m.mustAC("down")
	began := time.Now()
	m.up()
	up := time.Since(began)
	var last time.Time
	for _, log := range logs {
		if at := m.said(log, 2); at.After(last) {
			last = at
		}
	}
	b.ReportMetric(last.Sub(began).Seconds(), "s/100-up")
	b.ReportMetric(up.Seconds(), "s/daemon-up")
	for i := range many {
		m.until("all are up", func() bool { return m.show(service(fmt.Sprintf("a%d", i)), "ActiveState") == "active" })
	}
	time.Sleep(2 * time.Second) //nolint:forbidigo // what the start stirred up has settled
	daemon := m.mainPID("agentconnect.service")
	var supervisors []int
	for _, p := range processes() {
		if p.comm == commSupervisor {
			supervisors = append(supervisors, p.pid)
		}
	}
	cpu, switches := work(daemon)
	var scpu time.Duration
	var sswitches int
	for _, pid := range supervisors {
		c, s := work(pid)
		scpu, sswitches = scpu-c, sswitches-s
	}
	time.Sleep(rest) //nolint:forbidigo // this is what is measured
	cpu2, switches2 := work(daemon)
	for _, pid := range supervisors {
		c, s := work(pid)
		scpu, sswitches = scpu+c, sswitches+s
	}
	b.ReportMetric(float64((cpu2 - cpu).Milliseconds()), "ms-daemon-cpu/60s")
	b.ReportMetric(float64(switches2-switches), "daemon-switches/60s")
	b.ReportMetric(float64(scpu.Milliseconds()), "ms-supervisors-cpu/60s")
	b.ReportMetric(float64(sswitches), "supervisors-switches/60s")
	b.Logf("%d supervisors", len(supervisors))
}

func (m *machine) mainPID(unit string) int {
	m.t.Helper()
	pid, err := strconv.Atoi(m.show(unit, "MainPID"))
	if err != nil {
		m.t.Fatal(err)
	}
	return pid
}

// work is what a process has done so far: processor time and context switches, of all
// its threads.
func work(pid int) (cpu time.Duration, switches int) {
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, task := range tasks {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, task.Name()))
		if f := strings.Fields(string(b)); len(f) > 0 {
			ns, _ := strconv.ParseInt(f[0], 10, 64)
			cpu += time.Duration(ns)
		}
		b, _ = os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", pid, task.Name()))
		for line := range strings.Lines(string(b)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.HasSuffix(name, "ctxt_switches") {
				n, _ := strconv.Atoi(strings.TrimSpace(value))
				switches += n
			}
		}
	}
	return cpu, switches
}
