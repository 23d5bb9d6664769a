// What the guard does to names on the host. Each goes by the descriptor of the folder that the
// name lies in, reached without a link: somebody whom the guard does not halt, such as another
// agent that shares the folder, could put a link on the way meanwhile.

package sealguard

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox/gitseal"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// place is the host's tree, from its root.
type place struct{ root int }

// in does something to a name in its folder.
func (p place) in(op, path string, do func(dir int, name string) error) error {
	dir, name, err := pathfd.Parent(p.root, path)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	if err := do(dir, name); err != nil {
		return &os.PathError{Op: op, Path: path, Err: err}
	}
	return nil
}

// stat looks at the name itself.
func (p place) stat(path string) (st unix.Stat_t, err error) {
	err = p.in("lstat", path, func(dir int, name string) error { return unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) })
	return st, err
}

// is reports whether that very inode stands there.
func (p place) is(path string, id inode) bool {
	st, err := p.stat(path)
	return err == nil && inode{st.Dev, st.Ino} == id
}

func (p place) mkdir(path string, mode uint32) error {
	return p.in("mkdir", path, func(dir int, name string) error { return unix.Mkdirat(dir, name, mode) })
}

func (p place) remove(path string) error {
	return p.in("unlink", path, func(dir int, name string) error { return unix.Unlinkat(dir, name, 0) })
}

// rename moves from to to, which may be in different folders.
func (p place) rename(from, to string, flags uint) error {
	return p.in("rename", from, func(fromDir int, fromName string) error {
		return p.in("rename", to, func(toDir int, toName string) error { return unix.Renameat2(fromDir, fromName, toDir, toName, flags) })
	})
}

// open opens the name, which must be no link.
func (p place) open(path string, flags int, mode os.FileMode) (f *os.File, err error) {
	err = p.in("open", path, func(dir int, name string) error {
		//nolint:forbidigo // one name in an open directory, and no link
		fd, err := unix.Openat(dir, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, uint32(mode.Perm()))
		if err == nil {
			f = os.NewFile(uintptr(fd), path)
		}
		return err
	})
	return f, err
}

// read reads a regular file of at most most bytes.
func (p place) read(path string, most int) (string, error) {
	at, err := pathfd.Absolute(p.root, path, 0)
	if err != nil {
		return "", err
	}
	return readAt(at, path, most)
}

// write puts a file there by rename.
func (p place) write(path, content string, mode os.FileMode) error {
	return p.in("write", path, func(dir int, name string) error {
		tmp := name + ".agentconnect-new"
		_ = unix.Unlinkat(dir, tmp, 0)
		//nolint:forbidigo // one new name in an open directory: O_EXCL follows no link
		fd, err := unix.Openat(dir, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, uint32(mode.Perm()))
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), tmp)
		_, err = f.WriteString(content)
		err = errors.Join(err, f.Chmod(mode), f.Close())
		if err == nil {
			err = unix.Renameat(dir, tmp, dir, name)
		}
		if err != nil {
			_ = unix.Unlinkat(dir, tmp, 0)
		}
		return err
	})
}

// removeEmpty removes an empty folder, in which git finds nothing to obey, and reports whether
// there was one.
func (p place) removeEmpty(path string) bool {
	dir, name, err := pathfd.Parent(p.root, path)
	if err != nil {
		return false
	}
	defer unix.Close(dir)
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR) == nil
}

// setAside renames what stands there to a name that git does not obey, beside it.
func (p place) setAside(path string) (aside string, err error) { return gitseal.SetAside(p.root, path) }

// locked reports whether a lock of git's that somebody may still hold stands there, and
// whether it is an empty file.
func (p place) locked(path string) (is, empty bool) {
	st, err := p.stat(path)
	if err != nil || time.Since(time.Unix(st.Mtim.Unix())) >= staleLock {
		return false, false
	}
	return true, st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == 0
}

// written reports whether somebody has the file open for writing. What cannot be told counts as so.
func (p place) written(path string) bool {
	f, err := p.open(path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return false // gone
	}
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK) // given back with the descriptor
	return err != nil
}
