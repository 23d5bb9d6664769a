package secret

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// none is a machine without encryption.
type none struct{}

func (none) Seal(context.Context, string, []byte) ([]byte, error) {
	return nil, &UnavailableError{Why: "there is none in this test"}
}
func (none) Open(context.Context, string, []byte) ([]byte, error) {
	return nil, errors.New("nothing can be opened")
}

func TestWhatIsSetIsRead(t *testing.T) {
	root := t.TempDir()
	s := NewStore(root, none{})
	place := Place{PathEnv: []string{"DOCKER_CONFIG"}, File: true}
	info, why, err := s.Set(t.Context(), "alice", "T", place, []byte("a\xffb"))
	if err != nil || why == "" || info.Sealed != "" {
		t.Fatalf("%+v %q %v", info, why, err)
	}
	got, err := s.Load(t.Context(), "alice")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Secret{{Info: info, Value: []byte("a\xffb")}}, got); diff != "" {
		t.Error(diff)
	}
	if file, dir := place.FileName("T"); file != "T/config.json" || dir != "T" {
		t.Errorf("its file: %q %q", file, dir)
	}
	if others, err := s.Load(t.Context(), "bob"); err != nil || len(others) != 0 {
		t.Errorf("another agent's: %v %v", others, err)
	}
	for _, path := range []string{"secrets", "secrets/alice", "secrets/alice/T.json"} {
		fi, err := os.Stat(filepath.Join(root, path))
		if err != nil || fi.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: %v %v", path, fi.Mode(), err)
		}
	}
	if err := s.Remove("alice", "T"); err != nil {
		t.Error(err)
	}
	if err := s.Remove("alice", "T"); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

// What no environment variable carries as it is, is not set as one.
func TestValuesThatAVariableWouldChangeAreRefused(t *testing.T) {
	for _, c := range []struct {
		name, value, say string
	}{
		{"a NUL byte", "a\x00b", "NUL"},
		{"no UTF-8", "a\xffb", "UTF-8"},
		{"half a character", "caf\xc3", "UTF-8"},
	} {
		s := NewStore(t.TempDir(), none{})
		if _, _, err := s.Set(t.Context(), "alice", "T", Place{Env: []string{"KEY"}}, []byte(c.value)); err == nil || !strings.Contains(err.Error(), c.say) || !strings.Contains(err.Error(), "as a file") {
			t.Errorf("%s: %v", c.name, err)
		}
		if list, err := s.List("alice"); err != nil || len(list) != 0 {
			t.Errorf("%s: kept: %v %v", c.name, list, err)
		}
		if _, _, err := s.Set(t.Context(), "alice", "T", Place{File: true}, []byte(c.value)); err != nil {
			t.Errorf("%s: as a file: %v", c.name, err)
		}
	}
}

func TestAFileThatOthersWroteIsRefused(t *testing.T) {
	root := t.TempDir()
	s := NewStore(root, none{})
	if _, _, err := s.Set(t.Context(), "alice", "T", Place{File: true}, []byte("v")); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root, "secrets/alice/T.json")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func() error{
		"writable for others": func() error { return os.Chmod(path, 0o622) },
		"cut in the middle":   func() error { return os.WriteFile(path, text[:len(text)/2], 0o600) },
		"an unknown key": func() error {
			return os.WriteFile(path, []byte(strings.Replace(string(text), `"agent"`, `"x":1,"agent"`, 1)), 0o600)
		},
		"another version": func() error {
			return os.WriteFile(path, []byte(strings.Replace(string(text), `"version":1`, `"version":2`, 1)), 0o600)
		},
		"another agent's": func() error {
			return os.WriteFile(path, []byte(strings.Replace(string(text), "alice", "bob", 1)), 0o600)
		},
		"a link": func() error {
			if err := os.Rename(path, path+".x"); err != nil {
				return err
			}
			return os.Symlink(path+".x", path)
		},
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		got, err := s.Load(t.Context(), "alice")
		if err == nil {
			t.Errorf("%s: taken as %v", name, got)
		} else if strings.Contains(err.Error(), "`agentconnect secret rm alice T`") {
			// What the error says to do works.
			if err := s.Remove("alice", "T"); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if _, _, err := s.Set(t.Context(), "alice", "T", Place{File: true}, []byte("v")); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		os.Remove(path)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o600); err != nil {
			t.Fatal(err)
		}
		os.Remove(path + ".x")
		if _, err := s.Load(t.Context(), "alice"); err != nil {
			t.Errorf("the control after %s: %v", name, err)
		}
	}
}

// creds writes a stand-in for systemd-creds that says a version and stores what it gets
// backwards, with its name in front; a machine of that version is not at hand everywhere.
func creds(t *testing.T, version, encrypt string) Systemd {
	t.Helper()
	path := filepath.Join(t.TempDir(), "systemd-creds")
	script := `#!/bin/sh
for a; do case $a in --name=*) name=${a#--name=};; esac; done
case "$1 $2" in
"--version "*) echo "systemd ` + version + ` (test)"; echo "+PAM";;
"encrypt --user") ` + encrypt + `;;
"decrypt --user") read -r n; [ "$n" = "$name" ] || { echo "name mismatch" >&2; exit 1; }; base64 -d;;
*) echo "unknown" >&2; exit 1;;
esac
`
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return Systemd{Program: path}
}

const honest = `echo "$name"; base64`

func TestEncryptionIsUsedWhereItWorksAndItsLackIsSaid(t *testing.T) {
	for name, c := range map[string]struct {
		sealer Sealer
		why    string
	}{
		"a new systemd":            {creds(t, "257.9-1~deb13u1", honest), ""},
		"an old one":               {creds(t, "252", honest), "users can from 256 on"},
		"one that fails":           {creds(t, "258", "echo no key >&2; exit 1"), "no key"},
		"one that encrypts wrong":  {creds(t, "258", "echo other"), "cannot be decrypted"},
		"one that says no version": {creds(t, "git", honest), "version"},
		"none at all":              {Systemd{Program: "/nonexistent/systemd-creds"}, "not installed"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			s := NewStore(root, c.sealer)
			info, why, err := s.Set(t.Context(), "alice", "T", Place{File: true}, []byte("hush-hush"))
			if err != nil {
				t.Fatal(err)
			}
			if (info.Sealed != "") != (c.why == "") || !strings.Contains(why, c.why) {
				t.Errorf("sealed %q, why %q", info.Sealed, why)
			}
			got, err := s.Load(t.Context(), "alice")
			if err != nil || len(got) != 1 || string(got[0].Value) != "hush-hush" {
				t.Fatalf("read back: %v %v", got, err)
			}
			if c.why != "" {
				return
			}
			// Bound to its agent and name: the same bytes under another name do not open.
			dir := filepath.Join(root, "secrets", "alice")
			text, err := os.ReadFile(filepath.Join(dir, "T.json"))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "U.json"), []byte(strings.Replace(string(text), `"name":"T"`, `"name":"U"`, 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			if got, err := s.Load(t.Context(), "alice"); err == nil || !strings.Contains(err.Error(), "secret U") {
				t.Errorf("a moved one opened: %v %v", got, err)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version":1,"name":"T","env":["A"],"file":true,"at":"2026-01-01T00:00:00Z","agent":"alice","value":"eA=="}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := parse(b)
		if err == nil && (CheckName(d.Name) != nil || d.Place.Check(d.Name) != nil) {
			t.Errorf("%q gives %+v", b, d)
		}
	})
}
