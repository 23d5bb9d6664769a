// Package coredump keeps a crash of a process that holds secrets from writing its memory
// anywhere. What is started from it inherits that.
package coredump

import (
	"fmt"

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
		return nil // whoever started us saw to it, and it cannot be raised
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1}); err != nil {
		return fmt.Errorf("core dumps cannot be turned off: %w", err)
	}
	return nil
}
