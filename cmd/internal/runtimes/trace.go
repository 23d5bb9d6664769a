// Tracing what a program needs: links, interpreters, shims, and the tree that it was
// installed with. Everything is read, nothing is run.

package runtimes

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
)

const (
	// headSize is what is read of a script, in bytes. Shims are far smaller.
	headSize = 64 << 10
	// maxFiles bounds a chain of shims and interpreters.
	maxFiles = 64
)

type tracer struct {
	o        Options
	dirs     []string // the search path
	near     string   // the directory where the program was found
	expose   []string
	pathDirs []string
	seen     map[string]bool
}

func (t *tracer) installation(found string) (Installation, error) {
	t.seen, t.near = map[string]bool{}, filepath.Dir(found)
	target, err := t.throughManager(found)
	if err != nil {
		return Installation{}, err
	}
	real, err := filepath.EvalSymlinks(target)
	if err != nil {
		return Installation{}, err
	}
	in := Installation{Program: found, Argv0: real}
	interp, err := t.file(target)
	if err != nil {
		return Installation{}, err
	}
	for _, r := range t.o.ReadRoots {
		if err := t.readRoot(r); err != nil {
			return Installation{}, err
		}
	}
	in.Expose = outermost(t.expose)
	// The kernel opens the interpreter by the name in the script. Where that name is a
	// link that is not exposed, start the interpreter itself, as the kernel would.
	if interp.path != "" && !t.reachable(interp.path, in.Expose) {
		ireal, err := filepath.EvalSymlinks(interp.path)
		if err != nil {
			return Installation{}, err
		}
		in.Argv0, in.Args = ireal, append(interp.args, real)
	}
	in.PathDirs = t.pathDirs
	if err := t.judgeTainted(in.Expose); err != nil {
		return Installation{}, err
	}
	return in, nil
}

// judgeTainted refuses what would be opened on the word of a file that an agent can write:
// its first line, a link beside it, its pyvenv.cfg could name any folder.
func (t *tracer) judgeTainted(expose []string) error {
	by := ""
	for name := range t.seen {
		real, err := filepath.EvalSymlinks(name)
		if t.o.writable(name) || err == nil && t.o.writable(real) {
			by = name
		}
	}
	if by == "" {
		return nil
	}
	for _, e := range expose {
		if !t.o.writable(e) {
			return fmt.Errorf("%s lies where an agent can write, so it cannot decide that %s is opened: install the program elsewhere, or grant that folder", by, e)
		}
	}
	return nil
}

func (t *tracer) readRoot(r string) error {
	real, err := filepath.EvalSymlinks(r)
	if err != nil {
		return fmt.Errorf("readRoots: %w; correct it in the configuration", err)
	}
	if isVisible(real) {
		return nil
	}
	if err := t.o.forbidden(real); err != nil {
		return fmt.Errorf("readRoots: %w", err)
	}
	if !t.o.wholesale(real) {
		return fmt.Errorf("readRoots: %s holds more than one program's files: name a directory in it", real)
	}
	t.expose = append(t.expose, real)
	return nil
}

// interpreter is what a script's first line names, where it is an absolute path.
type interpreter struct {
	path string
	args []string
}

// file traces one file under the name by which it is started.
func (t *tracer) file(name string) (interpreter, error) {
	real, err := filepath.EvalSymlinks(name)
	if err != nil {
		return interpreter{}, err
	}
	if t.seen[name] {
		return interpreter{}, nil
	}
	t.seen[name] = true
	if len(t.seen) > maxFiles {
		return interpreter{}, errors.New("its chain of scripts and interpreters does not end: is it a shim that starts itself?")
	}
	if !isVisible(real) {
		if err := t.o.forbidden(real); err != nil {
			return interpreter{}, err
		}
	}
	head, err := readHead(real)
	if err != nil {
		return interpreter{}, err
	}
	if !bytes.HasPrefix(head, []byte("#!")) {
		if !t.tree(name, real, false) {
			t.add(real)
		}
		t.libraries(real)
		return interpreter{}, nil
	}
	line, rest, _ := bytes.Cut(head[2:], []byte("\n"))
	in, program, err := parseShebang(string(line))
	if err != nil {
		return interpreter{}, err
	}
	interp := in.path
	if program != "" { // through env
		if interp = t.search(program, t.beside(name, real)); interp == "" {
			return interpreter{}, fmt.Errorf("its interpreter %s is not installed: install it, or put it on the PATH", program)
		}
	} else if err := executable(interp); err != nil {
		return interpreter{}, fmt.Errorf("its interpreter %s %w: install the program anew", interp, err)
	}
	if isShell(interp) {
		return in, t.shim(name, real, string(rest))
	}
	if !t.tree(name, real, true) {
		t.add(real)
	}
	if strings.Contains(filepath.Base(interp), "python") {
		t.userSite(real)
	}
	if program != "" {
		return interpreter{}, t.command(interp, program)
	}
	if _, err := t.file(interp); err != nil {
		return interpreter{}, fmt.Errorf("its interpreter %s: %w", interp, err)
	}
	return in, nil
}

// command traces a program that is started by its name, and puts its directory on the
// PATH inside.
func (t *tracer) command(path, name string) error {
	path, err := t.throughManager(path)
	if err != nil {
		return err
	}
	if _, err := t.file(path); err != nil {
		return fmt.Errorf("its interpreter %s: %w", path, err)
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	// The directory of the link, where that is visible inside; else the file's own,
	// where it goes by the same name.
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return err
	}
	if !isVisible(dir) && !slices.ContainsFunc(t.expose, func(e string) bool { return inside(dir, e) }) {
		dir = filepath.Dir(real)
		if filepath.Base(real) != name {
			return fmt.Errorf("its interpreter %s is a link to %s, a file of another name: put %s itself on the PATH", path, real, name)
		}
	}
	if !slices.Contains(standardPath, dir) && !slices.Contains(t.pathDirs, dir) {
		t.pathDirs = append(t.pathDirs, dir)
	}
	return nil
}

// search finds a program by its name: first in the directories before, then on the
// search path.
func (t *tracer) search(name string, before []string) string {
	if strings.ContainsRune(name, '/') {
		return ""
	}
	for _, d := range slices.Concat(before, t.dirs) {
		p := filepath.Join(d, name)
		if executable(p) == nil {
			return p
		}
	}
	return ""
}

// beside are the directories that belong to the same installation as a script: an
// installer that brings a script mostly brought the node that fits it.
func (t *tracer) beside(name, real string) []string {
	dirs := []string{filepath.Dir(name), filepath.Dir(real)}
	for _, p := range []string{name, real} {
		if nm := nodeModules(p); nm != "" {
			prefix := filepath.Dir(nm)
			dirs = append(dirs, filepath.Join(nm, ".bin"))
			if filepath.Base(prefix) == "lib" {
				dirs = append(dirs, filepath.Join(filepath.Dir(prefix), "bin"))
			}
		}
	}
	return append(dirs, t.near)
}

// add exposes a path that was judged before.
func (t *tracer) add(path string) {
	if !isVisible(path) && !slices.Contains(t.expose, path) {
		t.expose = append(t.expose, path)
	}
}

// addDir exposes a directory if it may be exposed with everything in it.
func (t *tracer) addDir(dir string) bool {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return false
	}
	if isVisible(real) {
		return true
	}
	if !t.o.wholesale(real) {
		return false
	}
	if t.o.writable(dir) && !t.o.writable(real) {
		return false // a link that an agent may have made leads out of where it can write
	}
	t.add(real)
	return true
}

// tree exposes what the file at real was installed with and reports whether that
// covers the file. A script needs its neighbours; a binary mostly stands alone.
func (t *tracer) tree(name, real string, script bool) bool {
	covered := isVisible(real)
	for _, p := range []string{name, real} {
		if venv := t.upTo(p, "pyvenv.cfg"); venv != "" && t.addDir(venv) {
			t.basePython(venv)
			covered = covered || inside(real, venv)
		}
	}
	if covered {
		return true
	}
	for _, p := range []string{name, real} {
		if nm := nodeModules(p); nm != "" {
			ok := t.addDir(nm)
			covered = covered || (ok && p == real)
		}
	}
	// pnpm keeps every package once and links them to each other; the links lead
	// between directories of the store.
	if links := pnpmLinks(real); links != "" && t.addDir(links) {
		covered = true
	}
	if covered {
		return true
	}
	if pythons := uvPythons(real); pythons != "" && t.addDir(pythons) {
		return true
	}
	if pkg := t.upTo(real, "package.json"); pkg != "" && script && t.addDir(pkg) {
		// A package of a monorepo finds its dependencies in the directories above.
		for d := filepath.Dir(pkg); strings.Count(d, "/") > 1 && d != t.o.Home; d = filepath.Dir(d) {
			if nm := filepath.Join(d, "node_modules"); exists(nm) {
				t.addDir(nm)
			}
		}
		return true
	}
	dir := filepath.Dir(real)
	if filepath.Base(dir) == "bin" {
		// A prefix: what is beside bin belongs to it, but not its etc (npmrc has tokens).
		prefix := filepath.Dir(dir)
		if !t.o.wholesale(prefix) {
			return false
		}
		if !script && !isPrefix(prefix) {
			return false
		}
		for _, sub := range []string{"lib", "lib64", "libexec", "share", "include"} {
			if p := filepath.Join(prefix, sub); exists(p) {
				t.addDir(p)
			}
		}
		return t.addDir(dir)
	}
	return script && t.addDir(dir)
}

// isPrefix recognises the prefix of an interpreter: its programs need its libraries.
func isPrefix(dir string) bool {
	return exists(filepath.Join(dir, "lib/node_modules")) || exists(filepath.Join(dir, "include/node")) ||
		len(glob(filepath.Join(dir, "lib")+"/*")) > 0
}

// upTo gives the nearest directory above path, below the home, that has the file.
func (t *tracer) upTo(path, file string) string {
	for d := filepath.Dir(path); strings.Count(d, "/") > 1 && d != t.o.Home; d = filepath.Dir(d) {
		if exists(filepath.Join(d, file)) {
			return d
		}
	}
	return ""
}

// nodeModules gives the outermost node_modules directory that path lies in.
func nodeModules(path string) string {
	if i := strings.Index(path+"/", "/node_modules/"); i >= 0 {
		return path[:i] + "/node_modules"
	}
	return ""
}

// The global virtual store of newer versions, and the .pnpm beside (or in) node_modules.
var pnpmStore = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^(.*?/(?:store/v[0-9]+/links|\.pnpm))/`) })

func pnpmLinks(path string) string {
	if m := pnpmStore().FindStringSubmatch(path); m != nil {
		return m[1]
	}
	return ""
}

// uvPythons gives the directory of uv's own Pythons, which name each other by links.
func uvPythons(path string) string {
	if i := strings.Index(path, "/uv/python/"); i >= 0 {
		return path[:i] + "/uv/python"
	}
	return ""
}

// basePython exposes the Python that a venv was made from.
func (t *tracer) basePython(venv string) {
	data, err := readHead(filepath.Join(venv, "pyvenv.cfg"))
	if err != nil {
		return
	}
	for line := range strings.Lines(string(data)) {
		key, value, _ := strings.Cut(line, "=")
		if strings.TrimSpace(key) != "home" {
			continue
		}
		home := strings.TrimSpace(value)
		if !filepath.IsAbs(home) || filepath.Base(home) != "bin" {
			return
		}
		if pythons := uvPythons(home); pythons != "" && t.addDir(pythons) {
			return
		}
		if real, err := filepath.EvalSymlinks(filepath.Dir(home)); err == nil && t.o.wholesale(real) {
			for _, sub := range []string{"bin", "lib", "lib64", "include"} {
				if p := filepath.Join(real, sub); exists(p) {
					t.addDir(p)
				}
			}
		}
		return
	}
}

// userSite exposes what pip --user installed, for a script beside it.
func (t *tracer) userSite(real string) {
	bin := filepath.Dir(real)
	if filepath.Base(bin) != "bin" {
		return
	}
	for _, p := range glob(filepath.Join(filepath.Dir(bin), "lib") + "/*/site-packages") {
		t.addDir(p)
	}
}

// libraries exposes the directories that a binary names relative to itself.
func (t *tracer) libraries(real string) {
	f, err := elf.Open(real)
	if err != nil {
		return // a static file of another kind: nothing to find
	}
	defer func() { _ = f.Close() }()
	for _, tag := range []elf.DynTag{elf.DT_RPATH, elf.DT_RUNPATH} {
		paths, err := f.DynString(tag)
		if err != nil {
			continue
		}
		for _, p := range filepath.SplitList(strings.Join(paths, ":")) {
			p = strings.NewReplacer("${ORIGIN}", filepath.Dir(real), "$ORIGIN", filepath.Dir(real)).Replace(p)
			if filepath.IsAbs(p) && exists(p) {
				t.addDir(filepath.Clean(p))
			}
		}
	}
}

// shim traces a shell script: what it executes by a path that can be read off it. A
// shim is exposed alone, since it mostly lies among those of other programs.
func (t *tracer) shim(name, real, body string) error {
	targets, commands := shimTargets(body, filepath.Dir(real), t.o.Home)
	n := 0
	for _, p := range targets {
		if fi, err := os.Stat(p); err != nil || !fi.Mode().IsRegular() {
			continue
		}
		if _, err := t.file(p); err != nil {
			return fmt.Errorf("it starts %s: %w", p, err)
		}
		n++
	}
	for _, c := range commands {
		p := t.search(c, t.beside(name, real))
		if p == "" || isVisible(p) {
			continue
		}
		if err := t.command(p, c); err != nil {
			return err
		}
		n++
	}
	if n > 0 || !t.tree(name, real, true) {
		t.add(real)
	}
	return nil
}

var (
	// basedir=$(dirname …), here=`cd "$(dirname "$0")" && pwd`, DIR="${0%/*}"
	dirVar = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile("(?m)^[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=.*(?:dirname|%/\\*)")
	})
	fixVar = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`(?m)^[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=["']?([^"'\n$` + "`" + `]*)["']?[ \t]*$`)
	})
	useVar  = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?`) })
	dirCall = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile("\\$\\(dirname [^()]*\\)|`dirname [^`]*`") })
	word    = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`"([^"]*)"|'([^']*)'|([^\s"';&|()]+)`) })
)

// shimTargets reads the paths and the command names off a script's exec lines, or off
// its last command where it has none.
func shimTargets(body, dir, home string) (paths, commands []string) {
	vars := map[string]string{"HOME": home}
	for _, m := range fixVar().FindAllStringSubmatch(body, -1) {
		vars[m[1]] = m[2]
	}
	for _, m := range dirVar().FindAllStringSubmatch(body, -1) {
		vars[m[1]] = dir
	}
	var lines []string
	last := ""
	for line := range strings.Lines(strings.ReplaceAll(body, "\\\n", " ")) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		last = line
		if i := strings.Index(" "+line, " exec "); i >= 0 {
			lines = append(lines, strings.TrimSpace((" " + line)[i+len(" exec "):]))
		}
	}
	if lines == nil && last != "" {
		lines = []string{last}
	}
	for _, line := range lines {
		line = dirCall().ReplaceAllString(line, dir)
		first := true
		for _, m := range word().FindAllStringSubmatch(line, -1) {
			w := m[1] + m[2] + m[3]
			known := true
			w = useVar().ReplaceAllStringFunc(w, func(u string) string {
				v, ok := vars[strings.Trim(u, "${}")]
				known = known && ok
				return v
			})
			if rest, ok := strings.CutPrefix(w, "~/"); ok {
				w = filepath.Join(home, rest)
			}
			isOption := strings.HasPrefix(w, "-") || strings.HasPrefix(w, "$") || strings.Contains(w, "=")
			switch {
			case !known || isOption || w == "":
				continue
			case filepath.IsAbs(w):
				paths = append(paths, filepath.Clean(w))
			case first && !strings.ContainsRune(w, '/') && w != "env":
				commands = append(commands, w)
			}
			first = first && (w == "env" || filepath.Base(w) == "env")
		}
	}
	return paths, commands
}

// managers are programs that stand for many others, by the name they are started
// under. Inside they would need their whole state; so the program itself is looked up.
var managers = []struct {
	binary   string   // base name of what the link leads to
	installs []string // below the home, PROGRAM is the name
}{
	{"volta-shim", []string{".volta/tools/image/packages/*/bin/PROGRAM", ".volta/tools/image/packages/*/*/bin/PROGRAM", ".volta/tools/image/node/*/bin/PROGRAM"}},
	{"mise", []string{".local/share/mise/installs/*/*/bin/PROGRAM", ".local/share/mise/installs/*/*/PROGRAM"}},
	{"asdf", []string{".asdf/installs/*/*/bin/PROGRAM"}},
}

var asdfLine = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`(?m)^# asdf-plugin: (\S+) (\S+)`) })

// throughManager gives the program behind a version manager's shim.
func (t *tracer) throughManager(path string) (string, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", err
	}
	program := filepath.Base(path)
	binary := filepath.Base(real)
	if head, err := readHead(real); err == nil && bytes.HasPrefix(head, []byte("#!")) {
		for _, m := range asdfLine().FindAllStringSubmatch(string(head), -1) {
			p := filepath.Join(filepath.Dir(filepath.Dir(real)), "installs", m[1], m[2], "bin", program)
			if executable(p) == nil {
				return p, nil
			}
		}
		if asdfLine().Match(head) {
			binary = "asdf"
		}
	}
	for _, m := range managers {
		if binary != m.binary || program == m.binary {
			continue
		}
		var found []string
		for _, pattern := range m.installs {
			found = append(found, glob(filepath.Join(t.o.Home, strings.Replace(pattern, "PROGRAM", program, 1)))...)
		}
		found = slices.DeleteFunc(found, func(p string) bool { return executable(p) != nil })
		if len(found) == 0 {
			return "", fmt.Errorf("it is a shim of %s, and the program behind it was not found: name its own path with --command", m.binary)
		}
		slices.SortStableFunc(found, newerFirst)
		return found[0], nil
	}
	return path, nil
}

// parseShebang reads the first line of a script without its "#!". program is set when
// the interpreter is looked up by env.
func parseShebang(line string) (in interpreter, program string, err error) {
	line = strings.TrimSpace(line)
	path, arg, _ := strings.Cut(strings.ReplaceAll(line, "\t", " "), " ")
	if !filepath.IsAbs(path) {
		return in, "", fmt.Errorf("its first line %q names no absolute interpreter", "#!"+line)
	}
	arg = strings.TrimSpace(arg)
	if filepath.Base(path) != "env" {
		in.path = path
		if arg != "" {
			in.args = []string{arg} // the kernel passes the rest as one argument
		}
		return in, "", nil
	}
	for _, w := range strings.Fields(arg) {
		w = strings.TrimPrefix(w, "-S")
		if w == "" || strings.HasPrefix(w, "-") || strings.Contains(w, "=") {
			continue
		}
		if filepath.IsAbs(w) {
			in.path = w
			return in, "", nil
		}
		return in, w, nil
	}
	return in, "", fmt.Errorf("its first line %q names no interpreter", "#!"+line)
}

func isShell(path string) bool {
	return slices.Contains([]string{"sh", "bash", "dash", "zsh", "ksh", "ash"}, filepath.Base(path))
}

func readHead(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		// An executable that may not be read cannot be a script: the kernel's
		// interpreter would have to read it.
		if errors.Is(err, os.ErrPermission) {
			return nil, nil
		}
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, headSize))
}

// reachable tells whether the name itself, not only what it resolves to, is there
// inside: every link on the way lies in what is visible.
func (t *tracer) reachable(name string, expose []string) bool {
	seen := func(p string) bool {
		return isVisible(p) || slices.ContainsFunc(expose, func(e string) bool { return inside(p, e) })
	}
	rest := strings.Split(strings.TrimPrefix(name, "/"), "/")
	at := "/"
	for hops := 0; len(rest) > 0; {
		p := filepath.Join(at, rest[0])
		fi, err := os.Lstat(p)
		if err != nil {
			return false
		}
		if fi.Mode()&os.ModeSymlink == 0 {
			at, rest = p, rest[1:]
			continue
		}
		link, err := os.Readlink(p)
		if err != nil || !seen(p) || hops > 40 {
			return false
		}
		hops++
		if !filepath.IsAbs(link) {
			link = filepath.Join(at, link)
		}
		at, rest = "/", append(strings.Split(strings.TrimPrefix(filepath.Clean(link), "/"), "/"), rest[1:]...)
	}
	return seen(at)
}

// outermost sorts the paths and drops those inside another.
func outermost(paths []string) []string {
	slices.Sort(paths)
	var out []string
	for _, p := range paths {
		if !slices.ContainsFunc(out, func(o string) bool { return inside(p, o) }) {
			out = append(out, p)
		}
	}
	return out
}
