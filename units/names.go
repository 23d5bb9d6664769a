// Names of units, and the agent's id read back out of them.
package units

import (
	"fmt"
	"strconv"
	"strings"
)

// The units that are not an agent's own.
const (
	Daemon = "agentconnect.service"
	Probe  = "agentconnect-probe.service"
	Root   = "agentconnect.slice" // all agents together
)

const (
	slicePrefix = "agentconnect-"
	execPrefix  = "agentconnect-exec-"
	scopePrefix = "agent-"
	instance    = "agent@"

	// maxName is systemd's limit on a unit's name, in bytes.
	maxName = 255
)

// Kind is what a unit is to its agent.
type Kind string

// The kinds of units that belong to one agent.
const (
	Service Kind = "service" // agent@ID.service: the supervisor
	Scope   Kind = "scope"   // agent-ID.scope: the runtime
	Slice   Kind = "slice"   // agentconnect-ID.slice: both, and the exec scopes
	Exec    Kind = "exec"    // agentconnect-exec-ID-N.scope: one `agent exec`
)

// ValidID reports whether id can be an agent's: [a-z0-9][a-z0-9_-]{0,62}.
func ValidID(id string) bool {
	if id == "" || len(id) > 63 {
		return false
	}
	for i := range len(id) {
		switch c := id[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9':
		case (c == '-' || c == '_') && i > 0:
		default:
			return false
		}
	}
	return true
}

// mustID guards the name functions: a unit name made of anything else could be another
// unit's, so it is a fault of the caller, never of a user.
func mustID(id string) string {
	if !ValidID(id) {
		panic(fmt.Sprintf("units: %q is no agent id: the caller has to refuse it", id))
	}
	return id
}

// ServiceName is agent@ID.service. It panics, as the other name functions, where id is not
// valid. A dash in an instance needs no escape: it would mean a slash only to %I and %f,
// which nothing here uses, and `agent@my-bot` is what people type.
func ServiceName(id string) string { return instance + mustID(id) + ".service" }

// ScopeName is agent-ID.scope.
func ScopeName(id string) string { return scopePrefix + mustID(id) + ".scope" }

// ExecName is agentconnect-exec-ID-N.scope.
func ExecName(id string, n uint64) string {
	return execPrefix + mustID(id) + "-" + strconv.FormatUint(n, 10) + ".scope"
}

// SliceName is agentconnect-ID.slice, where a dash of the id is \x2d, since a dash in a
// slice's name means nesting. Escaped like that, an id of almost nothing but dashes would be
// longer than a unit's name can be; its dashes are colons instead, which no id contains.
func SliceName(id string) string {
	name := slicePrefix + strings.ReplaceAll(mustID(id), "-", `\x2d`) + ".slice"
	if len(name) > maxName {
		name = slicePrefix + strings.ReplaceAll(id, "-", ":") + ".slice"
	}
	return name
}

// Name is a unit's name taken apart.
type Name struct {
	Kind Kind
	ID   string
	N    uint64 // of an exec scope
}

// String is the unit's name.
func (n Name) String() string {
	switch n.Kind {
	case Service:
		return ServiceName(n.ID)
	case Scope:
		return ScopeName(n.ID)
	case Slice:
		return SliceName(n.ID)
	case Exec:
		return ExecName(n.ID, n.N)
	}
	panic("units: no such kind: " + string(n.Kind))
}

// ParseName takes an agent's unit name apart; ok is false for every other name, and for each
// spelling that the functions above do not write.
func ParseName(unit string) (n Name, ok bool) {
	switch {
	case strings.HasPrefix(unit, instance) && strings.HasSuffix(unit, ".service"):
		n = Name{Kind: Service, ID: unit[len(instance) : len(unit)-len(".service")]}
	case strings.HasPrefix(unit, execPrefix) && strings.HasSuffix(unit, ".scope"):
		middle := strings.TrimSuffix(unit[len(execPrefix):], ".scope")
		dash := strings.LastIndexByte(middle, '-')
		if dash < 0 {
			return Name{}, false
		}
		number, err := strconv.ParseUint(middle[dash+1:], 10, 64)
		if err != nil {
			return Name{}, false
		}
		n = Name{Kind: Exec, ID: middle[:dash], N: number}
	case strings.HasPrefix(unit, scopePrefix) && strings.HasSuffix(unit, ".scope"):
		n = Name{Kind: Scope, ID: unit[len(scopePrefix) : len(unit)-len(".scope")]}
	case strings.HasPrefix(unit, slicePrefix) && strings.HasSuffix(unit, ".slice"):
		middle := strings.TrimSuffix(unit[len(slicePrefix):], ".slice")
		n = Name{Kind: Slice, ID: strings.NewReplacer(`\x2d`, "-", ":", "-").Replace(middle)}
	default:
		return Name{}, false
	}
	// One unit has one name: what does not come out the same is not ours.
	if !ValidID(n.ID) || n.String() != unit {
		return Name{}, false
	}
	return n, true
}
