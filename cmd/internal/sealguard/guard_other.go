//go:build !linux

package sealguard

import (
	"errors"

	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/gitseal"
)

// Guard watches nothing: no boundary is built on this system.
type Guard struct{}

// New is not available on this system.
func New(Options) (*Guard, error) { return nil, errors.ErrUnsupported }

// Expected is none.
type Expected struct{}

// Expect expects nothing.
func (*Guard) Expect(*sandbox.Plan, []string) *Expected { return nil }

// Failed does nothing.
func (*Expected) Failed() {}

// Started is not available on this system.
func (*Expected) Started(Sandbox) (func(), error) { return nil, errors.ErrUnsupported }

// Close does nothing.
func (*Guard) Close() {}

// Calm halts nothing.
func (*Guard) Calm() (resume func()) { return func() {} }

// Change is not available on this system.
func (*Guard) Change(string, func() error) error { return errors.ErrUnsupported }

// Inside watches nothing.
func (*Guard) Inside(map[string]gitseal.Role, map[string]bool) error { return nil }
