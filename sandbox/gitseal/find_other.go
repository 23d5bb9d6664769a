//go:build !linux

package gitseal

import "errors"

// Find finds nothing: no boundary is built on this system.
func Find(Options) *Found { return &Found{} }

func makeHooks(string) error { return errors.ErrUnsupported }

func alone(string) error { return nil }
