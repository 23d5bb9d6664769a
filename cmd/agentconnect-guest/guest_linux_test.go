//go:build linux && (amd64 || arm64)

// The guest as a program: this test binary stands in for it, outside as an ordinary
// user and inside a bwrap with the real filter. The boundary built here is the
// test's own, as plain as bwrap makes it; the launcher has its own tests.

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/selftest"
	"agentconnect.md/sandbox/sandbox/seccomp"
)

// asGuest in the first argument's place makes this binary the guest; the guest's own
// children come as /proc/self/exe with the arguments of a step.
const asGuest = "agentconnect-guest"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case asGuest:
			os.Args = append(os.Args[:1], os.Args[2:]...)
			main()
			return
		case "try", "detach", "linger":
			main()
			return
		}
	}
	// Whatever descriptors the test was started with must not pass for the boundary's.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// nobody is whom root's tests run the guest as.
const nobody = 65534

func ids() (uid, gid int) {
	if os.Geteuid() == 0 {
		return nobody, nobody
	}
	return os.Getuid(), os.Getgid()
}

// ordinary lets cmd run as an ordinary user.
func ordinary(cmd *exec.Cmd) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
	}
}

// own gives path to the ordinary user.
func own(t *testing.T, path string) string {
	t.Helper()
	uid, gid := ids()
	if os.Geteuid() == 0 {
		if err := os.Lchown(path, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

// world is a host with something to attack.
type world struct {
	base, home, root, agent, workspace, exposed string
	targets                                     selftest.Targets
}

const token = "canary-5f1d"

func (w *world) dir(t *testing.T, path string) string {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	return own(t, path)
}

func (w *world) file(t *testing.T, path string) string {
	t.Helper()
	if err := os.WriteFile(path, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return own(t, path)
}

// listen opens a Unix socket that everybody may connect to and answers nobody.
func listen(t *testing.T, network, addr string) net.Listener {
	t.Helper()
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if network == "unix" && addr[0] == '/' {
		if err := os.Chmod(addr, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

func newWorld(t *testing.T) *world {
	t.Helper()
	// Not below t.TempDir: its parent is closed to others, and its name too long for sockets.
	base, err := os.MkdirTemp("", "acg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	own(t, base)
	w := &world{base: base, home: filepath.Join(base, "home"), root: filepath.Join(base, "root"), exposed: filepath.Join(base, "exposed")}
	w.agent = filepath.Join(w.root, "agents", "alice")
	w.workspace = filepath.Join(w.agent, "workspace")
	for _, d := range []string{w.home, filepath.Join(w.home, ".ssh"), w.root, filepath.Join(w.root, "agents"), w.agent, w.workspace, filepath.Join(w.workspace, ".git"),
		filepath.Join(w.agent, "home"), filepath.Join(w.agent, "tmp"), filepath.Join(w.agent, "memory"), filepath.Join(w.root, "agents", "bob"), w.exposed} {
		w.dir(t, d)
	}
	uid, _ := ids()
	tmp, err := os.CreateTemp("/tmp", "acg-canary")
	if err != nil {
		t.Fatal(err)
	}
	tmp.Close()
	t.Cleanup(func() { os.Remove(tmp.Name()) })
	if err := os.Symlink(filepath.Join(w.home, ".ssh"), filepath.Join(w.workspace, "link")); err != nil {
		t.Fatal(err)
	}
	udp, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	echoed := make(chan struct{})
	go func() {
		defer close(echoed)
		b := make([]byte, 1500)
		for {
			n, from, err := udp.ReadFrom(b)
			if err != nil {
				return
			}
			udp.WriteTo(b[:n], from)
		}
	}()
	t.Cleanup(func() { udp.Close(); <-echoed })

	canary := w.file(t, filepath.Join(w.home, ".ssh", "id"))
	open, err := os.Open(canary)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	host := exec.Command("/bin/sleep", "600")
	host.Env, host.Stdin = []string{"TOKEN=secret-of-the-daemon"}, open
	ordinary(host)
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Process.Kill(); host.Wait() })

	abstract := fmt.Sprintf("agentconnect-selftest-%d", os.Getpid())
	listen(t, "unix", "@"+abstract)
	sockets := map[string]string{}
	for _, name := range []string{"bus", "systemd-private", "system-bus", "ssh-agent", "gpg-agent", "docker", "wayland"} {
		sockets[name] = filepath.Join(base, name)
		listen(t, "unix", sockets[name])
	}
	listen(t, "unix", filepath.Join(w.exposed, "s"))
	listen(t, "unix", filepath.Join(w.workspace, "s"))
	beside := w.workspace + "-beside"
	w.dir(t, beside)
	shm := w.file(t, filepath.Join("/dev/shm", filepath.Base(base)))
	t.Cleanup(func() { os.Remove(shm) })
	var key int
	if uid, _ := ids(); uid == os.Getuid() { // the objects are their maker's
		k, remove, err := selftest.PlantIPC()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { remove() })
		key = k
	}
	w.targets = selftest.Targets{
		Token:           token,
		HomeCanary:      canary,
		Sibling:         w.file(t, filepath.Join(beside, "canary")),
		ShmCanary:       shm,
		IPCKey:          key,
		HostSecret:      "secret-of-the-daemon",
		AgentJSON:       w.file(t, filepath.Join(w.agent, "agent.json")),
		Root:            w.root,
		RootCanary:      w.file(t, filepath.Join(w.root, "config.json")),
		OtherAgent:      w.file(t, filepath.Join(w.root, "agents", "bob", "agent.json")),
		TmpCanary:       w.file(t, tmp.Name()),
		Sockets:         sockets,
		ExposedSocket:   filepath.Join(w.exposed, "s"),
		WorkspaceSocket: filepath.Join(w.workspace, "s"),
		AbstractSocket:  abstract,
		HostTCP:         listen(t, "tcp", "127.0.0.1:0").Addr().String(),
		PublicTCP:       listen(t, "tcp", "127.0.0.2:0").Addr().String(), // stands for it: no test asks for a network
		HostUDP:         udp.LocalAddr().String(),
		HostPID:         host.Process.Pid,
		Link:            filepath.Join(w.workspace, "link", "id"),
		Pinned:          []string{filepath.Join(w.workspace, ".git")},
		Covers:          []string{filepath.Join(w.exposed, "s")},
		Secrets:         []string{"secret-of-the-daemon"},
		Workspace:       w.workspace,
		Home:            w.home,
		Memory:          filepath.Join(w.agent, "memory"),
		UID:             uid,
		Network:         "none",
	}
	return w
}

// guest is the command that runs the guest outside, as an ordinary user.
func guest(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	// The test binary lies where an ordinary user may not look.
	dir, err := os.MkdirTemp("", "acg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	binary, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(own(t, dir), "guest")
	if err := os.WriteFile(path, binary, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path, append([]string{asGuest}, args...)...)
	cmd.Dir = "/"
	ordinary(cmd)
	return cmd
}

// boundary is the command that runs argv inside.
func (w *world) boundary(t *testing.T, nesting bool, argv ...string) *exec.Cmd {
	t.Helper()
	bwrap, err := exec.LookPath("bwrap")
	if err != nil {
		t.Skip("bwrap is not installed")
	}
	filter, err := seccomp.Filter(runtime.GOARCH, seccomp.Options{Nesting: nesting})
	if err != nil {
		t.Fatal(err)
	}
	uid, gid := ids()
	run := fmt.Sprintf("/run/user/%d", uid)
	passwd := fmt.Sprintf("someone:x:%d:%d::%s:/bin/sh\n", uid, gid, w.home)
	args := []string{
		"--unshare-all", "--cap-drop", "ALL", "--clearenv",
		"--setenv", "HOME", w.home, "--setenv", "PATH", "/usr/bin:/bin:/usr/sbin:/sbin", "--setenv", "XDG_RUNTIME_DIR", run,
		"--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--ro-bind-data", "3", "/etc/passwd",
	}
	for _, l := range []string{"/bin", "/sbin", "/lib", "/lib64"} {
		if to, err := os.Readlink(l); err == nil {
			args = append(args, "--symlink", to, l)
		} else if _, err := os.Stat(l); err == nil {
			args = append(args, "--ro-bind", l, l)
		}
	}
	args = append(args,
		"--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run", "--perms", "0700", "--dir", run, "--perms", "0555", "--ro-bind-data", "4", "/run/agentconnect/guest",
		"--bind", filepath.Join(w.agent, "tmp"), "/tmp", "--bind", filepath.Join(w.agent, "tmp"), "/var/tmp",
		"--bind", filepath.Join(w.agent, "home"), w.home, "--bind", filepath.Join(w.agent, "memory"), filepath.Join(w.agent, "memory"),
		"--bind", w.workspace, w.workspace, "--bind", filepath.Join(w.workspace, ".git"), filepath.Join(w.workspace, ".git"),
		"--ro-bind", w.exposed, w.exposed, "--ro-bind-data", "6", filepath.Join(w.exposed, "s"), "--ro-bind-data", "7", filepath.Join(w.workspace, "s"),
		"--remount-ro", "/", "--chdir", w.workspace, "--seccomp", "5", "--",
	)
	if len(argv) == 0 || argv[0] == asGuest {
		argv = append([]string{"/run/agentconnect/guest"}, argv...)
	}
	cmd := exec.CommandContext(t.Context(), bwrap, append(args, argv...)...)
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { self.Close() })
	cmd.ExtraFiles = []*os.File{temporary(t, []byte(passwd)), self, temporary(t, filter), temporary(t, nil), temporary(t, nil)}
	cmd.Dir = "/"
	cmd.Env = []string{} // pid 1 is bwrap and keeps what it was given
	ordinary(cmd)
	cmd.SysProcAttr.Setsid = true
	return cmd
}

func temporary(t *testing.T, b []byte) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "f")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	return f
}

// output runs cmd with in as JSON on its stdin and reads JSON from its stdout.
func output(t *testing.T, cmd *exec.Cmd, in, out any) error {
	t.Helper()
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(b), &stdout, &stderr
	err = cmd.Run()
	if stderr.Len() > 0 {
		t.Logf("stderr: %s", stderr.String())
	}
	if jerr := json.Unmarshal(stdout.Bytes(), out); jerr != nil {
		t.Fatalf("ended %v, printed %q: %v", err, stdout.String(), jerr)
	}
	return err
}

func TestAttacksWorkOutside(t *testing.T) {
	w := newWorld(t)
	cmd := guest(t, "attack", "--targets", "-", "--json", "--control")
	cmd.Dir = w.workspace
	uid, _ := ids()
	// passwd-home compares the two; nobody's home is not ours to make.
	home := os.Getenv("HOME")
	if uid == nobody {
		home = "/nonexistent"
	}
	cmd.Env = append(os.Environ(), "HOME="+home, "XDG_RUNTIME_DIR="+w.home)
	var report selftest.Report
	if err := output(t, cmd, w.targets, &report); err != nil {
		t.Errorf("with --control: %v", err)
	}
	if report.Failed == 0 {
		t.Error("nothing that the boundary forbids worked outside it")
	}
	for _, r := range report.Results {
		if strings.HasPrefix(r.ID, "git-") {
			continue // what they aim at is planted where the product seals it
		}
		if r.Control && r.Seen != selftest.Worked && !(w.targets.IPCKey == 0 && strings.HasPrefix(r.ID, "sysv-")) {
			t.Errorf("outside: %s", r.Line())
		}
	}
	// The canaries are as they were, and everything is in its place.
	for _, p := range []string{w.targets.HomeCanary, w.targets.RootCanary, w.targets.OtherAgent, w.targets.TmpCanary} {
		if b, err := os.ReadFile(p); err != nil || string(b) != token+"\n" {
			t.Errorf("%s: %q %v", p, b, err)
		}
	}
	for _, d := range []string{w.workspace, w.home} {
		left, err := filepath.Glob(filepath.Join(d, ".agentconnect*"))
		if err != nil || len(left) > 0 {
			t.Errorf("left behind: %q %v", left, err)
		}
	}
}

func TestAttacksFailInside(t *testing.T) {
	for _, nesting := range []bool{false, true} {
		t.Run(fmt.Sprintf("nesting=%v", nesting), func(t *testing.T) {
			w := newWorld(t)
			w.targets.Nesting = nesting
			w.targets.MetadataTCP = "169.254.169.254:80" // tried from inside alone: there a try that gets out is the finding
			var report selftest.Report
			if err := output(t, w.boundary(t, nesting, asGuest, "attack", "--targets", "-", "--json"), w.targets, &report); err != nil {
				t.Errorf("ended with %v", err)
			}
			var skipped []string
			for _, r := range report.Results {
				if !r.OK {
					t.Errorf("inside: %s", r.Line())
				}
				if r.Seen == selftest.Skipped {
					skipped = append(skipped, r.ID)
				}
			}
			var want []string
			if nesting {
				want = []string{"user-namespace", "root-namespace", "kept-descriptor", "openat2", "clone3-namespace", "unshare-high"}
			}
			// The seals of git's files are the product's, not of this bubblewrap alone.
			skipped = slices.DeleteFunc(skipped, func(id string) bool { return strings.HasPrefix(id, "git-") })
			if w.targets.IPCKey == 0 {
				skipped = slices.DeleteFunc(skipped, func(id string) bool { return strings.HasPrefix(id, "sysv-") })
			}
			if d := cmp.Diff(want, skipped, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("skipped: %s", d)
			}
			if len(report.Results) < 190 {
				t.Errorf("only %d attacks", len(report.Results))
			}
		})
	}
}

func TestAttackRefusesTheHostsRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	cmd := guest(t, "attack")
	cmd.SysProcAttr.Credential = nil
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "ordinary user") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestCheckInside(t *testing.T) {
	w := newWorld(t)
	uid, _ := ids()
	for _, nesting := range []bool{true, false} {
		req := selftest.CheckRequest{
			Unreachable:    []string{w.targets.HomeCanary, w.targets.RootCanary, w.targets.OtherAgent, w.targets.TmpCanary},
			ConnectRefused: []string{w.targets.Sockets["bus"], w.targets.ExposedSocket},
			Writable:       []string{w.workspace, w.home, "/tmp", "/var/tmp", fmt.Sprintf("/run/user/%d", uid)},
			Readable:       []string{"/usr", "/etc/passwd"},
			Nested:         true,
		}
		var rep selftest.CheckReport
		if err := output(t, w.boundary(t, nesting, asGuest, "check"), req, &rep); err != nil {
			t.Error(err)
		}
		if len(rep.Results) != 4+2+5+2+6+1 {
			t.Errorf("%d results", len(rep.Results))
		}
		for _, r := range rep.Results {
			if want := nesting || r.What != selftest.CheckNested; r.OK != want {
				t.Errorf("nesting %v: %+v", nesting, r)
			}
		}
	}
}

func TestCheckOutsideFindsEverything(t *testing.T) {
	w := newWorld(t)
	missing := filepath.Join(t.TempDir(), "missing")
	req := selftest.CheckRequest{
		Unreachable:    []string{w.targets.HomeCanary, w.root},
		ConnectRefused: []string{w.targets.Sockets["bus"]},
		Writable:       []string{"/usr", missing},
		Readable:       []string{missing, "/proc/1/environ"},
	}
	var rep selftest.CheckReport
	if err := output(t, guest(t, "check"), req, &rep); err != nil {
		t.Error(err)
	}
	right := []string{selftest.CheckLoopback, selftest.CheckUID} // as inside
	for _, r := range rep.Results {
		if r.OK != slices.Contains(right, r.What) {
			t.Errorf("outside: %+v", r)
		}
	}
}

func TestCheckRefusesWhatItDoesNotUnderstand(t *testing.T) {
	for _, in := range []string{"", "{", `{"unreachable":["/x"]} {}`, `{"unreachible":["/x"]}`, `[]`} {
		cmd := guest(t, "check")
		cmd.Stdin = strings.NewReader(in)
		out, err := cmd.Output()
		if err == nil || len(out) > 0 {
			t.Errorf("%q: %v, printed %q", in, err, out)
		}
	}
}

// terminal starts `pty` with the given command and returns the master it sends.
func terminal(t *testing.T, attr *syscall.SysProcAttr, args ...string) (*exec.Cmd, *os.File) {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	t.Cleanup(func() { unix.Close(pair[0]) })
	cmd := guest(t, append([]string{"pty"}, args...)...)
	if attr != nil {
		cmd.SysProcAttr.Setpgid = attr.Setpgid
	}
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	b, oob := make([]byte, 8), make([]byte, unix.CmsgSpace(4))
	if err := unix.SetsockoptTimeval(pair[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
		t.Fatal(err)
	}
	n, oobn, _, _, err := unix.Recvmsg(pair[0], b, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n != 1 || b[0] != 0 {
		t.Fatalf("message %q, %v", b[:max(n, 0)], err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		t.Fatalf("%d control messages, %v", len(msgs), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		t.Fatalf("descriptors %v, %v", fds, err)
	}
	master := os.NewFile(uintptr(fds[0]), "master")
	t.Cleanup(func() { master.Close() })
	// The socket is closed on their side before the command runs.
	n, _, _, _, err = unix.Recvmsg(pair[0], b, nil, 0)
	for errors.Is(err, unix.EINTR) {
		n, _, _, _, err = unix.Recvmsg(pair[0], b, nil, 0)
	}
	if n != 0 || err != nil {
		t.Errorf("after the terminal: %d bytes, %v; want the end", n, err)
	}
	return cmd, master
}

// all reads a terminal up to its hang-up, which is EIO.
func all(t *testing.T, master *os.File) string {
	t.Helper()
	b, err := io.ReadAll(master)
	if err != nil && !errors.Is(err, unix.EIO) {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(b), "\r\n", "\n")
}

func TestPtyIsTheCommandsTerminal(t *testing.T) {
	const script = `stty size </dev/tty; test -t 0 && test -t 1 && test -t 2 && echo three; set -- /proc/$$/fd/*; for f; do n=${f##*/}; [ "$n" -gt 2 ] && readlink $f; done; exec 3<&-; exit 7`
	for _, c := range []struct {
		name string
		attr *syscall.SysProcAttr
	}{
		{"becomes the command", nil},
		{"leads a process group already", &syscall.SysProcAttr{Setpgid: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd, master := terminal(t, c.attr, "--rows", "33", "--cols", "111", "3", "--", "sh", "-c", script)
			got := all(t, master)
			var exit *exec.ExitError
			if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 7 {
				t.Errorf("ended %v, want exit status 7", err)
			}
			// The shell keeps /dev/tty open itself for job control in some builds; nothing else may be.
			for line := range strings.Lines(got) {
				if line = strings.TrimSpace(line); line != "33 111" && line != "three" && line != "/dev/tty" {
					t.Errorf("unexpected %q", line)
				}
			}
			if !strings.Contains(got, "33 111\nthree\n") {
				t.Errorf("printed %q", got)
			}
		})
	}
}

func TestPtyHangsUpWithItsMaster(t *testing.T) {
	cmd, master := terminal(t, nil, "3", "--", "sh", "-c", "echo up; exec cat")
	if _, err := io.ReadFull(master, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	master.Close()
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		// By the hang-up's signal, or by the EIO that a read gets when it comes first.
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGHUP && exit.ExitCode() != 1 {
			t.Errorf("ended %v", err)
		}
	case <-time.After(10 * time.Second):
		cmd.Process.Kill()
		<-done
		t.Error("the command outlives its terminal")
	}
}

func TestPtyInside(t *testing.T) {
	w := newWorld(t)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	cmd := w.boundary(t, false, asGuest, "pty", "8", "--", "sh", "-c", "tty; sleep 0")
	cmd.ExtraFiles = append(cmd.ExtraFiles, theirs)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	oob := make([]byte, unix.CmsgSpace(4))
	_, oobn, _, _, err := unix.Recvmsg(pair[0], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		t.Fatalf("%d control messages, %v", len(msgs), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil {
		t.Fatal(err)
	}
	master := os.NewFile(uintptr(fds[0]), "master")
	defer master.Close()
	if got := all(t, master); got != "/dev/pts/0\n" {
		t.Errorf("printed %q: the terminal is not of the boundary's own devpts", got)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func TestPtyUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
	}{
		{[]string{}, exitUsage},
		{[]string{"3", "true"}, exitUsage},
		{[]string{"1", "--", "true"}, exitUsage},
		{[]string{"x", "--", "true"}, exitUsage},
		{[]string{"--rows", "70000", "3", "--", "true"}, exitUsage},
		{[]string{"3", "--", "no-such-program"}, exitNotFound},
		{[]string{"3", "--", "/etc/passwd"}, exitCannotExec},
		{[]string{"99", "--", "true"}, exitFailed},
	} {
		cmd := guest(t, append([]string{"pty"}, c.args...)...)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != c.code || len(out) == 0 {
			t.Errorf("pty %q: %v, want %d; said %q", c.args, err, c.code, out)
		}
	}
}

// rpc sends lines to a selftest agent and returns what it wrote until it ended.
func rpc(t *testing.T, cmd *exec.Cmd, home, text string) (string, error) {
	t.Helper()
	if cmd.Env == nil {
		cmd.Env = append(os.Environ(), "HOME="+home)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(in, `{"jsonrpc":"2.0","id":1,"method":"session/new","params":{"cwd":"/"}}`+"\n"); err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(out)
	var made struct{ Result struct{ SessionID string } }
	if err := dec.Decode(&made); err != nil {
		t.Fatal(err)
	}
	prompt, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": 2, "method": "session/prompt", "params": map[string]any{
		"sessionId": made.Result.SessionID, "prompt": []any{map[string]any{"type": "text", "text": text}}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write(append(prompt, '\n')); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	for {
		var m struct {
			ID     int
			Params struct {
				Update struct{ Content struct{ Text string } }
			}
		}
		if err := dec.Decode(&m); err != nil || m.ID == 2 {
			break
		}
		said.WriteString(m.Params.Update.Content.Text)
	}
	in.Close()
	return said.String(), cmd.Wait()
}

func TestSelftestEndsAsAsked(t *testing.T) {
	w := newWorld(t)
	_, err := rpc(t, guest(t, "selftest"), w.home, "exit 9")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 9 {
		t.Errorf("exit 9: %v", err)
	}
	for _, sig := range []syscall.Signal{syscall.SIGSEGV, syscall.SIGKILL, syscall.SIGABRT} {
		_, err := rpc(t, guest(t, "selftest"), w.home, fmt.Sprintf("crash %d", sig))
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != sig {
			t.Errorf("crash %d: %v", sig, err)
		}
	}
	if _, err := rpc(t, guest(t, "selftest"), w.home, "crash term"); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("crash term: %v", err)
	}
}

// endLingering ends the process that the guest left behind as pid. The number comes
// from another program, and 0, -1 and a number used again are not that process: the
// signal goes by descriptor, to what is seen to be ours.
func endLingering(t *testing.T, said, tag string) {
	t.Helper()
	pid, err := strconv.Atoi(said)
	if err != nil || pid <= 1 {
		t.Fatalf("%q is no process: %v", said, err)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !strings.HasSuffix(string(b), "linger\x00"+tag+"\x00") {
		t.Fatalf("the process left behind: %q %v", b, err)
	}
	if sid, err := unix.Getsid(pid); err != nil || sid != pid {
		t.Errorf("session %d of process %d: %v", sid, pid, err)
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		t.Error(err)
	}
}

func TestSelftestForkLeavesEverything(t *testing.T) {
	w := newWorld(t)
	said, err := rpc(t, guest(t, "selftest"), w.home, "fork leftover")
	if err != nil {
		t.Fatal(err)
	}
	pid, ok := strings.CutPrefix(said, "forked ")
	if !ok {
		t.Fatalf("said %q", said)
	}
	endLingering(t, pid, "leftover") // the agent is gone
}

func TestDetachReturnsAProcess(t *testing.T) {
	out, err := guest(t, "detach", "number").Output()
	if err != nil {
		t.Fatal(err)
	}
	endLingering(t, strings.TrimSpace(string(out)), "number")
}

func TestSelftestAttackInside(t *testing.T) {
	w := newWorld(t)
	targets, err := json.Marshal(w.targets)
	if err != nil {
		t.Fatal(err)
	}
	said, err := rpc(t, w.boundary(t, false, asGuest, "selftest"), w.home, "attack "+string(targets))
	if err != nil {
		t.Error(err)
	}
	lines, fenced, ok := strings.Cut(said, "\n```json\n")
	body, _, closed := strings.Cut(fenced, "\n```\n")
	var report selftest.Report
	if err := json.Unmarshal([]byte(body), &report); !ok || !closed || err != nil {
		t.Fatalf("%v in %q", err, said)
	}
	if report.Failed != 0 || report.OK < 80 || strings.Count(lines, "\n") != len(report.Results) {
		t.Errorf("%s, %d lines for %d results:\n%s", report.Summary(), strings.Count(lines, "\n"), len(report.Results), lines)
	}
}

func TestGuestStaysSmall(t *testing.T) {
	goCmd, err := exec.LookPath("go")
	if err != nil {
		t.Skip("needs the go command")
	}
	out, err := exec.Command(goCmd, "list", "-deps", ".").Output()
	if err != nil {
		t.Skipf("needs the source and its modules: go list: %v", err)
	}
	for dep := range strings.Lines(string(out)) {
		dep = strings.TrimSpace(dep)
		for _, heavy := range []string{"net/http", "crypto/tls", "github.com/spf13/", "github.com/coder/", "golang.org/x/net/", "github.com/godbus/", "github.com/coreos/"} {
			if strings.HasPrefix(dep, heavy) {
				t.Errorf("the guest links %s: it is started for every command inside", dep)
			}
		}
	}
}
