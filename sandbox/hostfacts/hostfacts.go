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

// Sockets lists the absolute paths in /proc/net/unix: the sockets bound in this network
// namespace. A file without a listener refuses connections by itself.
func (Host) Sockets() ([]string, error) {
	f, err := os.Open("/proc/net/unix")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // no Unix sockets in this kernel, or not Linux
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseSockets(f)
}

// parseSockets reads the table: "Num RefCount Protocol Flags Type St Inode Path".
func parseSockets(r io.Reader) ([]string, error) {
	var out []string
	seen := map[string]bool{}
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		line := s.Text()
		i := strings.Index(line, " /")
		if i < 0 {
			continue // unnamed or abstract
		}
		if path := line[i+1:]; !seen[path] {
			seen[path] = true
			out = append(out, path)
		}
	}
	return out, s.Err()
}
