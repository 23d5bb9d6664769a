// Jobs: start, stop, restart and reload, with their true results.
package dbusctl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/units"
)

// Mode is what happens to jobs that are in the way.
type Mode string

// The modes that are of use here.
const (
	Replace Mode = "replace" // they are canceled
	Fail    Mode = "fail"    // we are refused
)

// job is one that somebody waits for.
type job struct {
	unit, verb string
	needs      []string
	kick       chan struct{} // holds one

	mu   sync.Mutex
	done map[dbus.ObjectPath]string // results of jobs of this unit since we began
	look bool                       // the bus or the manager restarted

	on *session // Conn.mu
}

func (j *job) rule() string {
	return "type='signal',sender='" + systemd + "',interface='" + manager + "',member='JobRemoved',arg2='" + j.unit + "'"
}

func (j *job) wake() {
	select {
	case j.kick <- struct{}{}:
	default:
	}
}

func (j *job) removed(path dbus.ObjectPath, result string) {
	j.mu.Lock()
	j.done[path] = result
	j.mu.Unlock()
	j.wake()
}

func (j *job) lookAgain() {
	j.mu.Lock()
	j.look = true
	j.mu.Unlock()
	j.wake()
}

// Start starts a unit and waits for the result.
func (c *Conn) Start(ctx context.Context, unit string, mode Mode) error {
	return c.job(ctx, unit, "start", nil, request{method: "StartUnit", args: []any{unit, string(mode)}})
}

// Stop stops a unit and waits until it has stopped. A unit that is not loaded is ErrNoSuchUnit.
func (c *Conn) Stop(ctx context.Context, unit string, mode Mode) error {
	return c.job(ctx, unit, "stop", nil, request{method: "StopUnit", args: []any{unit, string(mode)}})
}

// Restart stops a unit if it runs, and starts it. ErrBusGone: perhaps it did.
func (c *Conn) Restart(ctx context.Context, unit string, mode Mode) error {
	return c.job(ctx, unit, "restart", nil, request{method: "RestartUnit", args: []any{unit, string(mode)}, once: true})
}

// Reload has a unit reload, or starts it where it does not run. ErrBusGone: perhaps it did.
func (c *Conn) Reload(ctx context.Context, unit string, mode Mode) error {
	return c.job(ctx, unit, "reload", nil, request{method: "ReloadOrRestartUnit", args: []any{unit, string(mode)}, once: true})
}

// StartTransient makes a unit, with others that its start needs, and waits for the result. When
// the bus goes away before the manager has answered, the error is ErrBusGone and the unit may
// be there.
func (c *Conn) StartTransient(ctx context.Context, unit units.Transient, mode Mode, others ...units.Transient) error {
	wire, err := wireProperties(unit.Properties)
	if err != nil {
		return fmt.Errorf("%s: start: %w", unit.Name, err)
	}
	var needs []string
	for _, name := range requirements {
		if names, ok := unit.Get(name).(units.Strings); ok {
			needs = append(needs, names...)
		}
	}
	aux := make([]wireAux, len(others))
	for i, other := range others {
		if err := checkUnit(other.Name); err != nil {
			return err
		}
		aux[i].Name = other.Name
		if aux[i].Properties, err = wireProperties(other.Properties); err != nil {
			return fmt.Errorf("%s: start: %w", other.Name, err)
		}
	}
	return c.job(ctx, unit.Name, "start", needs, request{method: "StartTransientUnit", args: []any{unit.Name, string(mode), wire, aux}, once: true})
}

// job sends a request that answers with a job, and waits for its end. The context bounds the
// waiting: the job goes on after it. Without a deadline it waits for as long as the job's own
// timeouts let it. needs are the units that it cannot do without, as far as they are known
// already: one that fails for such a reason may be unloaded before it can be asked.
func (c *Conn) job(ctx context.Context, unit, verb string, needs []string, r request) error {
	if err := checkUnit(unit); err != nil {
		return fmt.Errorf("%s: %w", verb, err)
	}
	j := &job{unit: unit, verb: verb, needs: needs, kick: make(chan struct{}, 1), done: map[dbus.ObjectPath]string{}}
	defer c.forget(j)

	// The match goes ahead of the request on the same socket, so the bus has it before the
	// manager can have said anything. Its answer is there when the request's is.
	var match *dbus.Call
	r.unit, r.verb, r.path, r.method = unit, verb, managerPath, manager+"."+r.method
	r.use = func(s *session) {
		if j.on == s {
			return // after a restart of the manager alone the match still stands
		}
		c.jobs[j], j.on = struct{}{}, s
		match = s.bus.BusObject().Go(bus+".AddMatch", 0, make(chan *dbus.Call, 1), j.rule())
	}
	var path dbus.ObjectPath
	if err := c.call(ctx, r, &path); err != nil {
		return err
	}
	if match != nil {
		select {
		case <-match.Done:
			if match.Err != nil && !errors.Is(callError("", "", match.Err), ErrBusGone) {
				return callError(unit, verb+": asking the bus for the job's result", match.Err)
			}
		case <-ctx.Done():
			return &JobError{Unit: unit, Verb: verb, Result: ctx.Err(), Cause: "the job goes on"}
		}
	}
	for {
		j.mu.Lock()
		result, ok := j.done[path]
		look := j.look
		j.look = false
		j.mu.Unlock()
		if ok {
			return c.ended(ctx, j, result)
		}
		if look {
			if done, err := c.settle(ctx, j, path); done {
				return err
			}
			continue
		}
		select {
		case <-j.kick:
		case <-c.life.Done():
			return &JobError{Unit: unit, Verb: verb, Result: ErrClosed, Cause: "the job goes on"}
		case <-ctx.Done():
			return &JobError{Unit: unit, Verb: verb, Result: ctx.Err(), Cause: "the job goes on"}
		}
	}
}

func (c *Conn) forget(j *job) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.jobs, j)
	if j.on != nil && j.on == c.current {
		j.on.send("RemoveMatch", j.rule())
	}
}

// settle finds out about a job whose end may have been said while nobody could hear.
func (c *Conn) settle(ctx context.Context, j *job, path dbus.ObjectPath) (done bool, err error) {
	var state dbus.Variant
	err = c.call(ctx, request{unit: j.unit, verb: j.verb, path: path, method: properties + ".Get", args: []any{systemd + ".Job", "State"}}, &state)
	if err == nil {
		return false, nil // it is still there, and its end will be said
	}
	var answer *CallError
	if !errors.As(err, &answer) || answer.Name == "" {
		return true, err
	}
	j.mu.Lock()
	result, ok := j.done[path]
	j.mu.Unlock()
	if ok {
		return true, c.ended(ctx, j, result)
	}
	unit, err := c.Properties(ctx, j.unit)
	if err != nil && !errors.Is(err, ErrNoSuchUnit) {
		return true, err
	}
	active := "inactive"
	if err == nil {
		active, _ = unit.String("ActiveState")
	}
	switch {
	case j.verb == "stop" && (active == "inactive" || active == "failed"), j.verb != "stop" && active == "active":
		return true, nil
	case j.verb != "stop" && active == "failed":
		return true, c.ended(ctx, j, "failed")
	}
	return true, &JobError{Unit: j.unit, Verb: j.verb, Result: ErrResultLost, Cause: "the unit is " + active}
}

// ended turns a job's result into an error that says the unit's own reason.
func (c *Conn) ended(ctx context.Context, j *job, result string) error {
	kind, known := results[result]
	if !known {
		kind = errors.New(result)
	}
	if kind == nil {
		return nil
	}
	e := &JobError{Unit: j.unit, Verb: j.verb, Result: kind}
	// A unit that is collected as soon as it fails cannot be asked; then its cause stays empty.
	p, err := c.Properties(ctx, j.unit)
	if errors.Is(kind, ErrDependency) {
		needs := j.needs
		for _, name := range requirements {
			names, _ := p.Strings(name)
			needs = append(needs, names...)
		}
		e.Cause = c.failedDependency(ctx, needs)
	} else if err == nil {
		e.Cause = Cause(p)
	}
	return e
}

// requirements are the properties that name what a unit cannot do without.
var requirements = []string{"Requires", "BindsTo", "Requisite"}

// failedDependency says which of the units is not there, and why.
func (c *Conn) failedDependency(ctx context.Context, needs []string) string {
	var found []string
	slices.Sort(needs)
	for _, name := range slices.Compact(needs) {
		dep, err := c.Properties(ctx, name)
		if errors.Is(err, ErrNoSuchUnit) {
			found = append(found, name+" is not there")
			continue
		}
		if err != nil {
			continue
		}
		switch state, _ := dep.String("ActiveState"); state {
		case "failed", "inactive":
			text := name + " is " + state
			if cause := Cause(dep); cause != "" {
				text += " (" + cause + ")"
			}
			found = append(found, text)
		}
	}
	return strings.Join(found, ", ")
}

// Cause says in words why a unit failed; empty where it did not, or does not say.
func Cause(p Properties) string {
	if load, _ := p.String("LoadState"); load != "" && load != "loaded" {
		return "its unit file is " + load
	}
	result, _ := p.String("Result")
	code, _ := p.Int32("ExecMainCode")
	status, _ := p.Int32("ExecMainStatus")
	var text string
	switch result {
	case "", "success":
		return ""
	case "exit-code":
		text = fmt.Sprintf("exit status %d", status)
	case "signal", "core-dump":
		text = fmt.Sprintf("killed by signal %d", status)
		if name := unix.SignalName(syscall.Signal(status)); name != "" {
			text = fmt.Sprintf("killed by %s", name)
		}
	case "oom-kill":
		text = "out of memory"
	case "start-limit-hit":
		text = "started too often"
	case "protocol":
		text = "it ended without saying that it is ready"
		if code == 1 {
			text += fmt.Sprintf(" (exit status %d)", status)
		}
	default:
		text = result // timeout, watchdog, resources, exec-condition
	}
	if line, _ := p.String("StatusText"); line != "" {
		text += ": " + line
	}
	return text
}

// ResetFailed clears a unit's failed state and its count of starts. A unit that is not loaded is
// ErrNoSuchUnit.
func (c *Conn) ResetFailed(ctx context.Context, unit string) error {
	return c.simple(ctx, unit, "reset-failed", "ResetFailedUnit", unit)
}

// Who gets a signal.
type Who string

// The processes of a unit.
const (
	All  Who = "all"
	Main Who = "main"
)

// Kill sends a signal to the processes of a unit, by name; no process number is involved. ErrBusGone: perhaps they got it; it is not sent a second time, for
// in between it may have become another process's.
func (c *Conn) Kill(ctx context.Context, unit string, who Who, signal syscall.Signal) error {
	if signal <= 0 {
		return fmt.Errorf("%s: kill: %d is no signal", unit, signal)
	}
	if err := checkUnit(unit); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	return c.call(ctx, request{
		unit: unit, verb: "kill", path: managerPath, method: manager + ".KillUnit",
		args: []any{unit, string(who), int32(signal)}, once: true,
	})
}

// Freeze stops all processes of a unit, those of units in it included, and returns when they
// have stopped.
func (c *Conn) Freeze(ctx context.Context, unit string) error {
	return c.simple(ctx, unit, "freeze", "FreezeUnit", unit)
}

// Thaw lets them go on.
func (c *Conn) Thaw(ctx context.Context, unit string) error {
	return c.simple(ctx, unit, "thaw", "ThawUnit", unit)
}

// SetProperties changes a unit that is loaded, until it is unloaded: limits, mostly.
func (c *Conn) SetProperties(ctx context.Context, unit string, p ...units.Property) error {
	wire, err := wireProperties(p)
	if err != nil {
		return fmt.Errorf("%s: set properties: %w", unit, err)
	}
	return c.simple(ctx, unit, "set properties", "SetUnitProperties", unit, true, wire)
}

func (c *Conn) simple(ctx context.Context, unit, verb, method string, args ...any) error {
	if err := checkUnit(unit); err != nil {
		return fmt.Errorf("%s: %w", verb, err)
	}
	return c.call(ctx, request{unit: unit, verb: verb, path: managerPath, method: manager + "." + method, args: args})
}
