package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// The directory of sockets is $XDG_RUNTIME_DIR/agentconnect: on a tmpfs, gone at
// logout. One user may run daemons on several ROOTs, so the file "root" in it says
// (and its flock holds) whose it is; any further daemon, and one without a runtime
// directory of its own user, takes ROOT/run.

// maxSocketPath is what fits sun_path everywhere (104 bytes on macOS, 108 on Linux).
const maxSocketPath = 103

// runDir is a claimed directory of sockets.
type runDir struct {
	Path  string
	claim *os.File // of the shared directory; nil in ROOT/run, which daemon.lock covers
}

// claimRunDir makes and claims the directory of sockets for root. xdg is
// $XDG_RUNTIME_DIR, which may be empty, another user's (after su) or gone.
func claimRunDir(xdg, root string) (*runDir, error) {
	if ownDir(xdg, 0o022) == nil {
		path := filepath.Join(xdg, "agentconnect")
		if err := privateDir(path); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(filepath.Join(path, "root"), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0o600)
		if err != nil {
			return nil, cannotWrite(path, err)
		}
		err = flock(f)
		if err == nil {
			if err = f.Truncate(0); err == nil {
				_, err = f.WriteAt([]byte(root), 0)
			}
			if err != nil {
				f.Close()
				return nil, cannotWrite(f.Name(), err)
			}
			return &runDir{Path: path, claim: f}, nil
		}
		f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
	}
	path := filepath.Join(root, "run")
	if err := privateDir(path); err != nil {
		return nil, err
	}
	return &runDir{Path: path}, nil
}

// Close gives the claim back.
func (r *runDir) Close() {
	if r.claim != nil {
		r.claim.Close()
	}
}

// sweep takes away what supervisors left here that were killed while no daemon looked, or with
// it: those of commands in agents that do not run are its children.
func (r *runDir) sweep() {
	entries, err := os.ReadDir(r.Path)
	if err != nil {
		return // whoever needs the directory says so
	}
	for _, e := range entries {
		if socket, ok := strings.CutSuffix(e.Name(), ".lock"); ok {
			ClearInside(filepath.Join(r.Path, socket))
		}
	}
}

// sessionDirs is where systemd makes the runtime directories of users.
var sessionDirs = "/run/user"

// ControlSocket says where the daemon of root listens, for a client with xdg as its
// $XDG_RUNTIME_DIR. A client without one (cron, su) finds a daemon of the user's session, too.
func ControlSocket(xdg, root string) string {
	if path := claimedBy(xdg, root); path != "" {
		return filepath.Join(path, controlName)
	}
	own := filepath.Join(root, "run", controlName)
	if _, err := os.Lstat(own); err == nil {
		return own
	}
	if path := claimedBy(filepath.Join(sessionDirs, strconv.Itoa(os.Getuid())), root); path != "" {
		return filepath.Join(path, controlName)
	}
	return own
}

// claimedBy gives the directory of sockets below a runtime directory, if it is root's.
func claimedBy(xdg, root string) string {
	path := filepath.Join(xdg, "agentconnect")
	if ownDir(xdg, 0o022) != nil || ownDir(path, 0o077) != nil {
		return ""
	}
	f, err := os.Open(filepath.Join(path, "root"))
	if err != nil {
		return ""
	}
	defer f.Close()
	if whose, err := io.ReadAll(io.LimitReader(f, 1<<16)); err != nil || string(whose) != root {
		return ""
	}
	return path
}

const controlName = "control.sock"

// Socket returns a path for a socket below the directory that fits a socket address;
// a name too long gives way to its hash.
func (r *runDir) Socket(name string) (string, error) {
	path := socketPath(r.Path, name)
	if len(path) > maxSocketPath || len(guestSocket(path)) > maxSocketPath {
		return "", fmt.Errorf("%s: too long for a socket address (%d bytes at most); set XDG_RUNTIME_DIR or choose a shorter --root", path, maxSocketPath)
	}
	return path, nil
}

// AgentSocket is where the supervisor of an agent listens, below a directory of sockets.
func AgentSocket(dir, id string) string { return socketPath(dir, id+".sock") }

func socketPath(dir, name string) string {
	path := filepath.Join(dir, name)
	if len(path) > maxSocketPath {
		sum := sha256.Sum256([]byte(name))
		path = filepath.Join(dir, "h-"+hex.EncodeToString(sum[:8]))
	}
	return path
}

// ownDir reports whether path is a directory of ours, no link, without the mode bits
// in without.
func ownDir(path string, without os.FileMode) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%q: not an absolute path", path)
	}
	st, err := os.Lstat(strings.TrimRight(path, "/"))
	if err != nil {
		return err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	switch {
	case !st.IsDir():
		return fmt.Errorf("%s: not a directory; remove it", path)
	case !ok || int(sys.Uid) != os.Getuid():
		return fmt.Errorf("%s: belongs to another user; remove it or choose another directory", path)
	case st.Mode().Perm()&without != 0:
		return fmt.Errorf("%s: mode %#o lets others in; run `chmod 700 %s`", path, st.Mode().Perm(), path)
	}
	return nil
}

// privateDir makes path, 0700, or checks that it is ours and makes it so.
func privateDir(path string) error {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return cannotWrite(path, err)
	}
	if err := ownDir(path, 0); err != nil {
		return err
	}
	if err := os.Chmod(path, 0o700); err != nil {
		return cannotWrite(path, err)
	}
	return nil
}

// ProbeDir gives a directory for the sockets of a probe without a daemon, and what
// removes it.
func ProbeDir(xdg, root string) (dir string, done func(), err error) {
	base := root
	if ownDir(xdg, 0o022) == nil {
		base = xdg
	}
	dir, err = os.MkdirTemp(base, "agentconnect-probe-")
	if err != nil {
		return "", nil, cannotWrite(base, err)
	}
	return dir, func() { os.RemoveAll(dir) }, nil
}
