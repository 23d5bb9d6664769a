// Attacks on other processes and on what they share: another process's memory, its limits,
// its objects; the machine's names and namespaces.

package selftest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

func processAttacks() []Attack {
	ofPID := func(do func(pid int) error) func(context.Context, *Targets) (Seen, string) {
		return func(_ context.Context, t *Targets) (Seen, string) {
			if t.HostPID <= 1 {
				return skipped("no target")
			}
			return outcome(do(t.HostPID), "done to the host's process")
		}
	}
	reads := func(entry string) func(context.Context, *Targets) (Seen, string) {
		return ofPID(func(pid int) error {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, entry))
			if err == nil && len(b) == 0 {
				err = errors.New("empty")
			}
			return err
		})
	}
	return []Attack{
		{"host-environ", "CASES 49", "read a host process's environment", "tokens", MustFail, true, hostEnviron},
		{"host-cmdline", "CASES 49", "read a host process's arguments", "tokens on a command line", MustFail, true, reads("cmdline")},
		{"host-maps", "DESIGN 4", "read a host process's memory map", "where its secrets lie", MustFail, true, reads("maps")},
		{"host-status", "DESIGN 4", "read a host process's status", "which programs run", MustFail, true, reads("status")},
		{"host-mem", "DESIGN 4", "open a host process's memory", "its secrets", MustFail, true, ofPID(func(pid int) error { return openPath(fmt.Sprintf("/proc/%d/mem", pid)) })},
		{"host-pidfd", "DESIGN 4", "hold a host process by pidfd", "its descriptors", MustFail, true, ofPID(func(pid int) error {
			fd, err := unix.PidfdOpen(pid, 0)
			if err == nil {
				unix.Close(fd)
			}
			return err
		})},
		{"host-limits", "DESIGN 4", "read a host process's limits", "then set them", MustFail, true, ofPID(func(pid int) error {
			var old unix.Rlimit
			return unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &old)
		})},
		{"host-priority", "DESIGN 4", "lower a host process's priority to what it is", "slow the daemon", MustFail, true, ofPID(func(pid int) error {
			if _, err := unix.Getpriority(unix.PRIO_PROCESS, pid); err != nil {
				return err
			}
			return unix.Setpriority(unix.PRIO_PROCESS, pid, 0)
		})},
		{"host-affinity", "DESIGN 4", "set a host process's processors to what they are", "slow the daemon", MustFail, true, ofPID(func(pid int) error {
			var set unix.CPUSet
			if err := unix.SchedGetaffinity(pid, &set); err != nil {
				return err
			}
			return unix.SchedSetaffinity(pid, &set)
		})},
		{"host-session", "DESIGN 4", "ask for a host process's session", "whose terminal it has", MustFail, true, ofPID(func(pid int) error { _, err := unix.Getsid(pid); return err })},
		{"host-signal-thread", "DESIGN 4", "signal a host process's thread (signal 0)", "stop the daemon", MustFail, true, ofPID(func(pid int) error { return unix.Tgkill(pid, pid, 0) })},
		{"host-oom", "DESIGN 4", "open a host process's oom_score_adj for writing", "have the kernel end it", MustFail, true, ofPID(func(pid int) error {
			f, err := os.OpenFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), os.O_WRONLY, 0)
			if err == nil {
				f.Close()
			}
			return err
		})},
		{"host-namespaces", "CASES 23", "hold a host process's namespaces", "join them", MustFail, true, ofPID(func(pid int) error {
			f, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
			if err == nil {
				f.Close()
			}
			return err
		})},
		{"many-processes", "DESIGN 4", "count the machine's processes", "who is here", MustFail, true, manyProcesses},

		{"sysv-memory", "DESIGN 4", "attach System V memory of the host", "databases", MustFail, true, sysv(unix.SYS_SHMGET, 1)},
		{"sysv-semaphore", "DESIGN 4", "hold System V semaphores of the host", "stop who waits for them", MustFail, true, sysv(unix.SYS_SEMGET, 1)},
		{"sysv-queue", "DESIGN 4", "open a System V message queue of the host", "other programs' messages", MustFail, true, sysv(unix.SYS_MSGGET, 0)},
		{"socket-names", "CASES 51b", "read the host's socket names", "what can be connected to", MustFail, true, namesIn("/proc/net/unix", func(t *Targets) string { return t.AbstractSocket })},
		{"port-names", "CASES 31", "read the host's open ports", "what can be connected to", MustFail, true, namesIn("/proc/net/tcp", hostPort)},

		{"hostname", "DESIGN 4", "set the machine's name", "programs that trust it", MustFail, false, func(context.Context, *Targets) (Seen, string) {
			name, err := os.Hostname()
			if err == nil {
				err = unix.Sethostname([]byte(name))
			}
			return outcome(err, "set to what it is")
		}},
		{"pid-namespace", "DESIGN 4", "make a pid namespace", "a /proc of its own", MustFail, false, newNamespace(syscall.CLONE_NEWPID)},
		{"net-namespace", "DESIGN 4", "make a network namespace", "capabilities over it", MustFail, false, newNamespace(syscall.CLONE_NEWNET)},
		{"ipc-namespace", "DESIGN 4", "make an IPC namespace", "mount queues", MustFail, false, newNamespace(syscall.CLONE_NEWIPC)},
		{"uts-namespace", "DESIGN 4", "make a UTS namespace", "another host name", MustFail, false, newNamespace(syscall.CLONE_NEWUTS)},
		{"cgroup-namespace", "CASES 40", "make a cgroup namespace", "hide from the limits", MustFail, false, newNamespace(syscall.CLONE_NEWCGROUP)},
		{"root-namespace", "CASES 23", "become root of a namespace and mount there", "all capabilities", MustFail, true, inNamespace("mount", "a mount in it")},
		{"kept-descriptor", "CASES 23", "rename a sealed folder by a descriptor kept over a pivot_root", "hooks the host would run", MustFail, true, keptDescriptor},
		{"bind-over", "CVE-2026-25725", "bind a folder of its own over /etc", "settings that programs trust", MustFail, false, bindOver},
		{"overlay", "DESIGN 4", "mount an overlay", "a kernel surface with a record", MustFail, false, mountOf("overlay", "lowerdir=/usr:/etc")},
		{"fresh-proc-mount", "DESIGN 4", "mount a proc of its own", "what covers hide", MustFail, false, mountOf("proc", "")},
		{"new-mount-api", "CVE-2022-0185", "open a file system by fsopen(2)", "its option parser", MustFail, false, func(context.Context, *Targets) (Seen, string) {
			fd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
			if err == nil {
				unix.Close(fd)
			}
			return outcome(err, "a context")
		}},
		{"open-tree", "CVE-2021-41133", "hold a mount by open_tree(2)", "a view that outlives its namespace", MustFail, true, func(context.Context, *Targets) (Seen, string) {
			fd, err := unix.OpenTree(unix.AT_FDCWD, "/usr", unix.OPEN_TREE_CLOEXEC)
			if err == nil {
				unix.Close(fd)
			}
			return outcome(err, "a descriptor")
		}},
		{"clone-tree", "CVE-2021-41133", "copy a mount by open_tree(2)", "a mount that outlives the view", MustFail, false, func(context.Context, *Targets) (Seen, string) {
			fd, err := unix.OpenTree(unix.AT_FDCWD, "/tmp", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
			if err == nil {
				unix.Close(fd)
			}
			return outcome(err, "a mount")
		}},
		{"link-up", "DESIGN 4", "change a network interface", "a way out of its own", MustFail, false, newInterface},
		{"low-port", "DESIGN 4", "bind port 80", "a service that the host trusts", MustFail, false, bindLow},
	}
}

func hostEnviron(_ context.Context, t *Targets) (Seen, string) {
	if t.HostPID <= 1 || t.HostSecret == "" {
		return skipped("no target")
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", t.HostPID))
	if err == nil && !strings.Contains(string(b), t.HostSecret) {
		err = errors.New("another process has that number")
	}
	return outcome(err, "its environment")
}

func manyProcesses(context.Context, *Targets) (Seen, string) {
	all, err := filepath.Glob("/proc/[0-9]*")
	if err == nil && len(all) <= mostProcesses {
		err = fmt.Errorf("only %d, as belong here", len(all))
	}
	return outcome(err, fmt.Sprint(len(all)))
}

// sysv asks for a System V object that the host has made, and makes none.
func sysv(call, size uintptr) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		if t.IPCKey == 0 {
			return skipped("no target")
		}
		args := [3]uintptr{uintptr(t.IPCKey), size, 0}
		if call == unix.SYS_MSGGET {
			args[1] = 0
		}
		_, _, e := unix.Syscall(call, args[0], args[1], args[2])
		if e != 0 {
			return Refused, e.Error()
		}
		return worked("it is there")
	}
}

// PlantIPC makes System V objects as programs of the host do, under a key of its own. The
// caller removes them.
func PlantIPC() (key int, remove func() error, err error) {
	objects := []struct{ get, ctl, size uintptr }{{unix.SYS_SHMGET, unix.SYS_SHMCTL, 4096}, {unix.SYS_SEMGET, unix.SYS_SEMCTL, 1}, {unix.SYS_MSGGET, unix.SYS_MSGCTL, 0}}
	const ipcRemove = 0 // IPC_RMID
	key = 1 + rand.IntN(1<<31-1)
	var undo []func() error
	remove = func() error {
		var errs []error
		for _, u := range undo {
			errs = append(errs, u())
		}
		return errors.Join(errs...)
	}
	for _, o := range objects {
		const mode = 0o600 | 0o1000 | 0o2000 // IPC_CREAT, IPC_EXCL
		args := [3]uintptr{uintptr(key), o.size, mode}
		if o.get == unix.SYS_MSGGET {
			args[1] = mode
		}
		id, _, e := unix.Syscall(o.get, args[0], args[1], args[2])
		if e != 0 {
			return 0, remove, errors.Join(fmt.Errorf("object of System V: %w", e), remove())
		}
		undo = append(undo, func() error {
			// IPC_RMID; of semctl it is the third argument.
			rm := [3]uintptr{id, ipcRemove, 0}
			if o.get == unix.SYS_SEMGET {
				rm = [3]uintptr{id, 0, ipcRemove}
			}
			_, _, e := unix.Syscall(o.ctl, rm[0], rm[1], rm[2])
			return errno(e)
		})
	}
	return key, remove, nil
}

func namesIn(path string, name func(*Targets) string) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		n := name(t)
		switch {
		case n == "":
			return skipped("no target")
		case t.Network == "host":
			return skipped("network mode host shares them")
		}
		b, err := os.ReadFile(path)
		if err == nil && !strings.Contains(string(b), n) {
			err = errors.New("it is not among them")
		}
		return outcome(err, "it is listed")
	}
}

// hostPort is the host's listener as /proc/net/tcp writes it.
func hostPort(t *Targets) string {
	i := strings.LastIndexByte(t.HostTCP, ':')
	var n int
	if i < 0 {
		return ""
	}
	if _, err := fmt.Sscan(t.HostTCP[i+1:], &n); err != nil {
		return ""
	}
	return fmt.Sprintf(":%04X", n)
}

// inNamespace runs a step (see Try) as root of a user and mount namespace of its own, in a
// process that ends with it: what it changes is gone with it.
func inNamespace(step, done string) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, t *Targets) (Seen, string) {
		if t.Nesting {
			return skipped("nesting is on")
		}
		cmd := exec.CommandContext(ctx, "/proc/self/exe", "try", step)
		cmd.SysProcAttr = ownNamespace()
		out, err := cmd.CombinedOutput()
		if err == nil && strings.TrimSpace(string(out)) != string(Worked) {
			err = errors.New(firstLine(string(out)))
		}
		return outcome(err, done)
	}
}

func ownNamespace() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
}

// keptDescriptor is the way around a pin: a mount point cannot be renamed by who shares its
// mount namespace, so it is left behind, with a descriptor of the folder in hand.
func keptDescriptor(ctx context.Context, t *Targets) (Seen, string) {
	if len(t.Pinned) == 0 {
		return skipped("no target")
	}
	return inNamespace("kept:"+t.Pinned[0], "renamed "+t.Pinned[0]+" and back")(ctx, t)
}

// tryKept is what the process in the namespace does.
func tryKept(pinned string) error {
	return leaveWith(filepath.Dir(pinned), func(dir int) error {
		if err := unix.Renameat(dir, filepath.Base(pinned), dir, ".agentconnect-selftest-kept"); err != nil {
			return err
		}
		return unix.Renameat(dir, ".agentconnect-selftest-kept", dir, filepath.Base(pinned))
	})
}

func bindOver(_ context.Context, t *Targets) (Seen, string) {
	dir, err := os.MkdirTemp(t.Tmp, "agentconnect-selftest-")
	if err != nil {
		return Refused, err.Error()
	}
	defer os.Remove(dir)
	if err := unix.Mount(dir, "/etc", "", unix.MS_BIND, ""); err != nil {
		return Refused, err.Error()
	}
	return outcome(unix.Unmount("/etc", unix.MNT_DETACH), "and away again")
}

func mountOf(kind, data string) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		dir, err := os.MkdirTemp(t.Tmp, "agentconnect-selftest-")
		if err != nil {
			return Refused, err.Error()
		}
		defer os.Remove(dir)
		if err := unix.Mount("selftest", dir, kind, unix.MS_RDONLY, data); err != nil {
			return Refused, err.Error()
		}
		return outcome(unix.Unmount(dir, unix.MNT_DETACH), "and away again")
	}
}

// newInterface asks over netlink for a change that changes nothing.
func newInterface(context.Context, *Targets) (Seen, string) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return Refused, err.Error()
	}
	defer unix.Close(fd)
	// The loopback's own flags, set to up: no change where it is up.
	msg := make([]byte, unix.SizeofNlMsghdr+unix.SizeofIfInfomsg)
	h := (*unix.NlMsghdr)(unsafe.Pointer(&msg[0]))
	h.Len, h.Type, h.Flags, h.Seq = uint32(len(msg)), unix.RTM_NEWLINK, unix.NLM_F_REQUEST|unix.NLM_F_ACK, 1
	i := (*unix.IfInfomsg)(unsafe.Pointer(&msg[unix.SizeofNlMsghdr]))
	i.Index, i.Flags, i.Change = 1, unix.IFF_UP, unix.IFF_UP
	if err := unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return Refused, err.Error()
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil || n < unix.SizeofNlMsghdr+4 {
		return refused("no answer: %v", err)
	}
	if code := *(*int32)(unsafe.Pointer(&answer[unix.SizeofNlMsghdr])); code != 0 {
		return Refused, syscall.Errno(-code).Error()
	}
	return worked("the kernel said yes")
}

func bindLow(context.Context, *Targets) (Seen, string) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return Refused, err.Error()
	}
	defer unix.Close(fd)
	return outcome(unix.Bind(fd, &unix.SockaddrInet4{Port: 80, Addr: [4]byte{127, 0, 0, 1}}), "bound")
}
