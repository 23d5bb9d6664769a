// Which version of a runtime is installed, as far as its files say so: nothing is started
// to find out.

package runtimes

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	maxManifest = 1 << 20 // bytes of a package.json
	maxAbove    = 6       // directories between a program and its package's
)

var versionRule = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[0-9]+(\.[0-9]+){0,3}[0-9A-Za-z.+-]{0,64}$`) })

// Version is the version of the npm package that brought the program, or "": programs that
// came another way would have to be started to tell theirs.
func (in Installation) Version() string {
	for _, path := range slices.Concat([]string{in.Argv0}, in.Args) {
		if !filepath.IsAbs(path) {
			continue
		}
		dir := filepath.Dir(path)
		for range maxAbove {
			if v, err := PackageVersion(filepath.Join(dir, "package.json")); err == nil {
				return v
			}
			if dir == "/" || filepath.Base(dir) == "node_modules" {
				break
			}
			dir = filepath.Dir(dir)
		}
	}
	return ""
}

// PackageVersion reads the version in a package.json. It blocks on no file.
func PackageVersion(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return "", fmt.Errorf("%s: not a file", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return "", err
	}
	if len(b) > maxManifest {
		return "", fmt.Errorf("%s: larger than %d bytes", path, maxManifest)
	}
	var p struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(b, &p); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	if !versionRule().MatchString(p.Version) {
		return "", fmt.Errorf("%s: no version", path)
	}
	return p.Version, nil
}
