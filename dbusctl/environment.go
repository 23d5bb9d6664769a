// Is there a user manager to talk to, and if not, what is to be done.
package dbusctl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Why there is no user manager to talk to. Each comes as an *EnvironmentError that says what
// to do.
var (
	ErrNoRuntimeDir      = errors.New("XDG_RUNTIME_DIR is not set")
	ErrForeignRuntimeDir = errors.New("XDG_RUNTIME_DIR belongs to another user")
	ErrNoUserManager     = errors.New("no user manager")
	ErrNoBus             = errors.New("no user bus")
	ErrNotLingering      = errors.New("the user manager ends with the last session")
)

// EnvironmentError is one of the errors above, with its occasion and its remedy.
type EnvironmentError struct {
	Kind   error
	What   string
	Remedy string
	Cause  error // may be nil
}

func (e *EnvironmentError) Error() string {
	text := e.Kind.Error() + ": " + e.What
	if e.Cause != nil {
		text += ": " + e.Cause.Error()
	}
	return text + "; " + e.Remedy
}

func (e *EnvironmentError) Unwrap() []error { return []error{e.Kind, e.Cause} }

// Place is where a user's manager and bus are expected.
type Place struct {
	RuntimeDir string // $XDG_RUNTIME_DIR
	UID        int
	User       string // the login name; only linger needs it

	booted  string // exists where systemd is the init
	runUser string // holds each user's runtime directory
	linger  string // holds a file for each user who lingers
}

// Here is the calling process's place, for that runtime directory ($XDG_RUNTIME_DIR).
func Here(runtimeDir, user string) Place {
	return Place{
		RuntimeDir: runtimeDir, UID: os.Geteuid(), User: user,
		booted: "/run/systemd/system", runUser: "/run/user", linger: "/var/lib/systemd/linger",
	}
}

// Bus is the path of the bus's socket.
func (p Place) Bus() string { return filepath.Join(p.RuntimeDir, "bus") }

// Check finds out, without connecting, whether there is a manager and a bus.
func (p Place) Check() error {
	if _, err := os.Stat(p.booted); err != nil {
		return &EnvironmentError{
			Kind: ErrNoUserManager, What: "systemd is not the init here (a container, or WSL without systemd)",
			Remedy: "use --supervisor direct, or turn systemd on",
		}
	}
	own := filepath.Join(p.runUser, fmt.Sprint(p.UID))
	if p.RuntimeDir == "" {
		if p.ownedDir(own) != nil {
			return &EnvironmentError{
				Kind: ErrNoRuntimeDir, What: own + " does not exist either: no user manager runs for uid " + fmt.Sprint(p.UID),
				Remedy: p.enableLinger() + ", and log in again",
			}
		}
		return &EnvironmentError{
			Kind: ErrNoRuntimeDir, What: "this shell did not come through a login (su, sudo, cron)",
			Remedy: "run: export XDG_RUNTIME_DIR=" + own,
		}
	}
	// Root's came along through su, whether root has a manager or not.
	others := filepath.Dir(p.RuntimeDir) == p.runUser && p.RuntimeDir != own
	switch err := p.ownedDir(p.RuntimeDir); {
	case errors.Is(err, ErrForeignRuntimeDir), errors.Is(err, fs.ErrNotExist) && others:
		remedy := "run: export XDG_RUNTIME_DIR=" + own
		if p.ownedDir(own) != nil {
			remedy = p.enableLinger() + ", and then: export XDG_RUNTIME_DIR=" + own
		}
		return &EnvironmentError{
			Kind: ErrForeignRuntimeDir, What: fmt.Sprintf("%s is not of uid %d: it came along through su or sudo", p.RuntimeDir, p.UID),
			Remedy: remedy,
		}
	case errors.Is(err, fs.ErrNotExist):
		return &EnvironmentError{
			Kind: ErrNoUserManager, What: p.RuntimeDir + " does not exist",
			Remedy: p.enableLinger() + ", and log in again",
		}
	case err != nil:
		return &EnvironmentError{
			Kind: ErrNoUserManager, What: p.RuntimeDir, Cause: err,
			Remedy: "XDG_RUNTIME_DIR has to be a directory of the user's, as " + own,
		}
	}
	if !isSocket(filepath.Join(p.RuntimeDir, "systemd", "private")) {
		return &EnvironmentError{
			Kind: ErrNoUserManager, What: "nothing of systemd's in " + p.RuntimeDir,
			Remedy: fmt.Sprintf("see: systemctl status user@%d.service; to start it: %s", p.UID, p.enableLinger()),
		}
	}
	if !isSocket(p.Bus()) {
		return &EnvironmentError{
			Kind: ErrNoBus, What: p.Bus() + " does not exist",
			Remedy: "run: sudo apt-get install dbus-user-session; systemctl --user daemon-reload; systemctl --user start dbus.socket",
		}
	}
	return nil
}

// Lingering says whether the user manager starts at boot and outlives the last session; if
// not, the error is ErrNotLingering's.
func (p Place) Lingering() error {
	// systemd escapes what a file name cannot hold; a login name that needs it is not Linux's.
	if p.User == "" || strings.ContainsAny(p.User, "/\x00") || p.User == "." || p.User == ".." {
		return fmt.Errorf("linger: %q is no login name", p.User)
	}
	switch _, err := os.Lstat(filepath.Join(p.linger, p.User)); {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return &EnvironmentError{
			Kind: ErrNotLingering, What: "agents of " + p.User + " end when " + p.User + " logs out, and do not start at boot",
			Remedy: p.enableLinger(),
		}
	default:
		return fmt.Errorf("linger: %w", err)
	}
}

func (p Place) enableLinger() string {
	if p.User == "" {
		return fmt.Sprintf("run: sudo loginctl enable-linger %d", p.UID)
	}
	return "run: sudo loginctl enable-linger " + p.User
}

// ownedDir says what is wrong with a directory that should be the user's.
func (p Place) ownedDir(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrPermission):
		// Another user's, which is 0700.
		return ErrForeignRuntimeDir
	case err != nil:
		return err
	case !info.IsDir():
		return fmt.Errorf("not a directory")
	}
	if uid, ok := owner(info); ok && uid != p.UID {
		return ErrForeignRuntimeDir
	}
	return nil
}

func isSocket(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&fs.ModeSocket != 0
}
