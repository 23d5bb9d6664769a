package gitseal

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What git reads, in the form of `git config --list -z`: the truth to compare with.
func gitReads(t testing.TB, text string) (string, bool) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("git", "config", "--no-includes", "-f", path, "--list", "-z")
	cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=/nonexistent"}
	cmd.Dir = t.TempDir()
	out, err := cmd.Output()
	return string(out), err == nil
}

func weRead(text string) (string, bool) {
	entries, err := ParseConfig(text)
	var b strings.Builder
	for _, e := range entries {
		b.WriteString(e.Key())
		if !e.Bare {
			b.WriteString("\n" + e.Value)
		}
		b.WriteByte(0)
	}
	return b.String(), err == nil
}

var configs = []string{
	"[core]\n\tbare = false\n\thooksPath = .husky\n",
	"[core] bare\n[a \"b.c\"] d = e ; comment\n",
	"[CORE]\nfsMonitor = \"a b\" \\\n  more # not this\n",
	"[alias]\n\tx = \"!sh -c 'a; b # c'\"\n",
	"[filter \"x\\\"y\\\\\"]\nclean = a\\tb\\nc\n",
	"[include]\npath = ../x\n[includeIf \"gitdir:~/a\"]\npath=b\n",
	"\ufeff[a]\nb=c\n",
	"[a.B]\nc=d\r\n[e]f=g\r\n",
	"[a]\nb = x  \"  y  \"  \n",
	"[a]\n b = \\\"q\\\" \\\n\n c=\n d\n",
	"[a]\nb = \"unclosed\n", "[a\n", "[a]\n=x\n", "x=y\n", "[a]\nb c\n", "[a \"b\"\nc=d\n", "[a]\nb=\\x\n", "[a] b = c\\", "[a]\nb=c", "", "#", "[a.]\nb=c\n", "[a \"\"]\nb=c\n",
}

func TestConfigurationIsReadAsGitDoes(t *testing.T) {
	for _, text := range configs {
		want, ok := gitReads(t, text)
		got, ours := weRead(text)
		if ok != ours || ok && got != want {
			t.Errorf("%q\ngit  %v %q\nours %v %q", text, ok, want, ours, got)
		}
	}
}

func FuzzConfiguration(f *testing.F) {
	for _, text := range configs {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		entries, _ := ParseConfig(text)
		for _, e := range entries {
			if e.Name == "" || e.Section != strings.ToLower(e.Section) {
				t.Errorf("%q: %+v", text, e)
			}
			e.Executable()
			e.names("/base", "/top", "/home")
		}
		if os.Getenv("FUZZ_BESIDE_GIT") == "" || strings.ContainsRune(text, 0) {
			return
		}
		if want, ok := gitReads(t, text); ok {
			if got, ours := weRead(text); !ours || got != want {
				t.Errorf("%q\ngit  %q\nours %v %q", text, want, ours, got)
			}
		}
	})
}

func TestExecutableKeys(t *testing.T) {
	keys, err := ExecutableKeys(`[core]
	repositoryformatversion = 0
	filemode = true
	fsmonitor = true
	editor = vi
	sshCommand = evil
[remote "origin"]
	url = https://example.com/x
	fetch = +refs/heads/*:refs/remotes/origin/*
	uploadpack = evil
[remote "x"]
	url = ext::sh -c evil
[url "ext::sh -c evil "]
	insteadOf = https://
[branch "main"]
	remote = origin
	merge = refs/heads/main
[user]
	name = a
[filter "lfs"]
	process = git-lfs filter-process
	required = true
[submodule "a"]
	url = ../a
	update = !evil
	active = true
[submodule "b"]
	update = checkout
[pager]
	log = true
	diff = evil
[include]
	path = x
[protocol "ext"]
	allow = always
[protocol "file"]
	allow = always
[credential "https://x"]
	helper = evil
[difftool "x"]
	cmd = evil
`)
	want := []string{
		"core.editor=vi", "core.sshcommand=evil", "remote.origin.uploadpack=evil", "remote.x.url=ext::sh -c evil", "url.ext::sh -c evil .insteadof=https://",
		"filter.lfs.process=git-lfs filter-process", "submodule.a.update=!evil", "pager.diff=evil", "include.path=x", "protocol.ext.allow=always",
		"credential.https://x.helper=evil", "difftool.x.cmd=evil",
	}
	if d := cmp.Diff(want, keys); d != "" || err != nil {
		t.Errorf("%v\n%s", err, d)
	}
}
