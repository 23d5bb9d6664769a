package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/atomicfile"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/sandbox"
)

// WriteError: our own state cannot be written.
type WriteError struct {
	Path string
	Err  error
}

func (e *WriteError) Error() string {
	return fmt.Sprintf("cannot write %s: %v; free space, make it writable, or choose another directory with --root", e.Path, e.Err)
}

func (e *WriteError) Unwrap() error { return e.Err }

func cannotWrite(path string, err error) error {
	var pe interface{ Unwrap() error }
	if errors.As(err, &pe) { // the path stands in front already
		err = pe.Unwrap()
	}
	return &WriteError{Path: path, Err: err}
}

// Code is the exit code that an error stands for, on the command line and in the
// control socket's answers.
func Code(err error) int {
	var (
		refusal *Refusal
		answer  *control.Error
		write   *WriteError
		atomic  *atomicfile.Error
		end     *EndError
		denied  *sandbox.RefusedError
		coded   interface{ ExitCode() int }
	)
	switch {
	case err == nil:
		return 0
	case errors.As(err, &refusal):
		return refusal.Code
	case errors.As(err, &answer):
		return answer.Code
	case errors.As(err, &end):
		if end.Code == exitRefused || end.Code == exitBadSpec {
			return end.Code
		}
		return 1
	case errors.Is(err, agent.ErrNotFound):
		return 66
	case errors.As(err, &write), errors.As(err, &atomic):
		return 73
	case errors.Is(err, control.ErrNotRunning), errors.Is(err, agent.ErrBusy):
		return 75
	case errors.As(err, &coded):
		return coded.ExitCode()
	case errors.Is(err, agent.ErrInvalid), errors.As(err, &denied):
		return 78
	}
	return 1
}

// httpStatus goes with an exit code on the control socket.
func httpStatus(err error) int {
	switch Code(err) {
	case 66:
		return http.StatusNotFound
	case 69, 75:
		return http.StatusServiceUnavailable
	case 73:
		return http.StatusInsufficientStorage
	case 78:
		return http.StatusUnprocessableEntity
	}
	switch {
	case errors.Is(err, ErrSuperseded):
		return http.StatusConflict
	case errors.Is(err, context.DeadlineExceeded):
		return http.StatusGatewayTimeout
	}
	return http.StatusInternalServerError
}
