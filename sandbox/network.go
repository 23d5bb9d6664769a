// The addresses of a sandbox whose network is judged connection by connection: of its
// own, in ranges set aside for benchmarks, which no real network uses. None is on the
// loopback, where a program inside could want the port.

package sandbox

const (
	// OwnIPv4 and OwnIPv6 are the sandbox's own: connections come from there, and its own
	// servers answer there.
	OwnIPv4 = "198.19.255.1"
	OwnIPv6 = "2001:2:0:ffff::1"
	// GatewayIPv4 and GatewayIPv6 are where names are resolved and connections end.
	GatewayIPv4 = "198.19.255.2"
	GatewayIPv6 = "2001:2:0:ffff::2"
)

// Gated reports whether connections are judged one by one (and neither all nor none pass).
func (m NetworkMode) Gated() bool { return m == NetworkAllowlist || m == NetworkOpen }
