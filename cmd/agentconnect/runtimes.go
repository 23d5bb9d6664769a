// runtimes: which ACP runtimes there are, and getting those that npm brings.

package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/install"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
)

func (a *app) runtimesCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "runtimes", Short: "the ACP runtimes: list them, install those that npm brings", Args: a.args(0, 0),
		RunE: func(*cobra.Command, []string) error { return a.listRuntimes() },
	}
	c.AddCommand(
		&cobra.Command{
			Use: "list", Short: "list the ACP runtimes and which are installed", Args: a.args(0, 0),
			RunE: func(*cobra.Command, []string) error { return a.listRuntimes() },
		},
		&cobra.Command{
			Use: "install NAME[@VERSION]", Short: "install a runtime by npm, behind a boundary that reaches the registry alone", Args: a.args(1, 1),
			Long: "Installs the version of the runtime that this release was tried with (or VERSION) below ROOT/runtimes, where agents see it read-only.\n" +
				"npm and the packages' scripts run behind a boundary that reaches npm's registry, as `npm config get registry` names it, and nothing else.\n" +
				"A registry that wants a login is not supported.",
			RunE: func(c *cobra.Command, args []string) error { return a.installRuntime(c, args[0], false) },
		},
		&cobra.Command{
			Use: "upgrade NAME[@VERSION]", Short: "bring an installed runtime to the version of this release", Args: a.args(1, 1),
			Long: "Agents that run keep the version they started with; the next start takes the new one.",
			RunE: func(c *cobra.Command, args []string) error { return a.installRuntime(c, args[0], true) },
		},
		&cobra.Command{
			Use: "remove NAME", Short: "take an installed runtime away", Args: a.args(1, 1),
			RunE: func(c *cobra.Command, args []string) error {
				i, rt, _, err := a.installer(args[0])
				if err != nil {
					return err
				}
				if err := i.Remove(rt); err != nil {
					return err
				}
				a.tellDaemon(c.Context())
				return a.say(map[string]string{"runtime": rt.ID}, "runtime %s removed; agents that run it lose it", rt.ID)
			},
		},
	)
	return c
}

// installer makes the one who installs, and reads NAME[@VERSION].
func (a *app) installer(word string) (*install.Installer, runtimes.Runtime, string, error) {
	s, err := a.site()
	if err != nil {
		return nil, runtimes.Runtime{}, "", err
	}
	name, version, _ := strings.Cut(word, "@")
	rt, err := runtimes.NewRegistry(s.cfg.Runtimes).Get(name)
	if err != nil {
		return nil, rt, "", err
	}
	set, err := programs.Find()
	if err != nil {
		return nil, rt, "", err
	}
	i := &install.Installer{
		User: userName(a.uid), Home: s.cfg.Home, Root: s.cfg.Root, Path: a.getenv("PATH"), Programs: set,
		Environ: a.environ, Proxy: s.builder().Proxy(),
	}
	return i, rt, version, nil
}

func (a *app) installRuntime(c *cobra.Command, word string, upgrade bool) error {
	i, rt, version, err := a.installer(word)
	if err != nil {
		return err
	}
	before := i.Installed(rt)
	answer := map[string]string{"runtime": rt.ID, "version": before}
	switch want := orDefault(version, rt.Version); {
	case upgrade && before == "":
		return fmt.Errorf("%s was not installed by us: `agentconnect runtimes install %s`", rt.ID, rt.ID)
	case before != "" && before == want:
		return a.say(answer, "runtime %s %s is installed already", rt.ID, before)
	}
	var say io.Writer
	if !a.json {
		say = a.err
	}
	q := install.Request{Installer: *i, Runtime: rt, Version: version}
	if answer["version"], err = install.By(c.Context(), i.Programs.Supervisor, q, say); err != nil {
		return err
	}
	a.tellDaemon(c.Context())
	next := "start one with `agentconnect agent add ID --runtime " + rt.ID + "`"
	if before != "" {
		next = "agents that run keep " + before + " until they are restarted"
	}
	return a.say(answer, "runtime %s %s installed; %s", rt.ID, answer["version"], next)
}

// tellDaemon has a running daemon look at what there is now.
func (a *app) tellDaemon(ctx context.Context) {
	if s, err := a.site(); err == nil {
		s.tell(ctx)
	}
}

func (a *app) listRuntimes() error {
	s, err := a.site()
	if err != nil {
		return err
	}
	list := runtimes.NewRegistry(s.cfg.Runtimes).List(runtimes.Options{Home: s.cfg.Home, Root: s.cfg.Root, Path: a.getenv("PATH")})
	if a.json {
		return a.printJSON(list)
	}
	t := newTable(a.out, "RUNTIME", "INSTALLED", "STARTS AS", "WHERE, OR HOW TO GET IT")
	for _, r := range list {
		installed, where := "yes", r.Path
		switch {
		case r.Internal:
			where = "part of agentconnect"
		case !r.Installed:
			installed, where = "no", orDefault(r.Reason, r.Install)
		}
		t.row(r.ID, installed, r.Command, where)
	}
	return t.end()
}
