// Addresses that are never reached because a public name leads there: they mean the host
// itself, its neighbours, or nothing.

package rules

import (
	"net/netip"
	"sync"
)

// special are the ranges, from the registries of special-purpose addresses (RFC 6890 and
// its successors), with what clouds put their metadata on. A longer prefix comes first where
// two overlap.
var special = sync.OnceValue(func() []specialRange {
	var all []specialRange
	for _, s := range []struct{ prefix, what string }{
		{"169.254.169.254/32", "cloud metadata"},
		{"168.63.129.16/32", "cloud metadata"}, // Azure's, a public address otherwise
		{"192.0.0.192/32", "cloud metadata"},   // Oracle's
		{"100.100.100.200/32", "cloud metadata"},
		{"fd00:ec2::/32", "cloud metadata"},
		{"fd20:ce::/32", "cloud metadata"},

		{"0.0.0.0/8", "this network"},
		{"10.0.0.0/8", "a private network"},
		{"100.64.0.0/10", "a carrier's network"},
		{"127.0.0.0/8", "loopback"},
		{"169.254.0.0/16", "link-local"},
		{"172.16.0.0/12", "a private network"},
		{"192.0.0.0/24", "protocol assignments"},
		{"192.0.2.0/24", "documentation"},
		{"192.31.196.0/24", "AS112"},
		{"192.52.193.0/24", "AMT relays"},
		{"192.88.99.0/24", "6to4 relays"},
		{"192.168.0.0/16", "a private network"},
		{"192.175.48.0/24", "AS112"},
		{"198.18.0.0/15", "benchmarking, and the gateway itself"},
		{"198.51.100.0/24", "documentation"},
		{"203.0.113.0/24", "documentation"},
		{"224.0.0.0/4", "multicast"},
		{"240.0.0.0/4", "reserved"}, // and broadcast

		{"::/96", "IPv4-compatible"}, // :: and ::1 as well
		{"::ffff:0:0/96", "IPv4-mapped"},
		{"::ffff:0:0:0/96", "IPv4-translated"},
		{"64:ff9b::/96", "NAT64"}, // carries an IPv4 address that nobody here would look at
		{"64:ff9b:1::/48", "NAT64"},
		{"100::/64", "discard-only"},
		{"100:0:0:1::/64", "dummy"},
		{"2001::/23", "protocol assignments"}, // Teredo, ORCHID, benchmarking
		{"2001:db8::/32", "documentation"},
		{"2002::/16", "6to4"},
		{"2620:4f:8000::/48", "AS112"},
		{"3fff::/20", "documentation"},
		{"5f00::/16", "segment routing"},
		{"fc00::/7", "a private network"},
		{"fe80::/10", "link-local"},
		{"fec0::/10", "site-local"},
		{"ff00::/8", "multicast"},
	} {
		all = append(all, specialRange{netip.MustParsePrefix(s.prefix), s.what})
	}
	return all
})

type specialRange struct {
	prefix netip.Prefix
	what   string
}

// Special returns the range of addresses that a is in and that no public name may lead to.
func Special(a netip.Addr) (prefix netip.Prefix, what string, ok bool) {
	a = a.Unmap().WithZone("")
	for _, s := range special() {
		if s.prefix.Contains(a) {
			return s.prefix, s.what, true
		}
	}
	if a.Is6() && a.As16()[0]>>5 != 1 { // all that was ever given out is 2000::/3
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0), "not given out", true
	}
	if !a.IsValid() {
		return netip.Prefix{}, "not an address", true
	}
	return netip.Prefix{}, "", false
}
