//go:build !linux

package selftest

import (
	"context"
	"errors"
	"os"
)

// Attacks is empty: the boundary is Linux's.
func Attacks() []Attack { return nil }

var errNotLinux = errors.New("not on this system: the sandbox needs Linux")

// Check answers the probe; there is nothing to check without a boundary.
func Check(context.Context, CheckRequest) CheckReport {
	return CheckReport{Results: []CheckResult{{What: CheckProc, Detail: errNotLinux.Error()}}}
}

// PlantIPC makes objects of the host.
func PlantIPC() (key int, remove func() error, err error) { return 0, nil, errNotLinux }

// Try runs one step that needs a process of its own.
func Try(string) string { return errNotLinux.Error() }

func hostRoot() bool { return os.Geteuid() == 0 }

func detach(string) (int, error) { return 0, errNotLinux }

// Detach is the process between a word's process and the one that lingers.
func Detach(string) (int, error) { return 0, errNotLinux }

// Linger is the process that stays.
func Linger(context.Context) {}

func dieOf(string) error { return errNotLinux }

// OpenTerminal makes a pseudo-terminal.
func OpenTerminal(rows, cols uint16) (master, slave *os.File, err error) {
	return nil, nil, errNotLinux
}
