package main

import (
	"errors"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// joinedArg is the argument of a launcher that is in the namespaces it was to join.
const joinedArg = "joined"

// join starts the launcher again in the user and network namespaces of a sandbox that runs,
// as a child of whoever started us, says its number and ends. Only a process of one
// thread may enter a user namespace, and a Go program never is one: but what a fork makes
// is, until it runs Go code again.
func join(spec *wire.Launch) *wire.LaunchError {
	fail := func(err error) *wire.LaunchError { return &wire.LaunchError{Step: "join a sandbox", Err: err.Error()} }
	var hold, hold2 [2]int
	if err := errors.Join(unix.Pipe2(hold[:], unix.O_CLOEXEC), unix.Pipe2(hold2[:], unix.O_CLOEXEC)); err != nil {
		return fail(err)
	}
	f := joinFork{
		hold: hold, hold2: hold2, line: wire.JoinedLine(), header: unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3},
		argv: [3]*byte{bytePtr("agentconnect-launch"), bytePtr(joinedArg)}, path: bytePtr("/proc/self/exe"),
	}
	if spec.Plan != nil {
		f.mounts, f.nested = true, spec.Plan.DieWithParent
		f.caps[0] = unix.CapUserData{Effective: 1 << unix.CAP_SYS_ADMIN, Permitted: 1 << unix.CAP_SYS_ADMIN, Inheritable: 1 << unix.CAP_SYS_ADMIN}
	}
	pid, errno := f.fork()
	if errno != 0 {
		return fail(errno)
	}
	// The child goes on when we have ended: its number is known before it can say anything.
	if _, err := unix.Write(wire.GateFD, wire.Joined(pid)); err != nil {
		_ = unix.Kill(pid, unix.SIGKILL)
		return fail(err)
	}
	os.Exit(0) //nolint:forbidigo // done, with nothing deferred; the child waits for our end
	return nil
}

func bytePtr(s string) *byte { b := append([]byte(s), 0); return &b[0] }

// joinFork holds all that the child needs: it allocates nothing.
type joinFork struct {
	hold   [2]int
	hold2  [2]int
	mounts bool
	nested bool
	line   [wire.JoinedSize]byte
	header unix.CapUserHeader
	caps   [2]unix.CapUserData
	path   *byte
	argv   [3]*byte
	envv   [1]*byte
	b      [1]byte
}

// fork makes the child. In it nothing but system calls runs up to the exec, as in package
// syscall; an error there is its exit code.
//
//go:noinline
//go:norace
//go:nosplit
func (f *joinFork) fork() (int, syscall.Errno) {
	pid, _, errno := syscall.RawSyscall6(unix.SYS_CLONE, unix.CLONE_PARENT|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return int(pid), errno
	}
	step := uintptr(wire.JoinWait)
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE, uintptr(f.hold[1]), 0, 0)
	_, _, errno = syscall.RawSyscall(unix.SYS_READ, uintptr(f.hold[0]), uintptr(unsafe.Pointer(&f.b[0])), 1)
	if errno == 0 {
		step = wire.JoinUser
		_, _, errno = syscall.RawSyscall(unix.SYS_SETNS, wire.UserNSFD, unix.CLONE_NEWUSER, 0)
	}
	if errno == 0 {
		step = wire.JoinNet
		_, _, errno = syscall.RawSyscall(unix.SYS_SETNS, wire.NetNSFD, unix.CLONE_NEWNET, 0)
	}
	if errno == 0 && f.nested {
		// One more fork, in the rights that we have here: the one who goes on is the first process
		// of a pid namespace, so that nothing of bubblewrap's outlives it, and ends with whoever
		// started us. As above it waits until its number is known.
		step = wire.JoinProcesses
		pid, _, errno = syscall.RawSyscall6(unix.SYS_CLONE, unix.CLONE_PARENT|unix.CLONE_NEWPID|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if errno == 0 && pid != 0 {
			for i := wire.JoinedSize - 2; pid > 0; i-- {
				f.line[i] = byte('0' + pid%10)
				pid /= 10
			}
			_, _, errno = syscall.RawSyscall(unix.SYS_WRITE, wire.GateFD, uintptr(unsafe.Pointer(&f.line[0])), uintptr(len(f.line)))
			if errno == 0 {
				step = 0
			}
			for {
				_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, step, 0, 0)
			}
		}
		_, _, _ = syscall.RawSyscall(unix.SYS_CLOSE, uintptr(f.hold2[1]), 0, 0)
		if errno == 0 {
			_, _, errno = syscall.RawSyscall(unix.SYS_READ, uintptr(f.hold2[0]), uintptr(unsafe.Pointer(&f.b[0])), 1)
		}
	}
	if errno == 0 && f.mounts {
		step = wire.JoinMounts
		_, _, errno = syscall.RawSyscall(unix.SYS_UNSHARE, unix.CLONE_NEWNS, 0, 0)
	}
	if errno == 0 {
		step = wire.JoinRights
		_, _, errno = syscall.RawSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&f.header)), uintptr(unsafe.Pointer(&f.caps[0])), 0)
	}
	if errno == 0 && f.mounts {
		_, _, errno = syscall.RawSyscall6(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, unix.CAP_SYS_ADMIN, 0, 0, 0)
	}
	if errno == 0 && f.nested {
		// Only now: gaining rights takes the signal away. Who died before left the gate closed.
		step = wire.JoinProcesses
		_, _, errno = syscall.RawSyscall6(unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0, 0)
	}
	if errno == 0 {
		step = wire.JoinExec
		_, _, _ = syscall.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(f.path)), uintptr(unsafe.Pointer(&f.argv[0])), uintptr(unsafe.Pointer(&f.envv[0])))
	}
	for {
		_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, step, 0, 0)
	}
}

// connectTime is how long a server inside may take to accept.
const connectTime = 5

// dial connects to ports of the loopback here for whoever started us, one after the other,
// and hands each connection out, until nobody asks any more.
func dial() *wire.LaunchError {
	for {
		var ask [2]byte
		n, err := unix.Read(wire.GateFD, ask[:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n != len(ask) {
			os.Exit(0) //nolint:forbidigo // nobody asks any more, and nothing is deferred
		}
		port := int(ask[0])<<8 | int(ask[1])
		fd, err := connect(&unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}, unix.AF_INET)
		if err != nil {
			six, err6 := connect(&unix.SockaddrInet6{Port: port, Addr: [16]byte{15: 1}}, unix.AF_INET6)
			if err6 == nil {
				fd, err = six, nil
			}
		}
		answer, rights := []byte("\n"), []byte(nil)
		if err != nil {
			answer = []byte(err.Error() + "\n")
		} else {
			rights = unix.UnixRights(fd)
		}
		err = unix.Sendmsg(wire.GateFD, answer, rights, nil, 0)
		if fd >= 0 {
			unix.Close(fd)
		}
		if err != nil {
			return &wire.LaunchError{Step: "hand out a connection", Err: err.Error()}
		}
	}
}

func connect(to unix.Sockaddr, family int) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: connectTime}); err == nil {
		err = unix.Connect(fd, to)
	}
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{})
	}
	if err == unix.EINPROGRESS {
		err = unix.ETIMEDOUT
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}
