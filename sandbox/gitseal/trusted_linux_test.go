package gitseal

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"agentconnect.md/sandbox/sandbox"
)

// The walk spares the look for settings in folders where it saw none: it has to know all of
// their names.
func TestSettingsOfEveryNameAreFoundAtTheTopOfEveryRepository(t *testing.T) {
	root := t.TempDir()
	var want []string
	for _, name := range append(slices.Clone(TrustedDirs), "") {
		top := filepath.Join(root, "project"+name)
		for _, d := range []string{".git/objects", ".git/refs", ".git/hooks", name} {
			if err := os.MkdirAll(filepath.Join(top, d), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(top, ".git/HEAD"), []byte("ref: refs/heads/main\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if name != "" {
			want = append(want, filepath.Join(top, name))
		}
	}
	var got []string
	for _, s := range Find(Options{Roots: []string{root}, Home: t.TempDir()}).Seals {
		if s.How == sandbox.SealTrusted {
			got = append(got, s.Path)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("sealed: %q\nwant %q", got, want)
	}
}
