// Resolution of a path by the kernel: open without access, then ask for its name.

package acp

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// openPath opens a path for its location alone. Magic links (/proc/PID/root) are
// refused: where they lead depends on who asks.
func openPath(path string) (int, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_MAGICLINKS}
	for {
		fd, err := unix.Openat2(unix.AT_FDCWD, path, &how)
		switch {
		case err == nil:
			return fd, nil
		case errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN):
			continue
		case errors.Is(err, unix.ENOENT):
			return -1, errNotExist
		}
		return -1, err
	}
}

func resolve(path string) (resolved, error) {
	fd, err := openPath(path)
	if err != nil {
		return resolved{}, err
	}
	defer unix.Close(fd)
	return located(fd)
}

// located names the file behind an O_PATH descriptor.
func located(fd int) (resolved, error) {
	var st, now unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return resolved{}, err
	}
	buf := make([]byte, unix.PathMax+1)
	n, err := unix.Readlink("/proc/self/fd/"+strconv.Itoa(fd), buf)
	if err != nil {
		return resolved{}, fmt.Errorf("its location cannot be read: %w", err)
	}
	name := string(buf[:n])
	// A removed file's name ends in " (deleted)", which another file may be called.
	if n > unix.PathMax || !filepath.IsAbs(name) || unix.Lstat(name, &now) != nil || now.Dev != st.Dev || now.Ino != st.Ino {
		return resolved{}, errors.New("it was moved or removed while it was looked at: try again")
	}
	kind := st.Mode & unix.S_IFMT
	return resolved{path: name, dir: kind == unix.S_IFDIR, regular: kind == unix.S_IFREG}, nil
}

// resolveForNew resolves the directory of a file that does not exist yet.
func resolveForNew(dir, name string) (resolved, error) {
	fd, err := openPath(dir)
	if err != nil {
		return resolved{}, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	switch err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK:
		return resolved{}, errors.New("is a link that leads nowhere")
	case err == nil:
		return resolved{}, errors.New("it appeared while it was looked at: try again")
	case !errors.Is(err, unix.ENOENT):
		return resolved{}, err
	}
	p, err := located(fd)
	if err == nil && !p.dir {
		err = errors.New("its parent is not a directory")
	}
	return p, err
}
