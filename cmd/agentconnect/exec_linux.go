package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// held is how many bytes lie in a pipe, at most.
func held(pipe *os.File) int {
	n := inPipe
	raw, err := pipe.SyscallConn()
	if err != nil {
		return n
	}
	_ = raw.Control(func(fd uintptr) {
		if is, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
			n = is
		}
	})
	return n
}
