package selftest

import (
	"golang.org/x/sys/unix"
)

// archCalls are calls that this architecture has and others lack.
func archCalls() []Attack {
	return []Attack{
		{"modify-ldt", "DESIGN 4", "reach modify_ldt(2)", "16-bit segments", MustFail, true, reaches(unix.SYS_MODIFY_LDT, unix.ENOSYS, 99, 0, 0, 0)},
		{"set-id-creat", "DESIGN 4", "make a set-user-id program by creat(2)", "the same", MustFail, true, setID(func(p string, _ int) error {
			fd, err := unix.Creat(p+".new", 0o4755)
			if err != nil {
				return err
			}
			unix.Close(fd)
			return isSetID(p + ".new")
		})},
		{"io-ports", "DESIGN 4", "reach ioperm(2)", "the machine's I/O ports", MustFail, true, reaches(unix.SYS_IOPERM, unix.EPERM, ^uintptr(0), 1, 0, 0)},
	}
}
