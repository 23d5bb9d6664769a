// What a unit says of itself.
package dbusctl

import (
	"context"
	"fmt"
	"strings"

	sysd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"agentconnect.md/sandbox/units"
)

// Properties are a unit's, of all its interfaces. A getter's ok is false where the unit has no
// such property, or has it in another type.
type Properties struct {
	m map[string]dbus.Variant
}

func get[T any](p Properties, name string) (T, bool) {
	v, ok := p.m[name].Value().(T)
	return v, ok
}

// String is a property that is text.
func (p Properties) String(name string) (string, bool) { return get[string](p, name) }

// Bool is a property that is yes or no.
func (p Properties) Bool(name string) (bool, bool) { return get[bool](p, name) }

// Int32 is a property such as ExecMainStatus.
func (p Properties) Int32(name string) (int32, bool) { return get[int32](p, name) }

// Uint32 is a property such as MainPID and NRestarts.
func (p Properties) Uint32(name string) (uint32, bool) { return get[uint32](p, name) }

// Uint64 is a counter or a limit, in bytes or µs. A counter that nobody counts, and a limit that
// is not set, read 2^64-1: ok is false.
func (p Properties) Uint64(name string) (uint64, bool) {
	v, ok := get[uint64](p, name)
	if !ok || v == uint64(units.Infinity) {
		return 0, false
	}
	return v, true
}

// Strings is a property such as Requires and DropInPaths.
func (p Properties) Strings(name string) ([]string, bool) { return get[[]string](p, name) }

// Job reports whether a job of the unit runs, or waits for its turn: the unit is about to change.
func (p Properties) Job() bool {
	job, _ := get[[]any](p, "Job") // its number, 0 for none, and its object
	if len(job) == 0 {
		return false
	}
	id, _ := job[0].(uint32)
	return id != 0
}

// Names are the properties that are there, in no order.
func (p Properties) Names() []string {
	names := make([]string, 0, len(p.m))
	for name := range p.m {
		names = append(names, name)
	}
	return names
}

// Properties reads all properties of a unit. One that is not loaded is ErrNoSuchUnit: it is not
// loaded to be read, for that would be news to everyone who watches it.
func (c *Conn) Properties(ctx context.Context, unit string) (Properties, error) {
	path, err := c.loaded(ctx, unit, "properties")
	if err != nil {
		return Properties{}, err
	}
	p := Properties{m: map[string]dbus.Variant{}}
	changes, followed := c.known.count(path)
	// An empty interface name is all of them.
	err = c.call(ctx, request{unit: unit, verb: "properties", path: path, method: properties + ".GetAll", args: []any{""}}, &p.m)
	if err == nil && followed {
		c.known.answered(path, changes, p.m)
	}
	return p, err
}

// Active reads a unit's ActiveState alone, which costs the manager a tenth of all its
// properties. A unit that is not loaded is ErrNoSuchUnit.
func (c *Conn) Active(ctx context.Context, unit string) (string, error) {
	path, err := c.loaded(ctx, unit, "properties")
	if err != nil {
		return "", err
	}
	var state dbus.Variant
	if err := c.call(ctx, request{unit: unit, verb: "properties", path: path, method: properties + ".Get", args: []any{systemd + ".Unit", "ActiveState"}}, &state); err != nil {
		return "", err
	}
	active, _ := state.Value().(string)
	return active, nil
}

// loaded is the object of a unit that is loaded.
func (c *Conn) loaded(ctx context.Context, unit, verb string) (dbus.ObjectPath, error) {
	if err := checkUnit(unit); err != nil {
		return "", fmt.Errorf("%s: %w", verb, err)
	}
	var path dbus.ObjectPath
	err := c.call(ctx, request{unit: unit, verb: verb, path: managerPath, method: manager + ".GetUnit", args: []any{unit}}, &path)
	return path, err
}

// UnitOf names the unit that a process is in.
func (c *Conn) UnitOf(ctx context.Context, pid uint32) (string, error) {
	if pid == 0 {
		return "", fmt.Errorf("unit of process 0: the manager would take it for ours")
	}
	verb := fmt.Sprintf("unit of process %d", pid)
	var path dbus.ObjectPath
	if err := c.call(ctx, request{verb: verb, path: managerPath, method: manager + ".GetUnitByPID", args: []any{pid}}, &path); err != nil {
		return "", err
	}
	var id dbus.Variant
	if err := c.call(ctx, request{verb: verb, path: path, method: properties + ".Get", args: []any{systemd + ".Unit", "Id"}}, &id); err != nil {
		return "", err
	}
	name, _ := id.Value().(string)
	return name, nil
}

// Unit is a line of a list of units.
type Unit struct {
	Name        string
	Description string
	Load        string // loaded, not-found, bad-setting, masked
	Active      string // active, reloading, inactive, failed, activating, deactivating
	Sub         string // running, auto-restart, …
}

// List gives the loaded units whose names match one of the patterns (shell-like: agent@*.service),
// all units without one.
func (c *Conn) List(ctx context.Context, patterns ...string) ([]Unit, error) {
	var raw [][]any
	err := c.call(ctx, request{verb: "list units", path: managerPath, method: manager + ".ListUnitsByPatterns", args: []any{[]string{}, append([]string{}, patterns...)}}, &raw)
	if err != nil {
		return nil, err
	}
	list := make([]Unit, len(raw))
	for i, row := range raw {
		var following, jobType string
		var path, jobPath dbus.ObjectPath
		var jobID uint32
		u := &list[i]
		if err := dbus.Store(row, &u.Name, &u.Description, &u.Load, &u.Active, &u.Sub, &following, &path, &jobID, &jobType, &jobPath); err != nil {
			return nil, fmt.Errorf("list units: %w", err)
		}
	}
	return list, nil
}

// objectPath is a unit's object, loaded or not.
func objectPath(unit string) dbus.ObjectPath {
	return unitPath + dbus.ObjectPath(sysd.PathBusEscape(unit))
}

// UnitFile is where a unit's settings come from.
type UnitFile struct {
	Fragment   string   // the unit file; of a transient unit, the manager's own note
	DropIns    []string // files that change it, in the order they are read
	State      string   // enabled, disabled, static, masked, transient, …; empty: no file
	NeedReload bool     // a file changed since it was read
	Load       string   // loaded, not-found, bad-setting, masked
}

// UnitFile says which files a unit's settings come from, whether it is loaded or not.
func (c *Conn) UnitFile(ctx context.Context, unit string) (UnitFile, error) {
	if err := checkUnit(unit); err != nil {
		return UnitFile{}, fmt.Errorf("unit file: %w", err)
	}
	p := Properties{m: map[string]dbus.Variant{}}
	if err := c.call(ctx, request{unit: unit, verb: "unit file", path: objectPath(unit), method: properties + ".GetAll", args: []any{systemd + ".Unit"}}, &p.m); err != nil {
		return UnitFile{}, err
	}
	var f UnitFile
	f.Fragment, _ = p.String("FragmentPath")
	f.DropIns, _ = p.Strings("DropInPaths")
	f.State, _ = p.String("UnitFileState")
	f.NeedReload, _ = p.Bool("NeedDaemonReload")
	f.Load, _ = p.String("LoadState")
	return f, nil
}

// Enable makes units start as their [Install] sections say, and reads the unit files anew.
func (c *Conn) Enable(ctx context.Context, names ...string) error {
	return c.unitFiles(ctx, "enable", "EnableUnitFiles", names, append([]string{}, names...), false, false)
}

// Disable is Enable's opposite.
func (c *Conn) Disable(ctx context.Context, names ...string) error {
	return c.unitFiles(ctx, "disable", "DisableUnitFiles", names, append([]string{}, names...), false)
}

func (c *Conn) unitFiles(ctx context.Context, verb, method string, names []string, args ...any) error {
	for _, unit := range names {
		if err := checkUnit(unit); err != nil {
			return fmt.Errorf("%s: %w", verb, err)
		}
	}
	if err := c.call(ctx, request{unit: strings.Join(names, " "), verb: verb, path: managerPath, method: manager + "." + method, args: args}); err != nil {
		return err
	}
	return c.ReloadManager(ctx)
}

// ReloadManager has the manager read all unit files anew; it returns when that is done.
func (c *Conn) ReloadManager(ctx context.Context) error {
	return c.call(ctx, request{verb: "daemon-reload", path: managerPath, method: manager + ".Reload"})
}
