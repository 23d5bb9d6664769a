// Finding ROOT and the home: what everything else hangs on.

package config

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/atomicfile"
)

// RootEnv is the environment variable that names ROOT.
const RootEnv = "AGENTCONNECT_ROOT"

// Root gives ROOT as Load finds it, whatever is wrong with what lies there.
func Root(o Options) (string, error) {
	loc, err := locate(o)
	if loc.root != "" {
		return loc.root, nil
	}
	return "", err
}

// location is ROOT and the home, with where they came from.
type location struct {
	root, rootSource string
	home             string
	warnings         []string
}

// locate finds both and makes ROOT if it is not there.
func locate(o Options) (location, error) {
	var l location
	if err := l.findHome(o.Home); err != nil {
		return l, err
	}
	path := filepath.Join(l.home, ".agentconnect")
	l.rootSource = "default"
	switch env := os.Getenv(RootEnv); {
	case o.Root != "":
		path, l.rootSource = o.Root, "flag --root"
	case env != "":
		path, l.rootSource = env, "environment "+RootEnv
	}
	where := ""
	if l.rootSource != "default" {
		where = l.rootSource
	}
	if strings.HasPrefix(path, "~") {
		return l, bad(where, "", "%s: ~ is not expanded here; write the absolute path", path)
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return l, bad(where, "", "%s: %w", path, err)
	}
	l.root, err = makeRoot(path)
	if err != nil {
		return l, err
	}
	if l.root == "/" || inside(l.home, l.root) {
		return l, bad(where, "", "%s is the home or above it, and AgentConnect's directory is hidden from every agent; choose a directory of its own, such as %s", l.root, filepath.Join(l.home, ".agentconnect"))
	}
	w, err := checkRoot(l.root)
	if w != "" {
		l.warnings = append(l.warnings, w)
	}
	return l, err
}

// makeRoot makes the directory and gives its path without links: the boundary hides
// ROOT by its real path.
func makeRoot(path string) (string, error) {
	if err := os.Mkdir(path, 0o700); errors.Is(err, fs.ErrNotExist) {
		// Parents get the user's usual mode: they are not ours.
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return "", atomicfile.Explain("make directory", filepath.Dir(path), err)
		}
		if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return "", atomicfile.Explain("make directory", path, err)
		}
	} else if err != nil && !errors.Is(err, fs.ErrExist) {
		if _, serr := os.Stat(path); serr != nil { // on a read-only file system mkdir says EROFS before EEXIST
			return "", atomicfile.Explain("make directory", path, err)
		}
	}
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", bad("", "", "%s: %w; remove the link, or make the directory it names", path, err)
	}
	return real, nil
}

func checkRoot(root string) (warning string, err error) {
	fi, err := os.Lstat(root)
	if err != nil {
		return "", bad("", "", "%w", err)
	}
	if !fi.IsDir() {
		return "", bad("", "", "%s is not a directory; move it away, or choose another with --root", root)
	}
	if uid, ok := owner(fi); ok && uid != os.Geteuid() {
		return "", bad("", "", "%s belongs to uid %d, not to you (uid %d): another user could change your agents; chown it, or choose another with --root", root, uid, os.Geteuid())
	}
	switch m := fi.Mode().Perm(); {
	case m&0o500 != 0o500:
		return "", bad("", "", "you may not read %s (mode %04o): chmod 700 %s", root, m, root)
	case m&0o022 != 0:
		return "", bad("", "", "others may write to %s (mode %04o): they could change your agents; look at what is in it, then: chmod 700 %s", root, m, root)
	case m&0o077 != 0:
		return fmt.Sprintf("others may read %s (mode %04o): chmod 700 %s", root, m, root), nil
	}
	return "", nil
}

func owner(fi fs.FileInfo) (uid int, ok bool) {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(st.Uid), true
}

// findHome takes the home from the passwd database, not from $HOME: programs that ask
// getpwuid (ssh, for one) must find the same one inside.
func (l *location) findHome(override string) error {
	home, env := override, os.Getenv("HOME")
	if home == "" {
		home = passwdHome()
		switch {
		case home == "" && !filepath.IsAbs(env):
			return bad("", "", "uid %d has no home in the passwd database and HOME is not set; add the user with useradd, or set HOME", os.Geteuid())
		case home == "":
			home = env
			l.warnings = append(l.warnings, fmt.Sprintf("uid %d is not in the passwd database: its home is taken from HOME (%s)", os.Geteuid(), env))
		case env != "" && !sameDir(env, home):
			l.warnings = append(l.warnings, fmt.Sprintf("HOME is %s, but the passwd database says %s, which counts here", env, home))
		}
	}
	real, err := filepath.EvalSymlinks(home)
	if err != nil {
		return bad("", "", "home %s: %w; make it, or correct the passwd entry with usermod -d", home, err)
	}
	l.home = real
	return nil
}

func passwdHome() string {
	uid := strconv.Itoa(os.Geteuid())
	if u, err := user.LookupId(uid); err == nil && filepath.IsAbs(u.HomeDir) {
		return u.HomeDir
	}
	// A static build reads /etc/passwd alone; users of LDAP or sssd are known to getent.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "getent", "passwd", uid).Output()
	if err != nil {
		return ""
	}
	f := strings.Split(strings.TrimSpace(string(out)), ":")
	if len(f) < 7 || f[2] != uid || !filepath.IsAbs(f[5]) {
		return ""
	}
	return f[5]
}

func sameDir(a, b string) bool {
	fa, err := os.Stat(a)
	if err != nil {
		return false
	}
	fb, err := os.Stat(b)
	return err == nil && os.SameFile(fa, fb)
}

// inside reports whether path is dir or below it; both absolute and clean.
func inside(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}
