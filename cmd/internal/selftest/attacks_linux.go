// The attack table. A line says what it tries, what that would mean, and whether the
// boundary promises that it fails or that it works.

package selftest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Attacks returns the table, in the order it is run.
func Attacks() []Attack {
	table := []Attack{
		// Files.
		{"read-home", "CASES 11", "read a file of the home", "keys, tokens, mail", MustFail, true, canaryAt(func(t *Targets) string { return t.HomeCanary })},
		{"read-home-proc-root", "CASES 11", "the same by /proc/1/root", "the first process's view", MustFail, false, canaryAt(func(t *Targets) string { return under("/proc/1/root", t.HomeCanary) })},
		{"read-home-proc-pid", "CASES 11", "the same by /proc/PID/root of a host process", "another process's view", MustFail, true, canaryAt(hostRootCanary)},
		{"read-home-dotdot", "CASES 11", "the same by ../ out of the workspace", "path tricks", MustFail, true, canaryAt(func(t *Targets) string { return dotdot(t.Workspace, t.HomeCanary) })},
		{"read-home-cwd", "CASES 11", "the same by /proc/self/cwd and ../", "path tricks", MustFail, true, canaryAt(func(t *Targets) string { return dotdot("/proc/self/cwd", t.HomeCanary) })},
		{"read-link", "CASES 11", "read through a link in the workspace", "a link that somebody planted", MustFail, true, canaryAt(func(t *Targets) string { return t.Link })},
		{"write-home", "CASES 51", "open a file of the home for writing", "a line in .bashrc", MustFail, true, writeHome},
		{"read-root", "DESIGN 4", "read a file in AgentConnect's root", "other agents' configuration, keys", MustFail, true, canaryAt(func(t *Targets) string { return t.RootCanary })},
		{"list-root", "DESIGN 4", "list AgentConnect's root", "which agents exist", MustFail, true, listRoot},
		{"list-agents", "DESIGN 4", "list the agents' directories", "which agents exist", MustFail, true, listAgents},
		{"read-other-agent", "DESIGN 4", "read a file of another agent", "its memory, its sessions", MustFail, true, canaryAt(func(t *Targets) string { return t.OtherAgent })},
		{"read-host-tmp", "DESIGN 4", "read a file in the host's /tmp", "other programs' files", MustFail, true, canaryAt(func(t *Targets) string { return t.TmpCanary })},
		{"write-usr", "DESIGN 4", "create a file in /usr", "a planted program", MustFail, false, creates("/usr")},
		{"write-etc", "DESIGN 4", "create a file in /etc", "a planted setting", MustFail, false, creates("/etc")},
		{"write-passwd", "DESIGN 4", "open /etc/passwd for writing", "a new user", MustFail, false, opens("/etc/passwd")},
		{"write-slash", "CASES 13", "create a file in /", "residue on the host", MustFail, false, creates("/")},
		{"rename-pinned", "CASES 23", "rename a pinned directory", "hooks the host would run", MustFail, true, renamePinned},
		{"write-cgroup", "CASES 40", "write cgroup.procs", "leave the limits", MustFail, false, writeCgroup},

		// Sockets of the host.
		{"connect-bus", "CASES 52", "connect to the session bus", "start units outside", MustFail, true, connects("bus")},
		{"connect-systemd", "CASES 52", "connect to systemd's private socket", "start units outside", MustFail, true, connects("systemd-private")},
		{"connect-system-bus", "CASES 52", "connect to the system bus", "polkit, logind, machined", MustFail, true, connects("system-bus")},
		{"connect-ssh-agent", "CASES 50", "connect to the ssh agent", "the user's keys", MustFail, true, connects("ssh-agent")},
		{"connect-gpg-agent", "CASES 50", "connect to the gpg agent", "the user's keys", MustFail, true, connects("gpg-agent")},
		{"connect-docker", "CASES 52", "connect to Docker", "root on the host", MustFail, true, connects("docker")},
		{"connect-wayland", "DESIGN 4", "connect to the display", "keystrokes, pictures", MustFail, true, connects("wayland")},
		{"connect-exposed", "CASES 51b", "connect to a host socket in a read-only tree", "read-only does not stop a connect", MustFail, true, connectsTo(func(t *Targets) string { return t.ExposedSocket })},
		{"connect-workspace", "CASES 51b", "connect to a host socket in the workspace", "a development server's control socket", MustFail, true, connectsTo(func(t *Targets) string { return t.WorkspaceSocket })},
		{"connect-abstract", "CASES 51b", "connect to an abstract socket", "no file hides it, only the network namespace", MustFail, true, connectsTo(abstract)},
		{"systemd-run", "CASES 52", "systemd-run --user true", "run a program outside", MustFail, false, program("systemd-run", "--user", "--quiet", "--wait", "--collect", "true")},
		{"busctl", "CASES 52", "busctl --user list", "talk to the bus", MustFail, false, program("busctl", "--user", "--no-pager", "list")},
		{"machinectl", "CASES 52", "machinectl list", "talk to machined", MustFail, false, program("machinectl", "--no-pager", "list")},
		{"docker", "CASES 52", "docker version", "talk to Docker", MustFail, false, program("docker", "version")},

		// Network.
		{"tcp-host", "CASES 31", "connect to a port on the host's loopback", "databases, debuggers, admin pages", MustFail, true, dials("host", func(t *Targets) string { return t.HostTCP })},
		{"tcp-public", "CASES 34", "connect to a public address", "send the code away", MustFail, true, dials("open", func(t *Targets) string { return t.PublicTCP })},
		{"tcp-metadata", "CASES 31", "connect to the cloud's metadata address", "the machine's credentials", MustFail, false, dials("host", func(t *Targets) string { return t.MetadataTCP })},
		{"udp", "CASES 35", "send a datagram and get an answer", "a way out beside TCP", MustFail, true, datagram},
		{"raw-socket", "CASES 35", "open a raw IP socket", "forged packets", MustFail, false, opensSocket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)},
		{"packet-socket", "CASES 35", "open a packet socket", "others' traffic", MustFail, false, opensSocket(unix.AF_PACKET, unix.SOCK_RAW, 0)},
		{"vsock", "DESIGN 4", "open a socket to the hypervisor", "past the network namespace", MustFail, false, opensSocket(unix.AF_VSOCK, unix.SOCK_STREAM, 0)},
		{"alg-socket", "DESIGN 4", "open a kernel crypto socket", "local root holes", MustFail, false, opensSocket(unix.AF_ALG, unix.SOCK_SEQPACKET, 0)},
		{"interfaces", "CASES 31", "see the host's network interfaces", "where the host is connected", MustFail, true, interfaces},

		// Processes.
		{"see-host-process", "DESIGN 4", "look at a process of the host", "arguments, open files", MustFail, true, seeHostProcess},
		{"kill-host-process", "DESIGN 4", "signal a process of the host (signal 0)", "stop the daemon", MustFail, true, signalHostProcess},
		{"trace-pid1", "CASES 51a", "trace pid 1 to use what it may do", "a process without the filter", MustFail, false, tracePid1},
		{"pid1-environ", "CASES 49a", "secrets in /proc/1/environ", "the daemon's environment", MustFail, false, secretsOf("/proc/1/environ")},
		{"pid1-cmdline", "CASES 49a", "secrets in /proc/1/cmdline", "the layout of the host, tokens", MustFail, false, secretsOf("/proc/1/cmdline")},
		{"any-process", "CASES 49", "secrets in any process's environment or arguments", "tokens of the daemon", MustFail, true, secretsOfAll},
		{"descriptors", "CASES 49a", "descriptors that were inherited", "a door to the host's files", MustFail, false, inherited},
		{"pid1-descriptors", "CASES 49a", "descriptors of pid 1 that lead to files or sockets", "a door to the host's files", MustFail, false, pid1Descriptors},
		{"environment", "CASES 50", "variables that name the host's agents and secrets", "SSH_AUTH_SOCK, AWS_*, GITHUB_TOKEN", MustFail, false, environment},

		// The kernel.
		{"capabilities", "DESIGN 4", "hold a capability", "whatever it allows", MustFail, false, capabilities},
		{"new-privileges", "DESIGN 4", "gain rights by a setuid program", "root by a hole in one", MustFail, true, newPrivileges},
		{"mount", "DESIGN 4", "mount a file system", "change the view", MustFail, false, mounts},
		{"remount", "DESIGN 4", "make /usr writable again", "change the view", MustFail, false, remounts},
		{"umount", "DESIGN 4", "take a cover away", "see what it hides", MustFail, false, unmounts},
		{"user-namespace", "DESIGN 4", "make a user namespace", "all capabilities in it", MustFail, false, userNamespace},
		{"mount-namespace", "DESIGN 4", "make a mount namespace", "change the view", MustFail, false, newNamespace(syscall.CLONE_NEWNS)},
		{"join-namespace", "DESIGN 4", "join the namespaces of pid 1 or of a host process", "its view", MustFail, false, tries("setns")},
		{"chroot", "DESIGN 4", "change the root directory", "a way out of a relative view", MustFail, false, changesRoot},
		{"mknod", "DESIGN 4", "make a device node", "the disk", MustFail, false, makesDevice},
		{"devices", "DESIGN 4", "device nodes beyond the least", "hardware", MustFail, true, devices},
		{"tiocsti", "CVE-2017-5226", "type into a terminal", "commands in the operator's shell", MustFail, false, tries("tiocsti")},
		{"tiocsti-high", "CVE-2019-10063", "the same with a high bit in the command", "a filter that compares 64 bits", MustFail, false, tries("tiocsti-high")},
		{"tioclinux", "CVE-2023-28100", "paste into a console", "commands in the operator's shell", MustFail, false, tries("tioclinux")},
		{"foreign-terminal", "CVE-2017-5226", "hold a terminal of the host", "the operator's terminal", MustFail, false, foreignTerminal},
		{"io-uring", "CASES 51a", "set up an io_uring", "calls that no filter sees", MustFail, false, ioURing},
		{"keyrings", "DESIGN 4", "read the user keyring", "the user's kernel keys", MustFail, true, keyrings},
		{"bpf", "DESIGN 4", "make a BPF map", "code in the kernel", MustFail, false, bpfMap},
		{"perf", "DESIGN 4", "count the kernel's events", "other processes' secrets", MustFail, false, perf},
		{"userfaultfd", "DESIGN 4", "make a userfaultfd", "races in the kernel", MustFail, false, userfaultfd},
		{"open-by-handle", "DESIGN 4", "open a file by its handle", "any file of the file system", MustFail, false, byHandle},
		{"kernel-log", "DESIGN 4", "read the kernel's log", "addresses, devices", MustFail, false, kernelLog},
		{"core-pattern", "DESIGN 4", "open /proc/sys/kernel/core_pattern for writing", "a program run as root", MustFail, false, opens("/proc/sys/kernel/core_pattern")},
		{"sysrq", "DESIGN 4", "open /proc/sysrq-trigger for writing", "stop the machine", MustFail, false, opens("/proc/sysrq-trigger")},
		{"set-clock", "DESIGN 4", "set the clock to what it says", "the machine's time", MustFail, false, setClock},

		// What has to work, or nobody can work.
		{"write-workspace", "promise", "write in the workspace", "the agent's work", MustWork, true, writes(func(t *Targets) string { return t.Workspace })},
		{"run-in-workspace", "promise", "run a program in the workspace", "build results", MustWork, true, runsIn(func(t *Targets) string { return t.Workspace })},
		{"write-own-home", "promise", "write in the home", "settings, caches", MustWork, true, writes(func(t *Targets) string { return t.Home })},
		{"write-tmp", "promise", "write in /tmp", "every program", MustWork, true, writes(func(t *Targets) string { return t.Tmp })},
		{"write-var-tmp", "promise", "write in /var/tmp", "many programs", MustWork, true, writes(func(*Targets) string { return "/var/tmp" })},
		{"write-memory", "promise", "write in the agent's memory", "what it learned", MustWork, true, writes(func(t *Targets) string { return t.Memory })},
		{"write-runtime-dir", "promise", "write in XDG_RUNTIME_DIR", "sockets of its own", MustWork, false, writes(func(*Targets) string { return os.Getenv("XDG_RUNTIME_DIR") })},
		{"read-usr", "promise", "list /usr/bin", "the system's programs", MustWork, true, readUsr},
		{"shell", "promise", "run a shell and a pipe", "every tool", MustWork, true, shell},
		{"git", "CASES 28", "git init, add, commit", "the agent's work", MustWork, true, git},
		{"loopback", "promise", "listen and connect on 127.0.0.1", "test servers", MustWork, true, loopback("tcp4", "127.0.0.1:0")},
		{"loopback6", "promise", "listen and connect on ::1", "test servers", MustWork, true, loopback("tcp6", "[::1]:0")},
		{"unix-socket", "promise", "listen and connect on a socket of its own", "language servers", MustWork, true, ownSocket},
		{"terminal", "promise", "open a terminal of its own", "tests of terminal programs", MustWork, true, ownTerminal},
		{"own-uid", "promise", "be the user, not root", "file owners", MustWork, true, ownUID},
		{"passwd-home", "promise", "the user's passwd entry names $HOME", "ssh, git, Java", MustWork, true, passwdHome},
		{"fresh-proc", "promise", "read /proc/self", "every runtime", MustWork, true, freshProc},
	}
	table = slices.Concat(table, pathAttacks(), gitAttacks(), processAttacks(), callAttacks())
	for _, id := range slices.Sorted(maps.Keys(foreign)) {
		table = append(table, Attack{id, "CASES 51a", "getpid by another entry (" + id + ")", "calls that the filter takes for others", MustFail, false, tries(id)})
	}
	return table
}

// Files.

// canaryAt reads the file that path names.
func canaryAt(path func(*Targets) string) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		p := path(t)
		if p == "" {
			return skipped("no target")
		}
		f, err := os.Open(p)
		if err != nil {
			return Refused, err.Error()
		}
		defer f.Close()
		b, err := io.ReadAll(io.LimitReader(f, 1<<16))
		switch {
		case err != nil:
			return Refused, err.Error()
		case t.Token != "" && !bytes.Contains(b, []byte(t.Token)):
			return refused("another file is at %s (%d bytes)", p, len(b))
		}
		return worked("read %d bytes of %s", len(b), p)
	}
}

// under is path below dir, or nothing if there is no path.
func under(dir, path string) string {
	if path == "" {
		return ""
	}
	return dir + path
}

func hostRootCanary(t *Targets) string {
	if t.HostPID == 0 {
		return ""
	}
	return under(fmt.Sprintf("/proc/%d/root", t.HostPID), t.HomeCanary)
}

// dotdot goes up from dir further than any directory is deep. The path is not
// cleaned: the kernel walks it step by step.
func dotdot(dir, path string) string {
	if path == "" || dir == "" {
		return ""
	}
	return dir + strings.Repeat("/..", 64) + path
}

func writeHome(_ context.Context, t *Targets) (Seen, string) {
	if t.HomeCanary == "" {
		return skipped("no target")
	}
	// Without O_CREATE: the private home has the same path, and a new file there is no harm.
	f, err := os.OpenFile(t.HomeCanary, os.O_RDWR, 0)
	if err != nil {
		return Refused, err.Error()
	}
	f.Close()
	return canaryAt(func(t *Targets) string { return t.HomeCanary })(context.Background(), t)
}

func listRoot(_ context.Context, t *Targets) (Seen, string) { return lists(t.Root) }

func listAgents(_ context.Context, t *Targets) (Seen, string) {
	if t.Root == "" {
		return skipped("no target")
	}
	seen, detail := lists(filepath.Join(t.Root, "agents"))
	if seen != Worked {
		return seen, detail
	}
	// The agent's own directory may show, as the way to its workspace.
	entries, err := os.ReadDir(filepath.Join(t.Root, "agents"))
	if err != nil {
		return Refused, err.Error()
	}
	own := 0
	for _, e := range entries {
		if strings.HasPrefix(t.Workspace+"/", filepath.Join(t.Root, "agents", e.Name())+"/") {
			own++
		}
	}
	if len(entries) == own {
		return refused("only the agent's own directory")
	}
	return Worked, detail
}

// lists counts dir's entries; the way to the workspace is the only one that may show.
func lists(dir string) (Seen, string) {
	if dir == "" {
		return skipped("no target")
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return Refused, err.Error()
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if len(names) == 0 || (len(names) == 1 && names[0] == "agents") {
		return refused("an empty cover: %q", names)
	}
	return worked("entries: %q", names)
}

// creates makes a new file in dir and removes it.
func creates(dir string) func(context.Context, *Targets) (Seen, string) {
	return func(context.Context, *Targets) (Seen, string) {
		name, err := create(dir)
		return outcome(err, "made "+name)
	}
}

func create(dir string) (string, error) {
	f, err := os.CreateTemp(dir, ".agentconnect-selftest-*")
	if err != nil {
		return "", err
	}
	_, werr := f.WriteString("selftest\n")
	return f.Name(), errors.Join(werr, f.Close(), os.Remove(f.Name()))
}

// writes is creates for a directory of the targets, which has to work.
func writes(dir func(*Targets) string) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		d := dir(t)
		if d == "" {
			return skipped("no such directory named")
		}
		name, err := create(d)
		return outcome(err, "made and removed "+name)
	}
}

// opens opens a file for writing and writes nothing.
func opens(path string) func(context.Context, *Targets) (Seen, string) {
	return func(context.Context, *Targets) (Seen, string) {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err == nil {
			f.Close()
		}
		return outcome(err, "opened "+path)
	}
}

func renamePinned(_ context.Context, t *Targets) (Seen, string) {
	if len(t.Pinned) == 0 {
		return skipped("no target")
	}
	var last error
	for _, p := range t.Pinned {
		moved := p + ".agentconnect-selftest"
		if last = os.Rename(p, moved); last == nil {
			return outcome(os.Rename(moved, p), "renamed "+p+" and back")
		}
	}
	return Refused, last.Error()
}

func writeCgroup(context.Context, *Targets) (Seen, string) {
	paths := []string{"/sys/fs/cgroup/cgroup.procs"}
	if b, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		for _, line := range strings.Split(string(b), "\n") {
			if p, ok := strings.CutPrefix(line, "0::"); ok {
				paths = append(paths, filepath.Join("/sys/fs/cgroup", p, "cgroup.procs"))
			}
		}
	}
	var last error
	for _, p := range paths {
		f, err := os.OpenFile(p, os.O_WRONLY, 0)
		if err == nil {
			f.Close()
			return worked("opened %s", p)
		}
		last = err
	}
	return Refused, last.Error()
}

// Sockets.

func abstract(t *Targets) string {
	if t.AbstractSocket == "" || t.Network == "host" {
		return "" // shared with the host's network, as status says
	}
	return "@" + strings.TrimPrefix(t.AbstractSocket, "@")
}

func connects(name string) func(context.Context, *Targets) (Seen, string) {
	return connectsTo(func(t *Targets) string { return t.Sockets[name] })
}

func connectsTo(path func(*Targets) string) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, t *Targets) (Seen, string) {
		p := path(t)
		if p == "" {
			return skipped("no target")
		}
		return outcome(connectUnix(ctx, p), "connected to "+p)
	}
}

// connectUnix tries the socket types that listeners have.
func connectUnix(ctx context.Context, path string) error {
	var err error
	for _, network := range []string{"unix", "unixpacket", "unixgram"} {
		d := net.Dialer{Timeout: 2 * time.Second}
		var c net.Conn
		if c, err = d.DialContext(ctx, network, path); err == nil {
			return c.Close()
		}
		if !errors.Is(err, unix.EPROTOTYPE) {
			return err
		}
	}
	return err
}

// program runs a program that talks to the host; absent is as good as refused.
func program(name string, args ...string) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, _ *Targets) (Seen, string) {
		if _, err := exec.LookPath(name); err != nil {
			return refused("%s is not installed here", name)
		}
		out, err := run(ctx, "", name, args...)
		return outcome(err, firstLine(out))
	}
}

// run runs a program for at most ten seconds; the error has the end of what it said.
func run(ctx context.Context, dir, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%w: %s", err, firstLine(string(out)))
	}
	return string(out), nil
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	if len(line) > 200 {
		line = line[:200]
	}
	return line
}

// Network.

// dials connects by TCP; from network mode opened on, that is no attack.
func dials(opened string, addr func(*Targets) string) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, t *Targets) (Seen, string) {
		a := addr(t)
		switch {
		case a == "":
			return skipped("no target")
		case t.Network == "host" || t.Network == opened:
			return skipped("network mode " + t.Network + " allows it")
		}
		d := net.Dialer{Timeout: 2 * time.Second}
		c, err := d.DialContext(ctx, "tcp", a)
		if err == nil {
			err = talks(c)
			c.Close()
		}
		return outcome(err, "connected to "+a)
	}
}

// talks says whether somebody is there: where connections are led through a gateway, every
// connect succeeds, and what is refused is reset, or told so on port 80.
func talks(c net.Conn) error {
	if _, err := io.WriteString(c, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	head := make([]byte, 4096)
	n, err := io.ReadFull(c, head)
	if errors.Is(err, unix.ECONNRESET) && n == 0 {
		return err
	}
	if text := string(head[:n]); strings.HasPrefix(text, "HTTP/1.1 403") && strings.Contains(text, "agentconnect") {
		return errors.New("the gateway answered that it is refused")
	}
	return nil
}

func datagram(ctx context.Context, t *Targets) (Seen, string) {
	switch {
	case t.HostUDP == "":
		return skipped("no target")
	case t.Network == "host":
		return skipped("network mode host allows it")
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "udp", t.HostUDP)
	if err != nil {
		return Refused, err.Error()
	}
	defer c.Close()
	if _, err := c.Write([]byte("agentconnect selftest\n")); err != nil {
		return Refused, err.Error()
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		return Refused, err.Error()
	}
	_, err = c.Read(make([]byte, 1500))
	return outcome(err, "an answer from "+t.HostUDP)
}

func opensSocket(family, kind, proto int) func(context.Context, *Targets) (Seen, string) {
	return func(context.Context, *Targets) (Seen, string) {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, proto)
		if err == nil {
			unix.Close(fd)
		}
		return outcome(err, "a socket")
	}
}

func interfaces(_ context.Context, t *Targets) (Seen, string) {
	if t.Network == "host" {
		return skipped("network mode host shares them")
	}
	list, err := net.Interfaces()
	if err != nil {
		return Refused, err.Error()
	}
	var names []string
	for _, i := range list {
		if i.Flags&net.FlagLoopback == 0 {
			names = append(names, i.Name)
		}
	}
	if len(names) == 0 {
		return refused("only the loopback")
	}
	return worked("%q", names)
}

// loopback says something to itself.
func loopback(network, addr string) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, _ *Targets) (Seen, string) {
		return outcome(talk(ctx, network, addr), "listened, connected, talked")
	}
}

func talk(ctx context.Context, network, addr string) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, network, addr)
	if err != nil {
		return err
	}
	defer l.Close()
	d := net.Dialer{Timeout: 2 * time.Second}
	c, err := d.DialContext(ctx, network, l.Addr().String())
	if err != nil {
		return err
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		return err
	}
	defer s.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	if err := s.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return err
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(s, b); err != nil {
		return err
	}
	if string(b) != "hello" {
		return fmt.Errorf("sent hello, got %q", b)
	}
	return nil
}

func ownSocket(ctx context.Context, t *Targets) (Seen, string) {
	dir, err := os.MkdirTemp(t.Tmp, "agentconnect-selftest-")
	if err != nil {
		return Refused, err.Error()
	}
	defer os.RemoveAll(dir)
	return outcome(talk(ctx, "unix", filepath.Join(dir, "s")), "listened, connected, talked")
}

// Processes.

func seeHostProcess(_ context.Context, t *Targets) (Seen, string) {
	if t.HostPID == 0 {
		return skipped("no target")
	}
	cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", t.HostPID))
	return outcome(err, "its working directory is "+cwd)
}

func signalHostProcess(_ context.Context, t *Targets) (Seen, string) {
	if t.HostPID <= 1 {
		return skipped("no target")
	}
	return outcome(unix.Kill(t.HostPID, 0), "signal 0 arrived")
}

// tracePid1 is worked only where pid 1 may do more than this process: a tracer gets
// what its tracee has.
func tracePid1(context.Context, *Targets) (Seen, string) {
	errs := make(chan error, 1)
	go func() {
		// A tracer is a thread; this one is not given back, so the kernel detaches at its end.
		runtime.LockOSThread()
		errs <- unix.PtraceSeize(1)
	}()
	if err := <-errs; err != nil {
		return Refused, err.Error()
	}
	mine, err := status("self")
	if err != nil {
		return Refused, err.Error()
	}
	its, err := status("1")
	if err != nil {
		return Refused, err.Error()
	}
	for _, k := range []string{"Uid", "CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp"} {
		if mine[k] != its[k] {
			return worked("traced pid 1, whose %s is %s (here %s)", k, its[k], mine[k])
		}
	}
	if its["Seccomp"] == "0" {
		return worked("traced pid 1; there is no filter at all")
	}
	return refused("pid 1 can be traced, and may do no more than this process")
}

// status reads the fields of /proc/PID/status.
func status(pid string) (map[string]string, error) {
	b, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		return nil, err
	}
	fields := map[string]string{}
	for _, line := range strings.Split(string(b), "\n") {
		k, v, _ := strings.Cut(line, ":")
		fields[k] = strings.Join(strings.Fields(v), " ")
	}
	return fields, nil
}

// leaks finds what should not be there in a NUL-separated block: secrets, and for an
// environment the names that nobody gave.
func (t *Targets) leaks(block []byte) []string {
	found := t.secretsIn(block)
	for _, kv := range strings.Split(string(block), "\x00") {
		name, _, ok := strings.Cut(kv, "=")
		if ok && telltale(name) && !slices.Contains(t.EnvGiven, name) {
			found = append(found, name)
		}
	}
	return found
}

// secretsIn names the secrets in block by number: they stay out of the report.
func (t *Targets) secretsIn(block []byte) []string {
	var found []string
	for i, s := range t.Secrets {
		if s != "" && bytes.Contains(block, []byte(s)) {
			found = append(found, fmt.Sprintf("secret %d", i))
		}
	}
	return found
}

// telltale are variables that lead to the host's agents, sockets and credentials.
func telltale(name string) bool {
	switch name {
	case "AGENTCONNECT_MEMORY_DIR": // ours, for the agent
		return false
	case "SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CONNECTION", "GPG_AGENT_INFO", "GNOME_KEYRING_CONTROL",
		"DBUS_SESSION_BUS_ADDRESS", "DBUS_STARTER_ADDRESS", "DOCKER_HOST", "DOCKER_CONFIG", "CONTAINER_HOST", "KUBECONFIG",
		"DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "ICEAUTHORITY", "SESSION_MANAGER", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID",
		"JOURNAL_STREAM", "CREDENTIALS_DIRECTORY", "VAULT_TOKEN", "NPM_TOKEN", "GITHUB_TOKEN", "GH_TOKEN", "GITLAB_TOKEN",
		"GOOGLE_APPLICATION_CREDENTIALS", "SUDO_COMMAND", "TMUX", "STY":
		return true
	}
	for _, prefix := range []string{"AWS_", "AZURE_", "AGENTCONNECT_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

func secretsOf(path string) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		b, err := os.ReadFile(path)
		if err != nil {
			return Refused, err.Error()
		}
		if found := t.leaks(b); len(found) > 0 {
			return worked("%s shows %q", path, found)
		}
		return refused("%d bytes, nothing in them", len(b))
	}
}

func secretsOfAll(_ context.Context, t *Targets) (Seen, string) {
	if len(t.Secrets) == 0 {
		return skipped("no target")
	}
	read := 0
	for _, pattern := range []string{"/proc/[0-9]*/environ", "/proc/[0-9]*/cmdline", "/proc/[0-9]*/task/*/comm"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return Refused, err.Error()
		}
		for _, p := range paths {
			b, err := os.ReadFile(p)
			if err != nil {
				continue // not ours to read, or gone
			}
			read++
			if found := t.secretsIn(b); len(found) > 0 {
				return worked("%s shows %q", p, found)
			}
		}
	}
	return refused("%d files, nothing in them", read)
}

func inherited(context.Context, *Targets) (Seen, string) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return Refused, err.Error()
	}
	var found []string
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= 2 {
			continue
		}
		// What came in by exec has no close-on-exec flag; everything this program opened has.
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC != 0 {
			continue
		}
		target, _ := os.Readlink("/proc/self/fd/" + e.Name())
		found = append(found, e.Name()+" "+target)
	}
	if len(found) == 0 {
		return refused("only 0, 1 and 2")
	}
	return worked("%q", found)
}

func pid1Descriptors(context.Context, *Targets) (Seen, string) {
	entries, err := os.ReadDir("/proc/1/fd")
	if err != nil {
		return Refused, err.Error()
	}
	var found []string
	for _, e := range entries {
		target, err := os.Readlink("/proc/1/fd/" + e.Name())
		own := e.Name() == "0" || e.Name() == "1" || e.Name() == "2"
		if err != nil || own || strings.HasPrefix(target, "anon_inode:") {
			continue // bwrap's own event and signal descriptors lead nowhere
		}
		found = append(found, e.Name()+" "+target)
	}
	if len(found) == 0 {
		return refused("%d descriptors, none leads out", len(entries))
	}
	return worked("%q", found)
}

func environment(_ context.Context, t *Targets) (Seen, string) {
	if found := t.leaks([]byte(strings.Join(os.Environ(), "\x00"))); len(found) > 0 {
		return worked("%q", found)
	}
	return refused("%d variables, none of them", len(os.Environ()))
}

// The kernel.

func capabilities(context.Context, *Targets) (Seen, string) {
	held, err := heldCapabilities()
	if err != nil {
		return Refused, err.Error()
	}
	if len(held) == 0 {
		return refused("all sets are empty")
	}
	// An ordinary user outside has a full bounding set and nothing in the others.
	return worked("%q", held)
}

// heldCapabilities returns the sets that are not empty.
func heldCapabilities() ([]string, error) {
	s, err := status("self")
	if err != nil {
		return nil, err
	}
	var held []string
	for _, k := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		if strings.Trim(s[k], "0") != "" {
			held = append(held, k+" "+s[k])
		}
	}
	return held, nil
}

func newPrivileges(context.Context, *Targets) (Seen, string) {
	on, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	if err != nil {
		return Refused, err.Error()
	}
	if on == 1 {
		return refused("no_new_privs is set")
	}
	return worked("no_new_privs is not set")
}

func mounts(_ context.Context, t *Targets) (Seen, string) {
	dir, err := os.MkdirTemp(t.Tmp, "agentconnect-selftest-")
	if err != nil {
		return Refused, err.Error()
	}
	defer os.Remove(dir)
	err = unix.Mount("selftest", dir, "tmpfs", 0, "size=4k")
	if err == nil {
		err = unix.Unmount(dir, unix.MNT_DETACH)
	}
	return outcome(err, "mounted a tmpfs")
}

func remounts(context.Context, *Targets) (Seen, string) {
	return outcome(unix.Mount("", "/usr", "", unix.MS_REMOUNT|unix.MS_BIND, ""), "/usr is writable")
}

func unmounts(_ context.Context, t *Targets) (Seen, string) {
	var last error
	for _, p := range append([]string{"/proc", "/tmp", "/run", t.Home}, t.Covers...) {
		if last = unix.Unmount(p, unix.MNT_DETACH); last == nil {
			return worked("%s is off", p)
		}
	}
	return Refused, last.Error()
}

func userNamespace(ctx context.Context, t *Targets) (Seen, string) {
	if t.Nesting {
		return skipped("nesting is on")
	}
	return newNamespace(syscall.CLONE_NEWUSER)(ctx, t)
}

func newNamespace(flags uintptr) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, _ *Targets) (Seen, string) {
		cmd := exec.CommandContext(ctx, "/bin/true")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
		return outcome(cmd.Run(), "a process in it")
	}
}

func changesRoot(ctx context.Context, _ *Targets) (Seen, string) {
	cmd := exec.CommandContext(ctx, "/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: "/"}
	return outcome(cmd.Run(), "a process in it")
}

func makesDevice(_ context.Context, t *Targets) (Seen, string) {
	dir, err := os.MkdirTemp(t.Tmp, "agentconnect-selftest-")
	if err != nil {
		return Refused, err.Error()
	}
	defer os.RemoveAll(dir)
	return outcome(unix.Mknod(filepath.Join(dir, "d"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 1))), "made a node for /dev/mem")
}

func devices(context.Context, *Targets) (Seen, string) {
	entries, err := os.ReadDir("/dev")
	if err != nil {
		return Refused, err.Error()
	}
	var found []string
	for _, e := range entries {
		switch e.Name() {
		case "null", "zero", "full", "random", "urandom", "tty", "console", "ptmx":
			continue
		}
		if e.Type()&os.ModeDevice != 0 {
			found = append(found, e.Name())
		}
	}
	if len(found) == 0 {
		return refused("only the least")
	}
	return worked("%d: %q", len(found), found[:min(len(found), 8)])
}

// tries runs a step in a process of its own: it may be killed for it, or has to
// change what cannot be changed back.
func tries(step string) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, t *Targets) (Seen, string) {
		if step == "unshare-high" && t.Nesting {
			return skipped("nesting is on")
		}
		args := []string{"try", step}
		if step == "setns" && t.HostPID != 0 {
			args[1] = fmt.Sprintf("setns:%d", t.HostPID)
		}
		out, err := run(ctx, "/", "/proc/self/exe", args...)
		if err != nil {
			return refused("the process was ended: %v", err)
		}
		if out = strings.TrimSpace(out); out == string(Worked) {
			return worked("it went through")
		}
		return refused("%s", out)
	}
}

// Try is what a process of its own does for an attack (agentconnect-guest try STEP):
// the step, and then "worked" or the error.
func Try(step string) string {
	var err error
	name, pid, _ := strings.Cut(step, ":")
	switch {
	case name == "setns":
		err = trySetns(pid)
	case name == "mount":
		err = unix.Mount("x", "/tmp", "tmpfs", 0, "size=4k")
	case name == "kept":
		err = tryKept(pid)
	case name == "kept-away":
		err = tryKeptAway(pid)
	case name == "tiocsti":
		err = tryType(unix.TIOCSTI)
	case name == "tiocsti-high":
		err = tryType(unix.TIOCSTI | 1<<32)
	case name == "tioclinux":
		if err = tryType(unix.TIOCLINUX); errors.Is(err, unix.ENOTTY) {
			err = nil // a console alone carries it out: this terminal was asked
		}
	case name == "tiocsetd":
		err = tryType(unix.TIOCSETD)
	case name == "tiocsetd-high":
		err = tryType(unix.TIOCSETD | 1<<32)
	case name == "unshare-high":
		err = tryUnshare()
	case foreign[name] != nil:
		err = foreign[name]()
	default:
		err = fmt.Errorf("no step %q", step)
	}
	if err != nil {
		return err.Error()
	}
	return string(Worked)
}

func trySetns(pid string) error {
	runtime.LockOSThread()
	// setns refuses threads that share their working directory, before it looks at rights.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	err := error(unix.ENOENT)
	for _, p := range []string{"1", pid} {
		for _, ns := range []string{"user", "mnt", "net", "pid", "uts", "ipc", "cgroup"} {
			if p == "" {
				continue
			}
			fd, e := unix.Open("/proc/"+p+"/ns/"+ns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if e != nil {
				err = e
				continue
			}
			e = unix.Setns(fd, 0)
			unix.Close(fd)
			if e == nil {
				return nil
			}
			err = fmt.Errorf("%s of %s: %w", ns, p, e)
		}
	}
	return err
}

// tryType sends a terminal command that puts input there, to a terminal of this
// process's own: never to the one a person sits at.
func tryType(cmd uintptr) error {
	master, slave, err := OpenTerminal(0, 0)
	if err != nil {
		return err
	}
	// Both ends stay open to the end of the process: closing would hang it up.
	if _, err := unix.Setsid(); err != nil && !errors.Is(err, unix.EPERM) {
		return err
	}
	if err := unix.IoctlSetInt(int(slave.Fd()), unix.TIOCSCTTY, 0); err != nil {
		return fmt.Errorf("take the terminal: %w", err)
	}
	arg := []byte{'x', 0, 0, 0, 0, 0, 0, 0}
	if cmd&^(1<<32) == unix.TIOCSETD {
		arg[0] = 0 // N_TTY, the one that it has
	}
	if cmd == unix.TIOCLINUX {
		arg[0] = 6 // asks for the shift state; a console alone answers
	}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, slave.Fd(), cmd, uintptr(unsafe.Pointer(&arg[0])))
	runtime.KeepAlive(master)
	if e != 0 {
		return e
	}
	return nil
}

// foreignTerminal: a terminal on 0, 1 or 2, or the controlling one, that no devpts here made.
func foreignTerminal(context.Context, *Targets) (Seen, string) {
	var found []string
	for fd := range 3 {
		if _, err := unix.IoctlGetTermios(fd, unix.TCGETS); err != nil {
			continue
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err == nil && !ownDevpts(st.Rdev, st.Dev) {
			found = append(found, fmt.Sprintf("descriptor %d", fd))
		}
	}
	if b, err := os.ReadFile("/proc/self/stat"); err == nil {
		// The fields after the name in parentheses: state ppid pgrp session tty_nr.
		rest := string(b[bytes.LastIndexByte(b, ')')+1:])
		if f := strings.Fields(rest); len(f) > 4 && f[4] != "0" {
			n, err := strconv.ParseUint(f[4], 10, 64)
			if err == nil && !ownDevpts(n, 0) {
				found = append(found, "the controlling terminal")
			}
		}
	}
	if len(found) == 0 {
		return refused("none")
	}
	return worked("%q", found)
}

// ownDevpts tells whether the devpts mounted here has the terminal with this device
// number; dev 0: whatever its file system says.
func ownDevpts(rdev, dev uint64) bool {
	paths, _ := filepath.Glob("/dev/pts/[0-9]*")
	for _, p := range paths {
		var st unix.Stat_t
		if err := unix.Stat(p, &st); err == nil && st.Rdev == rdev && (dev == 0 || st.Dev == dev) {
			return true
		}
	}
	return false
}

func ioURing(context.Context, *Targets) (Seen, string) {
	var params [120]byte // struct io_uring_params
	fd, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 2, uintptr(unsafe.Pointer(&params[0])), 0)
	if e != 0 {
		return Refused, e.Error()
	}
	unix.Close(int(fd))
	return worked("a ring")
}

func keyrings(context.Context, *Targets) (Seen, string) {
	_, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_USER_KEYRING, false)
	return outcome(err, "the user keyring")
}

func bpfMap(context.Context, *Targets) (Seen, string) {
	attr := [32]uint32{2 /* array */, 4, 4, 1}
	fd, _, e := unix.Syscall(unix.SYS_BPF, unix.BPF_MAP_CREATE, uintptr(unsafe.Pointer(&attr[0])), unsafe.Sizeof(attr))
	if e != 0 {
		return Refused, e.Error()
	}
	unix.Close(int(fd))
	return worked("a map")
}

func perf(context.Context, *Targets) (Seen, string) {
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{})), Config: unix.PERF_COUNT_SW_CPU_CLOCK}
	fd, err := unix.PerfEventOpen(&attr, 0, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err == nil {
		unix.Close(fd)
	}
	return outcome(err, "a counter")
}

func userfaultfd(context.Context, *Targets) (Seen, string) {
	fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if e != 0 {
		return Refused, e.Error()
	}
	unix.Close(int(fd))
	return worked("a descriptor")
}

func byHandle(context.Context, *Targets) (Seen, string) {
	h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, "/usr", 0)
	if err != nil {
		return Refused, err.Error()
	}
	dir, err := unix.Open("/usr", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Refused, err.Error()
	}
	defer unix.Close(dir)
	fd, err := unix.OpenByHandleAt(dir, h, unix.O_RDONLY|unix.O_CLOEXEC)
	if err == nil {
		unix.Close(fd)
	}
	return outcome(err, "opened a file by number")
}

func kernelLog(context.Context, *Targets) (Seen, string) {
	if _, err := unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, make([]byte, 4096)); err == nil {
		return worked("syslog(2) gave it")
	}
	f, err := os.Open("/dev/kmsg")
	if err == nil {
		f.Close()
	}
	return outcome(err, "/dev/kmsg is open")
}

func setClock(context.Context, *Targets) (Seen, string) {
	// The clock's own reading a moment ago would be a step back; adjusting by nothing is no step.
	var tx unix.Timex
	tx.Modes = 0x8000 | 0x0001 // ADJ_OFFSET_SINGLESHOT: slew by Offset, 0
	_, err := unix.Adjtimex(&tx)
	return outcome(err, "adjusted it by nothing")
}

// What has to work.

func runsIn(dir func(*Targets) string) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, t *Targets) (Seen, string) {
		d, err := os.MkdirTemp(dir(t), ".agentconnect-selftest-")
		if err != nil {
			return Refused, err.Error()
		}
		defer os.RemoveAll(d)
		script := filepath.Join(d, "run")
		if err := os.WriteFile(script, []byte("#!/bin/sh\necho ran\n"), 0o700); err != nil {
			return Refused, err.Error()
		}
		_, err = run(ctx, d, script)
		return outcome(err, "ran "+script)
	}
}

func readUsr(context.Context, *Targets) (Seen, string) {
	entries, err := os.ReadDir("/usr/bin")
	if err == nil && len(entries) == 0 {
		err = errors.New("/usr/bin is empty")
	}
	return outcome(err, fmt.Sprintf("%d programs", len(entries)))
}

func shell(ctx context.Context, _ *Targets) (Seen, string) {
	out, err := run(ctx, "/", "/bin/sh", "-c", "(echo one; echo two) | wc -l & wait")
	if err == nil && strings.TrimSpace(out) != "2" {
		err = fmt.Errorf("printed %q", out)
	}
	return outcome(err, "sh, a pipe, a background process")
}

func git(ctx context.Context, t *Targets) (Seen, string) {
	if _, err := exec.LookPath("git"); err != nil {
		return skipped("git is not installed")
	}
	dir, err := os.MkdirTemp(t.Tmp, "agentconnect-selftest-")
	if err != nil {
		return Refused, err.Error()
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("text\n"), 0o600); err != nil {
		return Refused, err.Error()
	}
	for _, args := range [][]string{{"init", "-q"}, {"add", "-A"}, {"-c", "user.name=selftest", "-c", "user.email=selftest@localhost", "-c", "commit.gpgsign=false", "commit", "-q", "-m", "selftest"}} {
		if _, err := run(ctx, dir, "git", args...); err != nil {
			return refused("git %s: %v", args[0], err)
		}
	}
	return worked("a commit")
}

func ownTerminal(context.Context, *Targets) (Seen, string) {
	master, slave, err := OpenTerminal(24, 80)
	if err != nil {
		return Refused, err.Error()
	}
	return outcome(errors.Join(slave.Close(), master.Close()), "opened and closed")
}

func ownUID(_ context.Context, t *Targets) (Seen, string) {
	uid := os.Getuid()
	if uid == 0 || (t.UID != 0 && uid != t.UID) || uid != os.Geteuid() {
		return refused("uid %d, effective %d, wanted %d", uid, os.Geteuid(), t.UID)
	}
	return worked("uid %d", uid)
}

func passwdHome(context.Context, *Targets) (Seen, string) {
	u, err := user.LookupId(strconv.Itoa(os.Getuid()))
	if err != nil {
		return Refused, err.Error()
	}
	if home := os.Getenv("HOME"); u.HomeDir != home {
		return refused("passwd says %s, HOME is %s", u.HomeDir, home)
	}
	return worked("%s at %s", u.Username, u.HomeDir)
}

func freshProc(context.Context, *Targets) (Seen, string) {
	s, err := status("self")
	if err != nil {
		return Refused, err.Error()
	}
	if s["Pid"] != strconv.Itoa(os.Getpid()) {
		return refused("/proc is of another pid namespace: it says %s, getpid says %d", s["Pid"], os.Getpid())
	}
	return worked("pid %d", os.Getpid())
}

// hostRoot: uid 0 in a user namespace that maps every id, which is the host's own.
func hostRoot() bool {
	if os.Geteuid() != 0 {
		return false
	}
	b, err := os.ReadFile("/proc/self/uid_map")
	return err != nil || strings.Join(strings.Fields(string(b)), " ") == "0 0 4294967295"
}
