package main

import (
	"context"
	"os"
	"sync"
	"time"

	"agentconnect.md/sandbox/cmd/internal/scope"
	"agentconnect.md/sandbox/cmd/internal/supervisor"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/dbusctl"
	"agentconnect.md/sandbox/units"
)

// link is a connection to the user's manager that is made while other things are done.
type link struct {
	made chan struct{}
	conn *dbusctl.Conn
	err  error
}

func dial(ctx context.Context) *link {
	l := &link{made: make(chan struct{})}
	go func() {
		defer close(l.made)
		l.conn, l.err = connect(ctx)
	}()
	return l
}

func connect(ctx context.Context) (*dbusctl.Conn, error) {
	return dbusctl.Connect(ctx, dbusctl.Here(os.Getenv("XDG_RUNTIME_DIR"), ""), nil)
}

// take gives the connection away, which is done once. Where there is none, it makes one.
func (l *link) take(ctx context.Context) (*dbusctl.Conn, error) {
	if l == nil {
		return connect(ctx)
	}
	select {
	case <-l.made:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if l.err != nil {
		return connect(ctx) // the bus may have come meanwhile
	}
	return l.conn, nil
}

// placer puts the agent's processes into scopes of the user manager. The first placing
// takes the connection of l, which may be nil.
func placer(spec *wire.Spec, l *link) (supervisor.Placer, error) {
	limits := wire.Limits{}
	if spec.Limits != nil {
		limits = *spec.Limits
	}
	var mu sync.Mutex
	return &scope.Placer{
		Agent: spec.Agent, Limits: limits, Unbound: spec.ExecOnly,
		Dial: func(ctx context.Context) (scope.Bus, error) {
			mu.Lock()
			first := l
			l = nil
			mu.Unlock()
			conn, err := first.take(ctx)
			if err != nil {
				mu.Lock()
				l = first // for the next, if this one did not wait for it
				mu.Unlock()
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
	conn, err := connect(ctx)
	if err != nil {
		return // it counts, then
	}
	defer conn.Close()
	_ = conn.ResetFailed(ctx, units.ServiceName(id)) // as above
}

// sessionEnds reports whether the manager is going down. One that does not say counts as such.
func sessionEnds(ctx context.Context) bool {
	conn, err := connect(ctx)
	if err != nil {
		return true
	}
	defer conn.Close()
	down, err := conn.Stopping(ctx)
	return down || err != nil
}

// bus is a connection as package scope wants it.
type bus struct{ *dbusctl.Conn }

func (b bus) StartTransient(ctx context.Context, t units.Transient) error {
	return b.Conn.StartTransient(ctx, t, dbusctl.Fail)
}
