// Finding a program on this host, and what of the host it needs to run.

package runtimes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// ErrNotInstalled is a program that is not on this host.
var ErrNotInstalled = errors.New("not installed")

// Options say where to look and what must never be exposed.
type Options struct {
	// Name is the runtime's id, for ROOT/runtimes/NAME. May be empty.
	Name string
	// Home is the daemon user's home and Root is AgentConnect's ROOT: both absolute,
	// without links.
	Home string
	Root string
	// Path is the search path, as in $PATH. Empty entries and relative ones are ignored.
	Path string
	// ReadRoots are directories that the operator's configuration adds.
	ReadRoots []string
	// Writable are folders that agents can write; what lies there opens nothing else.
	Writable []string
}

// Installation is a program with everything of it that must be visible inside.
type Installation struct {
	// Program is the path under which it was found.
	Program string
	// Argv0 is the path to execute inside: Program with every link resolved, or its
	// interpreter where the script names one through a link that is not there inside.
	Argv0 string
	// Args stand between Argv0 and the runtime's own arguments; mostly none.
	Args []string
	// Expose are the files and directories to bind read-only at the same path: each
	// absolute, existing, without a link in it, none inside another. What lies in
	// /usr, /opt, /nix and the like is visible anyway and not listed.
	Expose []string
	// PathDirs belong on the PATH inside, in this order, before the system's.
	PathDirs []string
}

// Argv is the command line inside, with the runtime's own arguments.
func (in Installation) Argv(args ...string) []string {
	return slices.Concat([]string{in.Argv0}, in.Args, args)
}

// userPlaces are where installers put programs below the home. A star is one component.
var userPlaces = []string{
	".local/bin", "bin", ".npm-global/bin", ".npm/bin", ".npm-packages/bin", ".node_modules/bin",
	".nvm/versions/node/*/bin", ".local/share/fnm/node-versions/*/installation/bin",
	".volta/bin", ".bun/bin", ".deno/bin", ".local/share/pnpm", ".local/share/pnpm/bin", ".yarn/bin",
	".asdf/shims", ".local/share/mise/shims", ".cargo/bin", "go/bin",
	".claude/local", ".opencode/bin", ".goose/bin",
}

// systemPlaces are looked at after the user's own.
var systemPlaces = []string{
	"/usr/local/bin", "/usr/bin", "/bin", "/opt/*/bin", "/snap/bin", "/home/linuxbrew/.linuxbrew/bin",
	"/nix/var/nix/profiles/default/bin",
}

// visible trees are in every boundary. /bin, /lib and so on are links into /usr or, on
// older systems, directories that are shown as well.
var visible = []string{
	"/usr", "/opt", "/nix", "/snap", "/home/linuxbrew/.linuxbrew",
	"/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32",
}

// standardPath is on every PATH inside.
var standardPath = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// Find looks for program, a name or an absolute path, and traces what it needs. The
// error is ErrNotInstalled, or says why what was found cannot be used.
func Find(o Options, program string) (Installation, error) {
	t := &tracer{o: o, dirs: o.searchDirs()}
	var found string
	switch {
	case program == "" || strings.ContainsRune(program, 0):
		return Installation{}, fmt.Errorf("%w: %q names no program", ErrNotInstalled, program)
	case filepath.IsAbs(program):
		found = filepath.Clean(program)
		if err := executable(found); err != nil {
			return Installation{}, fmt.Errorf("%w: %s: %w", ErrNotInstalled, program, err)
		}
	case strings.ContainsRune(program, '/'):
		return Installation{}, fmt.Errorf("%w: %s: write the program's name or its absolute path", ErrNotInstalled, program)
	default:
		if found = t.search(program, nil); found == "" {
			return Installation{}, fmt.Errorf("%w: %s is neither on the PATH nor where installers put programs", ErrNotInstalled, program)
		}
	}
	in, err := t.installation(found)
	if err != nil {
		return Installation{}, fmt.Errorf("%s: %w", found, err)
	}
	return in, nil
}

// searchDirs are the places to look at, in their order.
func (o Options) searchDirs() []string {
	var dirs []string
	add := func(patterns ...string) {
		for _, p := range patterns {
			if !strings.Contains(p, "*") {
				dirs = append(dirs, p)
				continue
			}
			found := glob(p)
			slices.SortFunc(found, newerFirst)
			dirs = append(dirs, found...)
		}
	}
	if o.Name != "" && o.Root != "" {
		own := filepath.Join(o.Root, "runtimes", o.Name)
		add(filepath.Join(own, "bin"), filepath.Join(own, "node_modules/.bin"))
	}
	for _, p := range filepath.SplitList(o.Path) {
		// A directory of ROOT on the PATH would be an agent's own.
		if filepath.IsAbs(p) && (o.Root == "" || !inside(filepath.Clean(p), o.Root)) {
			dirs = append(dirs, filepath.Clean(p))
		}
	}
	if o.Home != "" {
		for _, p := range userPlaces {
			add(o.Home + "/" + p)
		}
	}
	add(systemPlaces...)
	var unique []string
	for _, d := range dirs {
		if !slices.Contains(unique, d) {
			unique = append(unique, d)
		}
	}
	return unique
}

// glob expands stars component by component: a home may have brackets in its name,
// which filepath.Glob would read as a pattern.
func glob(pattern string) []string {
	found := []string{"/"}
	for _, part := range strings.Split(strings.Trim(pattern, "/"), "/") {
		var next []string
		for _, dir := range found {
			if part != "*" {
				if p := filepath.Join(dir, part); exists(p) {
					next = append(next, p)
				}
				continue
			}
			des, err := os.ReadDir(dir)
			if err != nil {
				continue
			}
			for _, de := range des {
				next = append(next, filepath.Join(dir, de.Name()))
			}
		}
		found = next
	}
	return found
}

// newerFirst orders paths with versions in them (v9 before v22), the newest first.
func newerFirst(a, b string) int {
	na, nb := numbers(a), numbers(b)
	if c := slices.Compare(nb, na); c != 0 {
		return c
	}
	return strings.Compare(a, b)
}

func numbers(s string) []int {
	var ns []int
	for _, f := range strings.FieldsFunc(s, func(r rune) bool { return r < '0' || r > '9' }) {
		n, err := strconv.Atoi(f)
		if err == nil {
			ns = append(ns, n)
		}
	}
	return ns
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// executable tells why a path is no program that this user may execute.
func executable(path string) error {
	fi, err := os.Stat(path)
	if err != nil {
		return errors.Unwrap(err)
	}
	if !fi.Mode().IsRegular() {
		return errors.New("is not a file")
	}
	if fi.Mode().Perm()&0o111 == 0 || unix.Access(path, unix.X_OK) != nil {
		return errors.New("is not executable")
	}
	return nil
}

// inside reports whether path is dir or below it; both absolute and clean.
func inside(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

func isVisible(path string) bool {
	return slices.ContainsFunc(visible, func(v string) bool { return inside(path, v) })
}

// secretDirs below the home are never exposed, nor is anything in them.
var secretDirs = []string{
	".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store", ".mozilla", ".thunderbird",
	".config/systemd", ".config/gcloud", ".config/gh", ".config/google-chrome", ".config/chromium",
	".local/share/keyrings", ".local/share/kwalletd", ".pki",
}

// sharedDirs below the home hold many programs' things: never exposed as a whole,
// though something in them may be.
var sharedDirs = []string{
	".config", ".cache", ".local", ".local/bin", ".local/lib", ".local/share", ".local/state", "bin",
	"Desktop", "Documents", "Downloads", "src", "work", "projects", "code", "dev",
}

// hostDirs outside the home are never exposed, nor is anything in them.
var hostDirs = []string{"/proc", "/sys", "/dev", "/run", "/var/run", "/boot", "/etc", "/var/lib", "/var/log", "/var/spool"}

// forbidden tells why path may not be exposed at all, not even as a single file.
func (o Options) forbidden(path string) error {
	if !utf8.ValidString(path) {
		return fmt.Errorf("the path %q is not UTF-8: rename it", path)
	}
	own := o.Name != "" && inside(path, filepath.Join(o.Root, "runtimes", o.Name))
	if o.Root != "" && inside(path, o.Root) && !own {
		return fmt.Errorf("%s lies in AgentConnect's own directory, which no agent sees: install the program elsewhere", path)
	}
	for _, d := range secretDirs {
		if o.Home != "" && inside(path, filepath.Join(o.Home, d)) {
			return fmt.Errorf("%s lies in %s, which no agent sees: install the program elsewhere", path, filepath.Join(o.Home, d))
		}
	}
	for _, d := range hostDirs {
		if inside(path, d) {
			return fmt.Errorf("%s lies in %s, which no agent sees: install the program elsewhere", path, d)
		}
	}
	return nil
}

// wholesale tells whether dir may be exposed with everything in it.
func (o Options) wholesale(dir string) bool {
	if o.forbidden(dir) != nil || strings.Count(dir, "/") < 2 {
		return false
	}
	above := func(p string) bool { return inside(p, dir) } // dir is p, or holds p
	if o.Home != "" {
		if above(o.Home) {
			return false
		}
		for _, d := range secretDirs {
			if above(filepath.Join(o.Home, d)) {
				return false
			}
		}
		for _, d := range sharedDirs {
			if above(filepath.Join(o.Home, d)) {
				return false
			}
		}
		for _, rt := range table {
			for _, d := range slices.Concat(rt.StateDirs, rt.Credentials) {
				if above(filepath.Join(o.Home, d)) {
					return false
				}
			}
		}
	}
	return o.Root == "" || !above(o.Root)
}

// writable reports whether an agent can write at path.
func (o Options) writable(path string) bool {
	return slices.ContainsFunc(o.Writable, func(dir string) bool { return inside(path, dir) })
}
