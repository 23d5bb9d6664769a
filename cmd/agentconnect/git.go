// agent add --git and --git-worktree: the workspace that is made from a repository.

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/gitclone"
)

// roomFor refuses an agent whose workspace is to be made where something lies already: an
// agent of that id may have written it, and no git of the host runs there.
func (s *site) roomFor(ag *agent.Agent) error {
	if ag.Git == (agent.Git{}) {
		return nil
	}
	d := s.store.Dirs(ag.ID)
	names, err := os.ReadDir(d.Workspace)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if len(names) > 0 || lies(d.Repository) {
		return fmt.Errorf("an agent of that id left its work in %s: move it away, remove it with `agentconnect agent rm %s --purge`, or choose another id", d.Agent, ag.ID)
	}
	for _, from := range []string{ag.Git.Clone, ag.Git.Worktree} {
		if from != "" && !gitclone.IsURL(from) && inDirectory(from, behindLinks(s.cfg.Root)) {
			return fmt.Errorf("%s: it lies in %s, where agents write, and no git of yours runs there", from, s.cfg.Root)
		}
	}
	return nil
}

func inDirectory(path, dir string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && filepath.IsLocal(rel)
}

func lies(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// fill makes the workspace of an agent that was just written. After an error nothing of it
// is left.
func (s *site) fill(ctx context.Context, ag *agent.Agent) error {
	if ag.Git == (agent.Git{}) {
		return nil
	}
	d := s.store.Dirs(ag.ID)
	git := &gitclone.Git{Environ: s.a.environ, Stderr: s.a.err}
	if f, ok := s.a.in.(*os.File); ok {
		git.Stdin = f
	}
	if repo := ag.Git.Worktree; repo != "" {
		if err := git.Worktree(ctx, repo, d.Workspace, gitclone.BranchOf(ag.ID)); err != nil {
			return err
		}
		// Seen as the start will see it: a repository that may not be opened says so here.
		if _, err := s.builder().PolicyWithoutRuntime(ag); err != nil {
			return errors.Join(err, git.DropWorktree(ctx, repo, d.Workspace))
		}
		return nil
	}
	if err := git.Make(ctx, ag.Git.Clone, d.Repository); err != nil {
		return err
	}
	if err := s.cloneInside(ctx, ag); err != nil {
		return errors.Join(err, os.RemoveAll(d.Repository), empty(d.Workspace))
	}
	return nil
}

// cloneInside makes the agent's own clone, behind its boundary.
func (s *site) cloneInside(ctx context.Context, ag *agent.Agent) error {
	b := s.builder()
	policy, err := b.PolicyWithoutRuntime(ag)
	if err != nil {
		return err
	}
	q := gitclone.Request{Policy: policy, Launcher: b.Programs.Launcher, Bwrap: b.Programs.Bwrap}
	if gitclone.IsURL(ag.Git.Clone) {
		q.Upstream = ag.Git.Clone
	}
	return gitclone.By(ctx, b.Programs.Supervisor, q)
}

// empty removes what is in a folder, through no link.
func empty(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	names, err := fs.ReadDir(root.FS(), ".")
	for _, n := range names {
		err = errors.Join(err, root.RemoveAll(n.Name()))
	}
	return err
}

// sayGit says how commits come out.
func sayGit(out io.Writer, d agent.Dirs, ag *agent.Agent) {
	switch {
	case ag.Git.Clone != "":
		fmt.Fprintf(out, "it works in a clone of its own; do not run git or open an editor there. What it pushes to origin you fetch with\n  git fetch '%s' BRANCH\n", oneLine(d.Repository))
	case ag.Git.Worktree != "":
		fmt.Fprintf(out, "it works in a worktree of %s, on branch %s\n", oneLine(ag.Git.Worktree), gitclone.BranchOf(ag.ID))
	}
}

// gitRows say how an agent has its repositories.
func gitRows(t *table, g *control.AgentGit, seals string) {
	if g != nil {
		t.row("git", gitLine(g))
	}
	t.row("git seals", orDefault(seals, "none"))
}

func gitLine(g *control.AgentGit) string {
	if g.Clone != "" {
		return "a clone of its own, of " + g.Clone + ", with no seals; commits come out in " + g.Repository
	}
	return "a worktree of " + g.Worktree
}
