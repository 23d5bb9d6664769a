//go:build linux && (amd64 || arm64)

// The filter in force: a real bwrap started with it as an ordinary user, and this
// test binary inside, making the calls one by one. Every refusal is also tried
// without the filter, and with a filter whose errno no kernel uses, so that it is
// the filter which is seen to refuse and not the kernel for a reason of its own.

package seccomp

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// probeEnv names what the re-executed test binary does instead of running tests.
const probeEnv = "SECCOMP_TEST_PROBE"

// marker is an errno that no kernel gives (MAX_ERRNO is 4095).
const marker = 3584

func TestMain(m *testing.M) {
	switch what := os.Getenv(probeEnv); what {
	case "":
		os.Exit(m.Run())
	case "table":
		out := map[string]int{}
		for _, r := range table {
			if _, ok := abis[runtime.GOARCH].calls[r.call]; ok {
				out[rowName(r)] = int(call(r))
			}
		}
		if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
			panic(err)
		}
	default:
		f, ok := probes[what]
		if !ok {
			panic("no probe " + what)
		}
		fmt.Println(f())
	}
}

// rowName tells rows of one call apart.
func rowName(r row) string { return fmt.Sprintf("%s%v", r.call, r.when) }

// call makes r's system call with arguments that r refuses, high bits set where a
// condition looks. They are harmless where nothing refuses them: every pointer is
// nil, every descriptor closed, and the caller has no capability.
func call(r row) syscall.Errno {
	args := [6]uintptr{}
	switch r.call {
	case "ioctl", "setsockopt", "setns", "fchmod", "fcntl", "fsconfig", "fsmount", "finit_module":
		args[0] = 1000 // no such descriptor
	case "clone":
		args[0] = unix.CLONE_FS // with CLONE_NEWUSER: EINVAL, so no second process comes of it
	case "unshare":
		args[0] = unix.CLONE_SIGHAND
	case "socket", "socketpair":
		args[0], args[1] = unix.AF_INET, unix.SOCK_STREAM
	}
	for _, c := range r.when {
		v := uintptr(c.values[0])
		if c.op == noneOf {
			v = unix.AF_VSOCK
		}
		if r.call == "clone" || r.call == "unshare" {
			v |= args[c.arg]
		}
		args[c.arg] = v | 1<<33
	}
	_, _, errno := syscall.RawSyscall6(uintptr(abis[runtime.GOARCH].calls[r.call]), args[0], args[1], args[2], args[3], args[4], args[5])
	return errno
}

// bytesOf assembles a filter as Filter does, from rows of the test's own.
func bytesOf(t *testing.T, opts Options, rows []row) []byte {
	t.Helper()
	prog, err := program(runtime.GOARCH, opts, rows)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := bpf.Assemble(prog)
	if err != nil {
		t.Fatal(err)
	}
	var out []byte
	for _, r := range raw {
		out = binary.LittleEndian.AppendUint16(out, r.Op)
		out = append(out, r.Jt, r.Jf)
		out = binary.LittleEndian.AppendUint32(out, r.K)
	}
	return out
}

func filter(t *testing.T, nesting bool) []byte {
	t.Helper()
	b, err := Filter(runtime.GOARCH, Options{Nesting: nesting})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// inside runs argv (default: this binary as probe what) in a bwrap with the filter
// (nil: none), as an ordinary user, and returns what it printed and how it ended.
func inside(t *testing.T, filter []byte, what string, argv ...string) (string, error) {
	t.Helper()
	bwrap, err := exec.LookPath("bwrap")
	if err != nil {
		t.Skip("bwrap is not installed")
	}
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	args := []string{"--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
		"--perms", "0555", "--ro-bind-data", "3", "/tmp/probe", "--chdir", "/tmp", "--cap-drop", "ALL"}
	files := []*os.File{self}
	if filter != nil {
		args = append(args, "--seccomp", "4")
		files = append(files, memory(t, filter))
	}
	if len(argv) == 0 {
		argv = []string{"/tmp/probe"}
	}
	cmd := exec.Command(bwrap, append(append(args, "--"), argv...)...)
	cmd.ExtraFiles = files
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), probeEnv+"="+what, "HOME=/tmp", "GOCOVERDIR=/tmp")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if stderr.Len() > 0 {
		t.Logf("%s %s: stderr: %s", what, argv, stderr.String())
	}
	return strings.TrimSpace(stdout.String()), err
}

// mustRun is inside for what has to end well.
func mustRun(t *testing.T, filter []byte, what string, argv ...string) string {
	t.Helper()
	out, err := inside(t, filter, what, argv...)
	if err != nil {
		t.Fatalf("%s %s: %v", what, argv, err)
	}
	return out
}

// memory holds b in a file that has no name, at its start.
func memory(t *testing.T, b []byte) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("filter", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "filter")
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, 0); err != nil {
		t.Fatal(err)
	}
	return f
}

// kernelAgrees are calls that a kernel without the filter may refuse to an ordinary
// user with the same errno. That the filter refuses them is shown by the marker.
var kernelAgrees = map[string]bool{
	"socket": true, "socketpair": true, "setsockopt": true, "keyctl": true, "add_key": true, "request_key": true,
	"bpf": true, "perf_event_open": true, "userfaultfd": true, "modify_ldt": true, "uselib": true, "lookup_dcookie": true, "nfsservctl": true,
	"move_pages": true, "migrate_pages": true, "open_by_handle_at": true, "kexec_load": true, "kexec_file_load": true,
	"init_module": true, "finit_module": true, "delete_module": true, "reboot": true, "swapon": true, "swapoff": true,
	"clock_settime": true, "settimeofday": true, "clock_adjtime": true, "acct": true, "quotactl": true, "quotactl_fd": true, "vhangup": true, "iopl": true, "ioperm": true, "syslog": true,
	"fsopen": true, "mount_setattr": true, "open_tree_attr": true,
}

func TestEachCallIsRefusedInsideBwrap(t *testing.T) {
	run := func(filter []byte) map[string]int {
		var out map[string]int
		if err := json.Unmarshal([]byte(mustRun(t, filter, "table")), &out); err != nil {
			t.Fatal(err)
		}
		return out
	}
	marked := make([]row, len(table))
	for i, r := range table {
		r.errno = marker
		marked[i] = r
	}
	without := run(nil)
	for _, o := range []Options{{}, {Nesting: true}, {Signals: true}} {
		with, mark := run(bytesOf(t, o, table)), run(bytesOf(t, o, marked))
		for _, r := range table {
			name := rowName(r)
			got, ok := with[name]
			switch {
			case !ok: // this architecture has no such call
			case !r.in(o):
				if got != without[name] || mark[name] == marker {
					t.Errorf("%+v: %s: errno %d with the filter, %d without: the filter touches what is needed there", o, name, got, without[name])
				}
			case got != int(r.errno) || mark[name] != marker:
				t.Errorf("%+v: %s: errno %d, want %d; with the marker filter %d, want %d", o, name, got, r.errno, mark[name], marker)
			case without[name] == marker || (without[name] == int(r.errno) && !kernelAgrees[r.call]):
				t.Errorf("%s: errno %d without the filter as well: the test shows nothing", name, without[name])
			}
		}
	}
}

// probes run inside and say in one word what they saw.
var probes = map[string]func() string{
	"x32": func() string {
		_, _, e := syscall.RawSyscall(0x40000000|39, 0, 0, 0) // x32 getpid
		return fmt.Sprint(int(e))
	},
	"beyond": func() string {
		_, _, e := syscall.RawSyscall(newest+1, 0, 0, 0)
		return fmt.Sprint(int(e))
	},
	"minus-one": func() string {
		_, _, e := syscall.RawSyscall(^uintptr(0), 0, 0, 0)
		return fmt.Sprint(int(e))
	},
	"go": goRuns,
	"io_uring": func() string {
		var params [120]byte // struct io_uring_params
		fd, _, e := syscall.RawSyscall(uintptr(abis[runtime.GOARCH].calls["io_uring_setup"]), 8, uintptr(unsafe.Pointer(&params)), 0)
		if e == 0 && fd > 2 {
			return "ring"
		}
		return e.Error()
	},
	"vsock": func() string {
		fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0)
		if err == nil {
			unix.Close(fd)
			return "socket"
		}
		return err.Error()
	},
	"families": func() string {
		for _, f := range [][3]int{{unix.AF_UNIX, unix.SOCK_STREAM, 0}, {unix.AF_INET, unix.SOCK_STREAM, 0}, {unix.AF_INET6, unix.SOCK_DGRAM, 0}, {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}} {
			fd, err := unix.Socket(f[0], f[1], f[2])
			if err != nil {
				return fmt.Sprint(f, err)
			}
			unix.Close(fd)
		}
		return "all"
	},
	"tiocsti": func() string { return pushed(unix.TIOCSTI) },
	// The kernel takes the command as unsigned int, so this is TIOCSTI as well.
	"tiocsti-high": func() string { return pushed(unix.TIOCSTI | 1<<32) },
	"kernel-log": func() string {
		_, err := unix.Klogctl(unix.SYSLOG_ACTION_SIZE_BUFFER, nil)
		return fmt.Sprint(err)
	},
	"new-user-namespace": func() string {
		cmd := exec.Command("/bin/true")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER}
		return fmt.Sprint(cmd.Run())
	},
	"ptrace-pid1": ptracePid1,
	"int80":       int80,
}

// pushed tries to type a character into a terminal of its own that it controls.
func pushed(cmd uintptr) string {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err.Error()
	}
	defer master.Close()
	signal.Ignore(unix.SIGHUP) // comes when the master is closed
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		return "unlock: " + err.Error()
	}
	slave, _, e := syscall.Syscall(syscall.SYS_IOCTL, master.Fd(), unix.TIOCGPTPEER, unix.O_RDWR)
	if e != 0 {
		return "peer: " + e.Error()
	}
	// The test starts bwrap in a session of its own, but this process need not lead it.
	if _, err := unix.Setsid(); err != nil {
		return "setsid: " + err.Error()
	}
	if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, slave, unix.TIOCSCTTY, 0); e != 0 {
		return "terminal: " + e.Error()
	}
	c := byte('x')
	if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, slave, cmd, uintptr(unsafe.Pointer(&c))); e != 0 {
		return e.Error()
	}
	return "typed"
}

func TestWaysAroundTheFilter(t *testing.T) {
	tiocsti := "typed"
	if b, err := os.ReadFile("/proc/sys/dev/tty/legacy_tiocsti"); err == nil && strings.TrimSpace(string(b)) == "0" {
		tiocsti = unix.EIO.Error() // this kernel refuses it by itself
	}
	ring := "ring"
	if b, err := os.ReadFile("/proc/sys/kernel/io_uring_disabled"); err == nil && strings.TrimSpace(string(b)) != "0" {
		ring = unix.EPERM.Error()
	}
	cases := []struct {
		probe, arch   string
		with, without string // without "": not looked at
	}{
		{probe: "tiocsti", with: unix.EPERM.Error(), without: tiocsti},
		{probe: "tiocsti-high", with: unix.EPERM.Error(), without: tiocsti},
		{probe: "io_uring", with: unix.ENOSYS.Error(), without: ring},
		{probe: "vsock", with: unix.EAFNOSUPPORT.Error()},
		{probe: "families", with: "all", without: "all"},
		{probe: "new-user-namespace", with: "fork/exec /bin/true: operation not permitted", without: "<nil>"},
		{probe: "x32", arch: "amd64", with: "38"},
		{probe: "beyond", with: "38"},
		{probe: "minus-one", with: "38", without: "38"},
		{probe: "kernel-log", with: unix.EPERM.Error()},
		{probe: "ptrace-pid1", arch: "amd64", with: "errno 38", without: "errno 0"},
	}
	for _, c := range cases {
		t.Run(c.probe, func(t *testing.T) {
			if c.arch != "" && c.arch != runtime.GOARCH {
				t.Skipf("%s is a matter of %s", c.probe, c.arch)
			}
			if got := mustRun(t, filter(t, false), c.probe); got != c.with {
				t.Errorf("with the filter: %q, want %q", got, c.with)
			}
			if c.without != "" {
				if got := mustRun(t, nil, c.probe); got != c.without {
					t.Errorf("without the filter: %q, want %q", got, c.without)
				}
			}
		})
	}
}

// TestForeignEntryKills: int 0x80 takes i386 numbers, under which 20 is getpid.
func TestForeignEntryKills(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("int 0x80 is amd64's; the 32-bit entry of arm64 needs a 32-bit program")
	}
	// The control comes first: a kernel without that entry ends the process by itself.
	out, err := inside(t, nil, "int80")
	if err != nil {
		t.Skipf("this kernel has no 32-bit entry: %.200v", err)
	}
	if out != "pid" {
		t.Errorf("without the filter: %q, want the call to work", out)
	}
	const died = 128 + int(unix.SIGSYS) // bwrap's way to say so
	for _, nesting := range []bool{false, true} {
		out, err := inside(t, filter(t, nesting), "int80")
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != died || out != "" {
			t.Errorf("with the filter, nesting %v: printed %q, ended %v, want exit status %d and nothing printed", nesting, out, err, died)
		}
	}
}

var innerBwrap = []string{"bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--", "/bin/sh", "-c", "echo $$"}

func TestInnerBwrapRunsWithNesting(t *testing.T) {
	if got := mustRun(t, filter(t, true), "", innerBwrap...); got != "2" {
		t.Errorf("inner shell's pid %q, want 2", got)
	}
}

func TestInnerBwrapIsRefusedWithoutNesting(t *testing.T) {
	if _, err := inside(t, nil, "", innerBwrap...); err != nil {
		t.Fatalf("without a filter the inner bwrap must run, else this shows nothing: %v", err)
	}
	if out, err := inside(t, filter(t, false), "", innerBwrap...); err == nil {
		t.Errorf("inner bwrap ran and printed %q", out)
	}
}

// TestThreadsStart: a libc whose clone3 is refused takes clone, if the errno is ENOSYS.
func TestThreadsStart(t *testing.T) {
	python, err := exec.LookPath("/usr/bin/python3")
	if err != nil {
		t.Skip("needs a program with libc threads: /usr/bin/python3 is not installed")
	}
	const script = "import threading; t = threading.Thread(target=print, args=('ran',)); t.start(); t.join()"
	if got := mustRun(t, filter(t, false), "", python, "-c", script); got != "ran" {
		t.Errorf("printed %q", got)
	}
}

// languages are small programs that do what a build does: threads, files, a socket to itself,
// another process. Each prints "ran".
var languages = []struct {
	name, missing string
	argv          []string
	want          string
}{
	{"python", "python3", []string{"/usr/bin/python3", "-c", `
import asyncio, multiprocessing, socket, ssl, subprocess, tempfile, threading
t = threading.Thread(target=lambda: None); t.start(); t.join()
with tempfile.TemporaryFile() as f: f.write(b"x")
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
s = socket.create_server(("127.0.0.1", 0)); c = socket.create_connection(s.getsockname()); c.close()
assert subprocess.run(["/bin/true"]).returncode == 0
p = multiprocessing.get_context("fork").Process(target=lambda: None); p.start(); p.join(); assert p.exitcode == 0
asyncio.run(asyncio.sleep(0)); ssl.create_default_context(); print("ran")`}, "ran"},
	{"node", "nodejs", []string{"/usr/bin/node", "-e", `
const {Worker} = require("worker_threads"), fs = require("fs"), net = require("net"), cp = require("child_process");
fs.promises.writeFile("/tmp/x", "x").then(() => {
  cp.execFileSync("/bin/true");
  const s = net.createServer((c) => c.end("x")).listen(0, "127.0.0.1", () => {
    net.connect(s.address().port, "127.0.0.1").on("data", () => { s.close();
      new Worker("require('crypto').randomBytes(8)", {eval: true}).on("exit", () => console.log("ran")); });
  });
});`}, "ran"},
	// ripgrep is a Rust program that looks with a thread per processor.
	{"rust", "ripgrep", []string{"/usr/bin/rg", "--threads", "4", "--max-count", "1", "--no-filename", "^PRETTY_NAME=", "/usr/lib/os-release", "/etc/os-release", "/usr/lib/os-release"}, "PRETTY_NAME="},
	{"go", "", nil, "ran"}, // this test binary
}

func TestLanguagesRunUnderTheFilter(t *testing.T) {
	for _, l := range languages {
		t.Run(l.name, func(t *testing.T) {
			if l.argv != nil {
				if _, err := os.Stat(l.argv[0]); err != nil {
					t.Skipf("missing: %s (apt-get install %s)", l.argv[0], l.missing)
				}
			}
			for _, nesting := range []bool{false, true} {
				if got := mustRun(t, filter(t, nesting), "go", l.argv...); !strings.HasPrefix(got, l.want) {
					t.Errorf("nesting %v: printed %q", nesting, got)
				}
			}
		})
	}
}

// Java is a test of its own: no build here needs a JDK, so it may be missing.
func TestJavaRunsUnderTheFilter(t *testing.T) {
	java, err := exec.LookPath("java")
	if err != nil {
		t.Skip("missing: a JDK (apt-get install default-jdk-headless)")
	}
	const program = `import java.net.*; import java.nio.file.*;
public class Ran { public static void main(String[] a) throws Exception {
  Thread t = new Thread(() -> {}); t.start(); t.join();
  Files.writeString(Path.of("/tmp/x"), "x");
  try (ServerSocket s = new ServerSocket(0, 1, InetAddress.getLoopbackAddress()); Socket c = new Socket(s.getInetAddress(), s.getLocalPort())) { s.accept().close(); }
  if (new ProcessBuilder("/bin/true").start().waitFor() != 0) throw new Exception("true");
  System.out.println("ran"); } }`
	for _, nesting := range []bool{false, true} {
		script := "cat >/tmp/Ran.java <<'END'\n" + program + "\nEND\nexec " + java + " -Xmx128m /tmp/Ran.java"
		if got := mustRun(t, filter(t, nesting), "", "/bin/sh", "-c", script); got != "ran" {
			t.Errorf("nesting %v: printed %q", nesting, got)
		}
	}
}

// goRuns is the Go program: threads, a socket to itself, another process.
func goRuns() string {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			done <- err
			return
		}
		defer l.Close()
		c, err := net.Dial("tcp", l.Addr().String())
		if err == nil {
			c.Close()
			err = exec.Command("/bin/true").Run()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		return err.Error()
	}
	if err := os.WriteFile("/tmp/x", []byte("x"), 0o600); err != nil {
		return err.Error()
	}
	return "ran"
}
