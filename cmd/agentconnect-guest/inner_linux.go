package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/selftest"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// inner becomes a runtime that brings a sandbox of its own, once such a sandbox was seen to
// start in this very boundary: the runtimes start without it, and only their commands fail.
func inner(ctx context.Context, args []string) error {
	if len(args) < 2 || args[0] != "--" {
		return usage("inner: write inner -- CMD…")
	}
	if err := selftest.Inner(ctx); err != nil {
		return &exitError{wire.ExitNoInner, fmt.Errorf("no inner sandbox starts here, so the runtime was not started: %w", err)}
	}
	path, err := exec.LookPath(args[1])
	if err != nil {
		return &exitError{exitNotFound, fmt.Errorf("inner: %w", err)}
	}
	err = unix.Exec(path, args[1:], os.Environ())
	return &exitError{exitCannotExec, fmt.Errorf("inner: %s: %w", path, err)}
}
