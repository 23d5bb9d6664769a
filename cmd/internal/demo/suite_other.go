//go:build !linux

package main

import (
	"context"
	"errors"
	"io"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

func (s *stage) suite(context.Context, io.Writer, int, []row, *selftest.Targets, []byte) error {
	return errors.New("the sandbox needs Linux")
}
