// The last step before the runtime: environment that nothing else inside is given.

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// maxEnviron bounds what start reads, in bytes; the kernel takes no more for one program.
const maxEnviron = 6 << 20

// start reads "K=V" entries, each ended by a NUL, from a descriptor, closes it and becomes
// the command with them in its environment. It returns only with an error.
func start(args []string) error {
	if len(args) < 3 || args[1] != "--" {
		return usage("start: usage: start FD -- CMD…")
	}
	fd, err := strconv.Atoi(args[0])
	if err != nil || fd <= 2 {
		return usage("start: %q is no descriptor above 2", args[0])
	}
	unix.CloseOnExec(fd)
	from := os.NewFile(uintptr(fd), "environment")
	b, err := io.ReadAll(io.LimitReader(from, maxEnviron+1))
	from.Close()
	if err != nil {
		return fmt.Errorf("start: descriptor %d: %w", fd, err)
	}
	more, err := parseEnviron(b)
	if err != nil {
		return fmt.Errorf("start: descriptor %d: %w", fd, err)
	}
	env := wire.MergeEnv(os.Environ(), more)
	command := args[2:]
	for _, e := range more {
		if path, ok := strings.CutPrefix(e, "PATH="); ok {
			if err := os.Setenv("PATH", path); err != nil { //nolint:forbidigo // lookup goes by it, and the exec is next
				return err
			}
		}
	}
	path, err := lookup(command[0])
	if err != nil {
		return err
	}
	err = unix.Exec(path, command, env)
	return &exitError{exitCannotExec, fmt.Errorf("start: %s: %w", path, err)}
}

// parseEnviron reads entries that are each ended by a NUL.
func parseEnviron(b []byte) ([]string, error) {
	if len(b) > maxEnviron {
		return nil, fmt.Errorf("more than %d bytes of environment", maxEnviron)
	}
	text, ended := strings.CutSuffix(string(b), "\x00")
	if !ended {
		return nil, errors.New("the environment is cut short")
	}
	entries := strings.Split(text, "\x00")
	for _, e := range entries {
		if strings.IndexByte(e, '=') <= 0 {
			return nil, errors.New("an entry of the environment is not NAME=VALUE")
		}
	}
	return entries, nil
}
