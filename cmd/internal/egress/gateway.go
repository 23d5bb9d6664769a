package egress

import (
	"context"
	"net"
	"net/netip"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// Gateway is the way out of one agent.
type Gateway struct{}

// New makes a gateway. The error names the rule that cannot be read, or the record that
// cannot be opened.
func New(c Config) (*Gateway, error) { return &Gateway{}, nil }

// HandleTCP carries one connection of the agent that was meant for dst, to its end. It
// owns conn. It returns when the connection is over or ctx ends, which cuts it.
func (g *Gateway) HandleTCP(ctx context.Context, conn *net.TCPConn, dst netip.AddrPort) { conn.Close() }

// ServeDNS answers the agent's queries until ctx ends or the sockets are closed. The UDP
// sockets carry IP_PKTINFO or IPV6_RECVPKTINFO, so that an answer comes from the address
// that was asked. It closes all of them.
func (g *Gateway) ServeDNS(ctx context.Context, udp []*net.UDPConn, tcp []net.Listener) error {
	return nil
}

// SetRules replaces the policy. Words that were said for this run stay. Connections that
// the new one denies are cut.
func (g *Gateway) SetRules(p rules.Policy) error { return nil }

// Stats returns the counters.
func (g *Gateway) Stats() wire.EgressStats { return wire.EgressStats{} }

// Pending returns what waits for the operator, oldest first.
func (g *Gateway) Pending() []wire.EgressAsk { return nil }

// Allow lets host (HOST[:PORT], as in a rule) through, what waits for it included. It is
// an error where a rule of the policy denies it, since that would win.
func (g *Gateway) Allow(host string, s wire.EgressScope) error { return nil }

// Deny refuses host, and cuts what is connected to it.
func (g *Gateway) Deny(host string, s wire.EgressScope) error { return nil }

// Close refuses what waits, cuts what is connected, writes the last records and returns
// when all is over.
func (g *Gateway) Close() error { return nil }
