//go:build !linux

package main

import (
	"runtime"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

func launch() *wire.LaunchError {
	return &wire.LaunchError{Step: "launch", Err: "there is no boundary on " + runtime.GOOS + "; run agents with --no-sandbox"}
}
