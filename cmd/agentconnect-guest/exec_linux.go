// The command of `agent exec`: becomes it, or says why not as a shell does.

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// Exit codes of a shell for a command it cannot start.
const (
	exitCannotExec = 126
	exitNotFound   = 127
)

// become returns only with an error; otherwise the process is the command. bubblewrap ends
// with 1 for a command that it cannot start, as a command does that failed.
func become(args []string) error {
	if len(args) < 2 || args[0] != "--" {
		return usage("exec: usage: exec -- CMD…")
	}
	command := args[1:]
	path, err := lookup(command[0])
	if err != nil {
		return err
	}
	err = unix.Exec(path, command, os.Environ())
	if errors.Is(err, unix.ENOEXEC) { // a script without a first line that says whose
		err = unix.Exec("/bin/sh", append([]string{"sh", path}, command[1:]...), os.Environ())
	}
	return &exitError{exitCannotExec, fmt.Errorf("%s: %w", command[0], err)}
}

// lookup finds a command by PATH. Its error has the exit code of a shell.
func lookup(name string) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case err == nil || errors.Is(err, exec.ErrDot):
		return path, nil
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return "", &exitError{exitNotFound, fmt.Errorf("%s: not found", name)}
	}
	var why *exec.Error
	if errors.As(err, &why) {
		err = why.Err
	}
	return "", &exitError{exitCannotExec, fmt.Errorf("%s: %w", name, err)}
}
