package selftest

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// OpenTerminal makes a pseudo-terminal of the devpts mounted here. The caller owns
// both ends. The slave is opened from the master, by no path that could lead elsewhere (Linux 4.13).
func OpenTerminal(rows, cols uint16) (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("terminal: open /dev/ptmx: %w", err)
	}
	master = os.NewFile(uintptr(fd), "/dev/ptmx")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		master.Close()
		return nil, nil, fmt.Errorf("terminal: unlock: %w", err)
	}
	if rows != 0 || cols != 0 {
		if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
			master.Close()
			return nil, nil, fmt.Errorf("terminal: set size: %w", err)
		}
	}
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		master.Close()
		return nil, nil, fmt.Errorf("terminal: open the slave: %w", errno)
	}
	return master, os.NewFile(peer, "pty"), nil
}
