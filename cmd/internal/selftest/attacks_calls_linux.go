// Attacks by single system calls, each as the kernel takes it and, where a condition looks at
// an argument, with high bits set that the kernel drops.

package selftest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// high is a bit that the kernel drops from an argument of 32 bits.
const high = 1 << 33

func callAttacks() []Attack {
	table := []Attack{
		{"socket-nftables", "DESIGN 4", "open a netlink socket to the packet filter", "nf_tables: the way from a namespace to root", MustFail, true, opensSocket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER)},
		{"socket-xfrm", "DESIGN 4", "open a netlink socket to IPsec", "the same", MustFail, true, opensSocket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM)},
		{"socket-high", "CVE-2019-10063", "open a socket to the hypervisor with a high bit in the family", "a filter that compares 64 bits", MustFail, true, rawCall(unix.SYS_SOCKET, unix.AF_VSOCK|high, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)},
		{"netlink-high", "CVE-2019-10063", "the same for the packet filter's", "a filter that compares 64 bits", MustFail, true, rawCall(unix.SYS_SOCKET, unix.AF_NETLINK|high, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER|high)},
		{"uring-register", "CASES 51a", "reach io_uring_register(2)", "a ring that came in over a socket", MustFail, true, reaches(unix.SYS_IO_URING_REGISTER, unix.ENOSYS, ^uintptr(0), 0, 0, 0)},
		{"uring-enter", "CASES 51a", "reach io_uring_enter(2)", "the same", MustFail, true, reaches(unix.SYS_IO_URING_ENTER, unix.ENOSYS, ^uintptr(0), 0, 0, 0)},
		{"userfaultfd-user", "DESIGN 4", "make a userfaultfd for user mode alone", "races in the kernel", MustFail, true, rawCall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|1, 0, 0)},
		{"move-pages", "DESIGN 4", "reach move_pages(2)", "where memory lies", MustFail, true, reaches(unix.SYS_MOVE_PAGES, unix.ENOSYS, 0, 0, 0, 0)},
		{"migrate-pages", "DESIGN 4", "reach migrate_pages(2)", "the same", MustFail, true, reaches(unix.SYS_MIGRATE_PAGES, unix.ENOSYS, 0, 0, 0, 0)},
		{"add-key", "DESIGN 4", "add a key to the user's keyring", "what the host's programs read there", MustFail, true, keyCall(addKey)},
		{"request-key", "DESIGN 4", "search the user's keyring", "Kerberos and disk keys", MustFail, true, keyCall(requestKey)},
		{"join-keyring", "DESIGN 4", "join a session keyring", "the same", MustFail, true, keyCall(joinKeyring)},
		{"line-discipline", "CVE-2023-6546", "set a terminal's line discipline", "n_gsm: root", MustFail, true, tries("tiocsetd")},
		{"line-discipline-high", "CVE-2019-10063", "the same with a high bit in the command", "a filter that compares 64 bits", MustFail, true, tries("tiocsetd-high")},
		{"openat2", "DESIGN 4", "open a file by openat2(2)", "a mode that no filter reads", MustFail, true, tryOpenat2},
		{"clone3-namespace", "DESIGN 4", "make a user namespace by clone3(2)", "flags behind a pointer", MustFail, true, cloneThree},
		{"unshare-high", "CVE-2019-10063", "make a user namespace by unshare(2) with a high bit", "a filter that compares 64 bits", MustFail, true, tries("unshare-high")},
		{"open-handle", "DESIGN 4", "reach open_by_handle_at(2)", "any file of the file system", MustFail, true, reaches(unix.SYS_OPEN_BY_HANDLE_AT, unix.EPERM, ^uintptr(0), 0, 0, 0)},
		{"set-user-id", "DESIGN 4", "make a set-user-id program by chmod(2)", "everybody on the host runs it as the user", MustFail, true, setID(func(p string, _ int) error { return unix.Chmod(p, 0o4755) })},
		{"set-group-id", "DESIGN 4", "make a set-group-id program", "the same for the group", MustFail, true, setID(func(p string, _ int) error { return unix.Chmod(p, 0o2755) })},
		{"set-id-fchmod", "DESIGN 4", "the same by fchmod(2)", "the same", MustFail, true, setID(func(_ string, fd int) error { return unix.Fchmod(fd, 0o4755) })},
		{"set-id-fchmodat", "DESIGN 4", "the same by fchmodat(2)", "the same", MustFail, true, setID(func(p string, _ int) error { return unix.Fchmodat(unix.AT_FDCWD, p, 0o4755, 0) })},
		{"set-id-high", "CVE-2019-10063", "the same with a high bit in the mode", "a filter that compares 64 bits", MustFail, true, setID(func(p string, fd int) error {
			_, _, e := unix.Syscall(unix.SYS_FCHMOD, uintptr(fd), 0o4755|high, 0)
			return errno(e)
		})},
		{"set-id-create", "DESIGN 4", "make one at once by openat(2)", "the same", MustFail, true, setID(func(p string, _ int) error {
			fd, err := unix.Open(p+".new", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o4755)
			if err != nil {
				return err
			}
			unix.Close(fd)
			return isSetID(p + ".new")
		})},
		{"set-id-mknod", "DESIGN 4", "make one at once by mknod(2)", "the same", MustFail, true, setID(func(p string, _ int) error {
			if err := unix.Mknod(p+".node", unix.S_IFREG|0o4755, 0); err != nil {
				return err
			}
			return isSetID(p + ".node")
		})},
		{"hole-device", "DESIGN 4", "make a 0:0 device in the workspace", "a hole for an overlay file system, residue for git", MustFail, true, setID(func(p string, _ int) error { return unix.Mknod(p+".dev", unix.S_IFCHR|0o600, 0) })},
		{"packet-rules", "CVE-2021-22555", "replace the packet filter's rules by setsockopt(2)", "the old door to the same tables", MustFail, true, oldTables},
		{"mount-attributes", "DESIGN 4", "reach mount_setattr(2)", "read-only flags of a whole tree", MustFail, true, reaches(unix.SYS_MOUNT_SETATTR, unix.ENOSYS, ^uintptr(0), 0, 0, 0)},
		{"move-mount", "CVE-2021-41133", "reach move_mount(2)", "a view of its own", MustFail, true, reaches(unix.SYS_MOVE_MOUNT, unix.ENOSYS, ^uintptr(0), 0, ^uintptr(0), 0)},
		{"fsconfig", "CVE-2022-0185", "reach fsconfig(2)", "a file system's option parser", MustFail, true, reaches(unix.SYS_FSCONFIG, unix.ENOSYS, ^uintptr(0), 0, 0, 0)},
		{"fsmount", "CVE-2022-0185", "reach fsmount(2)", "the same", MustFail, true, reaches(unix.SYS_FSMOUNT, unix.ENOSYS, ^uintptr(0), 0, 0, 0)},
		{"quota-by-descriptor", "DESIGN 4", "reach quotactl_fd(2)", "the file systems' quotas", MustFail, true, reaches(unix.SYS_QUOTACTL_FD, unix.EPERM, ^uintptr(0), 0, 0, 0)},
	}
	return append(table, archCalls()...)
}

func errno(e syscall.Errno) error {
	if e != 0 {
		return e
	}
	return nil
}

// rawCall makes a call whose result is a descriptor.
func rawCall(nr, a, b, c uintptr) func(context.Context, *Targets) (Seen, string) {
	return func(context.Context, *Targets) (Seen, string) {
		fd, _, e := unix.Syscall(nr, a, b, c)
		if e != 0 {
			return Refused, e.Error()
		}
		unix.Close(int(fd))
		return worked("a descriptor")
	}
}

// reaches makes a call that cannot do anything: closed descriptors, no pointers. It worked if
// the kernel's own code was asked, and not just the filter, whose answer is known.
func reaches(nr uintptr, filter syscall.Errno, a, b, c, d uintptr) func(context.Context, *Targets) (Seen, string) {
	return func(context.Context, *Targets) (Seen, string) {
		_, _, e := unix.Syscall6(nr, a, b, c, d, 0, 0)
		if e == filter {
			return Refused, e.Error()
		}
		return worked("the kernel answered: %v", errno(e))
	}
}

// keyCall leaves the caller's keyrings as they were: in a process of its own where it must.
func keyCall(do func() error) func(context.Context, *Targets) (Seen, string) {
	return func(context.Context, *Targets) (Seen, string) { return outcome(do(), "the kernel answered") }
}

func addKey() error {
	// A key that ends with the thread.
	_, err := unix.AddKey("user", "agentconnect-selftest", []byte("x"), unix.KEY_SPEC_THREAD_KEYRING)
	return err
}

func requestKey() error {
	_, err := unix.RequestKey("user", "agentconnect-selftest-none", "", 0)
	if err == unix.ENOKEY || err == unix.ENOENT {
		return nil // it was searched; without a helper of the host's it ends with ENOENT
	}
	return err
}

func joinKeyring() error {
	_, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false)
	return err
}

func tryOpenat2(_ context.Context, t *Targets) (Seen, string) {
	if t.Nesting {
		return skipped("nesting is on, and bubblewrap needs it")
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, "/usr", &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC})
	if err == nil {
		unix.Close(fd)
	}
	return outcome(err, "opened")
}

// cloneThree asks for a user namespace with a flag that the kernel refuses beside it, so that
// no process comes of it: EINVAL is the kernel's own answer.
func cloneThree(_ context.Context, t *Targets) (Seen, string) {
	if t.Nesting {
		return skipped("nesting is on")
	}
	args := [11]uint64{0: unix.CLONE_NEWUSER | unix.CLONE_FS}
	_, _, e := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args), 0)
	if e == unix.EINVAL {
		return worked("the kernel looked at its flags")
	}
	return refused("%v", errno(e))
}

// setID makes a file in the workspace that do turns into one that stays more than a file.
func setID(do func(path string, fd int) error) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		dir, err := os.MkdirTemp(t.Workspace, ".agentconnect-selftest-")
		if err != nil {
			return Refused, err.Error()
		}
		defer os.RemoveAll(dir)
		f, err := os.OpenFile(filepath.Join(dir, "f"), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o700)
		if err != nil {
			return Refused, err.Error()
		}
		defer f.Close()
		return outcome(do(f.Name(), int(f.Fd())), "made in "+dir)
	}
}

// isSetID: a kernel may drop the bit without an error.
func isSetID(path string) error {
	st, err := os.Stat(path)
	if err == nil && st.Mode()&os.ModeSetuid == 0 {
		err = fmt.Errorf("made without the bit: %v", st.Mode())
	}
	return err
}

func oldTables(context.Context, *Targets) (Seen, string) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return Refused, err.Error()
	}
	defer unix.Close(fd)
	const setReplace = 64
	_, _, e := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.IPPROTO_IP, setReplace, 0, 0, 0)
	if e == unix.ENOPROTOOPT {
		return Refused, e.Error() // the filter's answer, and that of a kernel without them
	}
	return worked("the kernel answered: %v", errno(e))
}

// tryUnshare asks for a user namespace with the flag's high half filled.
func tryUnshare() error {
	runtime.LockOSThread()
	_, _, e := unix.RawSyscall(unix.SYS_UNSHARE, unix.CLONE_NEWUSER|unix.CLONE_SIGHAND|high, 0, 0)
	if e == unix.EINVAL {
		return nil // the kernel looked at the flags: a process with threads cannot have it
	}
	return errno(e)
}
