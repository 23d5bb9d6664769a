// agent add, edit, list, show, start, stop, restart, rm: agents and their configuration.

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/gitclone"
	"agentconnect.md/sandbox/cmd/internal/mcp"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/gitseal"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

func (a *app) agentCommand() *cobra.Command {
	c := &cobra.Command{Use: "agent", Short: "add, change, start and use agents", RunE: a.group, Args: cobra.ArbitraryArgs}
	c.AddCommand(
		a.agentAdd(), a.agentEdit(), a.agentList(), a.agentShow(), a.agentWish("start", "start an agent"),
		a.agentWish("stop", "stop an agent; it stays stopped until somebody starts it"),
		a.agentWish("restart", "restart an agent with its configuration as it is now"),
		a.agentLogs(), a.agentRemove(), a.agentExec(), a.agentShell(),
	)
	return c
}

// settings are the flags of add and edit.
type settings struct {
	c                  *cobra.Command
	runtime, command   string
	args               []string
	workspace          string
	clone, worktree    string
	sandbox, noSandbox bool
	grants             []string
	read, nesting      string
	permissionMode     string
	credentials        string
	network            string
	allow, deny        []string
	ask                string
	memory, cpu        string
	tasks              int
	env                []string
	memoryKind         string
	gitCreds, tools    []string
	gitConfig          []string
	removeWords        bool // of edit: a grant or a variable can be taken away
}

func (a *app) settings(c *cobra.Command, edit bool) *settings {
	s := &settings{c: c, removeWords: edit}
	f := c.Flags()
	f.StringVar(&s.runtime, "runtime", "", "runtime by its `NAME`; \"agentconnect runtimes\" lists them")
	f.StringVar(&s.command, "command", "", "an ACP program that is not among the runtimes")
	f.StringArrayVar(&s.args, "arg", nil, "argument of the program (repeat)")
	f.StringVar(&s.workspace, "workspace", "", "project folder; a relative one lies in the agent's own directory")
	if !edit {
		f.StringVar(&s.clone, "git", "", "`URL|DIR`: a clone of the agent's own; its commits come out through a bare repository")
		f.StringVar(&s.worktree, "git-worktree", "", "`DIR`: a worktree of your repository, for the agent")
	}
	f.BoolVar(&s.sandbox, "sandbox", true, "run behind the boundary (the default)")
	f.BoolVar(&s.noSandbox, "no-sandbox", false, "run without the boundary: the agent can do whatever you can")
	grant, env := "PATH:ro or PATH:rw: open a further path to the agent (repeat)", "K=V in the agent's environment (repeat)"
	if edit {
		grant += "; PATH:none takes it away"
		env += "; K alone takes it away"
	}
	f.StringArrayVar(&s.grants, "grant", nil, grant)
	f.StringVar(&s.read, "read", "", "what of the host is readable: system or host")
	f.StringVar(&s.nesting, "nesting", "", "on or off: user namespaces inside, for runtimes with a sandbox of their own")
	f.StringVar(&s.credentials, "credentials", "", "whose login the runtime has: host (a copy of yours), private (its own) or secret")
	f.StringVar(&s.permissionMode, "permission-mode", "", "the runtime's own `MODE` that each session starts in (\"\": its choice)")
	f.StringVar(&s.network, "network", "", "none, allowlist, open (default: everything public) or host")
	f.StringArrayVar(&s.allow, "allow", nil, "HOST[:PORT], *.HOST, CIDR[:PORT], host:PORT or the name of a set ("+strings.Join(rules.Sets(), " ")+") that the agent reaches, in network modes allowlist and open (repeat)")
	f.StringArrayVar(&s.deny, "deny", nil, "the same, that it does not reach whatever is allowed (repeat)")
	f.StringVar(&s.ask, "ask", "", "how long what no rule names waits for `agentconnect egress allow`, such as 30s; 0: it does not wait")
	f.StringVar(&s.memory, "memory", "", "memory limit, such as 2G")
	f.StringVar(&s.cpu, "cpu", "", "CPU limit in percent of one CPU, such as 200%")
	f.IntVar(&s.tasks, "tasks", 0, "limit of processes and threads")
	f.StringArrayVar(&s.env, "env", nil, env)
	f.StringVar(&s.memoryKind, "agent-memory", "", "managed (a directory of the agent's own, the default), native (the runtime's way) or none")
	credential, server := "URL=SECRET: credentials for https://HOST/OWNER/REPOSITORY or …/* (repeat)", "`NAME` of an MCP server in config.json that the agent has (repeat)"
	if edit {
		credential += "; URL alone takes them away"
		server += "; -NAME takes it away"
	}
	f.StringArrayVar(&s.gitCreds, "git-credential", nil, credential)
	f.StringArrayVar(&s.gitConfig, "git-config", nil, "`GROUP` of harmless git variables that the agent may have changed in a sealed configuration: "+strings.Join(gitseal.SettingGroups, " ")+" (repeat; \"\": none)")
	f.StringArrayVar(&s.tools, "mcp", nil, server)
	return s
}

// apply puts the given flags, and those only, into ag.
func (s *settings) apply(a *app, home string, ag *agent.Agent) (err error) {
	given := func(name string) bool { return s.c.Flags().Changed(name) }
	usage := func(format string, args ...any) error {
		return &usageError{text: fmt.Sprintf(format, args...), see: s.c.CommandPath()}
	}
	if slices.Contains([]bool{given("workspace") && given("git"), given("workspace") && given("git-worktree"), given("git") && given("git-worktree")}, true) {
		return usage("--workspace, --git and --git-worktree exclude each other: give one")
	}
	if given("sandbox") && given("no-sandbox") && s.sandbox == s.noSandbox {
		return usage("--sandbox and --no-sandbox contradict each other: give one")
	}
	if given("runtime") && given("command") {
		return usage("--runtime and --command exclude each other: give one")
	}
	mode := ag.Network.Mode
	if given("network") {
		mode = sandbox.NetworkMode(s.network)
	}
	// Not by the default: who writes --allow alone may mean that and nothing else.
	// To take all rules away goes with any mode.
	if (len(named(slices.Concat(s.allow, s.deny))) > 0 || s.ask != "" && s.ask != "0") && !mode.Gated() {
		return usage("--allow, --deny and --ask go with --network allowlist (that and nothing else) or open (that and everything public)")
	}
	if given("runtime") {
		ag.Runtime, ag.Command = s.runtime, ""
		if !given("arg") {
			ag.Args = nil
		}
	}
	if given("command") {
		program := expand(home, s.command)
		if strings.Contains(program, "/") {
			abs, err := filepath.Abs(program)
			if err != nil {
				return err
			}
			program = abs
		}
		ag.Command, ag.Runtime = program, ""
		if !given("arg") {
			ag.Args = nil
		}
	}
	if given("arg") {
		ag.Args = s.args
	}
	if given("workspace") {
		ag.Workspace = expand(home, s.workspace)
		if filepath.IsAbs(ag.Workspace) {
			if err := daemon.Answers(ag.Workspace); err != nil {
				return err
			}
			ag.Workspace = behindLinks(filepath.Clean(ag.Workspace))
		}
		if filepath.IsAbs(ag.Workspace) {
			ag.Workspace = filepath.Clean(ag.Workspace)
		}
	}
	if given("git") {
		if ag.Git.Clone = s.clone; !gitclone.IsURL(s.clone) {
			if ag.Git.Clone, err = folder(home, s.clone); err != nil {
				return usage("--git %v", err)
			}
		}
	}
	if given("git-worktree") {
		if ag.Git.Worktree, err = folder(home, s.worktree); err != nil {
			return usage("--git-worktree %v", err)
		}
	}
	if given("sandbox") {
		ag.RunInSandbox = &s.sandbox
	}
	if given("no-sandbox") {
		on := !s.noSandbox
		ag.RunInSandbox = &on
	}
	for _, g := range s.grants {
		err := s.grant(home, g, ag)
		if errors.As(err, new(*daemon.Refusal)) {
			return err
		}
		if err != nil {
			return usage("%v", err)
		}
	}
	for _, e := range s.env {
		k, v, ok := strings.Cut(e, "=")
		switch {
		case ok:
			if ag.Env == nil {
				ag.Env = map[string]string{}
			}
			ag.Env[k] = v
		case s.removeWords:
			if _, ok := ag.Env[k]; !ok {
				return usage("--env %s: the agent has no such variable (to set one write K=V)", e)
			}
			delete(ag.Env, k)
		default:
			return usage("--env %s: write K=V", k)
		}
	}
	if given("agent-memory") {
		ag.Memory = s.memoryKind
	}
	for _, word := range s.gitCreds {
		if err := s.credential(word, ag); err != nil {
			return usage("%v", err)
		}
	}
	if given("git-config") {
		ag.Allow = nil
		for _, group := range named(s.gitConfig) {
			ag.Allow = append(ag.Allow, agent.AllowGitConfig(group))
		}
	}
	if given("mcp") {
		if err := s.servers(ag); err != nil {
			return usage("%v", err)
		}
	}
	if given("read") {
		ag.Read = sandbox.ReadMode(s.read)
	}
	if given("nesting") {
		ag.Nesting = s.nesting
	}
	if given("credentials") {
		ag.Credentials = s.credentials
	}
	if given("permission-mode") {
		ag.PermissionMode = s.permissionMode
	}
	if given("network") {
		ag.Network.Mode = sandbox.NetworkMode(s.network)
	}
	if given("allow") {
		ag.Network.Allow = named(s.allow)
	}
	if given("deny") {
		ag.Network.Deny = named(s.deny)
	}
	if given("ask") {
		if ag.Network.Ask = s.ask; s.ask == "0" {
			ag.Network.Ask = ""
		}
	}
	if given("memory") {
		ag.Limits.Memory = s.memory
	}
	if given("cpu") {
		ag.Limits.CPU = s.cpu
	}
	if given("tasks") {
		ag.Limits.Tasks = s.tasks
	}
	return nil
}

// folder is the folder that path leads to now.
func folder(home, path string) (string, error) {
	abs, err := filepath.Abs(expand(home, path))
	if err != nil {
		return "", err
	}
	real, kind, err := (hostfacts.Host{}).Resolve(abs)
	if err != nil || kind != sandbox.KindDir {
		return "", fmt.Errorf("%s: no such folder", path)
	}
	return real, nil
}

// named drops the empty word, which takes all rules away.
func named(words []string) []string {
	return slices.DeleteFunc(words, func(w string) bool { return w == "" })
}

// grant reads PATH:ACCESS; the path may hold colons itself.
func (s *settings) grant(home, word string, ag *agent.Agent) error {
	i := strings.LastIndexByte(word, ':')
	if i <= 0 {
		return fmt.Errorf("--grant %s: write PATH:ro or PATH:rw", word)
	}
	path, access := expand(home, word[:i]), sandbox.Access(word[i+1:])
	abs, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	if err := daemon.Answers(abs); err != nil {
		return err
	}
	named := abs
	abs = behindLinks(abs)
	had := ag.Grants
	ag.Grants = slices.DeleteFunc(slices.Clone(had), func(g sandbox.Grant) bool { return g.Path == abs || g.Path == named })
	switch {
	case access == sandbox.ReadOnly || access == sandbox.ReadWrite:
		ag.Grants = append(ag.Grants, sandbox.Grant{Path: abs, Access: access})
	case s.removeWords && access == "none":
		if len(ag.Grants) == len(had) {
			return fmt.Errorf("--grant %s: %s is not granted; `agentconnect agent show %s` names the grants", word, named, ag.ID)
		}
	default:
		return fmt.Errorf("--grant %s: the access %q is unknown; write PATH:ro or PATH:rw", word, access)
	}
	return nil
}

// credential reads URL=SECRET.
func (s *settings) credential(word string, ag *agent.Agent) error {
	address, name, ok := strings.Cut(word, "=")
	if !ok && !s.removeWords {
		return fmt.Errorf("--git-credential %s: write URL=SECRET, with a secret of the agent (`agentconnect secret set`)", word)
	}
	had := ag.GitCredentials
	ag.GitCredentials = slices.DeleteFunc(slices.Clone(had), func(c agent.GitCredential) bool { return c.URL == address })
	switch {
	case ok:
		ag.GitCredentials = append(ag.GitCredentials, agent.GitCredential{URL: address, Secret: name})
	case len(ag.GitCredentials) == len(had):
		return fmt.Errorf("--git-credential %s: there are none for that address; `agentconnect agent show %s` names them (to add some write URL=SECRET)", word, ag.ID)
	}
	return nil
}

// servers puts names into the agent's list of MCP servers, or takes them out.
func (s *settings) servers(ag *agent.Agent) error {
	refs, err := mcp.Refs(ag.MCPServers)
	if err != nil {
		return fmt.Errorf("mcpServers of agent.json: %w", err)
	}
	for _, word := range s.tools {
		name, away := strings.CutPrefix(word, "-")
		if away && !s.removeWords {
			return fmt.Errorf("--mcp %s: there is nothing to take away yet", word)
		}
		had := len(refs)
		refs = slices.DeleteFunc(refs, func(r mcp.Ref) bool { return r.Name == name })
		switch {
		case !away:
			refs = append(refs, mcp.Ref{Name: name})
		case len(refs) == had:
			return fmt.Errorf("--mcp %s: the agent has no such server; `agentconnect agent show %s` names them", word, ag.ID)
		}
	}
	ag.MCPServers, err = mcp.EncodeRefs(refs)
	return err
}

// behindLinks is the path that path leads to now. That is what an agent gets: later nobody
// who can change a link on the way decides over it.
func behindLinks(path string) string {
	if real, _, err := (hostfacts.Host{}).Resolve(path); err == nil {
		return real
	}
	return path // what is wrong with it is said when it is judged
}

// expand resolves a leading ~/ that the shell left alone (--grant=~/x:ro).
func expand(home, path string) string {
	if path == "~" {
		return home
	}
	if rest, ok := strings.CutPrefix(path, "~/"); ok {
		return filepath.Join(home, rest)
	}
	return path
}

func (a *app) agentAdd() *cobra.Command {
	c := &cobra.Command{Use: "add ID --runtime NAME | --command PROGRAM", Short: "add an agent; the sandbox is on", Args: a.idArgs(1, 1)}
	set := a.settings(c, false)
	c.RunE = func(c *cobra.Command, args []string) error {
		if set.runtime == "" && set.command == "" {
			return &usageError{text: "give --runtime NAME or --command PROGRAM", see: c.CommandPath()}
		}
		s, err := a.site()
		if err != nil {
			return err
		}
		on := true
		ag := &agent.Agent{ID: args[0], RunInSandbox: &on}
		if err := set.apply(a, s.cfg.Home, ag); err != nil {
			return err
		}
		if err := s.add(c.Context(), ag); err != nil {
			return err
		}
		return s.sayAgent(ag, "added", describe(s.builder(), ag))
	}
	return c
}

// add judges an agent and writes it.
func (s *site) add(ctx context.Context, ag *agent.Agent) error {
	if e, err := s.cfg.Agent(s.store, ag.ID); e.System {
		return s.own(ag.ID)
	} else if !errors.Is(err, agent.ErrNotFound) {
		return fmt.Errorf("%w: %s: change it with `agentconnect agent edit %s`, or choose another id", agent.ErrExists, ag.ID, ag.ID)
	}
	if s.isPlaced(ag.ID) {
		return &daemon.Refusal{Code: 78, Text: fmt.Sprintf("agent %s was placed here by the control plane; choose another id", ag.ID)}
	}
	if err := ag.Validate(); err != nil {
		return err
	}
	if ws := ag.Workspace; filepath.IsAbs(ws) && !lies(ws) {
		return &daemon.Refusal{Code: 78, Text: fmt.Sprintf("workspace %s: no such folder; make it first: mkdir -p '%s'", ws, ws)}
	}
	if err := s.builder().Check(ag); err != nil {
		return notEdit(ag.ID, err)
	}
	if err := s.roomFor(ag); err != nil {
		return err
	}
	if err := s.store.Create(ag); err != nil {
		return err
	}
	if err := s.makeWorkspace(ag); err != nil {
		return err
	}
	if err := s.fill(ctx, ag); err != nil {
		return errors.Join(fmt.Errorf("agent %s is not added: %w", ag.ID, err), s.store.Remove(ag.ID, false))
	}
	if own := s.store.WorkspacePath(ag); !filepath.IsAbs(ag.Workspace) && ag.Workspace != "" && lies(ag.Workspace) {
		s.a.warn("its workspace is %s, and not the %s that lies here: for that give its absolute path", own, ag.Workspace)
	}
	s.recordPolicy(ag.ID, "add", "agent add: sandbox "+onOff(ag.Sandboxed()))
	s.adviseRuntime(ag)
	s.tell(ctx)
	return nil
}

// notEdit turns remedies that change an agent into such that add one: it is not there yet.
func notEdit(id string, err error) error {
	text := strings.ReplaceAll(err.Error(), "agent edit "+id+" ", "agent add "+id+" … ")
	if text == err.Error() {
		return err
	}
	return &daemon.Refusal{Code: code(err), Text: text, Err: err}
}

// makeWorkspace makes a relative workspace, never through a link that leads out.
func (s *site) makeWorkspace(ag *agent.Agent) error {
	if ag.Workspace == "" || filepath.IsAbs(ag.Workspace) {
		return nil
	}
	root, err := os.OpenRoot(s.store.Dirs(ag.ID).Agent)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.MkdirAll(ag.Workspace, 0o700); err != nil {
		return fmt.Errorf("workspace %s: %w; make the folder, or set another with `agentconnect agent edit %s --workspace DIR`", ag.Workspace, err, ag.ID)
	}
	return nil
}

// adviseRuntime says early what would stop the first start.
func (s *site) adviseRuntime(ag *agent.Agent) {
	if _, err := s.builder().Policy(ag); errors.Is(err, runtimes.ErrNotInstalled) {
		s.a.warn("%v", err)
	}
}

// sayAgent says what became of an agent; st is its status by now.
func (s *site) sayAgent(ag *agent.Agent, did string, st control.AgentStatus) error {
	if err := s.a.say(st, "agent %s %s: runtime %s, sandbox %s, network %s, workspace %s", ag.ID, did, st.Runtime, onOff(st.Sandboxed), st.Network, st.Workspace); err != nil {
		return err
	}
	if !s.a.json && did == "added" {
		sayGit(s.a.out, s.store.Dirs(ag.ID), ag)
	}
	if !st.Sandboxed {
		s.a.warn("agent %s runs without the sandbox: it can do whatever you can", ag.ID)
	}
	return nil
}

func (a *app) agentEdit() *cobra.Command {
	c := &cobra.Command{Use: "edit ID", Short: "change what is given, and that only", Args: a.idArgs(1, 1)}
	set := a.settings(c, true)
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(changedFlags(c)) == 0 {
			return &usageError{text: "say what to change", see: c.CommandPath()}
		}
		s, err := a.site()
		if err != nil {
			return err
		}
		if err := s.own(args[0]); err != nil {
			return err
		}
		b := s.builder()
		ag, err := s.store.Update(args[0], func(ag *agent.Agent) error {
			if err := set.apply(a, s.cfg.Home, ag); err != nil {
				return err
			}
			if err := ag.Validate(); err != nil {
				return err
			}
			return b.Check(ag)
		})
		if err != nil {
			return err
		}
		if err := s.makeWorkspace(ag); err != nil {
			return err
		}
		s.recordPolicy(ag.ID, "edit", "agent edit "+strings.Join(changedFlags(c), " "))
		s.adviseRuntime(ag)
		s.tell(c.Context())
		now := describe(s.builder(), ag)
		st, err := s.client().Agent(c.Context(), ag.ID)
		if err == nil {
			now = *st
		}
		if err := s.sayAgent(ag, "changed", now); err != nil {
			return err
		}
		switch {
		case err != nil || st.State != control.StateRunning: // its next start has the change
		case st.Changed || st.Usage == nil:
			a.warn("agent %s runs with what it was started with; run `agentconnect agent restart %s`", ag.ID, ag.ID)
		default:
			for _, n := range st.Unmet {
				a.warn("%s", n)
			}
			if !a.json {
				_, err = fmt.Fprintf(a.out, "it runs on with: %s\n", oneLine(usageLine(st.Usage)))
				return err
			}
		}
		return nil //nolint:nilerr // what it uses by now could not be asked; the change is made
	}
	return c
}

func (a *app) agentList() *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "list the agents", Args: a.args(0, 0),
		RunE: func(c *cobra.Command, _ []string) error {
			st, err := a.status(c.Context())
			if err != nil {
				return err
			}
			if st.ConfigError != "" && st.State != control.StateRunning {
				_, err := a.config()
				return err
			}
			if a.json {
				return a.printJSON(st.Agents)
			}
			return a.printAgents(st.Agents)
		},
	}
}

// shown is the answer of `agent show --json`. Values of the environment, and the arguments of
// commands that give credentials, are left out: they may be secrets.
type shown struct {
	File   string              `json:"file"`
	System bool                `json:"system,omitempty"`
	Agent  json.RawMessage     `json:"agent"`
	Status control.AgentStatus `json:"status"`
	// Login says that the runtime is not logged in, and how to.
	Login string `json:"login,omitempty"`
}

const redacted = "(set)"

// withoutSecrets returns ag without what may be a secret.
func withoutSecrets(ag *agent.Agent) *agent.Agent {
	c := *ag
	c.Env = maps.Clone(ag.Env)
	for k := range c.Env {
		c.Env[k] = redacted
	}
	if len(c.MCPServers) > 0 {
		c.MCPServers = mcp.Redact(c.MCPServers, redacted)
	}
	c.GitCredentials = slices.Clone(ag.GitCredentials)
	for i, g := range c.GitCredentials {
		if len(g.Command) > 1 {
			c.GitCredentials[i].Command = []string{g.Command[0], redacted}
		}
	}
	if len(c.RuntimeOverrides) > 0 {
		c.RuntimeOverrides = json.RawMessage(`{"redacted":true}`)
	}
	return &c
}

func (a *app) agentShow() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "show one agent: its configuration and its state", Args: a.idArgs(1, 1),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := a.site()
			if err != nil {
				return err
			}
			e, err := s.agent(args[0])
			if err != nil {
				return err
			}
			st, err := s.client().Agent(c.Context(), e.ID)
			if errors.Is(err, control.ErrNotRunning) {
				offline := describe(s.builder(), e.Agent)
				st, err = &offline, nil
			}
			if err != nil {
				return err
			}
			raw, err := withoutSecrets(e.Agent).Encode()
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(shown{File: e.Path, System: e.System, Agent: raw, Status: *st, Login: s.builder().LoginHint(e.Agent)})
			}
			return a.printAgent(s, e.Path, e.Agent, st)
		},
	}
}

func (a *app) printAgent(s *site, path string, ag *agent.Agent, st *control.AgentStatus) error {
	limits := s.cfg.AgentLimits(ag)
	t := newTable(a.out)
	t.row("agent", ag.ID)
	t.row("file", path)
	t.row("state", st.State)
	if st.Reason != "" {
		t.row("reason", st.Reason)
	}
	t.row("runtime", st.Runtime+" "+strings.Join(ag.Args, " "))
	t.row("sandbox", onOff(ag.Sandboxed()))
	t.row("workspace", st.Workspace)
	t.row("read", string(orDefault(ag.Read, sandbox.ReadSystem)))
	t.row("network", st.Network)
	networkRows(t, ag.Network)
	t.row("nesting", orDefault(ag.Nesting, "as the runtime needs"))
	t.row("permission mode", orDefault(ag.PermissionMode, "the runtime's choice"))
	t.row("credentials", orDefault(ag.Credentials, agent.CredentialsPrivate))
	if hint := s.builder().LoginHint(ag); hint != "" {
		t.row("login", hint)
	}
	gitRows(t, st.Git, st.GitSeals)
	t.row("limits", fmt.Sprintf("memory %s, cpu %s, tasks %d", orDefault(limits.Memory, "-"), orDefault(limits.CPU, "-"), limits.Tasks))
	if st.Usage != nil {
		t.row("uses", usageLine(st.Usage))
	}
	if len(st.DropIns) > 0 {
		t.row("units", dropInsLine(st.DropIns))
	}
	for _, g := range ag.Grants {
		t.row("grant", fmt.Sprintf("%s:%s", g.Path, g.Access))
	}
	for _, w := range ag.Allow {
		t.row("allow", w)
	}
	for _, k := range slices.Sorted(maps.Keys(ag.Env)) {
		t.row("env", k+" "+redacted)
	}
	t.row("agent memory", orDefault(ag.Memory, agent.MemoryManaged))
	for _, c := range ag.GitCredentials {
		t.row("git credential", c.URL+" by "+credentialSource(c))
	}
	refs, err := mcp.Refs(ag.MCPServers)
	if err != nil {
		return err
	}
	for _, r := range refs {
		t.row("MCP server", r.Name)
	}
	if keys := ag.Unused(); len(keys) > 0 {
		t.row("without effect here", strings.Join(keys, ", "))
	}
	for _, n := range slices.Concat(st.Unmet, st.Notes) {
		t.row("note", n)
	}
	return t.end()
}

// credentialSource says where credentials come from; the words of a command may be secrets.
func credentialSource(c agent.GitCredential) string {
	switch {
	case c.Secret != "":
		return "the secret " + c.Secret
	case len(c.Command) > 0:
		return "the command " + c.Command[0]
	}
	return "the control plane"
}

func orDefault[T ~string](v, def T) T {
	if v == "" {
		return def
	}
	return v
}

func (a *app) agentWish(verb, short string) *cobra.Command {
	return &cobra.Command{
		Use: verb + " ID", Short: short, Args: a.idArgs(1, 1),
		RunE: func(c *cobra.Command, args []string) error {
			// Known before the daemon is asked: 66 and 78 are true whether it runs or not. What runs
			// can be stopped whatever the configuration says by now.
			s, err := a.site()
			switch {
			case verb == "stop" && err == nil:
				err = s.known(args[0])
			case verb == "stop":
				err = nil
			case err == nil:
				var e *config.AgentEntry
				if e, err = s.agent(args[0]); err == nil {
					err = s.builder().Judge(e.Agent)
				}
			}
			if err != nil {
				return err
			}
			client, _, err := a.daemonClient()
			if err != nil {
				return err
			}
			do := map[string]func(context.Context, string) (*control.AgentStatus, error){
				"start": client.Start, "stop": client.Stop, "restart": client.Restart,
			}[verb]
			st, err := do(c.Context(), args[0])
			if err != nil {
				return err
			}
			text := "agent " + st.ID + ": " + st.State
			if st.Line != "" {
				text += ": " + st.Line
			}
			return a.say(st, "%s", text)
		},
	}
}

func (a *app) agentRemove() *cobra.Command {
	var purge bool
	c := &cobra.Command{
		Use: "rm ID", Short: "stop an agent and remove it; its directory and secrets stay, unless --purge", Args: a.idArgs(1, 1),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := a.site()
			if err != nil {
				return err
			}
			id := args[0]
			if err := s.own(id); err != nil {
				left := s.store.Dirs(id).Agent
				if _, serr := os.Lstat(left); !purge || !errors.Is(err, agent.ErrNotFound) || serr != nil {
					return err
				}
				// What an earlier rm without --purge left.
			}
			var worktree string
			if e, err := s.cfg.Agent(s.store, id); err == nil {
				worktree = e.Agent.Git.Worktree
			}
			_, stopErr := s.client().Stop(c.Context(), id)
			switch err := stopErr; {
			case errors.Is(err, control.ErrNotRunning):
				if err := daemon.Unwant(s.cfg.Root, id); err != nil {
					return err
				}
			case err != nil && code(err) != 66 && code(err) != 73: // 73: stopped, and not written down; this may make room
				return fmt.Errorf("agent %s is not removed, since it could not be stopped: %w", id, err)
			}
			if err := s.store.Remove(id, purge); err != nil {
				return err
			}
			if purge {
				if err := cmp.Or(s.secrets().Purge(id), agent.RemoveServers(s.cfg.Root, id)); err != nil {
					return err
				}
			}
			s.tell(c.Context())
			if code(stopErr) == 73 {
				if _, err := s.client().Stop(c.Context(), id); err != nil && code(err) != 66 {
					a.warn("an agent that you add as %s will start with the daemon: %v", id, err)
				}
			}
			dir := s.store.Dirs(id).Agent
			if purge {
				text := fmt.Sprintf("agent %s and its directory are removed", id)
				if worktree != "" {
					text += fmt.Sprintf("; its branch stays, and git knows its worktree until `git -C '%s' worktree prune`", worktree)
				}
				return a.say(map[string]any{"removed": id, "purged": true}, "%s", text)
			}
			text, kept := fmt.Sprintf("agent %s is removed; its directory stays: %s", id, dir), 0
			if list, err := s.secrets().List(id); err == nil && len(list) > 0 {
				kept = len(list)
				text += fmt.Sprintf("; so do its secrets (%d), for an agent that you add by this id: `agentconnect agent rm %s --purge` takes all away", kept, id)
			}
			return a.say(map[string]any{"removed": id, "purged": false, "directory": dir, "secrets": kept}, "%s", text)
		},
	}
	c.Flags().BoolVar(&purge, "purge", false, "remove the agent's directory too, with its workspace, home and memory, its secrets and what its MCP servers kept")
	return c
}
