//go:build !linux

package launch

import (
	"context"
	"errors"
	"os"
	"runtime"
)

// Dialer connects to ports inside a sandbox; this system has none.
type Dialer struct{}

// NewDialer is an error: there is no sandbox.
func NewDialer(context.Context, string, *Inside) (*Dialer, error) {
	return nil, errors.New("there is no sandbox on " + runtime.GOOS)
}

// Dial is an error.
func (d *Dialer) Dial(uint16) (*os.File, error) { return nil, errors.New("there is no sandbox") }

// Close does nothing.
func (d *Dialer) Close() {}
