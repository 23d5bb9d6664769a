// The look and the plan that comes of it, tried again while the folders change.

package gitseal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"agentconnect.md/sandbox/sandbox"
)

// attempts bounds how often a plan is made anew because something found was gone again; who
// starts a program tries again, too.
const attempts = 3

// Compile looks through the folders that the policy opens for writing and compiles the
// policy with what it found. With hooks it makes the one thing that this project leaves
// in a repository: an empty hooks/ where there is none.
func Compile(p sandbox.Policy, h sandbox.Host, hooks bool) (*sandbox.Plan, *Found, error) {
	var last error
	for range attempts {
		found := Find(Options{Roots: Roots(p, h), Home: p.Home, Own: p.AgentDir})
		if len(found.Shut) > 0 {
			return nil, nil, fmt.Errorf("%s may not be read, so what git would obey there cannot be sealed; look what is in it, and `chmod u+rwx` it", found.Shut[0])
		}
		for _, dir := range found.Hooks {
			path := filepath.Join(dir, "hooks")
			if !hooks {
				found.Notes = append(found.Notes, "an empty "+path+" will be made, since what is not there cannot be sealed")
				continue
			}
			if err := makeHooks(dir); err != nil {
				found.Absent = append(found.Absent, path)
				found.Notes = append(found.Notes, "no "+path+", and none could be made ("+err.Error()+"): it is watched, not sealed")
				continue
			}
			found.Seals = append(found.Seals, sandbox.Seal{Path: path, Kind: sandbox.KindDir, How: sandbox.SealReadOnly, Why: "git control file of " + dir})
		}
		for _, path := range found.Shared {
			if !hooks {
				found.Notes = append(found.Notes, path+" has another name besides (a hard link), by which the agent could write it: it will be made a file of its own")
				continue
			}
			if err := alone(path); err != nil && !errors.Is(err, os.ErrNotExist) {
				return nil, nil, fmt.Errorf("%s has another name besides (a hard link), by which the agent could write it, and cannot be made a file of its own: %w; replace it by a copy", path, err)
			}
			found.Notes = append(found.Notes, path+" had another name besides (a hard link), by which the agent could have written it: it is a file of its own now")
		}
		p.Seals, p.SealNotes = found.Seals, found.Notes
		plan, err := sandbox.Compile(p, h)
		if err == nil {
			return plan, found, nil
		}
		if last = err; !errors.As(err, new(*sandbox.ChangedError)) {
			break
		}
	}
	return nil, nil, last
}

// Roots are the folders that a policy opens for writing and that somebody may run git in
// on the host: not the agent's home and tmp, nor a clone of its own.
func Roots(p sandbox.Policy, h sandbox.Host) []string {
	ws := p.Workspace
	if !filepath.IsAbs(ws) {
		ws = filepath.Join(p.AgentDir, ws)
	}
	paths := []string{ws, p.MemoryDir}
	if p.Repository != "" {
		paths = paths[1:] // a clone of the agent's own, which the host keeps out of
	}
	for _, g := range p.Grants {
		if g.Access == sandbox.ReadWrite {
			paths = append(paths, filepath.Clean(g.Path))
		}
	}
	var roots []string
	for _, path := range paths {
		real, kind, err := h.Resolve(path)
		if err == nil && kind == sandbox.KindDir {
			roots = append(roots, real)
		}
	}
	// What lies in another root is looked through with it.
	slices.Sort(roots)
	roots = slices.Compact(roots)
	var out []string
	for _, r := range roots {
		if !slices.ContainsFunc(roots, func(o string) bool { return o != r && inside(r, o) }) {
			out = append(out, r)
		}
	}
	return out
}
