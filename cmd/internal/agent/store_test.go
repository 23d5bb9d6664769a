package agent

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/atomicfile"
)

func newStore(t *testing.T) *Store {
	t.Helper()
	return NewStore(t.TempDir())
}

func create(t *testing.T, s *Store, id string) {
	t.Helper()
	if err := s.Create(&Agent{ID: id, Runtime: "gemini"}); err != nil {
		t.Fatal(err)
	}
}

func TestCreateMakesEverythingPrivate(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	s := newStore(t)
	create(t, s, "alice")
	d := s.Dirs("alice")
	for path, want := range map[string]os.FileMode{
		filepath.Dir(d.Agent): 0o700, d.Agent: 0o700, d.Home: 0o700, d.Memory: 0o700, d.Tmp: 0o700, d.Workspace: 0o700, d.File: 0o600,
	} {
		fi, err := os.Stat(path)
		if err != nil {
			t.Error(err)
		} else if fi.Mode().Perm() != want {
			t.Errorf("%s: mode %v, want %v", path, fi.Mode().Perm(), want)
		}
	}
	if err := s.Create(&Agent{ID: "alice", Runtime: "x"}); !errors.Is(err, ErrExists) {
		t.Errorf("twice: %v", err)
	}
}

func TestIDsThatTryToLeave(t *testing.T) {
	s := newStore(t)
	create(t, s, "alice")
	for _, id := range []string{"../alice", "..", ".", "", "alice/../alice", "Alice", "a.b", "/etc"} {
		if _, err := s.Load(id); !errors.Is(err, ErrInvalid) {
			t.Errorf("load %q: %v", id, err)
		}
		if err := s.Create(&Agent{ID: id, Runtime: "x"}); !errors.Is(err, ErrInvalid) {
			t.Errorf("create %q: %v", id, err)
		}
		if err := s.Remove(id, true); !errors.Is(err, ErrInvalid) {
			t.Errorf("remove %q: %v", id, err)
		}
		if _, err := s.Update(id, func(*Agent) error { return nil }); !errors.Is(err, ErrInvalid) {
			t.Errorf("update %q: %v", id, err)
		}
		if d := s.Dirs(id); d != (Dirs{}) {
			t.Errorf("%q gives the paths %+v", id, d)
		}
	}
}

func TestABrokenAgentStopsNoOther(t *testing.T) {
	s := newStore(t)
	for _, id := range []string{"a", "b", "c", "d", "e", "f", "g"} {
		create(t, s, id)
	}
	write := func(id, content string) {
		t.Helper()
		if err := os.WriteFile(s.Dirs(id).File, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("b", `{"id": "b", "runt`) // cut in the middle
	write("c", `{"id": "a", "runtime": "x"}`)
	if err := os.Remove(s.Dirs("d").File); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(s.Dirs("a").File, s.Dirs("d").File); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(s.Dirs("e").File); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(s.Dirs("e").File, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(s.Dirs("f").File, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove("g", false); err != nil {
		t.Fatal(err)
	}
	odd := filepath.Join(filepath.Dir(s.Dirs("a").Agent), "Odd.Name")
	if err := os.Mkdir(odd, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(odd, "agent.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"Odd.Name": "1 to 63 characters", "a": "", "b": "ends in the middle", "c": `id is "a"`, "d": "is a link", "e": "not a regular file", "f": "chmod 600"}
	if len(list) != len(want) {
		t.Errorf("%d entries, want %d: %+v", len(list), len(want), list)
	}
	for _, e := range list {
		w, ok := want[e.ID]
		switch {
		case !ok:
			t.Errorf("unexpected %s", e.ID)
		case w == "" && (e.Err != nil || e.Agent == nil):
			t.Errorf("%s: %v", e.ID, e.Err)
		case w != "" && (e.Err == nil || e.Agent != nil || !strings.Contains(e.Err.Error(), w)):
			t.Errorf("%s: %v, want %q", e.ID, e.Err, w)
		case w != "" && !errors.Is(e.Err, ErrInvalid):
			t.Errorf("%s: %v is not ErrInvalid", e.ID, e.Err)
		}
	}
}

func TestListWithoutROOT(t *testing.T) {
	list, err := NewStore(filepath.Join(t.TempDir(), "nowhere")).List()
	if err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
}

func TestTwoCommandLinesLoseNoUpdate(t *testing.T) {
	root := t.TempDir()
	create(t, NewStore(root), "alice")
	const writers, each = 4, 10
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			s := NewStore(root)
			for i := range each {
				_, err := s.Update("alice", func(a *Agent) error {
					if a.Env == nil {
						a.Env = map[string]string{}
					}
					a.Env[fmt.Sprintf("W%d_%d", w, i)] = "x"
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	a, err := NewStore(root).Load("alice")
	if err != nil {
		t.Fatal(err)
	}
	if len(a.Env) != writers*each {
		t.Errorf("%d changes of %d are there", len(a.Env), writers*each)
	}
}

func TestALockThatIsHeldGivesUpWithAReason(t *testing.T) {
	s := newStore(t)
	create(t, s, "alice")
	unlock, err := s.lock()
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	other := NewStore(s.root)
	other.lockWait = 20 * time.Millisecond
	if _, err := other.Update("alice", func(*Agent) error { return nil }); !errors.Is(err, ErrBusy) {
		t.Errorf("%v, want ErrBusy", err)
	}
}

func TestAFailedUpdateKeepsTheOldState(t *testing.T) {
	s := newStore(t)
	create(t, s, "alice")
	before, err := os.ReadFile(s.Dirs("alice").File)
	if err != nil {
		t.Fatal(err)
	}
	mine := errors.New("no")
	for name, change := range map[string]func(*Agent) error{
		"the change fails":         func(*Agent) error { return mine },
		"the result is invalid":    func(a *Agent) error { a.Read = "x"; return nil },
		"the id changes":           func(a *Agent) error { a.ID = "bob"; return nil },
		"the text is not UTF-8":    func(a *Agent) error { a.Name = "\xff"; return nil },
		"the file is too large":    func(a *Agent) error { a.Env = map[string]string{"A": strings.Repeat("x", MaxSize)}; return nil },
		"raw JSON is not JSON":     func(a *Agent) error { a.MCPServers = []byte("["); return nil },
		"raw JSON has a key twice": func(a *Agent) error { a.RuntimeOverrides = []byte(`{"a":1,"a":2}`); return nil },
	} {
		if _, err := s.Update("alice", change); err == nil {
			t.Errorf("%s: no error", name)
		}
		after, err := os.ReadFile(s.Dirs("alice").File)
		if err != nil || string(after) != string(before) {
			t.Errorf("%s: the file changed: %s, %v", name, after, err)
		}
	}
	if _, err := s.Update("bob", func(*Agent) error { return nil }); !errors.Is(err, ErrNotFound) {
		t.Errorf("nobody: %v", err)
	}
}

func TestReadOnlyROOTCanStillBeRead(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root writes everywhere: run this test as an ordinary user")
	}
	s := newStore(t)
	create(t, s, "alice")
	agents := filepath.Dir(s.Dirs("alice").Agent)
	for _, dir := range []string{s.Dirs("alice").Agent, agents} {
		if err := os.Chmod(dir, 0o500); err != nil {
			t.Fatal(err)
		}
		defer os.Chmod(dir, 0o700)
	}
	if err := os.Remove(filepath.Join(agents, ".lock")); err == nil {
		t.Fatal("the directory is writable after all")
	}
	if _, err := s.Load("alice"); err != nil {
		t.Error(err)
	}
	_, err := s.Update("alice", func(a *Agent) error { a.Name = "x"; return nil })
	var we *atomicfile.Error
	if !errors.As(err, &we) || we.Remedy == "" {
		t.Errorf("update: %v, want an *atomicfile.Error with a remedy", err)
	}
	if err := s.Create(&Agent{ID: "bob", Runtime: "x"}); !errors.As(err, &we) {
		t.Errorf("create: %v", err)
	}
	if err := s.Remove("alice", false); !errors.As(err, &we) {
		t.Errorf("remove: %v", err)
	}
}

func TestRemoveKeepsTheDirectoryWithoutPurge(t *testing.T) {
	s := newStore(t)
	create(t, s, "alice")
	d := s.Dirs("alice")
	work := filepath.Join(d.Workspace, "thesis")
	if err := os.WriteFile(work, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove("alice", false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(work); err != nil {
		t.Error(err)
	}
	if _, err := s.Load("alice"); !errors.Is(err, ErrNotFound) {
		t.Errorf("load: %v", err)
	}
	if err := s.Remove("alice", false); !errors.Is(err, ErrNotFound) {
		t.Errorf("again: %v", err)
	}
	create(t, s, "alice")
	if _, err := os.Stat(work); err != nil {
		t.Errorf("added again: %v", err)
	}
	if err := s.Remove("bob", true); !errors.Is(err, ErrNotFound) {
		t.Errorf("nobody: %v", err)
	}
}

func TestPurgeFollowsNoLinkAndTakesLockedDirectories(t *testing.T) {
	s := newStore(t)
	create(t, s, "alice")
	d := s.Dirs("alice")
	precious := filepath.Join(t.TempDir(), "precious")
	if err := os.MkdirAll(filepath.Join(precious, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(precious, "sub"), 0o500); err != nil {
		t.Fatal(err)
	}
	for _, l := range []string{filepath.Join(d.Workspace, "out"), filepath.Join(d.Home, "out")} {
		if err := os.Symlink(precious, l); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(d.Tmp, "locked", "in"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(d.Tmp, "locked", "in"), 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(d.Tmp, "locked"), 0); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove("alice", true); err != nil {
		t.Fatal(err)
	}
	des, err := os.ReadDir(filepath.Dir(d.Agent))
	if err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(des, func(de os.DirEntry) bool { return de.Name() != ".lock" }) {
		t.Errorf("left over: %v", des)
	}
	if fi, err := os.Stat(filepath.Join(precious, "sub")); err != nil || fi.Mode().Perm() != 0o500 {
		t.Errorf("what a link led to: %v, %v", fi, err)
	}
}

func TestLinksInThePlaceOfDirectories(t *testing.T) {
	s := newStore(t)
	out := t.TempDir()
	if err := os.MkdirAll(filepath.Dir(s.Dirs("alice").Agent), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(out, s.Dirs("alice").Agent); err != nil {
		t.Fatal(err)
	}
	if err := s.Create(&Agent{ID: "alice", Runtime: "x"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("agent directory is a link: %v", err)
	}
	if des, err := os.ReadDir(out); err != nil || len(des) > 0 {
		t.Errorf("the link was followed: %v, %v", des, err)
	}
	create(t, s, "bob")
	d := s.Dirs("bob")
	if err := os.Remove(d.Home); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(out, "made"), d.Home); err != nil {
		t.Fatal(err)
	}
	if err := s.Ensure("bob"); err != nil {
		t.Errorf("a link as home is for the policy to judge: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(out, "made")); err == nil {
		t.Error("a directory was made through the link")
	}
}

func TestWorkspacePath(t *testing.T) {
	s := NewStore("/r")
	for w, want := range map[string]string{"": "/r/agents/a/workspace", "src/app": "/r/agents/a/src/app", "/srv/app": "/srv/app"} {
		if got := s.WorkspacePath(&Agent{ID: "a", Workspace: w}); got != want {
			t.Errorf("%q: %s, want %s", w, got, want)
		}
	}
}

// A machine may go down in the middle of a removal. What the agent had does not stay for ever.
func TestRemovalThatWasCutShortIsFinished(t *testing.T) {
	s := NewStore(t.TempDir())
	if err := s.Sweep(); err != nil {
		t.Errorf("of nothing: %v", err)
	}
	for _, id := range []string{"alice", "bob"} {
		if err := s.Create(&Agent{ID: id, Runtime: "selftest"}); err != nil {
			t.Fatal(err)
		}
	}
	left := filepath.Join(filepath.Dir(s.Dirs("bob").Agent), ".bob."+rand.Text())
	if err := os.Rename(s.Dirs("bob").Agent, left); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(left, "home"), 0); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(filepath.Dir(left), ".other")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Sweep(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("it is still there: %v", err)
	}
	if _, err := os.Lstat(other); err != nil {
		t.Errorf("something else is gone: %v", err)
	}
	if _, err := s.Load("alice"); err != nil {
		t.Error(err)
	}
}

// A server's home goes with its agent, whatever the server made of it, and nobody else's does.
func TestRemovedServersLeaveNothingForTheNextAgentOfTheirID(t *testing.T) {
	root := t.TempDir()
	for _, d := range []string{"mcp/alice/tool/home/shut", "mcp/bob/tool/home"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"mcp/alice/tool/home/shut/token", "mcp/bob/tool/home/token", "outside"} {
		if err := os.WriteFile(filepath.Join(root, f), []byte("token"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(root, "mcp/bob"), filepath.Join(root, "mcp/alice/tool/home/link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(root, "mcp/alice/tool/home/shut"), 0); err != nil {
		t.Fatal(err)
	}
	for range 2 { // of one that has none, too
		if err := RemoveServers(root, "alice"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(filepath.Join(root, "mcp/alice")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
	if _, err := os.Stat(filepath.Join(root, "mcp/bob/tool/home/token")); err != nil {
		t.Errorf("another agent's: %v", err)
	}
	if err := RemoveServers(root, "../mcp"); err == nil {
		t.Error("a path was taken for an id")
	}
	if err := RemoveServers(t.TempDir(), "alice"); err != nil {
		t.Error(err)
	}
}
