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

func TestStartsShareALookAtTheFolders(t *testing.T) {
	s := NewStore(t.TempDir())
	now, took := time.Unix(1_000_000, 0), time.Millisecond
	s.now = func() time.Time { defer func() { now = now.Add(took) }(); return now }
	add := func(id, workspace string) *Agent {
		t.Helper()
		a := &Agent{ID: id, Runtime: "selftest", Workspace: workspace}
		if err := s.Create(a); err != nil {
			t.Fatal(err)
		}
		return a
	}
	want := func(what string, a *Agent, folders ...string) {
		t.Helper()
		w, err := s.WritableFor(a)
		if err != nil {
			t.Fatal(err)
		}
		got := slices.Clone(w.All)
		slices.Sort(got)
		if got = slices.Compact(got); !slices.Equal(got, folders) {
			t.Errorf("%s: %q, want %q", what, got, folders)
		}
		for _, f := range folders {
			if !w.Has(f) {
				t.Errorf("%s: it has not %s", what, f)
			}
		}
		if w.Has("/project") {
			t.Errorf("%s: it has what nobody named", what)
		}
	}
	a := add("a", "/project/a")
	want("the first", a, "/project/a")
	b := add("b", "/project/b")
	want("a moment later", a, "/project/a") // b has not started
	want("b itself", b, "/project/a", "/project/b")
	want("after b", a, "/project/a", "/project/b")
	c := add("c", "/project/c")
	now = now.Add(shared * took)
	want("after a while", a, "/project/a", "/project/b", "/project/c")
	if err := s.Remove("b", false); err != nil {
		t.Fatal(err)
	}
	want("removed just now", c, "/project/a", "/project/b", "/project/c")
	s.LookAgain()
	want("removed, and said so", c, "/project/a", "/project/c")
	if err := s.Hold(&Agent{ID: "a", Runtime: "selftest", Workspace: "/project/held"}); err != nil {
		t.Fatal(err)
	}
	want("held", c, "/project/c", "/project/held")
	s.Release("a")
	want("released", c, "/project/a", "/project/c")
	took = time.Hour
	s.LookAgain()
	want("slow", c, "/project/a", "/project/c")
	took = 0
	add("d", "/project/d")
	now = now.Add(sharedAtMost)
	want("a second later", c, "/project/a", "/project/c", "/project/d")
	gone := &Agent{ID: "e", Runtime: "selftest", Workspace: "/project/e"}
	want("an agent whose file changed since it was read", gone, "/project/a", "/project/c", "/project/d", "/project/e")
}
