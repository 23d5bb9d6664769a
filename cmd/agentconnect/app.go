// What every command shares: streams, configuration, the daemon's client, and the tree
// of commands.

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/placement"
	"agentconnect.md/sandbox/cmd/internal/prober"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/version"
	"agentconnect.md/sandbox/sandbox/hostfacts"
	"agentconnect.md/sandbox/sandbox/probe"
)

// app is one run of the command line.
type app struct {
	in       io.Reader
	out, err io.Writer
	environ  []string
	uid      int

	root  string // --root
	json  bool   // --json
	began bool   // the words on the line were right, the command runs
	see   string // the command in question, for usage errors
}

const rootHelp = `agentconnect runs AI coding agents, each behind a boundary that the kernel enforces.

Exit codes: 0 done; 1 failed; 2 usage; 66 no such agent; 69 the sandbox is unavailable;
73 cannot write state; 75 try again (the daemon is not running); 78 bad configuration.
"agent exec" and "agent shell" pass the command's own code on.

With --json the answer is JSON on stdout, an object a line where it comes piece by piece.
An error is the last line of stderr, an object {"error", "code"}; a warning is a line
{"warning"} there.`

func (a *app) command() *cobra.Command {
	root := &cobra.Command{
		Use:               "agentconnect",
		Short:             "run AI coding agents behind a boundary",
		Long:              rootHelp,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: true},
		RunE:              a.group,
		Args:              cobra.ArbitraryArgs, // group says it better
		PersistentPreRun:  func(*cobra.Command, []string) { a.began = true },
	}
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.PersistentFlags().StringVar(&a.root, "root", "", "AgentConnect's directory (default $AGENTCONNECT_ROOT or ~/.agentconnect)")
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print JSON")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		a.see = c.CommandPath()
		return err
	})
	root.AddCommand(
		a.runCommand(), a.upCommand(), a.downCommand(), a.restartCommand(), a.statusCommand(),
		a.probeCommand(), a.agentCommand(), a.acpCommand(), a.promptCommand(), a.explainCommand(), a.secretCommand(), a.auditCommand(),
		a.egressCommand(), a.forward(), a.runtimesCommand(), a.loginCommand(), a.configCommand(), a.versionCommand(), a.manCommand(),
	)
	root.SetHelpCommand(a.helpCommand())
	a.complete(root)
	// cobra's own group takes a wrong word for a wish for help.
	root.InitDefaultCompletionCmd()
	if c, _, err := root.Find([]string{"completion"}); err == nil {
		c.RunE, c.Args = a.group, cobra.ArbitraryArgs
	}
	return root
}

// group is a command that only holds others.
func (a *app) group(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		text := fmt.Sprintf("unknown command %q for %s", args[0], c.CommandPath())
		if near := nearest(c, args[0]); near != "" {
			text += fmt.Sprintf(", did you mean %q?", near)
		}
		return &usageError{text: text, see: c.CommandPath()}
	}
	if !a.json {
		c.SetOut(a.err)
		if err := c.Usage(); err != nil {
			return err
		}
	}
	return &usageError{text: c.CommandPath() + ": give a command", see: c.CommandPath()}
}

// nearest is what may be meant by a word that is no command of c; "" for nothing near.
func nearest(c *cobra.Command, word string) string {
	// Before what is spelt alike: `logs` is not `login`, and `start` not `restart`.
	if of, _, err := c.Root().Find([]string{"agent", word}); err == nil && of.Name() == word && !c.HasParent() {
		return "agent " + word
	}
	c.SuggestionsMinimumDistance = 2
	if !c.HasParent() && len(word) < 4 {
		c.SuggestionsMinimumDistance = 1 // "ls" is not "up"
	}
	if near := c.SuggestionsFor(word); len(near) > 0 {
		return near[0]
	}
	return ""
}

// helpCommand is cobra's, but that it knows a wrong word.
func (a *app) helpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]…", Short: "help about a command",
		RunE: func(c *cobra.Command, args []string) error {
			of, rest, err := c.Root().Find(args)
			if err != nil || len(rest) > 0 && of.RunE == nil {
				of, rest = c.Root(), args
			}
			if len(rest) > 0 {
				return a.group(of, rest)
			}
			of.InitDefaultHelpFlag()
			return of.Help()
		},
	}
}

// args checks the number of arguments, at least least and at most most (most < 0: any).
func (a *app) args(least, most int) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		a.see = c.CommandPath()
		switch {
		case len(args) < least:
			return fmt.Errorf("%s: %d more argument(s) needed: %s", c.CommandPath(), least-len(args), c.UseLine())
		case most >= 0 && len(args) > most:
			text := fmt.Sprintf("%s: %q is one argument too many: %s", c.CommandPath(), args[most], c.UseLine())
			if near := nearest(c, args[most]); c.HasSubCommands() && near != "" {
				text += fmt.Sprintf("; did you mean %q?", c.CommandPath()+" "+near)
			}
			return errors.New(text)
		}
		return nil
	}
}

// idArgs is args for commands whose first argument is an agent's id.
func (a *app) idArgs(least, most int) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if err := a.args(least, most)(c, args); err != nil {
			return err
		}
		return agent.ValidateID(args[0])
	}
}

func (a *app) getenv(name string) string {
	for i := len(a.environ) - 1; i >= 0; i-- {
		if k, v, ok := strings.Cut(a.environ[i], "="); ok && k == name {
			return v
		}
	}
	return ""
}

// config loads the configuration; flags are those given that set a key.
func (a *app) config(flags ...config.Flag) (*config.Config, error) {
	return config.Load(config.Options{Root: a.root, Flags: flags})
}

// site is the configuration with what most commands do with it.
type site struct {
	a     *app
	cfg   *config.Config
	store *agent.Store
}

func (a *app) site() (*site, error) {
	cfg, err := a.config()
	if err != nil {
		return nil, err
	}
	return &site{a: a, cfg: cfg, store: agent.NewStore(cfg.Root)}, nil
}

// runDir is where the daemon and its agents have their sockets.
func (s *site) runDir() string {
	return filepath.Dir(daemon.ControlSocket(s.a.getenv("XDG_RUNTIME_DIR"), s.cfg.Root))
}

func (s *site) client() *control.Client {
	return control.NewClient(daemon.ControlSocket(s.a.getenv("XDG_RUNTIME_DIR"), s.cfg.Root))
}

// daemonClient is for what is said to a running daemon even where the configuration is broken by
// now: to end it, say. It gives ROOT as well.
func (a *app) daemonClient() (*control.Client, string, error) {
	root, err := a.plainRoot()
	if err != nil {
		return nil, "", err
	}
	return control.NewClient(daemon.ControlSocket(a.getenv("XDG_RUNTIME_DIR"), root)), root, nil
}

// elsewhere says where a daemon is that runs and is not found.
func (a *app) elsewhere(err error) error {
	if !errors.Is(err, control.ErrNotRunning) {
		return err
	}
	root, rerr := a.plainRoot()
	if rerr != nil {
		return err
	}
	pid := daemon.Holder(root)
	if pid == 0 {
		return err
	}
	return &daemon.Refusal{Code: 75, Text: fmt.Sprintf("the daemon (pid %d) does not answer here: it starts or ends just now, or listens in the runtime directory of another session: set XDG_RUNTIME_DIR as it has it", pid), Err: err}
}

// agent loads one agent, the machine's included, and those that a control plane placed here,
// which only a running daemon knows.
func (s *site) agent(id string) (*config.AgentEntry, error) {
	e, err := s.cfg.Agent(s.store, id)
	if errors.Is(err, agent.ErrNotFound) {
		if a := s.placed(id); a != nil {
			return &config.AgentEntry{ID: id, Agent: a, System: true, Path: "the control plane"}, nil
		}
	}
	if err == nil {
		err = e.Err
	}
	if err != nil {
		return nil, err
	}
	return &e, nil
}

// known says that there is no such agent. That its file cannot be read is no error here: it
// may run by the configuration that it was started with.
func (s *site) known(id string) error {
	if _, err := s.agent(id); errors.Is(err, agent.ErrNotFound) {
		return err
	}
	return nil
}

// placed asks the daemon for an agent of the control plane's; nil when there is none.
func (s *site) placed(id string) *agent.Agent {
	raw, err := s.client().Placed(context.Background(), id)
	if err != nil {
		return nil
	}
	a, err := agent.Parse(raw)
	if err != nil {
		return nil
	}
	return a
}

// isPlaced reports whether a control plane placed an agent here, by its mark: without a
// daemon, and before its configuration has come, too.
func (s *site) isPlaced(id string) bool {
	if agent.ValidateID(id) != nil {
		return false
	}
	// One that cannot be read is not one that is not there.
	_, err := (placement.DirMarks{Agents: filepath.Join(s.cfg.Root, "agents")}).Read(id)
	return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR)
}

// own refuses to change an agent that the machine's administrator, or a control plane,
// declared.
func (s *site) own(id string) error {
	e, err := s.cfg.Agent(s.store, id)
	if errors.Is(err, agent.ErrNotFound) && s.isPlaced(id) {
		return &daemon.Refusal{Code: 78, Text: fmt.Sprintf("agent %s was placed here by the control plane; change it, or remove it, there", id)}
	}
	if e.System {
		return &daemon.Refusal{Code: 78, Text: fmt.Sprintf("agent %s is declared for every user in %s; ask the administrator, or add an agent of your own under another id", id, e.Path)}
	}
	if errors.Is(err, agent.ErrNotFound) {
		return err
	}
	return nil // a broken one may be edited and removed
}

// builder judges agents as the daemon does. Missing programs of ours matter to starts
// only, so here they are left empty.
func (s *site) builder() *daemon.Builder {
	set, err := programs.Find()
	if err != nil {
		set = programs.Set{Bwrap: programs.Bwrap, Guest: filepath.Join(programs.Libexec, "agentconnect-guest")}
	}
	return &daemon.Builder{Config: s.cfg, Store: s.store, Programs: set, Host: hostfacts.Host{},
		Build: version.Version, Direct: true, Environ: s.a.environ,
		Secrets: s.secrets(), RunDir: s.runDir()}
}

// tell makes a running daemon read its configuration again. That nobody runs is no
// error; that the new configuration is bad is a warning, since it is written already.
func (s *site) tell(ctx context.Context) {
	if err := s.client().Reload(ctx); err != nil && !errors.Is(err, control.ErrNotRunning) {
		s.a.warn("the running daemon keeps its old configuration: %v", err)
	}
}

func (a *app) warn(format string, args ...any) {
	text := oneLine(fmt.Sprintf(format, args...))
	if a.json && a.saidJSON(map[string]string{"warning": text}) {
		return
	}
	fmt.Fprintf(a.err, "agentconnect: warning: %s\n", text)
}

// saidJSON writes v as a line on stderr.
func (a *app) saidJSON(v any) bool {
	raw, err := json.Marshal(v)
	if err == nil {
		fmt.Fprintf(a.err, "%s\n", raw)
	}
	return err == nil
}

// prober probes this host for root with the given programs.
func (a *app) prober(cfg *config.Config, set programs.Set) daemon.Prober {
	return func(ctx context.Context, runDir string) control.Probe {
		r, err := probeBy(ctx, set.Supervisor, prober.Prober{User: userName(a.uid), UserID: a.uid, GroupID: os.Getgid(),
			Home: cfg.Home, Root: cfg.Root, RuntimeDir: runDir, Launcher: set.Launcher, Guest: set.Guest})
		if err != nil {
			return *failedProbe(err)
		}
		out := control.Probe{OK: r.OK, Code: r.Code, At: r.At, Checks: []control.Check{}}
		for _, c := range r.Checks {
			out.Checks = append(out.Checks, control.Check(c))
		}
		return out
	}
}

// probeBy probes in the program that starts agents: what the host allows may hang on it.
func probeBy(ctx context.Context, supervisor string, p prober.Prober) (*probe.Result, error) {
	question, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, supervisor, "probe")
	cmd.Stdin = bytes.NewReader(question)
	// It takes its canaries away before it ends.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	answer, err := cmd.Output()
	var said *exec.ExitError
	if errors.As(err, &said) {
		err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(said.Stderr)))
	}
	if err != nil {
		return nil, fmt.Errorf("the probe did not run: %s: %w", supervisor, err)
	}
	var r probe.Result
	if err := json.Unmarshal(answer, &r); err != nil {
		return nil, fmt.Errorf("the probe's result: %w", err)
	}
	return &r, nil
}

func userName(uid int) string {
	if u, err := user.LookupId(strconv.Itoa(uid)); err == nil {
		return u.Username
	}
	return "user"
}
