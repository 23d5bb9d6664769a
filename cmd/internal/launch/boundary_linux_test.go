package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/testhost"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

func TestMain(m *testing.M) {
	if os.Getenv(parentEnv) != "" {
		os.Exit(parent())
	}
	code := m.Run()
	testhost.Clean()
	os.Exit(code)
}

// box is one agent on this host, with a home of its own for the test.
type box struct {
	t      testing.TB
	bin    string
	home   string
	bwrap  string
	policy sandbox.Policy
}

func newBox(t testing.TB) *box {
	t.Helper()
	testhost.NeedBoundary(t)
	home := testhost.Home(t)
	root := filepath.Join(home, ".agentconnect")
	dir := filepath.Join(root, "agents", "a1")
	for _, d := range []string{"home", "tmp", "memory", "workspace"} {
		mkdir(t, filepath.Join(dir, d))
	}
	write(t, filepath.Join(dir, "agent.json"), "{}")
	write(t, filepath.Join(home, ".ssh", "id"), "KEY")
	bin := testhost.Bin(t)
	return &box{t: t, bin: bin, home: home, bwrap: "/usr/bin/bwrap", policy: sandbox.Policy{
		Agent: "a1", UID: os.Getuid(), GID: os.Getgid(), User: "alice", Home: home, Root: root,
		AgentDir: dir, HomeDir: dir + "/home", TmpDir: dir + "/tmp", MemoryDir: dir + "/memory",
		Workspace: dir + "/workspace", Read: sandbox.ReadSystem, Guest: filepath.Join(bin, "agentconnect-guest"),
		Network: sandbox.NetworkNone, DieWithParent: true,
	}}
}

func mkdir(t testing.TB, dir string) string {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func write(t testing.TB, path, text string) string {
	t.Helper()
	mkdir(t, filepath.Dir(path))
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (b *box) start(argv ...string) *Start {
	return &Start{
		Launcher: filepath.Join(b.bin, "agentconnect-launch"), Bwrap: b.bwrap, Argv: argv,
		Compile: func() (*sandbox.Plan, error) { return sandbox.Compile(b.policy, hostfacts.Host{}) },
		Expect:  &Expect{Network: b.policy.Network, DieWithParent: b.policy.DieWithParent},
		Env:     []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + b.home, "LANG=C.UTF-8"}, Dir: b.policy.Workspace,
	}
}

// run runs a command inside and gives what it printed and its exit code.
func (b *box) run(argv ...string) (string, int) {
	b.t.Helper()
	out, code, err := b.try(argv...)
	if err != nil {
		b.t.Fatalf("%q: %v", argv, err)
	}
	return out, code
}

func (b *box) try(argv ...string) (string, int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	r, w, err := os.Pipe()
	if err != nil {
		return "", 0, err
	}
	defer r.Close()
	s := b.start(argv...)
	s.Stdout, s.Stderr = w, w
	p, err := s.Run(ctx)
	w.Close()
	if err != nil {
		return "", 0, err
	}
	out, err := io.ReadAll(r)
	<-p.Done()
	return string(out), p.End().Code, err
}

// sh runs a script inside, which must end well.
func (b *box) sh(script string) string {
	b.t.Helper()
	out, code := b.run("/bin/sh", "-c", script)
	if code != 0 {
		b.t.Fatalf("inside: %s\nexit %d: %s", script, code, out)
	}
	return out
}

// refused runs a script that must fail inside and, as a control, must succeed outside.
func (b *box) refused(script string) {
	b.t.Helper()
	if out, code := b.run("/bin/sh", "-c", script); code == 0 {
		b.t.Errorf("inside it worked: %s\n%s", script, out)
	}
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + b.home}
	cmd.Dir = b.policy.Workspace
	if out, err := cmd.CombinedOutput(); err != nil {
		b.t.Errorf("outside it fails too, so it proves nothing: %s\n%v %s", script, err, out)
	}
}

func TestLinksInTheWorkspaceLeadNowhere(t *testing.T) {
	b := newBox(t)
	if err := os.Symlink(filepath.Join(b.home, ".ssh"), filepath.Join(b.policy.Workspace, "keys")); err != nil {
		t.Fatal(err)
	}
	b.refused("cat keys/id")
	b.refused("cat ../agent.json")
	b.refused("cat " + b.policy.Root + "/agents/a1/agent.json")
}

func TestLinksAsPartsOfTheAgentAreResolvedThenJudged(t *testing.T) {
	for _, part := range []string{"workspace", "home", "memory", "tmp"} {
		t.Run(part, func(t *testing.T) {
			b := newBox(t)
			path := filepath.Join(b.policy.AgentDir, part)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(filepath.Join(b.home, ".ssh"), path); err != nil {
				t.Fatal(err)
			}
			_, _, err := b.try("/bin/true")
			var refused *sandbox.RefusedError
			if !errors.As(err, &refused) {
				t.Fatalf("%s is a link to ~/.ssh: %v", part, err)
			}
		})
	}
}

func TestGitDirectoryThatIsALinkShowsNothingElse(t *testing.T) {
	b := newBox(t)
	outside := mkdir(t, filepath.Join(b.home, "other", ".git"))
	write(t, filepath.Join(outside, "config"), "[core]\n")
	if err := os.Symlink(outside, filepath.Join(b.policy.Workspace, ".git")); err != nil {
		t.Fatal(err)
	}
	b.refused("cat .git/config")
}

// A link that an agent left in its home must not lead a mount point out of it: the
// directory that a grant needs below the private home is made beside the link.
func TestPlantedLinkDoesNotLeadAMountPointOut(t *testing.T) {
	b := newBox(t)
	victim := mkdir(t, filepath.Join(b.home, "victim"))
	granted := mkdir(t, filepath.Join(b.home, "src", "app"))
	write(t, filepath.Join(granted, "file"), "app")
	if err := os.Symlink("../../../../victim", filepath.Join(b.policy.HomeDir, "src")); err != nil {
		t.Fatal(err)
	}
	b.policy.Grants = []sandbox.Grant{{Path: granted, Access: sandbox.ReadWrite}}
	if got := b.sh("cat ~/src/app/file"); got != "app" {
		t.Errorf("the grant shows %q", got)
	}
	if names, _ := os.ReadDir(victim); len(names) != 0 {
		t.Errorf("something was made behind the link: %v", names)
	}
	moved, err := filepath.Glob(filepath.Join(b.policy.HomeDir, "src.moved-aside-*"))
	if err != nil || len(moved) != 1 {
		t.Fatalf("the link was not moved aside: %v %v", moved, err)
	}
	// The control: bubblewrap's own bind follows such a link and makes the mount point there.
	control := exec.Command("/usr/bin/bwrap", "--dev-bind", "/", "/", "--ro-bind", granted, filepath.Join(moved[0], "made"), "true")
	if out, err := control.CombinedOutput(); err != nil {
		t.Logf("this bubblewrap refuses the link itself: %s", out)
	} else if _, err := os.Lstat(filepath.Join(victim, "made")); err != nil {
		t.Errorf("the control made nothing behind the link: %v", err)
	}
}

func TestMissingGrantLeavesNoTrace(t *testing.T) {
	b := newBox(t)
	missing := filepath.Join(b.home, "later")
	b.policy.Grants = []sandbox.Grant{{Path: missing, Access: sandbox.ReadWrite}}
	b.sh("test ! -e " + missing)
	if _, err := os.Lstat(missing); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the start made %s: %v", missing, err)
	}
}

func TestNoResidueInTheWorkspaceAfterSigkill(t *testing.T) {
	b := newBox(t)
	ws := b.policy.Workspace
	for _, args := range [][]string{{"init", "-q"}, {"config", "user.email", "a@b"}, {"config", "user.name", "a"}, {"commit", "-q", "--allow-empty", "-m", "x"}} {
		git(t, ws, args...)
	}
	b.policy.Grants = []sandbox.Grant{{Path: mkdir(t, filepath.Join(b.home, "g")), Access: sandbox.ReadOnly}}
	before := tree(t, ws)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	s := b.start("/bin/sh", "-c", "echo up; exec cat")
	hold, holdW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer holdW.Close()
	s.Stdin, s.Stdout = hold, w
	p, err := s.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if _, err := r.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if got := tree(t, ws); !slices.Equal(got, before) {
		t.Errorf("while it runs:\n%q\nbefore:\n%q", got, before)
	}
	p.Kill()
	if got := tree(t, ws); !slices.Equal(got, before) {
		t.Errorf("after SIGKILL:\n%q\nbefore:\n%q", got, before)
	}
	if out := git(t, ws, "status", "--porcelain"); out != "" {
		t.Errorf("git status: %s", out)
	}
	git(t, ws, "add", "-A")
}

func git(t testing.TB, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return string(out)
}

func tree(t testing.TB, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		out = append(out, path+" "+d.Type().String())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestManyGrantsAndNestedMountsStart(t *testing.T) {
	b := newBox(t)
	for i := range 50 {
		b.policy.Grants = append(b.policy.Grants, sandbox.Grant{Path: mkdir(t, filepath.Join(b.home, "grants", fmt.Sprint(i))), Access: sandbox.ReadWrite})
	}
	// 400 read-only folders nested in a writable one, as many repositories make.
	ws := mkdir(t, filepath.Join(b.home, "mono"))
	b.policy.Workspace = ws
	for i := range 400 {
		dir := mkdir(t, filepath.Join(ws, "pkg", fmt.Sprint(i), ".git", "hooks"))
		b.policy.Grants = append(b.policy.Grants, sandbox.Grant{Path: dir, Access: sandbox.ReadOnly})
	}
	out := b.sh("touch ~/grants/49/x && touch pkg/7/ok && ! touch pkg/399/.git/hooks/x 2>/dev/null && ! mv pkg/399/.git pkg/399/g 2>/dev/null && wc -l < /proc/self/mountinfo")
	t.Logf("mounts inside: %s", out)
}

func TestNamesWithSpacesNewlinesQuotesAndOtherBytes(t *testing.T) {
	for _, name := range []string{"with space", "new\nline", `quo"te'`, "back\\slash", "bad\xffutf8", "-rf", "--bind", "ünï", "tab\there", "$(touch x)"} {
		t.Run(fmt.Sprintf("%q", name), func(t *testing.T) {
			b := newBox(t)
			b.policy.Workspace = mkdir(t, filepath.Join(b.home, "src", name))
			write(t, filepath.Join(b.policy.Workspace, name), "here")
			out, code := b.run("/bin/sh", "-c", `cat -- "./$0" && touch -- "./made $0"`, name)
			if code != 0 || out != "here" {
				t.Fatalf("exit %d: %q", code, out)
			}
			if _, err := os.Stat(filepath.Join(b.policy.Workspace, "made "+name)); err != nil {
				t.Error(err)
			}
		})
	}
}

// A command that looks like an option of bubblewrap is a command (CVE-2024-32462).
func TestCommandIsNeverAnOption(t *testing.T) {
	b := newBox(t)
	out, code := b.run("--bind", "/", "/", "cat", filepath.Join(b.home, ".ssh", "id"))
	if code == 0 || strings.Contains(out, "KEY") {
		t.Errorf("exit %d: %s", code, out)
	}
}

func TestMoreSpecificGrantWins(t *testing.T) {
	b := newBox(t)
	outer := mkdir(t, filepath.Join(b.home, "data"))
	inner := mkdir(t, filepath.Join(outer, "a", "sealed"))
	write(t, filepath.Join(inner, "f"), "x")
	for _, grants := range [][]sandbox.Grant{
		{{Path: outer, Access: sandbox.ReadWrite}, {Path: inner, Access: sandbox.ReadOnly}},
		{{Path: inner, Access: sandbox.ReadOnly}, {Path: outer, Access: sandbox.ReadWrite}},
	} {
		b.policy.Grants = grants
		b.sh("touch ~/data/ok ~/data/a/ok")
		b.refused("touch ~/data/a/sealed/f")
		b.refused("mv ~/data/a ~/data/b && mv ~/data/b ~/data/a")
	}
	b.policy.Grants = []sandbox.Grant{{Path: outer, Access: sandbox.ReadOnly}, {Path: inner, Access: sandbox.ReadWrite}}
	b.sh("touch ~/data/a/sealed/g")
	b.refused("touch ~/data/ok2 && rm ~/data/ok2")
}

func TestCredentialRewrittenByRenameIsSeen(t *testing.T) {
	b := newBox(t)
	dir := mkdir(t, filepath.Join(b.home, "creds"))
	write(t, filepath.Join(dir, "token"), "old")
	b.policy.Grants = []sandbox.Grant{{Path: dir, Access: sandbox.ReadOnly}}
	in, inW, _ := os.Pipe()
	outR, out, _ := os.Pipe()
	s := b.start("/bin/sh", "-c", "cat ~/creds/token; read x; cat ~/creds/token")
	s.Stdin, s.Stdout = in, out
	p, err := s.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Kill()
	out.Close()
	buf := make([]byte, 3)
	if _, err := io.ReadFull(outR, buf); err != nil || string(buf) != "old" {
		t.Fatalf("%q %v", buf, err)
	}
	write(t, filepath.Join(dir, "token.new"), "new")
	if err := os.Rename(filepath.Join(dir, "token.new"), filepath.Join(dir, "token")); err != nil {
		t.Fatal(err)
	}
	inW.Write([]byte("\n"))
	rest, err := io.ReadAll(outR)
	if err != nil || string(rest) != "new" {
		t.Errorf("after the rename inside: %q %v", rest, err)
	}
}

func TestSocketInTheWorkspaceOrAnExposedTreeCannotBeReached(t *testing.T) {
	b := newBox(t)
	ro := mkdir(t, filepath.Join(b.home, "ro"))
	b.policy.Grants = []sandbox.Grant{{Path: ro, Access: sandbox.ReadOnly}}
	for _, dir := range []string{b.policy.Workspace, ro} {
		path := filepath.Join(dir, "s")
		if len(path) > 100 {
			t.Fatalf("%s is too long for a socket", path)
		}
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Write([]byte("hello\n"))
				c.Close()
			}
		}()
		b.refused("test \"$(socat -t2 - UNIX-CONNECT:" + path + " </dev/null)\" = hello")
	}
}

func TestRuntimeGetsNoOtherDescriptorThanThree(t *testing.T) {
	b := newBox(t)
	leak, err := os.Open(b.home) // as careless programs leave it: open over exec
	if err != nil {
		t.Fatal(err)
	}
	defer leak.Close()
	if _, err := unix.FcntlInt(leak.Fd(), unix.F_SETFD, 0); err != nil {
		t.Fatal(err)
	}
	out := b.sh("cd /proc/self/fd && echo *; ls -l /proc/1/fd")
	first, rest, _ := strings.Cut(out, "\n")
	// The shell's own directory descriptor may show; nothing that leads to the home may.
	for _, fd := range strings.Fields(first) {
		if fd != "0" && fd != "1" && fd != "2" && fd != "3" && fd != "10" {
			t.Errorf("descriptor %s is open inside", fd)
		}
	}
	if strings.Contains(rest, b.home+"\n") {
		t.Errorf("pid 1 holds the home:\n%s", rest)
	}
	if out, code := b.run("/bin/sh", "-c", fmt.Sprintf("ls /proc/self/fd/%d/.ssh", leak.Fd())); code == 0 {
		t.Errorf("the inherited descriptor works inside: %s", out)
	}
}

func TestPid1ShowsNothingTheRuntimeShouldNotHave(t *testing.T) {
	b := newBox(t)
	t.Setenv("GITHUB_TOKEN", "s3cret-of-the-daemon")
	t.Setenv("SSH_AUTH_SOCK", "/run/user/1000/agent")
	out := b.sh("tr '\\0' '\\n' < /proc/1/environ; tr '\\0' ' ' < /proc/1/cmdline; env")
	for _, bad := range []string{"s3cret", "SSH_AUTH_SOCK", "GITHUB_TOKEN", b.bin} {
		if strings.Contains(out, bad) {
			t.Errorf("%s shows inside:\n%s", bad, out)
		}
	}
}

func TestNothingRunsBeforeTheGateOpens(t *testing.T) {
	b := newBox(t)
	mark := filepath.Join(b.policy.Workspace, "ran")
	s := b.start("/usr/bin/touch", mark)
	refusal := errors.New("no scope for it")
	var pid int
	s.Place = func(_ context.Context, p int) error { pid = p; return refusal }
	if _, err := s.Run(context.Background()); !errors.Is(err, refusal) {
		t.Fatalf("error %v", err)
	}
	if _, err := os.Lstat(mark); err == nil {
		t.Error("the program ran although it could not be placed")
	}
	if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
		t.Errorf("the launcher %d is still there: %v", pid, err)
	}
	s.Place = nil
	p, err := s.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if _, err := os.Lstat(mark); err != nil {
		t.Errorf("with the gate opened it did not run: %v", err)
	}
}

// The launcher is placed while it builds the view: the gate waits for both, and a launcher
// that fails ends the placing.
func TestGateWaitsForTheViewAndThePlace(t *testing.T) {
	b := newBox(t)
	mark := filepath.Join(b.policy.Workspace, "ran")
	s := b.start("/usr/bin/touch", mark)
	asked, placed := make(chan struct{}), make(chan struct{})
	s.Place = func(context.Context, int) error {
		close(asked)
		<-placed
		return nil
	}
	type started struct {
		p   *Process
		err error
	}
	out := make(chan started, 1)
	go func() {
		p, err := s.Run(context.Background())
		out <- started{p, err}
	}()
	<-asked
	select {
	case <-out:
		t.Fatal("it started before it was placed")
	case <-time.After(300 * time.Millisecond): // long enough to get there if nothing held it
	}
	if _, err := os.Lstat(mark); err == nil {
		t.Fatal("it ran before it was placed")
	}
	close(placed)
	o := <-out
	if o.err != nil {
		t.Fatal(o.err)
	}
	<-o.p.Done()
	if _, err := os.Lstat(mark); err != nil {
		t.Errorf("placed, it did not run: %v", err)
	}

	s = b.start("/usr/bin/touch", mark)
	s.Compile = func() (*sandbox.Plan, error) {
		return &sandbox.Plan{Mounts: []sandbox.Mount{{Op: "nonsense"}}, Network: b.policy.Network}, nil
	}
	s.Place = func(ctx context.Context, _ int) error { <-ctx.Done(); return ctx.Err() }
	if _, err := s.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "nonsense") {
		t.Errorf("a launcher that fails while it is placed: %v", err)
	}
}

func TestBwrapRemovedOrReplacedAfterTheProbeIsAnError(t *testing.T) {
	b := newBox(t)
	mark := filepath.Join(b.policy.Workspace, "ran")
	// What runs in its place and makes no sandbox is no better than nothing.
	for _, bwrap := range []string{filepath.Join(b.home, "no-bwrap"), "/bin/false", "/bin/true"} {
		s := b.start("/usr/bin/touch", mark)
		s.Bwrap = bwrap
		_, err := s.Run(context.Background())
		var unavailable *UnavailableError
		if !errors.As(err, &unavailable) {
			t.Errorf("%s: error %v", bwrap, err)
		}
		if _, err := os.Lstat(mark); err == nil {
			t.Errorf("%s: the program ran without a boundary", bwrap)
		}
	}
}

func TestProcessesThatLeaveGroupAndSessionEndToo(t *testing.T) {
	b := newBox(t)
	r, w, _ := os.Pipe()
	s := b.start("/bin/sh", "-c", "setsid sh -c 'setsid sleep 1000 & setsid sleep 1000 & echo up; wait' & wait")
	s.Stdout = w
	p, err := s.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if _, err := r.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	first := p.Init(context.Background())
	all := append(descendants(first), first)
	if len(all) < 4 {
		t.Fatalf("processes inside: %v", all)
	}
	// Only bubblewrap's outer process is killed, as a user might.
	if err := syscall.Kill(p.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	for _, pid := range all {
		if err := syscall.Kill(pid, 0); err == nil && !zombie(pid) {
			t.Errorf("process %d outlived its sandbox", pid)
		}
	}
	// Their stdout is closed, so nobody holds it any more.
	if _, err := r.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("stdout: %v", err)
	}
}

func zombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || bytes.Contains(b, []byte(") Z "))
}

// The thread that started bubblewrap must live as long as it: its death signal comes
// with the end of the thread, not of the process.
func TestRuntimeOutlivesTheThreadThatAskedForIt(t *testing.T) {
	b := newBox(t)
	in, inW, _ := os.Pipe()
	outR, out, _ := os.Pipe()
	s := b.start("/bin/cat")
	s.Stdin, s.Stdout = in, out
	started := make(chan *Process)
	go func() {
		// A locked goroutine that ends takes its thread with it.
		lockThread()
		p, err := s.Run(context.Background())
		if err != nil {
			t.Error(err)
		}
		started <- p
	}()
	p := <-started
	defer p.Kill()
	out.Close()
	for range 50 { // use and end other threads meanwhile
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() { lockThread() })
		}
		wg.Wait()
	}
	inW.Write([]byte("alive\n"))
	inW.Close()
	got, err := io.ReadAll(outR)
	if err != nil || string(got) != "alive\n" {
		t.Errorf("%q %v", got, err)
	}
}

func TestStopAsksThenTermsThenKills(t *testing.T) {
	b := newBox(t)
	for name, c := range map[string]struct {
		script string
		code   int
	}{
		"ends with its stdin": {"cat >/dev/null; exit 3", 3},
		"ends at SIGTERM":     {"trap 'exit 4' TERM; cat >/dev/null; while :; do sleep 0.05; done", 4},
		"needs SIGKILL":       {"trap '' TERM; cat >/dev/null; while :; do sleep 0.05; done", 137},
	} {
		t.Run(name, func(t *testing.T) {
			in, inW, _ := os.Pipe()
			s := b.start("/bin/sh", "-c", c.script)
			s.Stdin = in
			p, err := s.Run(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			in.Close()
			p.Init(context.Background())
			inW.Close()
			p.Stop(context.Background(), 500*time.Millisecond, 500*time.Millisecond)
			if got := p.End().Code; got != c.code {
				t.Errorf("exit %d, want %d", got, c.code)
			}
		})
	}
}

func TestNestedSandboxOnlyWhereNestingIsOn(t *testing.T) {
	b := newBox(t)
	inner := "bwrap --ro-bind / / --proc /proc --dev /dev --unshare-all true"
	b.refused(inner)
	b.refused("unshare -Ur true")
	b.policy.Nesting = true
	b.sh(inner)
}

func TestBubblewrapThatCannotDisableUsernsHoldsByTheFilter(t *testing.T) {
	for version, old := range map[string]bool{"0.6.1": true, "0.8.0": false} {
		b := newBox(t)
		// It says that it is of that version, keeps its options, and is the real one. Not below
		// /tmp, which the launcher covers.
		b.bwrap = write(t, filepath.Join(b.home, "bin", "bwrap"), "#!/bin/sh\n[ \"$1\" = --version ] && echo bubblewrap "+version+
			" && exit\n[ \"$1\" = --args ] && cat \"/proc/self/fd/$2\" >\"$0.args\"\nexec /usr/bin/bwrap \"$@\"\n")
		if err := os.Chmod(b.bwrap, 0o700); err != nil {
			t.Fatal(err)
		}
		b.usernsRefused()
		args, err := os.ReadFile(b.bwrap + ".args")
		if err != nil {
			t.Fatal(err)
		}
		if passed := strings.Contains(string(args), "\x00--disable-userns\x00"); passed == old {
			t.Errorf("%s: --disable-userns passed: %v", version, passed)
		}
	}
}

// AGENTCONNECT_TEST_OLD_BWRAP is a real one; packaging/dev/old-bwrap.sh fetches it.
func TestRealOldBubblewrap(t *testing.T) {
	bwrap := os.Getenv("AGENTCONNECT_TEST_OLD_BWRAP")
	if bwrap == "" {
		t.Skip("needs AGENTCONNECT_TEST_OLD_BWRAP=bubblewrap 0.6.1 (packaging/dev/old-bwrap.sh prints its path)")
	}
	if !oldBwrap(t.Context(), bwrap) {
		t.Fatalf("%s is not old", bwrap)
	}
	b := newBox(t)
	b.bwrap = bwrap
	b.usernsRefused()
	b.policy.Nesting = true
	b.sh("bwrap --ro-bind / / --proc /proc --dev /dev --unshare-all true")
}

// usernsRefused tries each way to a user namespace from inside.
func (b *box) usernsRefused() {
	b.t.Helper()
	b.refused("bwrap --ro-bind / / --proc /proc --dev /dev --unshare-all true")
	b.refused("unshare -U true")
	b.refused("unshare -Ur true")
	// Into the one that is there: a process inside shares it, so there is nothing to enter.
	if out, code := b.run("/bin/sh", "-c", "nsenter --user=/proc/1/ns/user true"); code == 0 {
		b.t.Errorf("a user namespace was entered: %s", out)
	}
}

func TestOnlyAVersionThatIsKnownToBeOldIsOld(t *testing.T) {
	for script, want := range map[string]bool{
		"echo bubblewrap 0.6.1": true, "echo bubblewrap 0.7.0": true,
		"echo bubblewrap 0.8.0": false, "echo bubblewrap 0.11.0": false, "echo bubblewrap 1.0.0": false,
		"echo something else": false, "exit 1": false, "echo bubblewrap 0.6.1; exit 1": false, "": false,
	} {
		path := filepath.Join(t.TempDir(), "bwrap")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		if got := oldBwrap(t.Context(), path); got != want {
			t.Errorf("%q: old is %v, want %v", script, got, want)
		}
	}
	if oldBwrap(t.Context(), "/nonexistent/bwrap") {
		t.Error("one that is not there is old")
	}
}

func TestHostNetworkModeSharesTheNetworkAndNothingElse(t *testing.T) {
	b := newBox(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	port := fmt.Sprint(l.Addr().(*net.TCPAddr).Port)
	b.refused("socat -u /dev/null TCP:127.0.0.1:" + port)
	b.policy.Network = sandbox.NetworkHost
	b.sh("socat -u /dev/null TCP:127.0.0.1:" + port)
	b.refused("cat ~/.ssh/id")
}

func TestReadHostShowsTheHostLessWhatIsHidden(t *testing.T) {
	b := newBox(t)
	b.policy.Read = sandbox.ReadHost
	b.sh("test -r /etc/debian_version && ls /var/lib >/dev/null && test ! -e ~/.ssh && touch ~/x /tmp/x /run/user/$(id -u)/x")
	b.refused("cat ~/.ssh/id")
	b.refused("ls " + b.policy.Root + "/agents/a1/agent.json")
	b.refused("touch " + b.home + "/.ssh/new && rm " + b.home + "/.ssh/new")
	canary := filepath.Join(os.TempDir(), fmt.Sprintf("canary-%d", os.Getpid()))
	write(t, canary, "x")
	defer os.Remove(canary)
	b.refused("cat " + canary)
}

func TestLauncherOfAnotherVersionIsRefused(t *testing.T) {
	b := newBox(t)
	sealed, err := sealBytes("launch", (&wire.Launch{Version: wire.Version + 1, Argv: []string{"/bin/true"}}).Encode())
	if err != nil {
		t.Fatal(err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), ""), os.NewFile(uintptr(pair[1]), "")
	cmd := exec.Command(filepath.Join(b.bin, "agentconnect-launch"))
	cmd.ExtraFiles = []*os.File{sealed, theirs}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	word, _ := io.ReadAll(ours)
	if err := cmd.Wait(); err == nil || !bytes.Contains(word, []byte("version")) {
		t.Errorf("%v: %s", err, word)
	}
}

func TestSealedSpecCannotBeChanged(t *testing.T) {
	testhost.NeedBoundary(t)
	f, err := Sealed("spec", map[string]string{"a": "b"})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("x"), 0); err == nil {
		t.Error("a sealed spec was written to")
	}
	if err := f.Truncate(0); err == nil {
		t.Error("a sealed spec was cut")
	}
}

// An agent that may write above a grant puts a link in its place between two starts.
func TestGrantSwappedForALinkOpensNothing(t *testing.T) {
	b := newBox(t)
	outer := mkdir(t, filepath.Join(b.home, "src"))
	inner := mkdir(t, filepath.Join(outer, "lib"))
	write(t, filepath.Join(b.home, "Documents", "secret"), "TOPSECRET")
	b.policy.Grants = []sandbox.Grant{{Path: outer, Access: sandbox.ReadWrite}, {Path: inner, Access: sandbox.ReadWrite}}
	// It is a mount point, so the agent itself cannot.
	b.refused("rmdir ~/src/lib && mkdir ~/src/lib")
	// Another agent that has only the outer folder can.
	if err := os.Remove(inner); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(b.home, "Documents"), inner); err != nil {
		t.Fatal(err)
	}
	out, _, err := b.try("/bin/cat", inner+"/secret")
	var refused *sandbox.RefusedError
	if !errors.As(err, &refused) || strings.Contains(out, "TOPSECRET") {
		t.Errorf("%v: %q", err, out)
	}
}

// greet says hello to whoever connects to a socket at path, whose file stays.
func greet(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, "hello\n")
			c.Close()
		}
	}()
}

func TestSocketsUnderAnotherNameAreCovered(t *testing.T) {
	b := newBox(t)
	ws := b.policy.Workspace
	for name, after := range map[string]func(path string) error{
		"moved":      func(p string) error { return os.Rename(p, filepath.Join(ws, "moved")) },
		"linked":     func(p string) error { return errors.Join(os.Link(p, filepath.Join(ws, "linked")), os.Remove(p)) },
		"in a\nline": func(p string) error { return os.Rename(p, filepath.Join(ws, "in a\nline")) },
	} {
		path := filepath.Join(ws, "s")
		greet(t, path)
		if err := after(path); err != nil {
			t.Fatal(err)
		}
		out, code := b.run("/bin/sh", "-c", `socat -t2 - "UNIX-CONNECT:$0" </dev/null`, filepath.Join(ws, name))
		if code == 0 || strings.Contains(out, "hello") {
			t.Errorf("%q can be connected to: %s", name, out)
		}
	}
}

// In a large folder one is looked for no further than a start has time for, unless the kernel's
// table gives reason to.
func TestSocketsUnderAnotherNameAreCoveredInALargeFolder(t *testing.T) {
	open := func(ws string) {
		for _, name := range []string{"z", "y"} {
			_ = os.Chmod(filepath.Join(ws, name), 0o700)
		}
	}
	for name, lay := range map[string]func(ws string, listen func(path string)) error{
		"by a name that is not clean": func(ws string, listen func(string)) error {
			listen(ws + "/z/../z/s")
			return nil
		},
		"another in its place": func(ws string, listen func(string)) error {
			listen(ws + "/s")
			if err := os.Rename(ws+"/s", ws+"/z/s"); err != nil {
				return err
			}
			listen(ws + "/s")
			return nil
		},
		"a file in its place": func(ws string, listen func(string)) error {
			listen(ws + "/s")
			return errors.Join(os.Rename(ws+"/s", ws+"/z/s"), os.WriteFile(ws+"/s", nil, 0o600))
		},
		"a file in its folder's place": func(ws string, listen func(string)) error {
			if err := os.Mkdir(ws+"/d", 0o700); err != nil {
				return err
			}
			listen(ws + "/d/s")
			return errors.Join(os.Rename(ws+"/d/s", ws+"/z/s"), os.Remove(ws+"/d"), os.WriteFile(ws+"/d", nil, 0o600))
		},
		"an agent's own in its place": func(ws string, listen func(string)) error {
			listen(ws + "/s")
			return errors.Join(os.Rename(ws+"/s", ws+"/z/s"), unix.Mknod(ws+"/s", unix.S_IFSOCK|0o600, 0))
		},
		"a second name": func(ws string, listen func(string)) error {
			listen(ws + "/s")
			return os.Link(ws+"/s", ws+"/z/s")
		},
		"a link in a circle in its place": func(ws string, listen func(string)) error {
			listen(ws + "/s")
			return errors.Join(os.Rename(ws+"/s", ws+"/z/s"), os.Symlink("s", ws+"/s"))
		},
		"a link to where nobody may look in its place": func(ws string, listen func(string)) error {
			listen(ws + "/s")
			return errors.Join(os.Rename(ws+"/s", ws+"/z/s"), os.Symlink("/proc/1/root/s", ws+"/s"))
		},
		"the same in its folder's place": func(ws string, listen func(string)) error {
			if err := os.Mkdir(ws+"/d", 0o700); err != nil {
				return err
			}
			listen(ws + "/d/s")
			return errors.Join(os.Rename(ws+"/d/s", ws+"/z/s"), os.Remove(ws+"/d"), os.Symlink("/proc/1/root", ws+"/d"))
		},
		"a folder that was shut": func(ws string, listen func(string)) error {
			listen(ws + "/z/s")
			return os.Chmod(ws+"/z", 0)
		},
		"a folder that was shut, and sealed for that": func(ws string, listen func(string)) error {
			listen(ws + "/z/s")
			return os.Chmod(ws+"/z", 0)
		},
		"a folder that may be listed and not entered": func(ws string, listen func(string)) error {
			listen(ws + "/z/s")
			return os.Chmod(ws+"/z", 0o400)
		},
		"moved to a folder that was shut": func(ws string, listen func(string)) error {
			listen(ws + "/s")
			return errors.Join(os.Rename(ws+"/s", ws+"/z/s"), os.Chmod(ws+"/z", 0))
		},
		"in a folder of one that was shut": func(ws string, listen func(string)) error {
			// Not a name that is looked at first.
			if err := os.MkdirAll(ws+"/y/deep", 0o700); err != nil {
				return err
			}
			listen(ws + "/y/deep/s")
			return errors.Join(os.Symlink("../y/deep/s", ws+"/z/s"), os.Chmod(ws+"/y", 0o400))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t)
			ws := b.policy.Workspace
			mkdir(t, ws+"/z")
			for i := range 2_100 {
				if err := os.WriteFile(fmt.Sprintf("%s/%d", ws, i), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := lay(ws, func(path string) { greet(t, path) }); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { open(ws) })
			if strings.HasSuffix(name, "sealed for that") {
				b.policy.Seals = []sandbox.Seal{{Path: ws + "/z", How: sandbox.SealReadOnly, Kind: sandbox.KindDir, Why: "a folder that may not be read"}}
			}
			out, code := b.run("/bin/sh", "-c", `chmod 700 z y; socat -t2 - "UNIX-CONNECT:$0" </dev/null`, ws+"/z/s")
			if code == 0 || strings.Contains(out, "hello") {
				t.Errorf("it can be connected to: %s", out)
			}
			open(ws)
			if out, err := exec.Command("socat", "-t2", "-", "UNIX-CONNECT:"+ws+"/z/s").CombinedOutput(); !strings.Contains(string(out), "hello") {
				t.Errorf("control: outside it cannot, either: %s (%v)", out, err)
			}
		})
	}
}

func TestSetIDProgramsAndDevicesCannotBeLeftBehind(t *testing.T) {
	b := newBox(t)
	b.refused("cp /bin/true s && chmod 4755 s && rm s")
	b.refused("cp /bin/true g && chmod g+s g && rm g")
	b.refused("mknod hole c 0 0 && rm hole")
	b.sh("cp /bin/true plain && chmod 755 plain && mkfifo pipe && umask 0 && touch x && install -m 700 x y")
}

func TestAgentThatTakesItsOwnRightsAwayStartsAgain(t *testing.T) {
	b := newBox(t)
	b.policy.Workspace = mkdir(t, filepath.Join(b.home, "src", "app"))
	b.sh("true")
	if out, code := b.run("/bin/sh", "-c", "chmod 0 ~/src ~"); code != 0 {
		t.Fatalf("exit %d: %s", code, out)
	}
	b.sh("touch ~/back ok")
}

// A start that is given up at any moment leaves nothing, also when bubblewrap has forked
// and not yet said so.
func TestStartGivenUpAtAnyMomentLeavesNothing(t *testing.T) {
	b := newBox(t)
	for i := range 150 {
		tag := fmt.Sprintf("given-up-%d-%d", os.Getpid(), i)
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*200*time.Microsecond)
		s := b.start("/bin/sh", "-c", "exec sleep 600 # "+tag)
		s.DieWithParent = true
		p, err := s.Run(ctx)
		if err == nil {
			p.Kill()
		}
		cancel()
		procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range procs {
			if text, err := os.ReadFile(name); err == nil && bytes.Contains(text, []byte(tag)) {
				t.Errorf("given up after %v: %s is left: %q", time.Duration(i)*200*time.Microsecond, name, text)
			}
		}
	}
}
