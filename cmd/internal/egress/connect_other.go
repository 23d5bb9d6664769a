//go:build !linux

package egress

import (
	"context"
	"net"
	"net/netip"
)

// beginTCP gives what connects to addr.
func beginTCP(addr netip.AddrPort) (finish func(ctx context.Context) (*net.TCPConn, error), now bool) {
	return func(ctx context.Context) (*net.TCPConn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", addr.String())
		if err != nil {
			return nil, err
		}
		return c.(*net.TCPConn), nil
	}, false
}
