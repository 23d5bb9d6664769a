package gitseal

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox/pathfd"
)

// SetAside renames what stands at a path to a name that git does not obey, beside it, and says
// which. It goes by the descriptor of the folder, reached from root without a link.
func SetAside(root int, path string) (aside string, err error) {
	dir, name, err := pathfd.Parent(root, path)
	if err != nil {
		return "", err
	}
	defer unix.Close(dir)
	base := path + ".set-aside-" + time.Now().UTC().Format("20060102-150405")
	for i := range 1000 {
		aside = base
		if i > 0 {
			aside += "-" + strconv.Itoa(i)
		}
		if err = unix.Renameat2(dir, name, dir, filepath.Base(aside), unix.RENAME_NOREPLACE); !errors.Is(err, unix.EEXIST) {
			break
		}
	}
	if err != nil {
		return "", &os.PathError{Op: "rename", Path: path, Err: err}
	}
	return aside, nil
}

// RemoveLink takes a link away, reached from root without another one.
func RemoveLink(root int, path string) error {
	dir, name, err := pathfd.Parent(root, path)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	var st unix.Stat_t
	if err = unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil && st.Mode&unix.S_IFMT != unix.S_IFLNK {
		err = errors.New("it is no link any more")
	}
	if err == nil {
		err = unix.Unlinkat(dir, name, 0)
	}
	if err != nil {
		return &os.PathError{Op: "unlink", Path: path, Err: err}
	}
	return nil
}
