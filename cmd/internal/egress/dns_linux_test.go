package egress

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
)

func blocked(m *dns.Msg) bool {
	if o := m.IsEdns0(); o != nil {
		for _, x := range o.Option {
			if e, ok := x.(*dns.EDNS0_EDE); ok {
				return e.InfoCode == dns.ExtendedErrorCodeBlocked
			}
		}
	}
	return false
}

func TestAnswersOfNames(t *testing.T) {
	w := theWorld(t)
	w.name(t, "example.com", "A "+webA, "AAAA "+web6, `TXT "hello"`, "MX 10 mail.example.com.", `HTTPS 1 . alpn="h3" ech="AAAA"`)
	w.name(t, "four.example", "A "+webA)
	w.name(t, "www.example.com", "CNAME cdn.elsewhere.net.")
	w.name(t, "cdn.elsewhere.net", "A "+webB)
	w.name(t, "_sip._tcp.example.com", "SRV 1 1 5060 sip.example.com.")
	w.name(t, "broken.example", "!")
	a := w.cage(t, policy("example.com", "four.example", "*.example.com", "missing.example", "broken.example"))

	if diff := cmp.Diff([]string{webA, web6}, a.addrs("Example.COM.")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{webB}, a.addrs("www.example.com")); diff != "" {
		t.Error(diff)
	}
	m := a.ask("www.example.com", dns.TypeA)
	if len(m.Answer) != 1 || m.Answer[0].Header().Name != "www.example.com." {
		t.Errorf("not flattened: %v", m)
	}
	if m := a.ask("four.example", dns.TypeAAAA); m.Rcode != dns.RcodeSuccess || len(m.Answer) != 0 {
		t.Errorf("no such family: got %v, want an answer without addresses", m)
	}
	if m := a.ask("missing.example", dns.TypeA); m.Rcode != dns.RcodeNameError || blocked(m) {
		t.Errorf("a name that does not exist: got %v", m)
	}
	for _, kind := range []uint16{dns.TypeHTTPS, dns.TypeSVCB, dns.TypeANY, dns.TypeNULL, 65399} {
		if m := a.ask("example.com", kind); m.Rcode != dns.RcodeSuccess || len(m.Answer) != 0 {
			t.Errorf("type %d: got %v", kind, m)
		}
	}
	for kind, want := range map[uint16]string{dns.TypeTXT: `"hello"`, dns.TypeMX: "10 mail.example.com."} {
		m := a.ask("example.com", kind)
		if len(m.Answer) != 1 || !strings.HasSuffix(m.Answer[0].String(), want) {
			t.Errorf("type %d: got %v", kind, m)
		}
	}
	if m := a.ask("_sip._tcp.example.com", dns.TypeSRV); len(m.Answer) != 1 {
		t.Errorf("SRV: got %v", m)
	}
	a.g.resolvConf = "/dev/null" // a host without name servers: its hosts file may do for it
	if m := a.ask("example.com", dns.TypeTXT); m.Rcode != dns.RcodeServerFailure {
		t.Errorf("without name servers: got %v", m)
	}
	a.g.resolvConf = "/etc/resolv.conf"
	if m := a.ask("evil.net", dns.TypeTXT); m.Rcode != dns.RcodeNameError || !blocked(m) {
		t.Errorf("TXT of a denied name: got %v", m)
	}
	if m := a.ask("broken.example", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
		t.Errorf("no answer from above: got %v", m)
	}
	for name, addr := range map[string]string{"localhost": "127.0.0.1", "x.localhost": "127.0.0.1"} {
		if got := a.addrs(name); len(got) == 0 || got[0] != addr {
			t.Errorf("%s: got %v", name, got)
		}
	}

	// Back from addresses to names, without a question to anybody.
	for addr, want := range map[string]string{webB: "www.example.com.", web6: "example.com.", "8.8.8.8": ""} {
		arpa, _ := dns.ReverseAddr(addr)
		m := a.ask(arpa, dns.TypePTR)
		got := ""
		if len(m.Answer) > 0 {
			got = m.Answer[0].(*dns.PTR).Ptr
		}
		if got != want {
			t.Errorf("PTR of %s: got %q, want %q", addr, got, want)
		}
	}
	if w.asked("in-addr.arpa") || w.asked("ip6.arpa") {
		t.Error("the host's name server was asked for a PTR")
	}

	// From every address that is asked, over both, with EDNS and without.
	for _, server := range []string{"1.2.3.4:53", "[2001:db8::53]:53"} {
		for _, network := range []string{"udp", "tcp"} {
			m := a.askOver(network, server, "example.com", dns.TypeA, func(m *dns.Msg) { m.Extra = nil })
			if len(m.Answer) != 1 || len(m.Extra) != 0 {
				t.Errorf("%s %s: got %v", network, server, m)
			}
		}
	}
}

func TestLongAnswersAreCutAndComeOverTCP(t *testing.T) {
	w := theWorld(t)
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("A 93.184.217.%d", i))
	}
	w.name(t, "many.example", many...)
	a := w.cage(t, policy("many.example"))
	for _, edns := range []bool{true, false} {
		m := a.ask("many.example", dns.TypeA, func(m *dns.Msg) {
			if !edns {
				m.Extra = nil
			}
		})
		m.Compress = true // as it was sent
		if !m.Truncated || m.Len() > 1232 || !edns && m.Len() > 512 {
			t.Errorf("EDNS %v: %d bytes, truncated %v", edns, m.Len(), m.Truncated)
		}
	}
	if m := a.askOver("tcp", "9.9.9.9:53", "many.example", dns.TypeA); m.Truncated || len(m.Answer) != 100 {
		t.Errorf("over TCP: %d answers, truncated %v", len(m.Answer), m.Truncated)
	}
}

// CASES 35.
func TestNamesAreNoWayOut(t *testing.T) {
	w := theWorld(t)
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	secret := strings.Repeat("73656372657473.", 12) + "exfil-zone.net"
	for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT, dns.TypeMX, dns.TypeSRV, dns.TypeCNAME, dns.TypeNS, dns.TypeSOA, dns.TypeANY, dns.TypeNULL, dns.TypeHTTPS, dns.TypeCAA} {
		for _, name := range []string{secret, "secret.example.com", "secret.example.com.exfil-zone.net"} {
			if m := a.ask(name, kind); len(m.Answer) > 0 {
				t.Errorf("%s %s: got %v", name, dns.TypeToString[kind], m)
			}
		}
	}
	if w.asked("exfil-zone.net") || w.asked("secret.example.com") {
		t.Error("the host's name server was asked")
	}
	// CASES 32: names that are like an allowed one, which exist.
	for _, name := range []string{"evil-example.com", "example.com.evil.net", "xexample.com", "example.comx", "example.co", "sub.example.com"} {
		w.name(t, name, "A "+webB)
		if m := a.ask(name, dns.TypeA); m.Rcode != dns.RcodeNameError || !blocked(m) || w.asked(name) {
			t.Errorf("%s: got %v", name, m)
		}
	}
	if got := a.addrs("EXAMPLE.com."); len(got) != 1 || got[0] != webA {
		t.Errorf("EXAMPLE.com.: got %v", got)
	}
	// Another class, several questions, an update, an answer: nothing goes up, nothing breaks.
	a.askRaw(t, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, dns.RcodeRefused)
	a.askRaw(t, func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }, dns.RcodeFormatError)
	a.askRaw(t, func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }, dns.RcodeNotImplemented)
	if got := a.g.reply(t.Context(), []byte("\x00\x01\x81\x80\x00\x00\x00\x00\x00\x00\x00\x00"), false); got != nil {
		t.Errorf("an answer was answered: %q", got)
	}
	if m := a.ask(`a\000b.example.com`, dns.TypeA); m.Rcode != dns.RcodeNameError || !blocked(m) {
		t.Errorf("got %v", m)
	}
	if m := a.ask(`evil\.example.com`, dns.TypeA); m.Rcode != dns.RcodeNameError {
		t.Errorf("got %v", m)
	}
}

func (a *caged) askRaw(t *testing.T, change func(*dns.Msg), want int) {
	t.Helper()
	if m := a.ask("exfil-zone.net", dns.TypeA, change); m.Rcode != want {
		t.Errorf("got %v, want %s", m, dns.RcodeToString[want])
	}
}

// CASES 31.
func TestAllowedNamesThatLeadInside(t *testing.T) {
	w := theWorld(t)
	const public = "93.184.216.50" // the host's own, and public
	if out, err := exec.Command("ip", "addr", "add", public+"/32", "dev", "h0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "addr", "del", public+"/32", "dev", "h0").Run() })
	// A server of the host that a hole would reach.
	reached := make(chan string, 1)
	w.server(t, nil, ":8080", func(c net.Conn) { reached <- c.LocalAddr().String() })
	w.server(t, w.internet, webA+":8080", echo)
	addrs := []string{"127.0.0.1", "10.77.0.1", "10.0.0.1", "169.254.169.254", public, "0.0.0.0", "100.64.0.1", "192.168.1.1"}
	a := w.cage(t, policy("*.example"))
	time.Sleep(1100 * time.Millisecond) //nolint:forbidigo // the host's addresses are read once a second
	for i, addr := range addrs {
		name := fmt.Sprintf("inside%d.example", i)
		w.name(t, name, "A "+addr)
		if m := a.ask(name, dns.TypeA); m.Rcode != dns.RcodeNameError || !blocked(m) {
			t.Errorf("%s: got %v", addr, m)
		}
		a.record(name, func(r Record) bool { return r.Verdict == Denied && r.Name == name && r.Address == addr })
		if !strings.HasPrefix(addr, "127.") && addr != "0.0.0.0" { // those stay inside
			a.g.given.give(name, []netip.Addr{netip.MustParseAddr(addr)}) // as if it had been given
			a.refused(addr + ":8080")
		}
	}
	for i, addr := range []string{"::1", "::ffff:10.77.0.1", "fd77::1", "64:ff9b::a4d:1", "2002:a4d:1::", "fe80::1"} {
		name := fmt.Sprintf("inside6-%d.example", i)
		w.name(t, name, "AAAA "+addr)
		if m := a.ask(name, dns.TypeAAAA); len(m.Answer) > 0 || m.Rcode != dns.RcodeNameError {
			t.Errorf("%s: got %v", addr, m)
		}
	}
	// Of several, what is public is given, and nothing else is tried.
	w.name(t, "both.example", "A 10.77.0.1", "A "+webA)
	if diff := cmp.Diff([]string{webA}, a.addrs("both.example")); diff != "" {
		t.Error(diff)
	}
	exchange(t, a.connect("both.example", 8080), "hi", "hi")
	select {
	case at := <-reached:
		t.Errorf("a server of the host was reached at %s", at)
	default:
	}
	// The control: the same server, where a rule names it.
	b := w.cage2(t, rules.Policy{Allow: []string{"10.77.0.1:8080", "*.example"}}, a)
	if got := b.addrs("inside1.example"); len(got) != 1 {
		t.Fatalf("got %v", got)
	}
	b.dial("10.77.0.1:8080")
	select {
	case <-reached:
	case <-time.After(5 * time.Second):
		t.Error("a rule that names it does not open it")
	}
}

// CASES 31: a name that led outside, and now leads inside, takes nobody along: not by the
// address that it has now, and not by the one that it had, where nothing answers any more.
func TestANameThatMovesInsideReachesNobodyThere(t *testing.T) {
	w := theWorld(t)
	reached := make(chan struct{}, 8)
	w.server(t, nil, hostA+":8080", func(net.Conn) { reached <- struct{}{} })
	w.server(t, w.internet, webA+":5432", echo)
	w.name(t, "moves.example", "A "+webA)
	a := w.cage(t, policy("moves.example"))
	exchange(t, a.connect("moves.example", 5432), "hi", "hi")
	w.name(t, "moves.example", "A "+hostA)
	a.g.lookups.mu.Lock()
	clear(a.g.lookups.kept)
	a.g.lookups.mu.Unlock()
	if m := a.ask("moves.example", dns.TypeA); m.Rcode != dns.RcodeNameError || !blocked(m) {
		t.Errorf("got %v", m)
	}
	a.refused(hostA + ":8080")
	a.refused(webA + ":8080")                           // nobody is there, and the name's other addresses are no way
	exchange(t, a.dial(webA+":5432"), "again", "again") // programs keep addresses
	select {
	case <-reached:
		t.Error("the host was reached")
	default:
	}
	// The control: from the host it is.
	c, err := net.Dial("tcp", hostA+":8080")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	select {
	case <-reached:
	case <-time.After(5 * time.Second):
		t.Error("nobody listens there")
	}
}

// An agent may have a flood of names answered: it loses what it was given itself, no more.
func TestAFloodOfNamesOpensNothing(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", echo)
	w.server(t, w.internet, webB+":8080", echo)
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com", "*.flood.example"))
	a.g.given.most = 64
	a.addrs("example.com")
	for i := range 200 {
		name := fmt.Sprintf("n%d.flood.example", i)
		w.name(t, name, "A "+dead)
		a.ask(name, dns.TypeA)
	}
	if n := len(a.g.given.pairs); n > 64 {
		t.Errorf("%d pairs are kept", n)
	}
	a.refused(webB + ":8080")
	a.refused(webA + ":8080") // it was given longest ago
	exchange(t, a.connect("example.com", 8080), "hi", "hi")
	c, err := net.Dial("tcp", webB+":8080") // the control
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// cage2 is a's cage with another policy: the sockets are taken.
func (w *world) cage2(t *testing.T, p rules.Policy, a *caged) *caged {
	t.Helper()
	if err := a.g.SetRules(p); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestPortsOfTheHost(t *testing.T) {
	w := theWorld(t)
	w.server(t, nil, "127.0.0.1:5432", echo)
	w.server(t, nil, "[::1]:8080", echo)
	a := w.cage(t, policy("host:5432", "host:8080"))
	if diff := cmp.Diff([]string{HostAddr.String()}, a.addrs("host")); diff != "" {
		t.Fatal(diff)
	}
	c := a.connect("host", 5432)
	exchange(t, c, "select", "select")
	c.Close()
	exchange(t, a.connect("host", 8080), "six", "six")
	a.refused(HostAddr.String() + ":22")
	a.record("the host's port", func(r Record) bool { return r.Name == "host" && r.Rule == "host:5432" && r.Verdict == Allowed })
	none := w.cage2(t, policy("example.com"), a)
	if m := none.ask("host", dns.TypeA); m.Rcode != dns.RcodeNameError {
		t.Errorf("got %v", m)
	}
	none.refused(HostAddr.String() + ":5432")
}

func TestTheTableOfNamesIsBounded(t *testing.T) {
	g := newGiven(100)
	for i := range 1000 {
		g.give(fmt.Sprintf("n%d", i), []netip.Addr{netip.AddrFrom4([4]byte{1, 1, byte(i >> 8), byte(i)}), netip.AddrFrom4([4]byte{9, 9, 9, 9})})
		g.give("kept", []netip.Addr{netip.AddrFrom4([4]byte{8, 8, 8, 8})})
	}
	if len(g.pairs) != 100 || g.order.Len() != 100 || len(g.byAddr) > 100 {
		t.Errorf("%d pairs, %d in order, %d addresses", len(g.pairs), g.order.Len(), len(g.byAddr))
	}
	if !g.has("kept", netip.AddrFrom4([4]byte{8, 8, 8, 8})) || !g.has("n999", netip.AddrFrom4([4]byte{9, 9, 9, 9})) || g.has("n1", netip.AddrFrom4([4]byte{9, 9, 9, 9})) {
		t.Error("not the oldest went")
	}
	if names := g.names(netip.AddrFrom4([4]byte{9, 9, 9, 9})); len(names) < 40 || names[0] != "n999" || names[1] != "n998" {
		t.Errorf("got %v", names)
	}
}
