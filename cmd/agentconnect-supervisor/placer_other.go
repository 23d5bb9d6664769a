//go:build !linux

package main

import (
	"context"
	"errors"

	"agentconnect.md/sandbox/cmd/internal/supervisor"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// link is a connection to a service manager.
type link struct{}

func dial(context.Context) *link { return nil }

// placer puts the agent's processes into scopes of the user manager.
func placer(*wire.Spec, *link) (supervisor.Placer, error) {
	return nil, errors.New("supervision by systemd is not part of this build")
}

// forgive has no service manager to ask.
func forgive(string) {}

// sessionEnds has no service manager to ask.
func sessionEnds(context.Context) bool { return true }
