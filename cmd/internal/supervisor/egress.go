// The agent's way out: the gateway that this supervisor is, and the operator's words to it.

package supervisor

import (
	"context"
	"errors"
	"fmt"

	"agentconnect.md/sandbox/cmd/internal/egress"
	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// openGateway makes the gateway that the spec asks for; nil where it asks for none. Whoever
// calls it closes it when the agent has ended.
func (s *Supervisor) openGateway() (*egress.Gateway, error) {
	if s.spec.Egress == nil {
		return nil, nil
	}
	g, err := egress.New(egress.Config{Agent: s.spec.Agent, Egress: *s.spec.Egress, Log: s.opts.Log, Changed: s.said})
	if err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	s.mu.Lock()
	s.gateway = g
	s.mu.Unlock()
	return g, nil
}

// ownGateway is the agent's own; nil without one.
func (s *Supervisor) ownGateway() *egress.Gateway {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.gateway
}

// serveNetwork carries the connections of a started program through a gateway, until it has
// ended.
func (s *Supervisor) serveNetwork(p *launch.Process, g *egress.Gateway) {
	set := p.Network
	if set == nil {
		return
	}
	if g == nil {
		set.Close() // refused by the kernel: nobody judges them
		return
	}
	// Not the context of a stop: a runtime that ends gracefully may still have to say so.
	ctx, cancel := context.WithCancel(context.Background())
	s.wg.Go(func() {
		<-p.Done()
		cancel()
		set.Close()
	})
	s.wg.Go(func() { set.Accept(ctx, g.HandleTCP) })
	s.wg.Go(func() {
		if err := g.ServeDNS(ctx, set.UDP, set.TCP); err != nil && ctx.Err() == nil {
			s.opts.Log.Error("names are not resolved any more: " + err.Error())
		}
	})
}

// ports are listened on where the kernel cannot lead every connection to one listener.
func ports(e *wire.Egress) []uint16 {
	if e == nil {
		return nil
	}
	set, err := rules.Compile(e.Policy)
	if err != nil {
		return nil // the gateway has refused it already
	}
	return set.Ports()
}

// said tells the service manager the status line anew.
func (s *Supervisor) said() { s.opts.Notify("STATUS=" + s.line()) }

// word does what the operator says about the network.
func (s *Supervisor) word(w *wire.EgressWord) error {
	g := s.ownGateway()
	switch {
	case g == nil:
		return fmt.Errorf("agent %s has no rules for its network in mode %s; give it some with `agentconnect agent edit %s --network allowlist` (or open) and `agentconnect agent restart %s`", s.spec.Agent, s.network(), s.spec.Agent, s.spec.Agent)
	case w == nil:
		return errors.New("nothing is said about the network")
	case w.Policy != nil:
		return g.SetRules(*w.Policy)
	case w.Allow:
		return g.Allow(w.Host, w.Scope)
	}
	return g.Deny(w.Host, w.Scope)
}

// egressState is for the status; nil without a gateway. The caller holds s.mu.
func (s *Supervisor) egressState() *wire.EgressState {
	if s.gateway == nil {
		return nil
	}
	return &wire.EgressState{Stats: s.gateway.Stats(), Pending: s.gateway.Pending()}
}

// egressLine is its part of the status line.
func egressLine(e *wire.EgressState) string {
	line := fmt.Sprintf("egress %d allowed %d denied", e.Stats.Allowed, e.Stats.Denied)
	if n := len(e.Pending); n > 0 {
		line += fmt.Sprintf(" %d asking", n)
	}
	return line
}
