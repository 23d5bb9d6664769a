// Package programs finds the programs that work together: our own siblings and
// bubblewrap. It searches fixed places and never PATH, which whoever starts us can
// set; it runs nothing.
package programs

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// LibexecEnv names the directory of our programs in a build tree or a test.
const LibexecEnv = "AGENTCONNECT_LIBEXEC"

// Libexec is where the package installs the programs that people do not call.
const Libexec = "/usr/libexec/agentconnect-sandbox"

// Bwrap is the distribution's bubblewrap, never a copy: AppArmor profiles and
// security updates are attached to this path.
const Bwrap = "/usr/bin/bwrap"

// Set holds the absolute paths of the programs of one installation.
type Set struct {
	Supervisor string
	Launcher   string
	Guest      string
	Bwrap      string
}

// Dirs lists where siblings are looked for, in order: libexec alone if it is given
// (a build tree must not pick up half of an installed version), else the directory
// of our own executable and the package's directory.
func Dirs(libexec, executable string) ([]string, error) {
	if libexec != "" {
		if !filepath.IsAbs(libexec) {
			return nil, fmt.Errorf("%s=%s: not an absolute path; give the full path of the directory", LibexecEnv, libexec)
		}
		return []string{filepath.Clean(libexec)}, nil
	}
	dirs := []string{Libexec}
	if filepath.IsAbs(executable) {
		dirs = append([]string{filepath.Dir(executable)}, dirs...)
	}
	return dirs, nil
}

// Find returns the set for this process: its environment and its own executable,
// links resolved.
func Find() (Set, error) {
	exe, err := os.Executable()
	if err == nil {
		// A link in ~/bin must lead to the directory the siblings are in.
		if real, err := filepath.EvalSymlinks(exe); err == nil {
			exe = real
		}
	}
	dirs, err := Dirs(os.Getenv(LibexecEnv), exe)
	if err != nil {
		return Set{}, err
	}
	return In(dirs)
}

// In returns the set found in dirs. Every sibling must be there: a missing one is an
// error that names it and the places looked at. Bwrap is not looked for; its absence
// is the probe's to report.
func In(dirs []string) (Set, error) {
	s := Set{Bwrap: Bwrap}
	for _, p := range []struct {
		name string
		into *string
	}{
		{"agentconnect-supervisor", &s.Supervisor},
		{"agentconnect-launch", &s.Launcher},
		{"agentconnect-guest", &s.Guest},
	} {
		path, ok := LookIn(dirs, p.name)
		if !ok {
			return Set{}, fmt.Errorf("%s: not found in %s; install the package again, or set %s to the directory of the build",
				p.name, strings.Join(dirs, ", "), LibexecEnv)
		}
		*p.into = path
	}
	return s, nil
}

// LookIn finds a program by its name in directories, the first that has it.
func LookIn(dirs []string, name string) (string, bool) {
	for _, dir := range dirs {
		path := filepath.Join(dir, name)
		if Executable(path) == nil {
			return path, true
		}
	}
	return "", false
}

// Executable reports whether path is a regular file, links followed, that somebody
// may execute.
func Executable(path string) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
		return &fs.PathError{Op: "execute", Path: path, Err: fs.ErrPermission}
	}
	return nil
}
