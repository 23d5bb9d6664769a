// The receiving end of a push, alone in a boundary of its own.

package main

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
)

// receiveDir is the git directory that git receive-pack works in: made anew for each push in
// the private tmp, so that nothing it writes beside objects and refs stays.
const receiveDir = "/tmp/receive.git"

// receive becomes git receive-pack. HEAD and config are copies of the repository's, objects
// and refs the repository's own; there are no hooks.
func receive() error {
	if err := os.Mkdir(receiveDir, 0o700); err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	for _, name := range []string{"HEAD", "config"} {
		b, err := os.ReadFile(filepath.Join(sandbox.RepositoryPath, name))
		if err == nil {
			err = os.WriteFile(filepath.Join(receiveDir, name), b, 0o600)
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
	}
	for _, name := range []string{"objects", "refs"} {
		if err := os.Symlink(filepath.Join(sandbox.RepositoryPath, name), filepath.Join(receiveDir, name)); err != nil {
			return fmt.Errorf("receive: %w", err)
		}
	}
	git, err := lookup("git")
	if err != nil {
		return err
	}
	// The operator's configuration is not in this view; the machine's could be.
	env := append(os.Environ(), "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null")
	err = unix.Exec(git, []string{"git", "receive-pack", receiveDir}, env)
	return &exitError{exitCannotExec, fmt.Errorf("receive: %s: %w", git, err)}
}
