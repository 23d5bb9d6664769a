// Package hostfacts answers, for the running host, what compiling a policy may ask.
// It only reads.
package hostfacts

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

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

// Sockets lists the absolute paths in /proc/net/unix: the names that sockets of this
// network namespace were bound by. A file without a listener refuses connections by itself.
// odd: some were bound by names that lead to no socket now (relative, moved, removed).
func (h Host) Sockets() (paths []string, odd bool, err error) {
	f, err := os.Open("/proc/net/unix")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil // no Unix sockets in this kernel, or not Linux
	}
	if err != nil {
		return nil, false, err
	}
	defer f.Close()
	named, odd, err := parseSockets(f)
	if err != nil {
		return nil, false, err
	}
	for _, path := range named {
		if _, kind, err := h.Resolve(path); err == nil && kind == sandbox.KindSocket {
			paths = append(paths, path)
		} else if errors.Is(err, fs.ErrNotExist) {
			odd = true
		}
	}
	return paths, odd, nil
}

// parseSockets reads the table: "Num RefCount Protocol Flags Type St Inode Path". Names that
// are not absolute (a line of a name with a newline in it, too) are odd.
func parseSockets(r io.Reader) (paths []string, odd bool, err error) {
	seen := map[string]bool{}
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	first := true
	for s.Scan() {
		line := s.Text()
		if first {
			first = false // the headings
			continue
		}
		f := strings.SplitN(line, " ", 8)
		fields := strings.Fields(line)
		switch {
		case len(f) < 7 || !strings.HasSuffix(f[0], ":"):
			odd = true // the rest of a name with a newline
		case len(fields) < 8:
			// no name
		default:
			i := strings.Index(line, " "+fields[6]+" ")
			name := line[i+len(fields[6])+2:]
			switch {
			case strings.HasPrefix(name, "@"): // abstract
			case !strings.HasPrefix(name, "/"):
				odd = true
			case !seen[name]:
				seen[name] = true
				paths = append(paths, name)
			}
		}
	}
	return paths, odd, s.Err()
}

// How much of a folder is looked at for sockets: a start must not take longer in a larger
// tree, unless there is reason to look.
const (
	nearEntries = 2_000
	farEntries  = 100_000
)

// SocketsBelow looks for socket files in dir, breadth first and without following links.
func (Host) SocketsBelow(dir string, far bool) (paths []string, all bool) {
	left := nearEntries
	if far {
		left = farEntries
	}
	for queue := []string{dir}; len(queue) > 0; queue = queue[1:] {
		f, err := os.Open(queue[0])
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
			return paths, far && left > 0 || !far
		}
	}
	return paths, true
}
