//go:build !linux

package egress

import (
	"context"
	"net"
	"net/netip"

	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// beginTCP gives what connects to addr.
func beginTCP(addr netip.AddrPort) (finish func(ctx context.Context) (tcp.Conn, error), now bool) {
	return func(ctx context.Context) (tcp.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", addr.String())
		if err != nil {
			return nil, err
		}
		return c.(*net.TCPConn), nil
	}, false
}
