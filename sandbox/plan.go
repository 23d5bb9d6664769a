// The plan: what a policy compiles to, as a value that can be shown, compared and
// carried out. explain prints it, the launcher builds it: what is shown is what is
// enforced.

package sandbox

import (
	"path/filepath"
	"strconv"
	"strings"
)

// Kind is what stands at a path.
type Kind string

const (
	KindDir    Kind = "dir"
	KindFile   Kind = "file"
	KindSocket Kind = "socket"
	KindOther  Kind = "other"
)

// Op is what one step of a plan does.
type Op string

const (
	// OpBind attaches a clone of the host's Source, with what is mounted below it.
	OpBind Op = "bind"
	// OpTmpfs attaches a fresh tmpfs.
	OpTmpfs Op = "tmpfs"
	// OpDir makes a directory on the tree's own tmpfs (or on an OpTmpfs above it).
	OpDir Op = "dir"
	// OpLink makes a symbolic link there, to Source.
	OpLink Op = "link"
	// OpFile makes a file there, with Content.
	OpFile Op = "file"
	// OpCover attaches an empty read-only directory or file over Target, or a file
	// with Content.
	OpCover Op = "cover"
)

// Mount is one step of a plan. Steps are ordered: what lies above comes first.
type Mount struct {
	Op     Op     `json:"op"`
	Target string `json:"target"`
	// Source is an absolute host path without links (OpBind), or a link's text (OpLink).
	Source string `json:"source,omitempty"`
	Access Access `json:"access,omitempty"`
	Kind   Kind   `json:"kind,omitempty"`
	// Create allows the launcher to make a missing Target: its parent is a tmpfs of
	// ours or a private directory of the agent. Elsewhere a missing Target is an error,
	// since nothing of ours may be left in a workspace.
	Create bool `json:"create,omitempty"`
	// Pinned marks a directory bound onto itself, so that it cannot be renamed away
	// from under a mount below it.
	Pinned bool `json:"pinned,omitempty"`
	// Sealed marks what a program of the host obeys, in a folder that the agent can write.
	Sealed bool `json:"sealed,omitempty"`
	// Grant marks what the operator opened by a grant.
	Grant   bool   `json:"grant,omitempty"`
	Content string `json:"content,omitempty"`
	// Mode is the permission of what OpDir, OpFile and OpTmpfs make.
	Mode uint32 `json:"mode,omitempty"`
	// Size bounds an OpTmpfs, in bytes.
	Size int64 `json:"size,omitempty"`
	// Why says where the step comes from, for explain.
	Why string `json:"why"`
}

// mounts reports whether the step attaches a mount (and does not just make an inode).
func (m Mount) mounts() bool { return m.Op == OpBind || m.Op == OpTmpfs || m.Op == OpCover }

// Plan is everything the launcher carries out.
type Plan struct {
	Agent         string      `json:"agent"`
	Mounts        []Mount     `json:"mounts"`
	Network       NetworkMode `json:"network"`
	Nesting       bool        `json:"nesting"`
	DieWithParent bool        `json:"dieWithParent"`
	// OwnCgroup: once it is in its control group, the launcher shows that at CgroupPath and,
	// with Nesting, goes into one below.
	OwnCgroup bool `json:"ownCgroup,omitempty"`
	// OldBwrap: the bubblewrap that is to carry it out cannot disable user namespaces; whoever
	// starts it says so.
	OldBwrap bool `json:"oldBwrap,omitempty"`
	// Notes are things that an operator should know about this plan.
	Notes []string `json:"notes,omitempty"`
}

// Verdict is what happens to one path inside the boundary.
type Verdict struct {
	Path   string `json:"path"`
	Access Access `json:"access"`
	Source string `json:"source,omitempty"`
	Why    string `json:"why"`
}

// Explain says what the agent sees at an absolute path, by the same steps that the
// launcher carries out: the last step whose target holds the path decides.
func (p *Plan) Explain(path string) Verdict {
	path = filepath.Clean(path)
	for range 40 { // as deep as the kernel follows links
		v, link := p.explain(path)
		if link == "" {
			return v
		}
		path = link
	}
	return Verdict{Path: path, Access: Hidden, Why: "a loop of links"}
}

func (p *Plan) explain(path string) (v Verdict, link string) {
	for _, dyn := range dynamic {
		if inside(path, dyn.path) {
			return Verdict{Path: path, Access: dyn.access, Why: dyn.why}, ""
		}
	}
	if p.OwnCgroup && inside(path, CgroupPath) {
		return Verdict{Path: path, Access: ReadOnly, Why: "the control group that the agent is in"}, ""
	}
	v = Verdict{Path: path, Access: Hidden, Why: "not part of the view"}
	exact := false
	for _, m := range p.Mounts {
		switch {
		case m.Op == OpLink && inside(path, m.Target):
			rest := strings.TrimPrefix(path, m.Target)
			to := m.Source
			if !filepath.IsAbs(to) {
				to = filepath.Join(filepath.Dir(m.Target), to)
			}
			v, link = Verdict{}, filepath.Join(to, rest)
			exact = true
		case m.mounts() && inside(path, m.Target):
			link, exact = "", true
			v = Verdict{Path: path, Access: m.Access, Why: m.Why}
			if m.Op == OpBind {
				v.Source = filepath.Join(m.Source, strings.TrimPrefix(path, m.Target))
			}
			if m.Op == OpCover && m.Content != "" {
				v.Access = ReadOnly
			}
		case m.Op == OpFile && m.Target == path, m.Op == OpDir && m.Target == path:
			if !exact || v.Access == Hidden {
				v = Verdict{Path: path, Access: ReadOnly, Why: m.Why}
			}
		case !exact && m.mounts() && inside(m.Target, path):
			v = Verdict{Path: path, Access: ReadOnly, Why: "an empty directory on the way to " + m.Target}
			exact = false
		}
	}
	return v, link
}

// dynamic are the parts of the view that bubblewrap makes when it starts.
var dynamic = []struct {
	path   string
	access Access
	why    string
}{
	{"/proc", ReadWrite, "a fresh /proc of the sandbox's own processes"},
	{"/dev", ReadWrite, "a minimal /dev: null, zero, full, random, urandom, tty, pts, shm"},
}

// BwrapArgs gives the options for bubblewrap, which reads them from a descriptor: the
// tree bound recursively as the new root, fresh /proc and /dev, every namespace that
// the launcher did not make, the seccomp filter, and the working directory dir inside.
// Descriptors below 0 are left out.
func (p *Plan) BwrapArgs(tree, dir string, seccompFD, infoFD int) []string {
	args := []string{
		"--bind", tree, "/",
		"--proc", "/proc",
		"--dev", "/dev",
		"--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup",
		"--cap-drop", "ALL",
	}
	if !p.Nesting && !p.OldBwrap {
		args = append(args, "--disable-userns")
	}
	if p.DieWithParent {
		args = append(args, "--die-with-parent")
	}
	if seccompFD >= 0 {
		args = append(args, "--seccomp", strconv.Itoa(seccompFD))
	}
	if infoFD >= 0 {
		args = append(args, "--info-fd", strconv.Itoa(infoFD))
	}
	return append(args, "--chdir", dir)
}

// inside reports whether path is dir or lies below it. Both are clean and absolute.
func inside(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir) && path[len(dir)] == '/'
}
