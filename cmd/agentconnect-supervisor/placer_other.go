//go:build !linux

package main

import (
	"errors"

	"agentconnect.md/sandbox/cmd/internal/supervisor"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// placer puts the agent's processes into scopes of the user manager.
func placer(*wire.Spec) (supervisor.Placer, error) {
	return nil, errors.New("supervision by systemd is not part of this build")
}

// forgive has no service manager to ask.
func forgive(string) {}
