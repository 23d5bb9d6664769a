package main

import (
	"errors"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/netns"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/mounttree"
)

// treeAt is where the view is built: bubblewrap uses the same directory for its own
// work, so it exists wherever bubblewrap starts. The new mount namespace is ours alone.
const treeAt = "/tmp"

// Capabilities and prctl are per thread, and exec keeps those of the calling one: all
// of the work stays on the thread that the kernel started us with.
func init() { runtime.LockOSThread() }

func launch() *wire.LaunchError {
	debug.SetGCPercent(-1) // we live for milliseconds
	word := ""
	if len(os.Args) > 1 {
		word = os.Args[1]
	}
	if word == wire.AheadArg {
		if err := await(wire.PlanThere); err != nil {
			return &wire.LaunchError{Step: "wait for the plan", Err: err.Error()}
		}
	}
	spec, err := readLaunch()
	if err != nil {
		return &wire.LaunchError{Step: "read the plan", Err: err.Error()}
	}
	if spec.Join && word != joinedArg {
		return join(spec)
	}
	// Whatever whoever started us left open ends here: the runtime gets 0, 1 and 2.
	if err := unix.CloseRange(wire.LaunchFD, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return &wire.LaunchError{Step: "close descriptors", Err: err.Error()}
	}
	for fd, pass := range map[uintptr]bool{wire.ExtraFD: spec.PassFD, wire.EnvFD: spec.PassEnv} {
		if !pass {
			continue
		}
		if _, err := unix.FcntlInt(fd, unix.F_SETFD, 0); err != nil {
			return &wire.LaunchError{Step: "pass a descriptor", Err: err.Error()}
		}
	}
	if spec.Dial {
		return dial()
	}
	argv, path := spec.Argv, spec.Argv[0]
	passed := &netns.Passed{}
	if spec.Plan != nil {
		path = spec.Bwrap
		if argv, passed, err = prepare(spec); err != nil {
			var se *mounttree.StepError
			if errors.As(err, &se) {
				return &wire.LaunchError{Step: se.Step, Path: se.Path, Err: se.Err.Error(), Retry: se.Changed}
			}
			return &wire.LaunchError{Step: "set up the boundary", Err: err.Error()}
		}
	} else if err := os.Chdir(spec.Dir); err != nil {
		return &wire.LaunchError{Step: "enter the working directory", Path: spec.Dir, Err: err.Error()}
	}
	if lerr := passGate(passed); lerr != nil {
		return lerr
	}
	if spec.Plan != nil && spec.Plan.OwnCgroup {
		// Only now: while the view was built we were being put there. bubblewrap's own namespace of
		// control groups begins where we are then.
		if err := mounttree.OwnCgroup(treeAt, spec.Plan.Nesting); err != nil {
			return &wire.LaunchError{Step: "show the control group", Path: sandbox.CgroupPath, Err: err.Error()}
		}
	}
	if spec.Plan != nil {
		if err := dropPrivileges(); err != nil {
			return &wire.LaunchError{Step: "drop privileges", Err: err.Error()}
		}
		if err := keepProfile("/proc/thread-self/attr"); err != nil {
			return &wire.LaunchError{Step: "keep the AppArmor profile", Err: err.Error()}
		}
	}
	err = syscall.Exec(path, argv, spec.Env)
	return &wire.LaunchError{Step: "execute", Path: path, Err: err.Error()}
}

func readLaunch() (*wire.Launch, error) {
	var st unix.Stat_t
	if err := unix.Fstat(wire.LaunchFD, &st); err != nil {
		return nil, err
	}
	b := make([]byte, st.Size) // of a sealed memfd: not read piece by piece into ever larger memory
	n, err := unix.Pread(wire.LaunchFD, b, 0)
	if err != nil {
		return nil, err
	}
	spec, err := wire.DecodeLaunch(b[:n])
	if err != nil {
		return nil, err
	}
	switch {
	case len(spec.Argv) == 0 && !spec.Dial:
		return nil, errors.New("no program to start")
	case spec.Plan != nil && (len(spec.Seccomp) == 0 || spec.Bwrap == ""):
		return nil, errors.New("a plan without bubblewrap or without a seccomp filter")
	}
	return spec, nil
}

// prepare sets the network and the view up and gives bubblewrap's command line, and what
// goes to the supervisor.
func prepare(spec *wire.Launch) ([]string, *netns.Passed, error) {
	passed := &netns.Passed{}
	if spec.Plan.Network != sandbox.NetworkHost && !spec.Join {
		var err error
		if passed, err = network(spec); err != nil {
			return nil, nil, err
		}
	}
	if !spec.Join {
		leaveHalf(spec.Plan.Nesting)
	}
	argv, err := view(spec)
	return argv, passed, err
}

// network sets the new network namespace up.
func network(spec *wire.Launch) (*netns.Passed, error) {
	if err := loopbackUp(); err != nil {
		return nil, &mounttree.StepError{Step: "bring up", Path: "lo", Err: err}
	}
	passed := &netns.Passed{}
	if spec.Plan.Network.Gated() {
		var err error
		if passed, err = netns.Setup(spec.Ports); err != nil {
			return nil, &mounttree.StepError{Step: "set up", Path: "network", Err: err}
		}
	}
	// By these others can be let in later.
	for _, n := range []struct {
		kind rune
		path string
	}{{netns.UserNamespace, "/proc/self/ns/user"}, {netns.NetNamespace, "/proc/self/ns/net"}} {
		fd, err := unix.Open(n.path, unix.O_RDONLY|unix.O_CLOEXEC, 0) //nolint:forbidigo // our own namespace: its magic link is to be followed
		if err != nil {
			return nil, &mounttree.StepError{Step: "open", Path: n.path, Err: err}
		}
		passed.FDs, passed.Kinds = append(passed.FDs, fd), passed.Kinds+string(n.kind)
	}
	return passed, nil
}

// view builds the mounts and gives bubblewrap's command line.
func view(spec *wire.Launch) ([]string, error) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, &mounttree.StepError{Step: "private propagation", Path: "/", Err: err}
	}
	if spec.Plan.DieWithParent {
		// We are the first process of a pid namespace, and bubblewrap looks its child up by the
		// number that it has there. The sandbox has a /proc of its own.
		if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
			return nil, &mounttree.StepError{Step: "mount", Path: "/proc", Err: err}
		}
	}
	if err := mounttree.Build(spec.Plan, treeAt); err != nil {
		return nil, err
	}
	if spec.Plan.Network == sandbox.NetworkHost {
		if err := scopeAbstractSockets(); err != nil {
			return nil, &mounttree.StepError{Step: "landlock", Path: "abstract sockets", Err: err}
		}
	}
	// bubblewrap takes these two over: it reads and closes them before it starts anything.
	filter, err := memfd("seccomp", spec.Seccomp)
	if err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(wire.InfoFD, unix.F_SETFD, 0); err != nil {
		return nil, err
	}
	options := spec.Plan.BwrapArgs(treeAt, spec.Dir, filter, wire.InfoFD)
	args, err := memfd("args", []byte(strings.Join(options, "\x00")+"\x00"))
	if err != nil {
		return nil, err
	}
	// Behind "--" nothing is an option, whatever the command is called (CVE-2024-32462).
	return append([]string{"bwrap", "--args", strconv.Itoa(args), "--"}, spec.Argv...), nil
}

// passGate says that all is prepared, hands the sockets over, and waits for the word to go on.
func passGate(passed *netns.Passed) *wire.LaunchError {
	var rights []byte
	if len(passed.FDs) > 0 {
		rights = unix.UnixRights(passed.FDs...)
	}
	if err := unix.Sendmsg(wire.GateFD, wire.Ready(passed.Kinds, passed.Weaker), rights, nil, 0); err != nil {
		return &wire.LaunchError{Step: "start gate", Err: err.Error()}
	}
	for _, fd := range passed.FDs {
		unix.Close(fd)
	}
	if await(wire.GateOpen) != nil {
		return &wire.LaunchError{Step: "start gate", Err: "the supervisor did not open it"}
	}
	return nil
}

// await reads the supervisor's next word, which is to be this one.
func await(want byte) error {
	var word [1]byte
	for {
		n, err := unix.Read(wire.GateFD, word[:])
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return err
		case n != 1:
			return errors.New("the supervisor is gone")
		case word[0] != want:
			return errors.New("another word than was expected")
		}
		return nil
	}
}

// loopbackUp sets the flags of lo in the new network namespace; 127.0.0.1 and ::1 come
// with it.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// scopeAbstractSockets keeps the agent off the host's abstract Unix sockets, which a
// shared network namespace would open to it, where the kernel can (Landlock ABI 6, Linux
// 6.12). A ruleset without file rules does not hinder the mounts bubblewrap makes.
// Where the kernel cannot, the supervisor's status says so.
func scopeAbstractSockets() error {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 || abi < 6 {
		return nil
	}
	attr := unix.LandlockRulesetAttr{Scoped: unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL}
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return errno
	}
	defer unix.Close(int(fd))
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// leaveHalf gives what runs here half of what is counted for its user, and no more: inotify
// instances and watches, of which each running agent takes one for its git seals, and where it can
// make them namespaces, which every start needs. Where /proc/sys cannot be written (in a container)
// it can take them all.
func leaveHalf(nesting bool) {
	for _, of := range [2][2]string{
		{"/proc/sys/fs/inotify/max_user_instances", "inotify_instances"},
		{"/proc/sys/fs/inotify/max_user_watches", "inotify_watches"},
	} {
		if n, err := strconv.Atoi(readSmall(of[0])); err == nil && n > 1 {
			writeSmall("/proc/sys/user/max_"+of[1], strconv.Itoa(n/2))
		}
	}
	if !nesting {
		return
	}
	// What the user has of each is not shown here: half as many as there can be threads, where nobody
	// set another number.
	threads, err := strconv.Atoi(readSmall("/proc/sys/kernel/threads-max"))
	if err != nil || threads < 4 {
		return
	}
	for _, kind := range [...]string{"user", "mnt", "net", "pid", "ipc", "uts", "cgroup", "time"} {
		writeSmall("/proc/sys/user/max_"+kind+"_namespaces", strconv.Itoa(threads/4))
	}
}

// readSmall reads a line of /proc; "" if it cannot.
func readSmall(path string) string {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) //nolint:forbidigo // the host's /proc: no agent has a part in it
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	var b [32]byte
	n, _ := unix.Read(fd, b[:]) // none on an error
	return strings.TrimSpace(string(b[:max(n, 0)]))
}

// writeSmall writes a file of /proc, if it can.
func writeSmall(path, text string) {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0) //nolint:forbidigo // as above
	if err != nil {
		return
	}
	defer unix.Close(fd)
	_, _ = unix.Write(fd, []byte(text))
}

// dropPrivileges empties the ambient set: an exec then leaves no capability, and
// bubblewrap refuses to start with any it did not expect.
func dropPrivileges() error {
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return err
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	return unix.Capset(&hdr, &none[0])
}

// memfd makes a descriptor that stays open over exec and reads data from the start.
func memfd(name string, data []byte) (int, error) {
	fd, err := unix.MemfdCreate("agentconnect-"+name, 0)
	if err != nil {
		return -1, err
	}
	if n, err := unix.Write(fd, data); err != nil || n != len(data) {
		return -1, errors.Join(errors.New("a memfd was not written whole"), err)
	}
	_, err = unix.Seek(fd, 0, io.SeekStart)
	return fd, err
}
