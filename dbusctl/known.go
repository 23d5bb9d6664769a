// What the manager has said of units that are watched, so that it need not be asked again.
package dbusctl

import (
	"context"
	"maps"
	"slices"
	"sync"

	"github.com/godbus/dbus/v5"
)

// knownNames are the properties of a service that are remembered. With each change the manager
// says all of them but the first, which a unit keeps until the unit files are read anew.
var knownNames = []string{
	"LoadState", "ActiveState", "SubState", "ActiveEnterTimestamp",
	"StatusText", "Result", "ExecMainCode", "ExecMainStatus", "MainPID", "NRestarts",
}

// known is what was said on a session, in the order in which the manager said it, answers and
// signals alike: it is kept by the reader of the socket itself. So an answer that a caller has
// was preceded by whatever the manager did before it.
type known struct {
	mu    sync.Mutex
	on    *session // others are not listened to
	owner string   // the manager's unique name; empty until it is told to say changes
	epoch uint64   // grows when something may have changed that is not said
	units map[dbus.ObjectPath]*knownUnit
}

type knownUnit struct {
	changes uint64 // heard of so far
	values  map[string]dbus.Variant
}

func (u *knownUnit) forget() {
	u.changes++
	u.values = nil
}

func (k *known) forget() {
	k.epoch++
	for _, u := range k.units {
		u.forget()
	}
}

// begin forgets everything: from here on it is the session's manager that is listened to.
func (k *known) begin(s *session, owner string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.on, k.owner = s, owner
	k.forget()
}

// follow remembers a unit from now on; the manager says its changes already.
func (k *known) follow(path dbus.ObjectPath) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.units[path] == nil {
		k.units[path] = &knownUnit{}
	}
}

func (k *known) drop(path dbus.ObjectPath) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.units, path)
}

// heard takes a signal.
func (k *known) heard(s *session, signal *dbus.Signal) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if s != k.on {
		return
	}
	if _, ok := newOwner(signal); ok {
		k.owner = "" // until it is told to say changes
		k.forget()
		return
	}
	if signal.Sender != k.owner {
		return
	}
	switch signal.Name {
	case properties + ".PropertiesChanged":
		u := k.units[signal.Path]
		if u == nil || len(signal.Body) != 3 {
			return
		}
		changed, _ := signal.Body[1].(map[string]dbus.Variant)
		stale, _ := signal.Body[2].([]string)
		if slices.ContainsFunc(stale, func(name string) bool { return slices.Contains(knownNames, name) }) {
			u.forget()
			return
		}
		u.changes++
		u.take(changed)
	case manager + ".UnitNew", manager + ".UnitRemoved":
		if len(signal.Body) == 2 {
			path, _ := signal.Body[1].(dbus.ObjectPath)
			if u := k.units[path]; u != nil {
				u.forget()
			}
		}
	case manager + ".Reloading":
		k.forget()
	}
}

func (u *knownUnit) take(values map[string]dbus.Variant) {
	if u.values == nil {
		u.values = map[string]dbus.Variant{}
	}
	for _, name := range knownNames {
		if v, ok := values[name]; ok {
			u.values[name] = v
		}
	}
}

// count is how many changes of a unit were heard of; ok is false for one that is not followed.
func (k *known) count(path dbus.ObjectPath) (n uint64, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	u := k.units[path]
	if u == nil || k.owner == "" {
		return 0, false
	}
	return u.changes, true
}

// answered takes what the manager answered to a question that was put after so many changes.
// One that came between counts more: it may have come behind the answer.
func (k *known) answered(path dbus.ObjectPath, after uint64, values map[string]dbus.Variant) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if u := k.units[path]; u != nil && u.changes == after && k.owner != "" {
		u.take(values)
	}
}

// Known gives what is known of a watched service's state without asking: of the properties the
// few that say it, as the manager said them last. It is as new as the last answer to whatever was
// asked before. ok is false where it is to be asked for.
func (c *Conn) Known(unit string) (p Properties, ok bool) {
	c.known.mu.Lock()
	defer c.known.mu.Unlock()
	u := c.known.units[objectPath(unit)]
	if u == nil {
		return Properties{}, false
	}
	for _, name := range knownNames[1:] {
		if _, ok := u.values[name]; !ok {
			return Properties{}, false
		}
	}
	return Properties{m: maps.Clone(u.values)}, true
}

// Epoch grows when units may have been read anew, and with that their files. It is as new as
// Known is, while at least one unit is watched.
func (c *Conn) Epoch() uint64 {
	c.known.mu.Lock()
	defer c.known.mu.Unlock()
	return c.known.epoch
}

// heeding is a handler of signals that hears each before what came behind it is read.
type heeding struct {
	dbus.SignalHandler
	hear func(*dbus.Signal)
}

func (h *heeding) DeliverSignal(iface, name string, signal *dbus.Signal) {
	h.hear(signal)
	h.SignalHandler.DeliverSignal(iface, name, signal)
}

// AddSignal, RemoveSignal and Terminate are the inner one's.
func (h *heeding) AddSignal(ch chan<- *dbus.Signal) {
	h.SignalHandler.(dbus.SignalRegistrar).AddSignal(ch)
}

func (h *heeding) RemoveSignal(ch chan<- *dbus.Signal) {
	h.SignalHandler.(dbus.SignalRegistrar).RemoveSignal(ch)
}

func (h *heeding) Terminate() { h.SignalHandler.(dbus.Terminator).Terminate() }

// DropIns are the files that change a unit, in the order they are read. One that is not loaded is
// loaded for that. It costs the manager far less than all that UnitFile asks for.
func (c *Conn) DropIns(ctx context.Context, unit string) ([]string, error) {
	if err := checkUnit(unit); err != nil {
		return nil, err
	}
	var files dbus.Variant
	err := c.call(ctx, request{unit: unit, verb: "drop-ins", path: objectPath(unit), method: properties + ".Get", args: []any{systemd + ".Unit", "DropInPaths"}}, &files)
	if err != nil {
		return nil, err
	}
	list, _ := files.Value().([]string)
	return list, nil
}
