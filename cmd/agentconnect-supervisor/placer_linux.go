package main

import (
	"context"
	"os"
	"time"

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

// forgiveTime bounds how long a refused start waits for the manager.
const forgiveTime = 2 * time.Second

// forgive takes a refused start off systemd's count, which is for storms of restarts: who
// asks again and again is to hear the reason each time, and when it is gone the next
// start has to work.
func forgive(id string) {
	ctx, cancel := context.WithTimeout(context.Background(), forgiveTime)
	defer cancel()
	conn, err := dbusctl.Connect(ctx, dbusctl.Here(os.Getenv("XDG_RUNTIME_DIR"), ""), nil)
	if err != nil {
		return // it counts, then
	}
	defer conn.Close()
	_ = conn.ResetFailed(ctx, units.ServiceName(id)) // as above
}

// bus is a connection as package scope wants it.
type bus struct{ *dbusctl.Conn }

func (b bus) StartTransient(ctx context.Context, t units.Transient) error {
	return b.Conn.StartTransient(ctx, t, dbusctl.Fail)
}
