//go:build !linux

package listeners

import (
	"errors"
	"net/netip"

	"agentconnect.md/sandbox/cmd/internal/tcp"
)

func original(tcp.Conn, bool) (netip.AddrPort, error) {
	return netip.AddrPort{}, errors.New("original destinations are known on Linux alone")
}
