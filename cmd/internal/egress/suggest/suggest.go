// Package suggest makes rules out of what an agent used. It is apart from package rules, so
// that the supervisor does not link the list of public suffixes. It does not judge whether
// what was used should have been.
package suggest

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/publicsuffix"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
)

// Use is something that was connected to.
type Use struct {
	Name string // empty: by its address
	Addr netip.Addr
	Port uint16
}

// When several rules become one that opens more.
const (
	manyMembers = 2 // of a named set
	manyPorts   = 3 // of one name
	manyNames   = 4 // below one parent, on one port
)

// Rules are the fewest rules that cover all of used. A rule that opens more than was used
// stands for several: a named set, any port, or every name below a domain that belongs to
// one owner.
func Rules(used []Use) []string {
	left := map[string]Use{} // by the rule for it alone
	for _, u := range used {
		left[u.rule()] = u
	}
	var out []string
	cover := func(rule string) {
		out = append(out, rule)
		for text, u := range left {
			if u.under(rule) {
				delete(left, text)
			}
		}
	}
	count := func(rule string) (n int) {
		for _, u := range left {
			if u.under(rule) {
				n++
			}
		}
		return n
	}
	for _, set := range rules.Sets() {
		if count(set) >= manyMembers {
			cover(set)
		}
	}
	for _, u := range sorted(left) {
		if u.Name != "" && u.Name != rules.HostName && count(exact(u.Name)) >= manyPorts {
			cover(exact(u.Name))
		}
	}
	for _, u := range sorted(left) {
		_, parent, ok := strings.Cut(u.Name, ".")
		for ok {
			own, err := publicsuffix.EffectiveTLDPlusOne(parent)
			if err != nil || !strings.HasSuffix(parent, own) {
				break // everybody's
			}
			wild := "*." + parent + ":" + strconv.Itoa(int(u.Port))
			if count(wild) >= manyNames {
				cover(wild)
				break
			}
			_, parent, ok = strings.Cut(parent, ".")
		}
	}
	for _, u := range sorted(left) {
		out = append(out, u.rule())
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// rule is the one that opens u and nothing else.
func (u Use) rule() string {
	port := ":" + strconv.Itoa(int(u.Port))
	switch {
	case u.Name != "":
		return u.Name + port
	case u.Addr.Is6():
		return "[" + u.Addr.String() + "]" + port
	}
	return u.Addr.String() + port
}

// exact is the rule for a name on every port, also where it is a set's name.
func exact(name string) string {
	if !strings.Contains(name, ".") {
		return name + "."
	}
	return name
}

// under reports whether the rule covers u.
func (u Use) under(rule string) bool {
	one, err := rules.Parse(u.rule())
	return err == nil && rules.Covers(rule, one[0])
}

func sorted(m map[string]Use) []Use {
	all := make([]Use, 0, len(m))
	for _, u := range m {
		all = append(all, u)
	}
	slices.SortFunc(all, func(a, b Use) int { return cmp.Compare(a.rule(), b.rule()) })
	return all
}
