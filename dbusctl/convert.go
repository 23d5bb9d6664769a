// From package units' values to the bus's.
package dbusctl

import (
	"fmt"

	"github.com/godbus/dbus/v5"

	"agentconnect.md/sandbox/units"
)

// The bus's structures, field for field.
type (
	wireProperty struct {
		Name  string
		Value dbus.Variant
	}
	wireAux struct {
		Name       string
		Properties []wireProperty
	}
	wireCommand struct {
		Path          string
		Args          []string
		IgnoreFailure bool
	}
	wireExitStatuses struct {
		Codes   []int32
		Signals []int32
	}
)

func wireProperties(properties []units.Property) ([]wireProperty, error) {
	out := make([]wireProperty, len(properties))
	for i, p := range properties {
		v, err := variant(p.Value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.Name, err)
		}
		out[i] = wireProperty{p.Name, v}
	}
	return out, nil
}

// variant is a value as the bus takes it. Its type is held to what the value promises.
func variant(value units.Value) (dbus.Variant, error) {
	var out any
	switch v := value.(type) {
	case units.String:
		out = string(v)
	case units.Bool:
		out = bool(v)
	case units.Uint32:
		out = uint32(v)
	case units.Uint64:
		out = uint64(v)
	case units.Strings:
		out = append([]string{}, v...)
	case units.Commands:
		commands := make([]wireCommand, len(v))
		for i, c := range v {
			commands[i] = wireCommand{Path: c.Path, Args: append([]string{}, c.Args...)}
		}
		out = commands
	case units.ExitStatuses:
		out = wireExitStatuses{Codes: append([]int32{}, v...), Signals: []int32{}}
	case units.LogFields:
		fields := make([][]byte, len(v))
		for i, f := range v {
			fields[i] = []byte(f)
		}
		out = fields
	case units.PIDs:
		for _, pid := range v {
			if pid <= 1 {
				return dbus.Variant{}, fmt.Errorf("process %d cannot be moved into a unit", pid)
			}
		}
		out = append([]uint32{}, v...)
	case units.PIDFDs:
		fds := make([]dbus.UnixFD, len(v))
		for i, fd := range v {
			if fd < 0 {
				return dbus.Variant{}, fmt.Errorf("descriptor %d is none", fd)
			}
			fds[i] = dbus.UnixFD(fd)
		}
		out = fds
	default:
		return dbus.Variant{}, fmt.Errorf("no such type of value: %T", value)
	}
	result := dbus.MakeVariant(out)
	if got, want := result.Signature().String(), value.Signature(); got != want {
		return dbus.Variant{}, fmt.Errorf("%T is %s on the bus, and should be %s", value, got, want)
	}
	return result, nil
}
