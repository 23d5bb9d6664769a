package early

import "unsafe"

// Syscall makes a system call that may return twice, the second time when the child of the first
// has executed a program: of the memory of both only what it returns, and what the caller of its
// caller holds, is then what it was before. errno is 0 when it succeeded.
//
//go:noescape
func Syscall(trap, a1, a2, a3, a4 uintptr) (r1, errno uintptr)

// Limit is struct rlimit of setrlimit(2).
type Limit struct{ Soft, Hard uint64 }

// Files is the limit of open files as this program was started with it. Package syscall raises the
// soft one, and gives it back to what it starts itself.
var Files = files()

func files() (l Limit) {
	const prlimit64, nofile = 302, 7
	_, _ = Syscall(prlimit64, 0, nofile, 0, uintptr(unsafe.Pointer(&l))) // it cannot fail for the process itself
	return l
}
