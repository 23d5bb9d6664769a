package seccomp

import "golang.org/x/sys/unix"

// onlyHere are the calls that arm64 does not have.
var onlyHere = map[string]uint32{
	"chmod":      unix.SYS_CHMOD,
	"creat":      unix.SYS_CREAT,
	"open":       unix.SYS_OPEN,
	"mknod":      unix.SYS_MKNOD,
	"ioperm":     unix.SYS_IOPERM,
	"iopl":       unix.SYS_IOPL,
	"modify_ldt": unix.SYS_MODIFY_LDT,
	"uselib":     unix.SYS_USELIB,
}
