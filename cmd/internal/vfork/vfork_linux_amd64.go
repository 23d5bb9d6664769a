package vfork

import (
	"os"
	"runtime"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/vfork/early"
)

// What package syscall tells the runtime around a fork: all signals are blocked up to the point
// where the child has no handlers any more.

//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

//go:linkname afterForkInChild syscall.runtime_AfterForkInChild
func afterForkInChild()

// Steps of the child.
const (
	stepClone = iota
	stepMaps
	stepSession
	stepCapabilities
	stepDirectory
	stepDeath
	stepFiles
	stepLimit
	stepExec
)

var steps = [...]string{
	stepClone: "clone", stepMaps: "say who is who in the user namespace", stepSession: "setsid", stepCapabilities: "keep capabilities",
	stepDirectory: "chdir", stepDeath: "ask for a death signal", stepFiles: "pass a descriptor", stepLimit: "set the limit of open files", stepExec: "execute",
}

// closed is a descriptor that the program does not get.
const closed = ^uintptr(0)

// child holds all that the child needs: it allocates nothing. The parent's memory is the child's,
// so that what the child leaves here, the parent reads.
type child struct {
	flags uintptr
	maps  [3]struct {
		file *byte
		text []byte
	}
	header unix.CapUserHeader
	sets   [2]unix.CapUserData
	keep   []uintptr
	root   *byte
	death  uintptr
	files  []uintptr // all above those that they become
	limit  *early.Limit
	path   *byte
	argv   []*byte
	envv   []*byte

	step  uintptr
	errno syscall.Errno
}

// Run starts the program, as a child of the calling thread and the first of a session of its own, in
// the root directory. An error is an *Error when it is the kernel's.
func (s *Start) Run() (*Process, error) {
	if s.Namespaces&syscall.CLONE_NEWUSER == 0 {
		return s.plain() // which copies nothing either
	}
	pid, err := s.start()
	if err != nil {
		return nil, err
	}
	return Child(pid), nil
}

func (s *Start) start() (pid int, err error) {
	c := child{
		flags: s.Namespaces | syscall.CLONE_VM | syscall.CLONE_VFORK | uintptr(syscall.SIGCHLD),
		death: uintptr(s.Death), keep: s.Capabilities, header: unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3},
	}
	if c.path, err = syscall.BytePtrFromString(s.Path); err != nil {
		return 0, err
	}
	if c.argv, err = syscall.SlicePtrFromStrings(s.Args); err != nil {
		return 0, err
	}
	if c.envv, err = syscall.SlicePtrFromStrings(s.Env); err != nil {
		return 0, err
	}
	c.root, _ = syscall.BytePtrFromString("/")
	same := func(id int) string { return strconv.Itoa(id) + " " + strconv.Itoa(id) + " 1" }
	for i, m := range []struct{ file, text string }{{"setgroups", "deny"}, {"gid_map", same(os.Getgid())}, {"uid_map", same(os.Getuid())}} {
		c.maps[i].file, _ = syscall.BytePtrFromString("/proc/self/" + m.file)
		c.maps[i].text = []byte(m.text)
	}
	for _, n := range s.Capabilities {
		set := &c.sets[n/32]
		set.Permitted |= 1 << (n % 32)
		set.Effective, set.Inheritable = set.Permitted, set.Permitted
	}
	var now unix.Rlimit
	// As package syscall does: what somebody else set since stays.
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &now); err == nil && now.Max == early.Files.Hard && now.Cur == now.Max-1 {
		c.limit = &early.Files
	}
	// The children of other starts must not get what is meant for this one.
	syscall.ForkLock.Lock()
	defer syscall.ForkLock.Unlock()
	defer func() {
		for _, fd := range c.files {
			if fd != closed {
				unix.Close(int(fd))
			}
		}
	}()
	for _, f := range s.Files {
		if f == nil {
			c.files = append(c.files, closed)
			continue
		}
		// Fd has it block, as a program expects of what it is started with.
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, len(s.Files))
		if err != nil {
			return 0, os.NewSyscallError("fcntl", err)
		}
		c.files = append(c.files, uintptr(fd))
	}
	r, errno := c.fork()
	afterFork()
	runtime.KeepAlive(s)
	if errno != 0 {
		return 0, &Error{Step: steps[stepClone], Err: syscall.Errno(errno)}
	}
	if c.errno != 0 {
		var ws unix.WaitStatus
		for {
			if _, err := unix.Wait4(int(r), &ws, 0, nil); err != unix.EINTR {
				return 0, &Error{Step: steps[c.step], Err: c.errno}
			}
		}
	}
	return int(r), nil
}

// fork makes the child, which never returns from it; the parent does at once, when the child has
// executed the program or given up. In the child nothing but system calls runs, as in package
// syscall: no call may need more stack, and none may return into this frame but those made in it.
//
//go:noinline
//go:norace
//go:nocheckptr
func (c *child) fork() (pid, errno uintptr) {
	var fd, i uintptr
	beforeFork() // from here on more stack is a fatal error
	pid, errno = early.Syscall(syscall.SYS_CLONE, c.flags, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	c.step = stepMaps
	for i = 0; i < uintptr(len(c.maps)) && c.errno == 0; i++ {
		if fd, _, c.errno = syscall.RawSyscall(syscall.SYS_OPEN, uintptr(unsafe.Pointer(c.maps[i].file)), syscall.O_WRONLY, 0); c.errno == 0 {
			_, _, c.errno = syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(&c.maps[i].text[0])), uintptr(len(c.maps[i].text)))
			_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, fd, 0, 0)
		}
	}
	if c.errno == 0 {
		c.step = stepSession
		_, _, c.errno = syscall.RawSyscall(syscall.SYS_SETSID, 0, 0, 0)
	}
	afterForkInChild()
	if c.errno == 0 {
		c.step = stepCapabilities
		_, _, c.errno = syscall.RawSyscall(syscall.SYS_CAPSET, uintptr(unsafe.Pointer(&c.header)), uintptr(unsafe.Pointer(&c.sets[0])), 0)
	}
	for i = 0; i < uintptr(len(c.keep)) && c.errno == 0; i++ {
		_, _, c.errno = syscall.RawSyscall6(syscall.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, c.keep[i], 0, 0, 0)
	}
	if c.errno == 0 {
		c.step = stepDirectory
		_, _, c.errno = syscall.RawSyscall(syscall.SYS_CHDIR, uintptr(unsafe.Pointer(c.root)), 0, 0)
	}
	if c.errno == 0 && c.death != 0 {
		// Behind all that changes rights, which takes it away.
		c.step = stepDeath
		_, _, c.errno = syscall.RawSyscall6(syscall.SYS_PRCTL, unix.PR_SET_PDEATHSIG, c.death, 0, 0, 0, 0)
	}
	for i = 0; i < uintptr(len(c.files)) && c.errno == 0; i++ {
		c.step = stepFiles
		if c.files[i] == closed {
			_, _, _ = syscall.RawSyscall(syscall.SYS_CLOSE, i, 0, 0)
		} else {
			_, _, c.errno = syscall.RawSyscall(syscall.SYS_DUP3, c.files[i], i, 0)
		}
	}
	if c.errno == 0 && c.limit != nil {
		c.step = stepLimit
		_, _, c.errno = syscall.RawSyscall6(syscall.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE, uintptr(unsafe.Pointer(c.limit)), 0, 0, 0)
	}
	if c.errno == 0 {
		c.step = stepExec
		_, _, c.errno = syscall.RawSyscall(syscall.SYS_EXECVE, uintptr(unsafe.Pointer(c.path)), uintptr(unsafe.Pointer(&c.argv[0])), uintptr(unsafe.Pointer(&c.envv[0])))
	}
	for {
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT_GROUP, 253, 0, 0)
	}
}
