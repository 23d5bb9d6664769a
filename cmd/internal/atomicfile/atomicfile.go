// Package atomicfile writes a file so that a reader, a crash or a full disk leaves
// either the whole old content or the whole new one. It does not lock: two writers
// that must not lose each other's change take a lock of their own first.
package atomicfile

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Write replaces path by data with the mode perm (not narrowed by the umask). The
// data reach the disk before the name does, and the name before Write returns. A
// symbolic link at path is replaced, never followed. On an error the old file is
// untouched and nothing is left beside it; the one exception is a directory that
// cannot be synced after the rename: then the new file is there, whole, and a power
// cut may bring the old one back. It makes no directories.
func Write(path string, data []byte, perm fs.FileMode) error {
	dir := filepath.Dir(path)
	// One descriptor for the directory: the temporary file, the rename and the sync
	// then act on the same directory whatever happens to its name meanwhile.
	root, err := os.OpenRoot(dir)
	if err != nil {
		return Explain("write", path, err)
	}
	defer root.Close()
	return writeIn(root, filepath.Base(path), path, data, perm)
}

// WriteIn is Write for a name below root, in a directory that somebody else can write: no link
// in it leads out of root.
func WriteIn(root *os.Root, name string, data []byte, perm fs.FileMode) error {
	return writeIn(root, name, filepath.Join(root.Name(), name), data, perm)
}

// writeIn replaces name below root; path names it in errors.
func writeIn(root *os.Root, name, path string, data []byte, perm fs.FileMode) (err error) {
	tmp := filepath.Join(filepath.Dir(name), "."+filepath.Base(name)+"."+rand.Text())
	f, err := root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return Explain("write", path, err)
	}
	defer func() {
		if err != nil {
			f.Close()
			root.Remove(tmp)
		}
	}()
	if _, err = f.Write(data); err != nil {
		return Explain("write", path, err)
	}
	if err = f.Chmod(perm.Perm()); err != nil {
		return Explain("write", path, err)
	}
	// Sync and Close report what Write did not: a full disk on delayed allocation, NFS quota.
	if err = f.Sync(); err != nil {
		return Explain("write", path, err)
	}
	if err = f.Close(); err != nil {
		return Explain("write", path, err)
	}
	if err = root.Rename(tmp, name); err != nil {
		return Explain("write", path, err)
	}
	return syncDir(root, filepath.Dir(name), path)
}

func syncDir(root *os.Root, dir, path string) error {
	// In a directory that somebody else can write its name may be a pipe by now, which would wait.
	d, err := root.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return Explain("write", path, err)
	}
	defer d.Close()
	// Some network and FUSE file systems refuse to sync a directory; the rename itself took place.
	if err := d.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOTSUP) {
		return Explain("write", path, err)
	}
	return nil
}

// Error is a write that did not happen, with what a person can do about it.
type Error struct {
	Op     string
	Path   string
	Remedy string // empty where there is nothing better to say than the cause
	Err    error
}

func (e *Error) Error() string {
	s := fmt.Sprintf("%s %s: %v; the old state is kept", e.Op, e.Path, e.Err)
	if e.Remedy != "" {
		s += "; " + e.Remedy
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// Explain gives an error of op on path its remedy. It is for the other changes of
// state (making a directory, removing a file), so that all of them read alike.
func Explain(op, path string, err error) error {
	cause := err
	var pe *fs.PathError
	var le *os.LinkError
	switch {
	case errors.As(err, &pe):
		cause = pe.Err
	case errors.As(err, &le):
		cause = le.Err
	}
	e := &Error{Op: op, Path: path, Err: cause}
	for _, r := range remedies {
		if errors.Is(err, r.is) {
			e.Remedy = r.text
		}
	}
	return e
}

var remedies = []struct {
	is   error
	text string
}{
	{syscall.ENOSPC, "free space on that file system and try again"},
	{syscall.EDQUOT, "free space within your quota and try again"},
	{syscall.EFBIG, "raise the file size limit (ulimit -f) and try again"},
	{syscall.EROFS, "remount that file system writable, or choose another directory with --root"},
	{syscall.EACCES, "check who owns the directory (ls -ld) and that you may write to it"},
	{syscall.EPERM, "check who owns the directory (ls -ld, lsattr -d) and that you may write to it"},
	{syscall.ENOENT, "make its directory first"},
}
