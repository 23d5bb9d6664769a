package dbusctl

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakePlace is a machine where all is well, below a temporary folder.
func fakePlace(t *testing.T) Place {
	t.Helper()
	// A socket's path has 108 bytes: t.TempDir() has the test's name in it.
	base, err := os.MkdirTemp("", "place")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	p := Place{
		UID: os.Geteuid(), User: "alice",
		RuntimeDir: filepath.Join(base, "run-user", "1000"),
		booted:     filepath.Join(base, "booted"), runUser: filepath.Join(base, "run-user"), linger: filepath.Join(base, "linger"),
	}
	for _, dir := range []string{filepath.Join(p.RuntimeDir, "systemd"), p.booted, p.linger} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{p.Bus(), filepath.Join(p.RuntimeDir, "systemd", "private")} {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
	if err := os.WriteFile(filepath.Join(p.linger, "alice"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestEachMissingPieceHasItsOwnMessageAndRemedy(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(*Place)
		kind  error
		says  []string
	}{
		{"a container without systemd", func(p *Place) { os.RemoveAll(p.booted) }, ErrNoUserManager, []string{"not the init", "--supervisor direct"}},
		{"su without a login, no manager", func(p *Place) { p.RuntimeDir, p.runUser = "", p.runUser+"-absent" }, ErrNoRuntimeDir, []string{"loginctl enable-linger alice"}},
		{"the directory is gone", func(p *Place) { os.RemoveAll(p.RuntimeDir); p.RuntimeDir = filepath.Join(p.runUser, uidText(*p)) }, ErrNoUserManager, []string{"does not exist", "loginctl enable-linger alice"}},
		{"root's directory, which is not there", func(p *Place) { p.RuntimeDir = filepath.Join(p.runUser, "0") }, ErrForeignRuntimeDir, []string{"su or sudo", "run-user/0", "export XDG_RUNTIME_DIR="}},
		{"another user's directory", func(p *Place) { p.UID++ }, ErrForeignRuntimeDir, []string{"su or sudo", "export XDG_RUNTIME_DIR="}},
		{"no manager", func(p *Place) { os.RemoveAll(filepath.Join(p.RuntimeDir, "systemd")) }, ErrNoUserManager, []string{"systemctl status user@"}},
		{"no bus", func(p *Place) { os.Remove(p.Bus()) }, ErrNoBus, []string{"dbus-user-session", "start dbus.socket"}},
		{"the bus is a plain file", func(p *Place) { os.Remove(p.Bus()); os.WriteFile(p.Bus(), nil, 0o600) }, ErrNoBus, []string{"dbus-user-session"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := fakePlace(t)
			if err := p.Check(); err != nil {
				t.Fatalf("all is well, and yet: %v", err)
			}
			c.spoil(&p)
			err := p.Check()
			var known *EnvironmentError
			if !errors.Is(err, c.kind) || !errors.As(err, &known) || known.Remedy == "" {
				t.Fatalf("got %v; want %v with a remedy", err, c.kind)
			}
			for _, part := range c.says {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
			if _, connectErr := Connect(t.Context(), p, nil); !errors.Is(connectErr, c.kind) {
				t.Errorf("Connect: %v", connectErr)
			}
		})
	}
}

func TestRuntimeDirUnsetThoughTheManagerRuns(t *testing.T) {
	p := fakePlace(t)
	own := filepath.Join(p.runUser, "own")
	if err := os.Rename(p.RuntimeDir, own); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("own", filepath.Join(p.runUser, uidText(p))); err != nil {
		t.Fatal(err)
	}
	p.RuntimeDir = ""
	err := p.Check()
	if !errors.Is(err, ErrNoRuntimeDir) || !strings.Contains(err.Error(), "export XDG_RUNTIME_DIR="+p.runUser) {
		t.Errorf("got %v", err)
	}
}

func TestLinger(t *testing.T) {
	p := fakePlace(t)
	if err := p.Lingering(); err != nil {
		t.Errorf("alice lingers: %v", err)
	}
	p.User = "bob"
	if err := p.Lingering(); !errors.Is(err, ErrNotLingering) || !strings.Contains(err.Error(), "loginctl enable-linger bob") {
		t.Errorf("bob does not: %v", err)
	}
	for _, user := range []string{"", "..", "a/b"} {
		p.User = user
		if err := p.Lingering(); err == nil || errors.Is(err, ErrNotLingering) {
			t.Errorf("%q: %v", user, err)
		}
	}
}

func TestBusThatAcceptsAndSaysNothing(t *testing.T) {
	p := fakePlace(t)
	ctx, cancel := context.WithCancel(t.Context())
	// The listener's backlog takes the connection; nobody ever answers.
	go cancel()
	_, err := Connect(ctx, p, nil)
	if !errors.Is(err, ErrNoBus) || !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
}

func TestBusThatNobodyListensOn(t *testing.T) {
	p := fakePlace(t)
	os.Remove(p.Bus())
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: p.Bus(), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if _, err := Connect(t.Context(), p, nil); !errors.Is(err, ErrNoBus) || !strings.Contains(err.Error(), "dbus.socket") {
		t.Fatalf("got %v", err)
	}
}

func TestNamesThatCouldReachIntoAMatchRule(t *testing.T) {
	for _, name := range []string{"", "a", "a'.service", "a,b.service", "a b.service", "a/b.service", "ä.service", "a\n.service", strings.Repeat("a", 256) + ".service"} {
		if checkUnit(name) == nil {
			t.Errorf("%q passes", name)
		}
	}
	for _, name := range []string{"agent@a-b.service", `agentconnect-a\x2db.slice`, "agentconnect-a:.slice", "-.slice"} {
		if err := checkUnit(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
}
