// Package cgroup reads, and ends, what runs in a control group of version 2, through its
// files: no bus and no manager is needed, so it works in a stop path. It makes no group
// and sets no limit.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// mounts are where the unified hierarchy may be: in a hybrid set-up it has a place of its own.
var mounts = []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}

// Group is one control group.
type Group struct {
	// Path is its directory in the file system, Name its path below the hierarchy's root.
	Path, Name string

	dir int // opened; 0: none
}

// Open gives the group with its directory open until done is called: for one who reads many of
// its files, whose way is a long one. The group given is as good where that is not possible.
func (g Group) Open() (open Group, done func()) {
	fd, err := again(func() (int, error) { return unix.Open(g.Path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0) }) //nolint:forbidigo // the kernel's own file system, without links
	if err != nil {
		return g, func() {}
	}
	g.dir = fd
	return g, func() { unix.Close(fd) }
}

// Of finds the group of a process, in the unified hierarchy.
func Of(pid int) (Group, error) {
	b, err := read(unix.AT_FDCWD, "/proc/"+strconv.Itoa(pid)+"/cgroup")
	if err != nil {
		return Group{}, err
	}
	for line := range strings.Lines(string(b)) {
		name, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::")
		if !ok {
			continue
		}
		return Group{Path: filepath.Join(root(), name), Name: name}, nil
	}
	return Group{}, fmt.Errorf("process %d: no group in the unified hierarchy", pid)
}

func root() string {
	for _, m := range mounts {
		var st unix.Statfs_t
		if unix.Statfs(m, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			return m
		}
	}
	return mounts[0]
}

// Unit is the last part of the group's name: a unit's.
func (g Group) Unit() string { return filepath.Base(g.Name) }

// Parent is the group above.
func (g Group) Parent() Group { return Group{Path: filepath.Dir(g.Path), Name: filepath.Dir(g.Name)} }

// Child is the group of that name below.
func (g Group) Child(name string) Group {
	return Group{Path: filepath.Join(g.Path, name), Name: filepath.Join(g.Name, name)}
}

// Value reads a file of the group, trimmed; ok is false where the group has none (its
// controller is not there).
func (g Group) Value(name string) (value string, ok bool) {
	dir, path := unix.AT_FDCWD, g.Path+"/"+name
	if g.dir > 0 {
		dir, path = g.dir, name
	}
	b, err := read(dir, path)
	if err != nil {
		return "", false
	}
	return strings.TrimSpace(string(b)), true
}

// read gives a small file of the kernel's, whose size says nothing. Such a file never blocks: what
// os.ReadFile does besides (asking for its size, offering it to the poller) takes longer than
// this, and a status reads a dozen of them for each agent.
func read(dir int, path string) ([]byte, error) {
	fd, err := again(func() (int, error) { return unix.Openat(dir, path, unix.O_RDONLY|unix.O_CLOEXEC, 0) }) //nolint:forbidigo // the kernel's own file system, without links
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	b := make([]byte, 0, 1<<10)
	for {
		b = slices.Grow(b, 512)
		n, err := again(func() (int, error) { return unix.Read(fd, b[len(b):cap(b)]) })
		if err != nil {
			return nil, &fs.PathError{Op: "read", Path: path, Err: err}
		}
		if n == 0 {
			return b, nil
		}
		b = b[:len(b)+n]
	}
}

// again repeats a call that a signal interrupted.
func again(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// Count reads a file with one number, or "max", which is not a number: ok is false.
func (g Group) Count(name string) (n uint64, ok bool) {
	v, ok := g.Value(name)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(v, 10, 64)
	return n, err == nil
}

// Events reads a file of "key number" lines, such as memory.events or cpu.stat.
func (g Group) Events(name string) map[string]uint64 {
	v, ok := g.Value(name)
	if !ok {
		return nil
	}
	out := map[string]uint64{}
	for line := range strings.Lines(v) {
		key, number, _ := strings.Cut(line, " ")
		if n, err := strconv.ParseUint(strings.TrimSpace(number), 10, 64); err == nil {
			out[key] = n
		}
	}
	return out
}

// Processes lists the processes of the group and of those below it.
func (g Group) Processes() ([]int, error) {
	var out []int
	err := filepath.WalkDir(g.Path, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
				return nil // it went away meanwhile
			}
			return err
		}
		if !d.IsDir() {
			return nil
		}
		b, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		if err != nil {
			return nil //nolint:nilerr // a group that ended while it was looked at has no process
		}
		for f := range strings.FieldsSeq(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 1 {
				out = append(out, pid)
			}
		}
		return nil
	})
	return out, err
}

// Kill ends every process of the group with SIGKILL (cgroup.kill, Linux 5.14; before, one
// by one until none is left).
func (g Group) Kill() error {
	f, err := os.OpenFile(filepath.Join(g.Path, "cgroup.kill"), os.O_WRONLY, 0)
	if err == nil {
		defer f.Close()
		_, err = f.WriteString("1")
		return err
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, err := os.Stat(g.Path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for range 100 {
		pids, err := g.Processes()
		if err != nil || len(pids) == 0 {
			return err
		}
		g.signal(pids, unix.SIGKILL)
	}
	return fmt.Errorf("%s: processes keep appearing", g.Name)
}

// Signal sends a signal to every process of the group, each through a descriptor, which
// is held while the process is looked for in the group again: a number used anew is not hit.
func (g Group) Signal(sig unix.Signal) error {
	pids, err := g.Processes()
	if err != nil {
		return err
	}
	g.signal(pids, sig)
	return nil
}

func (g Group) signal(pids []int, sig unix.Signal) {
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // it is gone
		}
		if now, err := Of(pid); err == nil && (now.Name == g.Name || strings.HasPrefix(now.Name, g.Name+"/")) {
			_ = unix.PidfdSendSignal(fd, sig, nil, 0) // it may end at any moment
		}
		unix.Close(fd)
	}
}

// Populated reports whether anything runs in the group.
func (g Group) Populated() bool { return g.Events("cgroup.events")["populated"] == 1 }

// freezeWait bounds how long the kernel may take to halt a group.
const freezeWait = 2 * time.Second

// Freeze halts every process of the group, and returns when all stand still. already: the
// group was frozen before, by somebody whose matter it is to let it go on.
func (g Group) Freeze() (already bool, err error) {
	if v, ok := g.Value("cgroup.freeze"); ok && v == "1" {
		return true, g.untilFrozen()
	}
	if err := g.write("cgroup.freeze", "1"); err != nil {
		return false, err
	}
	return false, g.untilFrozen()
}

// Thaw lets the group go on.
func (g Group) Thaw() error { return g.write("cgroup.freeze", "0") }

func (g Group) write(name, value string) error {
	f, err := os.OpenFile(filepath.Join(g.Path, name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(value)
	return err
}

// untilFrozen waits for the kernel's word in cgroup.events, which tells of its changes.
func (g Group) untilFrozen() error {
	f, err := os.Open(filepath.Join(g.Path, "cgroup.events"))
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 4096)
	for end := time.Now().Add(freezeWait); ; {
		n, err := f.ReadAt(buf, 0)
		if err != nil && n == 0 {
			return err
		}
		if strings.Contains(string(buf[:n]), "frozen 1") {
			return nil
		}
		left := time.Until(end)
		if left <= 0 {
			return fmt.Errorf("%s: not frozen within %v", g.Name, freezeWait)
		}
		poll := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLPRI}}
		if _, err := unix.Poll(poll, int(left.Milliseconds())+1); err != nil && err != unix.EINTR {
			return err
		}
	}
}
