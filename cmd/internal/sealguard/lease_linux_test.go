package sealguard

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestLeaseOfAnotherProcessIsSeen(t *testing.T) {
	path := t.TempDir() + "/file"
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	id, _ := identify(int(f.Fd()))
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Skip("missing: leases on this file system: ", err)
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		t.Fatal(err)
	}
	if parseLeases(strings.NewReader(string(locks)), os.Getpid())[id] {
		t.Error("our own counts as another's")
	}
	if !parseLeases(strings.NewReader(string(locks)), -1)[id] {
		t.Errorf("%v is not found in:\n%s", id, locks)
	}
	other := strings.ReplaceAll(string(locks), fmt.Sprintf(":%d ", id.ino), fmt.Sprintf(":%d ", id.ino+1))
	if parseLeases(strings.NewReader(other), -1)[id] {
		t.Error("a lease on another file is taken for one on this")
	}
}
