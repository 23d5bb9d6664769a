// run, up, down, restart, status, probe: the daemon as a whole.

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/coredump"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/rest"
	"agentconnect.md/sandbox/cmd/internal/version"
	"agentconnect.md/sandbox/sandbox/hostfacts"
	"agentconnect.md/sandbox/units"
)

// directNote is what is lost without a service manager.
const directNote = "agents run as the daemon's own children: they end with it, and limits and accounting are not available"

func (a *app) runCommand() *cobra.Command {
	var require bool
	var supervisor string
	var connect func() []config.Flag
	c := &cobra.Command{
		Use:   "run",
		Short: "run the daemon in the foreground",
		Args:  a.args(0, 0),
		RunE: func(c *cobra.Command, _ []string) error {
			if a.uid == 0 {
				return daemon.RootError{}
			}
			var flags []config.Flag
			if c.Flags().Changed("require-sandbox") {
				flags = append(flags, config.Flag{Name: "require-sandbox", Key: "security.requireSandbox", Value: fmt.Sprint(require)})
			}
			if c.Flags().Changed("supervisor") {
				flags = append(flags, config.Flag{Name: "supervisor", Key: "supervisor", Value: supervisor})
			}
			return a.runDaemon(c.Context(), append(flags, connect()...))
		},
	}
	c.Flags().BoolVar(&require, "require-sandbox", false, "required mode: no agent without the sandbox, no daemon if it cannot start")
	connect = a.connectFlags(c)
	c.Flags().StringVar(&supervisor, "supervisor", "auto", "what keeps agents running: auto, systemd or direct")
	return c
}

func (a *app) runDaemon(ctx context.Context, flags []config.Flag) error {
	signal.Reset(syscall.SIGQUIT) // it has Go's runtime say what a daemon that hangs is doing
	// A crash must not write the agents' secrets to disk.
	if err := coredump.Off(); err != nil {
		return err
	}
	load := func() (*config.Config, error) {
		return a.config(flags...)
	}
	cfg, err := load()
	if err != nil {
		return err
	}
	set, err := programs.Find()
	if err != nil {
		return err
	}
	conn, note, err := a.managed(ctx, cfg)
	if err != nil {
		return err
	}
	o := daemon.Options{
		Config: cfg, Reload: load,
		Watch:    []string{config.SystemDir, filepath.Join(config.SystemDir, "agents.d")},
		Programs: set, Probe: a.prober(cfg, set), Host: hostfacts.Host{}, Build: version.Version,
		Environ: a.environ, UID: a.uid, SupervisorNote: note, Stderr: a.err, Notify: notify,
	}
	if conn != nil {
		defer conn.Close()
		o.Manage, o.Probe = manage(conn, set), unitProber(conn, cfg.Root)
	}
	reloads := make(chan os.Signal, 1)
	signal.Notify(reloads, syscall.SIGHUP)
	defer signal.Stop(reloads)
	o.Reloads = reloads
	o.Stir = (&rest.Keeper{Percent: 100}).Stir
	return daemon.Run(ctx, o)
}

// notify tells the service manager that started the daemon how it is; without one nobody.
func notify(state string) { _, _ = sd.SdNotify(false, state) }

// errNoManager is what up and restart say where no service manager runs the daemon.
var errNoManager = errors.New("no user manager here; run `agentconnect run` (for example in a terminal or under your init)")

// otherRootError says that the manager's daemon is not the one of root.
type otherRootError struct{ root string }

func (e *otherRootError) Error() string {
	return fmt.Sprintf("%s is the daemon of another directory than %s; run this one by hand: `agentconnect --root %s run --supervisor direct`", units.Daemon, e.root, e.root)
}

func (a *app) upCommand() *cobra.Command {
	var linger bool
	c := &cobra.Command{
		Use: "up", Short: "start the daemon as a service of yours, now and with each session", Args: a.args(0, 0),
		RunE: func(c *cobra.Command, _ []string) error {
			if a.uid == 0 {
				return daemon.RootError{} // before a unit is enabled that fails in each session
			}
			if linger {
				if err := a.linger(c.Context()); err != nil {
					return err
				}
			}
			s, err := a.site()
			if err != nil {
				return err
			}
			if st, serr := s.client().Status(c.Context()); serr == nil {
				err = a.say(map[string]any{"state": st.State, "pid": st.PID}, "the daemon runs already (pid %d)", st.PID)
			} else {
				err = a.up(c.Context())
			}
			if err != nil {
				return err
			}
			return s.requiredThere(c.Context())
		},
	}
	c.Flags().BoolVar(&linger, "linger", false, "start at boot, too, and go on after you log out")
	return c
}

// requiredThere returns an error if required mode is on here and not in the daemon: the environment
// of a shell does not reach a service.
func (s *site) requiredThere(ctx context.Context) error {
	st, err := s.client().Status(ctx)
	if err != nil || st.RequireSandbox || !s.cfg.RequireSandbox {
		return nil //nolint:nilerr // who looks for the daemon hears of it
	}
	return &daemon.Refusal{Code: config.ExitCode, Text: fmt.Sprintf("the daemon runs without required mode: AGENTCONNECT_REQUIRE_SANDBOX of this shell does not reach it; write \"security\": {\"requireSandbox\": true} into %s", filepath.Join(s.cfg.Root, "config.json"))}
}

func (a *app) downCommand() *cobra.Command {
	return &cobra.Command{
		Use: "down", Short: "stop the daemon and its agents", Args: a.args(0, 0),
		RunE: func(c *cobra.Command, _ []string) error {
			client, root, err := a.daemonClient()
			if err != nil {
				return err
			}
			byUnit, err := a.downUnit(c.Context(), root)
			if err == nil && !byUnit {
				err = client.Shutdown(c.Context())
			}
			if err != nil {
				return err
			}
			if err := daemon.WaitEnded(c.Context(), root); err != nil {
				return err
			}
			return a.say(map[string]any{"state": control.StateStopped}, "the daemon and its agents have stopped")
		},
	}
}

func (a *app) restartCommand() *cobra.Command {
	return &cobra.Command{
		Use: "restart", Short: "restart the daemon", Args: a.args(0, 0),
		RunE: func(c *cobra.Command, _ []string) error {
			err := a.restartUnit(c.Context())
			if s, serr := a.site(); err == nil && serr == nil {
				return s.requiredThere(c.Context())
			}
			if !errors.Is(err, errNoManager) && !errors.As(err, new(*otherRootError)) {
				return err
			}
			client, _, serr := a.daemonClient()
			if serr != nil {
				return err
			}
			if st, serr := client.Status(c.Context()); serr == nil {
				return fmt.Errorf("the daemon (pid %d) is no unit of a user manager; end it with `agentconnect down` and start it again as it was started (`agentconnect run`)", st.PID)
			}
			return err
		},
	}
}

// say prints a line for people, or v as JSON.
func (a *app) say(v any, format string, args ...any) error {
	if a.json {
		return a.printJSON(v)
	}
	_, err := fmt.Fprintln(a.out, oneLine(fmt.Sprintf(format, args...)))
	return err
}

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "show the daemon, the probe and the agents; works also when the daemon is down", Args: a.args(0, 0),
		RunE: func(c *cobra.Command, _ []string) error {
			st, err := a.status(c.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(st)
			}
			return a.printStatus(st)
		},
	}
}

// status is the live picture, or what the last daemon left behind. A configuration that
// cannot be read is part of the picture, not the end of it.
func (a *app) status(ctx context.Context) (*control.Status, error) {
	cfg, cfgErr := a.config()
	var root string
	if cfgErr == nil {
		root = cfg.Root
	} else {
		var err error
		if root, err = a.plainRoot(); err != nil {
			return nil, cfgErr
		}
	}
	live, err := control.NewClient(daemon.ControlSocket(a.getenv("XDG_RUNTIME_DIR"), root)).Status(ctx)
	if err == nil {
		return live, nil
	}
	st, rerr := daemon.Record(root)
	if rerr != nil {
		return nil, cmp.Or(cfgErr, rerr)
	}
	st.Version, st.Supervisor, st.SupervisorNote = version.Version, "", ""
	if !errors.Is(err, control.ErrNotRunning) {
		st.Warnings = append(st.Warnings, err.Error())
	} else if pid := daemon.Holder(root); pid != 0 {
		st.Warnings = append(st.Warnings, fmt.Sprintf("a daemon (pid %d) holds %s but does not answer: it starts or ends just now, or listens in the runtime directory of another session", pid, root))
	}
	if cfgErr != nil {
		st.ConfigError = cfgErr.Error()
		return st, nil //nolint:nilerr // the picture holds the error
	}
	st.RequireSandbox = cfg.RequireSandbox
	st.Agents = a.offlineAgents(cfg, st.Agents)
	return st, nil
}

// offlineAgents lists the configured agents with what the record says of each.
func (a *app) offlineAgents(cfg *config.Config, recorded []control.AgentStatus) []control.AgentStatus {
	s := &site{a: a, cfg: cfg, store: agent.NewStore(cfg.Root)}
	was := map[string]control.AgentStatus{}
	for _, r := range recorded {
		was[r.ID] = r
	}
	list := []control.AgentStatus{}
	entries, _, err := cfg.Agents(s.store)
	if err != nil {
		return recorded
	}
	b := s.builder()
	for _, e := range entries {
		st := control.AgentStatus{ID: e.ID, State: control.StateStopped}
		if e.Agent != nil {
			st = describe(b, e.Agent)
			st.State = control.StateStopped
		} else {
			st.State, st.Reason = control.StateRefused, e.Err.Error()
		}
		if r, ok := was[e.ID]; ok && e.Agent != nil {
			st.State, st.Reason, st.Since = r.State, r.Reason, r.Since
		}
		list = append(list, st)
	}
	return list
}

// describe is an agent as configured.
func describe(b *daemon.Builder, ag *agent.Agent) control.AgentStatus {
	runtime := ag.Runtime
	if runtime == "" {
		runtime = ag.Command
	}
	return control.AgentStatus{ID: ag.ID, Runtime: runtime, State: control.StateStopped, Sandboxed: ag.Sandboxed(),
		Workspace: b.Store.WorkspacePath(ag), Network: string(b.Network(ag)), GitSeals: b.GitSeals(ag), Git: daemon.Git(b.Store, ag)}
}

// plainRoot is ROOT for who cannot read the configuration.
func (a *app) plainRoot() (string, error) { return config.Root(config.Options{Root: a.root}) }

func (a *app) printStatus(st *control.Status) error {
	t := newTable(a.out)
	line := a.stateLine(st)
	t.row("daemon", line)
	t.row("root", st.Root)
	if st.Supervisor != "" {
		t.row("supervision", st.Supervisor+": "+st.SupervisorNote)
	}
	t.row("sandbox required", map[bool]string{true: "yes", false: "no"}[st.RequireSandbox])
	t.row("probe", probeLine(st.Probe))
	if st.ControlPlane != nil {
		t.row("control plane", connectionLine(st.ControlPlane))
	}
	if st.Usage != nil {
		t.row("all agents", usageLine(st.Usage))
	}
	if st.ConfigError != "" {
		t.row("configuration", "ERROR: "+st.ConfigError)
	}
	for _, w := range st.Warnings {
		t.row("warning", w)
	}
	if err := t.end(); err != nil {
		return err
	}
	fmt.Fprintln(a.out)
	if err := a.printAgents(st.Agents); err != nil {
		return err
	}
	if len(st.Log) > 0 {
		fmt.Fprintln(a.out, "\nlog:")
		for _, l := range st.Log {
			fmt.Fprintln(a.out, "  "+oneLine(l))
		}
	}
	return nil
}

func (a *app) stateLine(st *control.Status) string {
	switch st.State {
	case control.StateRunning:
		return fmt.Sprintf("running (pid %d, version %s, since %s)", st.PID, st.Version, when(st.Since))
	case control.StateRefused:
		return "refused to start: " + st.Reason
	}
	return "not running: " + st.Reason + "; " + control.HowToStart
}

func probeLine(p *control.Probe) string {
	if p == nil {
		return "not run yet; run `agentconnect probe`"
	}
	line := fmt.Sprintf("%s (%s)", p.Code, when(p.At))
	for _, c := range p.Checks {
		if c.Code == p.Code && c.Result == "failed" {
			line += ": " + c.Detail + "; " + c.Remedy
		}
	}
	return line
}

// printAgents is the table of agents, with what needs attention below each.
func (a *app) printAgents(agents []control.AgentStatus) error {
	if len(agents) == 0 {
		_, err := fmt.Fprintln(a.out, "no agents; add one with `agentconnect agent add ID --runtime NAME`")
		return err
	}
	t := newTable(a.out, "AGENT", "STATE", "RUNTIME", "SANDBOX", "GIT SEALS", "NETWORK", "CLIENTS", "WORKSPACE")
	for _, g := range agents {
		t.row(g.ID, g.State, g.Runtime, onOff(g.Sandboxed), orDefault(g.GitSeals, "none"), g.Network, fmt.Sprint(g.Clients), g.Workspace)
	}
	if err := t.end(); err != nil {
		return err
	}
	for _, g := range agents {
		var says []string
		if g.Line != "" {
			says = append(says, g.Line)
		}
		if g.Reason != "" {
			says = append(says, g.Reason)
		}
		if g.Git != nil {
			says = append(says, "git: "+gitLine(g.Git))
		}
		if g.Usage != nil {
			says = append(says, usageLine(g.Usage))
		}
		if g.Restarts > 0 {
			says = append(says, fmt.Sprintf("restarted %d times", g.Restarts))
		}
		if len(g.DropIns) > 0 {
			says = append(says, dropInsLine(g.DropIns))
		}
		if g.Build != "" {
			says = append(says, fmt.Sprintf("still runs the older build %s; run `agentconnect agent restart %s`", g.Build, g.ID))
		}
		says = append(says, asksLines(&g)...)
		for _, s := range slices.Concat(says, g.Unmet, g.Notes) {
			fmt.Fprintf(a.out, "  %s: %s: %s\n", g.ID, a.tint(g.State), oneLine(s))
		}
	}
	return nil
}

func (a *app) probeCommand() *cobra.Command {
	var unit bool
	c := &cobra.Command{
		Use: "probe", Short: "check whether the sandbox starts on this host", Args: a.args(0, 0),
		RunE: func(c *cobra.Command, _ []string) error {
			probe := a.probe
			if unit {
				probe = a.probeHere
			}
			p, err := probe(c.Context())
			if err != nil {
				return err
			}
			if a.json {
				err = a.printJSON(p)
			} else {
				err = a.printProbe(p)
			}
			if err == nil && !p.OK {
				err = exitStatus(69)
			}
			return err
		},
	}
	c.Flags().BoolVar(&unit, "unit", false, "probe here and leave the result for the daemon; for agentconnect-probe.service")
	_ = c.Flags().MarkHidden("unit") // it is there
	return c
}

// probe runs in the daemon, which then acts on the result, or here if none runs.
func (a *app) probe(ctx context.Context) (*control.Probe, error) {
	s, err := a.site()
	if err != nil {
		return nil, err
	}
	p, err := s.client().Probe(ctx)
	if !errors.Is(err, control.ErrNotRunning) {
		return p, err
	}
	return s.probeHere(ctx)
}

// probeHere probes in this process and leaves the result in ROOT. That it could not be
// done is a result, too: an older good one must not be believed any longer.
func (a *app) probeHere(ctx context.Context) (*control.Probe, error) {
	s, err := a.site()
	if err != nil {
		if root, rerr := a.plainRoot(); rerr == nil {
			err = errors.Join(err, daemon.WriteProbe(root, failedProbe(err)))
		}
		return nil, err
	}
	p, err := s.probeHere(ctx)
	if err != nil {
		return nil, errors.Join(err, daemon.WriteProbe(s.cfg.Root, failedProbe(err)))
	}
	return p, daemon.WriteProbe(s.cfg.Root, p)
}

// failedProbe is the result of a probe that could not be done.
func failedProbe(err error) *control.Probe {
	return &control.Probe{Code: "boundary-leak", At: time.Now(), Checks: []control.Check{{
		Code: "boundary-leak", Title: "the probe runs", Result: "failed", Detail: err.Error(),
		Remedy: "see: `systemctl --user status agentconnect-probe.service`",
	}}}
}

func (s *site) probeHere(ctx context.Context) (*control.Probe, error) {
	set, err := programs.Find()
	if err != nil {
		return nil, err
	}
	dir, done, err := daemon.ProbeDir(s.a.getenv("XDG_RUNTIME_DIR"), s.cfg.Root)
	if err != nil {
		return nil, err
	}
	defer done()
	r := s.a.prober(s.cfg, set)(ctx, dir)
	return &r, nil
}

func (a *app) printProbe(p *control.Probe) error {
	for _, c := range p.Checks {
		pad := strings.Repeat(" ", max(0, len("skipped")-len(c.Result)))
		fmt.Fprintf(a.out, "%s%s  %-16s %s", a.tint(c.Result), pad, c.Code, oneLine(c.Title))
		if c.Detail != "" {
			fmt.Fprintf(a.out, ": %s", oneLine(c.Detail))
		}
		fmt.Fprintln(a.out)
		if c.Result != "ok" && c.Remedy != "" {
			fmt.Fprintf(a.out, "         remedy: %s\n", oneLine(c.Remedy))
		}
	}
	_, err := fmt.Fprintf(a.out, "\nresult: %s (%s)\n", p.Code, p.At.Local().Format(time.DateTime))
	return err
}
