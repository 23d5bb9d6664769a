// Package supervisor is the process outside the boundary that holds one running agent:
// it starts the runtime behind the gate, is its only ACP client, serves the agent
// socket, ends it gracefully and says why it ended. It reads no configuration and talks
// to no bus: the sealed spec says all, and where the process is placed (a scope, later)
// is the caller's function.
package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"agentconnect.md/sandbox/cmd/internal/acp"
	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/egress"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/sealguard"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/gitseal"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

// execOnlyIdle is how long a supervisor that only serves commands waits for the first.
const execOnlyIdle = 30 * time.Second

// lastFrames is how long the runtime's last output may take to be read after its end.
const lastFrames = 2 * time.Second

// StoppedWord is the last word of a supervisor that was told to stop.
const StoppedWord = "stopped"

// Options are what a supervisor needs besides its spec.
type Options struct {
	Log *slog.Logger
	// Notify tells the service manager ("READY=1", "STATUS=…"); may be nil.
	Notify func(state string)
	// Placer puts started processes where their limits are; nil under direct supervision.
	Placer Placer
	// Build is this program's version.
	Build string
	// Ahead is the runtime's launcher, if it was begun already; the caller drops it in the end.
	Ahead *Ahead
	// Keep has the service manager start the agent with this spec after a crash; may be nil.
	Keep func(spec *wire.Spec) error
}

// Supervisor is one running agent.
type Supervisor struct {
	spec wire.Spec
	opts Options
	// since is when the runtime started.
	since time.Time

	mu       sync.Mutex
	process  *program
	broker   *acp.Broker
	plan     *sandbox.Plan
	found    *gitseal.Found // what the plan was made with
	before   *gitseal.State // of the folders, before anything ran
	clients  int
	sessions int
	execs    int
	served   bool // a command was served
	lastExec lastExec
	notes    []string
	gateway  *egress.Gateway // nil in network modes none and host

	guard    *sealguard.Guard // nil without a boundary
	audit    *audit.Log
	ended    atomic.Pointer[string] // why the guard ended the agent
	secretMu sync.Mutex             // guards secrets and their files
	secrets  map[string]wire.Secret
	commands chan struct{} // a seat for each credential command that runs, or question to the daemon
	hosted   chan struct{} // a seat for each MCP server that runs outside
	paced    pace          // of all programs that the agent has started outside
	configMu sync.Mutex    // one change of a configuration at a time
	pushes   chan struct{} // the one seat for what receives a push
	outside  atomic.Bool   // a program of the operator's ran outside any boundary

	execDone chan struct{} // one token after each command
	wg       sync.WaitGroup
}

// New makes a supervisor for a checked spec.
func New(spec wire.Spec, opts Options) (*Supervisor, error) {
	if spec.Version != wire.Version {
		return nil, fmt.Errorf("the daemon speaks version %d, this supervisor %d: restart the daemon with `agentconnect restart`", spec.Version, wire.Version)
	}
	switch {
	case spec.Agent == "" || spec.Socket == "" || spec.Launcher == "":
		return nil, errors.New("spec: agent, socket and launcher must be set")
	case !spec.ExecOnly && len(spec.Argv) == 0:
		return nil, errors.New("spec: no runtime to start")
	case spec.Sandboxed && spec.Bwrap == "":
		return nil, errors.New("spec: a boundary without bubblewrap")
	case !spec.Sandboxed && spec.Checkout != nil:
		return nil, errors.New("spec: a workspace from a repository is made inside the sandbox")
	case spec.Sandboxed && spec.Policy.Network.Gated() != (spec.Egress != nil):
		return nil, fmt.Errorf("spec: network mode %s and rules for it do not belong together", spec.Policy.Network)
	}
	for _, m := range spec.MCP {
		if m.Policy != nil && m.Policy.Network.Gated() != (m.Egress != nil) {
			return nil, fmt.Errorf("spec: MCP server %s: network mode %s and rules for it do not belong together", m.Name, m.Policy.Network)
		}
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	if opts.Notify == nil {
		opts.Notify = func(string) {}
	}
	s := &Supervisor{
		spec: spec, opts: opts, execDone: make(chan struct{}, 1),
		secrets: map[string]wire.Secret{}, commands: make(chan struct{}, maxCommands), hosted: make(chan struct{}, maxHosted),
		pushes: make(chan struct{}, 1),
	}
	if spec.ExecOnly {
		s.lastExec.n.Store(uint64(os.Getpid()) * execsApart) //nolint:gosec // a pid
	}
	return s, nil
}

// planError: the policy cannot be carried out here as things are.
type planError struct{ error }

func (e *planError) Unwrap() error { return e.error }

// compile makes the plan anew from the policy and the host as it is now.
func (s *Supervisor) compile() (*sandbox.Plan, error) {
	plan, found, err := gitseal.Compile(s.spec.Policy, hostfacts.Host{}, true)
	if err != nil {
		return nil, &planError{err}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.plan, s.found = plan, found
	return plan, nil
}

// remember takes down how the folders are before anything of the agent runs: once, behind the
// start gate, while the launcher builds the view.
func (s *Supervisor) remember() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.before == nil && s.found != nil {
		s.before = gitseal.Remember(s.found, gitseal.Roots(s.spec.Policy, hostfacts.Host{}))
	}
}

// start makes the launch of a program in this agent's boundary.
func (s *Supervisor) start(argv, env []string, dir string) launch.Start {
	st := launch.Start{Launcher: s.spec.Launcher, Argv: argv, Env: env, Dir: dir, DieWithParent: s.spec.Policy.DieWithParent}
	if s.spec.Sandboxed {
		st.Bwrap, st.BwrapIs = s.spec.Bwrap, s.spec.BwrapIs
		st.Compile, st.Calm = s.compile, s.guard.Calm
		st.Expect = &launch.Expect{Network: s.spec.Policy.Network, DieWithParent: s.spec.Policy.DieWithParent}
		st.Ports = ports(s.spec.Egress)
	}
	return st
}

// Run starts the agent and serves it until it ends or ctx is cancelled, which stops it
// gracefully. A nil error means that it ended well or was stopped. Whatever the error,
// nothing of the agent runs when Run returns.
func (s *Supervisor) Run(ctx context.Context) error {
	s.openAudit()
	defer func() { _ = s.audit.Close() }()
	server, err := s.listen()
	if err != nil {
		return err
	}
	defer s.endOrphans()
	gateway, err := s.openGateway()
	if err != nil {
		server.Close()
		return err
	}
	if gateway != nil {
		defer func() { _ = gateway.Close() }()
	}
	if err := s.guardSeals(); err != nil {
		server.Close()
		return err
	}
	defer s.guard.Close()
	defer s.review()
	defer s.wg.Wait()
	defer server.Close()
	// Taken away while the lock of the agent's socket is still held: the next supervisor
	// makes its own.
	defer s.removeInside()
	if err := s.makeInside(); err != nil {
		return err
	}
	guests, err := s.listenGuest()
	if err != nil {
		return err
	}
	serving, stopGuests := context.WithCancel(context.WithoutCancel(ctx))
	defer stopGuests()
	s.serveGuests(serving, guests)
	if s.spec.ExecOnly {
		return s.runExecOnly(ctx, server)
	}
	last, err := s.runRuntime(ctx, server)
	if err != nil {
		last = err.Error()
	}
	s.opts.Notify("STATUS=" + oneLine(last))
	return err
}

func (s *Supervisor) runExecOnly(ctx context.Context, server *server) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.serve(ctx, server)
	s.opts.Notify("READY=1\nSTATUS=serving commands")
	idle := time.NewTimer(execOnlyIdle)
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-idle.C:
			s.mu.Lock()
			unused := !s.served
			s.mu.Unlock()
			if unused {
				return nil
			}
		case <-s.execDone:
			s.mu.Lock()
			over := s.execs == 0
			s.mu.Unlock()
			if over {
				return nil
			}
		}
	}
}

// runRuntime starts the runtime and stays with it to its end. Without an error last says
// how it ended well.
func (s *Supervisor) runRuntime(ctx context.Context, server *server) (last string, err error) {
	ahead := s.opts.Ahead
	if ahead == nil {
		ahead = &Ahead{}
		if ahead.in, ahead.out, ahead.stderr, err = newPipes(); err != nil {
			return "", err
		}
	}
	defer ahead.close()
	in, out, stderr := ahead.in, ahead.out, ahead.stderr
	carried := s.carryLogin()
	defer carried.end()
	argv := s.spec.Argv
	if s.spec.Inner {
		argv = append([]string{sandbox.GuestPath, "inner", "--"}, argv...)
	}
	if c := s.spec.Checkout; c != nil {
		argv = append([]string{sandbox.GuestPath, "checkout", c.URL, c.Branch, "--"}, argv...)
	}
	st := s.start(argv, s.spec.Env, s.spec.Dir)
	st.Private = slices.Concat(s.spec.Given, s.spec.SecretEnv)
	st.Stdin, st.Stdout, st.Stderr, st.Ahead = in.r, out.w, stderr.w, ahead.launcher
	process, err := s.run(ctx, st, Placement{}, s.ownGateway())
	if err != nil {
		// All that wrote there has ended: bubblewrap's own words, if it came that far.
		stderr.closeWrite()
		s.logStderr(stderr.r)
		if ctx.Err() != nil {
			return StoppedWord, nil // stopped before the gate opened; nothing has run
		}
		return "", err
	}
	defer process.close()
	in.closeRead()
	out.closeWrite()
	stderr.closeWrite()

	paths, err := s.paths()
	if err != nil {
		process.Kill()
		return "", err
	}
	broker := acp.NewBroker(acp.Options{
		RuntimeIn: in.w, RuntimeOut: out.r, Paths: paths, ClientFiles: s.spec.ClientFiles,
		Sandboxed: s.spec.Sandboxed, Mode: s.spec.Mode, Log: s.opts.Log, OnChange: s.counts,
		Servers: s.servers,
	})
	s.mu.Lock()
	s.process, s.broker, s.since = process, broker, time.Now()
	if s.plan != nil {
		s.notes = append(s.notes, s.plan.Notes...)
	}
	s.notes = append(append(s.notes, weaknesses(s.spec)...), s.spec.Notes...)
	if n := process.Network; n != nil && !n.Redirected {
		s.notes = append(s.notes, fmt.Sprintf("%s: connections go out to ports %s alone, all others are refused", n.Weaker, portList(st.Ports)))
	}
	if process.scope != nil {
		s.notes = append(s.notes, process.scope.Notes()...)
	}
	notes := slices.Clone(s.notes)
	hint := carried.hint(s.spec.LoginHint)
	if hint != "" {
		// For the log and the last word alone: who logs in inside needs no restart.
		notes = append(notes, hint)
	}
	s.mu.Unlock()
	if process.scope != nil {
		notes = append(notes, process.scope.Unmet()...)
	}
	for _, n := range notes {
		s.opts.Log.Warn(n)
	}
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	s.serve(serving, server)
	s.wg.Go(func() { s.logStderr(stderr.r) })

	brokerEnd := make(chan error, 1)
	s.wg.Go(func() { brokerEnd <- broker.Run(serving) })
	s.opts.Notify("READY=1\nSTATUS=" + s.line())
	s.opts.Log.Info("started", "pid", process.PID, "sandboxed", s.spec.Sandboxed)

	var reason error // why the runtime's life ends, if not by itself
	stopped := false
	select {
	case <-ctx.Done():
		stopped = true
		s.opts.Notify("STOPPING=1")
		broker.CloseInput()
		process.stop(context.WithoutCancel(ctx), time.Duration(s.spec.StopGrace), time.Duration(s.spec.KillGrace))
	case <-process.Done():
	case reason = <-brokerEnd:
		// The runtime closed its stdout or broke the protocol: without it there is no agent.
		brokerEnd <- reason
		wait := time.Duration(s.spec.StopGrace)
		if reason != nil && !errors.Is(reason, io.EOF) {
			wait = 0
		}
		broker.CloseInput()
		process.stop(ctx, wait, time.Duration(s.spec.KillGrace))
	}
	<-process.Done()
	process.sweep()
	// Its last frames may still lie in the pipe: the broker passes them on before the
	// open requests get their answer. Without a boundary something else may hold the pipe.
	patience := time.NewTimer(lastFrames)
	select {
	case broke := <-brokerEnd:
		// Nobody reads from it then, of which it dies, and its end may be seen first.
		if errors.Is(broke, acp.ErrFrameTooLarge) {
			reason = broke
		}
	case <-patience.C:
	}
	patience.Stop()
	end := process.End()
	text := "the runtime ended: " + process.why()
	if why := stoppedFor(&s.ended); why != nil {
		text, stopped, reason = "the agent was stopped: "+why.Error(), false, why
	} else if stopped {
		text = StoppedWord
	} else if reason != nil && !errors.Is(reason, io.EOF) {
		text = "the runtime was ended: " + reason.Error()
	}
	// Who hears of the end comes back for the next start, and must not meet this one.
	server.refuse()
	broker.Fail(text + "; the session can be loaded again")
	stopServing()
	if stopped || end.Code == 0 && (reason == nil || errors.Is(reason, io.EOF)) {
		s.opts.Log.Info(text)
		return text, nil
	}
	if s.spec.Inner && end.Code == wire.ExitNoInner && !stopped {
		return "", &launch.UnavailableError{Err: errors.New(innerText)}
	}
	if c := s.spec.Checkout; c != nil && end.Code == wire.ExitNoCheckout && !stopped {
		return "", fmt.Errorf("its workspace could not be made from %s, so the runtime was not started; its log says why", c.URL)
	}
	if hint != "" && !stopped {
		text += "; " + hint
	}
	return "", errors.New(text) // logged by whoever gets it
}

// innerText is why a runtime with a sandbox of its own was not started.
const innerText = "nested-refused: no sandbox starts inside it, and the runtime keeps the commands of its model in one; its log says why, `agentconnect agent edit ID --nesting off` goes without"

// weaknesses are the things this agent runs without, to be said and not to be found out.
func weaknesses(spec wire.Spec) []string {
	var out []string
	if !spec.Sandboxed {
		return []string{"no sandbox: this agent can do whatever its user can"}
	}
	if spec.Policy.Network == sandbox.NetworkHost {
		out = append(out, "network mode host: the agent shares the host's network, its loopback included")
		if !scopesAbstractSockets() {
			out = append(out, "this kernel cannot keep the agent off abstract Unix sockets in network mode host (Landlock ABI 6, Linux 6.12)")
		}
	}
	if spec.Policy.Nesting {
		out = append(out, "nesting is on: user namespaces work inside")
	}
	return out
}

// counts is told by the broker when a client or a session came or went.
func (s *Supervisor) counts(clients, sessions int) {
	s.mu.Lock()
	s.clients, s.sessions = clients, sessions
	s.mu.Unlock()
	s.opts.Notify("STATUS=" + s.line())
}

// line is the status line.
func (s *Supervisor) line() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	parts := []string{"not sandboxed"}
	if s.spec.Sandboxed {
		parts[0] = "sandboxed"
	}
	clients := fmt.Sprintf("%d clients", s.clients)
	if s.clients == 1 {
		clients = "1 client"
	}
	parts = append(parts, clients, "network "+string(s.network()))
	if e := s.egressState(); e != nil {
		parts = append(parts, egressLine(e))
	}
	return strings.Join(parts, " · ")
}

func (s *Supervisor) network() sandbox.NetworkMode {
	if !s.spec.Sandboxed {
		return sandbox.NetworkHost
	}
	return s.spec.Policy.Network
}

// status answers OpStatus.
func (s *Supervisor) status() *wire.Status {
	line := s.line()
	s.mu.Lock()
	defer s.mu.Unlock()
	st := &wire.Status{
		Build: s.opts.Build, Agent: s.spec.Agent, Sandboxed: s.spec.Sandboxed, PID: os.Getpid(), Since: s.since,
		Clients: s.clients, Sessions: s.sessions, Network: string(s.network()), Notes: s.notes, Line: line,
		Egress: s.egressState(),
	}
	if s.spec.Sandboxed {
		st.GitSeals = sandbox.GitSeals(s.spec.Policy.Nesting)
	}
	if s.process != nil {
		st.Runtime = s.process.PID
	}
	return st
}

// paths are the folders that an ACP client may name: the workspace and the grants.
func (s *Supervisor) paths() (acp.PathChecker, error) {
	if !s.spec.Sandboxed {
		return nil, nil
	}
	list := []acp.Root{{Path: s.spec.Dir, Writable: true}}
	for _, m := range s.plan.Mounts {
		if m.Grant {
			list = append(list, acp.Root{Path: m.Source, Writable: m.Access == sandbox.ReadWrite})
		}
	}
	roots, err := acp.NewRoots(list)
	if err != nil {
		return nil, fmt.Errorf("the folders of the agent: %w", err)
	}
	return visiblePaths{roots, s.plan}, nil
}

// visiblePaths also refuses a path that is not there inside under its own name.
type visiblePaths struct {
	acp.Roots
	plan *sandbox.Plan
}

// CheckDir judges a session's directory.
func (v visiblePaths) CheckDir(path string) (string, error) {
	real, err := v.Roots.CheckDir(path)
	if err != nil {
		return "", err
	}
	// What the plan shows there must lead to the same place; links below it are the agent's.
	if shown, _, err := (hostfacts.Host{}).Resolve(v.plan.Explain(path).Source); err != nil || shown != real {
		return "", fmt.Errorf("%s is %s, by way of a link that the agent does not see: open %s itself", path, real, real)
	}
	return real, nil
}

// CheckFile judges a file of the client's. What is sealed inside, hooks that a configuration names
// for one, is not written from outside, either, and what is covered there is not read.
func (v visiblePaths) CheckFile(path string, write bool) (string, error) {
	real, err := v.Roots.CheckFile(path, write)
	if err != nil {
		return "", err
	}
	switch shown := v.plan.Explain(real); {
	case shown.Access == sandbox.Hidden:
		return "", fmt.Errorf("%q is not part of the agent's view (%s)", path, shown.Why)
	case write && (shown.Access != sandbox.ReadWrite || shown.Source != real):
		return "", fmt.Errorf("%q is read-only for this agent (%s)", path, shown.Why)
	}
	return real, nil
}

// logStderr logs the runtime's stderr line by line, cut to a bounded length, and gives the last line.
func (s *Supervisor) logStderr(r io.Reader) (last string) {
	forEachLine(r, func(line string) {
		last = line
		s.opts.Log.Info(line, "from", "runtime")
	})
	return last
}

// portList writes ports for people.
func portList(ports []uint16) string {
	words := make([]string, len(ports))
	for i, p := range ports {
		words[i] = strconv.Itoa(int(p))
	}
	return strings.Join(words, ", ")
}

// oneLine makes text fit for a status line.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text)
}

// ExitCode maps what Run returned to the supervisor's exit code: 0 ended well or
// stopped, 69 the boundary is unavailable, 78 the spec asks for what may not be, 1 else.
func ExitCode(err error) int {
	var unavailable *launch.UnavailableError
	var plan *planError
	var limit *LimitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &unavailable):
		return 69
	case errors.As(err, &plan), errors.As(err, &limit):
		return 78
	}
	return 1
}

// pipe is a pipe whose ends are closed once each.
type pipe struct {
	r, w         *os.File
	onceR, onceW sync.Once
}

func newPipe() (*pipe, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	return &pipe{r: r, w: w}, nil
}

func (p *pipe) closeRead()  { p.onceR.Do(func() { p.r.Close() }) }
func (p *pipe) closeWrite() { p.onceW.Do(func() { p.w.Close() }) }
func (p *pipe) close()      { p.closeRead(); p.closeWrite() }

// What is printed without end is beyond the limits of whoever prints: so many lines are logged at
// once, and so many a second, as many as journald takes of one unit. What comes faster is counted,
// and read slowly.
const (
	lineBurst = 10_000
	lineRate  = 300
	lineWait  = 10 * time.Millisecond // for each piece of 16 KiB
)

// forEachLine calls f for each line of r, escape sequences made visible, and passes over
// what is longer than 4 KiB in one line.
func forEachLine(r io.Reader, f func(string)) {
	const most = 4 << 10
	buf := make([]byte, 0, most)
	chunk := make([]byte, 16<<10)
	cut := false
	left, at, over := float64(lineBurst), time.Now(), 0
	flush := func() {
		if len(buf) == 0 && !cut {
			return
		}
		if left < 1 || over > 0 {
			over++
		} else {
			left--
			line := visible(string(buf))
			if cut {
				line += " …"
			}
			f(line)
		}
		buf, cut = buf[:0], false
	}
	say := func() {
		if over > 0 {
			f(fmt.Sprintf("%d more lines, which came too fast, are left out", over))
			over = 0
		}
	}
	for {
		n, err := r.Read(chunk)
		now := time.Now()
		left, at = min(lineBurst, left+now.Sub(at).Seconds()*lineRate), now
		if left >= lineRate { // a second's: not one line here and there
			say()
		}
		before := over
		for _, b := range chunk[:n] {
			switch {
			case b == '\n':
				flush()
			case len(buf) < most:
				buf = append(buf, b)
			default:
				cut = true
			}
		}
		if err != nil {
			flush()
			say()
			return
		}
		if over > before {
			time.Sleep(lineWait) //nolint:forbidigo // a pace
		}
	}
}

// visible replaces control characters, so that a runtime cannot write to the terminal of
// whoever reads the log.
func visible(line string) string {
	line = strings.TrimRight(strings.ToValidUTF8(line, "\uFFFD"), "\r")
	if strings.IndexFunc(line, func(r rune) bool { return (r < ' ' && r != '\t') || r == 0x7f || r >= 0x80 && r < 0xa0 }) < 0 {
		return line
	}
	var b strings.Builder
	for _, r := range line {
		if (r < ' ' && r != '\t') || r == 0x7f || r >= 0x80 && r < 0xa0 {
			fmt.Fprintf(&b, `\x%02x`, r)
			continue
		}
		b.WriteRune(r)
	}
	return b.String()
}
