// The look at the end: what an agent left that git or another program of the host would act
// on once its user starts it. Some of it is said; what runs without a question is moved aside.

package gitseal

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox/pathfd"
)

// Bounds of a review.
const (
	maxReviewed = 1 << 20  // bytes of one file that is compared
	maxListed   = 2000     // names below a folder that is compared
	maxSteps    = 16 << 20 // bytes of what git goes on with; a longer one goes unread
	maxHooks    = 4096     // names in a folder of hooks
)

// Finding is one thing that a person should know of.
type Finding struct {
	Event string // a stable word
	Path  string
	Text  string
	Git   bool // about git; else about a file that another program trusts
}

// State is what a review compares with.
type State struct {
	repositories map[string]bool
	unsealed     map[string]string // git directories that are not sealed → what they have git run
	files        map[string]string // path → digest
	inner        map[string]Role   // folders in which links are looked for
	links        map[string]bool   // links in them that are not the agent's
}

// Inner are the folders in which a new link is the agent's, and the links that are not.
func (s *State) Inner() (folders map[string]Role, links map[string]bool) { return s.inner, s.links }

// quiet are files in a git directory that change what git shows or believes.
var quiet = []string{"info/exclude", "info/grafts", "info/attributes", "info/sparse-checkout", "shallow", "objects/info/alternates", "refs/replace", "remotes", "branches"}

// templates are those that git itself puts into a new repository.
var templates = map[string]bool{"info/exclude": true, "branches": true}

// todos are lists of steps that git goes on with, exec lines included.
var todos = []string{"rebase-merge/git-rebase-todo", "rebase-merge/git-rebase-todo.backup", "sequencer/todo"}

// remembered is what of a git directory is compared at the end; trustedNames of the top of a project.
var (
	remembered   = slices.Concat(quiet, todos, strategies, []string{applyOptions})
	trustedNames = slices.Concat(TrustedFiles, TrustedDirs)
)

// strategies are files that say how git goes on merging. A strategy is a program.
var strategies = []string{"rebase-merge/strategy", "sequencer/opts"}

// applyOptions is the file with which options `git am --continue` applies the patches that are left.
const applyOptions = "rebase-apply/apply-opt"

// ownOption is one that git am hands on. Of those of git apply others write a file wherever they are told.
var ownOption = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^'(?:-[Cp][0-9]+|--(?:no-)?(?:reject|ignore-space-change|ignore-whitespace|whitespace|directory|exclude|include)(?:=[^']*)?)'`)
})

// oddOptions reports whether there is another one among them.
func oddOptions(text string) bool {
	for text = strings.TrimSpace(text); text != ""; text = strings.TrimSpace(text) {
		own := ownOption().FindString(text)
		if own == "" {
			return true
		}
		text = text[len(own):]
	}
	return false
}

// oddStrategy reports whether such a file names another one than git's own.
func oddStrategy(name, text string) bool {
	if !strings.HasSuffix(name, "opts") {
		return !ownStrategy(strings.TrimSpace(text))
	}
	entries, err := ParseConfig(text)
	return err != nil || slices.ContainsFunc(entries, func(e Entry) bool { return e.Key() == "options.strategy" && !ownStrategy(e.Value) })
}

func ownStrategy(name string) bool {
	return slices.Contains([]string{"", "ort", "recursive", "resolve", "octopus", "ours", "subtree"}, name)
}

// newLinks are the links in a folder that were not there before the agent, and the folders that
// could not be looked at.
func (s *State) newLinks(dir string) (links, blind []string) {
	in := Inner(dir, s.inner[dir])
	return slices.DeleteFunc(in.Links, func(l string) bool { return s.links[l] }), in.Blind
}

// written are the folders of the repository that an agent writes: a part of them, where it is a
// linked worktree of one that lies elsewhere.
func (r Repository) written() map[string]Role {
	folders := map[string]Role{r.Dir: GitDir}
	if r.Outside {
		for _, name := range []string{"objects", "refs", "logs"} {
			folders[filepath.Join(r.Common, name)], _ = GitDir.Below(name)
		}
	}
	return folders
}

// dirs are the git directories that hold what an agent may have changed.
func (r Repository) dirs() []string {
	if r.Outside {
		return []string{r.Dir, r.Common}
	}
	return []string{r.Dir}
}

// Remember takes down what is there.
func Remember(found *Found, roots []string) *State {
	s := &State{repositories: map[string]bool{}, unsealed: map[string]string{}, files: map[string]string{}, inner: map[string]Role{}, links: map[string]bool{}}
	for _, r := range found.Repositories {
		s.repositories[r.Dir] = true
		if r.Sealed {
			maps.Copy(s.inner, r.written())
		}
		for _, dir := range r.dirs() {
			for _, path := range present(dir, remembered) {
				s.files[path] = digest(path)
			}
			s.files[filepath.Join(dir, packed)] = replacements(dir)
		}
		index := filepath.Join(r.Dir, "index")
		_, s.files[index] = r.hiddenChanges()
	}
	for _, r := range found.Repositories {
		if !r.Sealed {
			s.unsealed[r.Dir] = strings.Join(s.runs(r), ", ")
		}
	}
	for dir := range s.inner {
		if common, is := strings.CutSuffix(filepath.Dir(dir), "/worktrees"); is && s.inner[common] == GitDir {
			delete(s.inner, dir) // looked at with its repository
		}
	}
	for dir, role := range s.inner {
		for _, l := range Inner(dir, role).Links {
			s.links[l] = true
		}
	}
	for _, path := range trustedPaths(found, roots) {
		s.files[path] = digest(path)
	}
	return s
}

// present gives the paths of those names that a folder has. It has few of them mostly, and a
// look by descriptor costs little.
func present(dir string, names []string) (paths []string) {
	at, err := pathfd.Open(dir)
	if err != nil {
		return nil
	}
	defer unix.Close(at)
	for _, name := range names {
		var st unix.Stat_t
		if unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
			paths = append(paths, filepath.Join(dir, name))
		}
	}
	return paths
}

// trustedPaths are the paths at the top of projects that programs of the host trust, in order.
func trustedPaths(found *Found, roots []string) (paths []string) {
	tops := map[string]bool{}
	for _, r := range roots {
		tops[r] = true
	}
	for _, r := range found.Repositories {
		if r.Sealed && r.Top != "" {
			tops[r.Top] = true
		}
	}
	for _, t := range slices.Sorted(maps.Keys(tops)) {
		paths = append(paths, present(t, trustedNames)...)
	}
	slices.Sort(paths)
	return paths
}

// Review says what changed since, and moves aside what git would run by itself.
func (s *State) Review(o Options) []Finding {
	var out []Finding
	add := func(git bool, event, path, format string, args ...any) {
		out = append(out, Finding{Event: event, Path: path, Text: fmt.Sprintf(format, args...), Git: git})
	}
	root, err := pathfd.Open("/")
	if err == nil {
		defer unix.Close(root)
	}
	for _, dir := range slices.Sorted(maps.Keys(s.inner)) {
		links, blind := s.newLinks(dir)
		for _, path := range blind {
			add(true, "link", path, "git on the host writes in this folder, and it cannot be looked at for links: remove it")
		}
		for _, link := range links {
			to, err := os.Readlink(link)
			if err == nil {
				err = RemoveLink(root, link)
			}
			if err != nil {
				add(true, "link", link, "a link where git on the host writes, and it cannot be taken away: %v", err)
				continue
			}
			add(true, "link", link, "a link where git on the host writes: it is taken away; it led to %q", to)
		}
	}
	now := Find(o)
	compared, linked := map[string]bool{}, map[string]bool{}
	for _, r := range now.Repositories {
		r.links(linked)
	}
	for _, r := range now.Repositories {
		if before, is := s.unsealed[r.Dir]; is || !s.repositories[r.Dir] {
			switch runs := strings.Join(s.runs(r), ", "); {
			case runs == before:
			case is:
				add(true, "unsealed-repository", r.Dir, "it is not sealed, and what git on the host would run there is not as it was: %s", runs)
			default:
				add(true, "new-repository", r.Dir, "a repository that the agent made would make git on the host run: %s", runs)
				if linked[r.Top] && len(s.configured(r)) > 0 {
					path := filepath.Join(r.Top, ".git")
					if aside, err := SetAside(root, path); err != nil {
						add(true, "submodule", path, "the repository around it lists it as a submodule, so `git status` there runs that, and it cannot be moved aside: %v", err)
					} else {
						add(true, "submodule", path, "the repository around it listed it as a submodule, so that `git status` there would run that: moved aside as %s; put it back if it is yours", aside)
					}
				}
			}
		}
		for _, dir := range r.dirs() {
			if compared[dir] {
				continue
			}
			compared[dir] = true
			if path := filepath.Join(dir, packed); replacements(dir) != s.files[path] {
				add(true, "changed", path, "its refs/replace change what git shows, and are not as they were")
			}
			for _, name := range quiet {
				path := filepath.Join(dir, name)
				// A runtime's own sandbox makes some to mount on. An empty one says nothing, but for the
				// list of what is checked out.
				if name != "info/sparse-checkout" && s.files[path] == "" && emptyFile(path) {
					continue
				}
				if d := digest(path); d != "" && d != s.files[path] && (s.repositories[r.Dir] || !templates[name]) {
					add(true, "changed", path, "it changes what git shows or believes, and is not as it was")
				}
			}
		}
		for _, name := range strategies {
			path := filepath.Join(r.Dir, name)
			if !s.left(path, func(text string) bool { return oddStrategy(name, text) }) {
				continue
			}
			if aside, err := SetAside(root, path); err != nil {
				add(true, "strategy", path, "it names a program that `git rebase --continue` or `git cherry-pick --continue` runs, and cannot be moved aside: %v", err)
			} else {
				add(true, "strategy", path, "it named a program that `git rebase --continue` or `git cherry-pick --continue` runs: moved aside as %s; put it back if it is yours", aside)
			}
		}
		if path := filepath.Join(r.Dir, ConflictsFile); digest(path) != "" && !emptyFile(path) {
			if aside, err := SetAside(root, path); err != nil {
				add(true, "conflicts", path, "it lists files with conflicts: what lies there, or behind a link of that name, `git commit` would copy into the repository, and it cannot be moved aside: %v", err)
			} else {
				add(true, "conflicts", path, "it listed files with conflicts: what lies there, or behind a link of that name, `git commit` would copy into the repository: moved aside as %s", aside)
			}
		}
		for _, name := range todos {
			path := filepath.Join(r.Dir, name)
			if !s.left(path, executes) {
				continue
			}
			aside, err := SetAside(root, path)
			if err != nil {
				add(true, "exec-lines", path, "it has exec lines, which `git rebase --continue` runs, and cannot be moved aside: %v", err)
				continue
			}
			add(true, "exec-lines", path, "it had exec lines, which `git rebase --continue` runs: moved aside as %s; put it back if they are yours", aside)
		}
		if path := filepath.Join(r.Dir, applyOptions); s.left(path, oddOptions) {
			if aside, err := SetAside(root, path); err != nil {
				add(true, "apply-options", path, "it has options by which `git am --continue` writes to a file that they name, and cannot be moved aside: %v", err)
			} else {
				add(true, "apply-options", path, "it had options by which `git am --continue` writes to a file that they name: moved aside as %s", aside)
			}
		}
		index := filepath.Join(r.Dir, "index")
		if n, which := r.hiddenChanges(); n > 0 && which != s.files[index] {
			add(true, "hidden-changes", index, "%d files are marked skip-worktree or assume-unchanged: git status does not show what changes in them", n)
		}
	}
	// A working tree that is itself a bare repository once its .git is broken.
	for _, r := range now.Repositories {
		if r.Top == "" && filepath.Base(r.Dir) != ".git" && !s.repositories[r.Dir] {
			add(true, "bare-repository", r.Dir, "it looks like a bare repository: git run in it takes its configuration from there")
		}
	}
	for _, path := range trustedPaths(now, o.Roots) {
		switch d := digest(path); {
		case d == s.files[path] || d == "":
		case s.files[path] == "":
			add(false, "new", path, "new: programs of the host act on it")
		default:
			add(false, "changed", path, "changed: programs of the host act on it")
		}
	}
	return out
}

// left reports whether the agent left, in a file that git goes on with, what is odd; one that cannot
// be read to its end is.
func (s *State) left(path string, odd func(text string) bool) bool {
	d := digest(path)
	if d == "" || d == s.files[path] {
		return false
	}
	text, whole := readWhole(path, maxSteps)
	return !whole || odd(text)
}

// executes reports whether a list of steps runs a command.
func executes(todo string) bool {
	for line := range strings.Lines(todo) {
		if f := strings.Fields(line); len(f) > 1 && (f[0] == "exec" || f[0] == "x") {
			return true
		}
	}
	return false
}

// runs says what a repository that the agent made has git on the host run.
func (s *State) runs(r Repository) []string {
	out := s.configured(r)
	if r.Dir == r.Common || !s.repositories[r.Common] {
		out = append(out, liveHooks(filepath.Join(r.Common, "hooks"))...)
	}
	return out
}

// configured is what of it the configuration names.
func (s *State) configured(r Repository) []string {
	out := executableIn(filepath.Join(r.Dir, "config.worktree"))
	config := filepath.Join(r.Common, "config")
	if r.Dir == r.Common || !s.repositories[r.Common] {
		return append(executableIn(config), out...)
	}
	// A linked worktree of one that was there: its configuration is the host's, and may name what
	// lies in each working tree.
	entries, _ := ParseConfig(readFile(config, maxConfig))
	for _, e := range entries {
		for _, n := range e.names(r.Common, r.Top, "") {
			if _, err := os.Lstat(n.path); err == nil && r.Top != "" && n.path != r.Top && inside(n.path, r.Top) {
				out = append(out, e.Key()+"="+e.Value)
			}
		}
	}
	return out
}

// executableIn lists the entries of a configuration file that git would act on.
func executableIn(path string) []string {
	text, whole := readWhole(path, maxConfig)
	if !whole && digest(path) != "" {
		return []string{"what " + filepath.Base(path) + " says, which cannot be read to its end"}
	}
	keys, _ := ExecutableKeys(text)
	return keys
}

// liveHooks are the hooks that git would run.
func liveHooks(dir string) []string {
	var out []string
	list := names(dir, maxHooks)
	if len(list) == maxHooks {
		out = append(out, "hooks/, which holds too many names to be looked at")
	}
	for _, name := range list {
		st, err := os.Stat(filepath.Join(dir, name))
		if err == nil && !st.IsDir() && st.Mode()&0o111 != 0 && filepath.Ext(name) != ".sample" {
			out = append(out, "hooks/"+name)
		}
	}
	return out
}

// emptyFile reports whether an empty file lies there.
func emptyFile(path string) bool {
	st, err := os.Lstat(path)
	return err == nil && st.Mode().IsRegular() && st.Size() == 0
}

// digest is what a file or a folder holds, in short; empty for nothing.
func digest(path string) string {
	st, err := os.Lstat(path)
	if err != nil {
		return ""
	}
	switch {
	case st.Mode().IsRegular():
		text, ok := readWhole(path, maxReviewed)
		if !ok {
			return fmt.Sprint(st.Size(), changed(st))
		}
		return fmt.Sprintf("%v %x", st.Mode().Perm()&0o111, sha256.Sum256([]byte(text)))
	case st.Mode().Type() == fs.ModeSymlink:
		to, _ := os.Readlink(path)
		return "link " + to
	case !st.IsDir():
		return st.Mode().Type().String()
	}
	h := sha256.New()
	left := maxListed
	_ = filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if left--; left <= 0 {
			return fs.SkipAll
		}
		if err == nil && d.Type().IsRegular() {
			if st, err := d.Info(); err == nil {
				fmt.Fprintln(h, p, st.Size(), changed(st), st.Mode())
			}
			return nil
		}
		fmt.Fprintln(h, p)
		return nil
	})
	return fmt.Sprintf("folder %x", h.Sum(nil))
}

// changed is when a file was changed last: unlike the time of its content an agent cannot set it back.
func changed(st fs.FileInfo) int64 {
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		return sys.Ctim.Nano()
	}
	return st.ModTime().UnixNano()
}

// maxIndex bounds an index that is read, in bytes.
const maxIndex = 64 << 20

// hiddenChanges counts the files that the index hides from git status, at least so many, and says in
// short which. A part of the index may lie in others that are shared, and be in it once more without a name.
func (r Repository) hiddenChanges() (n int, which string) {
	h := sha256.New()
	r.index(func(text string, size int) {
		here := 0
		indexEntries([]byte(text), size, func(e entry) {
			if e.hides {
				here++
				fmt.Fprintf(h, "%s\x00", e.name)
			}
		})
		n = max(n, here)
	})
	return n, fmt.Sprintf("%x", h.Sum(nil))
}

// links adds the repositories in the working tree that the index lists.
func (r Repository) links(to map[string]bool) {
	if r.Top == "" {
		return
	}
	r.index(func(text string, size int) {
		indexEntries([]byte(text), size, func(e entry) {
			if e.link {
				to[filepath.Join(r.Top, string(e.name))] = true
			}
		})
	})
}

// index calls f with the parts of the index, and the length of an object's name in them.
func (r Repository) index(f func(text string, size int)) {
	size := sha1Size
	if r.SHA256 {
		size = sha256.Size
	}
	for list := []string{"index"}; len(list) > 0; list = list[1:] {
		text, _ := readWhole(filepath.Join(r.Dir, list[0]), maxIndex)
		if list[0] == "index" && strings.Contains(text, "link\x00") { // the extension that names the shared part
			list = append(list, shared(r.Dir)...)
		}
		f(text, size)
	}
}

// shared lists the shared parts of an index in a git directory.
func shared(dir string) []string {
	return slices.DeleteFunc(names(dir, maxHooks), func(name string) bool { return !strings.HasPrefix(name, "sharedindex.") })
}

// replacements are the refs by which git takes other objects for those asked for, as far as they are
// packed; refs/replace holds the others.
func replacements(dir string) string {
	text, whole := readWhole(filepath.Join(dir, packed), maxIndex)
	if !whole {
		return digest(filepath.Join(dir, packed))
	}
	var lines strings.Builder
	for line := range strings.Lines(text) {
		if strings.Contains(line, " refs/replace/") {
			lines.WriteString(line)
		}
	}
	return lines.String()
}

// packed is the file of a git directory that holds most refs.
const packed = "packed-refs"

// sha1Size is the length of an object's name in repositories of the usual kind.
const sha1Size = 20
