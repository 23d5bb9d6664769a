// Variables of a sealed git configuration, which the supervisor changes if the operator
// allowed it.

package main

import (
	"context"
	"fmt"
	"os/exec"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// gitConfig asks for variables of the repository that it is started in.
func gitConfig(ctx context.Context, args []string) error {
	var sets []wire.GitSetting
	switch {
	case len(args) == 2 && args[0] == "--unset":
		sets = []wire.GitSetting{{Key: args[1], Unset: true}}
	case len(args) == 2 && args[0] == "--upstream":
		var err error
		if sets, err = upstream(ctx, args[1]); err != nil {
			return fmt.Errorf("git-config: %w", err)
		}
	case len(args) == 2 && !strings.HasPrefix(args[0], "-"):
		sets = []wire.GitSetting{{Key: args[0], Value: args[1]}}
	default:
		return usage("git-config: usage: git-config KEY VALUE, git-config --unset KEY, or git-config --upstream REMOTE/BRANCH")
	}
	dir, err := git(ctx, "rev-parse", "--path-format=absolute", "--git-common-dir")
	if err != nil {
		return fmt.Errorf("git-config: no repository here: %w", err)
	}
	for _, set := range sets {
		set.Dir = dir
		if err := askSetting(ctx, set); err != nil {
			return fmt.Errorf("git-config: %w", err)
		}
	}
	return nil
}

// upstream is what `git branch -u REMOTE/BRANCH` would set for the branch that is checked out.
func upstream(ctx context.Context, of string) ([]wire.GitSetting, error) {
	remote, branch, ok := strings.Cut(of, "/")
	if !ok {
		return nil, fmt.Errorf("%q: no upstream: write REMOTE/BRANCH", of)
	}
	current, err := git(ctx, "symbolic-ref", "--short", "HEAD")
	if err != nil {
		return nil, fmt.Errorf("no branch is checked out: %w", err)
	}
	return []wire.GitSetting{{Key: "branch." + current + ".remote", Value: remote}, {Key: "branch." + current + ".merge", Value: "refs/heads/" + branch}}, nil
}

// git gives the one line that git prints.
func git(ctx context.Context, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "git", args...).Output()
	return strings.TrimSuffix(string(out), "\n"), err
}

func askSetting(ctx context.Context, set wire.GitSetting) error {
	conn, err := dialSupervisor(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = ask(conn, wire.GuestRequest{Op: wire.OpGitConfig, Setting: &set})
	return err
}
