package hostfacts

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"unsafe"

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

// The kernel's table writes an abstract name with "@" in front, and one that is a file's and begins
// with that the same.
func TestSocketByARelativeNameWithAnAtIsOdd(t *testing.T) {
	bound := boundTo()
	if bound == nil {
		t.Skip("missing: a kernel that tells which file a socket was bound to (CONFIG_UNIX_DIAG)")
	}
	if relativeAt(bound) {
		t.Skip("missing: a machine without such a socket")
	}
	abstract, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + filepath.Base(t.TempDir()) + strconv.Itoa(os.Getpid()), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer abstract.Close()
	if relativeAt(boundTo()) {
		t.Error("an abstract name is taken for a file's")
	}
	t.Chdir(t.TempDir())
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	// By the system call: to the net package and to unix.SockaddrUnix a name like this is abstract.
	address := [3]byte{unix.AF_UNIX, 0, '@'}
	if _, _, errno := unix.Syscall(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(&address)), unsafe.Sizeof(address)); errno != 0 {
		t.Fatal(errno)
	}
	if _, err := os.Lstat("@"); err != nil {
		t.Fatal(err)
	}
	if !relativeAt(boundTo()) {
		t.Error("the kernel's word on it is not understood")
	}
	if _, odd, err := (Host{}).Sockets(nil); !odd || err != nil {
		t.Errorf("a socket of an unknown place is not noticed (%v)", err)
	}
}

func BenchmarkSockets(b *testing.B) {
	dir := b.TempDir()
	for i := range 1000 {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, strconv.Itoa(i)), Net: "unix"})
		if err != nil {
			b.Fatal(err)
		}
		defer l.Close()
	}
	b.Run("table and places", func(b *testing.B) {
		for b.Loop() {
			if _, _, err := (Host{}).Sockets(nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("files", func(b *testing.B) {
		for b.Loop() {
			boundTo()
		}
	})
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
