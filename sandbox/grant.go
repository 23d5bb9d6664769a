// What an operator may not open to an agent, whatever they say: each refusal has its
// reason. The workspace and the agent's own directories are judged by the same rule.

package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
)

// Host is all that compiling a policy may know of the host.
type Host interface {
	// Resolve follows every link in an absolute path and says what is there; an error
	// for which errors.Is(err, fs.ErrNotExist) holds means nothing is.
	Resolve(path string) (real string, kind Kind, err error)
	// Readlink gives the text of the link at path, or an error if it is none.
	Readlink(path string) (string, error)
	// ReadDir lists the names in a directory.
	ReadDir(path string) ([]string, error)
	// ReadFile reads a small configuration file.
	ReadFile(path string) (string, error)
	// Sockets lists where bound Unix sockets of the host lie, without a link on the way; odd
	// reports that some lie elsewhere than the names say that they were bound by, or under another
	// name as well, or that something in one of these folders keeps that from being told.
	Sockets(folders []string) (paths []string, odd bool, err error)
	// SocketsBelow looks for sockets in a directory, far where that is worth it, and says
	// whether it saw all of it.
	// Shut are folders of the user's in it that may not be looked at, if it looks far.
	SocketsBelow(dir string, far bool) (paths, shut []string, all bool)
}

// RefusedError says why a path cannot be opened to an agent.
type RefusedError struct {
	Path   string // as given
	Real   string // after every link
	Reason string
}

func (e *RefusedError) Error() string {
	if e.Real != "" && e.Real != e.Path {
		return fmt.Sprintf("%s (which is %s) cannot be opened to an agent: %s", e.Path, e.Real, e.Reason)
	}
	return fmt.Sprintf("%s cannot be opened to an agent: %s", e.Path, e.Reason)
}

// noGrantInside are directories of the system: nothing in them, above them or equal to
// them is granted.
var noGrantInside = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/boot", "/dev", "/proc", "/sys", "/run", "/snap", "/nix",
	"/var/run", "/var/lib/dpkg", "/var/lib/apt", "/var/lib/systemd", "/var/spool/cron", "/var/log/journal", "/lost+found",
}

// noGrantItself are directories of which parts may be granted, but not the whole.
var noGrantItself = []string{"/var", "/var/lib", "/var/tmp", "/var/cache", "/var/log", "/var/spool", "/tmp", "/home", "/root", "/opt"}

// homeKeys are below the home: equal, above or inside is refused. Those with write hold
// nothing secret, but what is written there runs on the host as the user, or decides what
// runs: they are refused for writing, and whether they exist already or not.
var homeKeys = []struct {
	path   string
	write  bool
	reason string
}{
	{".ssh", false, "it holds the user's ssh keys"},
	{".gnupg", false, "it holds the user's gpg keys"},
	{".pki", false, "it holds the user's certificates"},
	{".config/agentconnect", false, "it configures this program"},
	{".local/share/keyrings", false, "it holds the user's keyrings"},
	{".local/share/kwalletd", false, "it holds the user's passwords"},
	{".password-store", false, "it holds the user's passwords"},
	{".aws", false, "it holds cloud credentials"},
	{".azure", false, "it holds cloud credentials"},
	{".config/gcloud", false, "it holds cloud credentials"},
	{".kube", false, "it holds cluster credentials"},
	{".docker", false, "it holds registry credentials and a socket"},
	{".config/gh", false, "it holds a GitHub token"},
	{".netrc", false, "it holds passwords"},
	{".git-credentials", false, "it holds passwords"},
	{".mozilla", false, "it holds the browser's passwords and cookies"},
	{".config/google-chrome", false, "it holds the browser's passwords and cookies"},
	{".config/chromium", false, "it holds the browser's passwords and cookies"},
	{".thunderbird", false, "it holds mail and its passwords"},
	{".bash_history", false, "it holds what the user typed, passwords perhaps"},

	{".config/systemd", true, "what is written there runs on the host as the user"},
	{".config/autostart", true, "what is written there runs at the next login"},
	{".config/environment.d", true, "what is written there enters every program of the user"},
	{".config/plasma-workspace", true, "what is written there runs at the next login"},
	{".config/git", true, "git on the host runs what its configuration says"},
	{".config/Code", true, "the editor on the host runs what lies there"},
	{".config/zed", true, "the editor on the host runs what lies there"},
	{".config/nvim", true, "the editor on the host runs what lies there"},
	{".config/fish", true, "the user's shell runs it"},
	{".local/share/systemd", true, "what is written there runs on the host as the user"},
	{".local/share/applications", true, "what is written there runs on the user's desktop"},
	{".local/share/dbus-1", true, "the bus on the host starts what lies there"},
	{".local/share/nvim", true, "the editor on the host runs what lies there"},
	{".local/lib", true, "programs on the host load what lies there"},
	{".local/bin", true, "programs there run on the host as the user"},
	{"bin", true, "programs there run on the host as the user"},
	{".gitconfig", true, "git on the host runs what its configuration says"},
	{".bashrc", true, "the user's shell runs it"},
	{".bash_aliases", true, "the user's shell runs it"},
	{".bash_profile", true, "the user's shell runs it"},
	{".bash_login", true, "the user's shell runs it"},
	{".bash_logout", true, "the user's shell runs it"},
	{".profile", true, "the user's shell runs it"},
	{".zshrc", true, "the user's shell runs it"},
	{".zshenv", true, "the user's shell runs it"},
	{".zprofile", true, "the user's shell runs it"},
	{".zlogin", true, "the user's shell runs it"},
	{".oh-my-zsh", true, "the user's shell runs it"},
	{".inputrc", true, "the user's shell obeys it"},
	{".pam_environment", true, "it enters every program of the user"},
	{".xprofile", true, "the user's desktop runs it"},
	{".xsession", true, "the user's desktop runs it"},
	{".xsessionrc", true, "the user's desktop runs it"},
	{".xinitrc", true, "the user's desktop runs it"},
	{".vimrc", true, "the editor on the host runs it"},
	{".vim", true, "the editor on the host runs what lies there"},
	{".emacs", true, "the editor on the host runs it"},
	{".emacs.d", true, "the editor on the host runs what lies there"},
	{".vscode", true, "the editor on the host runs what lies there"},
	{".vscode-server", true, "the editor on the host runs what lies there"},
	{".tmux.conf", true, "tmux on the host runs what it says"},
	{".nvm", true, "the user's shell runs what lies there"},
	{".npmrc", true, "npm on the host obeys it, and it holds tokens"},
	{".cargo", true, "cargo on the host runs what lies there"},
	{".rustup", true, "programs there run on the host as the user"},
	{".pyenv", true, "programs there run on the host as the user"},
	{".bun", true, "programs there run on the host as the user"},
	{".deno", true, "programs there run on the host as the user"},
	{".npm-global", true, "programs there run on the host as the user"},
	{".claude", true, "Claude Code on the host runs the hooks that its settings name"},
	{".claude.json", true, "Claude Code on the host starts the servers that it names"},
	{".codex", true, "Codex on the host obeys it"},
	{".gemini", true, "Gemini on the host obeys it"},
}

// CheckGrant says whether path may be opened to the agent of policy p. The path must exist,
// and no link may lie on the way to it: whoever could change the link, another agent
// perhaps, would decide what is opened. The error is a *RefusedError, or says what is missing.
func CheckGrant(p Policy, path string, access Access, h Host) error {
	if !filepath.IsAbs(path) {
		return &RefusedError{Path: path, Reason: "the path is not absolute; write it from / on"}
	}
	if strings.ContainsRune(path, 0) {
		return &RefusedError{Path: path, Reason: "the path holds a NUL byte"}
	}
	clean := filepath.Clean(path)
	real, kind, err := h.Resolve(clean)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s does not exist: make it first, or leave the grant out: %w", path, fs.ErrNotExist)
	}
	if err != nil {
		return fmt.Errorf("%s: %w; check the path and its permissions", path, err)
	}
	refuse := func(reason string) error { return &RefusedError{Path: path, Real: real, Reason: reason} }
	if kind != KindDir && kind != KindFile {
		return refuse("it is neither a directory nor a regular file; grant the folder that it lies in")
	}
	root, home := realOr(h, p.Root), realOr(h, p.Home)
	for _, at := range dedup(clean, real) {
		if at == "/" {
			return refuse("it is the whole file system; grant the folder that the agent needs")
		}
		// The home is judged first: it may lie below a system directory (/var/lib/x).
		switch {
		case at == p.Home || at == home:
			return refuse("it is the whole home; grant the folder that the agent needs")
		case inside(p.Home, at) || inside(home, at):
			return refuse("it holds the home " + p.Home + "; grant the folder that the agent needs")
		case inside(at, p.Root) || inside(at, root):
			return refuse("it lies in " + p.Root + ", where the agents' own directories and settings are")
		case inside(p.Root, at) || inside(root, at):
			return refuse("it holds " + p.Root + ", where the agents' own directories and settings are")
		}
		for _, k := range homeKeys {
			if k.write && access != ReadWrite {
				continue
			}
			for _, hm := range dedup(p.Home, home) {
				key := filepath.Join(hm, k.path)
				if inside(at, key) {
					return refuse(k.reason)
				}
				if inside(key, at) {
					// What does not exist yet, an agent that may write could make.
					if _, _, err := h.Resolve(key); err == nil || access == ReadWrite {
						return refuse("it holds the place of " + key + ": " + k.reason)
					}
				}
			}
		}
		for _, o := range p.Own {
			if inside(at, o) || inside(o, at) && access == ReadWrite {
				return refuse("it holds programs or sockets of agentconnect (" + o + ")")
			}
		}
		// Another ROOT, of another daemon of this user.
		for dir := at; ; dir = filepath.Dir(dir) {
			if _, kind, err := h.Resolve(filepath.Join(dir, "daemon.lock")); err == nil && kind == KindFile {
				return refuse("it lies in " + dir + ", where a daemon of agentconnect keeps its agents")
			}
			if dir == "/" {
				break
			}
		}
		for _, o := range p.OtherHomes {
			if inside(o, at) {
				return refuse("it holds another user's home")
			}
		}
		if inside(at, p.Home) || inside(at, home) {
			continue
		}
		for _, d := range noGrantInside {
			if inside(at, d) || inside(d, at) {
				return refuse("it belongs to the system (" + d + "); choose a folder of your own")
			}
		}
		for _, d := range noGrantItself {
			if at == d {
				return refuse("it is shared by the whole system; grant a folder in it")
			}
		}
	}
	if real != clean && !(inside(clean, p.Home) && real == filepath.Join(home, strings.TrimPrefix(clean, p.Home))) {
		return refuse("a link leads there, and whoever changes the link would decide what the agent gets; give " + real + " itself")
	}
	return nil
}

// CheckWorkspace resolves the workspace of p and judges it: in the agent directory it
// must be a folder of its own there, elsewhere it counts as a grant.
func CheckWorkspace(p Policy, h Host) (string, error) {
	ws := p.Workspace
	if !filepath.IsAbs(ws) {
		ws = filepath.Join(p.AgentDir, ws)
		if !inside(ws, p.AgentDir) {
			return "", &RefusedError{Path: p.Workspace, Reason: "a relative workspace must stay inside the agent directory; give an absolute path to use a folder elsewhere"}
		}
	}
	real, kind, err := h.Resolve(ws)
	if err != nil {
		return "", fmt.Errorf("workspace %s: %w; make the folder, or set another with `agentconnect agent edit %s --workspace DIR`", ws, err, p.Agent)
	}
	if kind != KindDir {
		return "", &RefusedError{Path: ws, Real: real, Reason: "the workspace is not a directory; give a folder"}
	}
	dir := realOr(h, p.AgentDir)
	if inside(real, dir) {
		if real == dir {
			return "", &RefusedError{Path: ws, Real: real, Reason: "it is the agent directory itself, which holds the agent's settings"}
		}
		for _, own := range []string{p.HomeDir, p.TmpDir, p.MemoryDir} {
			if own == "" {
				continue
			}
			if own = realOr(h, own); inside(real, own) || inside(own, real) {
				return "", &RefusedError{Path: ws, Real: real, Reason: "it overlaps the agent's " + filepath.Base(own) + " directory"}
			}
		}
		return real, nil
	}
	if !filepath.IsAbs(p.Workspace) {
		return "", &RefusedError{Path: p.Workspace, Real: real, Reason: "a relative workspace must stay inside the agent directory after every link; give an absolute path to use a folder elsewhere"}
	}
	if err := CheckGrant(p, ws, ReadWrite, h); err != nil {
		return "", fmt.Errorf("workspace: %w", err)
	}
	return real, nil
}

// ownDir judges the agent's home, tmp or memory directory: in the agent directory, or,
// behind a link that only the operator can have made, a place that could be granted.
func ownDir(p Policy, path string, h Host) (string, error) {
	real, kind, err := h.Resolve(path)
	if err != nil {
		return "", fmt.Errorf("%s: %w; `agentconnect agent edit %s` makes missing directories", path, err, p.Agent)
	}
	if kind != KindDir {
		return "", &RefusedError{Path: path, Real: real, Reason: "it is not a directory"}
	}
	dir := realOr(h, p.AgentDir)
	if inside(real, dir) && real != dir {
		return real, nil
	}
	if err := CheckGrant(p, real, ReadWrite, h); err != nil {
		return "", err
	}
	return real, nil
}

func realOr(h Host, path string) string {
	if path == "" {
		return path
	}
	if real, _, err := h.Resolve(path); err == nil {
		return real
	}
	return path
}

func dedup(a, b string) []string {
	if a == b {
		return []string{a}
	}
	return []string{a, b}
}
