// What an agent would have to write for the host's git, or its editors, to run something of
// the agent's making. The targets are planted by PlantGit, in a folder that the agent writes.

package selftest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/sandbox"
)

func gitAttacks() []Attack {
	return []Attack{
		{"git-hook", "CASES 24", "plant a hook in a repository", "a program at the host's next commit", MustFail, true, inGit(".git/hooks", makes)},
		{"git-hook-nested", "CASES 24", "plant a hook in a nested repository", "the same", MustFail, true, inGit("nested/.git/hooks", makes)},
		{"git-hook-submodule", "CASES 24", "plant a hook in a submodule's git directory", "the same", MustFail, true, inGit(".git/modules/sub/hooks", makes)},
		{"git-hook-bare", "CASES 24", "plant a hook in a bare repository", "the same", MustFail, true, inGit("bare.git/hooks", makes)},
		{"git-hooks-path", "CASES 28a", "plant a hook in a core.hooksPath of the tree", "the same", MustFail, true, inGit("nested/.husky", makes)},
		{"git-hooks-swap", "CASES 24", "put a folder of its own in the place of hooks", "the same", MustFail, true, inGit(".git/hooks", movesAway)},
		{"git-config", "CASES 26", "open a repository's config for writing", "core.fsmonitor, filters, alias.!", MustFail, true, inGit(".git/config", opensForWriting)},
		{"git-config-swap", "CVE-2026-26268", "rename a file of its own over a repository's config", "core.fsmonitor at git status", MustFail, true, inGit(".git/config", replaces)},
		{"git-config-remove", "CASES 26", "remove a repository's config", "one of its own next", MustFail, true, inGit(".git/config", movesAway)},
		{"git-config-link", "CASES 26", "hard-link a repository's config and write by that name", "a mount is by name", MustFail, true, inGit(".git/config", linksAndOpens)},
		{"git-config-nested", "CASES 26", "open a nested repository's config for writing", "core.fsmonitor of an editor that looks below", MustFail, true, inGit("nested/.git/config", opensForWriting)},
		{"git-config-submodule", "CASES 26", "open a submodule's config for writing", "core.fsmonitor at git status of the outer one", MustFail, true, inGit(".git/modules/sub/config", opensForWriting)},
		{"git-config-worktree", "CASES 26", "open config.worktree for writing", "core.fsmonitor, core.hooksPath", MustFail, true, inGit(".git/config.worktree", opensForWriting)},
		{"git-config-bare", "CVE-2022-24765", "open a bare repository's config for writing", "git in that folder obeys it", MustFail, true, inGit("bare.git/config", opensForWriting)},
		{"git-include", "CASES 26", "open a file that a config includes for writing", "whatever a config can say", MustFail, true, inGit("shared.gitconfig", opensForWriting)},
		{"git-attributes", "CASES 26", "open info/attributes for writing", "which filter runs on what", MustFail, true, inGit(".git/info/attributes", opensForWriting)},
		{"git-move", "CASES 23", "rename .git away", "a copy of its own in its place", MustFail, true, inGit(".git", movesAway)},
		{"git-move-nested", "CASES 23", "rename the folder above a nested repository away", "the same, one level up", MustFail, true, inGit("nested", movesAway)},
		{"git-exchange", "CASES 23", "exchange .git and a folder of its own in one call", "a rename that leaves no gap", MustFail, true, inGit(".git", exchanges)},
		{"git-file", "CVE-2024-32002", "open a submodule's .git file for writing", "a git directory of its own choice", MustFail, true, inGit("sub/.git", opensForWriting)},
		{"git-file-swap", "CASES 25", "rename a file of its own over a linked worktree's .git", "the same", MustFail, true, inGit("linked/.git", replaces)},
		{"git-commondir", "CASES 28a", "open a linked worktree's commondir for writing", "config and hooks from elsewhere", MustFail, true, inGit(".git/worktrees/linked/commondir", opensForWriting)},
		{"git-gitdir", "CASES 28a", "open a linked worktree's gitdir for writing", "git worktree prune removes another", MustFail, true, inGit(".git/worktrees/linked/gitdir", opensForWriting)},
		{"git-editor", "CVE-2026-25725", "open the project's editor settings for writing", "a task when the folder is opened", MustFail, true, inGit(".vscode/settings.json", opensForWriting)},
		{"git-settings", "CVE-2026-25725", "plant a file beside the project's settings of an AI tool", "a hook of the host's own tool", MustFail, true, inGit(".claude", makes)},
		{"git-message-link", "CASES 28a", "make a link where git writes a commit's message", "any file of the user's, with the agent's text", MustFail, true, newInGit(".git/COMMIT_EDITMSG", pointsElsewhere)},
		{"git-new-commondir", "CASES 28a", "make a commondir in a repository", "config and hooks from elsewhere", MustFail, true, newInGit(".git/modules/sub/commondir", names)},
		{"git-conflicts", "CASES 26", "make a folder for resolutions of conflicts", "git commit copies what a list of the agent's names", MustFail, true, newInGit("nested/.git/rr-cache", folder)},
		{"git-kept-descriptor", "CASES 23", "rename .git in a nested namespace by a kept descriptor, to stay", "a copy of its own in its place", MustFail, true, gitKept},
	}
}

// inGit aims an attack at a path of the planted repositories.
func inGit(name string, attack func(path string) error) func(context.Context, *Targets) (Seen, string) {
	return func(_ context.Context, t *Targets) (Seen, string) {
		if t.Git == "" {
			return skipped("no target")
		}
		path := filepath.Join(t.Git, name)
		if _, err := os.Lstat(path); err != nil {
			return Worked, "it is not there: " + err.Error() // proves nothing, and is to be seen
		}
		return outcome(attack(path), "at "+path)
	}
}

// newInGit aims at a name that is not there. No mount forbids one: the boundary takes it away,
// which is waited for inside.
func newInGit(name string, attack func(path string) error) func(context.Context, *Targets) (Seen, string) {
	return func(ctx context.Context, t *Targets) (Seen, string) {
		if t.Git == "" {
			return skipped("no target")
		}
		path := filepath.Join(t.Git, name)
		if err := attack(path); err != nil {
			return Refused, err.Error()
		}
		if _, err := os.Lstat(sandbox.GuestPath); err != nil { // the control: nobody takes it away
			return outcome(os.RemoveAll(path), "made "+path+" and took it away")
		}
		gone := func() bool { _, err := os.Lstat(path); return errors.Is(err, os.ErrNotExist) }
		if !within(ctx, noticed, gone) {
			return worked("%s is still there", path)
		}
		return refused("made, and taken away by the boundary")
	}
}

func pointsElsewhere(path string) error { return os.Symlink("/etc/passwd", path) }

func names(path string) error { return os.WriteFile(path, []byte("../../../nested/.git\n"), 0o600) }

func folder(path string) error { return os.Mkdir(path, 0o700) }

// within asks until it is so, but for no longer than most.
func within(ctx context.Context, most time.Duration, so func() bool) bool {
	end := time.NewTimer(most)
	defer end.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !so() {
		select {
		case <-tick.C:
		case <-end.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
}

func makes(dir string) error {
	_, err := create(dir)
	return err
}

func opensForWriting(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

// movesAway renames and back.
func movesAway(path string) error {
	away := path + ".agentconnect-selftest"
	if err := os.Rename(path, away); err != nil {
		return err
	}
	// Outside a running agent's guard may have put an empty folder there meanwhile, over which os.Rename would not.
	if err := unix.Rename(away, path); err != nil {
		return &os.LinkError{Op: "rename", Old: away, New: path, Err: err}
	}
	return nil
}

// replaces renames a copy over the file.
func replaces(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("no copy: %w", err)
	}
	mine := path + ".agentconnect-selftest"
	if err := os.WriteFile(mine, b, 0o600); err != nil {
		return err
	}
	return errors.Join(os.Rename(mine, path), removed(mine))
}

func removed(path string) error {
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func linksAndOpens(path string) error {
	name := path + ".agentconnect-selftest"
	if err := os.Link(path, name); err != nil {
		return err
	}
	return errors.Join(opensForWriting(name), os.Remove(name))
}

// exchanges swaps the folder with an empty one, and back.
func exchanges(path string) error {
	mine := path + ".agentconnect-selftest"
	if err := os.Mkdir(mine, 0o700); err != nil {
		return err
	}
	defer os.Remove(mine)
	if err := unix.Renameat2(unix.AT_FDCWD, mine, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE); err != nil {
		return err
	}
	return unix.Renameat2(unix.AT_FDCWD, mine, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
}

// noticed is how long the boundary may take to undo what a nested namespace makes possible;
// mostly it takes milliseconds.
const noticed = 60 * time.Second

// gitKept does in a namespace of its own what keptDescriptor does, and does not undo it. With
// nesting off there is no such namespace; with it on the boundary moves the folder back.
func gitKept(ctx context.Context, t *Targets) (Seen, string) {
	if t.Git == "" {
		return skipped("no target")
	}
	path := filepath.Join(t.Git, ".git")
	var before unix.Stat_t
	if err := unix.Lstat(path, &before); err != nil {
		return Worked, "it is not there: " + err.Error()
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "try", "kept-away:"+path)
	cmd.SysProcAttr = ownNamespace()
	out, err := cmd.CombinedOutput()
	if text := strings.TrimSpace(string(out)); err == nil && text != string(Worked) {
		err = errors.New(firstLine(text))
	}
	if err != nil {
		return Refused, err.Error()
	}
	if !t.Nesting { // the control: nobody puts it back
		return outcome(os.Rename(path+keptAway, path), "moved "+path+" away, and back")
	}
	back := func() bool {
		var now unix.Stat_t
		return unix.Lstat(path, &now) == nil && now.Ino == before.Ino && now.Dev == before.Dev
	}
	switch {
	case within(ctx, noticed, back):
		return refused("moved, and moved back by the boundary")
	case ctx.Err() != nil:
		return refused("stopped: %v", ctx.Err())
	}
	return worked("%s is still away", path)
}

// keptAway is what a folder that tryKeptAway moved has behind its name.
const keptAway = ".agentconnect-selftest-away"

func tryKeptAway(path string) error {
	return leaveWith(filepath.Dir(path), func(dir int) error {
		return unix.Renameat(dir, filepath.Base(path), dir, filepath.Base(path)+keptAway)
	})
}

// leaveWith opens a folder, leaves the tree of mounts for an empty one, and has do act by the
// descriptor that was kept.
func leaveWith(path string, do func(dir int) error) error {
	dir, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Close(dir) }()
	for _, step := range []func() error{
		func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") },
		func() error { return unix.Mount("x", "/tmp", "tmpfs", 0, "") },
		func() error { return unix.Mkdir("/tmp/old", 0o700) },
		func() error { return unix.PivotRoot("/tmp", "/tmp/old") },
		func() error { return unix.Chdir("/") },
		func() error { return unix.Unmount("/old", unix.MNT_DETACH) },
		func() error { return do(dir) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}
