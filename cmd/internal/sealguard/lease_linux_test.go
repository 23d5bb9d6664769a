package sealguard

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
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

// An agent that can move what is sealed (with nesting on) could put a file of its own there, make an
// empty lock beside it as git does, and be halted while somebody waits for the old one.
func TestAFileThatWasReplacedBeforeTheHaltIsNotTheHosts(t *testing.T) {
	for _, replaced := range []bool{false, true} {
		dir := t.TempDir()
		config := filepath.Join(dir, "config")
		do(t, os.WriteFile(config, nil, 0o600))
		g, err := New(Options{Roots: []string{dir}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(g.Close)
		g.Expect(&sandbox.Plan{Mounts: []sandbox.Mount{
			{Op: sandbox.OpBind, Kind: sandbox.KindDir, Source: dir, Target: dir},
			{Op: sandbox.OpCover, Kind: sandbox.KindFile, Target: config, Sealed: true},
		}}, nil)
		g.mu.Lock()
		do(t, os.WriteFile(config+".lock", nil, 0o600))
		if replaced {
			do(t, os.WriteFile(filepath.Join(dir, "evil"), nil, 0o600), os.Rename(filepath.Join(dir, "evil"), config))
		}
		s := g.seals[config]
		if s == nil {
			t.Fatal("it is not sealed")
		}
		g.admit([]*seal{s})
		if s.trusted == replaced {
			t.Errorf("replaced %v, trusted %v", replaced, s.trusted)
		}
		g.mu.Unlock()
	}
}

// git's lock becomes the new configuration: an agent that gave it a name of its own before it was
// halted would write that.
func TestAFileWithAnotherNameIsMadeAnother(t *testing.T) {
	dir := t.TempDir()
	config, mine := filepath.Join(dir, "config"), filepath.Join(dir, "mine")
	do(t, os.WriteFile(config, []byte("host's"), 0o640), os.Link(config, mine))
	g, err := New(Options{Roots: []string{dir}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Close)
	do(t, g.fresh(config, "host's"), os.WriteFile(mine, []byte("agent's"), 0o600))
	if text, err := os.ReadFile(config); err != nil || string(text) != "host's" {
		t.Errorf("%q %v", text, err)
	}
}
