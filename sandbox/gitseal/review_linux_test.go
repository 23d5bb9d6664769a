package gitseal

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
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

// Each is left by an agent that is gone; the host's next command is the proof, without the review
// as the control.
func TestReviewTakesAwayWhatTheHostsNextCommandWouldRunOrFollow(t *testing.T) {
	const conflict = `git checkout -q -b t && for i in 1 2; do echo t$i > f; git commit -qam t$i; done; git checkout -q main; echo m > f; git commit -qam m; `
	const program = `mkdir git-merge-x; printf '#!/bin/sh\necho x > ../mark\n' > git-merge-x/y; chmod +x git-merge-x/y; `
	for name, c := range map[string]struct{ before, plant, host, event, path string }{
		"strategy of a rebase": {
			conflict + `git checkout -q t; GIT_SEQUENCE_EDITOR='sed -i 1ibreak' git rebase -qi main 2>/dev/null`, program + `echo x/y > .git/rebase-merge/strategy`,
			`git rebase --continue`, "strategy", ".git/rebase-merge/strategy",
		},
		"strategy of a cherry-pick": {
			conflict + `git cherry-pick t~1 t >/dev/null 2>&1 || :`, program + `printf '[options]\n\tstrategy = x/y\n' > .git/sequencer/opts`,
			`echo r > f; git add f; git -c core.editor=true cherry-pick --continue`, "strategy", ".git/sequencer/opts",
		},
		"link": {"", `rm .git/logs/HEAD; ln -s ../../../mark .git/logs/HEAD; : > ../mark`, `git checkout -q -b side`, "link", ".git/logs/HEAD"},
		"link in a folder that cannot be listed": {
			"", `rm -r .git/logs; mkdir .git/logs; ln -s ../../../mark .git/logs/HEAD; : > ../mark; chmod 300 .git/logs`,
			`git checkout -q -b side; chmod 700 .git/logs`, "link", ".git/logs/HEAD",
		},
		"link among the worktrees": {
			"", `mkdir ../gone && echo x > ../gone/mark && mkdir .git/worktrees && ln -s ../../../gone .git/worktrees/x`,
			`git gc -q; [ -e ../gone/mark ] || echo removed > ../mark`, "link", ".git/worktrees/x",
		},
		"link in the place of a graph of commits": {
			"", `ln -s ../../../../mark .git/objects/info/commit-graph`, `git gc -q`, "link", ".git/objects/info/commit-graph",
		},
		"link among the refs": {
			"git init -q ../other; cd ../other; echo y > f; git add f; git commit -qm y; cd ../ws", `echo ../../../other/.git/objects > .git/objects/info/alternates; ln -s ../../../../other/.git/refs/heads .git/refs/heads/x`,
			`git gc -q; git -C ../other rev-parse -q --verify main || echo removed > ../mark`, "link", ".git/refs/heads/x",
		},
		"list of conflicts": {
			"mkdir .git/rr-cache", `h=$(printf '%040d' 1); mkdir .git/rr-cache/$h; : > .git/rr-cache/$h/preimage; echo key > ../key; printf '%s\t../key\0' $h > .git/MERGE_RR`,
			`echo y > f; git commit -qam y; cp .git/rr-cache/*/postimage ../mark`, "conflicts", ".git/MERGE_RR",
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, reviewed := range []bool{false, true} {
				p := newPlace(t)
				p.sh("git init -q ws && cd ws && echo x > f && git add f && git commit -qm x; " + c.before)
				o := Options{Roots: []string{p.path("ws")}, Home: p.path("home")}
				before := Remember(Find(o), o.Roots)
				p.sh("cd ws; " + c.plant)
				if reviewed {
					got := before.Review(o)
					if !slices.ContainsFunc(got, func(f Finding) bool { return f.Event == c.event && p.rel(f.Path) == "ws/"+c.path }) {
						t.Errorf("%+v", got)
					}
				}
				p.sh("cd ws; (" + c.host + ") >/dev/null 2>&1 || :")
				b, err := os.ReadFile(p.path("mark"))
				if ran := err == nil && len(b) > 0; ran == reviewed {
					t.Errorf("reviewed %v, and the host's command did it: %v", reviewed, ran)
				}
			}
		})
	}
}

// Names are listed in no order: an agent fills a folder that comes before the reflogs.
func TestNoFolderHidesTheReflogs(t *testing.T) {
	p := newPlace(t)
	p.sh("git init -q ws && cd ws && echo x > f && git add f && git commit -qm x && cd .git && for i in $(seq 200); do mkdir a$i; done && rm logs/HEAD && ln -s x logs/HEAD")
	git, err := os.Open(p.path("ws/.git"))
	if err != nil {
		t.Fatal(err)
	}
	defer git.Close()
	listed, err := git.Readdirnames(-1)
	if err != nil {
		t.Fatal(err)
	}
	before := slices.IndexFunc(listed, func(n string) bool { return n[0] == 'a' })
	if before > slices.Index(listed, "logs") {
		t.Fatal("none of the folders is listed before logs")
	}
	for i := range maxInner {
		if err := os.Mkdir(filepath.Join(git.Name(), listed[before], strconv.Itoa(i)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if in := Inner(git.Name(), GitDir); !slices.Contains(in.Links, p.path("ws/.git/logs/HEAD")) || len(in.Blind) > 0 {
		t.Errorf("links %v, blind %v", in.Links, in.Blind)
	}
}

func TestLinksThatWereThereBeforeTheAgentStay(t *testing.T) {
	p := newPlace(t)
	p.sh("git init -q ws && mkdir mine && mv ws/.git/info mine/ && ln -s ../../mine/info ws/.git/info")
	o := Options{Roots: []string{p.path("ws")}, Home: p.path("home")}
	before := Remember(Find(o), o.Roots)
	if got := before.Review(o); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	if _, err := os.Stat(p.path("ws/.git/info/exclude")); err != nil {
		t.Error(err)
	}
}

func TestHiddenEntriesOfEveryVersionOfTheIndex(t *testing.T) {
	for _, version := range []string{"2", "3", "4"} {
		for _, format := range []string{"sha1", "sha256"} {
			p := newPlace(t)
			p.sh("git init -q --object-format=" + format + " ws && cd ws && git config index.version " + version + " && for i in 1 22 333 a/4444; do mkdir -p $(dirname $i); echo > $i; done && git add -A && git update-index --index-version " + version + " && git update-index --skip-worktree 22 && git update-index --assume-unchanged a/4444")
			repositories := p.find(Limits{}).Repositories
			if len(repositories) != 1 {
				t.Fatalf("%+v", repositories)
			}
			if n := repositories[0].hiddenChanges(p.path("ws/.git/index")); n != 2 {
				t.Errorf("version %s with %s: %d", version, format, n)
			}
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
