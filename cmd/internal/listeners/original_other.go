//go:build !linux

package listeners

import (
	"errors"
	"net"
	"net/netip"
)

func original(*net.TCPConn, bool) (netip.AddrPort, error) {
	return netip.AddrPort{}, errors.New("original destinations are known on Linux alone")
}
