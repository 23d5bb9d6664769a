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

// gitConfig asks for one variable of the repository that it is started in.
func gitConfig(ctx context.Context, args []string) error {
	var set wire.GitSetting
	switch {
	case len(args) == 2 && args[0] == "--unset":
		set = wire.GitSetting{Key: args[1], Unset: true}
	case len(args) == 2 && !strings.HasPrefix(args[0], "-"):
		set = wire.GitSetting{Key: args[0], Value: args[1]}
	default:
		return usage("git-config: usage: git-config KEY VALUE, or git-config --unset KEY")
	}
	out, err := exec.CommandContext(ctx, "git", "rev-parse", "--path-format=absolute", "--git-common-dir").Output()
	if err != nil {
		return fmt.Errorf("git-config: no repository here: %w", err)
	}
	set.Dir = strings.TrimSuffix(string(out), "\n")
	conn, err := dialSupervisor(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := ask(conn, wire.GuestRequest{Op: wire.OpGitConfig, Setting: &set}); err != nil {
		return fmt.Errorf("git-config: %w", err)
	}
	return nil
}
