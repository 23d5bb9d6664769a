//go:build !linux

package prober

import (
	"context"
	"errors"
	"runtime"
)

// System names this system.
func (p *Prober) System() (name, release string) { return runtime.GOOS, "" }

// Syscalls: none of them is here.
func (p *Prober) Syscalls() error { return errors.New("not a Linux kernel") }

func (p *Prober) tryUserns(context.Context) error {
	return errors.New("no user namespaces on " + runtime.GOOS)
}
