package agent

import (
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/fileid"
	"agentconnect.md/sandbox/sandbox"
)

func TestFoldersAreThoseOfTheFilesAsTheyAreNow(t *testing.T) {
	root := t.TempDir()
	s := NewStore(root)
	write := func(id, workspace string) {
		t.Helper()
		a := &Agent{ID: id, Runtime: "selftest", Workspace: workspace, Grants: []sandbox.Grant{{Path: "/data/" + id, Access: sandbox.ReadWrite}, {Path: "/read", Access: sandbox.ReadOnly}}}
		text, err := a.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(s.Dirs(id).Agent, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(s.Dirs(id).File, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want := func(what string, folders ...string) {
		t.Helper()
		got, err := s.Folders()
		if err != nil {
			t.Fatal(err)
		}
		if slices.Sort(got); !slices.Equal(got, folders) {
			t.Errorf("%s: %q, want %q", what, got, folders)
		}
		// A list goes by the same.
		list, err := s.List()
		if err != nil {
			t.Fatal(err)
		}
		var listed []string
		for _, e := range list {
			if e.Agent != nil {
				listed = append(listed, e.Agent.Folders()...)
			}
		}
		if slices.Sort(listed); !slices.Equal(listed, folders) {
			t.Errorf("%s: the list has %q, want %q", what, listed, folders)
		}
	}
	want("no agents")
	write("a", "/project/one")
	want("one", "/data/a", "/project/one")
	write("a", "/project/two") // in the same tick, of the same size, in place
	want("written again at once", "/data/a", "/project/two")

	// Read long after the last change it is kept, until the file is another.
	var st unix.Stat_t
	if err := unix.Lstat(s.Dirs("a").File, &st); err != nil {
		t.Fatal(err)
	}
	s.keep("a", &parsed{
		file:  fileid.Of(&st),
		agent: &Agent{ID: "a", Runtime: "selftest", Workspace: "/kept"},
	})
	want("not changed since", "/kept")
	write("b", "/project/b")
	write("a", "/project/six")
	if err := os.Chtimes(s.Dirs("a").File, time.Time{}, time.Unix(st.Mtim.Unix())); err != nil {
		t.Fatal(err)
	}
	want("another content with the old time", "/data/a", "/data/b", "/project/b", "/project/six")
	if err := os.WriteFile(s.Dirs("b").File, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	want("a broken one has none", "/data/a", "/project/six")
	if err := os.Remove(s.Dirs("a").File); err != nil {
		t.Fatal(err)
	}
	want("gone")
}
