// Package hostfacts answers, for the running host, what compiling a policy may ask.
// It only reads.
package hostfacts

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"agentconnect.md/sandbox/sandbox"
)

// maxConfigFile bounds what ReadFile takes in.
const maxConfigFile = 1 << 20

// Host is the running host.
type Host struct{}

var _ sandbox.Host = Host{}

// Readlink gives a link's text.
func (Host) Readlink(path string) (string, error) { return os.Readlink(path) }

// ReadDir lists the names in a directory.
func (Host) ReadDir(path string) ([]string, error) {
	entries, err := os.ReadDir(path)
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

// ReadFile reads a configuration file of at most 1 MiB.
func (Host) ReadFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConfigFile+1))
	if len(b) > maxConfigFile {
		return "", fmt.Errorf("%s: larger than 1 MiB", path)
	}
	return string(b), err
}

// Sockets lists where the sockets in /proc/net/unix lie: those that were bound by a name in this
// network namespace. A file without a listener refuses connections by itself. odd: some are
// somewhere else now than their names say (relative, moved, removed), or there as well, or that
// cannot be told for something in one of the folders.
func (h Host) Sockets(folders []string) (paths []string, odd bool, err error) {
	f, err := os.Open("/proc/net/unix")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil // no Unix sockets in this kernel, or not Linux
	}
	if err != nil {
		return nil, false, err
	}
	defer f.Close()
	named, odd, at, err := parseSockets(f)
	if err != nil {
		return nil, false, err
	}
	bound := sync.OnceValue(boundTo)
	odd = odd || at && relativeAt(bound())
	paths, moved := h.placesOf(named, folders, bound)
	return paths, odd || moved, nil
}

// relativeAt reports whether a file has a relative name that looks like an abstract one.
func relativeAt(bound map[string][]uint32) bool {
	for name := range bound {
		if strings.HasPrefix(name, "@") {
			return true
		}
	}
	return false
}

// place is what a name leads to.
type place struct {
	real       string // where it lies; with an error, the last on the way that could be reached
	kind       sandbox.Kind
	ino, links uint64
	err        error
}

// placesOf gives the real places of those names that lead to sockets, and says whether one leads
// to nothing, or to something else, or whether a socket has another name, too. What keeps a name
// from being followed counts in the folders alone: elsewhere it is the host's own doing. A machine
// with hundreds of agents has thousands of names, and each start asks, so a directory is resolved
// once for all of its names.
func (h Host) placesOf(named, folders []string, bound func() map[string][]uint32) (paths []string, moved bool) {
	seen := map[string]bool{}
	inFolders := func(path string) bool {
		return slices.ContainsFunc(folders, func(f string) bool { return path == f || strings.HasPrefix(path, strings.TrimSuffix(f, "/")+"/") })
	}
	take := func(name string, p place) {
		switch {
		case errors.Is(p.err, fs.ErrPermission):
			moved = moved || inFolders(p.real)
			return
		case p.err != nil || p.kind != sandbox.KindSocket:
			moved = true
			return
		case inFolders(p.real):
			// Of a socket of its own, which an agent left there, the kernel here knows nothing.
			inodes := bound()[name]
			moved = moved || p.links > 1 || len(inodes) > 0 && !slices.Contains(inodes, uint32(p.ino)) //nolint:gosec // that is what the kernel gives
		}
		if !seen[p.real] {
			seen[p.real] = true
			paths = append(paths, p.real)
		}
	}
	names := map[string][]string{} // by directory
	var dirs []string
	for _, name := range named {
		dir, base := filepath.Split(name)
		if len(dir) < 2 || filepath.Clean(name) != name {
			take(name, h.placeOf(name))
			continue
		}
		if dir = dir[:len(dir)-1]; names[dir] == nil {
			dirs = append(dirs, dir)
		}
		names[dir] = append(names[dir], base)
	}
	for _, dir := range dirs {
		h.resolveIn(dir, names[dir], take)
	}
	return paths, moved
}

// parseSockets reads the table: "Num RefCount Protocol Flags Type St Inode Path". Names that
// are not absolute (a line of a name with a newline in it, too) are odd, and so are two sockets
// that wait by the same name, of which one can only have been moved or removed. at: some names begin
// with "@", which the table has for an abstract name, too.
func parseSockets(r io.Reader) (paths []string, odd, at bool, err error) {
	const waiting = 1          // a listener, or a datagram socket; one that came of a listener is 2 or 3
	known := map[string]bool{} // whether one waits
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	first := true
	for s.Scan() {
		line := s.Bytes()
		if first {
			first = false // the headings
			continue
		}
		var fields [7][]byte // without the name
		rest, n := line, 0
		for ; n < len(fields); n++ {
			rest = bytes.TrimLeft(rest, " ") // the inode is padded
			if len(rest) == 0 {
				break
			}
			if fields[n], rest, _ = bytes.Cut(rest, []byte(" ")); n == 0 && !bytes.HasSuffix(fields[0], []byte(":")) {
				break
			}
		}
		switch {
		case n < len(fields):
			odd = true // the rest of a name with a newline
		case len(rest) == 0:
			// without a name
		case rest[0] == '@':
			at = true
		case rest[0] != '/':
			odd = true
		default:
			waits := bytes.HasSuffix(fields[5], []byte{'0' + waiting})
			before, again := known[string(rest)]
			if odd = odd || waits && before; !again {
				paths = append(paths, string(rest))
			}
			if !again || waits {
				known[string(rest)] = waits
			}
		}
	}
	return paths, odd, at, s.Err()
}

// How much of a folder is looked at for sockets: a start must not take longer in a larger
// tree, unless there is reason to look.
const (
	nearEntries = 2_000
	farEntries  = 100_000
)

// SocketsBelow looks for socket files in dir, breadth first and without following links. Shut are
// folders of the user's in it that may not be looked at, or entered: an agent that shut one can
// open it again.
func (Host) SocketsBelow(dir string, far bool) (paths, shut []string, all bool) {
	left := nearEntries
	if far {
		left = farEntries
	}
	for queue := []string{dir}; len(queue) > 0; queue = queue[1:] {
		// What was a folder may be a pipe by now, which would wait for a writer, or a link.
		flags := syscall.O_RDONLY | syscall.O_DIRECTORY | syscall.O_NONBLOCK
		if queue[0] != dir {
			flags |= syscall.O_NOFOLLOW
		}
		f, err := os.OpenFile(queue[0], flags, 0)
		stat := func() (fs.FileInfo, error) { return os.Lstat(queue[0]) }
		if err == nil {
			stat = f.Stat
		}
		if far && queue[0] != dir && (err == nil || errors.Is(err, fs.ErrPermission)) && isShut(stat()) {
			shut = append(shut, queue[0])
			f.Close() // does nothing to none
			continue
		}
		if err != nil {
			continue // not readable for the agent either, or gone
		}
		entries, _ := f.ReadDir(left)
		f.Close()
		for _, e := range entries {
			switch path := queue[0] + "/" + e.Name(); {
			case e.Type()&fs.ModeSocket != 0:
				paths = append(paths, path)
			case e.IsDir():
				queue = append(queue, path)
			}
		}
		if left -= len(entries); left <= 0 {
			return paths, shut, far && left > 0 || !far
		}
	}
	return paths, shut, true
}

// isShut reports whether a folder is the user's own and lacks the permission to be listed or
// entered.
func isShut(st fs.FileInfo, err error) bool {
	if err != nil || !st.IsDir() || st.Mode().Perm()&0o500 == 0o500 {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && int(sys.Uid) == os.Geteuid()
}
