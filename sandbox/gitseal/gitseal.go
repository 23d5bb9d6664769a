// Package gitseal finds what git on the host would run or obey in the folders that an
// agent can write: hooks, configuration, what the configuration names, and the files that
// say where all of that lies. It reads and never writes, and it does not run git: git in a
// folder that an agent wrote is the very thing to be afraid of.
//
// What it finds becomes seals (package sandbox makes them mounts), and a list of names
// that must not appear, which no mount can forbid.
package gitseal

import (
	"slices"
	"strings"
	"time"

	"agentconnect.md/sandbox/sandbox"
)

// Options say where to look.
type Options struct {
	// Roots are the folders that the agent can write, with every link resolved.
	Roots []string
	// Home is the home of the user whose git is to be safe.
	Home string
	// Own is the agent's directory, if not empty: the agent writes its home and tmp in there, but
	// nobody else runs git in it.
	Own string
	// Limits of the look; zero values are the defaults.
	Limits Limits
}

// Limits bound a look. What lies behind them is not sealed, and said.
type Limits struct {
	Time         time.Duration
	Entries      int // names in folders
	Depth        int // folders below a root
	Repositories int // that are sealed
}

// Default limits.
const (
	maxTime         = 3 * time.Second
	maxEntries      = 2_000_000
	maxDepth        = 128
	maxRepositories = 1024
)

func (l Limits) filled() Limits {
	if l.Time <= 0 {
		l.Time = maxTime
	}
	if l.Entries <= 0 {
		l.Entries = maxEntries
	}
	if l.Depth <= 0 {
		l.Depth = maxDepth
	}
	if l.Repositories <= 0 {
		l.Repositories = maxRepositories
	}
	return l
}

// Found is what a look found.
type Found struct {
	// Repositories are the git directories in or of the roots, by path.
	Repositories []Repository
	Seals        []sandbox.Seal
	// Hooks are git directories without hooks/: an empty one must be made, since what does
	// not exist cannot be sealed.
	Hooks []string
	// Shared are sealed files that have another name besides: by that the agent could write them, so
	// they have to become files of their own.
	Shared []string
	// Absent are names that git would obey and that must not be there unless they are sealed: no
	// mount forbids a new name, so they are watched.
	Absent []string
	// Shut are folders of the user's that may not be read and cannot be sealed, either: what lies
	// in them the agent could open again.
	Shut []string
	// Notes say what is weaker than it seems.
	Notes []string
}

// Repository is one git directory.
type Repository struct {
	// Dir is the git directory; Common is where its hooks and configuration lie, mostly
	// the same.
	Dir    string
	Common string
	// Top is its working tree, if it has one.
	Top string
	// Outside: Common lies in no root, and of it objects, refs and logs alone can be written.
	Outside bool
	// SHA256: its objects are named by SHA-256.
	SHA256 bool
	// Sealed is false where it lies in a folder that tools make and throw away, or beyond
	// the limit: it is watched alone.
	Sealed bool
}

// Role is what a folder is to git: which of the folders in it git goes by.
type Role int

const (
	// Any is one in which git writes, at whatever depth.
	Any Role = iota
	// GitDir is a git directory.
	GitDir
	// Objects holds objects. Those come by rename, under names of their content; what lies in info
	// and pack git writes, and removes, by names.
	Objects
	// Worktrees holds the administrative directories of linked worktrees. git removes all of what it
	// finds behind a name there once it is of no use.
	Worktrees
)

// Below gives the role of a folder of that name in one of this role; false is one that needs no
// look: hooks are sealed, modules are git directories by themselves, what git-lfs writes comes by
// rename.
func (r Role) Below(name string) (Role, bool) {
	switch r {
	case GitDir:
		switch name {
		case "objects":
			return Objects, true
		case "worktrees":
			return Worktrees, true
		case "hooks", "modules", "lfs":
			return Any, false
		}
	case Objects:
		return Any, name == "info" || name == "pack"
	case Worktrees:
		return GitDir, true
	case Any:
	}
	return Any, true
}

// throwaway are folders whose content tools fetch and delete: a sealed repository in one
// would keep npm or CMake from removing it. An agent cannot move a sealed repository into
// one; so the names, and not an ignore file that it can write, decide.
var throwaway = map[string]bool{
	"node_modules": true, "bower_components": true, "_deps": true, ".venv": true, "venv": true, "site-packages": true, ".tox": true, ".terraform": true,
}

// Throwaway reports whether a path below root lies in a folder that tools make and delete.
func Throwaway(root, path string) bool {
	rest := strings.TrimPrefix(path, root)
	return slices.ContainsFunc(strings.Split(rest, "/"), func(name string) bool { return throwaway[name] })
}

// TrustedDirs are folders at the top of a project whose content programs of the host act
// on: sealed where they exist.
var TrustedDirs = []string{".claude", ".codex", ".gemini", ".cursor", ".vscode", ".idea", ".devcontainer"}

// TrustedFiles are files of a project whose content the host's programs act on once their
// user starts them. They stay writable; what changed is said.
var TrustedFiles = []string{".mcp.json", ".envrc", "CLAUDE.md", "AGENTS.md", "package.json", "Makefile", ".husky", ".pre-commit-config.yaml"}

// inside reports whether path is dir or lies below it. Both are clean and absolute.
func inside(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir) && path[len(dir)] == '/'
}
