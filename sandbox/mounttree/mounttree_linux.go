// Package mounttree carries the mounts of a plan out: it builds the agent's view by
// descriptor on a tmpfs of its own and then compares it with the plan. It runs in the
// launcher, in a mount namespace that was made for it; it decides nothing.
//
// bubblewrap binds by path and makes missing mount points with all its rights, so that a
// link which an agent left behind leads it out of the agent's home (CVE-2026-87766).
// Here a source is opened without following any link, a mount point is reached from the
// tree's own root without following any link, and what was attached is compared with
// what was opened.
package mounttree

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// treeSize bounds the tmpfs that holds mount points, links and generated files, in bytes.
const treeSize = 16 << 20

// coversDir holds the empty inodes that covers are clones of, while the tree is built.
const coversDir = ".covers"

// StepError says which step of which mount went wrong.
type StepError struct {
	Step string
	Path string
	Err  error
	// Changed: the host's tree changed while the view was built; a plan compiled anew
	// may succeed.
	Changed bool
}

func (e *StepError) Error() string { return e.Step + " " + e.Path + ": " + e.Err.Error() }
func (e *StepError) Unwrap() error { return e.Err }

// changed errors mean that a path is no longer what the plan saw.
func changed(err error) bool {
	for _, e := range []error{unix.ENOENT, unix.ELOOP, unix.ENOTDIR, unix.EAGAIN, unix.EXDEV, unix.EISDIR, unix.EEXIST, unix.EBUSY, unix.ESTALE, unix.ENOTEMPTY, errKind, errElsewhere} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

var (
	errKind      = errors.New("it is no longer what it was when the plan was made")
	errElsewhere = errors.New("something else is attached there")
)

func step(name, path string, err error) error {
	if err == nil {
		return nil
	}
	var pe *fs.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	return &StepError{Step: name, Path: path, Err: err, Changed: changed(err)}
}

// builder holds the descriptors of one build.
type builder struct {
	at   string
	root int // the host's /
	host int // what at was before the tree covered it
	tree int
	ids  []inode // of each mount of the plan, to compare
}

type inode struct {
	dev uint64
	ino uint64
}

// Build attaches a tmpfs at the directory at and lays the plan's view out on it. The
// caller is alone in its mount namespace, whose propagation is private. Sources below
// at are taken from what was there before.
func Build(plan *sandbox.Plan, at string) error {
	b := &builder{at: at, root: -1, host: -1, tree: -1}
	defer func() {
		for _, fd := range []int{b.root, b.host, b.tree} {
			if fd >= 0 {
				unix.Close(fd)
			}
		}
	}()
	var err error
	if b.root, err = pathfd.Open("/"); err != nil {
		return step("open", "/", err)
	}
	if b.host, err = pathfd.Open(at); err != nil {
		return step("open", at, err)
	}
	fs, err := tmpfs(0o755, treeSize)
	if err != nil {
		return step("tmpfs", at, err)
	}
	err = unix.MoveMount(fs, "", b.host, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
	if err != nil {
		unix.Close(fs)
		return step("attach", at, err)
	}
	b.tree = fs // the mount's root, now attached
	if err := unix.Mkdirat(b.tree, coversDir, 0o700); err != nil {
		return step("mkdir", coversDir, err)
	}
	b.ids = make([]inode, len(plan.Mounts))
	covers := 0
	for i := range plan.Mounts {
		m := &plan.Mounts[i]
		switch m.Op {
		case sandbox.OpBind:
			err = b.bind(i, m)
		case sandbox.OpTmpfs:
			err = b.tmpfs(i, m)
		case sandbox.OpCover:
			covers++
			err = b.cover(i, m, strconv.Itoa(covers))
		case sandbox.OpDir:
			err = b.dir(m)
		case sandbox.OpLink:
			err = b.link(m)
		case sandbox.OpFile:
			err = b.file(m)
		default:
			err = fmt.Errorf("unknown operation %q", m.Op)
		}
		if err != nil {
			return err
		}
	}
	if err := b.dropCovers(covers); err != nil {
		return err
	}
	for _, m := range plan.Mounts {
		if m.Op == sandbox.OpTmpfs && m.Access != sandbox.ReadWrite {
			if err := b.seal(m.Target); err != nil {
				return err
			}
		}
	}
	if err := unix.MountSetattr(b.tree, "", unix.AT_EMPTY_PATH, readOnly); err != nil {
		return step("read-only", "/", err)
	}
	return b.verify(plan)
}

var (
	readOnly  = &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	readWrite = &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
)

// tmpfs makes a detached tmpfs.
func tmpfs(mode uint32, size int64) (int, error) {
	ctx, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(ctx)
	if err := unix.FsconfigSetString(ctx, "mode", strconv.FormatUint(uint64(mode), 8)); err != nil {
		return -1, err
	}
	if err := unix.FsconfigSetString(ctx, "size", strconv.FormatInt(size, 10)); err != nil {
		return -1, err
	}
	if err := unix.FsconfigCreate(ctx); err != nil {
		return -1, err
	}
	return unix.Fsmount(ctx, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
}

// source opens a host path without links, also one that the tree covers by now.
func (b *builder) source(src string) (int, error) {
	if rest, ok := strings.CutPrefix(src, b.at); ok && (rest == "" || rest[0] == '/') {
		return pathfd.Beneath(b.host, strings.TrimPrefix(rest, "/"), 0)
	}
	return pathfd.Absolute(b.root, src, 0)
}

func (b *builder) bind(i int, m *sandbox.Mount) error {
	dst, err := b.point(m)
	if err != nil {
		return step("mount point", m.Target, err)
	}
	defer unix.Close(dst)
	src := dst // a pin is the directory bound onto itself, whatever its name is now
	if !m.Pinned {
		if src, err = b.source(m.Source); err != nil {
			return step("open", m.Source, err)
		}
		defer unix.Close(src)
	}
	if b.ids[i], err = identify(src, m.Kind); err != nil {
		return step("open", m.Source, err)
	}
	clone, err := unix.OpenTree(src, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return step("clone", m.Source, err)
	}
	defer unix.Close(clone)
	attr := readOnly
	if m.Access == sandbox.ReadWrite {
		attr = readWrite
	}
	if err := unix.MountSetattr(clone, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, attr); err != nil {
		return step("mount flags", m.Source, err)
	}
	return step("attach", m.Target, unix.MoveMount(clone, "", dst, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH))
}

func (b *builder) tmpfs(i int, m *sandbox.Mount) error {
	dst, err := b.point(m)
	if err != nil {
		return step("mount point", m.Target, err)
	}
	defer unix.Close(dst)
	size := m.Size
	if size == 0 {
		size = treeSize
	}
	fs, err := tmpfs(m.Mode, size)
	if err != nil {
		return step("tmpfs", m.Target, err)
	}
	defer unix.Close(fs)
	if b.ids[i], err = identify(fs, sandbox.KindDir); err != nil {
		return step("tmpfs", m.Target, err)
	}
	return step("attach", m.Target, unix.MoveMount(fs, "", dst, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH))
}

// cover clones an empty inode of the tree's own tmpfs over the target.
func (b *builder) cover(i int, m *sandbox.Mount, name string) error {
	name = coversDir + "/" + name
	if m.Kind == sandbox.KindDir {
		if err := unix.Mkdirat(b.tree, name, 0o555); err != nil {
			return step("cover", m.Target, err)
		}
	} else if err := b.write(b.tree, name, m.Content, 0o644); err != nil {
		return step("cover", m.Target, err)
	}
	src, err := pathfd.Beneath(b.tree, name, 0)
	if err != nil {
		return step("cover", m.Target, err)
	}
	defer unix.Close(src)
	if b.ids[i], err = identify(src, m.Kind); err != nil {
		return step("cover", m.Target, err)
	}
	dst, err := b.point(m)
	if err != nil {
		return step("mount point", m.Target, err)
	}
	defer unix.Close(dst)
	clone, err := unix.OpenTree(src, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return step("cover", m.Target, err)
	}
	defer unix.Close(clone)
	if err := unix.MountSetattr(clone, "", unix.AT_EMPTY_PATH, readOnly); err != nil {
		return step("cover", m.Target, err)
	}
	return step("attach", m.Target, unix.MoveMount(clone, "", dst, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH))
}

// dropCovers takes the names of the covers away; the clones keep the inodes.
func (b *builder) dropCovers(n int) error {
	for i := 1; i <= n; i++ {
		name := coversDir + "/" + strconv.Itoa(i)
		err := unix.Unlinkat(b.tree, name, 0)
		if err == unix.EISDIR {
			err = unix.Unlinkat(b.tree, name, unix.AT_REMOVEDIR)
		}
		if err != nil {
			return step("cover", name, err)
		}
	}
	return step("cover", coversDir, unix.Unlinkat(b.tree, coversDir, unix.AT_REMOVEDIR))
}

func (b *builder) seal(target string) error {
	fd, err := pathfd.Beneath(b.tree, rel(target), 0)
	if err != nil {
		return step("read-only", target, err)
	}
	defer unix.Close(fd)
	return step("read-only", target, unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, readOnly))
}

func (b *builder) dir(m *sandbox.Mount) error {
	fd, err := b.point(m)
	if err != nil {
		return step("mkdir", m.Target, err)
	}
	defer unix.Close(fd)
	// The mode of mkdir is cut by the umask; an O_PATH descriptor is changed by its name in /proc.
	return step("mkdir", m.Target, unix.Chmod("/proc/self/fd/"+strconv.Itoa(fd), m.Mode))
}

func (b *builder) link(m *sandbox.Mount) error {
	parent, err := b.parents(m)
	if err != nil {
		return step("mkdir", m.Target, err)
	}
	defer unix.Close(parent)
	return step("link", m.Target, unix.Symlinkat(m.Source, parent, path.Base(m.Target)))
}

func (b *builder) file(m *sandbox.Mount) error {
	parent, err := b.parents(m)
	if err != nil {
		return step("mkdir", m.Target, err)
	}
	defer unix.Close(parent)
	return step("write", m.Target, b.write(parent, path.Base(m.Target), m.Content, m.Mode))
}

func (b *builder) write(dir int, name, content string, mode uint32) error {
	fd, err := create(dir, name, mode)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	_, err = f.WriteString(content)
	return err
}

// identify checks the kind of what a descriptor is and says which inode.
func identify(fd int, kind sandbox.Kind) (inode, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return inode{}, err
	}
	want := map[sandbox.Kind]uint32{sandbox.KindDir: unix.S_IFDIR, sandbox.KindFile: unix.S_IFREG}[kind]
	if st.Mode&unix.S_IFMT != want {
		return inode{}, errKind
	}
	return inode{dev: st.Dev, ino: st.Ino}, nil
}

func rel(target string) string { return strings.TrimPrefix(target, "/") }

// point opens the mount point of m in the tree, and makes it where the plan allows.
func (b *builder) point(m *sandbox.Mount) (int, error) {
	fd, err := pathfd.Beneath(b.tree, rel(m.Target), 0)
	if err == nil {
		if b.suits(fd, m) {
			return fd, nil
		}
		unix.Close(fd)
		err = errKind
	}
	if !m.Create {
		return -1, err
	}
	parent, err := b.parents(m)
	if err != nil {
		return -1, err
	}
	defer unix.Close(parent)
	return enter(parent, path.Base(m.Target), m.Kind)
}

// suits reports whether a found mount point has the kind of what goes there, or is a
// socket to cover. On the host a link may stand there, which a file is mounted over.
func (b *builder) suits(fd int, m *sandbox.Mount) bool {
	mode, err := pathfd.Mode(fd)
	return err == nil && (mode == unix.S_IFDIR) == (m.Kind == sandbox.KindDir) && (mode != unix.S_IFLNK || !m.Create)
}

// parents opens the directory that m.Target lies in, making what misses on the way.
func (b *builder) parents(m *sandbox.Mount) (int, error) {
	dir := rel(path.Dir(m.Target))
	if fd, err := pathfd.Beneath(b.tree, dir, unix.O_DIRECTORY); err == nil || !m.Create {
		return fd, err
	}
	at, err := unix.Dup(b.tree)
	if err != nil {
		return -1, err
	}
	for name := range strings.SplitSeq(dir, "/") {
		next, err := enter(at, name, sandbox.KindDir)
		unix.Close(at)
		if err != nil {
			return -1, err
		}
		at = next
	}
	return at, nil
}

// enter opens name in the directory dir as what kind says, and makes it where it
// misses. Something else of that name in an agent's own directory is moved aside: the
// agent cannot keep the operator's grant from being mounted.
func enter(dir int, name string, kind sandbox.Kind) (int, error) {
	for i := 0; ; i++ {
		fd, err := pathfd.Beneath(dir, name, 0)
		if err == nil {
			mode, merr := pathfd.Mode(fd)
			if merr != nil {
				unix.Close(fd)
				return -1, merr
			}
			if (kind == sandbox.KindDir) == (mode == unix.S_IFDIR) {
				return fd, nil
			}
			unix.Close(fd)
			err = unix.ELOOP
		}
		switch {
		case i == 16:
			return -1, err
		case errors.Is(err, unix.ENOENT) && kind == sandbox.KindDir:
			err = unix.Mkdirat(dir, name, 0o755)
		case errors.Is(err, unix.ENOENT):
			var f int
			if f, err = create(dir, name, 0o444); err == nil {
				unix.Close(f)
			}
		case errors.Is(err, unix.EACCES):
			// The agent took the rights on its own directory away; they are given back.
			err = unix.Chmod("/proc/self/fd/"+strconv.Itoa(dir), 0o700)
		case errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR):
			aside := name + ".moved-aside-" + strconv.Itoa(os.Getpid()) + "-" + strconv.Itoa(i)
			err = unix.Renameat2(dir, name, dir, aside, unix.RENAME_NOREPLACE)
		}
		if err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOENT) {
			return -1, err
		}
	}
}

// create makes the file name, which must not exist, in the directory dir.
func create(dir int, name string, mode uint32) (int, error) {
	//nolint:forbidigo // one new name in an open directory: O_EXCL follows no link
	return unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
}
