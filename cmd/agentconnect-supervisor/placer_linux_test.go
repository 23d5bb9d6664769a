package main

import (
	"context"
	"errors"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/scope"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/dbusctl"
)

// A placing is given up with the plan that it is for; the next one has the connection.
func TestConnectionOfAPlacingThatIsGivenUpIsNotLost(t *testing.T) {
	l := &link{made: make(chan struct{})}
	made, err := placer(&wire.Spec{}, l)
	if err != nil {
		t.Fatal(err)
	}
	p := made.(*scope.Placer)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Dial(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	l.conn = &dbusctl.Conn{}
	close(l.made)
	if got, err := p.Dial(t.Context()); err != nil || got.(bus).Conn != l.conn {
		t.Errorf("another connection: %v, %v", got, err)
	}
}
