// Changes of a unit, as they happen.
package dbusctl

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"github.com/godbus/dbus/v5"
)

// Change is what happened to a unit since the last Change: several events may have become one,
// and of a property only its last value is there.
type Change struct {
	Unit string
	// Look: changes may have been missed (at the beginning; after the bus or the manager came
	// back, or reloaded; when the unit was loaded). Read what you need with Properties.
	Look bool
	// Gone: the unit was unloaded. With Look, too, it was loaded or unloaded in between: ask.
	Gone bool
	// Properties are those that changed, of all the unit's interfaces (ActiveState, SubState,
	// Result, MainPID, NRestarts, StatusText, …).
	Properties Properties
	// Stale are properties that changed to a value that was not said.
	Stale []string
}

func (c *Change) empty() bool {
	return !c.Look && !c.Gone && len(c.Properties.m) == 0 && len(c.Stale) == 0
}

// merge adds a later change.
func (c *Change) merge(later Change) {
	c.Look = c.Look || later.Look
	c.Gone = later.Gone || c.Gone && !later.Look && len(later.Properties.m) == 0
	if c.Properties.m == nil {
		c.Properties.m = map[string]dbus.Variant{}
	}
	maps.Copy(c.Properties.m, later.Properties.m)
	c.Stale = slices.DeleteFunc(c.Stale, func(name string) bool { _, said := later.Properties.m[name]; return said })
	for _, name := range later.Stale {
		delete(c.Properties.m, name)
		if !slices.Contains(c.Stale, name) {
			c.Stale = append(c.Stale, name)
		}
	}
}

type watch struct {
	unit string
	path dbus.ObjectPath
	kick chan struct{} // holds one

	mu      sync.Mutex
	pending Change

	on *session // Conn.mu
}

// rules are the matches of a watch. The manager says PropertiesChanged once for each interface of
// the unit: .Unit, and .Service or .Scope or .Slice.
func (w *watch) rules() []string {
	const head = "type='signal',sender='" + systemd + "',"
	return []string{
		head + "path='" + string(w.path) + "',interface='" + properties + "',member='PropertiesChanged'",
		head + "interface='" + manager + "',member='UnitNew',arg0='" + w.unit + "'",
		head + "interface='" + manager + "',member='UnitRemoved',arg0='" + w.unit + "'",
		head + "interface='" + manager + "',member='Reloading'",
	}
}

func (w *watch) post(change Change) {
	w.mu.Lock()
	w.pending.merge(change)
	w.mu.Unlock()
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// signal takes a signal of the manager's, if it is about this unit.
func (w *watch) signal(signal *dbus.Signal) {
	switch signal.Name {
	case properties + ".PropertiesChanged":
		var iface string
		var changed map[string]dbus.Variant
		var stale []string
		if signal.Path == w.path && dbus.Store(signal.Body, &iface, &changed, &stale) == nil {
			w.post(Change{Properties: Properties{m: changed}, Stale: stale})
		}
	case manager + ".UnitNew", manager + ".UnitRemoved":
		var unit string
		var path dbus.ObjectPath
		if dbus.Store(signal.Body, &unit, &path) == nil && unit == w.unit {
			gone := signal.Name == manager+".UnitRemoved"
			w.post(Change{Gone: gone, Look: !gone})
		}
	case manager + ".Reloading":
		var begins bool
		if dbus.Store(signal.Body, &begins) == nil && !begins {
			w.post(Change{Look: true})
		}
	}
}

// Watch gives the changes of a unit, loaded or not, until the context ends or the Conn is closed;
// then the channel is closed and nothing of the watch is left. The first Change says to look. A
// slow reader delays nobody.
func (c *Conn) Watch(ctx context.Context, unit string) (<-chan Change, error) {
	if err := checkUnit(unit); err != nil {
		return nil, err
	}
	w := &watch{unit: unit, path: objectPath(unit), kick: make(chan struct{}, 1)}
	// Subscribed before the first look, so that nothing falls between the two.
	var matches []*dbus.Call
	err := c.call(ctx, request{
		unit: unit, verb: "watch", path: managerPath, method: manager + ".Subscribe",
		use: func(s *session) {
			if w.on == s {
				return
			}
			c.watches[w], w.on, matches = struct{}{}, s, nil
			for _, rule := range w.rules() {
				matches = append(matches, s.bus.BusObject().Go(bus+".AddMatch", 0, make(chan *dbus.Call, 1), rule))
			}
		},
	})
	var answer *CallError
	if errors.As(err, &answer) && answer.Name == systemd+".AlreadySubscribed" {
		err = nil
	}
	for _, match := range matches {
		// Answered before the call behind it was, or the session has ended.
		if <-match.Done; match.Err != nil && err == nil {
			if e := callError(unit, "watch", match.Err); !errors.Is(e, ErrBusGone) {
				err = e
			}
		}
	}
	if err != nil {
		c.unwatch(w)
		return nil, err
	}
	c.known.follow(w.path)
	w.post(Change{Look: true})
	out := make(chan Change)
	c.mu.Lock()
	// Close waits for the loop, and so cannot have passed its waiting yet.
	open := c.life.Err() == nil
	if open {
		c.loop.Go(func() {
			defer close(out)
			defer c.unwatch(w)
			w.run(ctx, c.life, out)
		})
	}
	c.mu.Unlock()
	if !open {
		c.unwatch(w)
		return nil, &CallError{Unit: unit, Verb: "watch", Kind: ErrClosed}
	}
	return out, nil
}

func (w *watch) run(ctx, life context.Context, out chan<- Change) {
	next := Change{Unit: w.unit}
	for {
		w.mu.Lock()
		next.merge(w.pending)
		w.pending = Change{}
		w.mu.Unlock()
		var send chan<- Change
		if !next.empty() {
			send = out
		}
		select {
		case <-w.kick:
		case send <- next:
			next = Change{Unit: w.unit}
		case <-ctx.Done():
			return
		case <-life.Done():
			return
		}
	}
}

func (c *Conn) unwatch(w *watch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.watches, w)
	if !c.watched(w.path) {
		c.known.drop(w.path)
	}
	if w.on != nil && w.on == c.current {
		for _, rule := range w.rules() {
			w.on.send("RemoveMatch", rule)
		}
	}
}

// watched reports whether somebody watches the unit; c.mu is held.
func (c *Conn) watched(path dbus.ObjectPath) bool {
	for w := range c.watches {
		if w.path == path {
			return true
		}
	}
	return false
}
