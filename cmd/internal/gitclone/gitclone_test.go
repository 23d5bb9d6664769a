package gitclone

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSources(t *testing.T) {
	for source, ok := range map[string]bool{
		"https://example.org/a/b.git": true, "ssh://git@example.org:22/a": true, "git@example.org:a/b": true, "git://example.org/a": true, "/srv/a": true,
		"": false, "a": false, "a/b": false, "../a": false, "/srv/../a": false, "-x": false, "--upload-pack=x": false,
		"https://u:p@example.org/a": false, "https://token@example.org/a": false, "ssh://u:p@example.org/a": false,
		"ext::sh -c x": false, "ext::x://y": false, "file:///srv/a": false, "fd::17": false, "ftp://h/a": false, "https:///a": false,
		"ssh://-oProxyCommand=x/a": false, "-u@h:a": false, "git@-oX:a": false, "git@h:-a": false, "h:a": false, "x::git@h:a": false,
	} {
		if err := CheckSource(source); (err == nil) != ok {
			t.Errorf("%q: %v", source, err)
		}
	}
	if err := CheckSource("https://u:hunter2@h/a%zz"); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("the password is in the error: %v", err)
	}
}

func FuzzCheckSource(f *testing.F) {
	for _, s := range []string{"https://h/p", "git@h:p", "/a", "ext::x", "ssh://-o@h/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if CheckSource(s) == nil && (strings.HasPrefix(s, "-") || strings.Contains(strings.SplitN(s, "/", 2)[0], "::")) {
			t.Errorf("%q", s)
		}
	})
}

// sh runs a script with a git that has no configuration but an identity.
func sh(t *testing.T, dir, script string) string {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-ec", script)
	cmd.Dir, cmd.Env = dir, environ()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return strings.TrimSpace(string(out))
}

func environ() []string {
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b"}
}

func needGit(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("missing: git")
	}
}

func TestMakeLeavesNothingButObjectsRefsHeadAndOurConfiguration(t *testing.T) {
	needGit(t)
	for _, format := range []string{"sha1", "sha256"} {
		t.Run(format, func(t *testing.T) {
			dir := t.TempDir()
			src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst.git")
			mark := filepath.Join(dir, "ran")
			sh(t, dir, `git init -q -b trunk --object-format=`+format+` src && cd src && echo x > x && git add x && git commit -q -m 1 && git branch a/b && git tag -a v1 -m v1 && git pack-refs --all && git branch late
git config uploadpack.packObjectsHook 'touch `+mark+`; false' && printf '#!/bin/sh\ntouch `+mark+`\n' > .git/hooks/post-checkout && chmod +x .git/hooks/post-checkout && git stash list`)
			want := sh(t, src, "git for-each-ref --format='%(refname) %(objectname)'")
			// As an alias or a hook of another repository would have it.
			g := &Git{Environ: append(environ(), "GIT_DIR=/nonexistent", "GIT_INDEX_FILE=/nonexistent/x", "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=core.bare", "GIT_CONFIG_VALUE_0=x"), Stderr: os.Stderr}
			if err := g.Make(context.Background(), src, dst); err != nil {
				t.Fatal(err)
			}
			if got := sh(t, dir, "git --git-dir=dst.git for-each-ref --format='%(refname) %(objectname)'"); got != want {
				t.Errorf("refs: %s\nwant %s", got, want)
			}
			if got := sh(t, dst, "ls; cat HEAD; git fsck --no-progress"); got != "HEAD\nconfig\nobjects\nrefs\nref: refs/heads/trunk" {
				t.Errorf("it holds %s", got)
			}
			if _, err := os.Stat(mark); err == nil {
				t.Error("something of the source ran")
			}
			r, err := Read(dst)
			if err != nil || len(r.Odd) > 0 || len(r.IDs) != 4 {
				t.Errorf("read: %+v %v", r, err)
			}
			if err := g.Make(context.Background(), src, dst); err == nil {
				t.Error("it is made a second time over the first")
			}
		})
	}
}

func TestMakeSaysWhatItCannotTake(t *testing.T) {
	needGit(t)
	dir := t.TempDir()
	sh(t, dir, `git init -q -b trunk src && cd src && for i in 1 2; do echo $i > x && git add x && git commit -q -m $i; done && cd .. && git clone -q --depth 1 "file://$PWD/src" shallow`)
	g := &Git{Environ: environ(), Stderr: &bytes.Buffer{}}
	for source, word := range map[string]string{"shallow": "unshallow", "nowhere": "git"} {
		err := g.Make(context.Background(), filepath.Join(dir, source), filepath.Join(dir, "dst.git"))
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v", source, err)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "dst*")); len(left) > 0 {
			t.Errorf("%s left %v", source, left)
		}
	}
}

func TestReadTellsRefsFromWhatIsNone(t *testing.T) {
	dir := t.TempDir()
	id := strings.Repeat("a", 40)
	for name, text := range map[string]string{
		"refs/heads/main": id + "\n", "refs/heads/a/b": id, "refs/heads/sym": "ref: refs/heads/main\n", "refs/tags/long": strings.Repeat("b", 64) + "\n",
		"refs/heads/main.lock": "", "refs/heads/short": "abc\n", "refs/heads/big": strings.Repeat("a", maxRef+1), "refs/heads/out": "ref: ../config\n", "refs/heads/empty": "",
		"objects/aa/x": "", "objects/pack/p.pack": "",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(id), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{"refs/heads/link", "refs/heads/dir", "objects/link"} {
		if err := os.Symlink(secret, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "refs/heads/fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(r.Odd)
	want := Refs{
		IDs:   map[string]string{"refs/heads/main": id, "refs/heads/a/b": id, "refs/heads/sym": "ref: refs/heads/main", "refs/tags/long": strings.Repeat("b", 64)},
		Locks: []string{"refs/heads/main.lock"},
		Odd:   []string{"refs/heads/big", "refs/heads/dir", "refs/heads/empty", "refs/heads/fifo", "refs/heads/link", "refs/heads/out", "refs/heads/short"},
	}
	if d := cmp.Diff(want, r); d != "" {
		t.Error(d)
	}
	odd, err := Odd(dir)
	if err != nil || !slices.Equal(odd, []string{"objects/link"}) {
		t.Errorf("objects: %v %v", odd, err)
	}
	if err := Remove(dir, append(odd, r.Odd...)); err != nil {
		t.Error(err)
	}
	if r, err = Read(dir); err != nil || len(r.Odd) > 0 || len(r.IDs) != 4 {
		t.Errorf("afterwards: %+v %v", r, err)
	}
	if b, err := os.ReadFile(secret); err != nil || string(b) != id {
		t.Errorf("a link was followed: %q %v", b, err)
	}
}

func TestChangesAreNamedInOrder(t *testing.T) {
	got := Changes(map[string]string{"a": "1", "b": "1", "c": "1"}, map[string]string{"b": "2", "c": "1", "d": "1"})
	if d := cmp.Diff([]Change{{"a", "1", ""}, {"b", "1", "2"}, {"d", "", "1"}}, got); d != "" {
		t.Error(d)
	}
}

// FuzzRef: whatever a file holds, it is a ref or odd, and is read in bounds.
func FuzzRef(f *testing.F) {
	for _, s := range []string{"", strings.Repeat("0", 40), "ref: refs/heads/x", "ref: refs/../x\n", "\x00"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "refs"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "refs/x"), text, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := Read(dir)
		if err != nil || len(r.IDs)+len(r.Odd) != 1 || len(r.IDs["refs/x"]) > maxRef {
			t.Errorf("%+v %v", r, err)
		}
	})
}
