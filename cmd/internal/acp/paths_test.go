package acp

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// place lays out an agent directory, a workspace with traps in it, and the outside.
func place(t *testing.T) (base string, roots Roots) {
	base, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"agents/alice/workspace/sub", "agents/alice/workspace/.git/hooks", "agents/alice/workspace/Bare/objects", "agents/alice/workspace/Bare/refs",
		"agents/alice/workspace/.claude", "agents/alice/workspace/sealed", "outside/dir", "grant", "agents/alice/workspace-not"} {
		if err := os.MkdirAll(filepath.Join(base, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	ws := filepath.Join(base, "agents/alice/workspace")
	for _, f := range []string{ws + "/file", ws + "/Bare/HEAD", ws + "/.git/config", ws + "/sealed/file", base + "/outside/secret", base + "/grant/file"} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{
		ws + "/link-to-outside": base + "/outside", ws + "/link-to-secret": "../../../outside/secret", ws + "/link-to-etc": "/etc", ws + "/dangling": base + "/outside/new",
		ws + "/link-inside": "sub", ws + "/loop": "loop", ws + "/magic": "/proc/self/root", ws + "/gitlink": ".git", base + "/ws-link": ws, base + "/way-in": ws + "/sub",
	} {
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(ws+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	roots, err = NewRoots([]Root{{base + "/ws-link", true}, {base + "/grant", false}, {ws + "/sealed", false}})
	if err != nil {
		t.Fatal(err)
	}
	return base, roots
}

func TestDirectoriesOfASession(t *testing.T) {
	base, roots := place(t)
	ws := base + "/agents/alice/workspace"
	for _, c := range []struct{ path, want, say string }{
		{ws, ws, ""},
		{ws + "/", ws, ""},
		{ws + "/sub/../sub/.", ws + "/sub", ""},
		{ws + "/link-inside", ws + "/sub", ""},
		{base + "/ws-link/sub", ws + "/sub", ""},
		{base + "/way-in", ws + "/sub", ""},
		{base + "/grant", base + "/grant", ""},
		{"/", "", "outside the agent's workspace"},
		{"/etc", "", "outside"},
		{base + "/agents/alice", "", "outside"},
		{ws + "/..", "", "outside"},
		{ws + "-not", "", "outside"},
		{ws + "/link-to-etc", "", `leads to "/etc"`},
		{ws + "/link-to-outside/dir", "", "outside"},
		{ws + "/magic", "", "too many levels"},
		{ws + "/loop", "", "too many levels"},
		{ws + "/nothing", "", "does not exist"},
		{ws + "/file", "", "not a directory"},
		{"workspace", "", "not an absolute path"},
		{"", "", "not an absolute path"},
		{ws + "\x00/etc", "", "NUL"},
	} {
		got, err := roots.CheckDir(c.path)
		check(t, c.path, got, c.want, err, c.say)
	}
}

func check(t *testing.T, path, got, want string, err error, say string) {
	t.Helper()
	if got != want || (err == nil) != (say == "") || err != nil && !strings.Contains(err.Error(), say) {
		t.Errorf("%q: got %q, %v; want %q, error with %q", path, got, err, want, say)
	}
}

func TestFilesThroughTheClient(t *testing.T) {
	base, roots := place(t)
	ws := base + "/agents/alice/workspace"
	for _, c := range []struct {
		path      string
		write     bool
		want, say string
	}{
		{ws + "/file", false, ws + "/file", ""},
		{ws + "/file", true, ws + "/file", ""},
		{ws + "/new", true, ws + "/new", ""},
		{ws + "/link-inside/new", true, ws + "/sub/new", ""},
		{base + "/grant/file", false, base + "/grant/file", ""},
		{ws + "/.git/config", false, ws + "/.git/config", ""},
		{ws + "/new", false, "", "does not exist"},
		{"/etc/x", true, "", "outside"},
		{"/etc/passwd", false, "", "outside"},
		{ws + "/../x", true, "", "outside"},
		{ws + "/link-to-outside/x", true, "", "outside"},
		{ws + "/link-to-secret", false, "", "outside"},
		{ws + "/dangling", true, "", "link that leads nowhere"},
		{ws + "/no-dir/new", true, "", "does not exist"},
		{ws + "/file/new", true, "", "not a directory"},
		{ws + "/new/", true, "", "not the name of a file"},
		{ws + "/no-dir/..", true, "", "not the name of a file"},
		{ws, true, "", "not a regular file"},
		{ws + "/fifo", false, "", "not a regular file"},
		{base + "/grant/file", true, "", "read-only"},
		{base + "/grant/new", true, "", "read-only"},
		{ws + "/sealed/file", true, "", "read-only"},
		{ws + "/.git/hooks/pre-commit", true, "", ".git"},
		{ws + "/.git/config", true, "", ".git"},
		{ws + "/gitlink/config", true, "", ".git"},
		{ws + "/sub/.GIT", true, "", ".git"},
		{ws + "/Bare/config", true, "", "git directory"},
		{ws + "/.claude/settings.json", true, "", ".claude"},
	} {
		got, err := roots.CheckFile(c.path, c.write)
		check(t, c.path, got, c.want, err, c.say)
	}
}

// withClientFiles has a client that serves files of the workspace ws, and its session s.
func withClientFiles(t *testing.T, roots Roots, ws string) (*rig, *end) {
	t.Helper()
	r := newRig(t, func(o *Options) { o.Paths, o.ClientFiles = roots, "workspace" })
	a := r.ready("a")
	a.call("1", "session/new", string(quote([]byte(`{"cwd":`), ws))+"}")
	m := r.rt.want("session/new")
	r.rt.result(string(m.ID), `{"sessionId":"s"}`)
	a.recv()
	return r, a
}

// A name that is not UTF-8 reaches the client as another one, and the agent chooses where that leads.
func TestAFileWhoseNameNoClientCanBeToldIsRefused(t *testing.T) {
	base, roots := place(t)
	ws := base + "/agents/alice/workspace"
	if err := os.Mkdir(ws+"/a\xff", 0o700); err != nil {
		t.Fatal(err)
	}
	for link, to := range map[string]string{ws + "/in": "a\xff", ws + "/a\ufffd": base + "/outside"} {
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(ws+"/a\xff/old", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r, a := withClientFiles(t, roots, ws)
	for _, c := range []struct{ method, path string }{
		{"fs/write_text_file", ws + "/in/secret"}, {"fs/write_text_file", ws + "/in/old"}, {"fs/read_text_file", ws + "/in/old"},
	} {
		r.rt.call("1", c.method, `{"sessionId":"s","content":"","path":`+string(quote(nil, c.path))+`}`)
		r.rt.wantError("1", CodeInvalidParams, "no client can be told")
	}
	r.rt.call("2", "fs/write_text_file", `{"sessionId":"s","content":"","path":`+string(quote(nil, ws+"/é"))+`}`)
	if got := a.want("fs/write_text_file"); !strings.Contains(string(got.Params), ws+"/é") {
		t.Errorf("client got %s", got.Params)
	}
}

// The three ways out of the field report, through the broker with the real checker.
func TestRuntimeWritesOutsideThroughTheClient(t *testing.T) {
	base, roots := place(t)
	ws := base + "/agents/alice/workspace"
	r, a := withClientFiles(t, roots, ws)
	for _, path := range []string{"/etc/x", ws + "/link-to-outside/x", ws + "/../x"} {
		r.rt.call("1", "fs/write_text_file", `{"sessionId":"s","content":"","path":`+string(quote(nil, path))+`}`)
		r.rt.wantError("1", CodeInvalidParams, "outside the agent's workspace")
	}
	for i, dir := range []string{"/", base + "/agents/alice", ws + "/link-to-etc", "relative"} {
		id := string(rune('1' + i))
		a.call(id, "session/new", string(quote([]byte(`{"cwd":`), dir))+"}")
		a.wantError(id, CodeInvalidParams, "cwd")
	}
	r.rt.call("2", "fs/write_text_file", `{"sessionId":"s","content":"","path":`+string(quote(nil, ws+"/link-inside/x"))+`}`)
	if got := a.want("fs/write_text_file"); !strings.Contains(string(got.Params), ws+"/sub/x") {
		t.Errorf("client got %s", got.Params)
	}
}

func FuzzCheckFile(f *testing.F) {
	for _, s := range []string{"file", "../x", "link-to-outside/x", "sub/./..//.git/config", "magic/etc/passwd", "l/../secret", "l/passwd"} {
		f.Add(s, true)
	}
	d := f.TempDir()
	if os.MkdirAll(d+"/ws/sub", 0o700) != nil || os.Symlink("/etc", d+"/ws/l") != nil {
		f.Fatal("no place to try in")
	}
	roots, err := NewRoots([]Root{{d + "/ws", true}})
	if err != nil {
		f.Fatal(err)
	}
	base := roots[0].Path
	f.Fuzz(func(t *testing.T, rel string, write bool) {
		got, err := roots.CheckFile(base+"/"+rel, write)
		if err == nil && (!within(got, base) || filepath.Clean(got) != got) {
			t.Fatalf("%q passes as %q", rel, got)
		}
	})
}
