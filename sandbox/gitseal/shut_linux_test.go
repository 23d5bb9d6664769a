package gitseal

import (
	"os"
	"slices"
	"testing"

	"agentconnect.md/sandbox/sandbox"
)

// A folder that an agent left without permissions hides what git obeys from the look at the next
// start, and the agent can open it again then.
func TestFoldersThatMayNotBeReadAreSealed(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("needs an ordinary user")
	}
	for name, c := range map[string]struct {
		shut string
		mode os.FileMode
		seal string
	}{
		"git directory":           {"ws/.git", 0, "ws/.git"},
		"git directory, listed":   {"ws/.git", 0o600, "ws/.git"},
		"git directory, entered":  {"ws/.git", 0o300, "ws/.git"},
		"folder of a repository":  {"ws/a", 0, "ws/a"},
		"folder above, to list":   {"ws/a", 0o600, "ws/a"},
		"folder that holds hooks": {"ws/tools", 0, "ws/tools"},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			p.sh(`git init -q ws && mkdir -p ws/a/b ws/tools/hooks && git init -q ws/a/b/in && git -C ws config core.hooksPath tools/hooks`)
			o := Options{Roots: []string{p.path("ws")}, Home: p.path("home")}
			t.Cleanup(func() { _ = os.Chmod(p.path(c.shut), 0o700) })
			if err := os.Chmod(p.path(c.shut), c.mode); err != nil {
				t.Fatal(err)
			}
			found := Find(o)
			if !slices.ContainsFunc(found.Seals, func(s sandbox.Seal) bool {
				return s.Path == p.path(c.seal) && s.How == sandbox.SealReadOnly && s.Kind == sandbox.KindDir
			}) || len(found.Shut) > 0 {
				t.Errorf("seals %+v, shut %v", found.Seals, found.Shut)
			}
		})
	}
}

// What cannot be sealed, since the agent is to write there, starts nothing.
func TestARootThatMayNotBeReadIsRefused(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("needs an ordinary user")
	}
	p := newPlace(t)
	p.sh(`git init -q ws`)
	t.Cleanup(func() { _ = os.Chmod(p.path("ws"), 0o700) })
	for _, mode := range []os.FileMode{0, 0o300, 0o600} {
		if err := os.Chmod(p.path("ws"), mode); err != nil {
			t.Fatal(err)
		}
		if found := Find(Options{Roots: []string{p.path("ws")}, Home: p.path("home")}); !slices.Contains(found.Shut, p.path("ws")) {
			t.Errorf("%o: %+v", mode, found)
		}
	}
}
