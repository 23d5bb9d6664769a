package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// inside picks the self-test runtime's own process below the daemon, as the host sees it.
func (s *site) runtime() process {
	s.t.Helper()
	var found process
	s.until("the runtime runs", func() bool {
		for _, p := range s.family() {
			if p.cmdline() == "/run/agentconnect/guest selftest" {
				found = p
				return true
			}
		}
		return false
	})
	return found
}

func TestEditorClosesItsPipeAndABackgroundServerLivesAsLongAsTheAgent(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	e := s.attach("alice")
	id := e.session(s.workspace("alice"))
	server := s.base + "/server"
	if got := e.prompt(id, "fork "+server); !strings.HasPrefix(got, "forked ") {
		t.Fatalf("%q", got)
	}
	e.begin("session/prompt", say(id, "sleep 100"))
	s.until("the client is counted", func() bool { return s.agent("alice").Clients == 1 })
	if code := e.close(); code != 0 {
		t.Errorf("agentconnect acp: exit %d: %s", code, e.errs)
	}
	s.until("the client is gone", func() bool { return s.agent("alice").Clients == 0 })
	// Its session ended: the turn was cancelled, so another editor may load it and go on.
	other := s.attach("alice")
	other.must("initialize", hello)
	s.until("the session can be loaded and prompted", func() bool {
		if _, err := other.call("session/load", object{"sessionId": id, "cwd": s.workspace("alice"), "mcpServers": []any{}}); err != nil {
			return false
		}
		_, err := other.call("session/prompt", say(id, "echo mine now"))
		return err == nil
	})
	if got := mentioning(server); len(got) != 1 {
		t.Errorf("the background server: %v, want one", got)
	}
	before := s.agent("alice").PID
	s.ok("agent", "stop", "alice")
	if got := mentioning(server); len(got) != 0 {
		t.Errorf("the background server outlived the agent: %v", got)
	}
	if before == 0 {
		t.Error("the agent had ended before")
	}
}

func TestRestartStormEndsInFailedWithAClearReason(t *testing.T) {
	s := newSite(t)
	runs := filepath.Join(s.workspace("alice"), "runs")
	s.script("alice", "echo x >>"+runs+"\necho 'licence expired' >&2\nexit 3")
	s.start()
	s.run("agent", "start", "alice")
	st := s.untilState("alice", control.StateFailed)
	for _, word := range []string{"failed 5 times", "exit status 3", "agentconnect agent logs alice"} {
		if !strings.Contains(st.Reason, word) {
			t.Errorf("the reason does not say %q: %s", word, st.Reason)
		}
	}
	if n := strings.Count(s.read(runs), "x"); n != 5 {
		t.Errorf("it ran %d times, want 5", n)
	}
	if got := s.ok("agent", "logs", "alice"); !strings.Contains(got, "licence expired") {
		t.Errorf("the log: %s", got)
	}
	if got := s.ok("status"); !strings.Contains(got, "failed") || !strings.Contains(got, "exit status 3") {
		t.Errorf("status: %s", got)
	}
	// Mended, a person's start is enough.
	s.write("runtimes/alice/runtime", "#!/bin/sh\nexec /run/agentconnect/guest selftest\n")
	if got := s.ok("prompt", "alice", "echo mended"); got != "mended\n" {
		t.Errorf("%q", got)
	}
}

func TestRuntimeKilledClientsStayAndSessionsLoadAgain(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	ws := s.workspace("alice")
	one, two := s.attach("alice"), s.attach("alice")
	first, second := one.session(ws), two.session(ws)
	one.prompt(first, "echo remember me")
	two.prompt(second, "echo and me")
	open := []*call{one.begin("session/prompt", say(first, "sleep 100")), two.begin("session/prompt", say(second, "sleep 100"))}
	s.runtime().kill()
	for i, c := range open {
		if r, err := c.end(); err == nil || !strings.Contains(err.Error(), "ended") || !strings.Contains(err.Error(), "loaded again") {
			t.Errorf("open request %d: %s %v", i, r, err)
		}
	}
	for i, c := range []struct {
		e       *editor
		session string
		told    string
	}{{one, first, "remember me"}, {two, second, "and me"}} {
		if !c.e.up() {
			t.Fatalf("client %d went away: %s", i, c.e.errs)
		}
		before := len(c.e.got())
		c.e.must("session/load", object{"sessionId": c.session, "cwd": ws, "mcpServers": []any{}})
		replay := ""
		for _, f := range c.e.got()[before:] {
			replay += string(f.Params)
		}
		if !strings.Contains(replay, c.told) {
			t.Errorf("client %d: loaded without its history: %s", i, replay)
		}
		if got := c.e.prompt(c.session, "echo back"); got != "back" {
			t.Errorf("client %d: %q", i, got)
		}
	}
}

func TestDaemonKilledEndsItsAgentsAndTheNextStartsWhatWasWanted(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.add("bob")
	s.script("free", s.free()+"\nexec $guest selftest", "--no-sandbox")
	s.add("carol")
	s.start()
	for _, id := range []string{"alice", "bob", "free", "carol"} {
		s.ok("prompt", id, "fork "+s.base+"/tag-"+id)
	}
	s.ok("agent", "stop", "carol")
	family := s.family()
	if n := len(mentioning(s.base + "/tag")); n != 3 {
		t.Fatalf("%d forked processes, want 3", n)
	}
	s.killDaemon()
	s.gone(family)
	if left := mentioning(s.base + "/tag"); len(left) > 0 {
		t.Errorf("left running: %v", left)
	}
	if st := s.status(); st.State != "stopped" || !strings.Contains(st.Reason, "killed") {
		t.Errorf("status: %s: %s", st.State, st.Reason)
	}
	s.fails(75, nil, "agent", "start", "alice")
	s.start()
	for _, id := range []string{"alice", "bob", "free"} {
		s.untilState(id, control.StateRunning)
	}
	if st := s.agent("carol"); st.State != control.StateStopped {
		t.Errorf("carol, who was stopped: %s", st.State)
	}
}

// Whichever process dies, nothing of the agent is left, and the daemon brings it back.
func TestSupervisorOrBwrapKilledLeavesNothingAndTheAgentComesBack(t *testing.T) {
	for _, c := range []struct {
		name, victim string
	}{
		{"supervisor", "agentconnect-supervisor"},
		{"bwrap", "bwrap"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSite(t)
			s.add("alice")
			s.start()
			s.ok("prompt", "alice", "fork "+s.base+"/tag")
			family := s.family()
			victim := s.one(c.victim) // the outer one: parents come first
			victim.kill()
			s.gone(family)
			if left := mentioning(s.base + "/tag"); len(left) > 0 {
				t.Errorf("left running: %v", left)
			}
			// The daemon may hear of the end only after all of it is gone.
			s.until("the daemon has restarted it", func() bool { return s.agent("alice").Restarts > 0 })
			if st := s.untilState("alice", control.StateRunning); st.Restarts != 1 || st.PID == victim.pid {
				t.Errorf("%+v", st)
			}
			if got := s.ok("prompt", "alice", "echo back"); got != "back\n" {
				t.Errorf("%q", got)
			}
		})
	}
}

// Without a boundary the runtime ends with its supervisor all the same, and does not need
// to read its stdin for that.
func TestSupervisorOfAFreeAgentKilledEndsTheRuntime(t *testing.T) {
	s := newSite(t)
	s.script("alice", s.free()+"\nexec 3<&0\n$guest selftest <&3 &\nwait\nexec sleep 600", "--no-sandbox")
	s.start()
	s.ok("agent", "start", "alice")
	family := s.family()
	s.one("agentconnect-supervisor").kill()
	s.gone(family)
	s.untilState("alice", control.StateRunning)
}

func TestLauncherKilledDuringAStartRunsNothingAndTheNextStartWorks(t *testing.T) {
	s := newSite(t)
	var grants []string
	for i := range 300 { // so that the launcher is at work long enough to be met
		grants = append(grants, "--grant", s.mkdir(fmt.Sprintf("g/%d", i))+":ro")
	}
	mark := s.marker("alice", grants...)
	s.start()
	caught := 0
	for try := 0; caught < 2 && try < 50; try++ {
		done := make(chan result, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			out, err := s.agentconnect(ctx, "agent", "start", "alice").CombinedOutput()
			code := 0
			if err != nil {
				code = 1
			}
			done <- result{out: string(out), code: code}
		}()
		killed := false
		var r result
		for over := false; !over; {
			select {
			case r = <-done:
				over = true
			default:
				for _, p := range s.family() {
					if p.name() == "agentconnect-la" && !killed {
						p.kill()
						killed = true
					}
				}
			}
		}
		if killed && r.code != 0 {
			caught++
			if exists(mark) {
				t.Errorf("the agent ran although its launcher was killed: %s", r.out)
			}
			if !strings.Contains(r.out, "launcher") {
				t.Errorf("the error does not say what happened: %s", r.out)
			}
			if left := s.family(); len(left) > 0 {
				s.gone(left)
			}
			continue
		}
		s.ok("agent", "stop", "alice")
		os.Remove(mark)
	}
	if caught == 0 {
		t.Fatal("the launcher was never met at work")
	}
	if got := s.ok("prompt", "alice", "echo back"); got != "back\n" {
		t.Errorf("%q", got)
	}
	if !exists(mark) {
		t.Error("the control: the agent's mark is not there")
	}
}

// A command that somebody runs beside the agent dies with whoever runs it.
func TestExecEndsWithItsClientAndWithTheDaemon(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	for _, end := range []string{"client killed", "daemon killed"} {
		tag := s.base + "/" + strings.ReplaceAll(end, " ", "-")
		cmd := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "/bin/sh", "-c", "setsid sh -c 'sleep 600; : "+tag+"' & sleep 600; : "+tag)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		s.until("it runs", func() bool { return len(mentioning(tag)) >= 3 }) // our own client, and two inside
		inside := s.family()
		if end == "client killed" {
			cmd.Process.Kill()
		} else {
			s.killDaemon()
		}
		cmd.Wait()
		s.gone(inside)
		if left := mentioning(tag); len(left) > 0 {
			t.Errorf("%s: left running: %v", end, left)
		}
	}
}

func TestIDsOfEveryAllowedKindRunAndOthersAreRefusedEverywhere(t *testing.T) {
	s := newSite(t)
	long := strings.Repeat("a", 63)
	good := []string{"0", "9-a_b", "a--b", "a_", long, strings.Repeat("b", 62) + "-"}
	bad := []string{"", "-x", "_x", "../x", "..", ".", "a@b", "x.service", "a/b", "Upper", "ünï", "a b", "a\nb", "a:b", "a\\x2db", strings.Repeat("a", 64), "%61", "a\x00b"}
	for _, id := range good {
		s.add(id)
	}
	s.start()
	for _, id := range good {
		if got := s.ok("prompt", id, "echo I am "+id); got != "I am "+id+"\n" {
			t.Errorf("%s: %q", id, got)
		}
		if got := s.works(id, "echo inside"); got != "inside\n" {
			t.Errorf("%s: %q", id, got)
		}
	}
	for _, id := range bad {
		if strings.ContainsRune(id, 0) {
			continue // no program can be given it
		}
		for _, args := range [][]string{
			{"agent", "add", "--runtime", "selftest", "--", id}, {"agent", "start", "--", id}, {"agent", "stop", "--", id}, {"agent", "show", "--", id},
			{"agent", "rm", "--purge", "--", id}, {"agent", "logs", "--", id}, {"acp", "--", id}, {"prompt", "--", id, "hello"}, {"explain", "--", id}, {"agent", "exec", "--", id, "true"},
		} {
			if r := s.run(args...); r.code != 2 {
				t.Errorf("agentconnect %q: exit %d, want 2: %s%s", args, r.code, r.out, r.err)
			}
		}
	}
	// Past the command line, the daemon holds to the same rule.
	for _, id := range bad {
		if id == "" || id == "." || id == ".." {
			continue // no path of the protocol
		}
		if st, err := s.client().Start(context.Background(), id); err == nil {
			t.Errorf("the daemon started %q: %+v", id, st)
		}
	}
	made, err := filepath.Glob(filepath.Join(s.root, "agents", "*", "agent.json"))
	if err != nil || len(made) != len(good) {
		t.Errorf("agents: %v %v", made, err)
	}
}

func TestStopInTheMiddleOfAStartLeavesNothing(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	for range 5 {
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.agentconnect(context.Background(), "agent", "start", "alice").Run()
		}()
		select {
		case <-done:
		case <-time.After(5 * time.Millisecond):
		}
		s.ok("agent", "stop", "alice")
		<-done
		s.ok("agent", "stop", "alice") // the start may have come last
		if left := s.family(); len(left) > 0 {
			t.Errorf("left running: %v", left)
			s.gone(left)
		}
	}
	s.ok("prompt", "alice", "echo fine")
}

// The daemon stops its agents in order: a runtime that hears SIGTERM gets its time.
func TestDownStopsAgentsInOrderAndWantsThemAgain(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	s.ok("prompt", "alice", "echo hello")
	family := s.family()
	s.daemon.Process.Signal(syscall.SIGTERM)
	if code := s.wait(); code != 0 && code != 128+int(syscall.SIGTERM) {
		t.Errorf("exit %d", code)
	}
	for _, p := range family {
		if p.alive() {
			t.Errorf("%d %q outlived the daemon's own end", p.pid, p.cmdline())
		}
	}
	s.start()
	s.untilState("alice", control.StateRunning)
}

// What was said in status while the daemon was up is what its record says later.
func TestStatusAnswersRunningRefusedAndDown(t *testing.T) {
	s := newSite(t)
	if st := s.status(); st.State != "stopped" || st.Reason != "never started here" {
		t.Errorf("%+v", st)
	}
	s.add("alice")
	s.start()
	s.ok("prompt", "alice", "echo hello")
	st := s.status()
	if st.State != "running" || st.PID != s.daemon.Process.Pid || st.Supervisor != "direct" || len(st.Log) == 0 || st.Agents[0].State != control.StateRunning {
		t.Errorf("%+v", st)
	}
	s.ok("down")
	s.wait()
	if st := s.status(); st.State != "stopped" || len(st.Agents) != 1 || st.Agents[0].State != control.StateStopped || st.Agents[0].PID != 0 || len(st.Log) == 0 {
		t.Errorf("%+v", st)
	}
}

// needLimits skips where nobody can limit what is counted for a user namespace: /proc/sys is
// read-only in most containers.
func needLimits(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("unshare", "-Ur", "sh", "-c", "echo 7 >/proc/sys/user/max_inotify_instances").CombinedOutput(); err != nil {
		t.Skipf("/proc/sys cannot be written: %v: %s", err, out)
	}
}

// A user has 128 inotify instances, and each running agent takes one.
func TestAnAgentLeavesOthersInotifyInstances(t *testing.T) {
	needLimits(t)
	s := newSite(t)
	s.add("alice")
	s.add("bob")
	s.start()
	s.ok("agent", "start", "alice")
	most, err := os.ReadFile("/proc/sys/fs/inotify/max_user_instances")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(string(most))); err != nil || n > 4096 {
		t.Skipf("%d instances (%v) are more than a process may take here", n, err)
	}
	greedy := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "python3", "-u", "-c", `
import ctypes, sys
libc = ctypes.CDLL(None); n = 0
while libc.inotify_init1(0) >= 0: n += 1
print('took', n)
sys.stdin.read()
`)
	in, err := greedy.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := greedy.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := greedy.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); greedy.Wait() }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if !strings.HasPrefix(line, "took ") || line == "took 0\n" {
		t.Fatal(line, err)
	}
	t.Log(line)
	s.ok("agent", "start", "bob")
}

// Every start needs namespaces of each kind, and they are counted for the user.
func TestAnAgentLeavesOthersNamespaces(t *testing.T) {
	needLimits(t)
	s := newSite(t)
	s.add("alice", "--nesting", "on")
	s.start()
	s.ok("agent", "start", "alice")
	number := func(text string) int {
		t.Helper()
		n, err := strconv.Atoi(strings.TrimSpace(text))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	threads := number(s.outside("cat /proc/sys/kernel/threads-max"))
	for _, kind := range []string{"user", "mnt", "net", "pid", "ipc", "uts", "cgroup"} {
		file := "cat /proc/sys/user/max_" + kind + "_namespaces"
		if has := number(s.outside(file)); has < threads/2 {
			t.Logf("of %s namespaces this user has %d, less than the kernel gives", kind, has)
		}
		// As whoever is in the user namespace that is above bubblewrap's own sees it.
		inside := number(s.outside(fmt.Sprintf("nsenter --preserve-credentials -U -t %d %s", s.one("bwrap").pid, file)))
		if inside != threads/4 {
			t.Errorf("an agent may make %d %s namespaces, want %d", inside, kind, threads/4)
		}
	}
	if id := s.ok("agent", "exec", "alice", "--", "unshare", "-Ur", "id", "-u"); id != "0\n" {
		t.Errorf("the control: it can make one: %q", id)
	}
}
