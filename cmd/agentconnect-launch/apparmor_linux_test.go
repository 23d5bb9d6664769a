package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestProfileIsKeptWhereItIsLoaded(t *testing.T) {
	for name, c := range map[string]struct {
		dir, label string // below attr; no label: no file
		want       string // what stands in exec then
	}{
		"no AppArmor":                {"apparmor", "", ""},
		"the profile is not loaded":  {"apparmor", "unconfined\n", ""},
		"loaded":                     {"apparmor", "agentconnect-sandbox (unconfined)\n", "exec agentconnect-sandbox"},
		"loaded, an older kernel":    {"", "agentconnect-sandbox (unconfined)\n", "exec agentconnect-sandbox"},
		"loaded, enforced":           {"apparmor", "agentconnect-sandbox (enforce)\n", "exec agentconnect-sandbox"},
		"another that begins alike":  {"apparmor", "agentconnect-sandbox-mine (enforce)\n", ""},
		"another module, no newline": {"", "kernel", ""},
	} {
		t.Run(name, func(t *testing.T) {
			attr := t.TempDir()
			dir := filepath.Join(attr, c.dir)
			if c.label != "" {
				if err := os.MkdirAll(dir, 0o700); err != nil {
					t.Fatal(err)
				}
				for file, text := range map[string]string{"current": c.label, "exec": ""} {
					if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := keepProfile(attr); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(dir, "exec"))
			if err != nil && c.label != "" {
				t.Fatal(err)
			}
			if string(got) != c.want {
				t.Errorf("exec holds %q, want %q", got, c.want)
			}
		})
	}
}

// A label that cannot be set is no start: the boundary's inner sandbox would fail later,
// without a word of why.
func TestProfileThatCannotBeKeptIsAnError(t *testing.T) {
	attr := t.TempDir()
	if err := os.WriteFile(filepath.Join(attr, "current"), []byte("agentconnect-sandbox (unconfined)\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := keepProfile(attr); err == nil {
		t.Error("no error without an exec file")
	}
}

func TestProfileOfThisHost(t *testing.T) {
	if err := keepProfile("/proc/thread-self/attr"); err != nil {
		t.Error(err)
	}
}
