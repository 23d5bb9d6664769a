// Package egress decides what an agent behind the boundary reaches, and carries it there.
// It is handed connections with the address that the agent asked for, and the sockets on
// which the agent's DNS queries arrive; it answers names, judges connections by the names
// their address was given for, dials, copies, refuses and records. It makes no namespace
// and no listener: whoever links it does.
package egress

import (
	"log/slog"
	"net/netip"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// HostAddr is what the name "host" leads to inside: the address by which a rule
// host:PORT reaches a port of the host's loopback. Nothing listens there but the gateway.
var HostAddr = netip.MustParseAddr("198.19.255.2")

// HostName is the name for it; a rule writes it the same way.
const HostName = rules.HostName

// Config is what a gateway is told at its start.
type Config struct {
	Agent string
	// Server names the MCP server of the agent's whose way out this is; empty: the agent's own.
	Server string
	// Egress is from the sealed spec. Records may be empty: none are written.
	wire.Egress
	// Log may be nil.
	Log *slog.Logger
	// Changed is called when Stats or Pending changed, at most once a second and never
	// twice at once; may be nil.
	Changed func()
}
