// Attaching a mount in a namespace that is not ours.

package sealguard

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Namespaces are those of one sandbox: the mount namespace, and the user namespace that
// owns it. The supervisor has all rights over the latter, as the one who made its parent.
type Namespaces struct{ User, Mount *os.File }

// NamespacesOf opens the namespaces of a process of ours.
func NamespacesOf(pid int) (*Namespaces, error) {
	mount, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return nil, err
	}
	// The process may live in a user namespace further in (bubblewrap --disable-userns).
	owner, err := unix.IoctlRetInt(int(mount.Fd()), unix.NS_GET_USERNS)
	if err != nil {
		mount.Close()
		return nil, fmt.Errorf("owner of the mount namespace: %w", err)
	}
	return &Namespaces{User: os.NewFile(uintptr(owner), "user namespace"), Mount: mount}, nil
}

// Close lets go of them.
func (n *Namespaces) Close() {
	n.User.Close()
	n.Mount.Close()
}

// errElsewhere: the sandbox shows something else than the host has there.
var errElsewhere = errors.New("something else stands there")

// Attach makes what stands at the path target in the sandbox read-only: bound onto itself, if
// it is the inode that dev and ino say, or, with a copy, covered by a file that holds that.
// The sandbox stands still meanwhile. setns into a user namespace asks for a process with
// one thread, which no Go program is: a child does it, and nothing else, between fork and exit.
func (n *Namespaces) Attach(target string, dev, ino uint64, copied *string) error {
	path, err := unix.BytePtrFromString(target)
	if err != nil {
		return err
	}
	c := &attachment{
		user: n.User.Fd(), mount: n.Mount.Fd(), path: path, dev: dev, ino: ino,
		how:  unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC | unix.O_NOFOLLOW, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS},
		attr: unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV},
		tmp:  [5]byte{'/', 't', 'm', 'p'}, tmpfs: [6]byte{'t', 'm', 'p', 'f', 's'}, name: [2]byte{'c'},
	}
	if copied != nil {
		c.copied = true
		if c.size = uintptr(len(*copied)); c.size > 0 {
			c.text = unsafe.StringData(*copied)
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// No signal handler of the runtime may run in the child.
	var all, old unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^uint64(0)
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &old); err != nil {
		return err
	}
	pid, errno := c.fork()
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil); err != nil {
		return err
	}
	if errno != 0 {
		return fmt.Errorf("fork: %w", errno)
	}
	var ws unix.WaitStatus
	for {
		if _, err := unix.Wait4(pid, &ws, 0, nil); err == unix.EINTR {
			continue
		} else if err != nil {
			return err
		}
		break
	}
	switch {
	case ws.Signaled():
		return fmt.Errorf("attaching ended by signal %d", ws.Signal())
	case ws.ExitStatus() == 0:
		return nil
	case ws.ExitStatus() == codeElsewhere:
		return fmt.Errorf("%s: %w", target, errElsewhere)
	}
	return fmt.Errorf("%s: %w", target, syscall.Errno(ws.ExitStatus()))
}

// codeElsewhere is the exit code beyond all error numbers.
const codeElsewhere = 255

// attachment is all that the child needs, laid out before the fork.
type attachment struct {
	user, mount uintptr
	path        *byte
	dev, ino    uint64
	how         unix.OpenHow
	attr        unix.MountAttr
	st          unix.Stat_t
	none        [1]byte // an empty path
	tmp         [5]byte
	tmpfs       [6]byte
	name        [2]byte
	copied      bool
	text        *byte
	size        uintptr
}

// here is AT_FDCWD.
const here = ^uintptr(99)

// fork runs the child. The child has one thread and a copy of a runtime that stands still:
// system calls are all that it may do, no allocation and no growing stack.
//
//go:norace
//go:nosplit
//go:noinline
func (c *attachment) fork() (int, syscall.Errno) {
	pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return int(pid), errno
	}
	errno = c.child()
	for {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, uintptr(errno), 0, 0)
	}
}

//go:norace
//go:nosplit
func (c *attachment) child() syscall.Errno {
	if _, _, errno := syscall.RawSyscall(unix.SYS_SETNS, c.user, syscall.CLONE_NEWUSER, 0); errno != 0 {
		return errno
	}
	if _, _, errno := syscall.RawSyscall(unix.SYS_SETNS, c.mount, syscall.CLONE_NEWNS, 0); errno != 0 {
		return errno
	}
	empty := uintptr(unsafe.Pointer(&c.none[0]))
	if c.copied {
		// The copy of before, unless it is that of the start, which is locked and goes under.
		_, _, _ = syscall.RawSyscall(syscall.SYS_UMOUNT2, uintptr(unsafe.Pointer(c.path)), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW, 0)
	}
	dst, errno := c.destination()
	if errno != 0 {
		return errno
	}
	src := dst
	if c.copied {
		if src, errno = c.file(); errno != 0 {
			return errno
		}
	}
	clone, _, errno := syscall.RawSyscall(unix.SYS_OPEN_TREE, src, empty, unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if errno != 0 {
		return errno
	}
	if _, _, errno := syscall.RawSyscall6(unix.SYS_MOUNT_SETATTR, clone, empty, unix.AT_EMPTY_PATH, uintptr(unsafe.Pointer(&c.attr)), unsafe.Sizeof(c.attr), 0); errno != 0 {
		return errno
	}
	if c.copied {
		if _, _, errno := syscall.RawSyscall(syscall.SYS_UMOUNT2, uintptr(unsafe.Pointer(&c.tmp[0])), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW, 0); errno != 0 {
			return errno
		}
	}
	_, _, errno = syscall.RawSyscall6(unix.SYS_MOVE_MOUNT, clone, empty, dst, empty, unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH, 0)
	return errno
}

// destination opens the target and compares it.
//
//go:norace
//go:nosplit
func (c *attachment) destination() (uintptr, syscall.Errno) {
	dst, _, errno := syscall.RawSyscall6(unix.SYS_OPENAT2, here, uintptr(unsafe.Pointer(c.path)), uintptr(unsafe.Pointer(&c.how)), unsafe.Sizeof(c.how), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	if _, _, errno := syscall.RawSyscall(syscall.SYS_FSTAT, dst, uintptr(unsafe.Pointer(&c.st)), 0); errno != 0 {
		return 0, errno
	}
	if !c.copied && (c.st.Dev != c.dev || c.st.Ino != c.ino) {
		return 0, codeElsewhere
	}
	return dst, 0
}

// file makes a file with the copy on a tmpfs. Only what is attached can be cloned, so the
// tmpfs is attached at /tmp, where nothing runs that could see it.
//
//go:norace
//go:nosplit
func (c *attachment) file() (uintptr, syscall.Errno) {
	empty, name := uintptr(unsafe.Pointer(&c.none[0])), uintptr(unsafe.Pointer(&c.name[0]))
	fs, _, errno := syscall.RawSyscall(unix.SYS_FSOPEN, uintptr(unsafe.Pointer(&c.tmpfs[0])), unix.FSOPEN_CLOEXEC, 0)
	if errno != 0 {
		return 0, errno
	}
	if _, _, errno := syscall.RawSyscall6(unix.SYS_FSCONFIG, fs, unix.FSCONFIG_CMD_CREATE, 0, 0, 0, 0); errno != 0 {
		return 0, errno
	}
	mnt, _, errno := syscall.RawSyscall(unix.SYS_FSMOUNT, fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if errno != 0 {
		return 0, errno
	}
	if _, _, errno := syscall.RawSyscall6(unix.SYS_MOVE_MOUNT, mnt, empty, here, uintptr(unsafe.Pointer(&c.tmp[0])), unix.MOVE_MOUNT_F_EMPTY_PATH, 0); errno != 0 {
		return 0, errno
	}
	f, _, errno := syscall.RawSyscall6(syscall.SYS_OPENAT, mnt, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o644, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	if c.size > 0 {
		n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, f, uintptr(unsafe.Pointer(c.text)), c.size)
		if errno != 0 {
			return 0, errno
		}
		if n != c.size {
			return 0, syscall.EIO
		}
	}
	src, _, errno := syscall.RawSyscall6(syscall.SYS_OPENAT, mnt, name, unix.O_PATH|unix.O_CLOEXEC, 0, 0, 0)
	return src, errno
}
