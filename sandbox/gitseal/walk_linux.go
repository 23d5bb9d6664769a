// The walk through the writable folders: breadth first, some threads at once, bounded in
// time, names and depth. It follows no link. Of a folder it needs the names and their
// types alone, so it reads directories and looks at nothing else.

package gitseal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// walked is what a walk came across.
type walked struct {
	// dotgit are the paths named ".git", of whatever type.
	dotgit []string
	// gitdirs are other folders that look like a git directory.
	gitdirs []string
	// plain are folders with a .git and without any of TrustedDirs.
	plain map[string]bool
	// unread counts folders that could not be read, shut are those whose permissions say so; left
	// says which bound ended the walk.
	unread int
	shut   []string
	left   string
	deep   int // folders beyond the depth
}

// folder is one to be read.
type folder struct {
	path  string
	depth int
	root  string
}

type walker struct {
	limits Limits
	end    time.Time

	mu      sync.Mutex
	some    sync.Cond
	queue   []folder
	head    int
	busy    int
	entries int
	stop    bool
	out     walked
}

// walk reads everything below roots. It returns when all was seen or a bound was met; a
// file system that does not answer is left behind then.
func walk(roots []string, limits Limits) walked {
	w := &walker{limits: limits, end: time.Now().Add(limits.Time), out: walked{plain: map[string]bool{}}}
	w.some.L = &w.mu
	for _, r := range roots {
		w.queue = append(w.queue, folder{path: r, root: r})
	}
	over := make(chan struct{})
	var threads sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), 4) {
		threads.Add(1)
		go func() {
			defer threads.Done()
			w.run()
		}()
	}
	go func() { threads.Wait(); close(over) }()
	timer := time.NewTimer(limits.Time)
	defer timer.Stop()
	select {
	case <-over:
	case <-timer.C:
		w.mu.Lock()
		w.halt("time")
		w.mu.Unlock()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.out // a thread that still waits for a file system adds to what nobody reads
	out.dotgit, out.gitdirs, out.plain, out.shut = slices.Clone(out.dotgit), slices.Clone(out.gitdirs), maps.Clone(out.plain), slices.Clone(out.shut)
	slices.Sort(out.dotgit)
	slices.Sort(out.gitdirs)
	slices.Sort(out.shut)
	return out
}

// halt ends the walk. The lock is held.
func (w *walker) halt(why string) {
	if !w.stop {
		w.stop, w.out.left = true, why
	}
	w.some.Broadcast()
}

func (w *walker) run() {
	buf := make([]byte, 64<<10)
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		for w.head == len(w.queue) && w.busy > 0 && !w.stop {
			w.some.Wait()
		}
		if w.head == len(w.queue) || w.stop {
			w.some.Broadcast()
			return
		}
		f := w.queue[w.head]
		w.queue[w.head] = folder{}
		if w.head++; w.head > 4096 {
			w.queue = slices.Delete(w.queue, 0, w.head)
			w.head = 0
		}
		w.busy++
		w.mu.Unlock()
		l := read(f, buf, w.limits.Entries)
		w.mu.Lock()
		w.busy--
		if w.stop {
			continue
		}
		w.take(f, l)
	}
}

// listing is what a folder holds, as far as it matters here.
type listing struct {
	dirs    []string
	entries int
	git     bool // a .git
	gitdir  bool // it looks like a git directory itself
	trusted bool // one of TrustedDirs
	failed  bool
	shut    bool
}

// take adds what a folder held. The lock is held.
func (w *walker) take(f folder, l listing) {
	switch {
	case l.shut:
		w.out.shut = append(w.out.shut, f.path)
		return
	case l.failed:
		w.out.unread++
		return
	}
	w.entries += l.entries
	if l.git {
		w.out.dotgit = append(w.out.dotgit, f.path+"/.git")
		if !l.trusted && l.entries <= w.limits.Entries { // read to its end
			w.out.plain[f.path] = true
		}
	}
	if l.gitdir {
		w.out.gitdirs = append(w.out.gitdirs, f.path)
	}
	switch {
	case w.entries > w.limits.Entries:
		w.halt("names")
		return
	case time.Now().After(w.end):
		w.halt("time")
		return
	case len(l.dirs) > 0 && f.depth >= w.limits.Depth:
		w.out.deep += len(l.dirs)
		return
	}
	for _, name := range l.dirs {
		w.queue = append(w.queue, folder{path: f.path + "/" + name, depth: f.depth + 1, root: f.root})
	}
	w.some.Broadcast()
}

// read lists one folder.
func read(f folder, buf []byte, most int) (l listing) {
	//nolint:forbidigo // names only; each is judged anew
	fd, err := unix.Open(f.path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		// Gone, or not a folder any more, is not left out.
		return listing{failed: err != unix.ENOENT && err != unix.ENOTDIR && err != unix.ELOOP, shut: err == unix.EACCES}
	}
	defer unix.Close(fd)
	dotgit := f.path != f.root && bytes.HasSuffix([]byte(f.path), []byte("/.git"))
	var head, objects, refs, commondir bool
	lerr := eachName(fd, buf, func(name []byte, typ byte) bool {
		l.entries++
		switch string(name) {
		case ".git":
			l.git = true
		case ".claude", ".codex", ".gemini", ".cursor", ".vscode", ".idea", ".devcontainer": // TrustedDirs
			l.trusted = true
		case "HEAD":
			head = true
		case "objects":
			objects = true
		case "refs":
			refs = true
		case "commondir":
			commondir = true
		}
		// Of a .git only submodules and worktrees can hold more of the kind.
		if typ == unix.DT_DIR && (!dotgit || string(name) == "modules" || string(name) == "worktrees") {
			l.dirs = append(l.dirs, string(name))
		}
		return l.entries <= most
	})
	l.failed = lerr != nil && !errors.Is(lerr, unix.ENOENT)
	l.gitdir = head && (objects && refs || commondir) && !dotgit
	return l
}

// Offsets in struct linux_dirent64.
const (
	direntLen  = 16
	direntType = 18
	direntName = 19
)

// eachName calls f with each name in an open folder and its type (unix.DT_DIR and the like), until
// f says no.
func eachName(fd int, buf []byte, f func(name []byte, typ byte) bool) error {
	for {
		n, err := unix.Getdents(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return err
		}
		for rest := buf[:n]; len(rest) >= direntName; {
			size := int(binary.NativeEndian.Uint16(rest[direntLen:]))
			if size < direntName || size > len(rest) {
				break
			}
			typ := rest[direntType]
			name := rest[direntName:size]
			if i := bytes.IndexByte(name, 0); i >= 0 {
				name = name[:i]
			}
			rest = rest[size:]
			if string(name) == "." || string(name) == ".." {
				continue
			}
			if typ == unix.DT_UNKNOWN {
				typ = lookType(fd, string(name))
			}
			if !f(name, typ) {
				return nil
			}
		}
	}
}

// lookType asks a file system that does not tell types in its lists.
func lookType(dir int, name string) byte {
	var st unix.Stat_t
	if unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return unix.DT_UNKNOWN
	}
	return byte(st.Mode & unix.S_IFMT >> 12) // as the kernel makes the one of the other
}
