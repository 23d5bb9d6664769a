package rules

import (
	"fmt"
	"net/netip"
	"strings"
)

// Set is a policy made ready to decide by. It does not change.
type Set struct {
	open        bool
	ask         int
	allow, deny table
}

// table finds the rules that can match without looking at all of them.
type table struct {
	names    map[string][]Rule // the name itself
	under    map[string][]Rule // by the name that it must lie below
	prefixes []Rule
	host     []Rule
}

// Compile reads a policy. The error names every rule that cannot be read.
func Compile(p Policy) (*Set, error) {
	s := &Set{open: p.Open, ask: p.Ask}
	var bad []string
	for _, part := range []struct {
		t     *table
		words []string
	}{{&s.allow, p.Allow}, {&s.deny, p.Deny}} {
		part.t.names, part.t.under = map[string][]Rule{}, map[string][]Rule{}
		for _, w := range part.words {
			rules, err := Parse(w)
			if err != nil {
				bad = append(bad, err.Error())
			}
			for _, r := range rules {
				part.t.add(r)
			}
		}
	}
	if len(bad) > 0 {
		return nil, fmt.Errorf("%s", strings.Join(bad, "; "))
	}
	return s, nil
}

func (t *table) add(r Rule) {
	r.text = r.Text()
	switch {
	case r.host:
		t.host = append(t.host, r)
	case r.prefix.IsValid():
		t.prefixes = append(t.prefixes, r)
	case r.under != "":
		t.under[r.under] = append(t.under[r.under], r)
	default:
		t.names[r.name] = append(t.names[r.name], r)
	}
}

// Query is what an agent wants.
type Query struct {
	// Name is in the form of ASCIIName; empty when only an address is known.
	Name string
	// Addr is where a connection goes; the zero Addr: somebody else looks the name up.
	Addr netip.Addr
	// Own: Addr is one of this machine's own addresses.
	Own bool
	// Port 0 asks whether the name may be looked up.
	Port uint16
}

// Reason is a stable word for why a verdict is what it is.
type Reason string

// Reasons.
const (
	ByRule   Reason = "rule"     // a rule allows it
	ByMode   Reason = "open"     // no rule names it, and the mode is open
	Denied   Reason = "deny"     // a deny rule names it
	Unlisted Reason = "unlisted" // no rule names it, and the mode is an allow-list
	Range    Reason = "range"    // the address is one that is always denied
	Own      Reason = "own"      // the address is this machine's own
)

// Verdict is a decision.
type Verdict struct {
	Allowed bool
	Reason  Reason
	// Rule is the text of the rule that decided; of several that say the same, the one whose
	// text sorts first.
	Rule string
	// What says which range the address is in, with Reason Range.
	What string
	// ByName: it is allowed for its name, so the name that the program tells the server
	// must be that name. Not set where a rule says any-sni or names the address.
	ByName bool
	// Ask: the operator may be asked.
	Ask bool
}

// Decide is the one place where it is decided what is reached. Deny beats allow; the order
// of rules has no meaning.
//
// A name may be looked up if a rule allows it on any port, and no rule denies it on all.
func (s *Set) Decide(q Query) Verdict {
	lookup := q.Port == 0
	addr := q.Addr.Unmap().WithZone("")
	if r, ok := s.deny.first(q.Name, addr, func(r Rule) bool { return r.port == 0 || !lookup && r.port == q.Port }); ok {
		return Verdict{Reason: Denied, Rule: r.text}
	}
	port := func(r Rule) bool { return lookup || r.port == 0 || r.port == q.Port }
	if addr.IsValid() {
		prefix, what, special := Special(addr)
		if r, ok := s.allow.first("", addr, func(r Rule) bool { return port(r) && reaches(r.prefix, prefix, special, q.Own) }); ok {
			return Verdict{Allowed: true, Reason: ByRule, Rule: r.text}
		}
		switch {
		case special:
			return Verdict{Reason: Range, What: what}
		case q.Own:
			return Verdict{Reason: Own}
		}
	}
	if r, ok := s.allow.first(q.Name, netip.Addr{}, port); ok {
		loose, free := s.allow.first(q.Name, netip.Addr{}, func(r Rule) bool { return port(r) && r.anySNI })
		if free {
			r = loose
		}
		return Verdict{Allowed: true, Reason: ByRule, Rule: r.text, ByName: !free}
	}
	if s.open {
		return Verdict{Allowed: true, Reason: ByMode}
	}
	return Verdict{Reason: Unlisted, Ask: s.ask > 0}
}

// Host decides about a port of the host's loopback; port 0 asks whether there is any.
func (s *Set) Host(port uint16) Verdict {
	fits := func(r Rule) bool { return port == 0 || r.port == port }
	if r, ok := least(s.deny.host, fits); ok && port != 0 {
		return Verdict{Reason: Denied, Rule: r.text}
	}
	if r, ok := least(s.allow.host, fits); ok {
		return Verdict{Allowed: true, Reason: ByRule, Rule: r.text}
	}
	return Verdict{Reason: Unlisted, Ask: s.ask > 0 && port != 0}
}

// Reachable reports whether a connection to addr is possible at all, on some port: what is
// not is not given for any name.
func (s *Set) Reachable(addr netip.Addr, own bool) bool {
	addr = addr.Unmap().WithZone("")
	if _, denied := s.deny.first("", addr, func(r Rule) bool { return r.port == 0 }); denied {
		return false
	}
	within, _, special := Special(addr)
	if !special && !own {
		return true
	}
	_, named := s.allow.first("", addr, func(r Rule) bool { return reaches(r.prefix, within, special, own) })
	return named
}

// reaches reports whether an address rule opens an address that lies in a special range or
// is the machine's own: only one that names it, not one in which it happens to lie.
func reaches(rule, within netip.Prefix, special, own bool) bool {
	if own && !rule.IsSingleIP() {
		return false
	}
	return !special || rule.Bits() >= within.Bits()
}

// AskFor is for how many seconds something unlisted waits for the operator.
func (s *Set) AskFor() int { return s.ask }

// Open reports whether what no rule names is reached.
func (s *Set) Open() bool { return s.open }

// DeniesNames reports whether a deny rule is for a name.
func (s *Set) DeniesNames() bool { return len(s.deny.names)+len(s.deny.under) > 0 }

// first is the rule for name or addr that fits and whose text sorts first.
func (t *table) first(name string, addr netip.Addr, fits func(Rule) bool) (Rule, bool) {
	best, found := Rule{}, false
	take := func(rules []Rule, match func(Rule) bool) {
		if r, ok := least(rules, func(r Rule) bool { return (match == nil || match(r)) && fits(r) }); ok && (!found || r.text < best.text) {
			best, found = r, true
		}
	}
	if name != "" {
		take(t.names[name], nil)
		for rest := name; ; {
			_, after, ok := strings.Cut(rest, ".")
			if !ok {
				break
			}
			take(t.under[after], nil)
			rest = after
		}
	}
	if addr.IsValid() {
		take(t.prefixes, func(r Rule) bool { return r.prefix.Contains(addr) })
	}
	return best, found
}

// least is the rule that fits and whose text sorts first.
func least(rules []Rule, fits func(Rule) bool) (best Rule, found bool) {
	for _, r := range rules {
		if fits(r) && (!found || r.text < best.text) {
			best, found = r, true
		}
	}
	return best, found
}
