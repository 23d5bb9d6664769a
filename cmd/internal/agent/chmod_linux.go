package agent

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// chmodNoFollow changes the mode of path unless it is a link. A path descriptor
// needs no rights on the directory itself, and names it whatever happens to the path.
func chmodNoFollow(path string, mode os.FileMode) error {
	//nolint:forbidigo // one name at a time, no link followed; what it is bound to is looked at next
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return os.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), mode)
}
