package selftest

import (
	"syscall"

	"golang.org/x/sys/unix"
)

//go:noescape
func int80(nr uint32) int32

// foreign are the entries to the kernel that a filter written for this
// architecture's numbers may forget: what they are and whether getpid works by them.
var foreign = map[string]func() error{
	"int80": func() error {
		if pid := int80(20); pid < 0 {
			return syscall.Errno(-pid)
		}
		return nil
	},
	"x32": func() error {
		_, _, e := syscall.RawSyscall(0x40000000|unix.SYS_GETPID, 0, 0, 0)
		if e != 0 {
			return e
		}
		return nil
	},
}
