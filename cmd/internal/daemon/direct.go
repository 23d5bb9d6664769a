package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// DirectOptions of supervision by plain child processes.
type DirectOptions struct {
	Program string   // agentconnect-supervisor
	Dir     string   // for notification sockets: ours alone, 0700
	Env     []string // of the supervisors themselves; no secret of the daemon
	// Renew gives the spec for a start that comes later than the wish for it (a restart
	// after a failure, a start that waited for a stop), or refuses. It is called from
	// the agent's goroutine and must not wait for the supervision.
	Renew func(id string) (*wire.Spec, error)
	// Changed hears of every new state, in order for each agent. It must not block and
	// must not call the supervision.
	Changed func(id string, u Unit)
	// Stderr opens what the supervisor's messages go to.
	Stderr func(id string) io.WriteCloser
	Log    *slog.Logger
	Clock  Clock
	Pace   Pace
}

// Direct runs supervisors as children of this process: no service manager, no
// accounting, and the agents end with the daemon.
type Direct struct {
	o       DirectOptions
	sockets atomic.Uint64 // numbers the notification sockets

	mu     sync.Mutex
	closed bool
	units  map[string]*unit
	execs  map[*child]command
	wg     sync.WaitGroup // one for each unit and exec
}

// command is the supervisor of a single command.
type command struct {
	id   string // of the agent
	spec *wire.Spec
}

// NewDirect returns a supervision that runs nothing yet.
func NewDirect(o DirectOptions) *Direct {
	if o.Clock == nil {
		o.Clock = WallClock{}
	}
	if o.Pace == (Pace{}) {
		o.Pace = DefaultPace()
	}
	return &Direct{o: o, units: map[string]*unit{}, execs: map[*child]command{}}
}

// Name returns "direct".
func (d *Direct) Name() string { return "direct" }

// Start implements Supervision.
func (d *Direct) Start(id string, spec *wire.Spec) Pending {
	return d.wish(id, wish{verb: wishStart, spec: spec})
}

// Stop implements Supervision.
func (d *Direct) Stop(id string) Pending { return d.wish(id, wish{verb: wishStop}) }

// Restart implements Supervision.
func (d *Direct) Restart(id string, spec *wire.Spec) Pending {
	return d.wish(id, wish{verb: wishRestart, spec: spec})
}

// State implements Supervision.
func (d *Direct) State(id string) Unit {
	d.mu.Lock()
	u := d.units[id]
	d.mu.Unlock()
	if u == nil {
		return Unit{}
	}
	return u.state()
}

func (d *Direct) wish(id string, w wish) Pending {
	done := make(chan error, 1)
	w.done = done
	d.mu.Lock()
	defer d.mu.Unlock()
	u := d.units[id]
	switch {
	case d.closed:
		done <- errors.New("the daemon is ending")
	case u == nil && w.verb == wishStop:
		done <- nil
	case u == nil:
		u = newUnit(d, id)
		d.units[id] = u
		d.wg.Go(func() { d.follow(u) })
		u.inbox.put(w)
	default:
		u.inbox.put(w)
	}
	return done
}

// follow runs the unit to its end. A wish that came too late to be heard is answered
// under the lock that wishes come in by, so none is lost.
func (d *Direct) follow(u *unit) {
	u.run()
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.units, u.id)
	for _, w := range u.inbox.take() {
		if w.done != nil {
			w.done <- ErrSuperseded
		}
	}
	close(u.ended)
}

// Forget implements Supervision.
func (d *Direct) Forget(ctx context.Context, id string) error {
	d.mu.Lock()
	u := d.units[id]
	if u != nil {
		u.inbox.put(wish{verb: wishEnd})
	}
	for c, of := range d.execs {
		if of.id == id {
			c.Terminate()
		}
	}
	d.mu.Unlock()
	if u == nil {
		return nil
	}
	select {
	case <-u.ended:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Close implements Supervision. When ctx ends first, the supervisors are killed.
func (d *Direct) Close(ctx context.Context) error {
	d.mu.Lock()
	d.closed = true
	units := make([]*unit, 0, len(d.units))
	for _, u := range d.units {
		u.inbox.put(wish{verb: wishEnd})
		units = append(units, u)
	}
	for c := range d.execs {
		c.Terminate()
	}
	d.mu.Unlock()
	all := make(chan struct{})
	go func() { d.wg.Wait(); close(all) }()
	select {
	case <-all:
		return nil
	case <-ctx.Done():
	}
	d.mu.Lock()
	for _, u := range units {
		u.inbox.put(wish{verb: wishKill})
	}
	for c := range d.execs {
		c.Kill()
	}
	d.mu.Unlock()
	<-all
	return context.Cause(ctx)
}

// Exec implements Supervision.
func (d *Direct) Exec(ctx context.Context, id string, spec *wire.Spec) error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return errors.New("the daemon is ending")
	}
	c := d.spawn(id, spec)
	d.execs[c] = command{id, spec}
	ready := make(chan error, 1)
	d.wg.Go(func() {
		d.followExec(c, spec, ready)
		d.mu.Lock()
		delete(d.execs, c)
		d.mu.Unlock()
	})
	d.mu.Unlock()
	select {
	case err := <-ready:
		return err
	case <-ctx.Done():
		c.Terminate()
		return context.Cause(ctx)
	}
}

// Supervises reports whether a process is a supervisor of the agent that runs here.
func (d *Direct) Supervises(id string, pid int) bool {
	if pid <= 0 {
		return false
	}
	if d.State(id).PID == pid {
		return true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for c, of := range d.execs {
		if of.id == id && c.pid() == pid {
			return true
		}
	}
	return false
}

// commands are the specs of the supervisors of single commands, of those that have not ended.
func (d *Direct) commands() (specs []*wire.Spec) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.execs {
		specs = append(specs, c.spec)
	}
	return specs
}

// followExec reads the events of an exec's supervisor to the end. It kills one that
// does not become ready in time, or was told to stop and did not.
func (d *Direct) followExec(c *child, spec *wire.Spec, ready chan<- error) {
	timeout, release := d.o.Clock.Timer(d.o.Pace.StartTimeout)
	defer func() { release() }()
	up := false
	line := ""
	for {
		select {
		case e, ok := <-c.events:
			if !ok {
				return
			}
			switch {
			case e.Note != nil:
				if e.Note.HasState {
					line = e.Note.Status
				}
				if e.Note.Ready && !up {
					up = true
					release()
					timeout, release = nil, func() {}
					ready <- nil
				}
			case e.End != nil && !up:
				ready <- endError(e.End, line, timeout == nil, d.o.Pace)
			}
		case <-timeout:
			timeout = nil
			c.Kill()
		}
	}
}

func (d *Direct) spawn(id string, spec *wire.Spec) *child {
	return startChild(childStart{
		Program: d.o.Program,
		Spec:    spec,
		Env:     d.o.Env,
		Notify:  filepath.Join(d.o.Dir, "n-"+strconv.FormatUint(d.sockets.Add(1), 10)),
		Stderr:  d.o.Stderr(id),
	})
}

// endError says why a supervisor ended, in its own last words where it left some.
func endError(e *ending, lastWords string, timedOut bool, p Pace) *EndError {
	reason := lastWords
	switch {
	case timedOut:
		reason = fmt.Sprintf("not ready within %v", p.StartTimeout)
		if lastWords != "" {
			reason += " (it said: " + lastWords + ")"
		}
	case reason == "":
		reason = "supervisor: " + e.Text
	case e.Code < 0:
		reason = "supervisor: " + e.Text + " (it last said: " + lastWords + ")"
	}
	return &EndError{Code: e.Code, Reason: reason}
}

// wish is what somebody wants of an agent. done, if any, gets one value.
type wish struct {
	verb wishVerb
	spec *wire.Spec
	done chan<- error
}

type wishVerb int

const (
	wishStart wishVerb = iota
	wishStop
	wishRestart
	wishEnd  // stop, and end the unit's goroutine
	wishKill // the same without grace
)

// inbox is a queue whose put never waits: a wish counts from that moment on.
type inbox struct {
	mu     sync.Mutex
	wishes []wish
	signal chan struct{} // capacity 1
}

func (b *inbox) put(w wish) {
	b.mu.Lock()
	b.wishes = append(b.wishes, w)
	b.mu.Unlock()
	select {
	case b.signal <- struct{}{}:
	default:
	}
}

func (b *inbox) take() []wish {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.wishes
	b.wishes = nil
	return w
}

// unit is one agent. Its goroutine alone changes it; others read the published state.
type unit struct {
	d     *Direct
	id    string
	inbox inbox
	ended chan struct{}

	mu     sync.Mutex
	public Unit

	// Of the goroutine alone:
	now      Unit
	spec     *wire.Spec
	wanted   bool // somebody wants it to run
	leaving  bool // the goroutine ends when the child has
	child    *child
	events   <-chan childEvent
	started  time.Time   // when the child became ready
	timedOut bool        // the child was killed for not becoming ready
	failures []time.Time // recent ones, for the burst
	streak   int         // failures since it last ran well, for the delay
	timer    <-chan time.Time
	release  func()
	starters []chan<- error // wait for ready
	stoppers []chan<- error // wait for the end
}

func newUnit(d *Direct, id string) *unit {
	return &unit{
		d: d, id: id,
		inbox:   inbox{signal: make(chan struct{}, 1)},
		ended:   make(chan struct{}),
		release: func() {},
	}
}

func (u *unit) state() Unit {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.public
}

// run is the unit's goroutine. A timer is armed only while starting, stopping or
// waiting for a restart: an agent that runs, or is stopped, wakes nobody.
func (u *unit) run() {
	defer func() { u.release() }()
	for !u.leaving || u.child != nil {
		select {
		case <-u.inbox.signal:
			for _, w := range u.inbox.take() {
				u.hear(w)
			}
		case e, ok := <-u.events:
			switch {
			case !ok:
				u.events = nil
			case e.PID != 0:
				u.now.PID = e.PID
				u.publish()
			case e.Note != nil:
				u.note(e.Note)
			case e.End != nil:
				u.end(e.End)
			}
		case <-u.timer:
			u.disarm()
			u.timeout()
		}
	}
}

func (u *unit) hear(w wish) {
	switch w.verb {
	case wishStart:
		if u.leaving {
			w.done <- ErrSuperseded
			return
		}
		u.spec = w.spec
		if u.now.State == control.StateRunning {
			w.done <- nil
			return
		}
		u.wanted = true
		u.starters = append(u.starters, w.done)
		if u.child == nil {
			u.forgive()
			u.launch()
		}
	case wishRestart:
		if u.leaving {
			w.done <- ErrSuperseded
			return
		}
		u.spec = w.spec
		u.wanted = true
		u.starters = append(u.starters, w.done)
		u.forgive()
		if u.child == nil {
			u.launch()
		} else {
			u.terminate()
		}
	case wishStop, wishEnd, wishKill:
		u.wanted = false
		u.leaving = u.leaving || w.verb != wishStop
		u.answer(&u.starters, ErrSuperseded)
		if u.child == nil {
			u.disarm()
			if u.now.State == control.StateBackoff {
				u.become(control.StateStopped, "stopped on request")
			}
			if w.done != nil {
				w.done <- nil
			}
			return
		}
		if w.done != nil {
			u.stoppers = append(u.stoppers, w.done)
		}
		u.terminate()
		if w.verb == wishKill {
			u.child.Kill()
		}
	}
}

// forgive drops the record of failures: a person asked.
func (u *unit) forgive() {
	u.failures, u.streak, u.now.Restarts = nil, 0, 0
}

// launch starts a child with the spec in hand.
func (u *unit) launch() {
	u.arm(u.d.o.Pace.StartTimeout)
	u.timedOut = false
	u.now.Line, u.now.Socket, u.now.PID = "", "", 0
	u.become(control.StateStarting, "")
	u.child = u.d.spawn(u.id, u.spec)
	u.events = u.child.events
}

// relaunch starts a child with a spec as things are now, or ends refused.
func (u *unit) relaunch() {
	spec, err := u.d.o.Renew(u.id)
	if err != nil {
		u.wanted = false
		u.become(control.StateRefused, err.Error())
		u.answer(&u.starters, err)
		return
	}
	u.spec = spec
	u.launch()
}

// terminate begins the stop of the child, once.
func (u *unit) terminate() {
	if u.now.State == control.StateStopping {
		return
	}
	u.arm(patience(u.spec) + u.d.o.Pace.StopMargin)
	u.become(control.StateStopping, "")
	u.child.Terminate()
}

func (u *unit) timeout() {
	switch u.now.State {
	case control.StateStarting:
		u.timedOut = true
		u.child.Kill()
	case control.StateStopping:
		u.d.o.Log.Warn("supervisor did not stop in time; killed", "agent", u.id, "pid", u.now.PID)
		u.child.Kill()
	case control.StateBackoff:
		u.now.Restarts++
		u.relaunch()
	}
}

func (u *unit) note(n *notification) {
	if n.HasState {
		u.now.Line = n.Status
	}
	if n.Ready && u.now.State == control.StateStarting {
		u.disarm()
		u.started = u.d.o.Clock.Now()
		u.now.Socket = u.spec.Socket
		u.become(control.StateRunning, "")
		u.answer(&u.starters, nil)
		return
	}
	u.publish()
}

func (u *unit) end(e *ending) {
	was := u.now.State
	u.disarm()
	u.child = nil
	why := endError(e, u.now.Line, u.timedOut, u.d.o.Pace)
	u.d.o.Log.Info("agent ended", "agent", u.id, "was", was, "code", e.Code, "words", why.Reason)
	u.now.PID, u.now.Socket, u.now.Line = 0, "", ""
	if was == control.StateStopping {
		// Who waits for the stop finds the new state when it is told.
		if u.wanted {
			u.relaunch()
		} else {
			u.become(control.StateStopped, why.Reason)
		}
		u.answer(&u.stoppers, nil)
		return
	}
	// From here on the end was the child's own doing.
	switch {
	case e.Code == 0:
		u.wanted = false
		u.become(control.StateStopped, why.Reason)
	case e.Code == exitRefused:
		u.wanted = false
		u.become(control.StateRefused, why.Reason)
	case e.Code == exitBadSpec:
		u.wanted = false
		u.become(control.StateFailed, why.Reason)
	default:
		u.fail(was, why.Reason)
	}
	u.answer(&u.starters, why)
}

// fail counts a failure and arms the restart, or gives up.
func (u *unit) fail(was, reason string) {
	p, now := u.d.o.Pace, u.d.o.Clock.Now()
	if was == control.StateRunning && now.Sub(u.started) >= p.Healthy {
		u.failures, u.streak = nil, 0
	}
	u.streak++
	u.failures = append(slices.DeleteFunc(u.failures, func(t time.Time) bool { return now.Sub(t) > p.Window }), now)
	if len(u.failures) >= p.Burst {
		u.wanted = false
		u.become(control.StateFailed, fmt.Sprintf("failed %d times within %v, given up; last: %s; see `agentconnect agent logs %s`, then `agentconnect agent start %s`",
			len(u.failures), p.Window, strings.TrimSuffix(reason, "."), u.id, u.id))
		return
	}
	u.arm(p.delay(u.streak))
	u.become(control.StateBackoff, reason)
}

// delay is the wait before the restart after the n-th failure in a row, n from 1.
func (p Pace) delay(n int) time.Duration {
	d := p.FirstDelay
	for ; n > 1 && d < p.MaxDelay; n-- {
		d *= 2
	}
	return min(d, p.MaxDelay)
}

func (u *unit) become(state, reason string) {
	u.now.State, u.now.Reason, u.now.Since = state, reason, u.d.o.Clock.Now()
	u.publish()
}

func (u *unit) publish() {
	u.mu.Lock()
	changed := u.public != u.now
	u.public = u.now
	u.mu.Unlock()
	if changed && u.d.o.Changed != nil {
		u.d.o.Changed(u.id, u.now)
	}
}

func (u *unit) answer(who *[]chan<- error, err error) {
	for _, c := range *who {
		c <- err
	}
	*who = nil
}

func (u *unit) arm(d time.Duration) {
	u.release()
	u.timer, u.release = u.d.o.Clock.Timer(d)
}

func (u *unit) disarm() {
	u.release()
	u.timer, u.release = nil, func() {}
}
