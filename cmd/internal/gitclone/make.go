package gitclone

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"agentconnect.md/sandbox/cmd/internal/atomicfile"
)

// Git runs the host's git for the operator.
type Git struct {
	Environ []string
	// Stdin answers what git asks for (a password, perhaps) and Stderr shows what it says.
	Stdin  io.Reader
	Stderr io.Writer
}

// local are variables that would lead git to another repository than the one it is told of
// (git rev-parse --local-env-vars): set where we are started by a hook or an alias.
var local = []string{
	"GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CONFIG", "GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT", "GIT_OBJECT_DIRECTORY",
	"GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_GRAFT_FILE", "GIT_INDEX_FILE", "GIT_NO_REPLACE_OBJECTS",
	"GIT_REPLACE_REF_BASE", "GIT_PREFIX", "GIT_SHALLOW_FILE", "GIT_COMMON_DIR", "GIT_QUARANTINE_PATH", "GIT_NAMESPACE",
}

func (g *Git) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "git", args...)
	for _, e := range g.Environ {
		if name, _, _ := strings.Cut(e, "="); !slices.Contains(local, name) {
			cmd.Env = append(cmd.Env, e)
		}
	}
	cmd.Env = append(cmd.Env, "GIT_DEFAULT_REF_FORMAT=files")
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stderr = g.Stdin, g.Stderr
	return cmd
}

func (g *Git) run(ctx context.Context, args ...string) error {
	cmd := g.command(ctx, args...)
	cmd.Stdout = g.Stderr
	if err := cmd.Run(); err != nil {
		return said(err)
	}
	return nil
}

// said explains an error of git's.
func said(err error) error {
	if errors.Is(err, exec.ErrNotFound) {
		return errors.New("git is missing; install it (`sudo apt install git`)")
	}
	return fmt.Errorf("git: %v", err) //nolint:errorlint // its exit code is not ours
}

// config of the bare repository. What is pushed is checked object by object, so that none
// reaches the operator that has fooled a git before (a .git in a tree, an address in
// .gitmodules that begins with a dash); faults of old histories that harm nobody pass.
// Nothing packs refs: what receives sees them one by one.
const config = `[core]
	repositoryformatversion = %d
	filemode = true
	bare = true
	hooksPath = /dev/null
%s[receive]
	fsckObjects = true
	unpackLimit = 1
	autogc = false
	maxInputSize = 4g
[receive "fsck"]
	zeroPaddedFilemode = warn
	badTimezone = warn
	missingSpaceBeforeDate = warn
	missingSpaceBeforeEmail = warn
[gc]
	auto = 0
	packRefs = false
`

// Make clones source into the bare repository dir, which must not exist. git runs with the
// operator's own configuration and credentials, as the operator's `git clone` would.
func (g *Git) Make(ctx context.Context, source, dir string) (err error) {
	if _, err := os.Lstat(dir); err == nil {
		return fmt.Errorf("%s exists already; move it away", dir)
	}
	tmp := dir + ".new"
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(tmp)
		}
	}()
	// By the transport also from a path: a plain copy would take alternates along, and
	// objects of whatever kind of file.
	if err := g.run(ctx, "-c", "protocol.ext.allow=never", "clone", "--quiet", "--bare", "--no-local", "--template=", "--", source, tmp); err != nil {
		return err
	}
	if _, err := os.Lstat(filepath.Join(tmp, "shallow")); err == nil {
		return fmt.Errorf("%s has not its whole history; run `git fetch --unshallow` there first", source)
	}
	if err := g.settle(ctx, tmp); err != nil {
		return err
	}
	return os.Rename(tmp, dir)
}

// settle leaves in a fresh bare clone what we know: HEAD, our config, objects and refs.
func (g *Git) settle(ctx context.Context, dir string) error {
	cmd := g.command(ctx, "--git-dir="+dir, "config", "--local", "--get", "extensions.objectformat")
	format, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !(errors.As(err, &exit) && exit.ExitCode() == 1) {
		return said(err)
	}
	version, extensions := 0, ""
	switch name := strings.TrimSpace(string(format)); name {
	case "", "sha1":
	case "sha256":
		version, extensions = 1, "[extensions]\n\tobjectformat = sha256\n"
	default:
		return fmt.Errorf("objects of format %q are not known here", name)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := unpackRefs(root); err != nil {
		return err
	}
	names, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return err
	}
	for _, n := range names {
		if !slices.Contains([]string{"HEAD", "objects", "refs"}, n.Name()) {
			if err := root.RemoveAll(n.Name()); err != nil {
				return err
			}
		}
	}
	for _, d := range []string{"objects/info", "refs/heads", "refs/tags"} {
		if err := root.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	return atomicfile.WriteIn(root, "config", fmt.Appendf(nil, config, version, extensions), 0o600)
}

var packedRef = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64}) (refs/[^ ]+)$`) })

// unpackRefs writes each ref of packed-refs to a file of its own.
func unpackRefs(root *os.Root) error {
	text, err := fs.ReadFile(root.FS(), "packed-refs")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for line := range bytes.Lines(text) {
		m := packedRef().FindStringSubmatch(strings.TrimSuffix(string(line), "\n"))
		if m == nil {
			continue // a comment, or what a tag leads to
		}
		if err := root.MkdirAll(filepath.Dir(m[2]), 0o700); err != nil {
			return err
		}
		f, err := root.OpenFile(m[2], os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, fs.ErrExist) {
			continue // newer than the packed one
		}
		if err != nil {
			return err
		}
		_, err = f.WriteString(m[1] + "\n")
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// BranchOf is the branch that an agent's worktree has.
func BranchOf(id string) string { return "agentconnect/" + id }

// Worktree makes a worktree of the operator's repository repo at dir, on a branch of its
// own. dir is empty or does not exist.
func (g *Git) Worktree(ctx context.Context, repo, dir, branch string) error {
	cmd := g.command(ctx, "-C", repo, "rev-parse", "--verify", "--quiet", "refs/heads/"+branch)
	args := []string{"-C", repo, "worktree", "add", "--quiet"}
	switch err := cmd.Run(); {
	case err == nil:
		args = append(args, dir, branch)
	case errors.As(err, new(*exec.ExitError)):
		args = append(args, "-b", branch, dir)
	default:
		return said(err)
	}
	return g.run(ctx, args...)
}

// DropWorktree undoes Worktree, before anybody else has written there.
func (g *Git) DropWorktree(ctx context.Context, repo, dir string) error {
	return g.run(ctx, "-C", repo, "worktree", "remove", "--force", dir)
}
