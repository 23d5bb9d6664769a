// Errors of calls and jobs.
package dbusctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/godbus/dbus/v5"
)

// What a manager answers. Errors of this package wrap one of these where a caller may decide
// on it.
var (
	ErrNoSuchUnit  = errors.New("no such unit")
	ErrUnitExists  = errors.New("the unit exists already")
	ErrBadProperty = errors.New("a property that this systemd refuses")
	ErrRefused     = errors.New("refused by the manager")
	ErrDenied      = errors.New("access denied")
	// ErrBusGone: the bus or the manager went away, and did not come back in time. Whether the
	// request was carried out is not known.
	ErrBusGone = errors.New("the bus or the user manager went away")
	// ErrClosed: the Conn was closed.
	ErrClosed = errors.New("the connection was closed")
)

// How a job ended, other than well.
var (
	ErrFailed     = errors.New("failed")
	ErrTimeout    = errors.New("timed out")
	ErrDependency = errors.New("dependency failed")
	ErrCanceled   = errors.New("canceled by another job")
	ErrSkipped    = errors.New("skipped")
	// ErrResultLost: the manager or the bus restarted meanwhile, the job is gone, and the unit's
	// state does not tell how it ended.
	ErrResultLost = errors.New("the job's result was lost in a restart of the manager or the bus")
)

// results are the words of JobRemoved. "done" is no error.
var results = map[string]error{
	"done": nil, "failed": ErrFailed, "timeout": ErrTimeout, "dependency": ErrDependency, "canceled": ErrCanceled, "skipped": ErrSkipped,
	"invalid": ErrRefused, "assert": ErrFailed, "unsupported": ErrRefused, "collected": ErrCanceled, "once": ErrRefused, "frozen": ErrRefused,
}

// CallError is a call that the manager or the bus answered with an error.
type CallError struct {
	Unit string // empty where the call is about no unit
	Verb string
	Kind error  // one of the sentinels, or the plain error
	Name string // the error's name on the bus
	Text string // the manager's own words
}

func (e *CallError) Error() string {
	what := e.Verb
	if e.Unit != "" {
		what = e.Unit + ": " + e.Verb
	}
	if e.Text == "" {
		return what + ": " + e.Kind.Error()
	}
	return what + ": " + e.Kind.Error() + ": " + e.Text
}

func (e *CallError) Unwrap() error { return e.Kind }

// JobError is a job that did not end with "done".
type JobError struct {
	Unit   string
	Verb   string // start, stop, restart, reload
	Result error  // one of the sentinels
	// Cause is what the unit says of itself, in words: "exit status 69", "killed by signal 9 (KILL)",
	// "timeout", the failed dependency's name and cause. Empty where it says nothing.
	Cause string
}

func (e *JobError) Error() string {
	text := e.Unit + ": " + e.Verb + ": " + e.Result.Error()
	if e.Cause != "" {
		text += ": " + e.Cause
	}
	return text
}

func (e *JobError) Unwrap() error { return e.Result }

// kinds maps what a manager or a bus answers.
var kinds = map[string]error{
	"org.freedesktop.systemd1.NoSuchUnit":                 ErrNoSuchUnit,
	"org.freedesktop.systemd1.NoUnitForPID":               ErrNoSuchUnit,
	"org.freedesktop.systemd1.UnitExists":                 ErrUnitExists,
	"org.freedesktop.systemd1.BadUnitSetting":             ErrBadProperty,
	"org.freedesktop.systemd1.OnlyByDependency":           ErrRefused,
	"org.freedesktop.systemd1.UnitMasked":                 ErrRefused,
	"org.freedesktop.systemd1.LoadFailed":                 ErrRefused,
	"org.freedesktop.systemd1.JobTypeNotApplicable":       ErrRefused,
	"org.freedesktop.systemd1.TransactionIsDestructive":   ErrRefused,
	"org.freedesktop.systemd1.TransactionJobsConflicting": ErrRefused,
	"org.freedesktop.systemd1.TransactionOrderIsCyclic":   ErrRefused,
	"org.freedesktop.systemd1.NoIsolation":                ErrRefused,
	"org.freedesktop.systemd1.UnitBusy":                   ErrRefused,
	"org.freedesktop.systemd1.UnitInactive":               ErrRefused,
	"org.freedesktop.systemd1.ShuttingDown":               ErrRefused,
	"org.freedesktop.systemd1.ConcurrencyLimitReached":    ErrRefused,
	"org.freedesktop.DBus.Error.InvalidArgs":              ErrBadProperty,
	"org.freedesktop.DBus.Error.PropertyReadOnly":         ErrBadProperty,
	"org.freedesktop.DBus.Error.UnknownProperty":          ErrBadProperty,
	"org.freedesktop.DBus.Error.InvalidSignature":         ErrBadProperty,
	"org.freedesktop.DBus.Error.AccessDenied":             ErrDenied,
	"org.freedesktop.DBus.Error.ServiceUnknown":           ErrBusGone,
	"org.freedesktop.DBus.Error.NameHasNoOwner":           ErrBusGone,
	"org.freedesktop.DBus.Error.NoReply":                  ErrBusGone,
	"org.freedesktop.DBus.Error.Disconnected":             ErrBusGone,
}

// callError gives an error of the bus library its kind; nil stays nil.
func callError(unit, verb string, err error) error {
	if err == nil {
		return nil
	}
	var answer dbus.Error
	if errors.As(err, &answer) {
		kind, ok := kinds[answer.Name]
		if !ok {
			kind = errors.New(strings.TrimPrefix(answer.Name, "org.freedesktop."))
		}
		text := ""
		if len(answer.Body) > 0 {
			text = fmt.Sprint(answer.Body[0])
		}
		return &CallError{Unit: unit, Verb: verb, Kind: kind, Name: answer.Name, Text: text}
	}
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return &CallError{Unit: unit, Verb: verb, Kind: err}
	case errors.Is(err, dbus.ErrClosed), errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), isNetError(err):
		return &CallError{Unit: unit, Verb: verb, Kind: ErrBusGone, Text: err.Error()}
	}
	return &CallError{Unit: unit, Verb: verb, Kind: err}
}

func isNetError(err error) bool {
	var op *net.OpError
	return errors.As(err, &op)
}
