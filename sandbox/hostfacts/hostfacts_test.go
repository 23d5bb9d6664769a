package hostfacts

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"agentconnect.md/sandbox/sandbox"
)

const table = `Num       RefCount Protocol Flags    Type St Inode Path
ffff888104a3b000: 00000002 00000000 00010000 0001 01 16131 /run/user/1000/bus
ffff888104a3b400: 00000003 00000000 00000000 0001 03 16132
ffff888104a3b800: 00000002 00000000 00010000 0001 01 16133 @/tmp/.X11-unix/X0
ffff888104a3bc00: 00000002 00000000 00010000 0001 01 16134 /home/a/with space.sock
ffff888104a3bd00: 00000002 00000000 00000000 0001 03     5 /run/user/1000/bus
0000000000000000: 00000002 00000000 00000000 0001 02     0 /run/user/1000/bus
`

func TestTableOfSockets(t *testing.T) {
	paths, odd, at, err := parseSockets(strings.NewReader(table))
	if diff := cmp.Diff([]string{"/run/user/1000/bus", "/home/a/with space.sock"}, paths); diff != "" || odd || !at || err != nil {
		t.Errorf("odd %v, at %v, %v\n%s", odd, at, err, diff)
	}
	for _, line := range []string{
		"ffff888104a3b000: 00000002 00000000 00010000 0001 01 16131 rel.sock\n",
		"ffff888104a3b000: 00000002 00000000 00010000 0001 01 16131 /home/a/with\nnewline.sock\n",
		"ffff888104a3b000: 00000002 00000000 00010000 0001 01 16136 /run/user/1000/bus\n",
	} {
		if _, odd, _, err := parseSockets(strings.NewReader(table + line)); !odd || err != nil {
			t.Errorf("%q is not odd (%v)", line, err)
		}
	}
}

func TestSocketsAreListedWhereTheyLie(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	path := func(name string) string { return filepath.Join(dir, name) }
	if err := os.MkdirAll(path("real/deep"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real", path("link")); err != nil {
		t.Fatal(err)
	}
	listen := func(name string) {
		t.Helper()
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { l.Close() })
	}
	listen(path("real/plain"))
	listen(path("link/through"))
	listen(dir + "/real/deep/../unclean")
	listen(path("real/deep/behind"))
	if err := errors.Join(os.Rename(path("real/deep/behind"), path("real/other")), os.Symlink("../other", path("real/deep/behind"))); err != nil {
		t.Fatal(err)
	}
	names := []string{path("real/plain"), path("link/through"), dir + "/real/deep/../unclean", path("real/deep/behind")}
	paths, moved := Host{}.placesOf(names, nil, boundTo)
	slices.Sort(paths)
	if want := []string{path("real/other"), path("real/plain"), path("real/through"), path("real/unclean")}; moved || !slices.Equal(paths, want) {
		t.Errorf("moved %v: %q, want %q", moved, paths, want)
	}
	if runtime.GOOS == "linux" {
		all, _, err := Host{}.Sockets(nil)
		for _, want := range paths {
			if err != nil || !slices.Contains(all, want) {
				t.Errorf("%s is not in the kernel's table as we read it (%v)", want, err)
			}
		}
	}
	if err := os.WriteFile(path("file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"none", "none/none", "file", "file/none", "real"} {
		if paths, moved := (Host{}).placesOf([]string{path(name)}, nil, boundTo); !moved || len(paths) > 0 {
			t.Errorf("%s: %q, moved %v", name, paths, moved)
		}
	}
}

func FuzzTableOfSockets(f *testing.F) {
	f.Add(table)
	f.Add("\n\n /\n")
	f.Fuzz(func(t *testing.T, text string) {
		paths, _, _, _ := parseSockets(strings.NewReader(text))
		for _, p := range paths {
			if !strings.HasPrefix(p, "/") {
				t.Errorf("%q is not absolute", p)
			}
		}
	})
}

func TestSocketsAreFoundByLooking(t *testing.T) {
	dir := t.TempDir()
	deep := filepath.Join(dir, "a", "b")
	if err := os.MkdirAll(deep, 0o700); err != nil {
		t.Fatal(err)
	}
	// A loop of links must not be followed.
	if err := os.Symlink("..", filepath.Join(deep, "up")); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(deep, "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	paths, _, all := Host{}.SocketsBelow(dir, false)
	if !all || !slices.Equal(paths, []string{filepath.Join(deep, "s")}) {
		t.Errorf("%q, all %v", paths, all)
	}
	for i := range nearEntries + 1 {
		if err := os.WriteFile(filepath.Join(dir, "f"+strconv.Itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if paths, _, _ := (Host{}).SocketsBelow(dir, true); !slices.Equal(paths, []string{filepath.Join(deep, "s")}) {
		t.Errorf("with reason to look far: %q", paths)
	}
}

func TestResolveFollowsEveryLinkAndSaysWhatIsThere(t *testing.T) {
	dir := t.TempDir()
	if real, _, err := (Host{}).Resolve(dir); err == nil {
		dir = real
	}
	for name, put := range map[string]func(path string) error{
		"file": func(p string) error { return os.WriteFile(p, nil, 0o600) },
		"link": func(p string) error { return os.Symlink("file", p) },
		"loop": func(p string) error { return os.Symlink("loop", p) },
		"dead": func(p string) error { return os.Symlink("nothing", p) },
	} {
		if err := put(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if real, kind, err := (Host{}).Resolve(filepath.Join(dir, "link")); err != nil || kind != sandbox.KindFile || real != filepath.Join(dir, "file") {
		t.Errorf("%s %s %v", real, kind, err)
	}
	for _, name := range []string{"loop", "dead", "none"} {
		if real, _, err := (Host{}).Resolve(filepath.Join(dir, name)); err == nil {
			t.Errorf("%s leads to %s", name, real)
		}
	}
}

// A folder may be a pipe when its turn comes: an agent swaps them, and an open would wait at it for
// ever.
func TestAPipeInPlaceOfAFolderHoldsNobodyUp(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	looked := make(chan []string, 1)
	go func() {
		paths, _, _ := Host{}.SocketsBelow(pipe, true)
		looked <- paths
	}()
	select {
	case paths := <-looked:
		if len(paths) > 0 {
			t.Errorf("found %q in a pipe", paths)
		}
	case <-time.After(20 * time.Second):
		t.Error("it waits for somebody who writes into the pipe")
		if f, err := os.OpenFile(pipe, os.O_WRONLY|syscall.O_NONBLOCK, 0); err == nil {
			f.Close()
		}
		<-looked
	}
}
