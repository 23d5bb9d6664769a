package hostfacts

import (
	"net"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestInodesThatSocketsWereBoundTo(t *testing.T) {
	bound := boundTo()
	if bound == nil {
		t.Skip("missing: a kernel that tells which file a socket was bound to (CONFIG_UNIX_DIAG)")
	}
	for _, name := range []string{"s", "with\nnewline", "a longer name, so that it is padded otherwise"} {
		path := filepath.Join(t.TempDir(), name)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		if got := boundTo()[path]; !slices.Equal(got, []uint32{uint32(st.Ino)}) {
			t.Errorf("%q: %v, want %d", path, got, st.Ino)
		}
	}
}

func FuzzBoundSockets(f *testing.F) {
	f.Add(make([]byte, diagMessage))
	f.Add(append(make([]byte, diagMessage), 6, 0, 0, 0, 'a', 0, 0, 0, 12, 0, 1, 0, 1, 2, 3, 4, 0, 0, 0, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		if name, _, ok := parseBound(b); ok && name == "" {
			t.Error("one without a name")
		}
	})
}
