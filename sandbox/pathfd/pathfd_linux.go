// Package pathfd is the one place where a path becomes a descriptor. Whatever is
// decided about a path is decided about the descriptor, so that nothing changes
// between the look and the use. It does not judge paths.
package pathfd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// retries bounds how often openat2 is asked again: it answers EAGAIN when something
// on the way was renamed meanwhile (path_openat2 with RESOLVE_BENEATH, since 5.6).
const retries = 128

// Open opens an absolute path as O_PATH, following links. The caller closes it.
func Open(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// Real gives the path of an open descriptor, as the kernel knows it now.
func Real(fd int) (string, error) { return os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)) }

// Beneath opens rel below the directory dir as O_PATH plus flags: no link is followed
// on the way, nothing outside dir is reached. A link met is ELOOP.
func Beneath(dir int, rel string, flags uint64) (int, error) {
	how := unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC | unix.O_NOFOLLOW | flags,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	if rel == "" {
		rel = "."
	}
	for range retries {
		fd, err := unix.Openat2(dir, rel, &how)
		switch err {
		case nil:
			return fd, nil
		case unix.EAGAIN, unix.EINTR:
			continue
		default:
			return -1, &fs.PathError{Op: "openat2", Path: rel, Err: err}
		}
	}
	return -1, &fs.PathError{Op: "openat2", Path: rel, Err: unix.EAGAIN}
}

// Absolute opens an absolute path without a link in it, from the descriptor of the
// root directory.
func Absolute(root int, path string, flags uint64) (int, error) {
	if path == "" || path[0] != '/' {
		return -1, fmt.Errorf("%q: not absolute", path)
	}
	rel := path[1:]
	fd, err := Beneath(root, rel, flags)
	if err != nil {
		return -1, &fs.PathError{Op: "openat2", Path: path, Err: unwrap(err)}
	}
	return fd, nil
}

// Directory opens a directory by an absolute path without a link in it.
func Directory(path string) (int, error) {
	root, err := Open("/")
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	return Absolute(root, path, unix.O_DIRECTORY)
}

// Parent opens the directory that an absolute path lies in, as Absolute does, and gives the
// name in it: for what is done to the name itself, which no link on the way may lead elsewhere.
func Parent(root int, path string) (dir int, name string, err error) {
	name = filepath.Base(path)
	if name == "/" || name == "." || name == ".." {
		return -1, "", fmt.Errorf("%q: no name in a directory", path)
	}
	dir, err = Absolute(root, filepath.Dir(path), unix.O_DIRECTORY)
	return dir, name, err
}

func unwrap(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// Mode gives the file type bits (unix.S_IFMT) of a descriptor.
func Mode(fd int) (uint32, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, err
	}
	return st.Mode & unix.S_IFMT, nil
}
