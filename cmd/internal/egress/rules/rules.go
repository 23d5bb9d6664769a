package rules

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"golang.org/x/net/idna"
)

// anySNI is the word behind a rule that lets any server name pass: the connection is
// judged by its address alone.
const anySNI = "any-sni"

// maxRule bounds a rule, in bytes.
const maxRule = 300

// Rule is one way out, or one that is closed.
type Rule struct {
	// Exactly one of these says where to.
	name   string       // the name itself
	under  string       // any name below it: *.NAME
	prefix netip.Prefix // an address or a network
	host   bool         // the host's loopback; with a port always

	port   uint16 // 0: any
	anySNI bool
	set    string // the named set that it came from
	text   string // Text, kept
}

// Text is the rule in its one form: lower case, IDN as xn--, addresses in short form. Of a
// set it is the set's name and the member.
func (r Rule) Text() string {
	var s string
	switch {
	case r.host:
		s = HostName
	case r.name != "":
		s = r.name
		if !strings.Contains(s, ".") && r.port == 0 && r.set == "" {
			s += "." // else it could be the name of a set
		}
	case r.under != "":
		s = "*." + r.under
	case r.prefix.IsSingleIP():
		s = r.prefix.Addr().String()
	default:
		s = r.prefix.String()
	}
	if r.port != 0 {
		if r.prefix.IsValid() && r.prefix.Addr().Is6() {
			s = "[" + s + "]"
		}
		s += ":" + strconv.Itoa(int(r.port))
	}
	if r.anySNI {
		s += " " + anySNI
	}
	if r.set != "" {
		s = r.set + " (" + s + ")"
	}
	return s
}

// Parse reads one rule:
//
//	example.com          that name, any port
//	*.example.com        every name below it, not the name itself
//	example.com:443      one port
//	10.1.0.0/16          a network, or one address; with a port 10.1.0.0/16:5432, [2001:db8::/32]:443
//	host:5432            a port of the host's loopback
//	npm                  a named set, see Sets; a server of that name is "npm." or "npm:443"
//	example.com any-sni  the name that the program tells the server is not compared
//
// A set gives several. The error quotes the rule and says what to write instead.
func Parse(text string) ([]Rule, error) {
	bad := func(format string, args ...any) ([]Rule, error) {
		return nil, fmt.Errorf("rule %s: %s", quoted(text), fmt.Sprintf(format, args...))
	}
	if len(text) > maxRule {
		return bad("longer than %d bytes", maxRule)
	}
	words := strings.Fields(text)
	var r Rule
	switch {
	case len(words) == 0:
		return bad("write a host such as \"example.com\" or \"example.com:443\"")
	case len(words) == 2 && words[1] == anySNI:
		r.anySNI = true
	case len(words) > 1:
		return bad("%s is not known behind a host; the only word there is %s", quoted(words[1]), anySNI)
	}
	s := words[0]
	if members, ok := sets[strings.ToLower(s)]; ok {
		var all []Rule
		for _, m := range members {
			one, err := Parse(m)
			if err != nil {
				return bad("%v", err) // a test reads all of them
			}
			one[0].set, one[0].anySNI = strings.ToLower(s), r.anySNI
			all = append(all, one[0])
		}
		return all, nil
	}
	if strings.Contains(s, "://") {
		return bad("write the host alone, without a scheme or a path: %s", quoted(hostOfURL(s)))
	}
	host, port, err := splitPort(s)
	if err != nil {
		return bad("%v", err)
	}
	r.port = port
	switch p, err := parsePrefix(host); {
	case err != nil:
		return bad("%v", err)
	case p.IsValid():
		if r.anySNI {
			return bad("%s is for names; a rule for an address compares none", anySNI)
		}
		r.prefix = p
		return []Rule{r}, nil
	}
	if strings.Contains(host, "/") {
		return bad("write the host alone, without a path, or a network such as 10.0.0.0/8")
	}
	name, wild := strings.CutPrefix(host, "*.")
	if strings.Contains(name, "*") {
		if host == "*" {
			return bad("for every host use network mode open")
		}
		return bad("a star stands alone in front of a name: \"*.example.com\"")
	}
	name, err = Name(name)
	if err != nil {
		return bad("%v", err)
	}
	switch {
	case name == HostName && !wild:
		if r.port == 0 {
			return bad("give the port of this machine's loopback: \"host:5432\"")
		}
		if r.anySNI {
			return bad("%s is for servers elsewhere", anySNI)
		}
		r.host = true
	case name == "localhost" || strings.HasSuffix(name, ".localhost"):
		return bad("localhost is the agent's own inside; for a port of this machine's loopback write \"host:PORT\"")
	case wild:
		r.under = name
	default:
		r.name = name
	}
	return []Rule{r}, nil
}

// hostOfURL is what a URL would be as a rule.
func hostOfURL(s string) string {
	scheme, rest, _ := strings.Cut(s, "://")
	rest, _, _ = strings.Cut(rest, "/")
	if i := strings.LastIndexByte(rest, '@'); i >= 0 {
		rest = rest[i+1:]
	}
	if !strings.Contains(rest, ":") {
		switch strings.ToLower(scheme) {
		case "https", "wss":
			rest += ":443"
		case "http", "ws":
			rest += ":80"
		case "ssh":
			rest += ":22"
		}
	}
	return rest
}

// splitPort takes the port off. IPv6 with a port stands in brackets.
func splitPort(s string) (host string, port uint16, err error) {
	if _, err := netip.ParseAddr(s); err == nil {
		return s, 0, nil
	}
	if _, err := netip.ParsePrefix(s); err == nil {
		return s, 0, nil
	}
	if inner, ok := strings.CutPrefix(s, "["); ok {
		host, rest, closed := strings.Cut(inner, "]")
		if !closed || rest != "" && rest[0] != ':' {
			return "", 0, errors.New("an IPv6 address with a port is written [2001:db8::1]:443")
		}
		if strings.Contains(host, "[") || !strings.Contains(host, ":") {
			return "", 0, errors.New("brackets are for IPv6 addresses")
		}
		if rest == "" {
			return host, 0, nil
		}
		port, err := parsePort(rest[1:])
		return host, port, err
	}
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return s, 0, nil
	}
	if strings.IndexByte(s, ':') != i {
		return "", 0, errors.New("not an address; an IPv6 address with a port is written [2001:db8::1]:443")
	}
	port, err = parsePort(s[i+1:])
	return s[:i], port, err
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || s[0] == '+' {
		return 0, errors.New("a port is a number from 1 to 65535")
	}
	return uint16(n), nil
}

// parsePrefix reads an address or a network; the zero prefix is neither.
func parsePrefix(s string) (netip.Prefix, error) {
	var p netip.Prefix
	if a, err := netip.ParseAddr(s); err == nil {
		if a.Zone() != "" {
			return p, errors.New("an address with a zone means something on one machine alone; write it without")
		}
		a = a.Unmap()
		p = netip.PrefixFrom(a, a.BitLen())
	} else if q, err := netip.ParsePrefix(s); err == nil {
		p = q
		if q.Addr().Is4In6() {
			return p, errors.New("write the IPv4 network itself")
		}
		if q.Masked() != q {
			return p, fmt.Errorf("has bits behind its length; write %s, or the address alone", q.Masked())
		}
	} else {
		return netip.Prefix{}, nil
	}
	switch a := p.Addr(); {
	case a.IsLoopback():
		return p, errors.New("the loopback stays inside the agent's own network; for a port of this machine's write \"host:PORT\"")
	case a.IsUnspecified() && p.Bits() == 0:
		return p, errors.New("for everything public use network mode open; private networks are named one by one")
	case a.IsUnspecified():
		return p, errors.New("not an address that anything has")
	case a.IsMulticast():
		return p, errors.New("multicast does not leave the agent's own network")
	}
	return p, nil
}

// profile maps what people write for an international name, as browsers do.
var profile = sync.OnceValue(func() *idna.Profile {
	return idna.New(idna.MapForLookup(), idna.Transitional(false), idna.BidiRule(), idna.StrictDomainName(false))
})

// Name brings a host name into the one form in which names are compared: lower case, IDN
// as xn--, no dot at the end.
func Name(s string) (string, error) {
	name := s
	if !utf8.ValidString(s) {
		return "", errors.New("not UTF-8")
	}
	if strings.ContainsFunc(s, func(r rune) bool { return r >= 0x80 }) {
		var err error
		if name, err = profile().ToASCII(s); err != nil {
			return "", fmt.Errorf("not an international host name: %w", err)
		}
	}
	name, ok := ASCIIName(name)
	if !ok {
		return "", errors.New("not a host name: labels of letters, digits, - and _, each up to 63, with dots between them, such as \"example.com\"")
	}
	last := name[strings.LastIndexByte(name, '.')+1:]
	if !strings.ContainsFunc(last, func(r rune) bool { return r < '0' || r > '9' }) || strings.HasPrefix(last, "0x") {
		return "", errors.New("programs would read this as an address: write an IPv4 address in full, such as 192.0.2.1")
	}
	return name, nil
}

// ASCIIName is Name for what programs send: an international name comes as xn-- already.
// It reports whether s is a host name at all.
func ASCIIName(s string) (string, bool) {
	s = strings.TrimSuffix(s, ".")
	if s == "" || len(s) > 253 {
		return "", false
	}
	label, lower := 0, true
	for i := range len(s) {
		switch c := s[i]; {
		case c == '.':
			if label == 0 || s[i-1] == '-' {
				return "", false
			}
			label = 0
			continue
		case c == '-' && label > 0, c == '_', '0' <= c && c <= '9', 'a' <= c && c <= 'z':
		case 'A' <= c && c <= 'Z':
			lower = false
		default:
			return "", false
		}
		if label++; label > 63 {
			return "", false
		}
	}
	if label == 0 || s[len(s)-1] == '-' {
		return "", false
	}
	if !lower {
		s = strings.ToLower(s)
	}
	return s, true
}

// Sets lists the named sets.
func Sets() []string {
	names := make([]string, 0, len(sets))
	for n := range sets {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// quoted is text for a message: printable, and not longer than a line.
func quoted(s string) string {
	if len(s) > 80 {
		return strconv.Quote(s[:80]) + "…"
	}
	return strconv.Quote(s)
}

// Same reports whether two rules mean the same.
func Same(a, b string) bool {
	x, err := Parse(a)
	y, err2 := Parse(b)
	return err == nil && err2 == nil && slices.EqualFunc(x, y, func(r, s Rule) bool { return r.Text() == s.Text() })
}

// Covers reports whether the rule text takes in all that r does, any-sni aside.
func Covers(text string, r Rule) bool {
	wide, err := Parse(text)
	return err == nil && slices.ContainsFunc(wide, func(w Rule) bool { return w.covers(r) })
}

// Denying gives the first of the rules that takes in something of what text names; empty: none.
func Denying(deny []string, text string) string {
	parsed, err := Parse(text)
	if err != nil {
		return ""
	}
	for _, r := range parsed {
		for _, d := range deny {
			if Covers(d, r) {
				return d
			}
		}
	}
	return ""
}

func (r Rule) covers(o Rule) bool {
	if r.port != 0 && r.port != o.port {
		return false
	}
	switch {
	case r.host || o.host:
		return r.host && o.host
	case r.prefix.IsValid() || o.prefix.IsValid():
		return r.prefix.IsValid() && o.prefix.IsValid() && r.prefix.Bits() <= o.prefix.Bits() && r.prefix.Contains(o.prefix.Addr())
	case r.under != "":
		return below(o.name, r.under) || o.under == r.under || below(o.under, r.under)
	}
	return r.name == o.name && o.under == ""
}

// Matches reports whether the rule is about host, a name or an address; a port of 0 on
// either side is any.
func (r Rule) Matches(host string, port uint16) bool {
	if r.port != 0 && port != 0 && r.port != port {
		return false
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return r.prefix.IsValid() && r.prefix.Contains(a.Unmap())
	}
	return r.host && host == HostName || r.name != "" && r.name == host || r.under != "" && below(host, r.under)
}

func below(name, parent string) bool { return strings.HasSuffix(name, "."+parent) }
