package main

import (
	"context"
	"os"

	"agentconnect.md/sandbox/cmd/internal/scope"
	"agentconnect.md/sandbox/cmd/internal/supervisor"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/dbusctl"
	"agentconnect.md/sandbox/units"
)

// placer puts the agent's processes into scopes of the user manager.
func placer(spec *wire.Spec) (supervisor.Placer, error) {
	limits := wire.Limits{}
	if spec.Limits != nil {
		limits = *spec.Limits
	}
	place := dbusctl.Here(os.Getenv("XDG_RUNTIME_DIR"), "")
	return &scope.Placer{
		Agent: spec.Agent, Limits: limits, Unbound: spec.ExecOnly,
		Dial: func(ctx context.Context) (scope.Bus, error) {
			conn, err := dbusctl.Connect(ctx, place, nil)
			if err != nil {
				return nil, err
			}
			return bus{conn}, nil
		},
	}, nil
}

// bus is a connection as package scope wants it.
type bus struct{ *dbusctl.Conn }

func (b bus) StartTransient(ctx context.Context, t units.Transient) error {
	return b.Conn.StartTransient(ctx, t, dbusctl.Fail)
}
