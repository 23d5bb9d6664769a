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
func OwnCgroup(at string) error {
	root, err := pathfd.Open("/")
	if err != nil {
		return err
	}
	defer unix.Close(root)
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return err
	}
	group, ok := unified(string(b))
	if !ok {
		return nil
	}
	src := -1
	for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		// A name in the file system of control groups is never a link.
		if src, err = pathfd.Absolute(root, filepath.Join(hierarchy, group), unix.O_DIRECTORY); err != nil {
			continue
		}
		var st unix.Statfs_t
		if err = unix.Fstatfs(src, &st); err == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			break
		}
		unix.Close(src)
		src = -1
	}
	if src < 0 {
		return nil
	}
	defer unix.Close(src)
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
