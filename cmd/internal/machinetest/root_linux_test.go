// What only root can do to the machine: take bubblewrap away, end the session.

package machinetest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// breakable gives what takes bubblewrap away, and what brings it back.
func (m *machine) breakable() (broken, whole func()) {
	m.t.Helper()
	const at, aside = "/usr/bin/bwrap", "/usr/bin/bwrap.aside"
	move := func(from, to string) func() {
		return func() {
			if err := os.Rename(from, to); err != nil && !os.IsNotExist(err) {
				m.t.Error(err)
			}
		}
	}
	m.t.Cleanup(move(aside, at))
	return move(at, aside), move(aside, at)
}

func TestRootFailedProbeStopsNoAgentAndStartsNone(t *testing.T) {
	m := newRootMachine(t)
	broken, whole := m.breakable()
	m.up()
	for _, id := range []string{"alice", "bob", "carol"} {
		m.add(id)
		m.start(id)
	}
	m.mustAC("agent", "stop", "bob")
	supervisor := m.show(service("alice"), "MainPID")

	// To probe again touches nobody.
	m.mustAC("probe")
	m.mustCTL("reload", "agentconnect-probe.service")
	m.fails(m.ctl("stop", "agentconnect-probe.service"), 4, "refused")
	m.fails(m.ctl("restart", "agentconnect-probe.service"), 4, "refused")
	m.works("alice")
	if now := m.show(service("alice"), "MainPID"); now != supervisor {
		t.Errorf("probing again restarted an agent")
	}

	broken()
	m.fails(m.ac("probe"), 69, "bwrap-missing")
	m.becomes("alice", control.StateRunning)
	if now := m.show(service("alice"), "MainPID"); now != supervisor {
		t.Errorf("a failed probe restarted an agent")
	}
	m.mustAC("prompt", "alice", "echo still here")
	m.fails(m.ac("agent", "start", "bob"), 69, "bwrap-missing")
	for range 20 {
		m.fails(m.ctl("start", "agent@bob"), 1)
		m.gone("bob")
	}
	if log := m.journal("-u", service("bob")); strings.Contains(log, "too quickly") || !strings.Contains(log, "the sandbox") {
		t.Errorf("bob's log:\n%s", log)
	}
	m.until("status says that bob is refused", func() bool {
		a := m.agent("bob")
		return a.State == control.StateRefused && strings.Contains(a.Reason, "bwrap-missing")
	})
	// A supervisor that crashes comes back to the same refusal, with a daemon or without.
	m.mustCTL("kill", "-s", "KILL", "agent@carol")
	m.gone("carol")
	m.becomes("carol", control.StateRefused)
	m.mustCTL("stop", "agentconnect.service")
	m.mustCTL("kill", "-s", "KILL", "agent@alice")
	m.until("alice is refused", func() bool { return m.show(service("alice"), "ActiveState") == "failed" })
	if code := m.show(service("alice"), "ExecMainStatus"); code != "69" {
		t.Errorf("alice's supervisor ended with %s", code)
	}
	m.gone("alice")

	whole()
	m.up()
	m.works("alice")
	m.works("bob") // wanted since it was asked for
	m.works("carol")
	if log := m.journal(); strings.Contains(log, "too quickly") {
		t.Error("refused starts used up the limit of starts")
	}

	// After recovery under the daemon's eyes, too.
	broken()
	m.fails(m.ac("probe"), 69)
	m.mustCTL("kill", "-s", "KILL", "agent@alice")
	m.becomes("alice", control.StateRefused)
	whole()
	m.mustAC("probe")
	m.works("alice")
}

// A probe that cannot even say so counts as failed: an old good word is not believed.
func TestRootProbeThatCannotRunIsAFailedProbe(t *testing.T) {
	m := newRootMachine(t)
	drop := m.brokenProbe()
	m.fails(m.ctl("start", "agent@alice"), 1)
	m.gone("alice")
	// A crash without a daemon: the spec is there, the probe's word is not.
	m.becomes("bob", control.StateRunning)
	m.mustCTL("stop", "agentconnect.service")
	m.mustCTL("kill", "-s", "KILL", "agent@bob")
	m.until("bob is refused", func() bool { return m.show(service("bob"), "ActiveState") == "failed" })
	if code := m.show(service("bob"), "ExecMainStatus"); code != "69" {
		t.Errorf("bob's supervisor ended with %s", code)
	}
	m.gone("bob")
	if err := os.Remove(drop); err != nil {
		t.Fatal(err)
	}
	m.mustCTL("daemon-reload")
	m.up()
	m.works("alice")
}

// The order of the units alone keeps an agent from starting when the probe's unit fails.
func TestRootFailedProbeUnitIsAFailedDependency(t *testing.T) {
	m := newRootMachine(t)
	broken, whole := m.breakable()
	m.up()
	m.add("alice")
	m.start("alice")
	m.mustAC("agent", "stop", "alice")
	// A boot has a probe that did not run yet; here it is stopped, which only a change of its
	// unit allows.
	drop := dropins + "/agentconnect-probe.service.d/stop.conf"
	m.file(drop, "[Unit]\nRefuseManualStop=no\n", 0o644)
	m.mustCTL("daemon-reload")
	m.mustCTL("stop", "agentconnect-probe.service")
	broken()
	for range 20 {
		m.fails(m.ctl("start", "agent@alice"), 1)
	}
	m.logged("Dependency failed for agent@alice.service")
	if log := m.journal(); strings.Contains(log, "too quickly") {
		t.Error("refused starts used up a limit of starts")
	}
	if at := m.show(service("alice"), "ExecMainStartTimestampMonotonic"); m.show(service("alice"), "ActiveState") == "active" {
		t.Errorf("alice runs since %s", at)
	}
	m.gone("alice")
	m.fails(m.ac("agent", "start", "alice"), 69, "install bubblewrap")
	whole()
	m.mustCTL("start", "agent@alice")
	m.works("alice")
}

// A session that begins with a failed probe: the manager knows the agents and says why they
// do not run, nothing of them has run, and what was wanted comes by itself afterwards.
func TestRootAgentsAreKnownAfterABootWithAFailedProbe(t *testing.T) {
	m := newRootMachine(t)
	broken, whole := m.breakable()
	m.up()
	ids := []string{"alice", "bob"}
	for _, id := range ids {
		m.add(id)
		m.start(id)
	}
	boot := func() {
		t.Helper()
		m.endSession("systemctl", "stop", "user@1000.service")
		broken()
		m.beginSession()
		m.until("the daemon is up", func() bool { return m.status().State == control.StateRunning })
	}
	refused := func() {
		t.Helper()
		for _, id := range ids {
			m.until(id+" is refused, and known", func() bool {
				a := m.agent(id)
				return a.State == control.StateRefused && strings.Contains(a.Reason, "bwrap-missing") && m.show(service(id), "LoadState") == "loaded"
			})
			m.fails(m.ctl("start", "agent@"+id), 1, "dependency")
			m.fails(m.ctl("status", "--no-pager", "agent@"+id), 3, "AgentConnect agent "+id)
			if at := m.show(service(id), "ExecMainStartTimestampMonotonic"); at != "0" {
				t.Errorf("a process of %s was started at %s µs", id, at)
			}
			m.gone(id)
		}
		if w := m.wanted(); !slices.Equal(w, ids) {
			t.Errorf("wanted: %q", w)
		}
	}
	boot()
	m.logged("Dependency failed for agent@alice.service")
	refused()
	m.mustAC("restart")
	refused()
	whole()
	// Whoever starts one has the probe run again, and its success starts the others.
	m.mustCTL("start", "agent@alice")
	m.works("alice")
	m.works("bob")

	boot()
	refused()
	whole()
	m.mustAC("probe")
	m.works("alice")
	m.works("bob")
}

func TestRootRequiredModeDoesNotComeUp(t *testing.T) {
	m := newRootMachine(t)
	broken, whole := m.breakable()
	m.file(root+"/config.json", `{"security":{"requireSandbox":true}}`, 0o600)
	broken()
	m.fails(m.ac("up"), 69, "the sandbox is required", "bwrap-missing", "install bubblewrap")
	if s, code, n := m.show("agentconnect.service", "ActiveState"), m.show("agentconnect.service", "ExecMainStatus"), m.show("agentconnect.service", "NRestarts"); s != "failed" || code != "69" || n != "0" {
		t.Errorf("the daemon's unit is %s, with exit status %s and %s restarts", s, code, n)
	}
	if s := m.status(); s.State != control.StateRefused || s.ExitCode != 69 || !strings.Contains(s.Reason, "bwrap-missing") {
		t.Errorf("status: %+v", s)
	}
	m.fails(m.ac("restart"), 69, "bwrap-missing")
	whole()
	m.up()
	m.add("alice")
	m.start("alice")
	m.works("alice")
	// A reboot into a broken sandbox: nothing of the agent runs, nothing loops, no unit is made.
	m.mustAC("down")
	broken()
	m.fails(m.ctl("start", "agentconnect.service"), 1)
	m.gone("alice")
	if left := m.units(); len(left) > 0 {
		t.Errorf("units: %q", left)
	}
	whole()
	m.up()
	m.works("alice")
}

// session ends and begins the user's manager.
func (m *machine) endSession(how ...string) {
	m.t.Helper()
	m.mustRoot(how...)
	m.until("the manager is gone", func() bool {
		out, _ := exec.Command("systemctl", "show", "--value", "-p", "ActiveState", "user@1000.service").Output()
		s := strings.TrimSpace(string(out))
		return s == "inactive" || s == "failed"
	})
}

func (m *machine) beginSession() {
	m.t.Helper()
	// So many sessions in so few seconds are not foreseen.
	m.mustRoot("systemctl", "reset-failed", "user@1000.service", "user-runtime-dir@1000.service")
	m.mustRoot("systemctl", "start", "user@1000.service")
	// logind may forget a user whose manager has ended, in its own time, and knows of no manager
	// that it did not start. One that runs it does not forget, and learns of here.
	m.until("logind knows the user", func() bool {
		m.mustRoot("loginctl", "enable-linger", "tester")
		out, _ := exec.Command("loginctl", "show-user", "--value", "-p", "State", "tester").Output()
		return strings.TrimSpace(string(out)) == "lingering"
	})
}

func TestRootSessionEndsGracefullyAndComesBack(t *testing.T) {
	m := newRootMachine(t)
	m.up()
	ids := []string{"alice", "bob", "free"}
	m.add("alice")
	m.add("bob")
	m.add("free", "--no-sandbox")
	m.free = []string{"free"}
	m.add("idle")
	m.start(ids...)
	for _, how := range [][]string{
		{"systemctl", "stop", "user@1000.service"},
		{"loginctl", "terminate-user", "tester"},
		{"setpriv", "--reuid", "tester", "--regid", "tester", "--init-groups", "env", "XDG_RUNTIME_DIR=/run/user/1000", "systemctl", "--user", "exit"},
		{"systemctl", "restart", "user@1000.service"},
	} {
		t.Logf("%q", how)
		began := time.Now()
		since := fmt.Sprintf("@%d.%06d", began.Unix(), began.Nanosecond()/1000)
		if how[1] == "restart" {
			m.mustRoot(how...)
		} else {
			m.endSession(how...)
			if d := time.Since(began); d > 20*time.Second {
				t.Errorf("the end took %v", d)
			}
			for _, p := range processes() {
				if p.agents() {
					t.Errorf("left over: %s", p)
				}
			}
			if w := m.wanted(); !slices.Equal(w, ids) {
				t.Errorf("wanted after the end of the session: %q", w)
			}
			m.beginSession()
		}
		for _, id := range ids {
			m.becomes(id, control.StateRunning)
		}
		m.works("alice")
		if s := m.agent("idle").State; s != control.StateStopped {
			t.Errorf("idle is %s", s)
		}
		m.sound()
		log := m.mustRoot("journalctl", "--no-pager", "-q", "_UID=1000", "--since", since)
		for _, bad := range []string{"was stopped by hand", "SIGKILL", "timed out", "Failed with result"} {
			for line := range strings.Lines(log) {
				if strings.Contains(line, bad) && strings.Contains(line, "agent") {
					t.Errorf("the end was not graceful: %s", line)
				}
			}
		}
		if t.Failed() {
			t.Fatalf("the journal:\n%s", probing.ReplaceAllString(log, ""))
		}
	}
	// With no daemon to see it, the end of the session is nobody's wish either.
	for _, how := range [][]string{
		{"systemctl", "stop", "user@1000.service"},
		{"loginctl", "terminate-user", "tester"},
	} {
		m.mustCTL("stop", "agentconnect.service")
		m.endSession(how...)
		if left, err := os.ReadDir(root + "/state/stopped"); err == nil && len(left) > 0 {
			t.Errorf("%q is taken for a person's wish: %v", how, left)
		}
		m.beginSession()
		for _, id := range ids {
			m.becomes(id, control.StateRunning)
		}
		m.works("alice")
	}
	// What a person stopped stays so over the end of the session.
	m.mustCTL("stop", "agent@bob")
	m.until("it is remembered", func() bool { return !slices.Contains(m.wanted(), "bob") })
	m.endSession("systemctl", "stop", "user@1000.service")
	m.beginSession()
	m.works("alice")
	if s := m.agent("bob").State; s != control.StateStopped {
		t.Errorf("bob is %s", s)
	}
}

// Each way in which there is no manager to talk to has a message of its own.
func TestRootNoManagerSaysWhyAndWhatToDo(t *testing.T) {
	m := newRootMachine(t)
	user := func(name string, env ...string) []string {
		h := "/home/" + name
		return append([]string{"setpriv", "--reuid", name, "--regid", name, "--init-groups", "env", "-i", "-C", h, "PATH=/usr/bin:/bin", "HOME=" + h, "USER=" + name, "LOGNAME=" + name}, env...)
	}
	t.Cleanup(func() { os.RemoveAll("/home/guest/.agentconnect") })
	noBus := func(on bool) {
		t.Helper()
		if !on {
			m.mustCTL("unmask", "--runtime", "dbus.socket", "dbus.service")
			m.mustCTL("start", "dbus.socket")
			return
		}
		// Masked: any job that wants sockets.target starts it again.
		m.mustCTL("mask", "--runtime", "dbus.socket", "dbus.service")
		m.mustCTL("stop", "dbus.socket", "dbus.service")
		if err := os.Remove("/run/user/1000/bus"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	}
	// Root's own is there while root is logged in.
	if err := os.Mkdir("/run/user/0", 0o700); err == nil {
		t.Cleanup(func() { os.Remove("/run/user/0") })
	}
	for _, c := range []struct {
		name  string
		as    []string
		words []string
		set   func(on bool)
	}{
		{"XDG_RUNTIME_DIR unset", user("tester"), []string{"XDG_RUNTIME_DIR is not set", "export XDG_RUNTIME_DIR=/run/user/1000"}, nil},
		{"another user's after su", user("guest", "XDG_RUNTIME_DIR=/run/user/1000"), []string{"belongs to another user", "loginctl enable-linger guest"}, nil},
		{"root's after su", user("tester", "XDG_RUNTIME_DIR=/run/user/0"), []string{"XDG_RUNTIME_DIR belongs to another user", "export XDG_RUNTIME_DIR=/run/user/1000"}, nil},
		{"no user manager, nothing set", user("guest"), []string{"no user manager runs for uid 1001", "loginctl enable-linger guest"}, nil},
		{"no user manager", user("guest", "XDG_RUNTIME_DIR=/run/user/1001"), []string{"no user manager", "loginctl enable-linger guest"}, nil},
		{"no bus", user("tester", "XDG_RUNTIME_DIR=/run/user/1000"), []string{"no user bus", "apt-get install dbus-user-session"}, noBus},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.set != nil {
				c.set(true)
				defer c.set(false)
			}
			g := &machine{t: t, as: c.as}
			g.fails(g.ac("up"), 1, append(c.words, "agentconnect run")...)
			g.fails(g.ac("run", "--supervisor", "systemd"), 78, append(c.words, "--supervisor direct")...)
			// auto does the same job without a manager, and says what is lost and why.
			cmd := exec.Command(c.as[0], append(c.as[1:], "agentconnect", "run")...)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				cmd.Process.Signal(os.Interrupt)
				cmd.Wait()
			}()
			g.until("the daemon answers", func() bool { return g.status().State == control.StateRunning })
			s := g.status()
			if s.Supervisor != "direct" {
				t.Errorf("supervisor %s", s.Supervisor)
			}
			for _, w := range append(c.words, "end with it") {
				if !strings.Contains(s.SupervisorNote, w) {
					t.Errorf("status does not say %q: %s", w, s.SupervisorNote)
				}
			}
		})
	}
	// Without linger it works, and says what that means. logind would end the manager of a user
	// who neither lingers nor is logged in, whenever it next looks: it does not look meanwhile.
	lingers, aside := "/var/lib/systemd/linger/tester", "/var/lib/systemd/tester.linger"
	m.mustRoot("systemctl", "stop", "systemd-logind.service")
	if err := os.Rename(lingers, aside); err != nil {
		t.Fatal(err)
	}
	r := m.ac("up")
	s := m.status()
	if err := os.Rename(aside, lingers); err != nil {
		t.Fatal(err)
	}
	m.mustRoot("systemctl", "start", "systemd-logind.service")
	m.fails(r, 0, "loginctl enable-linger tester")
	if !strings.Contains(s.SupervisorNote, "loginctl enable-linger tester") {
		t.Errorf("status: %s", s.SupervisorNote)
	}
}

// An sshfs whose server is gone, or NFS: the kernel waits for an answer without end. Who looks there
// is told so, and nobody else waits with him.
func TestRootFileSystemThatDoesNotAnswerHoldsNobodyUp(t *testing.T) {
	m := newRootMachine(t)
	if err := unix.Mknod("/dev/fuse", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 229))); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	fuse, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("missing: FUSE in this kernel (%v)", err)
	}
	mnt := home + "/mnt"
	t.Cleanup(func() { os.RemoveAll(mnt) })
	m.must("mkdir", mnt)
	m.up()
	m.add("bob")
	m.start("bob")
	m.add("alice", "--workspace", mnt)
	// A server that never says a word.
	if err := unix.Mount("none", mnt, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d", fuse.Fd(), uid, uid)); err != nil {
		t.Fatal(err)
	}
	gone := func() {
		fuse.Close() // ends all waiting
		_ = unix.Unmount(mnt, unix.MNT_DETACH)
	}
	t.Cleanup(gone)
	silent := func(args ...string) {
		t.Helper()
		if m.fails(m.ac(args...), 1, mnt, "does not answer"); t.Failed() {
			t.FailNow()
		}
	}
	silent("agent", "start", "alice")
	silent("agent", "exec", "alice", "--", "true")
	silent("explain", "alice")
	silent("agent", "add", "carol", "--runtime", "selftest", "--workspace", mnt)
	silent("agent", "edit", "bob", "--grant", mnt+":rw")
	// What has nothing to do with it, and what ends it.
	m.mustAC("agent", "edit", "bob", "--env", "K=V")
	m.mustAC("agent", "restart", "bob")
	m.works("bob")
	m.mustAC("restart") // with alice among those that are wanted
	m.works("bob")
	m.mustAC("agent", "stop", "alice")
	m.mustAC("down")
	gone()
	m.up()
	m.start("alice")
	m.works("alice")
}
