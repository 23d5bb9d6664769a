// Package daemon runs the agents of one ROOT: it holds the lock, listens on the control
// socket, judges what may start by configuration and probe, and has supervisors started
// by a Supervision. It reads no ACP and builds no boundary: supervisors and the launcher
// do. It decides no exit code either; it returns errors that have one.
package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"agentconnect.md/sandbox/cmd/internal/accounting"
	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/secret"
	"agentconnect.md/sandbox/cmd/internal/stops"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/units"
)

// Prober runs the live probe of the boundary. It may put sockets into runDir.
type Prober func(ctx context.Context, runDir string) control.Probe

// Options of Run.
type Options struct {
	// Config is what is in force at the start, Reload reads it anew.
	Config *config.Config
	Reload func() (*config.Config, error)
	// Watch names directories whose changes mean that Reload should be called, besides
	// those below ROOT.
	Watch    []string
	Programs programs.Set
	Probe    Prober
	Host     sandbox.Host
	Build    string
	// Environ is the environment the daemon was started with, UID its user.
	Environ []string
	UID     int
	// SupervisorNote is what status says of the kind of supervision.
	SupervisorNote string
	Stderr         io.Writer
	// Notify tells the daemon's own service manager how it is ("READY=1"); may be nil.
	Notify func(state string)
	// Stir hears that something happens, from when the daemon is ready; may be nil.
	Stir func()
	// Reloads delivers requests to reload that come as signals. May be nil.
	Reloads <-chan os.Signal
	// Manage gives the supervision by a service manager; nil supervises directly.
	Manage func(ManagerDeps) (Supervision, error)
	// Clock and Pace of direct supervision; zero values for the real ones.
	Clock Clock
	Pace  Pace
}

// ManagerDeps are what a supervision by a service manager needs of the daemon.
type ManagerDeps struct {
	// Direct runs the supervisors of single commands.
	Direct Supervision
	// Socket gives the path of an agent's socket; supervisors ask for their spec on
	// SpecSocket.
	Socket     func(id string) (string, error)
	SpecSocket string
	// Stopped and Started hear of an agent that a person stopped, or started, by the
	// manager's own means.
	Stopped, Started func(id string)
	Log              *slog.Logger
}

// Times of the daemon's own waits.
const (
	probeTimeout = 2 * time.Minute
	endMargin    = 10 * time.Second // beyond the agents' graces, when the daemon ends
	askTimeout   = time.Second      // for a supervisor's own status, from its turn on
	askPromptly  = askTimeout / 10  // after that the next one has its turn
	// askAllTimeout bounds a status; its client waits for 10 s.
	askAllTimeout = 5 * time.Second
	// askedAtOnce is how many supervisors are asked at a time: enough for the processors, and
	// too few for one to be late because of the others.
	askedAtOnce = 32
)

// Daemon is one running daemon.
type Daemon struct {
	o     Options
	log   *slog.Logger
	store *agent.Store
	sup   Supervision
	run   *runDir
	since time.Time
	// supervisors is the socket where they ask; "" where there is none.
	supervisors string
	direct      *Direct
	// remote is what a control plane placed here, and the connection to it.
	remote *remote

	shutdown context.CancelCauseFunc
	down     chan struct{} // closed when the agents have ended and the record is written

	probing sync.Mutex      // one probe at a time
	probed  chan struct{}   // closed when the first one is done
	passed  chan struct{}   // holds one: a probe by others passed
	loading sync.Mutex      // one reload at a time
	life    context.Context //nolint:containedctx // of the daemon; set once it may connect, under loading

	findings audit.Counts
	lines    lines

	watching atomic.Bool // what runs is taken over, and stops by hand are noticed

	mu        sync.Mutex
	cfg       *config.Config
	configErr string
	warnings  []string
	probe     *control.Probe
	probeWas  time.Time // of the result that lay there when the last probe of ours began
	wanted    *wanted
	records   map[string]*record
	execs     int
}

// record is what the daemon knows of an agent beyond its supervision.
type record struct {
	wish sync.Mutex // orders what is wished of the agent; never taken inside Daemon.mu

	// The rest under Daemon.mu.
	state, reason string                         // not started: StateRefused or StateFailed, and why
	inForce       *agent.Agent                   // as of the last start, or of a change taken over live
	text          string                         // of inForce
	outside       []string                       // what runs outside for it, as of the same
	limits        *wire.Limits                   // passed to what runs; nil: not known, or there are none
	egress        *wire.Egress                   // the same
	network       sandbox.NetworkMode            // it runs in; "": not known
	servers       map[string]sandbox.NetworkMode // its MCP servers with a boundary of their own; nil: there are none, or not known
}

// RootError: somebody tried to run agents as root.
type RootError struct{}

func (RootError) Error() string {
	return "do not run agents as root: the boundary confines an ordinary user, and root's files would be the agents' to reach; start it as the user whose projects they work on (for example `su - USER -c 'agentconnect run'`)"
}

// Run is `agentconnect run`. It returns when ctx ends or a client asks for it, and all
// agents have ended: nil then, else why it did not start. A *Refusal (code 69) means that
// required mode is on and the boundary cannot start; nothing was started.
func Run(ctx context.Context, o Options) error {
	if o.UID == 0 {
		return RootError{}
	}
	root := o.Config.Root
	for _, dir := range []string{root, filepath.Join(root, "state"), filepath.Join(root, "logs"), filepath.Join(root, "logs", "agents"), filepath.Join(root, "agents")} {
		if err := privateDir(dir); err != nil {
			return err
		}
	}
	lock, err := takeLock(root)
	if err != nil {
		return err
	}
	defer lock.Close()
	file, err := openLog(DaemonLog(root), daemonLogSize)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	log := slog.New(slog.NewTextHandler(tee{o.Stderr, file}, &slog.HandlerOptions{Level: level(o.Config.LogLevel)}))
	run, err := claimRunDir(getenv(o.Environ, "XDG_RUNTIME_DIR"), root)
	if err != nil {
		return err
	}
	defer run.Close()
	run.sweep()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	d := &Daemon{
		o: o, log: log, store: agent.NewStore(root), run: run, since: time.Now(),
		shutdown: cancel, down: make(chan struct{}), probed: make(chan struct{}), passed: make(chan struct{}, 1),
		cfg: o.Config, records: map[string]*record{},
	}
	defer d.lines.keep(nil)
	logs := &agentLogs{dir: filepath.Join(root, "logs", "agents"), files: map[string]*logFile{}}
	defer logs.Close()
	direct := NewDirect(DirectOptions{
		Program: o.Programs.Supervisor, Dir: run.Path, Env: SupervisorEnv(o.Environ),
		Renew: d.renew, Changed: d.changed, Stderr: logs.Writer, Log: log, Clock: o.Clock, Pace: o.Pace,
	})
	d.sup, d.direct = direct, direct
	stop, err := d.listenSupervisors()
	if err != nil {
		return err
	}
	defer stop()
	if o.Manage != nil {
		if err := d.manage(); err != nil {
			return err
		}
	}
	return d.serve(ctx)
}

// listenSupervisors serves the questions of supervisors.
func (d *Daemon) listenSupervisors() (stop func(), err error) {
	path, err := d.run.Socket("spec.sock")
	if err != nil {
		return nil, err
	}
	if stop, err = d.serveSpecs(path); err == nil {
		d.supervisors = path
	}
	return stop, err
}

// manage puts the supervision by a service manager in place.
func (d *Daemon) manage() error {
	if d.run.claim == nil {
		return fmt.Errorf("another daemon of this user has the user manager's units (its sockets are in %s); end it, or run this one with --supervisor direct", d.run.Path)
	}
	socket := func(id string) (string, error) { return d.run.Socket(id + ".sock") }
	sup, err := d.o.Manage(ManagerDeps{Direct: d.direct, Socket: socket, SpecSocket: d.supervisors, Stopped: d.stoppedByHand, Started: d.startedByHand, Log: d.log})
	if err == nil {
		d.sup = sup
	}
	return err
}

// stoppedByHand remembers that a person stopped an agent: it stays stopped until a person
// starts it.
func (d *Daemon) stoppedByHand(id string) {
	d.mu.Lock()
	err := d.wanted.heard(id, false)
	d.mu.Unlock()
	if err != nil {
		d.log.Error("a stop by hand is not remembered", "agent", id, "error", err)
		return
	}
	d.log.Info("agent was stopped by hand", "agent", id)
}

// startedByHand remembers that a person started an agent. Its supervisor's question for the
// spec says so, too; but that may have come before an earlier stop was heard of.
func (d *Daemon) startedByHand(id string) {
	d.mu.Lock()
	err := d.wanted.heard(id, true)
	d.mu.Unlock()
	if err != nil {
		d.log.Error("a start by hand is not remembered", "agent", id, "error", err)
	}
}

// saveWanted writes down what could not be before.
func (d *Daemon) saveWanted() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.wanted.unsaved {
		return nil
	}
	return d.wanted.save()
}

// takeStops takes over the stops that were seen by nobody but the agents' supervisors. A
// supervisor that was told after the look that nobody watches belongs to an agent which ran
// during it, and whose end is noticed.
func (d *Daemon) takeStops() {
	root := d.config().Root
	ids, err := stops.List(root)
	if err != nil {
		d.log.Error("stops by hand are not known", "error", err)
	}
	for _, id := range ids {
		// One that failed was started since. One that is about to stop counts, for else it would be
		// started anew at once.
		if s := d.sup.State(id).State; s == "" || s == control.StateStopped || s == control.StateStopping {
			d.stoppedByHand(id)
		}
		if err := stops.Drop(root, id); err != nil {
			d.log.Error("a stop by hand is remembered for too long", "agent", id, "error", err)
		}
	}
}

func level(name string) slog.Level {
	switch name {
	case "trace", "debug":
		return slog.LevelDebug
	case "warn":
		return slog.LevelWarn
	case "error":
		return slog.LevelError
	}
	return slog.LevelInfo
}

func (d *Daemon) serve(ctx context.Context) (err error) {
	root := d.cfg.Root
	d.log.Info("starting", "pid", os.Getpid(), "build", d.o.Build, "root", root, "required", d.cfg.RequireSandbox)
	// Listen before the probe: a client that comes early waits instead of hearing that
	// nobody runs.
	path, err := d.run.Socket(controlName)
	if err != nil {
		return err
	}
	if filepath.Base(path) != controlName {
		return fmt.Errorf("%s: too long for a socket address (%d bytes at most); set XDG_RUNTIME_DIR or choose a shorter --root", filepath.Join(d.run.Path, controlName), maxSocketPath)
	}
	listener, err := listenControl(path, d.o.UID, d.log)
	if err != nil {
		return err
	}
	defer listener.Close()

	wanted, werr := readWanted(wantedPath(root))
	d.wanted = wanted
	if werr != nil {
		d.log.Error("wanted agents", "error", werr)
		d.warnings = append(d.warnings, werr.Error())
	}

	if d.remote, err = d.openRemote(); err != nil {
		return err
	}
	defer d.remote.close()

	p := d.runProbe(ctx)
	if ctx.Err() != nil {
		return d.ended(ctx)
	}
	if d.cfg.RequireSandbox && !p.OK {
		refusal := &Refusal{Code: exitRefused, Text: "the sandbox is required and cannot start here: " + probeText(p)}
		d.log.Error("refused to start", "reason", refusal.Text)
		s := d.status(context.Background(), false)
		s.State, s.Reason, s.ExitCode, s.PID = control.StateRefused, refusal.Text, refusal.Code, 0
		if err := writeRecord(root, s); err != nil {
			return errors.Join(refusal, err)
		}
		return refusal
	}
	if err := writeRecord(root, d.status(ctx, false)); err != nil {
		return err
	}

	watch, err := newWatch(d.watched(), d.log)
	if err != nil {
		// Without it a reload still comes by signal and by the command line.
		d.log.Warn("files are not watched; run `agentconnect agent edit` or send SIGHUP after changes", "error", err)
		d.mu.Lock()
		d.warnings = append(d.warnings, fmt.Sprintf("files are not watched (%v): changes made by hand count after SIGHUP", err))
		d.mu.Unlock()
	} else {
		defer watch.Close()
	}

	server := newServer(d)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	d.log.Info("ready", "socket", path, "probe", p.Code)
	d.notify("READY=1")
	defer d.notify("STOPPING=1")
	d.adopt(ctx)
	d.watching.Store(true)
	go func() {
		if err := d.store.Sweep(); err != nil {
			d.log.Error("a removal that was cut short", "error", err)
		}
	}()
	d.takeStops()
	d.startWanted(ctx, "start of the daemon")
	d.loading.Lock()
	d.life = ctx
	d.connect(ctx, false)
	d.loading.Unlock()
	d.stir()

	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case err := <-served:
			d.shutdown(fmt.Errorf("control socket: %w", err))
			served <- err
		case <-d.passed:
			d.remote.localChanged()
			d.recover("the probe passed")
		case <-d.o.Reloads:
			_ = d.reload("signal") // status shows it
		case <-watch.Changes():
			_ = d.reload(fileChanged)
			watch.Set(d.watched())
		}
	}
	d.remote.disconnect()
	err = d.ended(ctx)
	stop, cancel := context.WithTimeout(context.Background(), endMargin)
	defer cancel()
	if serr := server.Shutdown(stop); serr != nil {
		_ = server.Close()
	}
	_ = <-served // that it was closed
	return err
}

// stir says that something happens, once the start is over: that has a rhythm of its own.
func (d *Daemon) stir() {
	if d.o.Stir != nil && d.watching.Load() {
		d.o.Stir()
	}
}

func (d *Daemon) notify(state string) {
	if d.o.Notify != nil {
		d.o.Notify(state)
	}
}

// adopter is a Supervision whose agents outlive the daemon.
type adopter interface {
	// Adopt takes over what runs and names it; it names what is known but does not run, too.
	Adopt(ctx context.Context) (running, stopped []string, err error)
}

// preparer is a Supervision by which others can start an agent, too. Prepare makes what they
// start it with, for a sandboxed agent that the probe keeps from running.
type preparer interface{ Prepare(id string) }

// listener is a Supervision that is to know when an agent's supervisor asked for its spec.
type listener interface{ Asked(id string) }

// adopt takes over the agents that outlived the last daemon, and stops those that the
// configuration no longer allows.
func (d *Daemon) adopt(ctx context.Context) {
	sup, ok := d.sup.(adopter)
	if !ok {
		return
	}
	running, stopped, err := sup.Adopt(ctx)
	if err != nil {
		d.log.Error("agents that run are not taken over", "error", err)
		return
	}
	for _, id := range stopped {
		if _, err := d.load(id); errors.Is(err, agent.ErrNotFound) {
			d.forget(id, endMargin)
		}
	}
	for _, id := range running {
		r := d.record(id)
		err := d.allowed(ctx, id, r)
		if errors.Is(err, errUnread) {
			// Its configuration comes with the connection, and is judged then.
			d.log.Info("agent of the control plane goes on", "agent", id)
			continue
		}
		if err == nil {
			d.takeOver(id, r)
			continue
		}
		d.log.Warn("stopping an agent that is not allowed any more", "agent", id, "reason", err)
		r.wish.Lock()
		if errors.Is(err, agent.ErrNotFound) {
			stop, cancel := context.WithTimeout(ctx, endMargin+d.cfg.StopGrace+d.cfg.KillGrace)
			err = errors.Join(err, d.sup.Forget(stop, id))
			cancel()
		} else if werr := d.sup.Stop(id).Wait(ctx); werr != nil {
			err = errors.Join(err, werr)
		}
		r.wish.Unlock()
		d.refuse(id, r, err)
	}
}

// takeOver goes on with an agent that runs. Whoever stops one has first written down that
// it is not wanted: one that runs all the same is on its way down, or the daemon that was
// to stop it died over it.
func (d *Daemon) takeOver(id string, r *record) {
	r.wish.Lock()
	defer r.wish.Unlock()
	d.mu.Lock()
	stop := d.wanted.known && !d.wanted.ids[id]
	var err error
	if !stop {
		err = d.wanted.set(id, true)
	}
	d.mu.Unlock()
	if err != nil {
		d.log.Error("wanted agents", "error", err)
	}
	if stop {
		d.log.Info("stopping an agent that is not wanted", "agent", id)
		d.sup.Stop(id)
		return
	}
	d.log.Info("agent taken over", "agent", id)
}

// allowed judges an agent that runs by the configuration as it is now.
func (d *Daemon) allowed(ctx context.Context, id string, r *record) error {
	a, err := d.load(id)
	if errors.Is(err, errUnread) && d.config().RequireSandbox {
		if st, serr := wireStatus(ctx, d.sup.State(id).Socket); serr == nil && !st.Sandboxed {
			return &Refusal{Code: exitRefused, Text: fmt.Sprintf("agent %s: it runs without the sandbox, which is required now", id)}
		}
	}
	if err != nil {
		return err
	}
	b := d.builder()
	if err := b.Judge(a); err != nil {
		return err
	}
	text, err := a.Encode()
	if err != nil {
		return err
	}
	outside := b.outside(a)
	d.mu.Lock()
	r.inForce, r.text, r.outside = a, string(text), outside
	d.mu.Unlock()
	d.adjustNetwork(ctx, id, a)
	d.adjust(ctx, id, a)
	st, err := wireStatus(ctx, d.sup.State(id).Socket)
	if err != nil {
		return nil //nolint:nilerr // it is on its way up or down; the units' order holds
	}
	if a.Sandboxed() && !st.Sandboxed {
		return &Refusal{Code: exitRefused, Text: fmt.Sprintf("agent %s: it runs without the sandbox and is now to have it; it is started anew", id)}
	}
	b = d.builder()
	mode := sandbox.NetworkMode(st.Network)
	if now := b.Network(a); now.Gated() && mode.Gated() {
		mode = now // that was said above
	}
	d.mu.Lock()
	r.network = mode
	d.mu.Unlock()
	return d.judgeInForce(b, id)
}

// ended stops the agents and writes down how the daemon ended.
func (d *Daemon) ended(ctx context.Context) error {
	cause := context.Cause(ctx)
	d.log.Info("stopping", "reason", cause)
	d.mu.Lock()
	grace := d.cfg.StopGrace + d.cfg.KillGrace + endMargin
	d.mu.Unlock()
	stop, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if err := d.sup.Close(stop); err != nil {
		d.log.Warn("agents did not stop in time and were killed", "error", err)
	}
	if err := d.saveWanted(); err != nil {
		d.log.Error("wanted agents", "error", err)
	}
	// At the end of a session the bus may be gone already.
	asking, enough := context.WithTimeout(context.Background(), askTimeout)
	defer enough()
	s := d.status(asking, false)
	s.State, s.PID, s.Reason = control.StateStopped, 0, fmt.Sprint(cause)
	for i := range s.Agents {
		a := &s.Agents[i]
		a.PID, a.Socket = 0, ""
		if a.State != control.StateRefused && a.State != control.StateFailed {
			a.State, a.Reason = control.StateStopped, "the daemon ended"
		}
	}
	err := writeRecord(d.cfg.Root, s)
	close(d.down)
	d.log.Info("stopped")
	if errors.Is(cause, errAsked) || errors.Is(cause, context.Canceled) || errors.As(cause, new(SignalError)) {
		return err
	}
	return errors.Join(cause, err)
}

// SignalError is the cause of an end by a signal.
type SignalError struct{ Signal os.Signal }

func (e SignalError) Error() string { return "stopped by signal " + e.Signal.String() }

var errAsked = errors.New("stopped on request")

// runProbe runs the probe and keeps its result.
func (d *Daemon) runProbe(ctx context.Context) control.Probe {
	d.probing.Lock()
	defer d.probing.Unlock()
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	var was time.Time
	if lies, err := ReadProbe(d.config().Root); err == nil {
		was = lies.At
	}
	p := d.o.Probe(ctx, d.run.Path)
	if p.Checks == nil {
		p.Checks = []control.Check{}
	}
	d.mu.Lock()
	if d.probe == nil {
		close(d.probed)
	}
	d.probe, d.probeWas = &p, was
	d.mu.Unlock()
	defer d.remote.localChanged()
	if p.OK {
		d.log.Info("probe", "code", p.Code)
	} else {
		d.log.Warn("probe", "code", p.Code, "text", probeText(p))
	}
	return p
}

// probeText says what failed and what to do.
func probeText(p control.Probe) string {
	for _, c := range p.Checks {
		if c.Code != p.Code || c.Result != "failed" {
			continue
		}
		parts := []string{c.Code}
		for _, s := range []string{c.Detail, c.Remedy} {
			if s != "" {
				parts = append(parts, s)
			}
		}
		return strings.Join(parts, ": ")
	}
	return p.Code + ": run `agentconnect probe` for each check"
}

// gate refuses a start that the boundary does not stand for: each start asks again,
// since bwrap can be removed after the probe.
func (d *Daemon) gate(a *agent.Agent) error {
	if !a.Sandboxed() {
		return nil
	}
	d.mu.Lock()
	p := d.probe
	d.mu.Unlock()
	if p != nil && !p.OK {
		p = d.probedSince(p)
	}
	if p == nil || !p.OK {
		text := "the probe has not run; run `agentconnect probe`"
		if p != nil {
			text = probeText(*p)
		}
		return &Refusal{Code: exitRefused, Text: fmt.Sprintf("agent %s: the sandbox cannot start here: %s", a.ID, text)}
	}
	if err := programs.Executable(d.o.Programs.Bwrap); err != nil {
		return &Refusal{Code: exitRefused, Text: fmt.Sprintf("agent %s: the sandbox cannot start: %v; install bubblewrap (`sudo apt-get install bubblewrap`), then run `agentconnect probe`", a.ID, err)}
	}
	return nil
}

// probedSince gives the result of a probe that passed after old, where the probe's unit was
// started or reloaded by others: whoever starts an agent starts it. It gives old without one. A
// result is told from those before by its time being another: the clock may have been set back.
func (d *Daemon) probedSince(old *control.Probe) *control.Probe {
	if d.sup.Name() == "direct" {
		return old
	}
	p, err := ReadProbe(d.config().Root)
	if err != nil || !p.OK {
		return old
	}
	d.mu.Lock()
	known := p.At.Equal(old.At) || p.At.Equal(d.probeWas)
	if !known && d.probe == old {
		d.probe = p
	}
	d.mu.Unlock()
	if known {
		return old
	}
	d.log.Info("the probe has passed since", "at", p.At)
	select {
	case d.passed <- struct{}{}:
	default: // one word is enough
	}
	return p
}

func (d *Daemon) builder() *Builder {
	d.mu.Lock()
	defer d.mu.Unlock()
	return &Builder{Config: d.cfg, Store: d.store, Programs: d.o.Programs, Host: d.o.Host, Build: d.o.Build,
		Direct: d.sup.Name() == "direct", Environ: d.o.Environ, Placed: d.remote.secretsOf, IsPlaced: d.placedHere, InForce: d.foldersInForce,
		Supervisors: d.supervisors, RunDir: d.run.Path, Secrets: secret.NewStore(d.cfg.Root, secret.Systemd{Program: secret.SystemdCreds})}
}

// foldersInForce gives the folders of agents, and of commands in agents, that run with another
// configuration than their file has now.
func (d *Daemon) foldersInForce(known *agent.Writable) (folders []string) {
	more := map[string][]string{}
	d.mu.Lock()
	for id, r := range d.records {
		if r.inForce == nil {
			continue
		}
		for _, f := range r.inForce.Folders() {
			if !known.Has(f) {
				more[id] = append(more[id], f)
			}
		}
	}
	d.mu.Unlock()
	for id, its := range more {
		if active(d.sup.State(id).State) {
			folders = append(folders, its...)
		}
	}
	for _, spec := range d.direct.commands() {
		its := []string{spec.Policy.Workspace}
		for _, g := range spec.Policy.Grants {
			if g.Access == sandbox.ReadWrite {
				its = append(its, filepath.Clean(g.Path))
			}
		}
		folders = append(folders, slices.DeleteFunc(its, known.Has)...)
	}
	return folders
}

// spec builds the spec of a start now, or refuses it. Compiled: whether the plan is looked at.
func (d *Daemon) spec(a *agent.Agent, socket string, compiled bool) (*wire.Spec, error) {
	b := d.builder()
	if err := b.Judge(a); err != nil {
		return nil, err
	}
	if err := d.gate(a); err != nil {
		return nil, err
	}
	if err := answering(a); err != nil { // before anything is looked at that may lie there
		return nil, err
	}
	if err := d.judgeOutside(b, a); err != nil {
		return nil, err
	}
	if !compiled {
		return b.Uncompiled(a, socket)
	}
	return b.Spec(a, socket)
}

// judgeOutside refuses a start of an agent that could write what runs outside for another, which
// was judged when that one started.
func (d *Daemon) judgeOutside(b *Builder, a *agent.Agent) error {
	var folders []string
	for _, f := range a.Folders() {
		folders = append(folders, f, realPath(b.Host, f))
	}
	if len(folders) == 0 {
		return nil
	}
	found := map[string]string{} // by agent: a place, and the folder that it lies in
	d.mu.Lock()
	for id, r := range d.records {
		for _, place := range r.outside {
			if dir := holder(place, folders); dir != "" && id != a.ID {
				found[id] = place + " in " + dir
			}
		}
	}
	d.mu.Unlock()
	for id, what := range found {
		if active(d.sup.State(id).State) {
			return &Refusal{Code: exitBadSpec, Text: fmt.Sprintf("agent %s: %s runs outside the sandbox for agent %s, or leads to what does, and agent %s could change it; put it elsewhere, or stop agent %s", a.ID, what, id, a.ID, id)}
		}
	}
	return nil
}

// load reads an agent's configuration as it is now.
func (d *Daemon) load(id string) (*agent.Agent, error) {
	if err := agent.ValidateID(id); err != nil {
		return nil, &Refusal{Code: 2, Text: err.Error()}
	}
	e, err := d.builder().Config.Agent(d.store, id)
	if errors.Is(err, agent.ErrNotFound) && d.placedHere(id) {
		return nil, fmt.Errorf("agent %s: %w; it can start when the control plane is connected (see `agentconnect status`)", id, errUnread)
	}
	if err != nil {
		return nil, err
	}
	if e.Err != nil {
		return nil, e.Err
	}
	return e.Agent, nil
}

func (d *Daemon) record(id string) *record {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.records[id]
	if r == nil {
		r = &record{}
		d.records[id] = r
	}
	return r
}

// locked is record with the right to wish something of the agent: the one that counts then. While
// one waits the agent may be removed, and its record with it.
func (d *Daemon) locked(id string) *record {
	for {
		r := d.record(id)
		r.wish.Lock()
		d.mu.Lock()
		counts := d.records[id] == r
		d.mu.Unlock()
		if counts {
			return r
		}
		r.wish.Unlock()
	}
}

// renew gives the spec for a start that comes by itself: with the configuration as it
// is now, or, where that is broken, with the one in force.
func (d *Daemon) renew(id string) (*wire.Spec, error) {
	r := d.record(id)
	a, err := d.load(id)
	if err != nil {
		d.mu.Lock()
		a = r.inForce
		d.mu.Unlock()
		if a == nil || errors.Is(err, agent.ErrNotFound) {
			return nil, err
		}
		d.log.Warn("configuration in force is used for the restart", "agent", id, "error", err)
	}
	return d.agentSpec(r, a, true, false)
}

// agentSpec builds the spec of the agent's own supervisor. With used it notes that this is
// what runs from now on.
func (d *Daemon) agentSpec(r *record, a *agent.Agent, used, compiled bool) (*wire.Spec, error) {
	socket, err := d.run.Socket(a.ID + ".sock")
	if err != nil {
		return nil, err
	}
	spec, err := d.spec(a, socket, compiled)
	if err != nil {
		return nil, err
	}
	text, err := a.Encode()
	if err != nil {
		return nil, err
	}
	var outside []string
	if used {
		outside = d.builder().outside(a)
	}
	d.mu.Lock()
	r.state, r.reason = "", ""
	if used {
		r.inForce, r.text, r.limits, r.egress = a, string(text), spec.Limits, spec.Egress
		r.outside = outside
		r.network, r.servers = spec.Policy.Network, map[string]sandbox.NetworkMode{}
		for _, m := range spec.MCP {
			if m.Policy != nil {
				r.servers[m.Name] = m.Policy.Network
			}
		}
	}
	d.mu.Unlock()
	return spec, nil
}

// start wishes an agent to run, remembers that, and says how to learn of the outcome.
func (d *Daemon) start(id string, again bool) (Pending, error) {
	if err := agent.ValidateID(id); err != nil {
		return nil, &Refusal{Code: 2, Text: err.Error()} // nothing is to be kept of it
	}
	r := d.locked(id)
	defer r.wish.Unlock()
	return d.startLocked(id, r, again)
}

// startIfWanted starts an agent by itself, unless somebody stopped it meanwhile. With no word of why
// it runs already, as far as is known.
func (d *Daemon) startIfWanted(id, why string) error {
	_, err := d.startAsWanted(id, why, false)
	return err
}

// startAsWanted is startIfWanted, again also one that runs, and says how to learn of the outcome; nil
// where somebody stopped it.
func (d *Daemon) startAsWanted(id, why string, again bool) (Pending, error) {
	r := d.locked(id)
	defer r.wish.Unlock()
	d.mu.Lock()
	wanted := d.wanted.ids[id]
	d.mu.Unlock()
	if !wanted {
		return nil, nil
	}
	if why != "" {
		d.log.Info("starting wanted agent", "agent", id, "why", why)
	}
	return d.startLocked(id, r, again)
}

// startLocked is start under the record's wish lock.
func (d *Daemon) startLocked(id string, r *record, again bool) (Pending, error) {
	a, err := d.load(id)
	if err != nil {
		d.refuse(id, r, err)
		return nil, err
	}
	if err := d.room(id); err != nil {
		return nil, err
	}
	d.mu.Lock()
	err = d.wanted.set(id, true)
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	// Under a service manager the supervisor asks for its spec when it starts; where the
	// agent runs already, nobody does.
	spec, err := d.agentSpec(r, a, d.sup.Name() == "direct", true)
	if err != nil {
		d.refuse(id, r, err)
		if sup, ok := d.sup.(preparer); ok && a.Sandboxed() && Code(err) == exitRefused {
			sup.Prepare(id)
		}
		return nil, err
	}
	if again {
		return d.sup.Restart(id, spec), nil
	}
	return d.sup.Start(id, spec), nil
}

// refuse notes why an agent did not start; what already runs is not touched by it.
func (d *Daemon) refuse(id string, r *record, err error) {
	if errors.Is(err, agent.ErrNotFound) {
		if active(d.sup.State(id).State) {
			return // removed a moment ago: the next look at the files ends it
		}
		d.mu.Lock()
		delete(d.records, id) // ids that people mistype must not pile up
		d.mu.Unlock()
		return
	}
	d.log.Warn("agent not started", "agent", id, "reason", err)
	state := control.StateFailed
	if c := Code(err); c == exitRefused || c == exitBadSpec {
		state = control.StateRefused
	}
	d.mu.Lock()
	r.state, r.reason = state, err.Error()
	d.mu.Unlock()
}

// room refuses one agent more than limits.maxAgents.
func (d *Daemon) room(id string) error {
	d.mu.Lock()
	most, ids := d.cfg.MaxAgents, d.wanted.list()
	d.mu.Unlock()
	ids = slices.DeleteFunc(ids, func(other string) bool { return other == id })
	if most <= 0 || len(ids) < most {
		return nil // whether they all run need not be asked, one by one
	}
	n := 0
	for _, other := range ids {
		switch d.sup.State(other).State {
		case control.StateStopped, control.StateFailed, control.StateRefused:
		default:
			n++
		}
	}
	if n >= most {
		return &Refusal{Code: 1, Text: fmt.Sprintf("agent %s: %d agents run already, and limits.maxAgents is %d; stop one, or raise it in config.json", id, n, most)}
	}
	return nil
}

// stop wishes an agent stopped and remembers that.
func (d *Daemon) stop(id string) (Pending, error) {
	if _, err := d.load(id); errors.Is(err, agent.ErrNotFound) || errors.As(err, new(*Refusal)) {
		if errors.Is(err, agent.ErrNotFound) {
			d.mu.Lock()
			err = cmp.Or(d.wanted.set(id, false), err) // an agent that comes by this id later is another
			d.mu.Unlock()
		}
		return nil, err
	}
	r := d.locked(id)
	defer r.wish.Unlock()
	d.mu.Lock()
	err := d.wanted.set(id, false)
	r.state, r.reason = "", ""
	d.mu.Unlock()
	p := d.sup.Stop(id)
	if err != nil {
		return p, fmt.Errorf("agent %s is stopped, but starts again with the daemon: %w", id, err)
	}
	return p, nil
}

// attach gives the socket of a running agent, starting it if needed.
func (d *Daemon) attach(ctx context.Context, id string) (string, error) {
	if _, err := d.load(id); errors.Is(err, agent.ErrNotFound) {
		return "", err
	}
	if u := d.sup.State(id); u.State == control.StateRunning {
		return u.Socket, nil
	}
	p, err := d.start(id, false)
	if err != nil {
		return "", err
	}
	if err := p.Wait(ctx); err != nil {
		return "", fmt.Errorf("agent %s did not start: %w", id, err)
	}
	u := d.sup.State(id)
	if u.Socket == "" {
		return "", fmt.Errorf("agent %s started and ended at once: %s; see `agentconnect agent logs %s`", id, u.Reason, id)
	}
	return u.Socket, nil
}

// exec gives a socket that serves exec for the agent: its own supervisor's if it runs,
// else that of a supervisor made for this one command.
func (d *Daemon) exec(ctx context.Context, id string) (string, error) {
	a, err := d.load(id)
	if errors.Is(err, agent.ErrNotFound) {
		return "", err
	}
	if u := d.sup.State(id); u.State == control.StateRunning {
		return u.Socket, nil
	}
	if err != nil {
		return "", err
	}
	d.mu.Lock()
	d.execs++
	name := fmt.Sprintf("exec.%s.%d.sock", id, d.execs) // no agent's: an id has no dots
	d.mu.Unlock()
	socket, err := d.run.Socket(name)
	if err != nil {
		return "", err
	}
	spec, err := d.spec(a, socket, true)
	if err != nil {
		return "", err
	}
	spec.ExecOnly = true
	spec.Policy.DieWithParent = true // its supervisor is a child of ours and has no unit
	if err := d.sup.Exec(ctx, id, spec); err != nil {
		return "", fmt.Errorf("agent %s: %w", id, err)
	}
	return socket, nil
}

// startWanted starts what is to run and does not, each by itself.
func (d *Daemon) startWanted(ctx context.Context, why string) {
	d.mu.Lock()
	ids := d.wanted.list()
	d.mu.Unlock()
	for _, id := range ids {
		if ctx.Err() != nil {
			return
		}
		// Whatever stands in the way is noted in the agent's status; the outcome shows there too.
		if err := d.startIfWanted(id, why); errors.Is(err, agent.ErrNotFound) {
			d.mu.Lock()
			err := d.wanted.set(id, false)
			d.mu.Unlock()
			d.log.Warn("wanted agent is gone", "agent", id, "error", err)
		}
	}
}

// probeAgain runs the probe and, when it passes, starts what was wanted and refused.
func (d *Daemon) probeAgain(ctx context.Context) control.Probe {
	p := d.runProbe(ctx)
	if p.OK {
		d.recover("the probe passed")
	}
	return p
}

// recover starts the wanted agents that were refused before.
func (d *Daemon) recover(why string) {
	d.mu.Lock()
	ids := d.wanted.list()
	d.mu.Unlock()
	if len(ids) == 0 {
		return
	}
	state := d.states(context.Background())
	for _, id := range ids {
		if s := d.agentStatus(id, nil, state(id)); s.State == control.StateRefused {
			_ = d.startIfWanted(id, why) // its outcome shows in the agent's status
		}
	}
}

// fileChanged is the reason of a reload that nobody asked for.
const fileChanged = "a file changed"

// reload reads the configuration anew. One with an error in it changes nothing: the
// old stays in force and status shows the error.
func (d *Daemon) reload(why string) error {
	d.loading.Lock()
	defer d.loading.Unlock()
	cfg, err := d.o.Reload()
	if err == nil && cfg.Root != d.o.Config.Root {
		err = fmt.Errorf("ROOT is now %s; restart the daemon to move there", cfg.Root)
	}
	d.mu.Lock()
	d.configErr = ""
	if err != nil {
		d.configErr = err.Error()
	} else {
		d.cfg = cfg
	}
	d.mu.Unlock()
	if err != nil {
		d.log.Error("configuration not reloaded; the old one stays in force", "why", why, "error", err)
		return err
	}
	d.log.Info("configuration reloaded", "why", why)
	d.store.LookAgain()
	entries, _, err := cfg.Agents(d.store)
	if err != nil {
		return err
	}
	d.enforce(entries)
	d.adjustAll(entries)
	if d.life != nil {
		d.connect(d.life, why != fileChanged)
	}
	d.remote.localChanged()
	d.recover("the configuration changed")
	return nil
}

// enforce stops what the configuration no longer allows, and forgets agents that are gone. What
// runs counts as well as what its file says now.
func (d *Daemon) enforce(entries []config.AgentEntry) {
	b := d.builder()
	there := map[string]bool{}
	for _, e := range entries {
		there[e.ID] = true
		// Judged first: to ask for the state of each takes longer than all else of a reload.
		err := e.Err
		if e.Agent != nil {
			err = b.Judge(e.Agent)
		}
		old := d.judgeInForce(b, e.ID)
		if old == nil && (err == nil || e.Agent == nil) || !active(d.sup.State(e.ID).State) {
			continue
		}
		r := d.locked(e.ID)
		d.mu.Lock()
		wanted := d.wanted.ids[e.ID]
		d.mu.Unlock()
		d.log.Warn("stopping an agent that is no longer allowed", "agent", e.ID, "reason", cmp.Or(old, err))
		if err == nil && wanted { // what its file says now is allowed
			_, err = d.startLocked(e.ID, r, true)
		}
		if err != nil || !wanted {
			d.sup.Stop(e.ID)
			d.refuse(e.ID, r, cmp.Or(err, old))
		}
		r.wish.Unlock()
	}
	d.mu.Lock()
	var gone []string
	for id := range d.records {
		if !there[id] {
			gone = append(gone, id)
		}
	}
	grace := d.cfg.StopGrace + d.cfg.KillGrace + endMargin
	d.mu.Unlock()
	for _, id := range gone {
		d.forget(id, grace)
	}
}

// judgeInForce says why an agent may not go on as it was started, as far as that is known.
func (d *Daemon) judgeInForce(b *Builder, id string) error {
	d.mu.Lock()
	var a *agent.Agent
	var mode sandbox.NetworkMode
	var servers map[string]sandbox.NetworkMode
	if r := d.records[id]; r != nil {
		a, mode, servers = r.inForce, r.network, r.servers // the map is replaced whole
	}
	d.mu.Unlock()
	if a == nil {
		return nil
	}
	if err := b.Judge(a); err != nil {
		return err
	}
	// Between modes whose connections are judged it changes live.
	if most := b.Config.MaxNetwork(mode); mode != "" && most != mode && !(most.Gated() && mode.Gated()) {
		return &Refusal{Code: exitBadSpec, Text: fmt.Sprintf("agent %s: it runs in network mode %s, and the policy allows %s at most", id, mode, most)}
	}
	for name, mode := range servers {
		if most := b.Config.MaxNetwork(mode); most != mode {
			return &Refusal{Code: exitBadSpec, Text: fmt.Sprintf("agent %s: MCP server %s runs in network mode %s, and the policy allows %s at most", id, name, mode, most)}
		}
	}
	return nil
}

func (d *Daemon) forget(id string, grace time.Duration) {
	r := d.locked(id)
	defer r.wish.Unlock()
	// Added again meanwhile: it stays.
	if _, err := d.load(id); !errors.Is(err, agent.ErrNotFound) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if err := d.sup.Forget(ctx, id); err != nil {
		d.log.Error("removed agent did not stop", "agent", id, "error", err)
		return
	}
	d.lines.drop(id)
	d.findings.Forget(audit.Path(d.config().Root, id))
	d.mu.Lock()
	err := d.wanted.set(id, false)
	delete(d.records, id)
	d.mu.Unlock()
	d.log.Info("agent removed", "agent", id, "error", err)
}

func active(state string) bool {
	switch state {
	case control.StateStarting, control.StateRunning, control.StateStopping, control.StateBackoff:
		return true
	}
	return false
}

// changed hears of every state of every agent.
func (d *Daemon) changed(id string, u Unit) {
	d.stir()
	d.log.Debug("agent", "agent", id, "state", u.State, "pid", u.PID, "reason", u.Reason, "line", u.Line)
}

// agentStatus is what is known of one agent, which is in state u, without asking its supervisor.
// e may be nil.
func (d *Daemon) agentStatus(id string, e *config.AgentEntry, u Unit) control.AgentStatus {
	s := control.AgentStatus{ID: id, State: u.State, Reason: u.Reason, Line: u.Line, PID: u.PID, Since: u.Since, Restarts: u.Restarts, Socket: u.Socket}
	if s.State == "" {
		s.State = control.StateStopped
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.records[id]
	if r != nil && r.state != "" && !active(u.State) {
		s.State, s.Reason = r.state, r.reason
	}
	var a *agent.Agent
	switch {
	case e != nil && e.Err != nil:
		if active(s.State) {
			s.Notes = append(s.Notes, "its configuration cannot be used: "+e.Err.Error())
		} else {
			s.State, s.Reason = control.StateRefused, e.Err.Error()
		}
		if r != nil {
			a = r.inForce
		}
	case e != nil:
		a = e.Agent
		if r != nil && r.inForce != nil && active(s.State) {
			if text, err := a.Encode(); err == nil && string(text) != r.text {
				s.Notes = append(s.Notes, fmt.Sprintf("its configuration changed since it started; run `agentconnect agent restart %s`", id))
				s.Changed = true
				a = r.inForce // what runs
			}
		}
	}
	if a != nil {
		b := &Builder{Config: d.cfg}
		s.Runtime, s.Sandboxed, s.Network = a.Runtime, a.Sandboxed(), string(b.Network(a))
		if s.Runtime == "" {
			s.Runtime = a.Command
		}
		if r != nil && r.network != "" && active(u.State) && string(r.network) != s.Network {
			if !s.Changed {
				s.Notes = append(s.Notes, fmt.Sprintf("network mode %s holds for it since it started; run `agentconnect agent restart %s`", s.Network, id))
			}
			s.Network, s.Changed = string(r.network), true
		}
		s.Workspace = d.store.WorkspacePath(a)
		s.GitSeals, s.Git = b.GitSeals(a), Git(d.store, a)
		if s.Findings = d.findings.Findings(audit.Path(d.cfg.Root, id)); s.Findings > 0 {
			s.Notes = append(s.Notes, fmt.Sprintf("%d findings in files that git and other programs of the host trust; see `agentconnect audit %s`", s.Findings, id))
		}
		if a.Limits != (agent.Limits{}) && d.sup.Name() == "direct" {
			s.Notes = append(s.Notes, "its limits are not enforced: direct supervision has no control groups")
		}
		if !s.Sandboxed {
			s.Notes = append(s.Notes, "no sandbox: it can do whatever you can")
		} else if s.Network == string(sandbox.NetworkHost) {
			s.Notes = append(s.Notes, "network mode host: it reaches everything that this machine reaches, its own services included")
		}
	}
	return s
}

// status is the whole picture. With ask, running supervisors are asked for theirs.
func (d *Daemon) status(ctx context.Context, ask bool) *control.Status {
	d.mu.Lock()
	cfg, probe := d.cfg, d.probe
	s := &control.Status{
		State: control.StateRunning, Version: d.o.Build, PID: os.Getpid(), Since: d.since, Root: cfg.Root,
		Supervisor: d.sup.Name(), SupervisorNote: d.o.SupervisorNote, RequireSandbox: cfg.RequireSandbox,
		Probe: probe, ConfigError: d.configErr, Warnings: slices.Concat(cfg.Warnings, d.warnings),
		Agents: []control.AgentStatus{},
	}
	d.mu.Unlock()
	entries, warnings, err := cfg.Agents(d.store)
	s.Warnings = append(s.Warnings, warnings...)
	if err != nil {
		s.Warnings = append(s.Warnings, err.Error())
	}
	state := d.states(ctx)
	for i := range entries {
		s.Agents = append(s.Agents, d.agentStatus(entries[i].ID, &entries[i], state(entries[i].ID)))
	}
	d.remote.addTo(s, state)
	if ask {
		s.Usage = d.ask(ctx, s.Agents)
		d.lines.keep(s.Agents)
	}
	s.Log, _ = Tail(DaemonLog(cfg.Root), logLines)
	return s
}

// ask fills in what only the supervisors, the manager and the kernel know, and returns
// what all agents use together. A supervisor that does not answer in time leaves a note,
// and keeps neither the others nor whoever asks waiting for longer.
func (d *Daemon) ask(ctx context.Context, agents []control.AgentStatus) *accounting.Usage {
	ctx, cancel := context.WithTimeout(ctx, askAllTimeout)
	defer cancel()
	var all *accounting.Usage
	var once sync.Once
	together := func(read func() *accounting.Usage) { once.Do(func() { all = read() }) }
	turns := make(chan struct{}, askedAtOnce)
	var wg sync.WaitGroup
	for i := range agents {
		a := &agents[i]
		if a.Socket == "" {
			continue
		}
		turns <- struct{}{} // each is given back in a moment
		wg.Go(func() {
			back := sync.OnceFunc(func() { <-turns })
			defer back()
			d.askOne(ctx, a, together, back)
		})
	}
	wg.Wait()
	return all
}

// askOne asks for one agent that runs. It calls slow when an answer is a while in coming.
func (d *Daemon) askOne(ctx context.Context, a *control.AgentStatus, all func(read func() *accounting.Usage), slow func()) {
	err := errEnded
	if d.account(a, all) {
		d.dropIns(ctx, a)
		if a.Usage != nil && a.Usage.Frozen {
			a.Notes = append(a.Notes, fmt.Sprintf("frozen: it goes on after `systemctl --user thaw '%s'`", units.SliceName(a.ID)))
			return // its supervisor, too
		}
		var st *wire.Status
		if st, err = d.askSupervisor(ctx, a, slow); err == nil {
			a.Clients, a.Egress = st.Clients, st.Egress
			a.GitSeals = st.GitSeals
			a.Notes = append(a.Notes, st.Notes...)
			if st.Line != "" {
				a.Line = printable(st.Line)
			}
			if st.Build != d.o.Build {
				a.Build = st.Build
			}
			return
		}
	}
	if u := d.sup.State(a.ID); u.State != control.StateRunning || u.PID != a.PID {
		// It ended while we asked.
		a.State, a.Reason, a.Line, a.PID, a.Since, a.Restarts, a.Socket = cmp.Or(u.State, control.StateStopped), u.Reason, u.Line, u.PID, u.Since, u.Restarts, u.Socket
		a.Usage, a.Unmet, a.DropIns = nil, nil, nil
		return
	}
	if why, ok := errors.AsType[haltedError](err); ok {
		a.Notes = append(a.Notes, string(why))
		return
	}
	a.Notes = append(a.Notes, "its supervisor does not answer: "+err.Error())
}

var errEnded = errors.New("it has ended")

// haltedError says what keeps a supervisor from answering.
type haltedError string

func (e haltedError) Error() string { return string(e) }

// askSupervisor asks one. What cannot answer is not waited for.
func (d *Daemon) askSupervisor(ctx context.Context, a *control.AgentStatus, slow func()) (*wire.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	ctx, give := context.WithCancelCause(ctx)
	defer give(nil)
	id, pid := a.ID, a.PID
	late := time.AfterFunc(askPromptly, func() {
		slow()
		if why := halted(id, pid); why != "" {
			give(haltedError(why))
		}
	})
	defer late.Stop()
	st, err := d.lines.status(ctx, a.ID, a.Socket, a.PID)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("not within %v", askTimeout)
		}
	}
	return st, err
}

func (d *Daemon) watched() []string {
	d.mu.Lock()
	root := d.cfg.Root
	d.mu.Unlock()
	dirs := []string{root, filepath.Join(root, "agents")}
	entries, err := d.store.List()
	if err == nil {
		for _, e := range entries {
			dirs = append(dirs, d.store.Dirs(e.ID).Agent)
		}
	}
	for _, dir := range d.o.Watch {
		if st, err := os.Stat(dir); err == nil && st.IsDir() {
			dirs = append(dirs, dir)
		}
	}
	return slices.DeleteFunc(dirs, func(s string) bool { return s == "" })
}

// listenControl listens on path, 0600, in a directory that is ours alone. The caller
// holds the lock, so a socket that lies there is left over.
func listenControl(path string, uid int, log *slog.Logger) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, cannotWrite(path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		return nil, cannotWrite(path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, cannotWrite(path, err)
	}
	return &peerListener{UnixListener: l, uid: uid, log: log}, nil
}
