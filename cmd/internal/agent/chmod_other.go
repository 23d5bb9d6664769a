//go:build !linux

package agent

import (
	"os"

	"golang.org/x/sys/unix"
)

// chmodNoFollow changes the mode of path unless it is a link.
func chmodNoFollow(path string, mode os.FileMode) error {
	return unix.Fchmodat(unix.AT_FDCWD, path, uint32(mode.Perm()), unix.AT_SYMLINK_NOFOLLOW)
}
