package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// names are what lies in a directory: nothing may be left over.
func names(t *testing.T, dir string) []string {
	t.Helper()
	des, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var ns []string
	for _, de := range des {
		ns = append(ns, de.Name())
	}
	return ns
}

func TestWriteReplacesWithTheModeAskedFor(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state")
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	for _, content := range []string{"one", "two", ""} {
		if err := Write(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := read(t, path); got != content {
			t.Errorf("content %q, want %q", got, content)
		}
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o644 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if n := names(t, dir); len(n) != 1 {
		t.Errorf("left over: %q", n)
	}
}

func TestALinkIsReplacedAndItsTargetUntouched(t *testing.T) {
	dir := t.TempDir()
	target, path := filepath.Join(dir, "target"), filepath.Join(dir, "state")
	if err := os.WriteFile(target, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
	if err := Write(path, []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	if read(t, target) != "mine" || read(t, path) != "new" {
		t.Errorf("target %q, file %q", read(t, target), read(t, path))
	}
}

func TestDiskFullInTheMiddleKeepsTheOldState(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state")
	if err := Write(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	// A limit on the file size ends a write halfway, as a full disk does.
	signal.Ignore(syscall.SIGXFSZ)
	defer signal.Reset(syscall.SIGXFSZ)
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	small := old
	small.Cur = 4096
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &small); err != nil {
		t.Fatal(err)
	}
	err := Write(path, make([]byte, 1<<20), 0o600)
	if rerr := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old); rerr != nil {
		t.Fatal(rerr)
	}
	var we *Error
	if !errors.As(err, &we) || !strings.Contains(err.Error(), "the old state is kept") || we.Remedy == "" {
		t.Errorf("error %v", err)
	}
	if got := read(t, path); got != "old" {
		t.Errorf("content %q, want the old one", got)
	}
	if n := names(t, dir); len(n) != 1 {
		t.Errorf("left over: %q", n)
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	for _, err := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.EROFS, syscall.EACCES} {
		got := Explain("write", "/x", &fs.PathError{Op: "open", Path: "/y", Err: err})
		var we *Error
		if !errors.As(got, &we) || we.Remedy == "" || !errors.Is(got, err) || strings.Contains(got.Error(), "/y") {
			t.Errorf("%v: %v", err, got)
		}
	}
	if err := Write(filepath.Join(t.TempDir(), "no", "state"), nil, 0o600); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}
