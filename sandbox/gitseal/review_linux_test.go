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
	const long = `head -c 1100000 /dev/zero | tr '\0' '#'; echo`
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
		"list of conflicts in what is a link": {
			"mkdir .git/rr-cache; " + conflict + `git merge -q t || :`, `echo key > ../key; ln -sf ../key f; git add f`,
			`git commit -qm y; cp .git/rr-cache/*/postimage ../mark`, "conflicts", ".git/MERGE_RR",
		},
		"long list of conflicts": {
			"mkdir .git/rr-cache", `h=$(printf '%040d' 1); mkdir .git/rr-cache/$h; : > .git/rr-cache/$h/preimage; echo key > ../key; (printf '%s\t../key\0' $h; for i in $(seq 25000); do printf '%s.1\tnone%s\0' $h $i; done) > .git/MERGE_RR`,
			`echo y > f; git commit -qam y; cp .git/rr-cache/*/postimage ../mark`, "conflicts", ".git/MERGE_RR",
		},
		"steps behind a long comment": {
			conflict + `git checkout -q t; GIT_SEQUENCE_EDITOR='sed -i 1ibreak' git rebase -qi main 2>/dev/null`, `(` + long + `; echo 'exec echo x > ../mark') > .git/rebase-merge/git-rebase-todo`,
			`git rebase --continue`, "exec-lines", ".git/rebase-merge/git-rebase-todo",
		},
		"steps that are not read to their end": {
			conflict + `git checkout -q t; GIT_SEQUENCE_EDITOR='sed -i 1ibreak' git rebase -qi main 2>/dev/null`, `(for i in $(seq 16); do ` + long + `; done; echo 'exec echo x > ../mark') > .git/rebase-merge/git-rebase-todo`,
			`git rebase --continue`, "exec-lines", ".git/rebase-merge/git-rebase-todo",
		},
		"strategy with a long end": {
			conflict + `git checkout -q t; GIT_SEQUENCE_EDITOR='sed -i 1ibreak' git rebase -qi main 2>/dev/null`, program + `(printf 'x/y\0'; ` + long + `) > .git/rebase-merge/strategy`,
			`git rebase --continue`, "strategy", ".git/rebase-merge/strategy",
		},
		"repository that the index lists": {
			"", `git clone -q . deep/new; git -C deep/new config core.fsmonitor 'echo x > ../../../mark; false'; git -c advice.addEmbeddedRepo=false add deep/new`,
			`git status`, "submodule", "deep/new/.git",
		},
		"repository in one that the index lists": {
			"", `git clone -q . a; git clone -q . a/b; git -C a/b config core.fsmonitor 'echo x > ../../../mark; false'; (cd a; git add b) 2>/dev/null; git add a 2>/dev/null; git update-index --split-index`,
			`git status`, "submodule", "a/b/.git",
		},
		"options of patches": {
			conflict + `git format-patch -qo ../patches main..t; git am -q ../patches/* >/dev/null 2>&1 || :`, `echo " '--build-fake-ancestor=../mark'" > .git/rebase-apply/apply-opt; echo t1 > f; git add f`,
			`git am --continue`, "apply-options", ".git/rebase-apply/apply-opt",
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
			n, which := repositories[0].hiddenChanges()
			if n != 2 {
				t.Errorf("version %s with %s: %d", version, format, n)
			}
			p.sh("cd ws && git update-index --no-skip-worktree 22 && git update-index --skip-worktree 1")
			if n, now := repositories[0].hiddenChanges(); n != 2 || now == which {
				t.Errorf("version %s with %s: another one is hidden, %d in all, and it is not told", version, format, n)
			}
			p.sh("cd ws && git update-index --no-skip-worktree 1 && git update-index --skip-worktree 22 && git update-index --split-index")
			if n, _ := repositories[0].hiddenChanges(); n != 2 {
				t.Errorf("version %s with %s: shared, %d", version, format, n)
			}
		}
	}
}

func FuzzIndex(f *testing.F) {
	f.Add([]byte("DIRC\x00\x00\x00\x02\x00\x00\x00\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		indexEntries(b, sha1Size, func(e entry) {
			if n++; len(e.name) > len(b) {
				t.Errorf("a name of %d bytes in %d", len(e.name), len(b))
			}
		})
		if n > len(b)/60 {
			t.Errorf("%d in %d bytes", n, len(b))
		}
	})
}

// What the host began with options of its own goes on.
func TestOptionsThatGitAmHandsOnStay(t *testing.T) {
	p := newPlace(t)
	p.sh(`git init -q ws && cd ws && seq 9 > f && git add f && git commit -qm x && git checkout -qb t && seq 10 > f && git commit -qam y && git format-patch -qo ../patches HEAD~1`)
	p.sh(`cd ws && git checkout -q HEAD~1 && seq 8 > f && git commit -qam z`)
	o := Options{Roots: []string{p.path("ws")}, Home: p.path("home")}
	before := Remember(Find(o), o.Roots)
	p.sh(`cd ws; git am -q -C1 -p1 --whitespace=fix --directory=. --exclude='x*' --ignore-whitespace --reject ../patches/* >/dev/null 2>&1 || grep -q whitespace .git/rebase-apply/apply-opt`)
	if got := before.Review(o); len(got) != 0 {
		t.Errorf("%+v", got)
	}
}

// Each is a repository in which the host's next command runs what the agent wrote, and that is said
// of it; without the review's words it would be found by nobody.
func TestReviewNamesWhatRunsHoweverItIsHidden(t *testing.T) {
	const mark = `"touch mark; false"`
	for name, c := range map[string]struct{ before, plant, tree, event, path, says string }{
		"behind a long comment": {
			"", `git init -q new; (head -c 1100000 /dev/zero | tr '\0' '#'; echo; printf '[core]\n\tfsmonitor = ` + mark + `\n') >> new/.git/config`, "ws/new", "new-repository", "ws/new/.git", "config",
		},
		"among many hooks": {
			"", `git init -q new; for i in $(seq 4200); do : > new/.git/hooks/$i; done; printf '#!/bin/sh\ntouch mark' > new/.git/hooks/pre-commit; chmod +x new/.git/hooks/pre-commit`, "ws/new", "new-repository", "ws/new/.git", "hooks/",
		},
		"in the agent's home": {
			"", `mkdir -p ../agent/home new; git init -q --bare ../agent/home/g; git -C ../agent/home/g config core.fsmonitor ` + mark + `; git -C ../agent/home/g config core.bare false; echo gitdir: $PWD/../agent/home/g > new/.git`, "ws/new", "new-repository", "agent/home/g", "core.fsmonitor",
		},
		"in the configuration of a worktree": {
			"git config extensions.worktreeConfig true", `git worktree add -q new; git -C new config --worktree core.fsmonitor ` + mark, "ws/new", "new-repository", "ws/.git/worktrees/new", "core.fsmonitor",
		},
		"in a worktree with a folder that the configuration names": {
			"git config core.hooksPath tools", `git worktree add -q new; mkdir new/tools; printf '#!/bin/sh\ntouch mark' > new/tools/pre-commit; chmod +x new/tools/pre-commit`, "ws/new", "new-repository", "ws/.git/worktrees/new", "core.hookspath",
		},
		"in a repository that tools made before": {
			"mkdir node_modules; git init -q node_modules/old", `git -C node_modules/old config core.fsmonitor ` + mark, "ws/node_modules/old", "unsealed-repository", "ws/node_modules/old/.git", "core.fsmonitor",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			p.sh("git init -q ws && cd ws && echo x > f && git add f && git commit -qm x; " + c.before)
			o := Options{Roots: []string{p.path("ws")}, Home: p.path("home"), Own: p.path("agent")}
			before := Remember(Find(o), o.Roots)
			p.sh("cd ws; " + c.plant)
			got := before.Review(o)
			if !slices.ContainsFunc(got, func(f Finding) bool {
				return f.Event == c.event && p.rel(f.Path) == c.path && strings.Contains(f.Text, c.says)
			}) {
				t.Errorf("%+v", got)
			}
			p.sh("cd " + c.tree + "; (git status; git commit -q --allow-empty -m y) >/dev/null 2>&1; test -e mark")
		})
	}
}

// A linked worktree is no repository of the agent's, and what the host's runs there is the host's.
func TestWorktreesOfARepositoryWithHooksAreNoFinding(t *testing.T) {
	p := newPlace(t)
	p.sh(`git init -q ws && cd ws && echo x > f && git add f && git commit -qm x && git config core.pager less && echo > .git/hooks/pre-commit && chmod +x .git/hooks/pre-commit`)
	o := Options{Roots: []string{p.path("ws")}, Home: p.path("home")}
	before := Remember(Find(o), o.Roots)
	p.sh(`cd ws && git worktree add -q new`)
	if got := before.Review(o); len(got) != 0 {
		t.Errorf("%+v", got)
	}
}

// Its size and the time of its content an agent can set as they were.
func TestAChangeThatIsMadeToLookLikeNoneIsSaid(t *testing.T) {
	p := newPlace(t)
	p.sh(`git init -q ws && cd ws && mkdir .husky && echo good > .husky/pre-commit`)
	o := Options{Roots: []string{p.path("ws")}, Home: p.path("home")}
	before := Remember(Find(o), o.Roots)
	p.sh(`cd ws && touch -r .husky/pre-commit ../time && echo evil > .husky/pre-commit && touch -r ../time .husky/pre-commit`)
	if got := before.Review(o); len(got) != 1 || p.rel(got[0].Path) != "ws/.husky" {
		t.Errorf("%+v", got)
	}
}

// A ref that replaces an object is as good packed as it is by itself.
func TestPackedReplacementsAreSaid(t *testing.T) {
	p := newPlace(t)
	p.sh(`git init -q ws && cd ws && echo x > f && git add f && git commit -qm x && git pack-refs --all`)
	o := Options{Roots: []string{p.path("ws")}, Home: p.path("home")}
	before := Remember(Find(o), o.Roots)
	p.sh(`cd ws && git tag a && git pack-refs --all`)
	if got := before.Review(o); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	p.sh(`cd ws && git replace HEAD $(git commit-tree HEAD^{tree} -m other) && git pack-refs --all && test ! -e .git/refs/replace/*`)
	if got := before.Review(o); !slices.ContainsFunc(got, func(f Finding) bool { return f.Event == "changed" && p.rel(f.Path) == "ws/.git/packed-refs" }) {
		t.Errorf("%+v", got)
	}
}
