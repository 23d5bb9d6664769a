package rules

import (
	"maps"
	"slices"
)

// common stand for the ports of rules that name none, where not every port can be had: ssh
// and the web.
var common = []uint16{22, 80, 443}

// Ports are the ports that rules of the policy open, in order. Where the kernel cannot lead
// every connection to the gateway these are listened on one by one.
func (s *Set) Ports() []uint16 {
	ports := map[uint16]bool{}
	if s.open {
		for _, p := range common {
			ports[p] = true
		}
	}
	add := func(rules []Rule) {
		for _, r := range rules {
			if r.port != 0 {
				ports[r.port] = true
				continue
			}
			for _, p := range common {
				ports[p] = true
			}
		}
	}
	for _, rules := range s.allow.names {
		add(rules)
	}
	for _, rules := range s.allow.under {
		add(rules)
	}
	add(s.allow.prefixes)
	add(s.allow.host)
	return slices.Sorted(maps.Keys(ports))
}
