// Package coredump keeps a crash of a process that holds secrets from writing its memory
// anywhere. What is started from it inherits that.
package coredump

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Off turns core dumps off for this process and what it starts. The limit is one byte and
// not zero: a dump that the kernel pipes to a program (core(5)) goes out at a limit of
// zero, too, and one byte is the kernel's own word for none at all.
func Off() error {
	var now unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &now); err != nil {
		return fmt.Errorf("core dumps cannot be turned off: %w", err)
	}
	if now.Max < 1 {
		// It cannot be raised, and a program that dumps are piped to still gets one: of nothing
		// that is in memory.
		err := os.WriteFile("/proc/self/coredump_filter", []byte("0"), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // where there is no /proc nothing is piped
			return fmt.Errorf("core dumps cannot be emptied: %w", err)
		}
		return nil
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}); err != nil {
		return fmt.Errorf("core dumps cannot be turned off: %w", err)
	}
	return nil
}
