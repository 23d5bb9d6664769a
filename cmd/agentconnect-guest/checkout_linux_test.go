package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckoutIsMadeOnceAndEndsWhatWasCutOff(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("git is missing")
	}
	base := t.TempDir()
	t.Setenv("HOME", base)
	t.Setenv("GIT_CONFIG_NOSYSTEM", "1")
	run := func(dir string, args ...string) {
		t.Helper()
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	seed := filepath.Join(base, "seed")
	run(base, "init", "-q", "-b", "main", seed)
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(seed, "file"), "first")
	run(seed, "add", "file")
	run(seed, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "-m", "one")
	run(seed, "branch", "other")
	clone := func(dir, branch string) error { return ensureClone(t.Context(), dir, seed, branch, os.Stderr) }
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			return "none"
		}
		return string(b)
	}

	dir := filepath.Join(base, "work")
	file := filepath.Join(dir, "file")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	// Cut off in the clone, and after it.
	if err := os.MkdirAll(filepath.Join(dir, fresh, ".git"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(dir, fresh, "half"), "x")
	if err := clone(dir, "other"); err != nil {
		t.Fatal(err)
	}
	if got := read(filepath.Join(dir, ".git", "HEAD")); got != "ref: refs/heads/other\n" || read(file) != "first" || read(filepath.Join(dir, fresh, "half")) != "none" {
		t.Errorf("HEAD is %q, the file %q", got, read(file))
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(dir, ".git", unfinished), "")
	if err := clone(dir, "other"); err != nil || read(file) != "first" {
		t.Errorf("cut off before the files were there: %v, %q", err, read(file))
	}
	// Whole: it is the agent's from then on.
	write(file, "mine")
	if err := clone(dir, "other"); err != nil || read(file) != "mine" {
		t.Errorf("the agent's work: %v, %q", err, read(file))
	}
	// Somebody else's folder is not touched.
	taken := filepath.Join(base, "taken")
	if err := os.Mkdir(taken, 0o700); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(taken, "notes"), "keep")
	if err := clone(taken, ""); err == nil || !strings.Contains(err.Error(), "notes") || read(filepath.Join(taken, "notes")) != "keep" {
		t.Errorf("a folder with something in it: %v", err)
	}
	// A repository without a commit.
	empty, bare := filepath.Join(base, "empty"), filepath.Join(base, "bare")
	run(base, "init", "-q", "--bare", bare)
	if err := os.Mkdir(empty, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := ensureClone(t.Context(), empty, bare, "", os.Stderr); err != nil {
		t.Errorf("without a commit: %v", err)
	}
	if err := ensureClone(t.Context(), filepath.Join(base, "nowhere"), bare, "", os.Stderr); err == nil {
		t.Error("a workspace that is not there")
	}
}
