package mounttree

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// ownCgroupFlags: a kernel file system holds nothing to execute.
var ownCgroupFlags = &unix.MountAttr{Attr_set: readOnly.Attr_set | unix.MOUNT_ATTR_NOEXEC}

// OwnCgroup shows the control group that the caller is in, read-only, at
// [sandbox.CgroupPath] of the tree that Build attached at the directory at. Of the hierarchy
// only what lies below that group is to be seen. A host without the unified hierarchy, or a
// view without that directory, has nothing to show and is left as it is.
//
// With below the caller then goes into a group below that one, [sandbox.CgroupBelow]: for an
// agent that may make namespaces. In a control group namespace of its own it can mount the
// hierarchy from the group that it is in, and write there as the user: its own limits, too,
// from a second namespace further in, whose root is another group (nsdelegate keeps only a
// namespace's own root from it; tried on 6.1). Of the group above nothing can be mounted.
func OwnCgroup(at string, below bool) error {
	src, err := ownGroup()
	if err != nil || src < 0 {
		return err
	}
	defer unix.Close(src)
	if err := showGroup(src, at); err != nil {
		return err
	}
	if below {
		return enterBelow(src)
	}
	return nil
}

// maxBelow bounds the groups that an agent can make, which live in the kernel's memory.
const maxBelow = "256"

// enterBelow makes the group below and moves this process there.
func enterBelow(group int) error {
	if err := writeIn(group, "cgroup.max.descendants", maxBelow); err != nil {
		return err
	}
	if err := unix.Mkdirat(group, sandbox.CgroupBelow, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return &os.PathError{Op: "mkdir", Path: sandbox.CgroupBelow, Err: err}
	}
	return writeIn(group, sandbox.CgroupBelow+"/cgroup.procs", "0") // the writer
}

func writeIn(group int, name, value string) error {
	fd, err := unix.Openat(group, name, unix.O_WRONLY|unix.O_CLOEXEC, 0) //nolint:forbidigo // a name in the file system of control groups is never a link
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(value)); err != nil {
		return &os.PathError{Op: "write", Path: name, Err: err}
	}
	return nil
}

// ownGroup opens the directory of the caller's group; -1 without the unified hierarchy.
func ownGroup() (int, error) {
	root, err := pathfd.Open("/")
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return -1, err
	}
	group, ok := unified(string(b))
	if !ok {
		return -1, nil
	}
	for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		// A name in the file system of control groups is never a link.
		src, err := pathfd.Absolute(root, filepath.Join(hierarchy, group), unix.O_DIRECTORY)
		if err != nil {
			continue
		}
		var st unix.Statfs_t
		if err := unix.Fstatfs(src, &st); err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return src, nil
		}
		unix.Close(src)
	}
	return -1, nil
}

// showGroup attaches the group of the descriptor to the tree.
func showGroup(src int, at string) error {
	tree, err := pathfd.Open(at)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	dst, err := pathfd.Beneath(tree, rel(sandbox.CgroupPath), unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	clone, err := unix.OpenTree(src, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(clone)
	if err := unix.MountSetattr(clone, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, ownCgroupFlags); err != nil {
		return err
	}
	return unix.MoveMount(clone, "", dst, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// unified finds the group of the unified hierarchy in the text of /proc/PID/cgroup.
func unified(text string) (string, bool) {
	for line := range strings.Lines(text) {
		if group, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::/"); ok {
			return group, true
		}
	}
	return "", false
}
