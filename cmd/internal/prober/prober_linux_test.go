package prober

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/testhost"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/probe"
)

// The test binary is also the program that probes inside namespaces which tests make.
func TestMain(m *testing.M) {
	if conf := os.Getenv("PROBER_TEST_CHILD"); conf != "" {
		var p Prober
		if err := json.Unmarshal([]byte(conf), &p); err != nil {
			panic(err)
		}
		if err := json.NewEncoder(os.Stdout).Encode(p.Run(context.Background())); err != nil {
			panic(err)
		}
		return
	}
	code := m.Run()
	testhost.Clean()
	os.Exit(code)
}

func newProber(t *testing.T) *Prober {
	t.Helper()
	testhost.NeedBoundary(t)
	home := testhost.Home(t)
	bin := testhost.Bin(t)
	return &Prober{
		User: "alice", UserID: os.Getuid(), GroupID: os.Getgid(), Home: home, Root: filepath.Join(home, ".agentconnect"), RuntimeDir: filepath.Join(home, "run"),
		Launcher: filepath.Join(bin, "agentconnect-launch"), Guest: filepath.Join(bin, "agentconnect-guest"),
	}
}

func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func want(t *testing.T, r probe.Result, code string) {
	t.Helper()
	if r.Code != code || r.OK != (code == probe.CodeOK) {
		t.Fatalf("code %s (ok %v), want %s: %+v", r.Code, r.OK, code, r.Checks)
	}
	for _, c := range r.Checks {
		if (c.Result == probe.Failed || c.Result == probe.Warning) && !strings.Contains(c.Remedy, "`") {
			t.Errorf("%s names no command to run: %q", c.Code, c.Remedy)
		}
	}
}

func TestBoundaryStartsHereAndNothingIsLeft(t *testing.T) {
	p := newProber(t)
	r := p.Run(t.Context())
	want(t, r, probe.CodeOK)
	for _, dir := range []string{p.Home, filepath.Join(p.Root, "state")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if strings.Contains(e.Name(), "canary") || strings.Contains(e.Name(), "probe") {
				t.Errorf("the probe left %s in %s", e.Name(), dir)
			}
		}
	}
}

// A probe that cannot see a leak proves nothing.
func TestLeakIsFound(t *testing.T) {
	for name, tamper := range map[string]func(*Prober, *sandbox.Policy){
		"the home is the private home": func(p *Prober, pol *sandbox.Policy) { pol.Root, pol.HomeDir = "/nonexistent-root", p.Home },
		"the network is the host's with ROOT in view": func(p *Prober, pol *sandbox.Policy) {
			pol.Home, pol.Root = "/nonexistent-home", "/nonexistent-root"
			pol.Grants = []sandbox.Grant{{Path: p.Root, Access: sandbox.ReadOnly}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProber(t)
			p.Tamper = func(pol *sandbox.Policy) { tamper(p, pol) }
			want(t, p.Run(t.Context()), probe.CodeBoundaryLeak)
		})
	}
}

func TestBwrapMissingOrOld(t *testing.T) {
	p := newProber(t)
	p.Bwrap = "/nonexistent/bwrap"
	want(t, p.Run(t.Context()), probe.CodeBwrapMissing)
	p.Bwrap = script(t, "exit 1")
	want(t, p.Run(t.Context()), probe.CodeBwrapMissing)
	p.Bwrap = script(t, "echo bubblewrap 0.4.1")
	want(t, p.Run(t.Context()), probe.CodeBwrapOld)
	p.Bwrap = script(t, "echo what is this")
	want(t, p.Run(t.Context()), probe.CodeBwrapOld)
}

// Ubuntu 22.04 has 0.6.1, which does with one lock less, and the probe says which.
func TestBwrapWithoutDisableUsernsWillDo(t *testing.T) {
	p := newProber(t)
	// Not below /tmp, which the launcher covers.
	p.Bwrap = filepath.Join(p.Home, "bwrap")
	if err := os.Rename(script(t, `[ "$1" = --version ] && { echo bubblewrap 0.6.1; exit; }; exec /usr/bin/bwrap "$@"`), p.Bwrap); err != nil {
		t.Fatal(err)
	}
	r := p.Run(t.Context())
	want(t, r, probe.CodeOK)
	for _, c := range r.Checks {
		if c.Code == probe.CodeBwrapOld && !strings.Contains(c.Detail, "--disable-userns") {
			t.Errorf("what is lost is not said: %+v", c)
		}
	}
}

func TestToolsAreProgramsThatRun(t *testing.T) {
	p := newProber(t)
	// A shell function of that name does not help.
	t.Setenv("BASH_FUNC_rg%%", "() { echo ripgrep 99; }")
	dir := t.TempDir()
	socat, err := exec.LookPath("socat")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(socat, filepath.Join(dir, "socat")); err != nil {
		t.Fatal(err)
	}
	p.Path = dir
	want(t, p.Run(t.Context()), probe.CodeRgMissing)
	if err := os.Rename(script(t, "exit 3"), filepath.Join(dir, "rg")); err != nil {
		t.Fatal(err)
	}
	want(t, p.Run(t.Context()), probe.CodeRgMissing)
	if err := os.Rename(script(t, "echo ripgrep 14"), filepath.Join(dir, "rg")); err != nil {
		t.Fatal(err)
	}
	want(t, p.Run(t.Context()), probe.CodeOK)
	os.Remove(filepath.Join(dir, "socat"))
	want(t, p.Run(t.Context()), probe.CodeSocatMissing)
}

// Only whether bubblewrap works counts, not what it says.
func TestNoMessageOfBubblewrapIsRead(t *testing.T) {
	for _, message := range []string{"mount too revealing", "impossible de monter proc", ""} {
		p := newProber(t)
		p.Bwrap = script(t, `
[ "$1" = --version ] && { echo bubblewrap 0.11.0; exit; }
case " $* " in *" --args "*|*" --proc "*) echo "`+message+`" >&2; exit 1;; esac
exec /usr/bin/bwrap "$@"
`)
		want(t, p.Run(t.Context()), probe.CodeProcRefused)
	}
}

// within runs the probe in a user namespace that set-up changed, again as an ordinary
// uid: the limits of the outer namespace hold for what the probe makes.
func within(t *testing.T, p *Prober, setup string) probe.Result {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	conf, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	line := fmt.Sprintf("%s && exec unshare -U --map-user=%d --map-group=%d %s", setup, p.UserID, p.GroupID, self)
	cmd := exec.Command("unshare", "-Urmpf", "--mount-proc", "sh", "-c", line)
	cmd.Env = append(os.Environ(), "PROBER_TEST_CHILD="+string(conf))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	var r probe.Result
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return r
}

func TestHostsThatCannotStartTheBoundary(t *testing.T) {
	for name, c := range map[string]struct{ setup, code string }{
		"nothing is changed":               {"true", probe.CodeOK},
		"no more user namespaces":          {"echo 1 > /proc/sys/user/max_user_namespaces", probe.CodeUsernsDisabled},
		"no network namespaces":            {"echo 0 > /proc/sys/user/max_net_namespaces", probe.CodeNetnsRefused},
		"a part of /proc is masked":        {"mount -t tmpfs none /proc/sys/fs", probe.CodeProcRefused},
		"a file of /proc is masked":        {"mount --bind /dev/null /proc/meminfo", probe.CodeProcRefused},
		"no mount namespaces, so no clone": {"echo 0 > /proc/sys/user/max_mnt_namespaces", probe.CodeUsernsDisabled},
	} {
		t.Run(name, func(t *testing.T) { want(t, within(t, newProber(t), c.setup), c.code) })
	}
}

// fakeHost changes what the real one says.
type fakeHost struct {
	*Prober
	name, release string
	sysctl        map[string]string
	syscalls      error
	uid           int
}

func (f fakeHost) System() (string, string)  { return f.name, f.release }
func (f fakeHost) Sysctl(name string) string { return f.sysctl[name] }
func (f fakeHost) Syscalls() error           { return f.syscalls }
func (f fakeHost) UID() int                  { return f.uid }

// brokenRunner starts nothing.
type brokenRunner struct{ fails map[probe.Reduced]bool }

func (b brokenRunner) Inside(context.Context, bool) ([]probe.Finding, error) {
	return nil, fmt.Errorf("did not start")
}
func (b brokenRunner) Try(_ context.Context, what probe.Reduced) error {
	if b.fails[what] {
		return fmt.Errorf("%s refused", what)
	}
	return nil
}

func TestHostsThatAreNotHere(t *testing.T) {
	p := newProber(t)
	apparmor := map[string]string{"kernel/apparmor_restrict_unprivileged_userns": "1"}
	for name, c := range map[string]struct {
		host fakeHost
		code string
	}{
		"macOS":               {fakeHost{name: "darwin"}, probe.CodeNotLinux},
		"WSL 1":               {fakeHost{name: "Linux", release: "4.4.0-19041-Microsoft"}, probe.CodeNotLinux},
		"an old kernel":       {fakeHost{name: "Linux", release: "5.4.0", syscalls: fmt.Errorf("no mount_setattr")}, probe.CodeKernelOld},
		"AppArmor's limit":    {fakeHost{name: "Linux", release: "6.8.0", sysctl: apparmor}, probe.CodeUsernsAppArmor},
		"the same without it": {fakeHost{name: "Linux", release: "6.8.0"}, probe.CodeUsernsDisabled},
	} {
		t.Run(name, func(t *testing.T) {
			c.host.Prober = p
			want(t, probe.Run(t.Context(), c.host, brokenRunner{fails: map[probe.Reduced]bool{probe.ReducedMount: true}}, time.Now()), c.code)
		})
	}
	// WSL 2 is a real kernel; what does not start there has another cause.
	wsl2 := fakeHost{Prober: p, name: "Linux", release: "5.15.90.1-microsoft-standard-WSL2"}
	want(t, probe.Run(t.Context(), wsl2, brokenRunner{}, time.Now()), probe.CodeBoundaryLeak)
}

// Where no canary can be laid nothing is known: that is no leak to be reported.
func TestWithoutRoomForCanariesTheRemedyIsRoom(t *testing.T) {
	p := newProber(t)
	if err := os.MkdirAll(p.Root, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(p.Root, "state"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r := probe.Run(t.Context(), fakeHost{Prober: p, name: "Linux", release: "6.1.0"}, p, time.Now())
	want(t, r, probe.CodeBoundaryLeak)
	last := r.Checks[len(r.Checks)-1]
	if !strings.Contains(last.Detail, "canaries cannot be laid") || !strings.Contains(last.Remedy, "free space") || strings.Contains(last.Remedy, "report") {
		t.Errorf("%+v", last)
	}
}

func TestProbeAsRootSaysWhichPartWorks(t *testing.T) {
	p := newProber(t)
	// The inner sandbox is refused; the probing user is root.
	root := fakeHost{Prober: p, name: "Linux", release: "6.1.0", uid: 0}
	r := probe.Run(t.Context(), root, noNesting{p}, time.Now())
	if !r.OK {
		t.Fatalf("%+v", r)
	}
	last := r.Checks[len(r.Checks)-1]
	if last.Result != probe.Warning || !strings.Contains(last.Detail, "root") {
		t.Errorf("%+v", last)
	}
}

type noNesting struct{ *Prober }

func (n noNesting) Inside(ctx context.Context, nesting bool) ([]probe.Finding, error) {
	if nesting {
		return nil, fmt.Errorf("inner bubblewrap: no")
	}
	return n.Prober.Inside(ctx, false)
}
