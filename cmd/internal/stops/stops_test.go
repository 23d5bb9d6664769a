package stops

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestStopsAreKeptUntilDropped(t *testing.T) {
	root := t.TempDir()
	if got, err := List(root); err != nil || len(got) > 0 {
		t.Fatalf("of nothing: %q, %v", got, err)
	}
	if err := Add(root, "alice"); err == nil {
		t.Error("a ROOT without state was made")
	}
	if err := os.Mkdir(filepath.Join(root, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"bob", "alice", "bob", strings.Repeat("x", 63)} {
		if err := Add(root, id); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir(root), ".bob.cut-short"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := List(root); err != nil || !slices.Equal(got, []string{"alice", "bob", strings.Repeat("x", 63)}) {
		t.Errorf("%q, %v", got, err)
	}
	for _, id := range []string{"bob", "bob", "carol"} {
		if err := Drop(root, id); err != nil {
			t.Error(err)
		}
	}
	if got, err := List(root); err != nil || !slices.Equal(got, []string{"alice", strings.Repeat("x", 63)}) {
		t.Errorf("%q, %v", got, err)
	}
	if st, err := os.Stat(filepath.Join(dir(root), "alice")); err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	if st, err := os.Stat(dir(root)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", st, err)
	}
}

func TestNoNameLeavesTheFolder(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, "state", "wanted.json")
	if err := os.WriteFile(file, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"", ".", "..", "../wanted.json", "A", "a/b"} {
		if Add(root, id) == nil || Drop(root, id) == nil {
			t.Errorf("%q was taken", id)
		}
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "{}" {
		t.Errorf("%q, %v", b, err)
	}
}
