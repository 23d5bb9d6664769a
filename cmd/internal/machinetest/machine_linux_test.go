// The machine: one user with the installed product, and what the tests do to them.

package machinetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/sandbox"
)

const (
	// patience is how long anything may take that a test waits for. Reaching it is a failure.
	patience = 40 * time.Second

	// commandTime is the same for one command. A user manager whose bus is killed while any
	// unit changes its state connects again before it knows of the death, and then waits 90 s
	// for an answer (systemd 252 and 257: sd_bus_flush below manager_recheck_dbus). It does
	// nothing else meanwhile.
	commandTime = 3 * patience

	home = "/home/tester"
	root = home + "/.agentconnect"
	// dropins is where a user's own changes to units are.
	dropins = home + "/.config/systemd/user"
	uid     = 1000
)

// machine is the test's view of it: as tester, or as root who acts for tester.
type machine struct {
	t     testing.TB
	as    []string // how a command becomes tester's
	since time.Time
	free  []string // agents that are meant to have no boundary
	slow  bool     // the manager may be out for the 90 s of commandTime
}

// newMachine gives a machine without agents and without a daemon, to a test that runs as
// tester.
func newMachine(t testing.TB) *machine {
	t.Helper()
	needMachine(t)
	if os.Getuid() != uid {
		t.Skip("missing: the machine's user tester (this test does not run as root)")
	}
	return enter(&machine{t: t})
}

// newRootMachine is newMachine for tests that break the machine or end the session.
func newRootMachine(t testing.TB) *machine {
	t.Helper()
	needMachine(t)
	if os.Getuid() != 0 {
		t.Skip("missing: root (this test breaks the machine or ends the user's session)")
	}
	return enter(&machine{t: t, as: []string{"setpriv", "--reuid", "tester", "--regid", "tester", "--init-groups",
		"env", "-C", home, "HOME=" + home, "USER=tester", "LOGNAME=tester", "XDG_RUNTIME_DIR=/run/user/1000", "DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/1000/bus"}})
}

func needMachine(t testing.TB) {
	t.Helper()
	if os.Getenv("AGENTCONNECT_TEST_MACHINE") == "" {
		t.Skip("missing: the test machine; run packaging/dev/systemd/product.sh")
	}
	if _, err := os.Stat("/usr/bin/agentconnect"); err != nil {
		t.Skip("missing: the installed product in the test machine; run packaging/dev/systemd/product.sh")
	}
}

func enter(m *machine) *machine {
	m.t.Helper()
	m.clear()
	m.since = time.Now()
	m.t.Cleanup(func() {
		if m.t.Failed() {
			m.t.Logf("the journal of this test:\n%s", probing.ReplaceAllString(m.journal(), ""))
			m.t.Logf("processes:\n%s", m.list())
		}
		m.clear()
	})
	return m
}

// clear takes everything of the product away but what is installed.
func (m *machine) clear() {
	m.t.Helper()
	m.run("systemctl", "--user", "stop", "agentconnect.service")
	m.run("systemctl", "--user", "stop", "agentconnect.slice")
	m.run("systemctl", "--user", "stop", "agent@*.service", "agent-*.scope", "agentconnect-*.slice")
	m.run("systemctl", "--user", "disable", "agentconnect.service")
	for _, p := range processes() {
		if p.agents() {
			m.t.Errorf("left running after everything was stopped: %s", p)
			p.signal(syscall.SIGKILL)
		}
	}
	for _, dir := range []string{root, dropins} {
		if err := os.RemoveAll(dir); err != nil {
			m.t.Fatal(err)
		}
	}
	m.run("systemctl", "--user", "daemon-reload")
	m.run("systemctl", "--user", "reset-failed")
	if left := m.units(); len(left) > 0 {
		m.t.Errorf("units left after everything was stopped: %q", left)
	}
}

// brokenProbe has bob run, and alice stopped, when the probe fails from now on: by a drop-in, whose
// path it gives.
func (m *machine) brokenProbe() string {
	m.t.Helper()
	m.up()
	m.add("alice")
	m.add("bob")
	m.start("alice", "bob")
	m.mustAC("agent", "stop", "alice")
	drop := dropins + "/agentconnect-probe.service.d/broken.conf"
	m.file(drop, "[Service]\nEnvironment=AGENTCONNECT_LIBEXEC=/nowhere\n", 0o644)
	m.mustCTL("daemon-reload")
	m.fails(m.ac("probe"), 69)
	m.fails(m.ac("agent", "start", "alice"), 69)
	return drop
}

// haltManager has the user manager answer nothing until goOn, which may be called again.
func (m *machine) haltManager() (goOn func()) {
	m.t.Helper()
	all := processes()
	i := slices.IndexFunc(all, func(p process) bool {
		return p.comm == "systemd" && strings.HasSuffix(p.group, "/user@1000.service/init.scope")
	})
	if i < 0 {
		m.t.Fatalf("no user manager:\n%s", m.list())
	}
	send := func(sig syscall.Signal) {
		m.t.Helper()
		if err := all[i].signal(sig); err != nil {
			m.t.Fatal(err)
		}
	}
	send(syscall.SIGSTOP)
	return func() { m.t.Helper(); send(syscall.SIGCONT) }
}

// result is how a command ended.
type result struct {
	out, err string
	code     int
}

func (m *machine) command(ctx context.Context, argv ...string) *exec.Cmd {
	argv = slices.Concat(m.as, argv)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.WaitDelay = time.Second
	return cmd
}

// run runs a command as tester.
func (m *machine) run(argv ...string) result {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), commandTime)
	defer cancel()
	cmd := m.command(ctx, argv...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		m.t.Errorf("%q: %v", argv, err)
	}
	if ctx.Err() != nil {
		m.t.Errorf("%q did not end in time; it said: %s%s", argv, &out, &errs)
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// must is run for what has to work; it gives what was printed.
func (m *machine) must(argv ...string) string {
	m.t.Helper()
	r := m.run(argv...)
	if r.code != 0 {
		m.t.Fatalf("%q: exit code %d: %s%s", argv, r.code, r.out, r.err)
	}
	return r.out
}

// ac and ctl are the two hands.
func (m *machine) ac(args ...string) result {
	m.t.Helper()
	return m.run(append([]string{"agentconnect"}, args...)...)
}

func (m *machine) ctl(args ...string) result {
	m.t.Helper()
	return m.run(append([]string{"systemctl", "--user"}, args...)...)
}

func (m *machine) mustAC(args ...string) string {
	m.t.Helper()
	return m.must(append([]string{"agentconnect"}, args...)...)
}

func (m *machine) mustCTL(args ...string) string {
	m.t.Helper()
	return m.must(append([]string{"systemctl", "--user"}, args...)...)
}

// fails runs a command that has to fail with that code and say each of the words.
func (m *machine) fails(r result, code int, words ...string) {
	m.t.Helper()
	if r.code != code {
		m.t.Errorf("exit code %d, want %d: %s%s", r.code, code, r.out, r.err)
	}
	for _, w := range words {
		if !strings.Contains(r.out+r.err, w) {
			m.t.Errorf("it does not say %q: %s%s", w, r.out, r.err)
		}
	}
}

// up starts the daemon, add adds agents with the selftest runtime, start starts them.
func (m *machine) up() {
	m.t.Helper()
	m.mustAC("up")
}

func (m *machine) add(id string, flags ...string) {
	m.t.Helper()
	if !slices.Contains(flags, "--command") {
		flags = append(flags, "--runtime", "selftest")
	}
	m.mustAC(append([]string{"agent", "add", id}, flags...)...)
}

func (m *machine) start(ids ...string) {
	m.t.Helper()
	for _, id := range ids {
		m.mustAC("agent", "start", id)
	}
}

// restartDaemon and killDaemon.
func (m *machine) killDaemon() {
	m.t.Helper()
	old := m.show("agentconnect.service", "MainPID")
	m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "agentconnect.service")
	m.until("the daemon is back", func() bool {
		p := m.show("agentconnect.service", "MainPID")
		return p != old && p != "0" && m.show("agentconnect.service", "ActiveState") == "active"
	})
}

// show gives one property of a unit.
func (m *machine) show(unit, property string) string {
	m.t.Helper()
	return strings.TrimSpace(m.run("systemctl", "--user", "show", "--value", "-p", property, unit).out)
}

func service(id string) string { return "agent@" + id + ".service" }
func scope(id string) string   { return "agent-" + id + ".scope" }

// status is what `agentconnect status` says.
func (m *machine) status() *control.Status {
	m.t.Helper()
	r := m.ac("status", "--json")
	var s control.Status
	if err := json.Unmarshal([]byte(r.out), &s); err != nil {
		m.t.Fatalf("status: %v: %s%s", err, r.out, r.err)
	}
	return &s
}

// agent is what the daemon says of an agent.
func (m *machine) agent(id string) control.AgentStatus {
	m.t.Helper()
	for _, a := range m.status().Agents {
		if a.ID == id {
			return a
		}
	}
	return control.AgentStatus{}
}

// becomes waits until both the daemon and systemd say that the agent is so.
func (m *machine) becomes(id, state string) {
	m.t.Helper()
	active := map[string]string{control.StateRunning: "active", control.StateStopped: "inactive", control.StateFailed: "failed", control.StateRefused: "failed"}[state]
	var is, unit string
	if !m.wait(func() bool {
		is, unit = m.agent(id).State, m.show(service(id), "ActiveState")
		return is == state && unit == active
	}) {
		m.t.Fatalf("%s: the daemon says %s, systemd %s; want %s and %s", id, is, unit, state, active)
	}
}

// works proves that an agent runs, in its scope and its sandbox, and answers.
func (m *machine) works(id string) {
	m.t.Helper()
	m.becomes(id, control.StateRunning)
	if out := m.mustAC("prompt", id, "echo hello from "+id); strings.TrimSpace(out) != "hello from "+id {
		m.t.Errorf("%s answers %q", id, out)
	}
	m.sound()
	if n := len(m.runtimes(id)); n != 1 {
		m.t.Errorf("%s has %d runtimes:\n%s", id, n, m.list())
	}
}

// wanted is the daemon's record of what is to run.
func (m *machine) wanted() []string {
	m.t.Helper()
	var w struct {
		Agents []string `json:"agents"`
	}
	b, err := os.ReadFile(root + "/state/wanted.json")
	if err == nil {
		err = json.Unmarshal(b, &w)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		m.t.Fatal(err)
	}
	return w.Agents
}

// units lists the loaded units of agents.
func (m *machine) units() []string {
	m.t.Helper()
	var out []string
	for line := range strings.Lines(m.run("systemctl", "--user", "list-units", "--all", "--plain", "--no-legend", "agent@*.service", "agent-*.scope", "agentconnect-*.scope", "agentconnect-*.slice").out) {
		if f := strings.Fields(line); len(f) > 3 {
			out = append(out, f[0]+" "+f[2])
		}
	}
	return out
}

// wait waits until something is so, and reports whether it came so.
func (m *machine) wait(is func() bool) bool {
	m.t.Helper()
	limit := patience
	if m.slow {
		limit = commandTime
	}
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(10 * time.Millisecond) { //nolint:forbidigo // looked for with a deadline; other processes make it
		if is() {
			return true
		}
	}
	return false
}

func (m *machine) until(what string, is func() bool) {
	m.t.Helper()
	if !m.wait(is) {
		m.t.Fatalf("never came: %s", what)
	}
}

// journal is what was logged since the test began. Not by a cursor: with one, older
// versions pass over the first line that matches.
func (m *machine) journal(args ...string) string {
	m.t.Helper()
	argv := []string{"journalctl", "--user", "--no-pager", "-q", fmt.Sprintf("--since=@%d.%06d", m.since.Unix(), m.since.Nanosecond()/1000)}
	return m.run(append(argv, args...)...).out
}

// logged waits until the journal has a line with the words.
func (m *machine) logged(words string, args ...string) {
	m.t.Helper()
	m.until(fmt.Sprintf("%q in the journal", words), func() bool { return strings.Contains(m.journal(args...), words) })
}

// file writes a file of tester's.
func (m *machine) file(path, text string, mode os.FileMode) {
	m.t.Helper()
	for dir := filepath.Dir(path); dir != home; dir = filepath.Dir(dir) {
		if dir == "/" {
			m.t.Fatalf("%s is not below %s", path, home)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		m.t.Fatal(err)
	}
	if os.Getuid() == 0 {
		m.mustRoot("chown", "-R", "tester:tester", home)
	}
}

// mustRoot runs a command as root, in a test that is root.
func (m *machine) mustRoot(argv ...string) string {
	m.t.Helper()
	out, err := exec.CommandContext(context.Background(), argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("%q: %v: %s", argv, err, out)
	}
	return string(out)
}

// process is one process of tester's.
type process struct {
	pid, ppid     int
	comm, cmdline string
	group         string // its control group
}

func (p process) String() string {
	return fmt.Sprintf("%d (of %d) %s %q in %s", p.pid, p.ppid, p.comm, p.cmdline, p.group)
}

// probing are the lines in which the probe says that all is well.
var probing = regexp.MustCompile(`(?m)^.*: ok       .*\n`)

// processes lists tester's processes, without those that have ended.
func processes() []process {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var out []process
	for _, e := range entries {
		var pid int
		if _, err := fmt.Sscan(e.Name(), &pid); err != nil {
			continue
		}
		if p, ok := look(pid); ok {
			out = append(out, p)
		}
	}
	return out
}

func look(pid int) (process, bool) {
	dir := fmt.Sprintf("/proc/%d/", pid)
	var st syscall.Stat_t
	if syscall.Stat(dir, &st) != nil {
		return process{}, false
	}
	stat, err := os.ReadFile(dir + "stat")
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if err != nil || open < 0 || end < open {
		return process{}, false
	}
	p := process{pid: pid, comm: string(stat[open+1 : end])}
	var state string
	if _, err := fmt.Sscan(string(stat[end+1:]), &state, &p.ppid); err != nil || state == "Z" || state == "X" {
		return process{}, false
	}
	// What it is before where it is: a program is executed only when it is in its place.
	cmdline, err := os.ReadFile(dir + "cmdline")
	if err != nil {
		return process{}, false
	}
	p.cmdline = strings.TrimSpace(strings.ReplaceAll(string(cmdline), "\x00", " "))
	group, err := os.ReadFile(dir + "cgroup")
	if err != nil {
		return process{}, false
	}
	for line := range strings.Lines(string(group)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			p.group = strings.TrimSuffix(strings.TrimSuffix(name, " (deleted)"), "/"+sandbox.CgroupBelow)
		}
	}
	// A last look: what has ended meanwhile may have shown a part of itself.
	again, err := os.ReadFile(dir + "stat")
	if err != nil || !bytes.Contains(again, []byte(") "+state)) && bytes.Contains(again, []byte(") Z")) {
		return process{}, false
	}
	return p, true
}

// signal signals it through a descriptor, if it is still the one that was listed.
func (p process) signal(sig syscall.Signal) error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if now, ok := look(p.pid); !ok || now.comm != p.comm || now.ppid != p.ppid {
		return os.ErrProcessDone
	}
	return unix.PidfdSendSignal(fd, sig, nil, 0)
}

// Names of our programs as the kernel cuts them.
const (
	commSupervisor = "agentconnect-su"
	commLauncher   = "agentconnect-la"
	commGuest      = "agentconnect-gu" // without a boundary
	commInside     = "guest"           // within one
)

// runtime reports whether a process is, or belongs to, a runtime or a command: whatever a
// scope has to hold.
func (p process) runtime() bool {
	return p.comm == "bwrap" || p.comm == commInside || p.comm == commGuest || strings.Contains(p.cmdline, "linger ")
}

func (p process) agents() bool {
	return p.runtime() || p.comm == commSupervisor || p.comm == commLauncher
}

// placed reports whether a runtime's process is where it has to be. The probe tries the
// boundary in a unit of its own.
func (p process) placed() bool {
	unit := filepath.Base(p.group)
	return strings.Contains(p.group, "/agentconnect.slice/") && strings.HasSuffix(unit, ".scope") &&
		(strings.HasPrefix(unit, "agent-") || strings.HasPrefix(unit, "agentconnect-exec-")) || unit == "agentconnect-probe.service"
}

// asked reports whether the daemon asks bubblewrap for its version, and nothing more: no
// program of an agent's runs in that process. Before its exec it has no words of its own.
func (p process) asked() bool {
	return filepath.Base(p.group) == "agentconnect.service" && p.comm == "bwrap" && (p.cmdline == "" || strings.HasSuffix(p.cmdline, "bwrap --version"))
}

// confined reports whether the process has a pid namespace of its own.
func (p process) confined() bool {
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", p.pid))
	if err != nil {
		return true // it has ended
	}
	ours, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && ours != theirs
}

// unsound lists what must never be: a runtime outside a scope, or a selftest runtime
// without a boundary, except those of the agents in free.
func unsound(free ...string) []string {
	var out []string
	for _, p := range processes() {
		switch {
		case !p.runtime(), p.asked():
		case !p.placed():
			out = append(out, "outside its scope: "+p.String())
		case (p.comm == commInside || p.comm == commGuest) && !p.confined() && !slices.ContainsFunc(free, func(id string) bool { return filepath.Base(p.group) == scope(id) }):
			out = append(out, "without a boundary: "+p.String())
		}
	}
	return out
}

func (m *machine) sound() {
	m.t.Helper()
	for _, bad := range unsound(m.free...) {
		m.t.Error(bad)
	}
}

// of lists the processes in the agent's units.
func (m *machine) of(id string) []process {
	var out []process
	for _, p := range processes() {
		switch unit := filepath.Base(p.group); {
		case unit == service(id), unit == scope(id), strings.HasPrefix(unit, "agentconnect-exec-"+id+"-"):
			out = append(out, p)
		}
	}
	return out
}

// runtimes lists the runtime processes of an agent: one, if all is well.
func (m *machine) runtimes(id string) []process {
	return slices.DeleteFunc(m.of(id), func(p process) bool {
		return p.comm != commInside && p.comm != commGuest || !strings.HasSuffix(p.cmdline, "selftest")
	})
}

// one finds the process of an agent with that name, the oldest where there are several.
func (m *machine) one(id, comm string) process {
	m.t.Helper()
	for _, p := range m.of(id) {
		if p.comm == comm {
			return p
		}
	}
	m.t.Fatalf("%s has no process %s:\n%s", id, comm, m.list())
	return process{}
}

// gone waits until nothing of the agent runs.
func (m *machine) gone(id string) {
	m.t.Helper()
	m.until("the end of every process of "+id, func() bool { return len(m.of(id)) == 0 })
	m.sound()
}

func (m *machine) list() string {
	var b strings.Builder
	for _, p := range processes() {
		fmt.Fprintln(&b, p)
	}
	return b.String()
}

// sampler looks for unsound processes while a test does its worst.
type sampler struct {
	stop chan struct{}
	wg   sync.WaitGroup
	mu   sync.Mutex
	bad  []string
	n    int
}

func sample(free ...string) *sampler {
	s := &sampler{stop: make(chan struct{})}
	s.wg.Go(func() {
		for {
			bad := unsound(free...)
			s.mu.Lock()
			s.n++
			s.bad = append(s.bad, bad...)
			s.mu.Unlock()
			select {
			case <-s.stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	return s
}

// end ends the looking and reports what was seen.
func (s *sampler) end(t testing.TB) int {
	t.Helper()
	close(s.stop)
	s.wg.Wait()
	for i, b := range s.bad {
		if i < 20 {
			t.Errorf("seen in passing: %s", b)
		}
	}
	return s.n
}
