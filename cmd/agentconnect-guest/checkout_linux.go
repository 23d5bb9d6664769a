// A workspace that is a clone: made inside, where its agent could have made it.

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

const (
	// fresh is where a clone is made, in the workspace: what is in it is nobody's work yet.
	fresh = ".agentconnect-clone"
	// unfinished lies in a clone whose files are not there yet.
	unfinished = "agentconnect-unfinished"
)

// checkout clones into the working directory, if that was not done before, and becomes the
// runtime.
func checkout(ctx context.Context, args []string, stderr io.Writer) error {
	if len(args) < 4 || args[2] != "--" {
		return usage("checkout: write checkout URL BRANCH -- CMD…")
	}
	if err := ensureClone(ctx, ".", args[0], args[1], stderr); err != nil {
		return &exitError{wire.ExitNoCheckout, fmt.Errorf("checkout of %s: %w", args[0], err)}
	}
	path, err := exec.LookPath(args[3])
	if err != nil {
		return &exitError{exitNotFound, fmt.Errorf("checkout: %w", err)}
	}
	err = unix.Exec(path, args[3:], os.Environ())
	return &exitError{exitCannotExec, fmt.Errorf("checkout: %s: %w", path, err)}
}

// ensureClone makes dir a clone. It may be cut off at any point: what it finds half made it
// makes again, and what it did not make it leaves alone.
func ensureClone(ctx context.Context, dir, url, branch string, stderr io.Writer) error {
	gitDir, tmp := filepath.Join(dir, ".git"), filepath.Join(dir, fresh)
	mark := filepath.Join(gitDir, unfinished)
	git := func(args ...string) error {
		cmd := exec.CommandContext(ctx, "git", args...)
		cmd.Env = append(os.Environ(), "GIT_TERMINAL_PROMPT=0")
		cmd.Stdout, cmd.Stderr = stderr, stderr // stdout is the runtime's
		err := cmd.Run()
		if errors.Is(err, exec.ErrNotFound) {
			return errors.New("git is not installed here")
		}
		if err != nil {
			return fmt.Errorf("git %s: %w", args[0], err)
		}
		return nil
	}
	if !there(gitDir) {
		if err := os.RemoveAll(tmp); err != nil {
			return err
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		if len(entries) > 0 {
			return fmt.Errorf("the workspace holds something else (%q); move it away", entries[0].Name())
		}
		clone := []string{"clone", "--quiet", "--no-checkout"}
		if branch != "" {
			clone = append(clone, "--branch="+branch)
		}
		if err := git(append(clone, "--", url, tmp)...); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(tmp, ".git", unfinished), nil, 0o600); err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(tmp, ".git"), gitDir); err != nil {
			return err
		}
	}
	if !there(mark) {
		return nil
	}
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	// A repository without a commit has nothing to check out.
	if git("-C", dir, "rev-parse", "--quiet", "--verify", "HEAD^{commit}") == nil {
		if err := git("-C", dir, "reset", "--quiet", "--hard"); err != nil {
			return err
		}
	}
	return os.Remove(mark)
}

func there(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
