// git control files: what an agent would have to plant for the host's git to run it, tried
// from inside with the real git, and the same outside as the control.

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// gitConfig is the identity of every git here, inside and outside.
const gitIdentity = "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b; "

// in runs a script as the user in a folder, as a person in a terminal there would.
func (s *site) in(dir, script string) string {
	s.t.Helper()
	return s.outside("cd '" + dir + "' && " + gitIdentity + script)
}

// gitin runs a script inside the agent that must end well.
func (s *site) gitin(id, script string) string {
	s.t.Helper()
	return s.works(id, gitIdentity+script)
}

// project makes a repository with one commit.
func (s *site) project(path string) string {
	s.t.Helper()
	dir := s.mkdir(path)
	s.write(filepath.Join(path, "file"), "text\n")
	s.in(dir, "git init -q -b main && git add -A && git commit -q -m first")
	return dir
}

// Each is run in the folder of the thing $n, and must end badly there.
var (
	fileAttacks = []string{
		`echo x >> "$n"`, `echo x > x.new && mv x.new "$n"`, `rm -f "$n" && test ! -e "$n"`, `mv "$n" "$n.away"`, `ln -s /tmp/x x.l && mv -fT x.l "$n"`, `ln "$n" x.hard && echo x >> x.hard`,
	}
	dirAttacks = []string{
		`echo x > "$n/planted"`, `mv "$n" "$n.away"`, `rm -rf "$n" && test ! -e "$n"`, `mkdir x.new && mv x.new "$n/planted"`, `chmod 777 "$n"`,
	}
	// A pinned folder may be written, and must stay where it is.
	pinAttacks = []string{`mv "$n" "$n.away"`, `rmdir "$n"`, `mkdir x.new && rm -rf "$n"/x.none && mv -T x.new "$n"`}
)

// attackPaths runs attacks on each path, in one command inside the agent, and says which
// worked. As the control the same runs outside, each on a fresh copy.
func (s *site) attackPaths(id string, paths, attacks []string, control bool) {
	s.t.Helper()
	script := func(path, attack string) string {
		return fmt.Sprintf("(cd '%s' && n='%s' && %s) 2>/dev/null", filepath.Dir(path), filepath.Base(path), attack)
	}
	var inside strings.Builder
	for _, path := range paths {
		for i, a := range attacks {
			fmt.Fprintf(&inside, "%s && echo 'worked: %s: %d'\n", script(path, a), path, i)
			fmt.Fprintf(&inside, "rm -rf '%[1]s/x.new' '%[1]s/x.l' '%[1]s/x.hard'\n", filepath.Dir(path))
		}
	}
	for line := range strings.Lines(s.works(id, inside.String()+"true")) {
		s.t.Errorf("inside: %s", line)
	}
	if !control {
		return
	}
	copied := s.path("control")
	for _, path := range paths {
		var outside strings.Builder
		for i, a := range attacks {
			at := filepath.Join(copied, filepath.Base(path))
			fmt.Fprintf(&outside, "rm -rf %[1]s && mkdir %[1]s && cp -a '%[2]s' %[1]s/ && %[3]s || echo 'failed: %[2]s: %[4]d'\n", copied, path, script(at, a), i)
		}
		for line := range strings.Lines(s.outside(outside.String() + "rm -rf " + copied)) {
			s.t.Errorf("outside it fails too, so it proves nothing: %s", line)
		}
	}
}

// sealed tries to change what lies at paths below dir, pinned to move folders away.
func (s *site) sealed(id, dir string, paths ...string) {
	s.t.Helper()
	var files, dirs []string
	for _, p := range paths {
		path := filepath.Join(dir, p)
		if st, err := os.Stat(path); err != nil {
			s.t.Errorf("it is not there: %v", err)
		} else if st.IsDir() {
			dirs = append(dirs, path)
		} else {
			files = append(files, path)
		}
	}
	s.attackPaths(id, files, fileAttacks, true)
	s.attackPaths(id, dirs, dirAttacks, true)
}

func (s *site) pinned(id, dir string, paths ...string) {
	s.t.Helper()
	for i, p := range paths {
		paths[i] = filepath.Join(dir, p)
	}
	s.attackPaths(id, paths, pinAttacks, false)
}

func TestHooksAndConfigOfEveryKindOfRepositoryAreSealed(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.project("repo/deep/er/nested")
	s.project("lib")
	s.in(ws, "git -c protocol.file.allow=always submodule --quiet add ../lib sub && git commit -q -m sub && git worktree add -q ../repo/linked -b linked && git worktree add -q ../elsewhere -b elsewhere && git init -q --bare bare.git && git config extensions.worktreeConfig true && git config --worktree user.name w")
	s.write("repo/.git/info/attributes", "")
	s.add("alice", "--workspace", ws)
	s.start()
	s.sealed("alice", ws, ".git/hooks", ".git/config", ".git/config.worktree", ".git/info/attributes",
		"deep/er/nested/.git/hooks", "deep/er/nested/.git/config",
		".git/modules/sub/hooks", ".git/modules/sub/config", "sub/.git",
		"linked/.git", ".git/worktrees/linked/commondir", ".git/worktrees/linked/gitdir",
		"bare.git/hooks", "bare.git/config", ".git/worktrees/elsewhere")
	s.pinned("alice", ws, ".git", "deep", "deep/er", "deep/er/nested", "deep/er/nested/.git", ".git/modules", ".git/modules/sub", ".git/worktrees", ".git/worktrees/linked", "bare.git", "linked", "sub")
	if got := s.gitin("alice", "git -C "+ws+" worktree prune -v; git -C "+ws+" worktree list"); strings.Contains(got, "Removing") {
		t.Errorf("pruned: %s", got)
	}
	if got := s.in(s.path("elsewhere"), "git status --porcelain && git log --oneline"); !strings.Contains(got, "first") {
		t.Errorf("the worktree elsewhere: %s", got)
	}
	if got := s.in(ws, "git status --porcelain"); strings.TrimSpace(got) != "?? bare.git/\n?? deep/\n?? linked/" {
		t.Errorf("git status outside: %q", got)
	}
}
