// Which paths a client's session may be opened in, and which files a sandboxed runtime
// may reach through its client.

package acp

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"unicode/utf8"
)

// PathChecker judges the paths in ACP messages. Its errors are shown to the user of
// the editor, so they say what to do.
type PathChecker interface {
	// CheckDir judges a session's cwd and additionalDirectories.
	CheckDir(path string) (resolved string, err error)
	// CheckFile judges a file that the runtime asks its client to read or write, and
	// returns the path with every link followed, which is what the client is given.
	CheckFile(path string, write bool) (resolved string, err error)
}

// Root is a directory that paths may lie in.
type Root struct {
	Path     string
	Writable bool
}

// Roots is a PathChecker for the agent's workspace and grants. Paths are resolved by
// the kernel on the host, link by link, and count by where they end. The most specific
// root decides, so a read-only root inside a writable one takes that part out.
//
// A client writes as the user and outside the boundary, where the boundary's
// read-only seals do not hold. So whatever the roots say, nothing is written into a
// git directory or into the directories that host programs take configuration from.
//
// Roots cannot hold a path still: between the check and the client's own open the
// agent can put a link in its place. That is the rest of risk an operator takes
// with client files, and why they are off unless asked for.
type Roots []Root

// NewRoots resolves the roots once, so that what an agent changes later moves none.
func NewRoots(list []Root) (Roots, error) {
	roots := make(Roots, 0, len(list))
	for _, r := range list {
		p, err := resolve(r.Path)
		if err != nil {
			return nil, fmt.Errorf("root %s: %w", r.Path, err)
		}
		roots = append(roots, Root{Path: p.path, Writable: r.Writable})
	}
	return roots, nil
}

// resolved is what a path turned out to be.
type resolved struct {
	path    string
	dir     bool
	regular bool
}

var errNotExist = errors.New("does not exist")

// hostTrusted are directories whose content host programs run or obey.
var hostTrusted = []string{".git", ".claude", ".codex", ".gemini", ".cursor", ".vscode", ".idea", ".devcontainer"}

func (r Roots) owner(path string) (best Root, ok bool) {
	for _, root := range r {
		if within(path, root.Path) && (!ok || len(root.Path) >= len(best.Path)) {
			best, ok = root, true
		}
	}
	return best, ok
}

func within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

func (r Roots) outside(path, end string) error {
	where := ""
	if end != path {
		where = fmt.Sprintf(" (it leads to %q)", end)
	}
	names := make([]string, len(r))
	for i, root := range r {
		names[i] = root.Path
	}
	return fmt.Errorf("%q%s is outside the agent's workspace and grants: use a path below %s, or grant it with: agentconnect agent edit ID --grant PATH:rw",
		path, where, strings.Join(names, ", "))
}

func checkForm(path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%q is not an absolute path: give the whole path", path)
	}
	if strings.ContainsRune(path, 0) {
		return fmt.Errorf("%q holds a NUL byte", path)
	}
	return nil
}

// CheckDir implements PathChecker.
func (r Roots) CheckDir(path string) (string, error) {
	if err := checkForm(path); err != nil {
		return "", err
	}
	p, err := resolve(path)
	if err != nil {
		return "", fmt.Errorf("%q: %w", path, err)
	}
	if _, ok := r.owner(p.path); !ok {
		return "", r.outside(path, p.path)
	}
	if !p.dir {
		return "", fmt.Errorf("%q is not a directory", path)
	}
	return p.path, nil
}

// CheckFile implements PathChecker.
func (r Roots) CheckFile(path string, write bool) (string, error) {
	if err := checkForm(path); err != nil {
		return "", err
	}
	p, err := resolve(path)
	if errors.Is(err, errNotExist) && write {
		// A new file: its directory counts. A link that leads nowhere is not a new file.
		if strings.HasSuffix(path, "/") {
			return "", fmt.Errorf("%q is not the name of a file", path)
		}
		dir, name := filepath.Split(path)
		if name == "." || name == ".." {
			return "", fmt.Errorf("%q is not the name of a file", path)
		}
		var parent resolved
		if parent, err = resolveForNew(dir, name); err == nil {
			p = resolved{path: filepath.Join(parent.path, name), regular: true}
		}
	}
	if err != nil {
		return "", fmt.Errorf("%q: %w", path, err)
	}
	if !utf8.ValidString(p.path) {
		// The client would be given another name, which may lead anywhere.
		return "", fmt.Errorf("%q leads to %q, a name that no client can be told", path, p.path)
	}
	root, ok := r.owner(p.path)
	if !ok {
		return "", r.outside(path, p.path)
	}
	if !p.regular {
		return "", fmt.Errorf("%q is not a regular file", path)
	}
	if !write {
		return p.path, nil
	}
	if !root.Writable {
		return "", fmt.Errorf("%q is read-only for this agent (%s)", path, root.Path)
	}
	if why := trusted(root.Path, p.path); why != "" {
		return "", fmt.Errorf("%q is in %s, which programs outside the boundary trust: it is not written on an agent's behalf", path, why)
	}
	return p.path, nil
}

// trusted names the directory that makes a path one that host programs obey. A bare
// repository has no telling name, so its parts are looked for.
func trusted(root, path string) string {
	for _, part := range strings.Split(path, "/") {
		for _, t := range hostTrusted {
			if strings.EqualFold(part, t) {
				return t
			}
		}
	}
	for dir := filepath.Dir(path); within(dir, root); dir = filepath.Dir(dir) {
		if isGitDir(dir) {
			return "the git directory " + dir
		}
		if dir == "/" {
			break
		}
	}
	return ""
}

func isGitDir(dir string) bool {
	for _, name := range []string{"HEAD", "objects", "refs"} {
		if _, err := resolve(dir + "/" + name); err != nil {
			return false
		}
	}
	return true
}
