package daemon

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/native"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/cmd/internal/secret"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// Builder turns configuration into the spec of one start. The same value serves the
// daemon, `agent add` and `explain`: what is judged and shown is what starts.
type Builder struct {
	Config   *config.Config
	Store    *agent.Store
	Programs programs.Set
	Host     sandbox.Host
	Build    string
	// Direct: the supervisor is a child, and the boundary must die with it.
	Direct bool
	// Environ is the daemon's own environment, of which a runtime gets a named few.
	Environ []string
	// Placed gives the secrets that came with an agent from a control plane; may be nil.
	Placed func(id string) map[string]string
	// InForce gives the folders that agents which run may write by a configuration that is no
	// longer their file's; nil: nothing is known to run.
	InForce func(known *agent.Writable) []string
	// IsPlaced reports whether a control plane placed an agent here; nil: none of them.
	IsPlaced func(id string) bool
	// Supervisors is the socket where the daemon answers its supervisors; empty: there is none.
	Supervisors string
	// RunDir is the directory of sockets; empty: what lies there is left out.
	RunDir string
	// Secrets are the agents'; nil: none.
	Secrets *secret.Store
}

// Judge says whether the agent may run here at all, as far as its configuration goes.
func (b *Builder) Judge(a *agent.Agent) error {
	if err := config.CheckAgent(b.Config, a); err != nil {
		return err
	}
	mode := b.Config.AgentNetwork(a)
	if !a.Sandboxed() {
		if m := a.Network.Mode; m != "" && m != sandbox.NetworkHost {
			return &Refusal{Code: 78, Text: fmt.Sprintf("agent %s: network mode %s needs the sandbox, which is off for it; run `agentconnect agent edit %s --network host` or `--sandbox`", a.ID, m, a.ID)}
		}
		return nil
	}
	if n := a.Network; !mode.Gated() && (len(n.Allow) > 0 || len(n.Deny) > 0 || n.Ask != "") {
		return &Refusal{Code: 78, Text: fmt.Sprintf("agent %s: network.allow, network.deny and network.ask work in modes allowlist and open, and the mode that holds is %s; run `agentconnect agent edit %s --network allowlist`, or take them away with `--allow '' --deny '' --ask 0`", a.ID, mode, a.ID)}
	}
	if mode.Gated() {
		if _, err := rules.Compile(b.egressPolicy(a)); err != nil {
			return refusedConfig(a, fmt.Errorf("network: %w", err))
		}
	}
	return nil
}

// egressPolicy are the rules of an agent's network.
func (b *Builder) egressPolicy(a *agent.Agent) wire.EgressPolicy {
	ask, _ := a.Network.AskFor() // validated when it was read
	return wire.EgressPolicy{Open: b.Network(a) == sandbox.NetworkOpen, Allow: a.Network.Allow, Deny: a.Network.Deny, Ask: int(ask.Seconds())}
}

// egress is the agent's way out; nil where everything or nothing passes.
func (b *Builder) egress(a *agent.Agent) *wire.Egress {
	if !a.Sandboxed() || !b.Network(a).Gated() {
		return nil
	}
	return &wire.Egress{
		Policy: b.egressPolicy(a), Records: audit.EgressPath(b.Config.Root, a.ID),
		Proxy: b.Proxy(),
	}
}

// Proxy is the operator's own way out, from the environment.
func (b *Builder) Proxy() wire.Proxy {
	return wire.Proxy{HTTPS: b.proxy("HTTPS_PROXY"), HTTP: b.proxy("HTTP_PROXY"), All: b.proxy("ALL_PROXY"), No: b.proxy("NO_PROXY")}
}

// proxy is a proxy variable, which programs write in lower case as well. HTTP_PROXY in
// upper case is nobody's but a user's here: no web server runs the daemon.
func (b *Builder) proxy(name string) string {
	return cmp.Or(getenv(b.Environ, name), getenv(b.Environ, strings.ToLower(name)))
}

// Network is the mode that really holds for the agent.
func (b *Builder) Network(a *agent.Agent) sandbox.NetworkMode {
	if !a.Sandboxed() {
		return sandbox.NetworkHost
	}
	return b.Config.AgentNetwork(a)
}

// GitSeals says how the git control files are kept from the agent.
func (b *Builder) GitSeals(a *agent.Agent) string {
	if !a.Sandboxed() {
		return ""
	}
	nesting := a.Nesting == "on"
	if a.Nesting == "" {
		if rt, err := runtimes.NewRegistry(b.Config.Runtimes).Get(a.Runtime); err == nil {
			nesting = rt.Nesting
		}
	}
	return sandbox.GitSeals(nesting)
}

// Git says how an agent's workspace was made; nil where it lies elsewhere.
func Git(store *agent.Store, a *agent.Agent) *control.AgentGit {
	switch {
	case a.Git.Clone != "":
		return &control.AgentGit{Clone: a.Git.Clone, Repository: store.Dirs(a.ID).Repository}
	case a.Git.Worktree != "":
		return &control.AgentGit{Worktree: a.Git.Worktree}
	}
	return nil
}

// start is how an agent's runtime starts.
type start struct {
	runtime runtimes.Runtime // zero for a command of the operator's
	install runtimes.Installation
	argv    []string
}

// Policy returns what the agent may touch. Its errors say what to change.
func (b *Builder) Policy(a *agent.Agent) (sandbox.Policy, error) {
	s, err := b.find(a)
	if err != nil {
		return sandbox.Policy{}, err
	}
	p, err := b.policy(a, s)
	if err != nil {
		return p, err
	}
	return p, b.exposeServers(a, &p)
}

// PolicyUninstalled is Policy less the files of programs that are not installed.
func (b *Builder) PolicyUninstalled(a *agent.Agent) (sandbox.Policy, error) {
	s, err := b.find(a)
	if err != nil && !errors.Is(err, runtimes.ErrNotInstalled) {
		return sandbox.Policy{}, err
	}
	p, err := b.policy(a, s)
	if err != nil {
		return p, err
	}
	if err := b.exposeServers(a, &p); err != nil && !errors.Is(err, runtimes.ErrNotInstalled) {
		return p, err
	}
	return p, nil
}

// PolicyWithoutRuntime is the policy of an agent whose runtime may be missing: enough to
// judge its workspace and its grants.
func (b *Builder) PolicyWithoutRuntime(a *agent.Agent) (sandbox.Policy, error) {
	return b.policy(a, start{})
}

func (b *Builder) policy(a *agent.Agent, s start) (sandbox.Policy, error) {
	p, err := b.granted(a, s)
	if err != nil {
		return p, err
	}
	ws, err := sandbox.CheckWorkspace(p, b.Host)
	if err != nil {
		return p, refusedConfig(a, err)
	}
	// The real place from here on, so that one name stands for it everywhere.
	p.Workspace = ws
	return p, nil
}

// granted is the policy with its grants judged and its workspace as it was written.
func (b *Builder) granted(a *agent.Agent, s start) (sandbox.Policy, error) {
	if err := answering(a); err != nil {
		return sandbox.Policy{}, err
	}
	d := b.Store.Dirs(a.ID)
	p := sandbox.Policy{
		Agent: a.ID, UID: os.Getuid(), GID: os.Getgid(), User: userName(),
		Home: b.Config.Home, Root: b.Config.Root,
		AgentDir: d.Agent, HomeDir: d.Home, TmpDir: d.Tmp, MemoryDir: d.Memory,
		Workspace:     cmp.Or(a.Workspace, agent.DefaultWorkspace),
		Read:          cmp.Or(a.Read, sandbox.ReadSystem),
		Grants:        a.Grants,
		Expose:        s.install.Expose,
		Guest:         b.Programs.Guest,
		Network:       b.Network(a),
		Nesting:       s.runtime.Nesting,
		DieWithParent: b.Direct,
		OwnCgroup:     !b.Direct,
	}
	for _, program := range []string{b.Programs.Supervisor, b.Programs.Launcher, b.Programs.Guest} {
		if dir := filepath.Dir(program); filepath.IsAbs(dir) && !slices.Contains(p.Own, dir) {
			p.Own = append(p.Own, dir)
		}
	}
	if run := getenv(b.Environ, "XDG_RUNTIME_DIR"); filepath.IsAbs(run) {
		p.Own = append(p.Own, filepath.Clean(run))
	}
	if a.Nesting != "" {
		p.Nesting = a.Nesting == "on"
	}
	if a.Memory != "" && a.Memory != agent.MemoryManaged {
		p.MemoryDir = ""
	}
	if a.Sandboxed() {
		// Without namespaces inside, the runtime's own sandbox cannot start at all.
		files, err := native.Files(s.runtime, b.Host, p.Home, p.HomeDir, p.MemoryDir, p.Nesting)
		if err != nil {
			return p, refusedConfig(a, err)
		}
		p.Files = files
	}
	if a.Git.Clone != "" {
		p.Repository = d.Repository
	}
	if b.RunDir != "" {
		show(&p, insideDir(AgentSocket(b.RunDir, a.ID)))
	}
	homes, err := otherHomes(p.Home)
	if err != nil {
		return p, err
	}
	p.OtherHomes = homes
	for _, g := range a.Grants {
		if g.Access == sandbox.Hidden {
			continue // closes, never opens
		}
		if err := sandbox.CheckGrant(p, g.Path, g.Access, b.Host); err != nil {
			return p, refusedConfig(a, err)
		}
	}
	return p, nil
}

func refusedConfig(a *agent.Agent, err error) error {
	return &Refusal{Code: 78, Text: fmt.Sprintf("agent %s: %v", a.ID, err)}
}

// find looks the runtime up and traces its installation. Of one that is not installed it gives
// what is known of it beside the error.
func (b *Builder) find(a *agent.Agent) (start, error) {
	writable, err := b.writable(a)
	if err != nil {
		return start{}, err
	}
	o := runtimes.Options{Home: b.Config.Home, Root: b.Config.Root, Path: getenv(b.Environ, "PATH"), Writable: writable}
	if a.Runtime == "" {
		in, err := runtimes.Find(o, a.Command)
		if err != nil {
			return start{}, notFound(a, err)
		}
		return start{install: in, argv: in.Argv(a.Args...)}, nil
	}
	rt, err := runtimes.NewRegistry(b.Config.Runtimes).Get(a.Runtime)
	if err != nil {
		return start{}, refusedConfig(a, err)
	}
	s := start{runtime: rt}
	if rt.Internal {
		guest := b.Programs.Guest
		if a.Sandboxed() {
			guest = sandbox.GuestPath
		}
		s.argv = rt.Argv(guest)
	} else {
		if s.install, err = runtimes.FindRuntime(o, rt); err != nil {
			return s, notFound(a, err)
		}
		s.argv = s.install.Argv(rt.Args...)
	}
	s.argv = append(s.argv, a.Args...)
	return s, nil
}

// writable are the folders outside ROOT that agents of this user can write, as a starts.
func (b *Builder) writable(a *agent.Agent) ([]string, error) {
	known, err := b.Store.WritableFor(a)
	if err != nil {
		return nil, fmt.Errorf("agent %s: what agents can write cannot be told: %w; make that folder readable for you", a.ID, err)
	}
	out := slices.Clone(known.All)
	for _, e := range b.Config.SystemAgents {
		if e.Agent != nil {
			out = append(out, e.Agent.Folders()...)
		}
	}
	if b.InForce != nil {
		out = append(out, b.InForce(known)...)
	}
	return out, nil
}

func notFound(a *agent.Agent, err error) error {
	if errors.Is(err, runtimes.ErrNotInstalled) {
		return &Refusal{Code: 1, Text: fmt.Sprintf("agent %s: %v", a.ID, err), Err: err}
	}
	return refusedConfig(a, err)
}

// Spec builds everything a supervisor needs. The agent's directories are made if they
// are missing. In a sandboxed agent's case the plan is compiled here once, so that what
// is wrong with the policy is said before anything starts.
func (b *Builder) Spec(a *agent.Agent, socket string) (*wire.Spec, error) {
	spec, err := b.Uncompiled(a, socket)
	if err == nil && spec.Sandboxed {
		if _, cerr := sandbox.Compile(spec.Policy, b.Host); cerr != nil {
			return nil, refusedConfig(a, cerr)
		}
	}
	return spec, err
}

// Uncompiled is Spec for a supervisor that runs: it compiles the plan in the next moment.
func (b *Builder) Uncompiled(a *agent.Agent, socket string) (*wire.Spec, error) {
	if err := b.Judge(a); err != nil {
		return nil, err
	}
	if err := b.Store.Ensure(a.ID); err != nil {
		return nil, err
	}
	if repo := b.Store.Dirs(a.ID).Repository; a.Git.Clone != "" {
		if fi, err := os.Lstat(repo); err != nil || !fi.IsDir() {
			return nil, refusedConfig(a, fmt.Errorf("git.clone: the repository %s is not there; `agentconnect agent add --git` makes it with a new agent", repo))
		}
	}
	s, err := b.find(a)
	if err != nil {
		return nil, err
	}
	p, err := b.policy(a, s)
	if err != nil {
		return nil, err
	}
	inside := insideDir(socket)
	show(&p, inside)
	secrets, err := b.secrets(a)
	if err != nil {
		return nil, err
	}
	env, given, err := b.env(a, s, p, secrets)
	if err != nil {
		return nil, err
	}
	private, err := b.secretEnv(a, secrets)
	if err != nil {
		return nil, err
	}
	if err := b.exposeServers(a, &p); err != nil {
		return nil, err
	}
	var hostPath string // "" where nothing runs outside
	look := sync.OnceValues(func() (*outer, error) {
		o, err := b.outer(a)
		if err == nil {
			hostPath = o.path
		}
		return o, err
	})
	servers, err := b.servers(a, p, secrets, look)
	if err != nil {
		return nil, err
	}
	credentials, err := b.credentials(a, look)
	if err != nil {
		return nil, err
	}
	login, err := b.login(a, s.runtime)
	if err != nil {
		return nil, err
	}
	var checkout *wire.Checkout
	if a.Checkout != nil {
		checkout = &wire.Checkout{URL: a.Checkout.URL, Branch: a.Checkout.Branch}
	}
	return &wire.Spec{
		Checkout:    checkout,
		Version:     wire.Version,
		Build:       b.Build,
		Agent:       a.ID,
		Sandboxed:   a.Sandboxed(),
		Policy:      p,
		Argv:        s.argv,
		Env:         env,
		Given:       given,
		SecretEnv:   private,
		Inside:      inside,
		Secrets:     wireSecrets(secrets),
		Credentials: credentials,
		Daemon:      b.Supervisors,
		HostPath:    hostPath,
		MCP:         servers,
		GitConfig:   a.GitConfig(),
		Dir:         p.Workspace,
		Socket:      socket,
		Launcher:    b.Programs.Launcher,
		Bwrap:       b.Programs.Bwrap,
		BwrapIs:     bwrapIs(a, b.Programs.Bwrap),
		Managed:     !b.Direct,
		Egress:      b.egress(a),
		Limits:      b.limits(a),
		ProbeFile:   b.probeFile(),
		ClientFiles: cmp.Or(a.ACP.ClientFiles, b.Config.ClientFiles),
		Mode:        a.PermissionMode,
		Login:       string(login),
		LoginHint:   b.loginHint(a, s.runtime),
		Inner:       a.Sandboxed() && p.Nesting && len(p.Files) > 0,
		Notes:       memoryNotes(a, s),
		StopGrace:   wire.Duration(b.Config.StopGrace),
		KillGrace:   wire.Duration(b.Config.KillGrace),
	}, nil
}

// probeFile is where a supervisor finds the probe's last result; the daemon's own word
// counts where it starts supervisors itself.
func (b *Builder) probeFile() string {
	if b.Direct {
		return ""
	}
	return ProbeFile(b.Config.Root)
}

// limits are the agent's, or the defaults, capped by the system's policy; nil where nothing
// enforces them.
func (b *Builder) limits(a *agent.Agent) *wire.Limits {
	if b.Direct {
		return nil
	}
	l := b.Config.AgentLimits(a)
	var out wire.Limits
	// Validated when they were read.
	if n, err := l.MemoryBytes(); err == nil && n > 0 {
		// No MemoryHigh below it: without swap there is nothing to reclaim, and the kernel
		// would slow the agent down to a crawl for minutes before it reaches the limit.
		out.MemoryMax = n
		none := uint64(0)
		out.MemorySwapMax = &none
	}
	if n, err := l.CPUPercent(); err == nil && n > 0 {
		out.CPUQuota = uint64(n) * 10_000 // µs per second
	}
	if l.Tasks > 0 {
		out.TasksMax = uint64(l.Tasks)
	}
	for name, set := range map[string]bool{"memory": a.Limits.Memory != "", "cpu": a.Limits.CPU != "", "tasks": a.Limits.Tasks != 0} {
		if set {
			out.Asked = append(out.Asked, name)
		}
	}
	slices.Sort(out.Asked)
	return &out
}

// systemPath is the PATH inside, after the runtime's own directories.
var systemPath = []string{"/usr/local/bin", "/usr/bin", "/bin", "/usr/local/games", "/usr/games", "/usr/local/sbin", "/usr/sbin", "/sbin"}

// passedOn are the variables of the daemon's environment that a runtime gets: what
// says how text and time look, nothing that opens a door. LC_* come too.
var passedOn = []string{"LANG", "LANGUAGE", "TZ"}

// MemoryEnv names the agent's memory directory to whatever runs inside.
const MemoryEnv = "AGENTCONNECT_MEMORY_DIR"

// ours are the variables that the boundary decides; a configuration cannot set them.
var ours = []string{"HOME", "USER", "LOGNAME", "XDG_RUNTIME_DIR"}

// checkOurs refuses another value for what the boundary decides, before a start does.
func (b *Builder) checkOurs(a *agent.Agent) error {
	extra, err := a.ExtraEnv()
	if err != nil {
		return err
	}
	same := map[string]string{"HOME": b.Config.Home, "USER": userName(), "LOGNAME": userName()}
	for _, k := range ours {
		if v, set := extra[k]; set && same[k] != "" && v != same[k] {
			return refusedConfig(a, fmt.Errorf("env %s is set by the boundary itself; leave it out", k))
		}
	}
	return nil
}

// env is the whole environment of a runtime, built from nothing: what the boundary
// decides, and what the operator gave.
func (b *Builder) env(a *agent.Agent, s start, p sandbox.Policy, secrets []secret.Secret) (fixed, given []string, err error) {
	env := map[string]string{
		"HOME": p.Home, "USER": p.User, "LOGNAME": p.User, "SHELL": shell(),
		"PATH":   strings.Join(slices.Concat(s.install.PathDirs, systemPath), ":"),
		"TMPDIR": "/tmp",
		"LANG":   "C.UTF-8",
	}
	for _, kv := range b.Environ {
		k, v, _ := strings.Cut(kv, "=")
		if slices.Contains(passedOn, k) || strings.HasPrefix(k, "LC_") {
			env[k] = v
		}
	}
	if p.Workspace != "" {
		env["PWD"] = p.Workspace
	}
	if a.Sandboxed() {
		env["XDG_RUNTIME_DIR"] = "/run/user/" + strconv.Itoa(p.UID)
	} else {
		// Unconfined, the operator's own directories are the true ones.
		delete(env, "TMPDIR")
		for _, k := range []string{"TMPDIR", "XDG_RUNTIME_DIR"} {
			if v := getenv(b.Environ, k); v != "" {
				env[k] = v
			}
		}
	}
	if p.MemoryDir != "" {
		env[MemoryEnv] = p.MemoryDir
	}
	more := maps.Clone(s.runtime.Env)
	if more == nil {
		more = map[string]string{}
	}
	extra, err := a.ExtraEnv()
	if err != nil {
		return nil, nil, err
	}
	maps.Copy(more, extra)
	if a.Memory == agent.MemoryNone {
		maps.Copy(more, s.runtime.MemoryOff)
	}
	if err := b.offer(a, p, secrets, env, more); err != nil {
		return nil, nil, err
	}
	for _, k := range ours {
		if v, set := more[k]; set && v != env[k] {
			return nil, nil, refusedConfig(a, fmt.Errorf("env %s is set by the boundary itself; take it out of the agent's (or the runtime's) env", k))
		}
		delete(more, k)
	}
	for k := range more {
		delete(env, k)
	}
	if fixed, err = environ(a, env); err != nil {
		return nil, nil, err
	}
	given, err = environ(a, more)
	return fixed, given, err
}

// environ lists an environment, sorted.
func environ(a *agent.Agent, env map[string]string) ([]string, error) {
	list := make([]string, 0, len(env))
	for k, v := range env {
		if !validName(k) || strings.ContainsRune(v, 0) {
			return nil, refusedConfig(a, fmt.Errorf("env %q: a name is letters, digits and _, not a digit first, and no value has a NUL byte", k))
		}
		list = append(list, k+"="+v)
	}
	slices.Sort(list)
	return list, nil
}

func validName(k string) bool {
	for i, r := range k {
		letter := r == '_' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
		if !letter && (i == 0 || r < '0' || r > '9') {
			return false
		}
	}
	return k != ""
}

func getenv(environ []string, name string) string {
	for _, kv := range slices.Backward(environ) {
		if k, v, ok := strings.Cut(kv, "="); ok && k == name {
			return v
		}
	}
	return ""
}

// SupervisorEnv is the environment of the supervisors themselves: how messages look,
// and where the runtime directory is. Never the daemon's own.
func SupervisorEnv(environ []string) []string {
	env := []string{"PATH=" + strings.Join(systemPath, ":")}
	for _, kv := range environ {
		k, _, _ := strings.Cut(kv, "=")
		if slices.Contains(passedOn, k) || strings.HasPrefix(k, "LC_") || k == "XDG_RUNTIME_DIR" {
			env = append(env, kv)
		}
	}
	return env
}

func userName() string {
	if u, err := user.LookupId(strconv.Itoa(os.Getuid())); err == nil && u.Username != "" {
		return u.Username
	}
	return "user" // a container's uid without an entry
}

// shell is what tools inside run commands with; read from the system, not from the
// operator's login, whose shell may lie in the hidden home.
func shell() string {
	if programs.Executable("/bin/bash") == nil {
		return "/bin/bash"
	}
	return "/bin/sh"
}

// otherHomes are the homes of this machine's other people, root included.
func otherHomes(own string) ([]string, error) {
	f, err := os.Open("/etc/passwd")
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var homes []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Split(lines.Text(), ":")
		if len(fields) < 6 {
			continue
		}
		uid, err := strconv.Atoi(fields[2])
		if err == nil && (uid == 0 || uid >= firstPerson && uid != nobody) {
			homes = append(homes, fields[5])
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("/etc/passwd: %w", err)
	}
	// Homes of people in a directory service are not in the file; the folders are there.
	entries, err := os.ReadDir("/home")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		if e.IsDir() {
			homes = append(homes, filepath.Join("/home", e.Name()))
		}
	}
	mine, err := os.Stat(own)
	if err != nil {
		return nil, err
	}
	homes = slices.DeleteFunc(homes, func(h string) bool {
		if !filepath.IsAbs(h) || filepath.Clean(h) != h || h == "/" {
			return true
		}
		st, err := os.Stat(h)
		return err != nil || !st.IsDir() || os.SameFile(st, mine)
	})
	slices.Sort(homes)
	return slices.Compact(homes), nil
}

// Uids of people, as Debian and most others give them out.
const (
	firstPerson = 1000
	nobody      = 65534
)

// Check judges an agent that is about to be written: its policy, its workspace and its
// grants. A relative workspace that does not exist yet is judged by its name alone; each
// start judges all of it again.
func (b *Builder) Check(a *agent.Agent) error {
	if err := b.Judge(a); err != nil {
		return err
	}
	var rt runtimes.Runtime
	if a.Runtime != "" {
		var err error
		if rt, err = runtimes.NewRegistry(b.Config.Runtimes).Get(a.Runtime); err != nil {
			return refusedConfig(a, err)
		}
	}
	if _, err := b.login(a, rt); err != nil {
		return err
	}
	if _, err := b.serverDefs(a); err != nil {
		return err
	}
	if err := b.checkOurs(a); err != nil {
		return err
	}
	if !filepath.IsAbs(a.Workspace) {
		if a.Workspace != "" && !filepath.IsLocal(a.Workspace) {
			return refusedConfig(a, fmt.Errorf("workspace %s: a relative workspace must stay inside the agent directory; give an absolute path to use a folder elsewhere", a.Workspace))
		}
		if _, err := os.Lstat(b.Store.WorkspacePath(a)); errors.Is(err, os.ErrNotExist) {
			_, err := b.granted(a, start{})
			return err
		}
	}
	_, err := b.PolicyWithoutRuntime(a)
	return err
}

// asked is the bubblewrap that was asked last: each start would ask anew otherwise.
var asked struct {
	sync.Mutex
	wire.BwrapIs
}

func bwrapIs(a *agent.Agent, path string) wire.BwrapIs {
	if !a.Sandboxed() {
		return wire.BwrapIs{}
	}
	asked.Lock()
	defer asked.Unlock()
	asked.BwrapIs = launch.AskBwrap(context.Background(), path, asked.BwrapIs)
	return asked.BwrapIs
}
