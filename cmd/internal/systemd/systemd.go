// Package systemd keeps supervisors running as units of the user manager: the daemon says
// what it wishes, systemd keeps the processes, their limits, restarts and order. There is
// no table of processes and no restart loop here. It builds no spec and judges nothing.
package systemd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/scope"
	"agentconnect.md/sandbox/cmd/internal/supervisor"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/dbusctl"
	"agentconnect.md/sandbox/units"
)

// killed is the ExecMainCode of what a signal ended: CLD_KILLED of sigaction(2).
const killed = 2

// askTime bounds one question about a unit's state.
const askTime = 5 * time.Second

// Options of a Supervision.
type Options struct {
	Conn *dbusctl.Conn
	// Supervisor is the path of agentconnect-supervisor.
	Supervisor string
	// Socket gives the path of an agent's socket, SpecSocket where supervisors ask the
	// daemon for their spec.
	Socket     func(id string) (string, error)
	SpecSocket string
	// Stopped and Started hear of an agent that a person stopped, or started, by the manager's
	// own means. May be nil.
	Stopped, Started func(id string)
	// Direct runs the supervisors of single commands in agents that do not run.
	Direct daemon.Supervision
	Log    *slog.Logger
}

// Supervision is a daemon.Supervision by the user manager.
type Supervision struct {
	o Options

	mu     sync.Mutex
	agents map[string]*wishes
	wg     sync.WaitGroup
	life   context.Context
	cancel context.CancelFunc
}

var _ daemon.Supervision = (*Supervision)(nil)

// wishes orders what is wished of one agent.
type wishes struct {
	last    *wish
	run     bool               // it is to run: by the last wish, or by a person's hand since
	unwatch context.CancelFunc // nil: it is not watched
	// The last wish was a start, and its job was canceled: by a person's stop, or by a restart that
	// is still to come. Which of them, tells a look once no job is left.
	canceled bool
	// The drop-ins that the units had when they were loaded.
	loaded  loading
	dropIns []string
}

// wish is one of them.
type wish struct {
	run    bool
	cancel context.CancelFunc // ends its waiting
	done   chan struct{}      // closed when it is carried out, or given up
	err    error              // after done
	next   *wish              // what took its place; under Supervision.mu
}

func (w *wish) over() bool {
	select {
	case <-w.done:
		return true
	default:
		return false
	}
}

// New returns a supervision over a connection, which stays the caller's.
func New(o Options) *Supervision {
	s := &Supervision{o: o, agents: map[string]*wishes{}}
	s.life, s.cancel = context.WithCancel(context.Background())
	return s
}

// Name is what status calls it.
func (s *Supervision) Name() string { return "systemd" }

// wish carries f out after the wishes before it, whose waiting it ends: their jobs are
// replaced by what f asks of the manager. With join, a wish under way that the agent runs
// serves as well.
func (s *Supervision) wish(id string, run, join bool, f func(ctx context.Context) error) daemon.Pending {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.agents[id]
	if w == nil {
		w = &wishes{}
		s.agents[id] = w
	}
	if w.unwatch == nil {
		s.follow(id, w)
	}
	before := w.last
	if join && before != nil && before.run && !before.over() {
		return s.outcome(before)
	}
	ctx, cancel := context.WithCancel(s.life)
	now := &wish{run: run, cancel: cancel, done: make(chan struct{})}
	w.last, w.run, w.canceled = now, run, false
	if before != nil {
		before.next = now
		before.cancel()
	}
	s.wg.Go(func() {
		defer cancel()
		if before != nil {
			<-before.done
		}
		now.err = daemon.ErrSuperseded
		if ctx.Err() == nil {
			if err := f(ctx); err == nil || ctx.Err() == nil {
				now.err = err
			}
		}
		close(now.done)
		// While it was under way, a person's stop could not be told from what it brought about.
		if ctx.Err() == nil && errors.Is(now.err, daemon.ErrSuperseded) {
			s.mu.Lock()
			w.canceled = w.last == now
			s.mu.Unlock()
			s.hear(id)
		}
	})
	return s.outcome(now)
}

// outcome delivers how a wish ended; one to run that gave way to another to run ends as that.
func (s *Supervision) outcome(w *wish) daemon.Pending {
	out := make(chan error, 1)
	s.wg.Go(func() {
		for {
			<-w.done
			s.mu.Lock()
			next := w.next
			s.mu.Unlock()
			if !errors.Is(w.err, daemon.ErrSuperseded) || !w.run || next == nil || !next.run {
				out <- w.err
				return
			}
			w = next
		}
	})
	return out
}

// agent describes the units of an agent.
func (s *Supervision) agent(id string, spec *wire.Spec) units.Agent {
	a := units.Agent{
		ID: id, Sandboxed: spec.Sandboxed,
		Supervisor: units.Command{Path: s.o.Supervisor, Args: []string{"agentconnect-supervisor", id, s.o.SpecSocket}},
	}
	if spec.Sandboxed && spec.Policy.Network != "" {
		// So that it starts the launcher while we make the spec anew. What counts is the spec's.
		a.Supervisor.Args = append(a.Supervisor.Args, string(spec.Policy.Network))
	}
	if spec.Limits != nil {
		a.Runtime = scope.Limits(*spec.Limits)
	}
	return a
}

// Start wishes the agent to run. One that runs stays as it is.
func (s *Supervision) Start(id string, spec *wire.Spec) daemon.Pending {
	return s.wish(id, true, true, func(ctx context.Context) error {
		switch st := s.state(ctx, id); {
		case st.err != nil:
			return fmt.Errorf("agent %s: %w; start it again when `systemctl --user` answers", id, st.err)
		case st.State == control.StateRunning:
			return nil
		case st.State == control.StateStarting:
			return s.started(ctx, id, s.o.Conn.Start(ctx, units.ServiceName(id), dbusctl.Replace))
		}
		return s.create(ctx, id, spec)
	})
}

// Prepare makes the units of an agent that the probe keeps from running, so that the manager
// knows it: its start needs the probe's unit, and fails with that. One that the manager
// knows already stays as it is.
func (s *Supervision) Prepare(id string) {
	if s.State(id).State != "" {
		return
	}
	s.wish(id, true, true, func(ctx context.Context) error {
		return s.create(ctx, id, &wire.Spec{Agent: id, Sandboxed: true})
	})
}

// Restart wishes a fresh start, with units made anew.
func (s *Supervision) Restart(id string, spec *wire.Spec) daemon.Pending {
	return s.wish(id, true, false, func(ctx context.Context) error { return s.create(ctx, id, spec) })
}

// create makes the agent's units and starts the service. Units that are there are
// dropped first, the slice before the service that it keeps loaded.
func (s *Supervision) create(ctx context.Context, id string, spec *wire.Spec) error {
	if err := s.drop(ctx, id); err != nil {
		return err
	}
	a := s.agent(id, spec)
	version := s.o.Conn.Version()
	service, slice := a.Service(version), a.Slice(version)
	// The service is made with the slice that wants it: stopped, it stays loaded.
	return s.started(ctx, id, s.o.Conn.StartTransient(ctx, service, dbusctl.Replace, slice))
}

// drop stops what runs and has the manager forget the units. The slice goes first and takes
// the service along: a service that lies stopped in its slice means that a person stopped
// it, and a daemon that dies here must not leave that picture to the next.
func (s *Supervision) drop(ctx context.Context, id string) error {
	var there []string
	for _, unit := range []string{units.SliceName(id), units.ServiceName(id), units.ScopeName(id)} {
		// To stop one that is not loaded has the manager look for its file, and complain.
		_, err := s.o.Conn.Properties(ctx, unit)
		if errors.Is(err, dbusctl.ErrNoSuchUnit) {
			continue
		}
		if err == nil {
			there = append(there, unit)
			err = s.end(ctx, id, unit)
		}
		if err == nil || errors.Is(err, dbusctl.ErrNoSuchUnit) {
			// A failed service stays loaded and keeps its slice, and the slice keeps the service.
			err = s.o.Conn.ResetFailed(ctx, unit)
		}
		if err != nil && !errors.Is(err, dbusctl.ErrNoSuchUnit) {
			return fmt.Errorf("agent %s: its old units: %w", id, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, askTime) // they are stopped: it takes a moment
	defer cancel()
	for _, unit := range there {
		if _, err := s.o.Conn.Properties(ctx, unit); errors.Is(err, dbusctl.ErrNoSuchUnit) {
			continue
		}
		if err := s.o.Conn.Discard(ctx, unit); err != nil {
			return fmt.Errorf("agent %s: its old units: %w", id, err)
		}
	}
	return nil
}

// end stops a unit of an agent, also a frozen one: newer managers (257) refuse that until it is
// thawed, where older ones kill it after a while.
func (s *Supervision) end(ctx context.Context, id, unit string) error {
	err := s.o.Conn.Stop(ctx, unit, dbusctl.Replace)
	if !errors.Is(err, dbusctl.ErrRefused) {
		return err
	}
	for _, frozen := range []string{units.SliceName(id), units.ServiceName(id), units.ScopeName(id)} {
		_ = s.o.Conn.Thaw(ctx, frozen) // which of them it was is not known; the stop tells
	}
	return s.o.Conn.Stop(ctx, unit, dbusctl.Replace)
}

// started turns a start job's result into the daemon's terms.
func (s *Supervision) started(ctx context.Context, id string, err error) error {
	var job *dbusctl.JobError
	if err == nil || !errors.As(err, &job) {
		return err
	}
	st := s.state(ctx, id)
	reason := st.Reason
	if reason == "" {
		reason = job.Error()
	}
	switch {
	case errors.Is(job.Result, dbusctl.ErrDependency):
		return &daemon.Refusal{Code: 69, Text: fmt.Sprintf("agent %s: the sandbox is unavailable: %s; run `agentconnect probe`", id, job.Cause)}
	case errors.Is(job.Result, dbusctl.ErrCanceled):
		return daemon.ErrSuperseded
	case st.code == 69 || st.code == 78:
		return &daemon.Refusal{Code: st.code, Text: "agent " + id + ": " + reason}
	}
	return &daemon.EndError{Code: st.code, Reason: reason}
}

// Stop wishes the agent stopped.
func (s *Supervision) Stop(id string) daemon.Pending {
	return s.wish(id, false, false, func(ctx context.Context) error {
		err := s.end(ctx, id, units.ServiceName(id))
		if errors.Is(err, dbusctl.ErrNoSuchUnit) {
			return nil
		}
		if rerr := s.o.Conn.ResetFailed(ctx, units.ServiceName(id)); rerr != nil && !errors.Is(rerr, dbusctl.ErrNoSuchUnit) && err == nil {
			err = rerr
		}
		return err
	})
}

// unit is a daemon.Unit with the supervisor's exit code, or why the manager did not say more.
type unit struct {
	daemon.Unit
	code int
	err  error
}

// State says how the agent is now, asking the manager.
func (s *Supervision) State(id string) daemon.Unit {
	ctx, cancel := context.WithTimeout(s.life, askTime)
	defer cancel()
	return s.state(ctx, id).Unit
}

func (s *Supervision) state(ctx context.Context, id string) unit {
	p, err := s.o.Conn.Properties(ctx, units.ServiceName(id))
	switch {
	case errors.Is(err, dbusctl.ErrNoSuchUnit):
		return s.given(id, unit{})
	case err != nil:
		err = fmt.Errorf("the user manager does not answer: %w", err)
		return unit{Unit: daemon.Unit{State: control.StateFailed, Reason: err.Error()}, err: err}
	}
	return s.unit(id, p)
}

// given is the state u of an agent that does not run, unless a start failed before the manager had
// a unit that says so: then it is that.
func (s *Supervision) given(id string, u unit) unit {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.agents[id]
	if w == nil || !w.run || !w.last.run || !w.last.over() {
		return u
	}
	err := w.last.err
	if err == nil || errors.Is(err, daemon.ErrSuperseded) || errors.As(err, new(*daemon.EndError)) || errors.As(err, new(*daemon.Refusal)) {
		return u
	}
	return unit{Unit: daemon.Unit{State: control.StateFailed, Reason: err.Error()}}
}

// unit is an agent's state by the properties of its service.
func (s *Supervision) unit(id string, p dbusctl.Properties) unit {
	u := fromProperties(p)
	if u.State == control.StateStopped {
		u = s.given(id, u)
	}
	if u.State == control.StateRunning {
		var err error
		if u.Socket, err = s.o.Socket(id); err != nil {
			u.Reason = err.Error()
		}
	}
	return u
}

// asked is how many questions are put to the manager at a time: it answers one by one.
const asked = 16

// States says how all agents are, by one question for all and one for each of which that tells
// more than its events did.
func (s *Supervision) States(ctx context.Context) (map[string]daemon.Unit, error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	list, err := s.o.Conn.List(ctx, "agent@*.service")
	if err != nil {
		return nil, fmt.Errorf("the user manager does not answer: %w", err)
	}
	out := make(map[string]daemon.Unit, len(list))
	var wg sync.WaitGroup
	var mu sync.Mutex // of out
	turns := make(chan struct{}, asked)
	for _, u := range list {
		n, ok := units.ParseName(u.Name)
		if !ok || n.Kind != units.Service || u.Load == "not-found" && u.Active == "inactive" {
			continue
		}
		// The list counts: a manager with much to say holds back its events.
		if p, ok := s.o.Conn.Known(u.Name); ok && says(p, "ActiveState", u.Active) && says(p, "SubState", u.Sub) {
			st := s.unit(n.ID, p).Unit
			mu.Lock()
			out[n.ID] = st
			mu.Unlock()
			continue
		}
		turns <- struct{}{}
		wg.Go(func() {
			st := s.state(ctx, n.ID).Unit
			mu.Lock()
			out[n.ID] = st
			mu.Unlock()
			<-turns
		})
	}
	wg.Wait()
	for _, id := range s.missing(out) {
		if u := s.given(id, unit{}).Unit; u.State != "" {
			out[id] = u
		}
	}
	return out, nil
}

// missing are the agents that the manager has no unit of.
func (s *Supervision) missing(units map[string]daemon.Unit) (ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.agents {
		if _, ok := units[id]; !ok {
			ids = append(ids, id)
		}
	}
	return ids
}

func says(p dbusctl.Properties, name, want string) bool {
	v, ok := p.String(name)
	return ok && v == want
}

// fromProperties reads a service's state.
func fromProperties(p dbusctl.Properties) unit {
	active, _ := p.String("ActiveState")
	sub, _ := p.String("SubState")
	line, _ := p.String("StatusText")
	code, _ := p.Int32("ExecMainStatus")
	restarts, _ := p.Uint32("NRestarts")
	pid, _ := p.Uint32("MainPID")
	u := unit{code: int(code), Unit: daemon.Unit{Line: line, Restarts: int(restarts), PID: int(pid)}}
	switch active {
	case "active", "reloading":
		u.State = control.StateRunning
		if at, ok := p.Uint64("ActiveEnterTimestamp"); ok {
			u.Since = time.UnixMicro(int64(at)) //nolint:gosec // µs since 1970
		}
	case "activating":
		u.State = control.StateStarting
		if sub == "auto-restart" || sub == "auto-restart-queued" {
			u.State, u.Reason, u.Line = control.StateBackoff, reason(p, line), ""
		}
	case "deactivating":
		u.State = control.StateStopping
	case "failed":
		u.State, u.Reason, u.Line = control.StateFailed, reason(p, line), ""
		if code == 69 || code == 78 {
			u.State = control.StateRefused
		}
	default:
		u.State, u.Line = control.StateStopped, ""
		if line != "" && line != "stopped" {
			u.Reason = line
		}
		if load, _ := p.String("LoadState"); load == "not-found" {
			return unit{}
		}
	}
	return u
}

// reason is why a service failed: the supervisor's last words where it said some.
func reason(p dbusctl.Properties, line string) string {
	if line == "" {
		line = dbusctl.Cause(p)
	}
	active, _ := p.String("ActiveState")
	result, _ := p.String("Result")
	restarts, _ := p.Uint32("NRestarts")
	code, _ := p.Int32("ExecMainStatus")
	// systemd mostly keeps the result of the last end instead of "start-limit-hit".
	if active == "failed" && (result == "start-limit-hit" || restarts > 0 && code != 69 && code != 75 && code != 78) {
		return "it ended too often and is not started again by itself: " + line
	}
	return line
}

// Exec starts a supervisor for one command in an agent that does not run. It is a child of
// the daemon; what it starts has a scope of its own.
func (s *Supervision) Exec(ctx context.Context, id string, spec *wire.Spec) error {
	return s.o.Direct.Exec(ctx, id, spec)
}

// Forget stops the agent and drops its units.
func (s *Supervision) Forget(ctx context.Context, id string) error {
	if err := s.o.Direct.Forget(ctx, id); err != nil {
		return err
	}
	if err := s.wish(id, false, false, func(ctx context.Context) error { return s.drop(ctx, id) }).Wait(ctx); err != nil {
		return err
	}
	s.tidy(id, dbusctl.Change{Gone: true})
	s.mu.Lock()
	defer s.mu.Unlock()
	// Unless it was added again meanwhile.
	if w := s.agents[id]; w != nil && w.last.over() && !w.run {
		w.unwatch()
		delete(s.agents, id)
	}
	return nil
}

// Close lets go. Agents are units of their own and go on.
func (s *Supervision) Close(ctx context.Context) error {
	err := s.o.Direct.Close(ctx)
	s.cancel()
	s.wg.Wait()
	return err
}

// Adopt takes over the agents whose service runs, as after a restart of the daemon, and
// names them and the others. Those that a person stopped meanwhile it reports as stopped.
func (s *Supervision) Adopt(ctx context.Context) (running, stopped []string, err error) {
	list, err := s.o.Conn.List(ctx, "agent@*.service")
	if err != nil {
		return nil, nil, err
	}
	for _, u := range list {
		n, ok := units.ParseName(u.Name)
		if !ok || n.Kind != units.Service || u.Load == "not-found" {
			continue
		}
		run := u.Active != "inactive" && u.Active != "failed"
		s.found(n.ID, run)
		if run {
			running = append(running, n.ID)
			continue
		}
		stopped = append(stopped, n.ID)
		if s.o.Stopped != nil && s.leftStopped(ctx, n.ID) {
			s.o.Stopped(n.ID)
		}
	}
	return running, stopped, nil
}

// found watches an agent from now on, as it is, unless somebody wished something of it
// already.
func (s *Supervision) found(id string, run bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.agents[id] != nil {
		return
	}
	done := make(chan struct{})
	close(done)
	s.agents[id] = &wishes{last: &wish{run: run, cancel: func() {}, done: done}, run: run}
	s.follow(id, s.agents[id])
}

// leftStopped reports whether an agent was stopped and its units are in place: a person did
// that. At the end of a session, and when we make the units anew, they go away.
func (s *Supervision) leftStopped(ctx context.Context, id string) bool {
	p, err := s.o.Conn.Properties(ctx, units.ServiceName(id))
	if err != nil {
		return false
	}
	if !s.stopped(ctx, p) {
		return false
	}
	active, err := s.o.Conn.Active(ctx, units.SliceName(id))
	return err == nil && active == "active"
}

// follow watches an agent until it is forgotten; s.mu is held.
func (s *Supervision) follow(id string, w *wishes) {
	ctx, cancel := context.WithCancel(s.life)
	w.unwatch = cancel
	s.wg.Go(func() {
		defer cancel()
		s.watch(ctx, id)
		s.mu.Lock()
		defer s.mu.Unlock()
		if ctx.Err() == nil {
			w.unwatch = nil // the next wish tries again
		}
	})
}

// watch learns when a person stops the agent by the manager's own means.
func (s *Supervision) watch(ctx context.Context, id string) {
	changes, err := s.o.Conn.Watch(ctx, units.ServiceName(id))
	if err != nil && ctx.Err() != nil {
		return
	}
	if err != nil {
		s.o.Log.Warn("stops by hand are not noticed", "agent", id, "error", err)
		return
	}
	for change := range changes {
		s.tidy(id, change)
		if !onTheWay(change) {
			s.hear(id)
		}
	}
}

// hear takes over what a person did to the agent. A stop counts here after it does elsewhere: a
// start that comes in between is heard of when the agent runs.
func (s *Supervision) hear(id string) {
	switch s.byHand(id) {
	case control.StateStopped:
		if s.o.Stopped != nil {
			s.o.Stopped(id)
		}
		s.wanted(id, false)
	case control.StateRunning:
		s.wanted(id, true)
		if s.o.Started != nil {
			s.o.Started(id)
		}
	}
}

// Asked says that the agent's supervisor asked for its spec: somebody wants it to run, and a stop
// from here on is a later word.
func (s *Supervision) Asked(id string) { s.wanted(id, true) }

// tidy takes away what a supervisor that was killed showed inside, also while systemd waits
// with the next start.
func (s *Supervision) tidy(id string, c dbusctl.Change) {
	active, _ := c.Properties.String("ActiveState")
	sub, _ := c.Properties.String("SubState")
	if !c.Gone && active != "inactive" && active != "failed" && sub != "auto-restart" {
		return
	}
	if socket, err := s.o.Socket(id); err == nil {
		daemon.ClearInside(socket)
	}
}

// onTheWay reports that a change is none of the agent's being started or stopped. Most are
// not, and to ask what is costs the manager more than most of what it does for a start.
func onTheWay(c dbusctl.Change) bool {
	if c.Look || c.Gone || slices.Contains(c.Stale, "ActiveState") {
		return false
	}
	active, _ := c.Properties.String("ActiveState")
	return active == "" || changing(active)
}

// changing: another state follows, and is said.
func changing(active string) bool {
	return active == "activating" || active == "deactivating" || active == "reloading"
}

// byHand says what a person did to the agent: it runs, or it is stopped although the last
// wish, carried out long since, was that it runs; not by its own end, and not with the
// whole session. Empty: neither.
func (s *Supervision) byHand(id string) string {
	run, idle := s.lastWish(id)
	if !idle {
		return ""
	}
	// Most changes are of the status line, of an agent that runs as was wished.
	if p, ok := s.o.Conn.Known(units.ServiceName(id)); ok && run && says(p, "ActiveState", "active") {
		return ""
	}
	ctx, cancel := context.WithTimeout(s.life, askTime)
	defer cancel()
	if now, err := s.o.Conn.Active(ctx, units.ServiceName(id)); err == nil && changing(now) {
		return ""
	}
	p, err := s.o.Conn.Properties(ctx, units.ServiceName(id))
	if err != nil && !errors.Is(err, dbusctl.ErrNoSuchUnit) {
		return ""
	}
	active, _ := p.String("ActiveState")
	stopped := s.canceled(id) && lies(p) && !s.probeFailed(ctx) || s.stopped(ctx, p)
	if load, _ := p.String("LoadState"); err != nil || load == "not-found" {
		// Gone with its slice, or with the slice of all.
		active, stopped = "inactive", true
	}
	switch {
	case active == "active" && !run:
		return control.StateRunning
	case !stopped || !run:
		return ""
	}
	// At logout and shutdown systemd stops everything; what was wanted comes back then.
	for _, unit := range []string{"shutdown.target", "exit.target"} {
		if p, err := s.o.Conn.Properties(ctx, unit); err == nil {
			if state, _ := p.String("ActiveState"); state == "active" || state == "activating" {
				return ""
			}
		}
	}
	if down, err := s.o.Conn.Stopping(ctx); err != nil || down {
		return ""
	}
	if run, idle = s.lastWish(id); !run || !idle {
		return ""
	}
	// All that took a while, in which it may have been started again, as by a restart.
	if p, err := s.o.Conn.Properties(ctx, units.ServiceName(id)); err == nil {
		if !says(p, "LoadState", "not-found") && !lies(p) {
			return ""
		}
	}
	return control.StateStopped
}

// lies reports whether a service does not run, and is not about to, as one is whose restart waits
// for the probe.
func lies(p dbusctl.Properties) bool { return says(p, "ActiveState", "inactive") && !p.Job() }

// stopped reports whether a service that lies there was stopped, and did not end by itself.
func (s *Supervision) stopped(ctx context.Context, p dbusctl.Properties) bool {
	if !lies(p) {
		return false
	}
	line, _ := p.String("StatusText")
	code, _ := p.Int32("ExecMainCode")
	status, _ := p.Int32("ExecMainStatus")
	switch {
	case line == "" && code == killed && status == int32(syscall.SIGTERM): // before it could say so
		return true
	case !says(p, "Result", "success") && !s.probeFailed(ctx):
		// It failed, and is not failed: while it waited for its next start somebody stopped it, unless
		// it could not start for the probe.
		return true
	}
	return line == supervisor.StoppedWord
}

// probeFailed reports whether no sandboxed agent can start, as far as the manager says.
func (s *Supervision) probeFailed(ctx context.Context) bool {
	active, err := s.o.Conn.Active(ctx, units.Probe)
	return err != nil && !errors.Is(err, dbusctl.ErrNoSuchUnit) || active == "failed"
}

// lastWish says what was wished last, and whether that is carried out.
func (s *Supervision) lastWish(id string) (run, idle bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.agents[id]
	if w == nil || w.last == nil {
		return false, false
	}
	return w.run, w.last.over()
}

// canceled says whether the last wish's start was canceled, and nothing came of it since.
func (s *Supervision) canceled(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.agents[id]
	return w != nil && w.canceled
}

func (s *Supervision) wanted(id string, run bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.agents[id]; w != nil {
		w.run, w.canceled = run, false
	}
}

// SetLimits changes the limits of a running agent from was (nil: not known) to now. A limit
// that an administrator's drop-in set stays: it is told from ours by its value.
func (s *Supervision) SetLimits(ctx context.Context, id string, was *wire.Limits, now wire.Limits) error {
	name := units.ScopeName(id)
	p, err := s.o.Conn.Properties(ctx, name)
	if errors.Is(err, dbusctl.ErrNoSuchUnit) {
		return nil // it does not run; the next start has them
	}
	if err != nil {
		return err
	}
	dropIns, err := s.o.Conn.DropIns(ctx, name)
	if err != nil {
		return err
	}
	var ours map[string]units.Value
	if was != nil {
		ours = map[string]units.Value{}
		for _, l := range every(*was) {
			ours[l.Name] = l.Value
		}
	}
	var set []units.Property
	for _, l := range every(now) {
		current := units.Infinity // what Uint64 does not take for a number
		if n, ok := p.Uint64(l.Name); ok {
			current = units.Uint64(n)
		}
		theirs := len(foreign(dropIns)) > 0 && (ours == nil || ours[l.Name] != current)
		if current != l.Value && !theirs {
			set = append(set, l)
		}
	}
	if len(set) == 0 {
		return nil
	}
	err = s.o.Conn.SetProperties(ctx, name, set...)
	if errors.Is(err, dbusctl.ErrNoSuchUnit) {
		return nil
	}
	return err
}

// every is each limit with its value: what has none is without limit.
func every(l wire.Limits) []units.Property {
	or := func(v uint64) *uint64 {
		if v == 0 {
			v = uint64(units.Infinity)
		}
		return &v
	}
	out := units.Limits{MemoryMax: or(l.MemoryMax), MemorySwapMax: l.MemorySwapMax, CPUQuota: or(l.CPUQuota), TasksMax: or(l.TasksMax)}
	if out.MemorySwapMax == nil {
		out.MemorySwapMax = or(0)
	}
	return out.Properties()
}

// DropIns are the files by which somebody changes the agent's units. They are read when a unit is
// loaded (the scope's at each start) and when all unit files are read anew; so the manager is
// asked once for each of these.
func (s *Supervision) DropIns(ctx context.Context, id string) ([]string, error) {
	key := loading{epoch: s.o.Conn.Epoch()}
	p, known := s.o.Conn.Known(units.ServiceName(id))
	if known {
		key.pid, _ = p.Uint32("MainPID")
		key.since, _ = p.Uint64("ActiveEnterTimestamp")
		s.mu.Lock()
		w := s.agents[id]
		had := w != nil && w.loaded == key
		var files []string
		if had {
			files = w.dropIns
		}
		s.mu.Unlock()
		if had {
			return files, nil
		}
	}
	files, err := DropIns(ctx, s.o.Conn, id)
	if err != nil || !known {
		return files, err
	}
	s.mu.Lock()
	if w := s.agents[id]; w != nil {
		w.loaded, w.dropIns = key, files
	}
	s.mu.Unlock()
	return files, nil
}

// loading is one time that an agent's units were loaded. The start of the service is told from
// others by its process and time; the manager's epoch tells the rest.
type loading struct {
	epoch, since uint64
	pid          uint32
}

// DropIns are the files by which somebody changes the units of the agent of that id.
func DropIns(ctx context.Context, conn *dbusctl.Conn, id string) ([]string, error) {
	var out []string
	for _, unit := range []string{units.ServiceName(id), units.ScopeName(id), units.SliceName(id)} {
		list, err := conn.DropIns(ctx, unit)
		if err != nil {
			return nil, err
		}
		for _, path := range foreign(list) {
			if !slices.Contains(out, path) {
				out = append(out, path)
			}
		}
	}
	return out, nil
}

// foreign are the drop-ins that are not the manager's own note of what was set live.
func foreign(dropIns []string) []string {
	return slices.DeleteFunc(slices.Clone(dropIns), func(path string) bool { return strings.Contains(path, "/systemd/transient/") })
}
