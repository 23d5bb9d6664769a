package programs

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, mode os.FileMode, paths ...string) {
	t.Helper()
	for _, p := range paths {
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte("#!/bin/sh\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDirsOrder(t *testing.T) {
	for _, tt := range []struct {
		name, libexec, exe string
		want               []string
		wantErr            string
	}{
		{name: "installed", exe: "/usr/bin/agentconnect", want: []string{"/usr/bin", Libexec}},
		{name: "build tree alone", libexec: "/b/bin/", exe: "/usr/bin/agentconnect", want: []string{"/b/bin"}},
		{name: "own executable unknown", want: []string{Libexec}},
		{name: "relative is refused", libexec: "bin", wantErr: "not an absolute path"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Dirs(tt.libexec, tt.exe)
			if (err != nil) != (tt.wantErr != "") || err != nil && !strings.Contains(err.Error(), tt.wantErr) {
				t.Fatalf("error %v, want %q", err, tt.wantErr)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestSiblingsAreFoundWhereTheyLie(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	write(t, 0o755, a+"/agentconnect-guest", b+"/agentconnect-guest", b+"/agentconnect-supervisor", b+"/agentconnect-launch")
	// Not executable in the first place: the second one is meant.
	write(t, 0o644, a+"/agentconnect-launch")
	got, err := In([]string{a, b})
	if err != nil {
		t.Fatal(err)
	}
	want := Set{Supervisor: b + "/agentconnect-supervisor", Launcher: b + "/agentconnect-launch", Guest: a + "/agentconnect-guest", Bwrap: "/usr/bin/bwrap"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestAMissingSiblingIsNamed(t *testing.T) {
	dir := t.TempDir()
	write(t, 0o755, dir+"/agentconnect-guest", dir+"/agentconnect-supervisor")
	_, err := In([]string{dir})
	if err == nil || !strings.Contains(err.Error(), "agentconnect-launch") || !strings.Contains(err.Error(), dir) {
		t.Errorf("error %v, want the program and the directory in it", err)
	}
}
