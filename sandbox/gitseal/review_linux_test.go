package gitseal

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReviewSaysWhatAnAgentLeftAndMovesExecLinesAside(t *testing.T) {
	p := newPlace(t)
	p.sh(`git init -q ws && cd ws && echo x > file && echo y > other && mkdir .vscode && echo 1 > .vscode/s && echo a > Makefile && git add -A && git commit -qm x && mkdir -p .git/rebase-merge && echo 'exec mine' > .git/rebase-merge/git-rebase-todo.backup`)
	o := Options{Roots: []string{p.path("ws")}, Home: p.path("home")}
	before := Remember(Find(o), o.Roots)
	if got := before.Review(o); len(got) != 0 {
		t.Errorf("nothing changed: %+v", got)
	}
	p.sh(`cd ws && echo hidden >> .git/info/exclude && git update-index --skip-worktree file && git update-index --assume-unchanged other && printf 'pick 123\nexec evil\n' > .git/rebase-merge/git-rebase-todo
git init -q new && git -C new config core.fsmonitor evil && git init -q harmless && git init -q hooked && echo > hooked/.git/hooks/pre-commit && chmod +x hooked/.git/hooks/pre-commit
git replace HEAD $(git commit-tree HEAD^{tree} -m other) && echo b >> Makefile && mkdir .claude && echo 2 > .vscode/s && echo {} > .mcp.json
mkdir odd && cd odd && git init -q --bare . && git config core.sshCommand evil`)
	var got []string
	for _, f := range before.Review(o) {
		got = append(got, f.Event+" "+p.rel(f.Path))
	}
	slices.Sort(got)
	want := []string{
		"bare-repository ws/odd", "changed ws/.git/info/exclude", "changed ws/.git/refs/replace", "changed ws/.vscode", "changed ws/Makefile", "exec-lines ws/.git/rebase-merge/git-rebase-todo",
		"hidden-changes ws/.git/index", "new ws/.claude", "new ws/.mcp.json", "new-repository ws/hooked/.git", "new-repository ws/new/.git", "new-repository ws/odd",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if _, err := os.Lstat(p.path("ws/.git/rebase-merge/git-rebase-todo")); err == nil {
		t.Error("the exec lines are still there")
	}
	if !slices.ContainsFunc(names(p.path("ws/.git/rebase-merge"), 10), func(n string) bool { return strings.HasPrefix(n, "git-rebase-todo.set-aside-") }) {
		t.Error("the todo is lost")
	}
}

func TestHiddenEntriesOfEveryVersionOfTheIndex(t *testing.T) {
	for _, version := range []string{"2", "3", "4"} {
		p := newPlace(t)
		p.sh("git init -q ws && cd ws && git config index.version " + version + " && for i in 1 22 333 a/4444; do mkdir -p $(dirname $i); echo > $i; done && git add -A && git update-index --index-version " + version + " && git update-index --skip-worktree 22 && git update-index --assume-unchanged a/4444")
		if n := hiddenChanges(p.path("ws/.git/index")); n != 2 {
			t.Errorf("version %s: %d", version, n)
		}
	}
}

func FuzzIndex(f *testing.F) {
	f.Add([]byte("DIRC\x00\x00\x00\x02\x00\x00\x00\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if n := hiddenEntries(b, sha1Size); n < 0 || n > len(b)/60 {
			t.Errorf("%d in %d bytes", n, len(b))
		}
	})
}
