package gitseal

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
)

// place is a folder with what a test puts in it.
type place struct {
	t   *testing.T
	dir string
}

func newPlace(t *testing.T) place {
	t.Helper()
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("missing: git")
	}
	real, _, err := resolve(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return place{t, real}
}

func (p place) path(rel string) string { return filepath.Join(p.dir, rel) }

// sh runs a script there, with a git that knows no configuration but the repository's.
func (p place) sh(script string) {
	p.t.Helper()
	cmd := exec.Command("/bin/sh", "-ec", script)
	cmd.Dir = p.dir
	cmd.Env = []string{
		"PATH=/usr/bin:/bin", "HOME=" + p.dir, "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b",
		"GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_COUNT=2", "GIT_CONFIG_KEY_0=protocol.file.allow", "GIT_CONFIG_VALUE_0=always", "GIT_CONFIG_KEY_1=init.defaultBranch", "GIT_CONFIG_VALUE_1=main",
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		p.t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// find looks through ws below the place.
func (p place) find(limits Limits) *Found {
	return Find(Options{Roots: []string{p.path("ws")}, Home: p.path("home"), Limits: limits})
}

// seals are the seals of a kind, relative to the place.
func (p place) seals(f *Found, how ...sandbox.SealKind) []string {
	var out []string
	for _, s := range f.Seals {
		if slices.Contains(how, s.How) {
			out = append(out, p.rel(s.Path))
		}
	}
	return out
}

func (p place) rel(path string) string { return strings.TrimPrefix(path, p.dir+"/") }

func (p place) rels(paths []string) []string {
	var out []string
	for _, path := range paths {
		out = append(out, p.rel(path))
	}
	return out
}

func (p place) want(f *Found, want ...string) {
	p.t.Helper()
	got := p.seals(f, sandbox.SealReadOnly, sandbox.SealFile)
	slices.Sort(want)
	if d := cmp.Diff(want, got); d != "" {
		p.t.Errorf("sealed (-want +got):\n%s%s", d, strings.Join(f.Notes, "\n"))
	}
}

func says(t *testing.T, f *Found, words ...string) {
	t.Helper()
	all := strings.Join(f.Notes, "\n")
	for _, w := range words {
		if !strings.Contains(all, w) {
			t.Errorf("the notes do not say %q:\n%s", w, all)
		}
	}
	if len(words) == 0 && all != "" {
		t.Errorf("notes:\n%s", all)
	}
}

func TestPlainNestedSubmoduleWorktreeAndBareRepositoriesAreFound(t *testing.T) {
	p := newPlace(t)
	p.sh(`git init -q lib && git -C lib commit -q --allow-empty -m x
git init -q ws && cd ws && git submodule --quiet add ../lib sub/mod && git commit -qm x
git init -q a/b && git init -q --bare bare.git && git worktree add -q in && git worktree add -q ../out
git -C a/b commit -q --allow-empty -m x && rm -r a/b/.git/hooks && : > a/b/.git/info/attributes
mkdir -p node_modules/x && git init -q node_modules/x`)
	f := p.find(Limits{})
	p.want(f, "ws/.git/config", "ws/.git/hooks", "ws/.git/modules/sub/mod/config", "ws/.git/modules/sub/mod/hooks", "ws/sub/mod/.git",
		"ws/a/b/.git/config", "ws/a/b/.git/info/attributes", "ws/bare.git/config", "ws/bare.git/hooks", "ws/in/.git",
		"ws/.git/worktrees/in/commondir", "ws/.git/worktrees/in/gitdir", "ws/.git/worktrees/out")
	if got := p.rels(f.Hooks); !slices.Equal(got, []string{"ws/a/b/.git"}) {
		t.Errorf("without hooks: %q", got)
	}
	want := []string{"ws/HEAD", "ws/a/b/HEAD"}
	for _, dir := range []string{"ws/.git", "ws/.git/modules/sub/mod", "ws/a/b/.git", "ws/bare.git"} {
		want = append(want, dir+"/commondir", dir+"/config.worktree", dir+"/remotes", dir+"/rr-cache", dir+"/MERGE_RR")
		if _, err := os.Stat(p.path(dir + "/branches")); err != nil { // git made it once
			want = append(want, dir+"/branches")
		}
	}
	for _, dir := range []string{"ws/.git/worktrees/in", "ws/.git/worktrees/out"} {
		want = append(want, dir+"/config.worktree", dir+"/MERGE_RR")
	}
	slices.Sort(want)
	if d := cmp.Diff(want, p.rels(f.Absent)); d != "" {
		t.Errorf("must not appear: %s", d)
	}
	says(t, f, "1 git repositories in folders that tools make and delete", "node_modules/x/.git")
}

func TestWorktreeWhoseRepositoryLiesElsewhereIsShownOnlyIfThatNamesItInReturn(t *testing.T) {
	p := newPlace(t)
	p.sh("git init -q main && cd main && git commit -q --allow-empty -m x && git worktree add -q ../ws && git worktree add -q ../other")
	check := func(name string) {
		t.Helper()
		f := p.find(Limits{})
		if d := cmp.Diff([]string{"main/.git"}, p.seals(f, sandbox.SealOutside)); d != "" {
			t.Errorf("%s: %s", name, d)
		}
		if d := cmp.Diff([]string{"main/.git/logs", "main/.git/objects", "main/.git/refs", "main/.git/worktrees/ws"}, p.seals(f, sandbox.SealIsland)); d != "" {
			t.Errorf("%s: %s", name, d)
		}
		p.want(f, "main/.git/worktrees/ws/commondir", "main/.git/worktrees/ws/gitdir", "ws/.git")
	}
	check("absolute")
	p.sh("echo gitdir: ../main/.git/worktrees/ws > ws/.git; echo ../../../../ws/.git > main/.git/worktrees/ws/gitdir")
	check("relative")
	// What an agent could have written: the way to another worktree, to a repository, to a
	// repository that names another in return.
	for _, to := range []string{"../main/.git/worktrees/other", "../main/.git", "../other", p.path("main")} {
		p.sh("rm ws/.git; printf 'gitdir: %s\n' '" + to + "' > ws/.git")
		f := p.find(Limits{})
		if got := p.seals(f, sandbox.SealOutside, sandbox.SealIsland); len(got) > 0 {
			t.Errorf("%s opened %q", to, got)
		}
		says(t, f, "which the agent does not see")
	}
}

func TestLinksAreSealedAndWhatTheyLeadTo(t *testing.T) {
	p := newPlace(t)
	p.sh(`git init -q ws && cd ws && mv .git real && ln -s real .git && mv real/config shared && ln -s ../shared real/config
mkdir tools && : > tools/check && ln -s ../../tools/check real/hooks/pre-commit
git init -q b && mv b/.git/hooks myhooks && ln -s ../../myhooks b/.git/hooks && git init -q c && rm -r c/.git && ln -s /etc c/.git`)
	f := p.find(Limits{})
	p.want(f, "ws/.git", "ws/real/config", "ws/real/hooks", "ws/shared", "ws/tools/check", "ws/b/.git/hooks", "ws/b/.git/config", "ws/myhooks", "ws/c/.git")
	for _, s := range f.Seals {
		switch p.rel(s.Path) {
		case "ws/.git":
			if s.How != sandbox.SealFile || s.Text != "gitdir: "+p.path("ws/real")+"\n" {
				t.Errorf("%+v", s)
			}
		case "ws/real/config", "ws/shared": // the host's own file is open to nobody inside
			if s.How != sandbox.SealFile || !strings.Contains(s.Text, "[core]") {
				t.Errorf("%+v", s)
			}
		case "ws/b/.git/hooks":
			if s.How != sandbox.SealFile {
				t.Errorf("%+v", s)
			}
		}
	}
}

func TestWhatTheConfigurationNamesIsSealed(t *testing.T) {
	p := newPlace(t)
	p.sh(`mkdir home && git init -q ws && cd ws && mkdir -p .husky/_ tools more && : > tools/clean.sh && : > tools/fs && : > attrs && : > global.inc
git config core.hooksPath .husky/_ && git config filter.x.clean "sh tools/clean.sh '%f'" && git config core.fsmonitor ./tools/fs
git config include.path ../more/inc && git config core.attributesFile attrs && git config remote.origin.url ./bare.git && git init -q --bare bare.git
printf '[includeIf "gitdir:/x"]\npath = deeper\n' > more/inc && printf '[core]\neditor = %s/ws/tools/ed\n' "$PWD/.." > more/deeper && : > tools/ed
printf '[include]\npath = %s\n[init]\ntemplateDir = none-yet\n' "$PWD/global.inc" > ../home/.gitconfig
git config --add include.path not-there`)
	f := p.find(Limits{})
	p.want(f, "ws/.git/config", "ws/.git/hooks", "ws/bare.git/config", "ws/bare.git/hooks", "ws/.husky", "ws/.husky/_", "ws/tools/clean.sh", "ws/tools/fs", "ws/attrs",
		"ws/more/inc", "ws/more/deeper", "ws/tools/ed", "ws/global.inc")
	for _, path := range []string{"ws/.git/not-there", "ws/none-yet"} {
		if !slices.Contains(p.rels(f.Absent), path) {
			t.Errorf("%s may appear: %q", path, p.rels(f.Absent))
		}
	}
	// A folder inside a repository that lies above it: its configuration counts as well.
	p.sh("mv ws/.git . && git config core.hooksPath ws/tools")
	p.want(p.find(Limits{}), "ws/tools", "ws/bare.git/config", "ws/bare.git/hooks", "ws/global.inc")
	p.sh("git config core.hooksPath ws")
	says(t, p.find(Limits{}), "cannot be sealed")
}

// What every git of the user's reads may lie in a folder of dotfiles, whether that is a repository or not.
func TestTheUsersOwnConfigurationIsSealedWhereItLiesInARoot(t *testing.T) {
	p := newPlace(t)
	p.sh("mkdir -p ws/git home/.config && ln -s ../ws/gitconfig home/.gitconfig && ln -s ../../ws/git home/.config/git && printf '[include]\n\tpath = more\n' > ws/gitconfig && : > ws/git/config && : > ws/more && : > home/more && printf '[include]\n\tpath = ../more\n' > ws/git/config")
	p.want(p.find(Limits{}), "ws/git/config", "ws/gitconfig", "ws/more")
}

// What is not there yet, or is gone with a branch, is known by where it would come: also behind a
// link, such as one of a home whose dotfiles lie in a folder of their own.
func TestWhatTheConfigurationNamesMustNotComeAnew(t *testing.T) {
	p := newPlace(t)
	p.sh(`mkdir home dots && git init -q ws && ln -s ../ws/dots home/.dots && ln -s ../ws/dots/gitconfig home/.gitconfig && ln -s nowhere ws/l && mkdir -p home/.config/git ws/tools/hooks
printf '[include]\npath = ~/.dots/local\n[core]\nattributesFile = l/attrs\n' > home/.config/git/config && git -C ws config core.hooksPath tools/hooks`)
	f := p.find(Limits{})
	p.want(f, "ws/.git/config", "ws/.git/hooks", "ws/l", "ws/tools/hooks")
	for _, path := range []string{"ws/dots/local", "ws/dots/gitconfig", "ws/nowhere/attrs", "ws/tools/hooks"} {
		if !slices.Contains(p.rels(f.Absent), path) {
			t.Errorf("%s may appear: %q", path, p.rels(f.Absent))
		}
	}
}

func TestTrustedFoldersAtTheTopOfProjects(t *testing.T) {
	p := newPlace(t)
	p.sh("mkdir -p ws/.claude ws/.vscode ws/n/.idea ws/n/deep/.vscode ws/plain/.vscode && git init -q ws/n && : > ws/.codex")
	f := p.find(Limits{})
	if d := cmp.Diff([]string{"ws/.claude", "ws/.vscode", "ws/n/.idea"}, p.seals(f, sandbox.SealTrusted)); d != "" {
		t.Error(d)
	}
}

func TestLookIsBoundedAndSaysWhatItLeftOut(t *testing.T) {
	p := newPlace(t)
	p.sh("mkdir ws && cd ws && for i in 1 2 3 4 5; do git init -q r$i; done && mkdir -p d/d/d/d/d && git init -q d/d/d/d/d/r && ln -s .. d/d/up && mkfifo fifo && mkdir r1/.git/x && rm r2/.git/config && mkfifo r2/.git/config")
	says(t, p.find(Limits{}))
	says(t, p.find(Limits{Depth: 3}), "lie more than 3 deep")
	says(t, p.find(Limits{Entries: 10}), "more than 10 names")
	says(t, p.find(Limits{Time: time.Nanosecond}), "not looked through to the end")
	f := p.find(Limits{Repositories: 3})
	says(t, f, "3 git repositories beyond the first 3 are not sealed, such as "+p.path("ws/d/d/d/d/d/r"))
	if n := len(f.Repositories); n != 6 {
		t.Errorf("%d repositories are known", n)
	}
	if err := unix.Chmod(p.path("ws/d/d"), 0); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod(p.path("ws/d/d"), 0o700)
	if os.Getuid() != 0 {
		says(t, p.find(Limits{}), p.path("ws/d/d")+" may not be read")
	}
}

// What an agent can fill the folders with does not keep the look from what a person works in: the
// repository at the top and its submodules, and those that were there before it.
func TestFullFoldersHideNoRepositoryThatWasThereBefore(t *testing.T) {
	p := newPlace(t)
	p.sh("git init -q lib && cd lib && git commit -q --allow-empty -m x && cd .. && git init -q ws && cd ws && git submodule --quiet add ../lib sub && git commit -q --allow-empty -m x && git worktree add -q w && git init -q deep/er")
	p.sh("cd ws && for i in $(seq 50); do mkdir f$i; done")
	f := p.find(Limits{Entries: 20})
	says(t, f, "more than 20 names")
	p.want(f, "ws/.git/config", "ws/.git/hooks", "ws/.git/modules/sub/config", "ws/.git/modules/sub/hooks", "ws/.git/worktrees/w/commondir", "ws/.git/worktrees/w/gitdir", "ws/sub/.git", "ws/w/.git")
	p.sh("cd ws && for i in $(seq 5); do mkdir f$i/.git; done")
	f = p.find(Limits{Repositories: 4})
	says(t, f, "5 git repositories beyond the first 4")
	p.want(f, "ws/.git/config", "ws/.git/hooks", "ws/.git/modules/sub/config", "ws/.git/modules/sub/hooks", "ws/.git/worktrees/w/commondir", "ws/.git/worktrees/w/gitdir", "ws/deep/er/.git/config", "ws/deep/er/.git/hooks", "ws/sub/.git", "ws/w/.git")
}

func TestOddNamesAndBrokenFiles(t *testing.T) {
	p := newPlace(t)
	for i, name := range []string{"with space", "new\nline", "\xff\xfe", "-dash", `quo"te'`, `back\slash`} {
		path := p.path("ws/" + name)
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
		p.sh(fmt.Sprintf("git init -q t%d", i))
		if err := os.Rename(p.path(fmt.Sprintf("t%d/.git", i)), path+"/.git"); err != nil {
			t.Fatal(err)
		}
	}
	f := p.find(Limits{})
	if got := p.seals(f, sandbox.SealReadOnly, sandbox.SealFile); len(got) != 12 {
		t.Errorf("%q", got)
	}
	for _, s := range f.Seals {
		if _, err := os.Lstat(s.Path); err != nil {
			t.Error(err)
		}
	}
	for _, text := range []string{"", "gitdir: ", "gitdir: \x00", "gitdir: " + strings.Repeat("x", 9000), "gitdir: .", "gitdir: ..\n", "rubbish"} {
		if err := os.MkdirAll(p.path("ws/odd"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p.path("ws/odd/.git"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := p.seals(p.find(Limits{}), sandbox.SealReadOnly); !slices.Contains(got, "ws/odd/.git") {
			t.Errorf("%q: %q", text, got)
		}
	}
}

// A control file behind a linked folder has no mount point there: the link is sealed, and the
// file where it is, if the agent can write there; else nothing of it is shown.
func TestFileBehindALinkedFolderIsSealedWhereItIs(t *testing.T) {
	p := newPlace(t)
	p.sh(`mkdir -p out ws; echo out > out/attributes; git init -q ws/a; git init -q ws/b; mkdir ws/shared; rm -r ws/a/.git/info ws/b/.git/info; echo in > ws/shared/attributes; ln -s ../../shared ws/a/.git/info; ln -s ../../../out ws/b/.git/info`)
	f := p.find(Limits{})
	got := p.seals(f, sandbox.SealReadOnly, sandbox.SealFile)
	for _, want := range []string{"ws/a/.git/info", "ws/shared/attributes", "ws/b/.git/info"} {
		if !slices.Contains(got, want) {
			t.Errorf("%s is not sealed: %q", want, got)
		}
	}
	for _, s := range f.Seals {
		if s.Path == p.path("ws/a/.git/info/attributes") || s.Path == p.path("ws/b/.git/info/attributes") || !strings.HasPrefix(s.Path, p.path("ws")) || s.Source != "" && !strings.HasPrefix(s.Source, p.path("ws")) || strings.Contains(s.Text, "out") {
			t.Errorf("%+v", s)
		}
	}
}

func TestSealedFilesWithOtherNamesAreFound(t *testing.T) {
	p := newPlace(t)
	p.sh(`git init -q ws && cd ws && mkdir -p .vscode tools/deep && echo x > tools/deep/h && echo x > .vscode/s && echo x > free && git config core.hooksPath tools && ln .git/config c && ln tools/deep/h h && ln .vscode/s s && ln free f && ln .git/hooks/pre-commit.sample sample && touch -d @1 .git/config && chmod 600 .git/config`)
	f := p.find(Limits{})
	if d := cmp.Diff([]string{"ws/.git/config", "ws/.vscode/s", "ws/tools/deep/h"}, p.rels(f.Shared)); d != "" {
		t.Error(d)
	}
	for _, path := range f.Shared {
		if err := alone(path); err != nil {
			t.Error(err)
		}
	}
	if got := p.find(Limits{}).Shared; len(got) != 0 {
		t.Errorf("still: %q", got)
	}
	p.sh(`cd ws && cmp .git/config c && [ "$(stat -c '%a %Y' .git/config)" = "600 1" ] && test ! -e .git/config.agentconnect-new`)
}
