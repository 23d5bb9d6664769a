// Property values, without the bus's types.
package units

import (
	"fmt"
	"strconv"
	"strings"
)

// Property is one setting of a transient unit, by its name on the bus.
type Property struct {
	Name  string
	Value Value
}

// Value is one of the types below; each names its type on the bus.
type Value interface {
	// Signature is the value's D-Bus type.
	Signature() string
	// String is the value as status and explain show it.
	String() string
}

// The types of values. Times are in µs, sizes in bytes.
type (
	String  string
	Bool    bool
	Uint32  uint32
	Uint64  uint64 // Infinity: no limit
	Strings []string
	// Commands are ExecStart= and its kind.
	Commands []Command
	// ExitStatuses are RestartPreventExitStatus= and its kind.
	ExitStatuses []int32
	// LogFields are journal fields, NAME=value each.
	LogFields []string
	// PIDs are processes that a scope adopts. Each is above 1.
	PIDs []uint32
	// PIDFDs are descriptors of such processes; they stay their owner's, who keeps them open
	// until the call has returned. Since systemd 255.
	PIDFDs []int
)

// Infinity is systemd's "no limit", and what an unset counter reads.
const Infinity Uint64 = 1<<64 - 1

// Command is a program with its arguments (the first is the program's name).
type Command struct {
	Path string
	Args []string
}

func (String) Signature() string       { return "s" }
func (Bool) Signature() string         { return "b" }
func (Uint32) Signature() string       { return "u" }
func (Uint64) Signature() string       { return "t" }
func (Strings) Signature() string      { return "as" }
func (Commands) Signature() string     { return "a(sasb)" }
func (ExitStatuses) Signature() string { return "(aiai)" }
func (LogFields) Signature() string    { return "aay" }
func (PIDs) Signature() string         { return "au" }
func (PIDFDs) Signature() string       { return "ah" }

func (v String) String() string  { return string(v) }
func (v Bool) String() string    { return map[bool]string{true: "yes", false: "no"}[bool(v)] }
func (v Uint32) String() string  { return strconv.FormatUint(uint64(v), 10) }
func (v Strings) String() string { return strings.Join(v, " ") }
func (v PIDs) String() string    { return strings.Trim(fmt.Sprint([]uint32(v)), "[]") }
func (v PIDFDs) String() string  { return strconv.Itoa(len(v)) + " descriptors" }

func (v Uint64) String() string {
	if v == Infinity {
		return "infinity"
	}
	return strconv.FormatUint(uint64(v), 10)
}

func (v Commands) String() string {
	lines := make([]string, len(v))
	for i, c := range v {
		// Like a unit file: the path stands for the first argument.
		quoted := append([]string{c.Path}, c.Args[min(1, len(c.Args)):]...)
		for j, arg := range quoted {
			quoted[j] = arg
			if arg == "" || strings.ContainsAny(arg, " \t\n\"'\\$;%") {
				quoted[j] = strconv.Quote(arg)
			}
		}
		lines[i] = strings.Join(quoted, " ")
	}
	return strings.Join(lines, " ; ")
}

func (v ExitStatuses) String() string { return strings.Trim(fmt.Sprint([]int32(v)), "[]") }
func (v LogFields) String() string    { return strings.Join(v, " ") }
