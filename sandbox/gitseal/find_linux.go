package gitseal

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/pathfd"
)

// Bounds of what is read.
const (
	maxConfig   = 1 << 20 // bytes of one configuration file
	maxCopy     = 256 << 10
	maxPointer  = 8 << 10 // bytes of a .git file, commondir, gitdir
	maxIncludes = 10      // nested includes, as git
	maxAdmin    = 4096    // worktrees of one repository
	maxNamed    = 256     // paths that one configuration names
	maxSealed   = 50_000  // names in sealed folders that are looked at
	maxLinks    = 40      // on the way to a path, as the kernel
)

// finder gathers what is found.
type finder struct {
	o    Options
	root int // the host's /
	// dir is the git directory that is looked at, without a link on its way, and at is open on
	// it: what lies in it costs a look by name. at is -1 for none.
	dir   string
	at    int
	found Found
	seals map[string]sandbox.Seal
	plain map[string]bool // see walked
	done  map[string]bool // git directories and common directories looked at
	// tops are the places where git runs commands of a common directory's configuration,
	// each with the git directory that belongs to it.
	tops   map[string][]top
	absent map[string]bool
	notes  map[string]bool
	// configs are the files read so far: the user's own belong to every repository.
	configs map[string][]Entry
	buf     [16 << 10]byte // for the names in a folder
	sealed  int            // names in sealed folders that were looked at
	shuts   int            // folders that were sealed since they may not be read
	rerere  bool           // a configuration that was followed last turns it on
}

type top struct {
	path string // the working tree; empty for a bare repository
	git  string // the git directory
}

// Find looks through the roots. What cannot be read is said in the notes, and no error: an
// agent could make one.
func Find(o Options) *Found {
	f := &finder{
		o: o, root: -1, at: -1, seals: map[string]sandbox.Seal{}, done: map[string]bool{}, tops: map[string][]top{}, absent: map[string]bool{}, notes: map[string]bool{}, configs: map[string][]Entry{},
	}
	var err error
	if f.root, err = pathfd.Open("/"); err == nil {
		defer unix.Close(f.root)
	}
	limits := o.Limits.filled()
	w := walk(o.Roots, limits)
	switch {
	case w.left == "time":
		f.note("the folders that the agent can write were not looked through to the end within %v: git repositories that lie deep in them are not sealed", limits.Time)
	case w.left != "":
		f.note("the folders that the agent can write hold more than %d names: git repositories that lie deep in them are not sealed", limits.Entries)
	}
	if w.deep > 0 {
		f.note("%d folders lie more than %d deep and were not looked into: git repositories there are not sealed", w.deep, limits.Depth)
	}
	if w.unread > 0 {
		f.note("%d folders could not be read: git repositories there are not sealed", w.unread)
	}
	for _, p := range w.shut {
		f.shut(p)
	}
	f.plain = w.plain
	for _, r := range o.Roots {
		// Which a walk that was cut short may have missed.
		f.dotgit(filepath.Join(r, ".git"))
		if real(r) {
			f.gitDir(r, "")
		}
	}
	f.submodules()
	paths := slices.Concat(w.dotgit, w.gitdirs)
	sortByAge(paths, limits.Repositories)
	beyond, away := 0, 0
	var farthest, thrown string // an example of each
	for _, p := range paths {
		switch {
		case f.done[p] || f.seals[p].Path != "":
		case f.throwaway(p):
			away, thrown = away+1, p
			f.found.Repositories = append(f.found.Repositories, Repository{Dir: p, Common: p})
		case len(f.done) >= limits.Repositories:
			beyond, farthest = beyond+1, p
			f.found.Repositories = append(f.found.Repositories, Repository{Dir: p, Common: p})
		case filepath.Base(p) == ".git":
			f.dotgit(p)
		default:
			f.gitDir(p, "")
		}
	}
	f.submodules()
	if beyond > 0 {
		f.note("%d git repositories beyond the first %d are not sealed, such as %s; what the agent plants there is said by `agentconnect audit`", beyond, limits.Repositories, farthest)
	}
	if away > 0 {
		f.note("%d git repositories in folders that tools make and delete (node_modules and the like) are watched, not sealed, such as %s", away, thrown)
	}
	for _, r := range o.Roots {
		f.above(r)
	}
	f.effective()
	f.trusted()
	return f.result()
}

// sortByAge puts the shallow ones first: they are what a person works in. Should there be too many,
// it puts the old ones first: an agent can fill the number, but not before the repositories were
// there that it found.
func sortByAge(paths []string, most int) {
	slices.SortStableFunc(paths, func(a, b string) int { return strings.Count(a, "/") - strings.Count(b, "/") })
	if len(paths) <= most {
		return
	}
	born := map[string]int64{}
	for _, p := range paths {
		var st unix.Statx_t
		if unix.Statx(unix.AT_FDCWD, p, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BTIME, &st) == nil && st.Mask&unix.STATX_BTIME != 0 {
			born[p] = st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
		}
	}
	slices.SortStableFunc(paths, func(a, b string) int { return cmp.Compare(born[a], born[b]) })
}

// submodules adds those that a configuration names and that the walk did not come to, or that were
// too many: an agent may have filled the folders until it ended.
func (f *finder) submodules() {
	for i := 0; i < len(f.found.Repositories); i++ {
		r := f.found.Repositories[i]
		if !r.Sealed || r.Dir != r.Common {
			continue
		}
		modules := filepath.Join(r.Dir, "modules")
		for _, e := range f.config(filepath.Join(r.Dir, "config")) {
			dir := filepath.Join(modules, e.Subsection)
			if e.Section != "submodule" || dir == modules || !inside(dir, modules) {
				continue
			}
			if at, kind, err := resolve(dir); err != nil || kind != sandbox.KindDir || at != dir || !real(dir) {
				continue
			}
			tree := ""
			for _, e := range f.config(filepath.Join(dir, "config")) {
				if e.Key() == "core.worktree" {
					tree = joined(dir, e.Value)
				}
			}
			if at := filepath.Join(tree, ".git"); tree != "" && f.seals[at].Path == "" {
				f.dotgit(at)
			}
			f.gitDir(dir, tree)
		}
	}
}

func (f *finder) result() *Found {
	for _, s := range f.seals {
		f.found.Seals = append(f.found.Seals, s)
		if s.Kind == sandbox.KindDir && (s.How == sandbox.SealReadOnly || s.How == sandbox.SealTrusted) {
			f.shared(s.Path, 0)
		}
	}
	slices.Sort(f.found.Shared)
	f.found.Shared = slices.Compact(f.found.Shared)
	slices.SortFunc(f.found.Seals, func(a, b sandbox.Seal) int { return strings.Compare(a.Path, b.Path) })
	for p := range f.absent {
		f.found.Absent = append(f.found.Absent, p)
	}
	slices.Sort(f.found.Absent)
	slices.Sort(f.found.Hooks)
	f.found.Hooks = slices.Compact(f.found.Hooks)
	for i := range f.found.Repositories {
		if r := &f.found.Repositories[i]; r.Sealed {
			r.SHA256 = slices.ContainsFunc(f.config(filepath.Join(r.Common, "config")), func(e Entry) bool { return e.Key() == "extensions.objectformat" && e.Value == "sha256" })
		}
	}
	slices.SortFunc(f.found.Repositories, func(a, b Repository) int { return strings.Compare(a.Dir, b.Dir) })
	return &f.found
}

func (f *finder) note(format string, args ...any) {
	if n := fmt.Sprintf(format, args...); !f.notes[n] {
		f.notes[n] = true
		f.found.Notes = append(f.found.Notes, n)
	}
}

// writable reports whether a resolved path lies in a root.
func (f *finder) writable(path string) bool {
	return slices.ContainsFunc(f.o.Roots, func(r string) bool { return inside(path, r) })
}

func (f *finder) throwaway(path string) bool {
	return !slices.ContainsFunc(f.o.Roots, func(r string) bool { return inside(path, r) && !Throwaway(r, path) })
}

// enter keeps the git directory dir open until the function that it returns is called.
func (f *finder) enter(dir string) (leave func()) {
	before, at := f.dir, f.at
	fd, err := pathfd.Absolute(f.root, dir, unix.O_DIRECTORY)
	if err != nil {
		fd = -1
	}
	f.dir, f.at = dir, fd
	return func() {
		if fd >= 0 {
			unix.Close(fd)
		}
		f.dir, f.at = before, at
	}
}

// below gives the name of path in the git directory that is open, if it lies there.
func (f *finder) below(path string) (name string, ok bool) {
	if f.at < 0 || len(path) <= len(f.dir) || !inside(path, f.dir) {
		return "", false
	}
	return path[len(f.dir)+1:], true
}

// open opens a path without a link on the way; the link itself, if it is one.
func (f *finder) open(path string) (int, error) {
	if name, ok := f.below(path); ok {
		return pathfd.Beneath(f.at, name, 0)
	}
	return pathfd.Absolute(f.root, path, 0)
}

// kind says what stands at a path that has no link on the way (unix.S_IFMT), and whether it is a
// file with another name besides.
func (f *finder) kind(path string) (mode uint32, shared bool, err error) {
	var st unix.Stat_t
	if name, ok := f.below(path); ok && !strings.Contains(name, "/") {
		err := unix.Fstatat(f.at, name, &st, unix.AT_SYMLINK_NOFOLLOW)
		return st.Mode & unix.S_IFMT, several(&st), err
	}
	fd, err := f.open(path)
	if err != nil {
		return 0, false, err
	}
	defer unix.Close(fd)
	err = unix.Fstat(fd, &st)
	return st.Mode & unix.S_IFMT, several(&st), err
}

// several reports whether a file has more than one name.
func several(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink > 1 }

// shared finds the files in a sealed folder that have other names: by those the agent writes them.
func (f *finder) shared(dir string, depth int) {
	fd, err := pathfd.Absolute(f.root, dir, unix.O_DIRECTORY)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	//nolint:forbidigo // the open directory itself
	list, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(list)
	var dirs []string
	_ = eachName(list, f.buf[:], func(name []byte, typ byte) bool {
		if f.sealed++; f.sealed > maxSealed {
			f.note("the sealed folders hold more than %d names: which of the others are hard links was not looked at", maxSealed)
			return false
		}
		switch {
		case typ == unix.DT_DIR:
			dirs = append(dirs, string(name))
		case typ != unix.DT_REG, bytes.HasSuffix(name, []byte(".sample")): // which nothing runs
		default:
			var st unix.Stat_t
			if unix.Fstatat(list, string(name), &st, unix.AT_SYMLINK_NOFOLLOW) == nil && several(&st) {
				f.found.Shared = append(f.found.Shared, dir+"/"+string(name))
			}
		}
		return true
	})
	for _, name := range dirs {
		if depth < maxDepth && f.sealed <= maxSealed {
			f.shared(dir+"/"+name, depth+1)
		}
	}
}

// seal makes what stands at path unchangeable, whatever it is; nothing there is nothing to
// seal. It reports whether something is there.
func (f *finder) seal(path, why string) bool {
	mode, shared, err := f.kind(path)
	if errors.Is(err, unix.ELOOP) {
		if link := f.linkAbove(path); link != "" {
			// A mount point with a link on the way is none: the link stays what it is, and what it
			// leads to is sealed where it is.
			f.seal(link, why)
			if real, ok := f.behind(path); ok {
				return f.seal(real, why)
			}
			_, err := os.Lstat(path)
			return err == nil
		}
	}
	if errors.Is(err, unix.EACCES) {
		f.shut(path)
		return true // for all that is known
	}
	if err != nil || !f.writable(path) || slices.Contains(f.o.Roots, path) {
		return err == nil
	}
	s := sandbox.Seal{Path: path, How: sandbox.SealReadOnly, Why: why}
	if shared {
		f.found.Shared = append(f.found.Shared, path)
	}
	switch mode {
	case unix.S_IFREG:
		s.Kind = sandbox.KindFile
	case unix.S_IFDIR:
		s.Kind = sandbox.KindDir
	case unix.S_IFLNK:
		real, kind, err := resolve(path)
		switch {
		case err != nil || !f.writable(real):
			// The agent may have made the link: what it leads to is not for showing, nor whether
			// there is anything.
			s.How = sandbox.SealFile
			f.note("%s is a link that leads out of the folders that the agent can write, or nowhere: inside it is seen as an empty file", path)
		case kind == sandbox.KindFile:
			// The file goes over the link, and stands sealed where it is as well.
			s.Kind, s.Source = sandbox.KindFile, real
			f.seal(real, why)
		case kind == sandbox.KindDir:
			// No mount of a directory goes over a link: an empty file does, so that the link
			// stays what it is. Inside there are no hooks, then.
			s.How = sandbox.SealFile
			f.seal(real, why)
			f.note("%s is a link to a folder: inside it is seen as an empty file", path)
		default:
			s.How = sandbox.SealFile
			f.note("%s is a link to no regular file: inside it is seen as an empty file", path)
		}
	default:
		return true // a FIFO, a socket: git reads no configuration from there that could stay
	}
	if old, ok := f.seals[path]; !ok || old.How == sandbox.SealTrusted {
		f.seals[path] = s
	}
	return true
}

// maxShut bounds the shut folders that are sealed: each is a mount.
const maxShut = 256

// shut seals the folder that keeps a path from being looked at, or that path itself: one of the
// user's without permissions an agent could open again, with all that lies in it unsealed.
func (f *finder) shut(path string) {
	if !slices.ContainsFunc(f.o.Roots, func(r string) bool { return path == r || inside(path, r) }) {
		return // not the agent's to open
	}
	fd, err := f.open(path)
	switch {
	case errors.Is(err, unix.EACCES):
		f.shut(filepath.Dir(path))
		return
	case err != nil:
		return
	}
	own := mine(fd)
	unix.Close(fd)
	if _, done := f.seals[path]; done || !own {
		return
	}
	if slices.Contains(f.o.Roots, path) || f.shuts >= maxShut {
		f.found.Shut = append(f.found.Shut, path)
		return
	}
	f.shuts++
	f.note("%s may not be read: it is sealed as it is, since what git would obey in it cannot be told", path)
	f.seal(path, "a folder that may not be read")
}

// behind is where a path with links on the way leads, if the agent can write there.
func (f *finder) behind(path string) (real string, ok bool) {
	dir, kind, err := resolve(filepath.Dir(path))
	if err != nil || kind != sandbox.KindDir || !f.writable(dir) {
		return "", false
	}
	return filepath.Join(dir, filepath.Base(path)), true
}

// linkAbove gives the first link on the way from a root to what path lies in.
func (f *finder) linkAbove(path string) string {
	for _, r := range f.o.Roots {
		if !inside(path, r) {
			continue
		}
		for dir := r; ; {
			rest := strings.TrimPrefix(path[len(dir):], "/")
			name, _, more := strings.Cut(rest, "/")
			if !more {
				return ""
			}
			dir = filepath.Join(dir, name)
			if st, err := os.Lstat(dir); err != nil {
				return ""
			} else if st.Mode().Type() == os.ModeSymlink {
				return dir
			}
		}
	}
	return ""
}

// sealConfig seals a configuration file. Inside a copy stands for it, so that nothing there
// ever holds the host's own file open: see package sealguard.
func (f *finder) sealConfig(path, why string) bool {
	if !f.seal(path, why) {
		return false
	}
	if _, ok := f.seals[path]; !ok {
		if real, ok := f.behind(path); ok {
			path = real
		}
	}
	s := f.seals[path]
	f.copied(path)
	if s.Source != "" {
		f.copied(s.Source) // what a link leads to is the host's own file all the same
	}
	return true
}

// copied has a copy stand for a sealed file.
func (f *finder) copied(path string) {
	s := f.seals[path]
	if s.Kind != sandbox.KindFile || s.How != sandbox.SealReadOnly {
		return
	}
	at := path
	if s.Source != "" {
		at = s.Source
	}
	// What the agent will see is read without following a link: it lies where it can write.
	if text, ok := f.readHere(at, maxCopy); ok {
		s.How, s.Source, s.Text = sandbox.SealFile, "", text
		f.seals[path] = s
		if _, ok := f.configs[at]; !ok {
			f.configs[at] = f.parse(at, text)
		}
	}
}

// dotgit judges what is named .git in a working tree.
func (f *finder) dotgit(path string) {
	st, err := os.Lstat(path)
	if err != nil {
		return
	}
	tree := filepath.Dir(path)
	switch st.Mode().Type() {
	case os.ModeDir:
		f.gitDir(path, tree)
	case os.ModeSymlink:
		real, kind, err := resolve(path)
		if err == nil && kind == sandbox.KindFile {
			f.seal(path, "the .git of "+tree)
			return
		}
		// A .git file that says the same goes over the link, which the agent could replace. Where
		// a link leads that it made itself, and whether to anything, it is not told.
		to, lerr := os.Readlink(path)
		if lerr != nil || err == nil && f.writable(real) {
			to = real
		}
		f.seals[path] = sandbox.Seal{Path: path, How: sandbox.SealFile, Text: "gitdir: " + to + "\n", Why: "the .git link of " + tree}
		switch {
		case err != nil || kind != sandbox.KindDir:
		case f.writable(real):
			f.gitDir(real, tree)
		case f.own(real, tree):
		default:
			f.note("%s leads to %s, which the agent does not see: git does not work there; grant it with --grant %s:rw", path, real, real)
		}
	case 0:
		f.seal(path, "the .git file of "+tree)
		to, ok := strings.CutPrefix(readPointer(path), "gitdir: ")
		if !ok {
			return
		}
		real, kind, err := resolve(joined(tree, to))
		switch {
		case err != nil || kind != sandbox.KindDir:
		case f.writable(real):
			f.gitDir(real, tree)
		case f.own(real, tree):
		default:
			f.outside(real, path, tree)
		}
	default: // git takes nothing else for a .git
	}
}

// own notes a git directory that lies among what the agent writes and nobody looks through, such as
// its home: by that path git on the host comes to it.
func (f *finder) own(dir, tree string) bool {
	if f.o.Own == "" {
		return false
	}
	if of, _, err := resolve(f.o.Own); err != nil || !inside(dir, of) {
		return false
	}
	common := dir
	if to := readPointer(filepath.Join(dir, "commondir")); to != "" {
		common = joined(dir, to)
	}
	f.found.Repositories = append(f.found.Repositories, Repository{Dir: dir, Common: common, Top: tree})
	f.note("the git directory of %s is %s, which the agent writes and nothing seals: do not run git there", tree, dir)
	return true
}

// gitDir seals one git directory in a root: of a repository, a submodule, a bare one, or
// the administrative directory of a linked worktree.
func (f *finder) gitDir(dir, tree string) {
	if f.done[dir] {
		return
	}
	f.done[dir] = true
	defer f.enter(dir)()
	common := dir
	if to := readPointer(filepath.Join(dir, "commondir")); to != "" {
		real, kind, err := resolve(joined(dir, to))
		if err == nil && kind == sandbox.KindDir {
			common = real
		}
	}
	if common == dir {
		f.commonDir(dir, tree)
		return
	}
	tree = f.worktree(dir, tree)
	f.found.Repositories = append(f.found.Repositories, Repository{Dir: dir, Common: common, Top: tree, Sealed: true})
	f.tops[common] = append(f.tops[common], top{path: tree, git: dir})
	if f.writable(common) {
		if !f.done[common] {
			f.gitDir(common, "")
		}
	} else {
		f.note("%s takes its configuration from %s, which the agent does not see: git does not work there", dir, common)
	}
}

// worktree seals the administrative directory of a linked worktree and gives its tree.
func (f *finder) worktree(dir, tree string) string {
	why := "the administrative directory of a linked worktree"
	if to := readPointer(filepath.Join(dir, "gitdir")); to != "" {
		at := joined(dir, to)
		if real, _, err := resolve(filepath.Dir(at)); err == nil {
			at = filepath.Join(real, filepath.Base(at))
		}
		if !f.writable(at) {
			// Not in view: `git worktree prune` inside would take it for gone.
			f.seal(dir, "a linked worktree that lies elsewhere")
			return filepath.Dir(at)
		}
		if tree == "" {
			tree = filepath.Dir(at)
		}
		if filepath.Base(at) == ".git" && f.seals[at].Path == "" {
			f.dotgit(at)
		}
	}
	for _, name := range []string{"commondir", "gitdir"} {
		f.seal(filepath.Join(dir, name), why)
	}
	f.sealConfig(filepath.Join(dir, "config.worktree"), why)
	return tree
}

// commonDir seals what a git directory of its own has.
func (f *finder) commonDir(dir, tree string) {
	f.found.Repositories = append(f.found.Repositories, Repository{Dir: dir, Common: dir, Top: tree, Sealed: true})
	f.tops[dir] = append(f.tops[dir], top{path: tree, git: dir})
	why := "git control file of " + dir
	if !f.seal(filepath.Join(dir, "hooks"), why) && real(dir) {
		f.found.Hooks = append(f.found.Hooks, dir)
	}
	f.linked(filepath.Join(dir, "hooks"))
	if !f.sealConfig(filepath.Join(dir, "config"), why) {
		f.miss(filepath.Join(dir, "config"))
	}
	f.sealConfig(filepath.Join(dir, "config.worktree"), why)
	f.seal(filepath.Join(dir, "info/attributes"), why)
	f.miss(filepath.Join(dir, "commondir"))
	for _, name := range []string{"remotes", Branches} { // an address for a name that the configuration has not
		f.miss(filepath.Join(dir, name))
	}
	if dir == filepath.Join(tree, ".git") {
		// With a .git that is none any more, which the agent can bring about, a HEAD beside it
		// begins to make the tree itself one.
		f.miss(filepath.Join(tree, "HEAD"))
	}
	f.worktrees(dir)
}

// worktrees looks at the linked worktrees of a common directory.
func (f *finder) worktrees(common string) {
	for _, name := range names(filepath.Join(common, "worktrees"), maxAdmin) {
		dir := filepath.Join(common, "worktrees", name)
		if st, err := os.Lstat(dir); err == nil && st.IsDir() {
			f.gitDir(dir, "")
		}
	}
}

// real reports whether git takes dir for a git directory.
func real(dir string) bool {
	for _, name := range []string{"objects", "refs"} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || !st.IsDir() {
			return false
		}
	}
	_, err := os.Lstat(filepath.Join(dir, "HEAD"))
	return err == nil
}

// miss notes a name that git would obey once it appears.
func (f *finder) miss(path string) {
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) && f.writable(path) {
		f.absent[path] = true
	}
}

// linked seals what the links in a folder of hooks lead to.
func (f *finder) linked(dir string) {
	for _, name := range f.links(dir, maxNamed) {
		path := filepath.Join(dir, name)
		if real, kind, err := resolve(path); err == nil && kind == sandbox.KindFile {
			f.seal(real, "the hook "+path)
		}
	}
}

// outside judges a git directory that a .git file names and that lies in no root. The file
// may be an agent's work; so the git directory, which no agent can write, must name it in return.
func (f *finder) outside(dir, dotgit, tree string) {
	why := "the git directory of " + tree
	common := ""
	if to := readPointer(filepath.Join(dir, "commondir")); to != "" {
		if real, kind, err := resolve(joined(dir, to)); err == nil && kind == sandbox.KindDir {
			common = real
		}
	}
	back := readPointer(filepath.Join(dir, "gitdir"))
	if back != "" {
		back = joined(dir, back)
		if real, _, err := resolve(filepath.Dir(back)); err == nil {
			back = filepath.Join(real, filepath.Base(back))
		}
	}
	if common == "" || back != dotgit || filepath.Dir(filepath.Dir(dir)) != common || filepath.Base(filepath.Dir(dir)) != "worktrees" {
		f.note("%s names the git directory %s, which the agent does not see: git does not work there; grant it with --grant %s:rw", dotgit, dir, dir)
		return
	}
	if f.done[dir] {
		return
	}
	f.done[dir] = true
	f.found.Repositories = append(f.found.Repositories, Repository{Dir: dir, Common: common, Top: tree, Outside: true, Sealed: true})
	f.tops[common] = append(f.tops[common], top{path: tree, git: dir})
	f.seals[common] = sandbox.Seal{Path: common, Kind: sandbox.KindDir, How: sandbox.SealOutside, Why: why}
	for _, island := range []string{filepath.Join(common, "objects"), filepath.Join(common, "refs"), filepath.Join(common, "logs"), dir} {
		if st, err := os.Lstat(island); err == nil && st.IsDir() {
			f.seals[island] = sandbox.Seal{Path: island, Kind: sandbox.KindDir, How: sandbox.SealIsland, Why: "objects, refs and logs of a linked worktree's repository"}
		}
	}
	// From here on the islands are folders that the agent can write.
	f.o.Roots = append(slices.Clone(f.o.Roots), dir)
	for _, name := range []string{"commondir", "gitdir", "config.worktree"} {
		f.seal(filepath.Join(dir, name), "the administrative directory of a linked worktree")
	}
	w := walk([]string{dir}, f.o.Limits.filled())
	for _, p := range w.gitdirs {
		if p != dir { // a submodule of the worktree
			f.gitDir(p, "")
		}
	}
}

// above looks for the repository whose working tree holds a root: its configuration may
// name files in the root.
func (f *finder) above(root string) {
	for dir := filepath.Dir(root); ; dir = filepath.Dir(dir) {
		path := filepath.Join(dir, ".git")
		if st, err := os.Lstat(path); err == nil {
			git := path
			if st.Mode().IsRegular() {
				to, _ := strings.CutPrefix(readPointer(path), "gitdir: ")
				git = joined(dir, to)
			}
			common := git
			if to := readPointer(filepath.Join(git, "commondir")); to != "" {
				common = joined(git, to)
			}
			f.tops[common] = append(f.tops[common], top{path: dir, git: git})
			f.linked(filepath.Join(common, "hooks"))
			return
		}
		if dir == "/" {
			return
		}
	}
}

// effective follows the configuration of each repository, the user's own included, to the
// files in the roots that it names.
func (f *finder) effective() {
	type file struct{ path, base string }
	var global []file
	if f.o.Home != "" {
		for _, p := range []string{"/etc/gitconfig", filepath.Join(f.o.Home, ".config/git/config"), filepath.Join(f.o.Home, ".gitconfig")} {
			global = append(global, file{p, filepath.Dir(p)})
			// Kept in a folder of the agent's (of dotfiles, perhaps), with a link from the home.
			f.named(named{path: p, config: true, must: true}, "the user's git configuration")
			left := maxNamed
			f.follow(p, top{}, 0, &left)
		}
	}
	for common, tops := range f.tops {
		for _, t := range tops {
			files := append(slices.Clone(global), file{filepath.Join(common, "config"), common})
			files = append(files, file{filepath.Join(t.git, "config.worktree"), t.git})
			left := maxNamed
			f.rerere = false
			for _, c := range files {
				f.follow(c.path, t, 0, &left)
			}
			if left <= 0 {
				f.note("the configuration of %s names more than %d paths: those beyond are not sealed", common, maxNamed)
			}
			// git remembers resolutions of conflicts where it is told to, or where there is a folder
			// for them. What its list of conflicts names it copies there, also a file of the home, and
			// also through a link that takes the place of a file with conflicts: no list is harmless.
			if list := filepath.Join(t.git, ConflictsFile); f.writable(list) {
				f.absent[list] = true
			}
			if cache := filepath.Join(common, Resolutions); !f.rerere {
				f.miss(cache)
			}
			// With an extension it is configuration, and `git sparse-checkout` on the host turns that on.
			f.miss(filepath.Join(t.git, "config.worktree"))
		}
	}
}

// config reads a configuration file, once.
func (f *finder) config(path string) []Entry {
	if entries, ok := f.configs[path]; ok {
		return entries
	}
	entries := f.parse(path, readFile(path, maxConfig))
	f.configs[path] = entries
	return entries
}

func (f *finder) parse(path, text string) []Entry {
	entries, err := ParseConfig(text)
	if err != nil {
		f.note("%s cannot be read as git's configuration beyond its %d first entries", path, len(entries))
	}
	return entries
}

// follow seals what one configuration file names, and what its includes name.
func (f *finder) follow(config string, t top, depth int, left *int) {
	if depth > maxIncludes || *left <= 0 {
		return
	}
	run := t.path
	if run == "" {
		run = t.git
	}
	for _, e := range f.config(config) {
		f.rerere = f.rerere || e.remembers()
		base := filepath.Dir(config)
		if e.Section == "include" || e.Section == "includeif" {
			if real, _, err := resolve(base); err == nil {
				base = real // where ".." leads from
			}
		}
		for _, n := range e.names(base, run, f.o.Home) {
			if *left--; *left <= 0 {
				return
			}
			f.named(n, "named by "+e.Key()+" in "+config)
			if e.Section == "include" || e.Section == "includeif" {
				f.follow(n.path, t, depth+1, left)
			}
		}
	}
}

// named seals a path that a configuration names, if the agent could change it.
func (f *finder) named(n named, why string) {
	real, kind, err := resolve(n.path)
	if err != nil {
		if n.must && errors.Is(err, os.ErrNotExist) {
			end, links := missing(n.path)
			for _, l := range links {
				f.seal(l, why) // it could be made to lead to something
			}
			f.miss(end)
		}
		return
	}
	if n.must && f.writable(real) && (kind == sandbox.KindDir) == n.dir {
		// Once it is gone, with the folder that it lies in perhaps, it must not come anew.
		defer func() {
			if f.seals[real].Path != "" {
				f.absent[real] = true
			}
		}()
	}
	switch {
	case kind == sandbox.KindFile && n.config:
		f.sealConfig(n.path, why)
		f.sealConfig(real, why)
	case kind == sandbox.KindFile && !n.dir:
		f.seal(n.path, why)
		f.seal(real, why)
	case kind == sandbox.KindDir && n.dir:
		if slices.ContainsFunc(f.o.Roots, func(r string) bool { return inside(r, real) }) {
			f.note("%s: %s is a folder that the agent works in and cannot be sealed: what the agent writes there git on the host runs", why, real)
			return
		}
		f.seal(n.path, why)
		f.seal(real, why)
		f.linked(real)
		// husky keeps the scripts beside the folder that it names.
		if up := filepath.Dir(real); filepath.Base(real) == "_" && filepath.Base(up) == ".husky" {
			f.seal(up, why)
		}
	}
}

// missing follows a path that leads to nothing: to where something would have to come, over which
// links.
func missing(path string) (end string, links []string) {
	end = "/"
	for names := strings.Split(path, "/"); len(names) > 0; {
		name := names[0]
		names = names[1:]
		if name == ".." {
			end = filepath.Dir(end)
			continue
		}
		next := filepath.Join(end, name)
		to, err := os.Readlink(next)
		if err != nil || len(links) == maxLinks {
			end = next
			continue
		}
		links = append(links, next)
		if filepath.IsAbs(to) {
			end = "/"
		}
		names = append(strings.Split(to, "/"), names...)
	}
	return end, links
}

// trusted seals the folders at the top of projects that other programs of the host obey.
func (f *finder) trusted() {
	tops := map[string]bool{}
	for _, r := range f.o.Roots {
		tops[r] = true
	}
	for _, r := range f.found.Repositories {
		if r.Sealed && r.Top != "" {
			tops[r.Top] = true
		}
	}
	for t := range tops {
		if f.plain[t] {
			continue // the walk read all of its names
		}
		for _, name := range TrustedDirs {
			path := filepath.Join(t, name)
			st, err := os.Lstat(path)
			if err != nil || !f.writable(path) || f.seals[path].Path != "" {
				continue
			}
			switch st.Mode().Type() {
			case os.ModeDir:
				f.seals[path] = sandbox.Seal{Path: path, Kind: sandbox.KindDir, How: sandbox.SealTrusted, Why: "settings that programs of the host act on"}
			case os.ModeSymlink:
				f.note("%s is a link: what the agent puts in its place, programs of the host act on", path)
			default: // no folder: it holds no settings
			}
		}
	}
}

// resolve follows every link and says what is there.
func resolve(path string) (string, sandbox.Kind, error) {
	fd, err := pathfd.Open(path)
	if err != nil {
		return "", "", err
	}
	defer unix.Close(fd)
	real, err := pathfd.Real(fd)
	if err != nil {
		return "", "", err
	}
	mode, err := pathfd.Mode(fd)
	switch {
	case err != nil:
		return "", "", err
	case mode == unix.S_IFDIR:
		return real, sandbox.KindDir, nil
	case mode == unix.S_IFREG:
		return real, sandbox.KindFile, nil
	}
	return real, sandbox.KindOther, nil
}

func joined(dir, path string) string {
	if filepath.IsAbs(path) {
		return filepath.Clean(path)
	}
	return filepath.Join(dir, path)
}

// readPointer gives the path in a file such as .git, commondir or gitdir.
func readPointer(path string) string { return strings.TrimRight(readFile(path, maxPointer), "\r\n") }

// readFile reads a regular file of at most most bytes; anything else reads as empty. A FIFO
// that an agent left does not hold it up.
func readFile(path string, most int) string {
	text, _ := readWhole(path, most)
	return text
}

// readWhole is readFile that says whether it read all of it. The look comes before the open:
// an open that does not wait would fail where the file is under a lease.
func readWhole(path string, most int) (string, bool) {
	at, err := pathfd.Open(path)
	if err != nil {
		return "", false
	}
	return readAt(at, most)
}

// readHere is readWhole that follows no link on the way.
func (f *finder) readHere(path string, most int) (string, bool) {
	at, err := f.open(path)
	if err != nil {
		return "", false
	}
	return readAt(at, most)
}

// readAt reads what an O_PATH descriptor stands for, and closes it.
func readAt(at, most int) (string, bool) {
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return "", false
	}
	// Not through package os, which would ask whether the file can be waited for.
	fd, err := ignoringEINTR(func() (int, error) {
		//nolint:forbidigo // the inode that was looked at
		return unix.Open("/proc/self/fd/"+strconv.Itoa(at), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return "", false
	}
	defer unix.Close(fd)
	text := make([]byte, 0, min(st.Size, int64(most))+1)
	for {
		n, err := ignoringEINTR(func() (int, error) { return unix.Read(fd, text[len(text):cap(text)]) })
		switch {
		case err != nil:
			return "", false
		case n == 0:
			return string(text), true
		}
		if text = text[:len(text)+n]; len(text) > most {
			return "", false
		}
		text = slices.Grow(text, 1)
	}
}

func ignoringEINTR(call func() (int, error)) (n int, err error) {
	for {
		if n, err = call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// links lists the links among at most most names of a folder, which git reaches by any way.
func (f *finder) links(dir string, most int) (links []string) {
	at, name := unix.AT_FDCWD, dir
	if n, ok := f.below(dir); ok {
		at, name = f.at, n
	}
	//nolint:forbidigo // names only, by the way that git goes; each is judged anew
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	_ = eachName(fd, f.buf[:], func(name []byte, typ byte) bool { // what cannot be listed git does not find, either
		if typ == unix.DT_LNK {
			links = append(links, string(name))
		}
		most--
		return most > 0
	})
	return links
}

// names lists the names of at most most entries of a folder, in order.
func names(dir string, most int) []string {
	//nolint:forbidigo // names only, by the way that git goes; each is judged anew
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	file := os.NewFile(uintptr(fd), dir)
	defer file.Close()
	list, _ := file.ReadDir(most)
	var out []string
	for _, e := range list {
		out = append(out, e.Name())
	}
	slices.Sort(out)
	return out
}

// maxAlone bounds a file that is made one of its own, in bytes.
const maxAlone = 256 << 20

// alone gives what stands at a path an inode of its own, reached without following a link, if it is
// a file with more than one name.
func alone(path string) error {
	root, err := pathfd.Open("/")
	if err != nil {
		return err
	}
	defer unix.Close(root)
	dir, name, err := pathfd.Parent(root, path)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	at, err := pathfd.Beneath(dir, name, 0)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil || !several(&st) {
		unix.Close(at)
		return err
	}
	if st.Size > maxAlone {
		unix.Close(at)
		return fmt.Errorf("larger than %d bytes", maxAlone)
	}
	text, whole := readAt(at, maxAlone)
	if !whole {
		return errors.New("it cannot be read")
	}
	tmp := name + ".agentconnect-new"
	_ = unix.Unlinkat(dir, tmp, 0)
	//nolint:forbidigo // one new name in an open directory: O_EXCL follows no link
	fd, err := unix.Openat(dir, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), tmp)
	_, err = file.WriteString(text)
	times := []unix.Timespec{st.Atim, st.Mtim}
	err = errors.Join(err, unix.Fchmod(fd, st.Mode&0o7777), unix.UtimesNanoAt(dir, tmp, times, unix.AT_SYMLINK_NOFOLLOW), file.Close())
	if err == nil {
		err = unix.Renameat(dir, tmp, dir, name)
	}
	if err != nil {
		_ = unix.Unlinkat(dir, tmp, 0)
	}
	return err
}

// makeHooks makes an empty hooks/ in a git directory, reached without following a link.
func makeHooks(dir string) error {
	at, err := pathfd.Directory(dir)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	if err := unix.Mkdirat(at, "hooks", 0o755); err != nil && err != unix.EEXIST {
		return &os.PathError{Op: "mkdir", Path: filepath.Join(dir, "hooks"), Err: err}
	}
	return nil
}
