package sealguard

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/gitseal"
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
			if err := g.Inside(map[string]gitseal.Role{git: gitseal.GitDir}, map[string]bool{}); err != nil {
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

// A name that git obeys, and a sealed file, in a folder that is shut before anybody looks: neither
// counts as gone, since the folder can be opened again.
func TestAgentThatShutsAFolderOverASealIsStopped(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("needs an ordinary user")
	}
	for name, plant := range map[string]func(t *testing.T, ws string){
		"new name": func(t *testing.T, ws string) {
			do(t, os.Mkdir(filepath.Join(ws, "tools/hooks"), 0o700), os.Chmod(filepath.Join(ws, "tools"), 0))
		},
		"sealed file": func(t *testing.T, ws string) {
			do(t, os.Mkdir(filepath.Join(ws, "other"), 0o700), os.Chmod(filepath.Join(ws, "sub"), 0)) // what is watched
		},
	} {
		t.Run(name, func(t *testing.T) {
			ws := t.TempDir()
			sealed := filepath.Join(ws, "sub/.git")
			do(t, os.Mkdir(filepath.Join(ws, "tools"), 0o700), os.Mkdir(filepath.Join(ws, "sub"), 0o700), os.WriteFile(sealed, []byte("gitdir: x\n"), 0o600))
			t.Cleanup(func() { _, _ = os.Chmod(filepath.Join(ws, "tools"), 0o700), os.Chmod(filepath.Join(ws, "sub"), 0o700) })
			stopped := make(chan string, 1)
			g, err := New(Options{Roots: []string{ws}, Stop: func(why string) {
				select {
				case stopped <- why:
				default:
				}
			}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(g.Close)
			g.Expect(&sandbox.Plan{Mounts: []sandbox.Mount{{Op: sandbox.OpBind, Kind: sandbox.KindFile, Source: sealed, Target: sealed, Sealed: true}}},
				[]string{filepath.Join(ws, "tools/hooks"), filepath.Join(ws, "other")})
			g.mu.Lock() // the agent is faster
			plant(t, ws)
			g.mu.Unlock()
			select {
			case <-stopped:
			case <-time.After(5 * time.Second):
				t.Error("it goes on")
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
