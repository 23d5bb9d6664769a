// Package egress decides what an agent behind the boundary reaches, and carries it there.
// It is handed connections with the address that the agent asked for, and the sockets on
// which the agent's DNS queries arrive; it answers names, judges connections by the names
// their address was given for, dials, copies, refuses and records. It makes no namespace
// and no listener: whoever links it does.
package egress

import (
	"log/slog"
	"net/netip"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
)

// HostAddr is what the name "host" leads to inside: the address by which a rule
// host:PORT reaches a port of the host's loopback. Nothing listens there but the gateway.
var HostAddr = netip.MustParseAddr("198.19.255.2")

// HostName is the name for it; a rule writes it the same way.
const HostName = rules.HostName

// Config is what a gateway is told at its start.
type Config struct {
	Agent string
	// Policy says what is reached; see SetRules.
	Policy rules.Policy
	// Records is the path of the record of connections (audit.EgressPath); empty: none.
	Records string
	// Proxy is the operator's own way out; the zero value dials directly.
	Proxy ProxyConfig
	// Log may be nil.
	Log *slog.Logger
	// Changed is called when Stats or Pending changed, at most once a second and never
	// twice at once; may be nil.
	Changed func()
}

// ProxyConfig holds the proxy variables of the daemon's environment. They may contain a
// password and are never logged.
type ProxyConfig struct {
	HTTPS   string `json:"https,omitempty"` // HTTPS_PROXY
	HTTP    string `json:"http,omitempty"`  // HTTP_PROXY
	All     string `json:"all,omitempty"`   // ALL_PROXY
	NoProxy string `json:"no,omitempty"`    // NO_PROXY
}

// Stats counts since the gateway started.
type Stats struct {
	Allowed  uint64 `json:"allowed"` // connections that were let out
	Denied   uint64 `json:"denied"`  // connections and names that were refused
	Failed   uint64 `json:"failed"`  // let out, and the other side was not reached
	Active   int    `json:"active"`  // connections now
	Sent     uint64 `json:"sent"`    // bytes, agent to outside, of connections that ended
	Received uint64 `json:"received"`
}

// Ask is something that waits for the operator's word.
type Ask struct {
	Host  string    `json:"host"`           // a name, or an address
	Port  uint16    `json:"port,omitempty"` // 0: the name was asked for, no connection yet
	Since time.Time `json:"since"`
	Until time.Time `json:"until"` // refused then
}

// Scope says for how long an operator's word holds.
type Scope string

const (
	Once   Scope = "once"   // the next connection, or the one that waits
	Run    Scope = "run"    // until the agent ends
	Always Scope = "always" // as Run; that agent.json says so, too, is the caller's work
)
