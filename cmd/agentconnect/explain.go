// explain, runtimes, config, version: what is known without anything running.

package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"

	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/cmd/internal/version"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/gitseal"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

// explained is the answer of `explain --json`: the plan, or verdicts on paths.
type explained struct {
	Agent     string           `json:"agent"`
	Sandboxed bool             `json:"sandboxed"`
	Read      sandbox.ReadMode `json:"read"`
	// Git says how the workspace was made from a repository, if it was.
	Git  *control.AgentGit `json:"git,omitempty"`
	Plan *sandbox.Plan     `json:"plan,omitempty"`
	// Rules of the network, in modes allowlist and open.
	Rules *agent.Network    `json:"rules,omitempty"`
	Paths []sandbox.Verdict `json:"paths,omitempty"`
	Notes []string          `json:"notes,omitempty"`
	// DropIns are files by which somebody changes the agent's units, its limits perhaps.
	DropIns []string `json:"dropIns,omitempty"`
}

func (a *app) explainCommand() *cobra.Command {
	return &cobra.Command{
		Use: "explain ID [PATH…]", Short: "what the agent may touch, or what happens to a path and why", Args: a.idArgs(1, -1),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := a.site()
			if err != nil {
				return err
			}
			e, err := s.agent(args[0])
			if err != nil {
				return err
			}
			x, err := s.explain(e.Agent, args[1:])
			if err != nil {
				return err
			}
			x.DropIns = a.dropIns(c.Context(), e.ID)
			if a.json {
				return a.printJSON(x)
			}
			return a.printExplained(x)
		},
	}
}

// explain compiles the same plan that the launcher carries out.
func (s *site) explain(ag *agent.Agent, paths []string) (*explained, error) {
	x := &explained{Agent: ag.ID, Sandboxed: ag.Sandboxed(), Read: orDefault(ag.Read, sandbox.ReadSystem), Git: daemon.Git(s.store, ag)}
	b := s.builder()
	if err := b.Judge(ag); err != nil {
		return nil, err
	}
	if !ag.Sandboxed() {
		x.Notes = append(x.Notes, "the sandbox is off: the agent can do whatever you can")
		return x, nil
	}
	if err := s.store.Ensure(ag.ID); err != nil {
		return nil, err
	}
	p, err := b.Policy(ag)
	if errors.Is(err, runtimes.ErrNotInstalled) {
		x.Notes = append(x.Notes, "without the files of a program that is not installed: "+err.Error())
		p, err = b.PolicyUninstalled(ag)
	}
	if err != nil {
		return nil, err
	}
	plan, _, err := gitseal.Compile(p, hostfacts.Host{}, false)
	if err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		for i := range plan.Mounts {
			if plan.Mounts[i].Sealed {
				plan.Mounts[i].Content = "" // a configuration's copy, with whatever it holds
			}
		}
		x.Plan = plan
		if p.Network.Gated() {
			x.Rules = &ag.Network
		}
		return x, nil
	}
	for _, path := range paths {
		abs, err := filepath.Abs(path)
		if err != nil {
			return nil, err
		}
		x.Paths = append(x.Paths, plan.Explain(abs))
	}
	return x, nil
}

func (a *app) printExplained(x *explained) error {
	t := newTable(a.out)
	switch {
	case x.Plan != nil:
		t.row("agent", x.Agent)
		t.row("read", string(x.Read))
		t.row("network", string(x.Plan.Network))
		if x.Rules != nil {
			networkRows(t, *x.Rules)
		}
		t.row("nesting", onOff(x.Plan.Nesting))
		gitRows(t, x.Git, sandbox.GitSeals(x.Plan.Nesting))
		if err := t.end(); err != nil {
			return err
		}
		fmt.Fprintln(a.out)
		t = newTable(a.out, "PATH", "HOW", "ACCESS", "FROM", "WHY")
		for _, m := range x.Plan.Mounts {
			from := m.Source
			if from == m.Target {
				from = "same"
			}
			t.row(m.Target, string(m.Op), orDefault(string(m.Access), "-"), orDefault(from, "-"), m.Why)
		}
		x.Notes = append(x.Notes, x.Plan.Notes...)
	case len(x.Paths) > 0:
		t = newTable(a.out, "PATH", "ACCESS", "FROM", "WHY")
		for _, v := range x.Paths {
			t.row(v.Path, string(v.Access), orDefault(v.Source, "-"), v.Why)
		}
	}
	if err := t.end(); err != nil {
		return err
	}
	if len(x.DropIns) > 0 {
		x.Notes = append(x.Notes, dropInsLine(x.DropIns))
	}
	for _, n := range x.Notes {
		fmt.Fprintln(a.out, "note: "+oneLine(n))
	}
	return nil
}

func (a *app) configCommand() *cobra.Command {
	return &cobra.Command{
		Use: "config", Short: "every effective value and where it came from", Args: a.args(0, 0),
		RunE: func(*cobra.Command, []string) error {
			cfg, err := a.config()
			if err != nil {
				return err
			}
			for _, w := range cfg.Warnings {
				a.warn("%s", w)
			}
			if a.json {
				values := cfg.Values()
				if values == nil {
					values = []config.Value{}
				}
				return a.printJSON(values)
			}
			t := newTable(a.out, "KEY", "VALUE", "SOURCE")
			for _, v := range cfg.Values() {
				t.row(v.Key, orDefault(v.Value, "-"), v.Source)
			}
			return t.end()
		},
	}
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "print the version", Args: a.args(0, 0),
		RunE: func(*cobra.Command, []string) error {
			v := map[string]string{"version": version.Version, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH}
			return a.say(v, "agentconnect %s (%s, %s/%s)", version.Version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		},
	}
}
