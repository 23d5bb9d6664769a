// What it costs, beside what does the same by hand. Figures, not assertions.

package machinetest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/figures"
	"agentconnect.md/sandbox/cmd/internal/peers"
	"agentconnect.md/sandbox/cmd/internal/rest"
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
	plan := m.plan("alice")
	agent := units.Agent{ID: "alice", Sandboxed: true, Supervisor: units.Command{
		Path: "/usr/libexec/agentconnect-sandbox/agentconnect-supervisor", Args: []string{"agentconnect-supervisor", "alice", "/run/user/1000/agentconnect/spec.sock", network}, // as the daemon says
	}}
	args, crun := systemdRun(plan, program), m.crun(plan, program)
	var ours, theirs, cruns []time.Duration
	said := 1
	for range 50 {
		m.mustCTL("stop", "agentconnect-alice.slice")
		m.until("the units are gone", func() bool { return len(m.units()) == 0 })
		gracePeriod(b)
		began := time.Now()
		if err := conn.StartTransient(ctx, agent.Service(conn.Version()), dbusctl.Replace, agent.Slice(conn.Version())); err != nil {
			b.Fatal(err)
		}
		said++
		ours = append(ours, m.said(log, said).Sub(began))

		beside := func(args []string) time.Duration {
			cmd := m.command(ctx, args...)
			in, err := cmd.StdinPipe()
			if err != nil {
				b.Fatal(err)
			}
			cmd.Stderr = os.Stderr
			gracePeriod(b)
			began := time.Now()
			if err := cmd.Start(); err != nil {
				b.Fatal(err)
			}
			said++
			took := m.said(log, said).Sub(began)
			in.Close()
			_ = cmd.Wait() // its end is its input's
			return took
		}
		theirs = append(theirs, beside(args))
		if crun != nil {
			cruns = append(cruns, beside(crun))
		}
	}
	f := figures.Figure{Key: "systemd/start/" + network, What: "agent start under systemd, network " + network, Unit: "ms", Ours: float64(median(ours).Microseconds()) / 1e3, Wanted: "≤ 1.3", Note: "50 pairs, systemd " + m.systemd()}
	others := []figures.Peer{{Name: "systemd-run --scope bwrap", Value: float64(median(theirs).Microseconds()) / 1e3}}
	if crun != nil {
		others = append(others, figures.Peer{Name: "crun", Value: float64(median(cruns).Microseconds()) / 1e3})
	}
	f = f.Beside(others...)
	b.ReportMetric(f.Ours, "ms/agent")
	b.ReportMetric(f.Peers[0].Value, "ms/systemd-run")
	b.ReportMetric(f.Ratio, "ratio")
	figure(b, f)
}

// gracePeriod has everyone start as on a machine where nothing starts. Who puts a process into a control
// group waits for a grace period of the kernel's, 4 to 10 ms here, but not soon after another one did:
// else the peer had for nothing what the agent before it had waited for.
func gracePeriod(b *testing.B) {
	b.Helper()
	const global = 1 // MEMBARRIER_CMD_GLOBAL of linux/membarrier.h; more than one, for what is queued when the first ends
	for range 3 {
		if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0); errno != 0 {
			b.Fatal("membarrier:", errno)
		}
	}
}

// systemd is the machine's version of it.
func (m *machine) systemd() string {
	m.t.Helper()
	version := strings.Fields(m.mustCTL("--version"))
	return version[1]
}

// plan is the plan of an agent, as explain tells it.
func (m *machine) plan(id string) *sandbox.Plan {
	m.t.Helper()
	var explained struct {
		Plan *sandbox.Plan `json:"plan"`
	}
	if err := json.Unmarshal([]byte(m.mustAC("explain", id, "--json")), &explained); err != nil || explained.Plan == nil {
		m.t.Fatalf("explain: %v", err)
	}
	return explained.Plan
}

// systemdRun is the peer: a scope, and bubblewrap in it with the plan's mounts.
func systemdRun(plan *sandbox.Plan, program string) []string {
	return slices.Concat([]string{"systemd-run", "--user", "--scope", "--quiet", "--collect", "bwrap"}, peers.Bwrap(plan), []string{"--", program})
}

// crun is another: an OCI runtime that makes a scope and the plan's mounts. nil where it is not
// installed.
func (m *machine) crun(plan *sandbox.Plan, program string) []string {
	m.t.Helper()
	if _, err := exec.LookPath("crun"); err != nil {
		return nil
	}
	bundle := m.t.TempDir()
	type object = map[string]any
	mounts := []object{{"destination": "/proc", "type": "proc", "source": "proc"}}
	dir := func(path string) {
		if err := os.MkdirAll(bundle+"/rootfs"+path, 0o755); err != nil {
			m.t.Fatal(err)
		}
	}
	dir("/")
	for _, mount := range plan.Mounts {
		switch mount.Op {
		case sandbox.OpBind:
			access := "ro"
			if mount.Access == sandbox.ReadWrite {
				access = "rw"
			}
			mounts = append(mounts, object{"destination": mount.Target, "type": "bind", "source": mount.Source, "options": []string{"rbind", access}})
		case sandbox.OpTmpfs, sandbox.OpCover:
			mounts = append(mounts, object{"destination": mount.Target, "type": "tmpfs", "source": "tmpfs"})
		case sandbox.OpLink:
			dir(filepath.Dir(mount.Target))
			if err := os.Symlink(mount.Source, bundle+"/rootfs"+mount.Target); err != nil {
				m.t.Fatal(err)
			}
		case sandbox.OpDir:
			dir(mount.Target)
		case sandbox.OpFile:
			dir(filepath.Dir(mount.Target))
		}
	}
	mounts = append(mounts, object{"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []string{"nosuid", "mode=755"}})
	one := []object{{"containerID": uid, "hostID": uid, "size": 1}}
	config, err := json.Marshal(object{
		"ociVersion": "1.0.2", "root": object{"path": "rootfs"}, "mounts": mounts,
		"process": object{"user": object{"uid": uid, "gid": uid}, "args": []string{program}, "env": []string{"PATH=/usr/bin:/bin"}, "cwd": "/", "noNewPrivileges": true},
		"linux":   object{"uidMappings": one, "gidMappings": one, "namespaces": []object{{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "user"}, {"type": "network"}, {"type": "cgroup"}}},
	})
	if err == nil {
		err = os.WriteFile(bundle+"/config.json", config, 0o600)
	}
	if err != nil {
		m.t.Fatal(err)
	}
	return []string{"crun", "--systemd-cgroup", "run", "--bundle", bundle, "peer"}
}

// BenchmarkScale has many agents come up with the daemon, as they do at a login, beside as many
// systemd-run with the same mounts; then it looks at what they cost while nobody
// wants anything, and has the daemon started anew beside them.
func BenchmarkScale(b *testing.B) {
	var sizes []float64
	grown := map[string][]float64{}
	for _, n := range []int{10, 100, 500} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			sizes = append(sizes, float64(n))
			for key, value := range benchmarkScale(b, n) {
				grown[key] = append(grown[key], value)
			}
		})
	}
	for key, values := range grown {
		if len(values) == len(sizes) && len(sizes) > 1 {
			figure(b, figures.Figure{Key: "systemd/scale/growth/" + key, What: "growth exponent of " + key + ", " + strconv.Itoa(int(sizes[0])) + " to " + strconv.Itoa(int(sizes[len(sizes)-1])) + " agents",
				Ours: figures.Growth(sizes, values), Wanted: "≤ 1.05"})
		}
	}
}

func benchmarkScale(b *testing.B, n int) map[string]float64 {
	var instances int
	if limit, err := os.ReadFile("/proc/sys/fs/inotify/max_user_instances"); err != nil {
		b.Fatal(err)
	} else if _, err := fmt.Sscan(string(limit), &instances); err != nil || instances < n+20 {
		b.Skipf("missing: fs.inotify.max_user_instances above %d, it is %d: packaging/dev/bench.sh sets it (%v)", n+20, instances, err)
	}
	m := newMachine(b)
	m.slow = true
	m.file(root+"/config.json", `{"limits":{"maxAgents":1000}}`, 0o600)
	if err := os.Chmod(root, 0o700); err != nil {
		b.Fatal(err)
	}
	m.up()
	logs, programs := make([]string, n), make([]string, n)
	for i := range n {
		logs[i], programs[i] = m.clocked(fmt.Sprintf("a%d", i))
		m.start(fmt.Sprintf("a%d", i))
	}
	var peersRun [][]string
	for i, program := range programs {
		peersRun = append(peersRun, systemdRun(m.plan(fmt.Sprintf("a%d", i)), program))
	}
	m.mustAC("down")
	said := func(nth int, began time.Time) time.Duration {
		var last time.Time
		for _, log := range logs {
			if at := m.said(log, nth); at.After(last) {
				last = at
			}
		}
		return last.Sub(began)
	}
	began := time.Now()
	m.up()
	up := said(2, began)
	at := func(key, what, unit string, value float64) figures.Figure {
		return figures.Figure{Key: fmt.Sprintf("systemd/scale/%s/%d", key, n), What: fmt.Sprintf("%d %s", n, what), Unit: unit, Ours: value}
	}
	m.until("all are up", func() bool { return m.running() == n })
	for _, a := range m.status().Agents {
		if a.Restarts > 0 {
			b.Fatalf("agent %s was started %d times more: %s\n%s", a.ID, a.Restarts, a.Reason, m.journal("--unit", units.ServiceName(a.ID)))
		}
	}
	// After the last of what is done there is one more look whether anything was.
	time.Sleep(2*rest.After + time.Second) //nolint:forbidigo // that is what rest is

	daemon := m.mainPID("agentconnect.service")
	starting, _ := work(daemon)
	var supervisors []int
	var memory, daemonMemory float64
	for _, p := range processes() {
		switch {
		case p.pid == daemon:
			daemonMemory = m.pss(p.pid)
		case p.comm == commSupervisor:
			supervisors = append(supervisors, p.pid)
			memory += m.pss(p.pid)
		case p.comm == "bwrap":
			memory += m.pss(p.pid)
		}
	}
	if len(supervisors) != n {
		b.Fatalf("%d supervisors of %d", len(supervisors), n)
	}
	var idle []figures.Figure
	if n >= 100 {
		cpu, switches := work(daemon)
		scpu, sswitches := work(supervisors...)
		time.Sleep(time.Minute) //nolint:forbidigo // this is what is measured
		cpu2, switches2 := work(daemon)
		scpu2, sswitches2 := work(supervisors...)
		idle = []figures.Figure{
			at("idle", "agents, the daemon's context switches in an idle minute", "", float64(switches2-switches)),
			at("idle-cpu", "agents, the daemon's processor time in it", "ms", float64((cpu2-cpu).Microseconds())/1e3),
			at("idle-each", "agents, context switches of each supervisor in it", "", float64(sswitches2-sswitches)/float64(n)),
			at("idle-each-cpu", "agents, processor time of each supervisor in it", "ms", float64((scpu2-scpu).Microseconds())/1e3/float64(n)),
		}
	}

	var status []time.Duration
	for range 5 {
		began := time.Now()
		m.mustAC("status")
		status = append(status, time.Since(began))
	}
	began = time.Now()
	m.mustAC("restart")
	m.until("all are adopted", func() bool { return m.running() == n })
	adopted := time.Since(began)
	for _, pid := range supervisors {
		if p, ok := look(pid); !ok || p.comm != commSupervisor {
			b.Fatalf("supervisor %d did not live through the daemon's restart", pid)
		}
	}
	m.mustAC("down")

	scopes := make([]*exec.Cmd, n)
	inputs := make([]io.Closer, n)
	began = time.Now()
	for i := range scopes {
		cmd := m.command(context.Background(), peersRun[i]...)
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err != nil {
			b.Fatal(err)
		}
		scopes[i], inputs[i] = cmd, in
		// All at once the manager's answers come too late for most of them.
		if i >= 16 {
			m.said(logs[i-16], 3)
		}
	}
	peersUp := said(3, began)
	for i, cmd := range scopes {
		inputs[i].Close()
		_ = cmd.Wait() // its end is its input's
	}

	for _, f := range []figures.Figure{
		at("up", "agents, from `agentconnect up` to the last one's first instruction", "s", up.Seconds()).Beside(figures.Peer{Name: "as many `systemd-run --scope bwrap`, 16 at once", Value: peersUp.Seconds()}),
		at("daemon-cpu", "agents, processor time of the daemon for that", "ms", float64(starting.Microseconds())/1e3),
		at("memory", "agents, memory of each without its runtime, PSS", "MB", memory/float64(n)),
		at("daemon-memory", "agents, the daemon's memory, PSS", "MB", daemonMemory),
		at("status", "agents, `agentconnect status`", "ms", float64(median(status).Microseconds())/1e3),
		at("adopted", "agents, from `agentconnect restart` until all are known again", "s", adopted.Seconds()),
	} {
		figure(b, f)
	}
	for _, f := range idle {
		figure(b, f)
	}
	return map[string]float64{"start time": up.Seconds(), "memory": memory, "adoption time": adopted.Seconds()}
}

// running is how many agents the daemon says run.
func (m *machine) running() (n int) {
	m.t.Helper()
	for _, a := range m.status().Agents {
		if a.State == control.StateRunning {
			n++
		}
	}
	return n
}

// pss is a process's proportional set size, in MB.
func (m *machine) pss(pid int) float64 {
	m.t.Helper()
	mb, err := peers.PSS(pid)
	if err != nil {
		m.t.Fatal(err)
	}
	return mb
}

// figure prints a figure for the report, on a line of its own.
func figure(b *testing.B, f figures.Figure) {
	fmt.Println()
	if err := figures.Print(os.Stdout, f); err != nil {
		b.Fatal(err)
	}
}

func (m *machine) mainPID(unit string) int {
	m.t.Helper()
	pid, err := strconv.Atoi(m.show(unit, "MainPID"))
	if err != nil {
		m.t.Fatal(err)
	}
	return pid
}

// work is what processes have done so far: processor time and context switches, of all
// their threads.
func work(pids ...int) (cpu time.Duration, switches int) {
	for _, pid := range pids {
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
	}
	return cpu, switches
}
