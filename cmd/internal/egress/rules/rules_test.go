package rules

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRulesAreReadInOneForm(t *testing.T) {
	for text, want := range map[string]string{
		"example.com":                "example.com",
		"EXAMPLE.com.":               "example.com",
		"*.Example.com:443":          "*.example.com:443",
		"bücher.example":             "xn--bcher-kva.example",
		"Faß.de":                     "xn--fa-hia.de",
		"例え.テスト:8443":                "xn--r8jz45g.xn--zckzah:8443",
		"example．com":                "example.com", // a full-width dot
		"_dmarc.example.com":         "_dmarc.example.com",
		"10.0.0.0/8":                 "10.0.0.0/8",
		"10.1.2.3":                   "10.1.2.3",
		"10.1.2.3/32:5432":           "10.1.2.3:5432",
		"10.1.0.0/16:5432":           "10.1.0.0/16:5432",
		"2001:DB8::0/32":             "2001:db8::/32",
		"[2001:db8::1]:443":          "[2001:db8::1]:443",
		"[2001:db8::/32]:443":        "[2001:db8::/32]:443",
		"2001:db8::1":                "2001:db8::1",
		"[2001:db8::1]":              "2001:db8::1",
		"::ffff:93.184.216.34":       "93.184.216.34",
		"host:5432":                  "host:5432",
		"HOST:5432":                  "host:5432",
		"npm.":                       "npm.",
		"npm:443":                    "npm:443",
		"intranet":                   "intranet.",
		"example.com any-sni":        "example.com any-sni",
		"  *.example.com:1  any-sni": "*.example.com:1 any-sni",
	} {
		rules, err := Parse(text)
		if err != nil || len(rules) != 1 || rules[0].Text() != want {
			t.Errorf("%q: got %v, %v, want %q", text, rules, err, want)
			continue
		}
		again, err := Parse(want)
		if err != nil || again[0].Text() != want {
			t.Errorf("%q, as it is printed: %v, %v", want, again, err)
		}
	}
}

func TestRulesThatMeanNothingAreRefused(t *testing.T) {
	for text, why := range map[string]string{
		"":                         "write a host",
		"https://example.com/x":    `"example.com:443"`,
		"ssh://git@example.com":    `"example.com:22"`,
		"example.com/path":         "without a path",
		"*":                        "mode open",
		"*.":                       "not a host name",
		"a.*.com":                  "star stands alone",
		"*example.com":             "star stands alone",
		"**.example.com":           "star stands alone",
		"example.com:0":            "from 1 to 65535",
		"example.com:65536":        "from 1 to 65535",
		"example.com:+1":           "from 1 to 65535",
		"example.com:":             "from 1 to 65535",
		"example.com:https":        "from 1 to 65535",
		"a:b:c":                    "IPv6",
		"[example.com]:443":        "brackets",
		"[2001:db8::1]443":         "written [2001:db8::1]:443",
		"10.1.2.3/8":               "10.0.0.0/8",
		"0.0.0.0/0":                "mode open",
		"::/0":                     "mode open",
		"127.0.0.1":                "host:PORT",
		"[::1]:80":                 "host:PORT",
		"localhost:80":             "host:PORT",
		"x.localhost":              "host:PORT",
		"host":                     "the port",
		"224.0.0.1":                "multicast",
		"0.0.0.0":                  "not an address",
		"fe80::1%eth0":             "zone",
		"127.1":                    "as an address",
		"1.2.3":                    "as an address",
		"0x7f.0x1":                 "as an address",
		"example..com":             "not a host name",
		".example.com":             "not a host name",
		"-a.com":                   "not a host name",
		"a-.com":                   "not a host name",
		"a\x00b.com":               "not a host name",
		"a b.com":                  "any-sni",
		"example.com any_sni":      "any-sni",
		"10.0.0.1 any-sni":         "for names",
		"host:1 any-sni":           "elsewhere",
		strings.Repeat("a", 64):    "not a host name",
		strings.Repeat("a.", 200):  "longer than",
		"xn--\u00fc.com":           "international",
		"a\u202eb.com":             "international",
		"\xff.com":                 "UTF-8",
		strings.Repeat("x", 1<<16): "longer than",
	} {
		rules, err := Parse(text)
		if err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%q: got %v, %v, want an error with %q", text, rules, err, why)
		}
		if err != nil && len(err.Error()) > 500 {
			t.Errorf("%.20q: the error has %d bytes", text, len(err.Error()))
		}
	}
}

func TestSetsAreWritten(t *testing.T) {
	want := []string{"anthropic", "crates", "debian", "github", "gitlab", "golang", "google", "npm", "openai", "pypi"}
	if diff := cmp.Diff(want, Sets()); diff != "" {
		t.Error(diff)
	}
	for _, name := range Sets() {
		rules, err := Parse(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, r := range rules {
			if r.port == 0 || r.name == "" {
				t.Errorf("%s: a set names hosts with their ports", r.Text())
			}
		}
	}
}

func decide(t testing.TB, p Policy, q Query) Verdict {
	t.Helper()
	s, err := Compile(p)
	if err != nil {
		t.Fatal(err)
	}
	return s.Decide(q)
}

var public = netip.MustParseAddr("93.184.216.34")

// CASES 32.
func TestOfSimilarNamesOnlyTheOneIsAllowed(t *testing.T) {
	p := Policy{Allow: []string{"example.com"}}
	for raw, want := range map[string]bool{
		"example.com": true, "EXAMPLE.com.": true,
		"sub.example.com": false, "evil-example.com": false, "example.com.evil.net": false, "examplexcom": false,
		"example.com\x00.evil.net": false, "\x00example.com": false, "example.com\\.evil.net": false, "": false, "com": false,
	} {
		name, ok := ASCIIName(raw)
		got := ok && decide(t, p, Query{Name: name}).Allowed && decide(t, p, Query{Name: name, Addr: public, Port: 443}).Allowed
		if got != want {
			t.Errorf("%q: allowed %v, want %v", raw, got, want)
		}
	}
	sub := Policy{Allow: []string{"*.example.com"}}
	for name, want := range map[string]bool{"example.com": false, "a.example.com": true, "a.b.example.com": true, "aexample.com": false} {
		if got := decide(t, sub, Query{Name: name}).Allowed; got != want {
			t.Errorf("*.example.com, %q: allowed %v, want %v", name, got, want)
		}
	}
}

// CASES 34.
func TestEmptyAllowListLetsNothingOut(t *testing.T) {
	for _, q := range []Query{{Name: "example.com"}, {Addr: public, Port: 443}, {Name: "example.com", Addr: public, Port: 443}, {Name: "localhost"}, {}} {
		if v := decide(t, Policy{}, q); v.Allowed || v.Reason != Unlisted {
			t.Errorf("%+v: got %+v", q, v)
		}
	}
	s, _ := Compile(Policy{})
	if v := s.Host(0); v.Allowed {
		t.Errorf("the host's loopback: %+v", v)
	}
}

func TestAlwaysDeniedAddresses(t *testing.T) {
	named := Policy{Open: true, Allow: []string{"example.com"}}
	for _, a := range strings.Fields(`127.0.0.1 127.255.0.1 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 169.254.1.1
		100.64.0.1 100.127.255.255 100.100.100.200 168.63.129.16 192.0.0.192 198.18.0.1 198.19.255.1 224.0.0.1 239.1.1.1 255.255.255.255 240.0.0.1 192.0.2.1 198.51.100.1 203.0.113.1 192.88.99.1
		:: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:0:10.0.0.1 64:ff9b::10.0.0.1 64:ff9b::7f00:1 64:ff9b:1::1 100::1 2001::1 2001:0:7f00:1:: 2001:db8::1 2002:7f00:1:: 2002:a00:1:: fc00::1 fd00:ec2::254 fe80::1 fec0::1 ff02::1 5f00::1 3fff::1 4000::1 e000::1 fe80::1%eth0`) {
		q := Query{Name: "example.com", Addr: netip.MustParseAddr(a), Port: 443}
		if v := decide(t, named, q); v.Allowed || v.Reason != Range {
			t.Errorf("%s: got %+v", a, v)
		}
		s, _ := Compile(named)
		if s.Reachable(q.Addr, false) {
			t.Errorf("%s would be given for a name", a)
		}
	}
	for _, a := range strings.Fields("93.184.216.34 8.8.8.8 172.15.255.255 172.32.0.1 100.63.255.255 100.128.0.1 192.0.1.1 198.17.255.255 198.20.0.1 223.255.255.255 2606:2800:220::34 2a00:1450::1 2400::1 ::ffff:8.8.8.8") {
		if v := decide(t, named, Query{Addr: netip.MustParseAddr(a), Port: 443}); !v.Allowed || v.Reason != ByMode {
			t.Errorf("%s: got %+v", a, v)
		}
	}
	if v := decide(t, named, Query{Name: "example.com", Addr: public, Own: true, Port: 443}); v.Allowed || v.Reason != Own {
		t.Errorf("the machine's own address: got %+v", v)
	}
}

func TestARuleMustNameWhatIsAlwaysDenied(t *testing.T) {
	metadata := netip.MustParseAddr("169.254.169.254")
	for _, test := range []struct {
		rule string
		addr string
		own  bool
		want bool
	}{
		{"10.0.0.0/8", "10.1.2.3", false, true},
		{"10.1.0.0/16", "10.1.2.3", false, true},
		{"10.1.0.0/16", "10.2.2.3", false, false},
		{"8.0.0.0/6", "10.1.2.3", false, false}, // it happens to lie in there
		{"8.0.0.0/6", "8.8.8.8", false, true},
		{"169.254.0.0/16", metadata.String(), false, false},
		{"169.254.0.0/16", "169.254.1.1", false, true},
		{"169.254.169.254", metadata.String(), false, true},
		{"93.184.216.0/24", public.String(), true, false},
		{"93.184.216.34", public.String(), true, true},
		{"10.0.0.0/8", "10.1.2.3", true, false},
		{"64:ff9b::/96", "64:ff9b::808:808", false, true},
		{"10.0.0.0/8", "::ffff:10.0.0.1", false, true},
	} {
		p := Policy{Allow: []string{test.rule}}
		v := decide(t, p, Query{Addr: netip.MustParseAddr(test.addr), Own: test.own, Port: 5432})
		if v.Allowed != test.want || v.ByName {
			t.Errorf("%s, %s: got %+v", test.rule, test.addr, v)
		}
		p.Allow[0] = strings.Replace("["+test.rule+"]:22", "].", "", 1)
		if !strings.Contains(test.rule, ":") {
			p.Allow[0] = test.rule + ":22"
		}
		if v := decide(t, p, Query{Addr: netip.MustParseAddr(test.addr), Own: test.own, Port: 5432}); v.Allowed {
			t.Errorf("%s, port 5432: got %+v", p.Allow[0], v)
		}
	}
}

func TestDenyBeatsAllow(t *testing.T) {
	q := Query{Name: "a.example.com", Addr: public, Port: 443}
	for _, deny := range []string{"a.example.com", "*.example.com", "a.example.com:443", "93.184.216.34", "93.0.0.0/8:443"} {
		for _, allow := range [][]string{{"a.example.com:443"}, {"*.example.com"}, {"93.184.216.34:443"}, {"a.example.com any-sni"}} {
			if v := decide(t, Policy{Allow: allow, Deny: []string{deny}}, q); v.Allowed || v.Reason != Denied || v.Rule != deny {
				t.Errorf("allow %q, deny %q: got %+v", allow, deny, v)
			}
		}
		if v := decide(t, Policy{Open: true, Deny: []string{deny}}, q); v.Allowed {
			t.Errorf("open, deny %q: got %+v", deny, v)
		}
	}
	if v := decide(t, Policy{Open: true, Deny: []string{"a.example.com:22", "93.184.216.34:80"}}, q); !v.Allowed {
		t.Errorf("other ports are denied: got %+v", v)
	}
	if v := decide(t, Policy{Allow: []string{"a.example.com"}, Deny: []string{"a.example.com:22"}}, Query{Name: "a.example.com"}); !v.Allowed {
		t.Errorf("a name that is denied on one port is looked up for the others: got %+v", v)
	}
	s, _ := Compile(Policy{Allow: []string{"host:1", "host:2"}, Deny: []string{"host:2"}})
	if !s.Host(1).Allowed || s.Host(2).Allowed || s.Host(3).Allowed || !s.Host(0).Allowed {
		t.Error("ports of the host")
	}
}

func TestAnySNIIsOnlyWhereItStands(t *testing.T) {
	p := Policy{Allow: []string{"*.example.com", "a.example.com:443 any-sni"}}
	if v := decide(t, p, Query{Name: "a.example.com", Addr: public, Port: 443}); !v.Allowed || v.ByName {
		t.Errorf("got %+v", v)
	}
	for _, q := range []Query{{Name: "a.example.com", Addr: public, Port: 8443}, {Name: "b.example.com", Addr: public, Port: 443}} {
		if v := decide(t, p, q); !v.Allowed || !v.ByName {
			t.Errorf("%+v: got %+v", q, v)
		}
	}
}

// slow is Decide written the other way: every rule is looked at, by what it says.
func slow(p Policy, q Query) Verdict {
	read := func(words []string) (all []Rule) {
		for _, w := range words {
			rules, err := Parse(w)
			if err != nil {
				panic(err)
			}
			all = append(all, rules...)
		}
		slices.SortFunc(all, func(a, b Rule) int { return strings.Compare(a.Text(), b.Text()) })
		return all
	}
	addr := q.Addr.Unmap().WithZone("")
	names := func(r Rule) bool {
		return q.Name != "" && (r.name == q.Name || r.under != "" && strings.HasSuffix(q.Name, "."+r.under))
	}
	holds := func(r Rule) bool {
		return r.prefix.IsValid() && addr.IsValid() && r.prefix.Contains(addr)
	}
	for _, r := range read(p.Deny) {
		port := r.port == 0 || q.Port != 0 && r.port == q.Port
		if port && (names(r) || holds(r)) {
			return Verdict{Reason: Denied, Rule: r.Text()}
		}
	}
	port := func(r Rule) bool { return q.Port == 0 || r.port == 0 || r.port == q.Port }
	if addr.IsValid() {
		in, what, special := Special(addr)
		for _, r := range read(p.Allow) {
			if holds(r) && port(r) && (!special || r.prefix.Bits() >= in.Bits()) && (!q.Own || r.prefix.Bits() == addr.BitLen()) {
				return Verdict{Allowed: true, Reason: ByRule, Rule: r.Text()}
			}
		}
		if special {
			return Verdict{Reason: Range, What: what}
		}
		if q.Own {
			return Verdict{Reason: Own}
		}
	}
	var first *Rule
	for _, free := range []bool{true, false} {
		for _, r := range read(p.Allow) {
			if names(r) && port(r) && (r.anySNI || !free) && first == nil {
				first = &r
			}
		}
	}
	switch {
	case first != nil:
		return Verdict{Allowed: true, Reason: ByRule, Rule: first.Text(), ByName: !first.anySNI}
	case p.Open:
		return Verdict{Allowed: true, Reason: ByMode}
	}
	return Verdict{Reason: Unlisted, Ask: p.Ask > 0}
}

func FuzzDecide(f *testing.F) {
	f.Add("example.com\n*.example.com:443 any-sni\n10.0.0.0/8", "evil.com\n10.1.0.0/16:22", "a.example.com", "10.1.2.3", uint16(443), uint8(0))
	f.Add("npm\nhost:1", "registry.npmjs.org:80", "registry.npmjs.org", "93.184.216.34", uint16(443), uint8(1))
	f.Add("::/1\n[fd00::/8]:5432", "2001:db8::/32", "", "fd00::1", uint16(5432), uint8(2))
	f.Add("bücher.example", "*.example", "XN--BCHER-KVA.example.", "::ffff:8.8.8.8", uint16(0), uint8(4))
	f.Fuzz(func(t *testing.T, allow, deny, name, addr string, port uint16, bits uint8) {
		good := func(text string) (words []string) {
			for _, w := range strings.Split(text, "\n") {
				rules, err := Parse(w)
				if err != nil {
					continue
				}
				words = append(words, w)
				for _, r := range rules {
					if r.set != "" {
						continue
					}
					again, err := Parse(r.Text())
					if err != nil || len(again) != 1 || again[0].Text() != r.Text() {
						t.Fatalf("%q is printed as %q, which reads as %v, %v", w, r.Text(), again, err)
					}
				}
			}
			return words
		}
		p := Policy{Open: bits&1 != 0, Allow: good(allow), Deny: good(deny), Ask: int(bits >> 1 & 1)}
		q := Query{Port: port, Own: bits&4 != 0}
		q.Name, _ = ASCIIName(name)
		q.Addr, _ = netip.ParseAddr(addr)
		s, err := Compile(p)
		if err != nil {
			t.Fatal(err)
		}
		got := s.Decide(q)
		if diff := cmp.Diff(slow(p, q), got); diff != "" {
			t.Fatalf("%+v, %+v: (-slow +got)\n%s", p, q, diff)
		}
		r := rand.New(rand.NewPCG(1, uint64(port)))
		r.Shuffle(len(p.Allow), func(i, j int) { p.Allow[i], p.Allow[j] = p.Allow[j], p.Allow[i] })
		r.Shuffle(len(p.Deny), func(i, j int) { p.Deny[i], p.Deny[j] = p.Deny[j], p.Deny[i] })
		s, _ = Compile(p)
		if diff := cmp.Diff(got, s.Decide(q)); diff != "" {
			t.Fatalf("in another order: %s", diff)
		}
		if got.Allowed && got.Reason == ByRule && len(p.Allow) == 0 || !p.Open && got.Reason == ByMode {
			t.Fatalf("%+v allows %+v: %+v", p, q, got)
		}
		if a := q.Addr; a.IsValid() && got.Allowed {
			if _, _, special := Special(a); special && !slices.ContainsFunc(p.Allow, func(w string) bool {
				rules, _ := Parse(w)
				return rules[0].prefix.IsValid()
			}) {
				t.Fatalf("%s is allowed without a rule that names it: %+v", a, got)
			}
		}
	})
}

func BenchmarkDecide(b *testing.B) {
	p := Policy{Allow: []string{"anthropic", "github", "npm", "pypi", "10.0.0.0/8"}}
	for i := range 500 {
		p.Allow = append(p.Allow, fmt.Sprintf("host%d.example.com:443", i))
	}
	s, err := Compile(p)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if !s.Decide(Query{Name: "host77.example.com", Addr: public, Port: 443}).Allowed {
			b.Fatal("denied")
		}
	}
}

func TestCoversAndMatches(t *testing.T) {
	for _, test := range []struct {
		deny, rule string
		want       bool
	}{
		{"example.com", "example.com:443", true}, {"example.com:443", "example.com", false}, {"*.example.com", "a.example.com", true},
		{"*.example.com", "*.a.example.com", true}, {"*.a.example.com", "*.example.com", false}, {"*.example.com", "example.com", false},
		{"10.0.0.0/8", "10.1.0.0/16:1", true}, {"10.1.0.0/16", "10.0.0.0/8", false}, {"host:1", "host:1", true}, {"host:1", "host:2", false}, {"10.0.0.0/8", "example.com", false},
		{"npm", "registry.npmjs.org:443", true},
	} {
		r, err := Parse(test.rule)
		if err != nil {
			t.Fatal(err)
		}
		if got := Covers(test.deny, r[0]); got != test.want {
			t.Errorf("%s covers %s: %v", test.deny, test.rule, got)
		}
	}
}
