package sealguard

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// git finds a name in a folder that cannot be listed, and in one that could not be entered a
// moment ago. Root looks through both, so as root this proves nothing.
func TestLinksInFoldersWithoutPermissionsAreTakenAway(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("needs an ordinary user")
	}
	for name, c := range map[string]struct {
		link  string
		plant func(t *testing.T, ws, link string)
	}{
		"a folder that cannot be listed is moved there": {"logs/refs/heads/topic/x", func(t *testing.T, ws, link string) {
			out := filepath.Join(ws, "out")
			do(t, os.Mkdir(out, 0o700), os.Symlink("victim", filepath.Join(out, filepath.Base(link))), os.Chmod(out, 0o300), os.Rename(out, filepath.Dir(link)))
		}},
		"a folder that can only be listed is moved there": {"logs/refs/heads/topic/deep/x", func(t *testing.T, ws, link string) {
			out := filepath.Join(ws, "out")
			do(t, os.MkdirAll(filepath.Join(out, "deep"), 0o700), os.Symlink("victim", filepath.Join(out, "deep", filepath.Base(link))), os.Chmod(out, 0o600), os.Rename(out, filepath.Dir(filepath.Dir(link))))
		}},
		"a watched folder is shut behind the link": {"logs/refs/heads/x", func(t *testing.T, _, link string) {
			do(t, os.Symlink("victim", link), os.Chmod(filepath.Dir(link), 0))
		}},
		"a folder above is shut behind the link": {"logs/refs/heads/x", func(t *testing.T, _, link string) {
			do(t, os.Symlink("victim", link), os.Chmod(filepath.Dir(filepath.Dir(link)), 0))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			ws := t.TempDir()
			git := filepath.Join(ws, ".git")
			do(t, os.MkdirAll(filepath.Join(git, "logs/refs/heads"), 0o700))
			t.Cleanup(func() { // what is still shut cannot be removed
				_ = filepath.WalkDir(ws, func(path string, d fs.DirEntry, _ error) error {
					if d != nil && d.IsDir() {
						_ = os.Chmod(path, 0o700)
					}
					return nil
				})
			})
			g, err := New(Options{Roots: []string{ws}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(g.Close)
			if err := g.Inside(map[string]bool{git: true}, map[string]bool{}); err != nil {
				t.Fatal(err)
			}
			link := filepath.Join(git, c.link)
			g.mu.Lock() // the agent is faster
			c.plant(t, ws, link)
			g.mu.Unlock()
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for end := time.Now().Add(5 * time.Second); ; <-tick.C {
				_, err := os.Lstat(link)
				if errors.Is(err, fs.ErrNotExist) {
					return
				}
				if time.Now().After(end) {
					t.Fatalf("the link stays: %v", err)
				}
			}
		})
	}
}

func do(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
