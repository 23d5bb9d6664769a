package systemdtest

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/dbusctl"
)

// TestWhatIsMissingIsSaid runs as each user of the test machine.
func TestWhatIsMissingIsSaid(t *testing.T) {
	NeedMachine(t)
	user := os.Getenv("USER")
	type situation struct {
		name   string
		dir    string // XDG_RUNTIME_DIR
		kind   error  // nil: all is well
		remedy string
	}
	situations := map[string][]situation{
		Tester: {
			{"a login", "/run/user/1000", nil, ""},
			{"su without a login", "", dbusctl.ErrNoRuntimeDir, "export XDG_RUNTIME_DIR=/run/user/1000"},
			{"root's directory after su", "/run", dbusctl.ErrForeignRuntimeDir, "export XDG_RUNTIME_DIR=/run/user/1000"},
			{"another user's directory that is gone", "/run/user/4711", dbusctl.ErrForeignRuntimeDir, "export XDG_RUNTIME_DIR=/run/user/1000"},
			{"a directory of the user's, but not that one", "/home/tester", dbusctl.ErrNoUserManager, "systemctl status user@1000.service"},
		},
		Guest: {
			{"su without a login, and no manager", "", dbusctl.ErrNoRuntimeDir, "loginctl enable-linger guest"},
			{"another user's directory after su", "/run/user/1000", dbusctl.ErrForeignRuntimeDir, "loginctl enable-linger guest"},
			{"no linger, no session", "/run/user/1001", dbusctl.ErrNoUserManager, "loginctl enable-linger guest"},
		},
		"root": {
			{"another user's directory after sudo", "/run/user/1000", dbusctl.ErrForeignRuntimeDir, "loginctl enable-linger root"},
		},
	}
	if situations[user] == nil {
		t.Fatalf("no situations for the user %q", user)
	}
	for _, s := range situations[user] {
		t.Run(s.name, func(t *testing.T) {
			c, err := dbusctl.Connect(t.Context(), dbusctl.Here(s.dir, user), nil)
			if err == nil {
				c.Close()
			}
			if !errors.Is(err, s.kind) {
				t.Fatalf("got %v; want %v", err, s.kind)
			}
			if err != nil && !strings.Contains(err.Error(), s.remedy) {
				t.Errorf("%v\ndoes not say %q", err, s.remedy)
			}
		})
	}
	if err := Place().Lingering(); errors.Is(err, dbusctl.ErrNotLingering) == (user == Tester) {
		t.Errorf("%s lingers: %v", user, err)
	}
	if user == Tester {
		t.Run("no bus", withoutBus)
	}
}

// withoutBus takes the user's bus away and puts it back.
func withoutBus(t *testing.T) {
	systemctl := func(args ...string) {
		t.Helper()
		if out, err := exec.CommandContext(Within(t, 2*time.Minute), "systemctl", append([]string{"--user"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("systemctl --user %v: %v: %s", args, err, out)
		}
	}
	open := Manager(t)
	systemctl("stop", "dbus.socket", "dbus.service")
	_, err := dbusctl.Connect(t.Context(), Place(), nil)
	if !errors.Is(err, dbusctl.ErrNoBus) || !strings.Contains(err.Error(), "systemctl --user start dbus.socket") {
		t.Errorf("got %v", err)
	}
	// A connection from before says the same once its caller's patience ends, and is back by itself.
	if _, err := open.List(Within(t, 300*time.Millisecond)); !errors.Is(err, dbusctl.ErrBusGone) || !errors.Is(err, dbusctl.ErrNoBus) && open.Connected() {
		t.Errorf("got %v", err)
	}
	systemctl("start", "dbus.socket")
	if _, err := open.List(Within(t, 2*time.Minute)); err != nil {
		t.Errorf("the bus is back: %v", err)
	}
}
