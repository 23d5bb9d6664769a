// One session from its first commit to what an operator reads afterwards.

package e2e

import (
	"context"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// honest is a day's work. Each line must work.
var honest = []string{
	`echo a >a && git add a && git commit -q -m a`,
	`git switch -q -c topic && echo b >b && git add b && git commit -q -m b && git switch -q main && echo c >c && git add c && git commit -q -m c && git switch -q topic && git rebase -q main && git switch -q main && git merge -q topic`,
	`git worktree add -q tree -b tree && cd tree && echo d >d && git add d && git commit -q -m d`,
	`cd sub && git fetch -q && git switch -q -c work && echo e >e && git add e && git commit -q -m e && git push -q origin work && cd .. && git add sub && git commit -q -m moved`,
	`git push -q origin main tree`,
}

// hostile is what the same agent tries so that the host runs something: each line leaves $MARK
// where it works. refused says that it ends badly inside.
var hostile = []struct {
	what, script string
	refused      bool
}{
	{"a hook", `printf '#!/bin/sh\ntouch "$MARK"\n' >x && chmod +x x && mv x .git/hooks/pre-commit`, true},
	{"a hook of the submodule", `cp /bin/true .git/modules/sub/hooks/post-checkout`, true},
	{"a hook of the worktree's repository", `cd tree && printf '#!/bin/sh\ntouch "$MARK"\n' >"$(git rev-parse --git-path hooks)/post-checkout"`, true},
	{"an alias", `git config alias.st "!touch $MARK"`, true},
	{"a monitor", `git config core.fsmonitor "touch $MARK; false"`, true},
	{"a pager", `git config core.pager "touch $MARK; cat"`, true},
	{"other hooks", `git config core.hooksPath "$PWD/x"`, true},
	{"the configuration moved aside", `mv .git/config .git/c && cp .git/c .git/config`, true},
	{"the git directory moved aside", `mv .git .g && cp -r .g .git`, true},
	{"tasks of the editor", `mkdir -p .vscode && printf '{"tasks":[{"command":"touch %s","runOptions":{"runOn":"folderOpen"}}]}' "$MARK" >.vscode/tasks.json`, false},
	{"a hook of Claude Code", `mkdir -p .claude && printf '{"hooks":{"SessionStart":[{"command":"touch %s"}]}}' "$MARK" >.claude/settings.json`, false},
	{"a server for editors", `printf '{"mcpServers":{"x":{"command":"touch","args":["%s"]}}}' "$MARK" >.mcp.json`, false},
	{"a build file", `printf 'all:\n\ttouch %s\n' "$MARK" >Makefile`, false},
	{"a repository with a configuration of its own", `git init -q tool && git -C tool config core.fsmonitor "touch $MARK; false" && git -C tool config alias.st "!touch $MARK"`, false},
	{"a repository with a hook", `git init -q lib2 && printf '#!/bin/sh\ntouch "%s"\n' "$MARK" >lib2/.git/hooks/post-checkout && chmod +x lib2/.git/hooks/post-checkout`, false},
	{"a rebase that runs something", `mkdir -p .git/rebase-merge && echo "exec touch $MARK" >.git/rebase-merge/git-rebase-todo`, false},
	{"a change that status does not show", `echo hidden >>file && git update-index --skip-worktree file`, false},
	{"names that status does not show", `echo payload >>.git/info/exclude`, false},
}

func TestHostileSessionRunsNothingOnTheHostAndTheAuditTellsIt(t *testing.T) {
	s := newSite(t)
	lib := s.project("lib")
	ws := s.project("repo")
	s.in(lib, "git config receive.denyCurrentBranch ignore")
	s.in(ws, "git -c protocol.file.allow=always submodule --quiet add "+lib+" sub && git commit -q -m sub && git init -q --bare ../origin.git && git remote add origin "+s.path("origin.git")+" && git push -q origin main")
	// An agent whose own runtime does what it is told, as one does that reads a hostile page.
	s.script("alice", `exec "$guest" selftest`, "--workspace", ws, "--grant", s.path("origin.git")+":rw", "--grant", lib+":rw")
	s.start()
	s.ok("prompt", "alice", "echo hello")
	for _, line := range honest {
		if r := s.sh("alice", "set -e; "+gitIdentity+line); r.code != 0 {
			t.Errorf("%s\nexit %d: %s%s", line, r.code, r.out, r.err)
		}
	}
	mark := s.path("pwned")
	if quiet := s.in(ws, "git status --porcelain"); quiet != "?? tree/\n" {
		t.Errorf("git status after a day's work: %q", quiet)
	}
	for _, h := range hostile {
		r := s.sh("alice", "MARK='"+mark+"'; "+gitIdentity+h.script)
		if refused := r.code != 0; refused != h.refused {
			t.Errorf("%s: exit %d: %s%s", h.what, r.code, r.out, r.err)
		}
	}
	// The host's git, while the agent runs and after it.
	host := "git status && git log --oneline --stat && git diff && git -C sub status && git -C tree status && git branch -a && git stash list && git fetch -q origin && git st || true"
	s.in(ws, "("+host+") >/dev/null 2>&1")
	s.ok("agent", "stop", "alice")
	s.in(ws, "("+host+") >/dev/null 2>&1; echo z >z && git add z && git commit -q -m z && git checkout -q -b later && git rebase --continue >/dev/null 2>&1 || true")
	if exists(mark) {
		t.Errorf("something that the agent planted ran on the host")
	}
	if got := s.in(ws, "git log --oneline"); !strings.Contains(got, "moved") {
		t.Errorf("its commits: %s", got)
	}
	if got := s.in(s.path("origin.git"), "git log --oneline --all"); !strings.Contains(got, " d\n") || !strings.Contains(got, " moved\n") {
		t.Errorf("what it pushed: %s", got)
	}

	text := s.ok("audit", "alice")
	t.Logf("agentconnect audit alice:\n%s", text)
	if d := cmp.Diff(told, s.plain(text, ws, mark)); d != "" {
		t.Errorf("the audit (-want +got):\n%s", d)
	}

	// The controls. Outside nothing is refused; and what is planted does run, where git on the
	// host obeys a repository that the agent made, which the audit has named.
	for _, h := range hostile {
		if h.refused {
			s.in(s.base, "rm -rf control && cp -a repo control && cd control && MARK='"+s.path("control-mark")+"'; "+h.script)
		}
	}
	s.finish(s.command(context.Background(), "git", "-C", filepath.Join(ws, "tool"), "status"))
	if !exists(mark) {
		t.Error("control: in the repository that the agent made nothing runs either")
	}
}

// told is what the audit has of it, line by line: what was tried and refused changed nothing.
var told = []string{
	"policy add agent add: sandbox on",
	"life start started, git seals hard",
	"git changed REPO/.git/info/exclude: it changes what git shows or believes, and is not as it was",
	"git exec-lines REPO/.git/rebase-merge/git-rebase-todo: it had exec lines, which `git rebase --continue` runs: moved aside as REPO/.git/rebase-merge/git-rebase-todo.set-aside-TIME; put it back if they are yours",
	"git hidden-changes REPO/.git/index: 1 files are marked skip-worktree or assume-unchanged: git status does not show what changes in them",
	"git new-repository REPO/lib2/.git: a repository that the agent made would make git on the host run: hooks/post-checkout",
	"git new-repository REPO/tool/.git: a repository that the agent made would make git on the host run: core.fsmonitor=touch MARK; false, alias.st=!touch MARK",
	"trusted new REPO/.claude: new: programs of the host act on it",
	"trusted new REPO/.mcp.json: new: programs of the host act on it",
	"trusted new REPO/.vscode: new: programs of the host act on it",
	"trusted new REPO/Makefile: new: programs of the host act on it",
}

var asideTime = regexp.MustCompile(`set-aside-[0-9.-]+[0-9]`)

// plain is an audit log without times and places of this run.
func (s *site) plain(text, ws, mark string) []string {
	var out []string
	for line := range strings.Lines(text) {
		line = strings.ReplaceAll(strings.ReplaceAll(line, ws, "REPO"), mark, "MARK")
		if f := strings.Fields(asideTime.ReplaceAllString(line, "set-aside-TIME")); len(f) > 2 {
			out = append(out, strings.Join(f[2:], " "))
		}
	}
	return out
}
