package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// appArmorProfile is the one that the package attaches to the supervisor, which is where
// we have it from.
const appArmorProfile = "agentconnect-sandbox"

// keepProfile has the next exec stay in our AppArmor profile, where we are in it. bubblewrap
// may have one of its own (bwrap-userns-restrict, as on Ubuntu 24.04), which takes every
// capability from what it starts, so that no sandbox could start inside the boundary. attr
// is the thread's directory of labels. Where AppArmor or the profile is not loaded there is
// nothing to keep.
func keepProfile(attr string) error {
	// The first names AppArmor alone; the second is of the first security module (before 5.8).
	for _, dir := range []string{filepath.Join(attr, "apparmor"), attr} {
		label, err := os.ReadFile(filepath.Join(dir, "current"))
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.EINVAL):
			continue // no AppArmor here
		case err != nil:
			return err
		}
		// "agentconnect-sandbox (unconfined)"; the mode is not part of the name.
		name, _, _ := strings.Cut(strings.TrimSpace(string(label)), " (")
		if name != appArmorProfile {
			return nil
		}
		f, err := os.OpenFile(filepath.Join(dir, "exec"), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString("exec " + appArmorProfile)
		return errors.Join(err, f.Close())
	}
	return nil
}
