// A site: one ROOT with its daemon, its agents, and what the tests do to them.

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/testhost"
)

func TestMain(m *testing.M) {
	if dialed() || spoken() || swapped() || hosted() || withoutNFT() {
		return
	}
	code := m.Run()
	testhost.Clean()
	os.Exit(code)
}

// patience is how long anything may take that a test waits for. Reaching it is a failure.
const patience = 120 * time.Second

// site is one ROOT below the real home, where people have theirs, with nothing of the
// user's own AgentConnect in reach.
type site struct {
	t    *testing.T
	bin  string
	home string // the real home: the daemon's is that of the passwd database
	base string // everything the test makes lies here
	root string
	env  []string
	tag  string // a word of this site alone
	// within is how a command enters the test's namespaces; empty for the host as it is.
	within []string
	// view is where the root of those namespaces is seen from outside; empty for the host.
	view string

	daemon *exec.Cmd
	ended  chan struct{}
	out    *output
}

// output collects what a program prints while it still runs.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// newSite makes a site without a daemon. It runs the test beside others.
func newSite(t *testing.T) *site {
	t.Helper()
	testhost.NeedBoundary(t)
	t.Parallel()
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, bin: testhost.Bin(t), home: home, base: testhost.Home(t)}
	s.root = filepath.Join(s.base, "r")
	s.tag = "e2e-" + filepath.Base(s.base)
	s.env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + home, "LANG=C.UTF-8", "AGENTCONNECT_ROOT=" + s.root, programs.LibexecEnv + "=" + s.bin}
	t.Cleanup(s.close)
	return s
}

// close ends the daemon and finds what it left running.
func (s *site) close() {
	if s.daemon != nil {
		family := s.family()
		s.daemon.Process.Signal(syscall.SIGTERM)
		select {
		case <-s.ended:
		case <-time.After(patience):
			s.t.Errorf("the daemon did not end on SIGTERM; it said:\n%s", s.out)
			s.daemon.Process.Kill()
			<-s.ended
		}
		s.gone(family)
		s.daemon = nil
	}
	// Whatever was started here has a path below base in its arguments or environment.
	for _, p := range mentioning(s.base) {
		s.t.Errorf("left running: %d %q", p.pid, p.cmdline())
		p.kill()
	}
	if s.t.Failed() && s.out != nil {
		s.t.Logf("the daemon said:\n%s", s.out)
	}
}

// start starts the daemon and waits until it answers.
func (s *site) start(flags ...string) {
	s.t.Helper()
	s.launch(flags...)
	s.until("the daemon answers", func() bool {
		select {
		case <-s.ended:
			s.t.Fatalf("the daemon ended: %v\n%s", s.daemon.ProcessState, s.out)
		default:
		}
		st, err := s.client().Status(context.Background())
		return err == nil && st.Probe != nil
	})
}

// launch starts the daemon.
func (s *site) launch(flags ...string) {
	s.t.Helper()
	argv := slices.Concat(s.within, []string{filepath.Join(s.bin, "agentconnect"), "run", "--supervisor", "direct"}, flags)
	cmd := exec.Command(argv[0], argv[1:]...)
	s.out = &output{}
	cmd.Env, cmd.Dir, cmd.Stdout, cmd.Stderr = s.env, s.base, s.out, s.out
	// Its own group, so that an interrupt of the tests' terminal leaves it to close.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	s.daemon, s.ended = cmd, ended
}

// killDaemon is kill -9.
func (s *site) killDaemon() {
	s.daemon.Process.Kill()
	<-s.ended
	s.daemon = nil
}

// wait waits for the daemon's end and gives its exit code.
func (s *site) wait() int {
	s.t.Helper()
	select {
	case <-s.ended:
	case <-time.After(patience):
		s.t.Fatalf("the daemon does not end; it said:\n%s", s.out)
	}
	code := s.daemon.ProcessState.ExitCode()
	s.daemon = nil
	return code
}

func (s *site) client() *control.Client {
	return control.NewClient(filepath.Join(s.view+s.root, "run", "control.sock"))
}

// result is how a command ended.
type result struct {
	out, err string
	code     int
}

// command is one of our programs, or another, as a person at this site would start it.
func (s *site) command(ctx context.Context, argv ...string) *exec.Cmd {
	argv = slices.Concat(s.within, argv)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Dir = s.env, s.base
	cmd.WaitDelay = time.Second
	return cmd
}

func (s *site) agentconnect(ctx context.Context, args ...string) *exec.Cmd {
	return s.command(ctx, append([]string{filepath.Join(s.bin, "agentconnect")}, args...)...)
}

// run runs agentconnect.
func (s *site) run(args ...string) result {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return s.finish(s.agentconnect(ctx, args...))
}

func (s *site) finish(cmd *exec.Cmd) result {
	s.t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if err != nil && !errors.As(err, new(*exec.ExitError)) {
		s.t.Fatalf("%q: %v", cmd.Args, err)
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// ok runs agentconnect, which must end well, and gives its stdout.
func (s *site) ok(args ...string) string {
	s.t.Helper()
	r := s.run(args...)
	if r.code != 0 {
		s.t.Fatalf("agentconnect %q: exit %d: %s%s", args, r.code, r.out, r.err)
	}
	return r.out
}

// fails runs agentconnect, which must end with code and say each of words on stderr.
func (s *site) fails(code int, words []string, args ...string) {
	s.t.Helper()
	r := s.run(args...)
	if r.code != code {
		s.t.Errorf("agentconnect %q: exit %d, want %d: %s%s", args, r.code, code, r.out, r.err)
	}
	for _, w := range words {
		if !strings.Contains(r.err, w) {
			s.t.Errorf("agentconnect %q does not say %q: %s", args, w, r.err)
		}
	}
}

// add adds an agent that runs the self-test runtime.
func (s *site) add(id string, flags ...string) {
	s.t.Helper()
	s.ok(append([]string{"agent", "add", id, "--runtime", "selftest"}, flags...)...)
}

// script adds an agent whose runtime is a shell script of the test's. The script's last
// act may be `exec "$guest" selftest`: a real agent.
func (s *site) script(id, text string, flags ...string) {
	s.t.Helper()
	path := s.write(filepath.Join("runtimes", id, "runtime"), "#!/bin/sh\nguest=/run/agentconnect/guest\n"+text+"\n")
	s.executable(path)
	s.ok(append([]string{"agent", "add", id, "--command", path}, flags...)...)
}

// free is what a script does first that runs without a boundary: the guest is elsewhere,
// and the self-test must not keep its sessions in the user's real home.
func (s *site) free() string {
	return "guest=" + s.bin + "/agentconnect-guest; export HOME=" + s.mkdir("freehome")
}

func (s *site) executable(path string) {
	s.t.Helper()
	if err := os.Chmod(path, 0o755); err != nil {
		s.t.Fatal(err)
	}
}

// path is below base, unless it is absolute.
func (s *site) path(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(s.base, path)
}

func (s *site) mkdir(path string) string {
	s.t.Helper()
	if err := os.MkdirAll(s.path(path), 0o700); err != nil {
		s.t.Fatal(err)
	}
	return s.path(path)
}

func (s *site) write(path, text string) string {
	s.t.Helper()
	s.mkdir(filepath.Dir(s.path(path)))
	if err := os.WriteFile(s.path(path), []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	return s.path(path)
}

func (s *site) read(path string) string {
	s.t.Helper()
	b, err := os.ReadFile(s.path(path))
	if err != nil {
		s.t.Fatal(err)
	}
	return string(b)
}

func (s *site) link(to, path string) string {
	s.t.Helper()
	s.mkdir(filepath.Dir(s.path(path)))
	if err := os.Symlink(to, s.path(path)); err != nil {
		s.t.Fatal(err)
	}
	return s.path(path)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func (s *site) agentDir(id string) string  { return filepath.Join(s.root, "agents", id) }
func (s *site) workspace(id string) string { return filepath.Join(s.agentDir(id), "workspace") }

// sh runs a shell script inside the agent.
func (s *site) sh(id, script string) result {
	s.t.Helper()
	return s.run("agent", "exec", id, "--", "/bin/sh", "-c", script)
}

// works runs a script inside, which must end well, and gives what it printed.
func (s *site) works(id, script string) string {
	s.t.Helper()
	r := s.sh(id, script)
	if r.code != 0 {
		s.t.Fatalf("inside: %s\nexit %d: %s%s", script, r.code, r.out, r.err)
	}
	return r.out
}

// refused runs a script inside, which must fail there and, as its control, work outside.
func (s *site) refused(id, script string) {
	s.t.Helper()
	if r := s.sh(id, script); r.code == 0 {
		s.t.Errorf("inside it worked: %s\n%s", script, r.out)
	}
	cmd := s.command(context.Background(), "/bin/sh", "-c", script)
	cmd.Dir = s.workspace(id)
	if r := s.finish(cmd); r.code != 0 {
		s.t.Errorf("outside it fails too, so it proves nothing: %s\nexit %d: %s", script, r.code, r.err)
	}
}

// outside runs a script as the user, beside the agents.
func (s *site) outside(script string) string {
	s.t.Helper()
	r := s.finish(s.command(context.Background(), "/bin/sh", "-c", script))
	if r.code != 0 {
		s.t.Fatalf("%s\nexit %d: %s%s", script, r.code, r.out, r.err)
	}
	return r.out
}

func (s *site) status() *control.Status {
	s.t.Helper()
	var st control.Status
	if err := json.Unmarshal([]byte(s.ok("status", "--json")), &st); err != nil {
		s.t.Fatal(err)
	}
	return &st
}

// agent asks the daemon for one agent.
func (s *site) agent(id string) *control.AgentStatus {
	s.t.Helper()
	st, err := s.client().Agent(context.Background(), id)
	if err != nil {
		s.t.Fatal(err)
	}
	return st
}

// untilState waits for an agent's state.
func (s *site) untilState(id, state string) *control.AgentStatus {
	s.t.Helper()
	var st *control.AgentStatus
	s.until(id+" is "+state, func() bool {
		st = s.agent(id)
		return st.State == state
	})
	return st
}

// until asks again and again until it is so.
func (s *site) until(what string, is func() bool) {
	s.t.Helper()
	end := time.NewTimer(patience)
	defer end.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-end.C:
			s.t.Fatalf("never came: %s", what)
		case <-tick.C:
		}
	}
}

// process is one process, by its number and its start: numbers are used again.
type process struct {
	pid   int
	start string
}

// processOf gives the process that has the number now.
func processOf(pid int) (process, bool) {
	fields := statFields(pid)
	if len(fields) < 20 || fields[0] == "Z" {
		return process{}, false
	}
	return process{pid, fields[19]}, true
}

// statFields are those of /proc/PID/stat behind the name, the state first.
func statFields(pid int) []string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	i := bytes.LastIndexByte(b, ')')
	return strings.Fields(string(b[i+1:]))
}

func (p process) alive() bool {
	now, ok := processOf(p.pid)
	return ok && now == p
}

func (p process) cmdline() string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
	return strings.TrimRight(strings.ReplaceAll(string(b), "\x00", " "), " ")
}

func (p process) environ() string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))
	return string(b)
}

func (p process) name() string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.pid))
	return strings.TrimSpace(string(b))
}

// kill is kill -9 of this process and of nothing else.
func (p process) kill() { p.signal(syscall.SIGKILL) }

func (p process) signal(sig syscall.Signal) {
	if p.pid > 1 && p.alive() {
		syscall.Kill(p.pid, sig)
	}
}

func allPIDs() []int {
	entries, _ := os.ReadDir("/proc")
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// family lists everything below the daemon, itself left out.
func (s *site) family() []process { return below(s.daemon.Process.Pid) }

// below lists the descendants of a process, parents first.
func below(pid int) []process {
	children := map[int][]int{}
	for _, p := range allPIDs() {
		if f := statFields(p); len(f) > 1 {
			if parent, err := strconv.Atoi(f[1]); err == nil {
				children[parent] = append(children[parent], p)
			}
		}
	}
	var out []process
	for queue := children[pid]; len(queue) > 0; queue = queue[1:] {
		if p, ok := processOf(queue[0]); ok {
			out = append(out, p)
		}
		queue = append(queue, children[queue[0]]...)
	}
	return out
}

// gone waits until none of the processes is there any more.
func (s *site) gone(family []process) {
	s.t.Helper()
	end := time.Now().Add(patience)
	for _, p := range family {
		for p.alive() {
			if time.Now().After(end) {
				s.t.Errorf("still running: %d %q", p.pid, p.cmdline())
				p.kill()
				break
			}
			select {
			case <-time.After(10 * time.Millisecond):
			case <-s.t.Context().Done(): // in a cleanup it has ended already
			}
		}
	}
}

// mentioning lists the processes with a word in their arguments or environment.
func mentioning(word string) []process {
	var out []process
	for _, pid := range allPIDs() {
		p, ok := processOf(pid)
		if ok && pid != os.Getpid() && (strings.Contains(p.cmdline(), word) || strings.Contains(p.environ(), word)) {
			out = append(out, p)
		}
	}
	return out
}

// one picks the process below the daemon with this name, which must be there.
func (s *site) one(name string) process {
	s.t.Helper()
	var found process
	s.until(name+" runs", func() bool {
		for _, p := range s.family() {
			// The kernel keeps 15 bytes of a name.
			if p.name() == name[:min(len(name), 15)] {
				found = p
				return true
			}
		}
		return false
	})
	return found
}

// namespace puts the site into user and mount namespaces of its own, where setup (a
// shell script with all capabilities) has changed what it wants. The function that it
// returns runs further such scripts. more are namespaces as unshare and nsenter call them.
func (s *site) namespace(setup string, more ...string) func(script string) {
	s.t.Helper()
	cmd := exec.Command("unshare", slices.Concat([]string{"--user", "--mount", "--map-current-user", "--keep-caps", "--propagation", "private"}, more,
		[]string{"/bin/sh", "-c", `while read -r line; do eval "$line" && echo done || echo "failed: $line"; done`})...)
	var errs output
	cmd.Env, cmd.Dir, cmd.Stderr = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, "/", &errs
	cmd.WaitDelay = time.Second
	in, err := cmd.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { in.Close(); cmd.Wait() })
	lines := newLines(out)
	do := func(script string) {
		s.t.Helper()
		if _, err := io.WriteString(in, script+"\n"); err != nil {
			s.t.Fatal(err)
		}
		if line, ok := lines.next(patience); !ok || line != "done" {
			s.t.Fatalf("in the namespace: %s: %s%s", script, line, &errs)
		}
	}
	do("true")
	do(setup)
	// Entering by the namespace's owner; a program started so has no capability.
	s.within = slices.Concat([]string{"nsenter", "--preserve-credentials", "--user", "--mount"}, more, []string{"--target", strconv.Itoa(cmd.Process.Pid), "--"})
	s.view = fmt.Sprintf("/proc/%d/root", cmd.Process.Pid)
	s.t.Cleanup(s.close) // before the namespaces end
	return do
}
