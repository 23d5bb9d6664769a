// Names: the agent's queries are answered with the real addresses of what it may reach.

package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
)

// Bounds of the DNS server.
const (
	maxQueries  = 256 // answered at once
	maxDNSConns = 64  // over TCP
	maxUDP      = 1232
	ttl         = 60 // seconds, of every answer
	dnsIdle     = 10 * time.Second
	acceptPause = 50 * time.Millisecond
	lookupTime  = 10 * time.Second
)

// carried are the types besides addresses that are asked upstream, for names that may be
// looked up. All others are answered as if the name had none of them: HTTPS and SVCB, which
// would bring HTTP/3 and encrypted server names, ANY, and what carries arbitrary data for
// nobody here (NULL, …).
var carried = []uint16{dns.TypeTXT, dns.TypeMX, dns.TypeSRV, dns.TypeNS, dns.TypeSOA, dns.TypeCAA, dns.TypeNAPTR, dns.TypeCNAME}

// ServeDNS answers the agent's queries until ctx ends or the sockets are closed. The UDP
// sockets carry IP_PKTINFO or IPV6_RECVPKTINFO, so that an answer comes from the address
// that was asked. It closes all of them. The error is that of a socket that broke.
func (g *Gateway) ServeDNS(ctx context.Context, udp []*net.UDPConn, tcp []net.Listener) error {
	if !g.enter() {
		return net.ErrClosed
	}
	defer g.wg.Done()
	ctx, cancel := g.while(ctx)
	defer cancel()
	slots := make(chan struct{}, maxQueries)
	conns := make(chan struct{}, maxDNSConns)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	broke := func(err error) {
		if err != nil && !errors.Is(err, net.ErrClosed) {
			mu.Lock()
			errs = append(errs, err)
			mu.Unlock()
		}
		cancel()
	}
	for _, c := range udp {
		wg.Go(func() { broke(g.serveUDP(ctx, c, slots, &wg)) })
	}
	for _, l := range tcp {
		wg.Go(func() { broke(g.serveDNSTCP(ctx, l, conns, slots, &wg)) })
	}
	<-ctx.Done()
	for _, c := range udp {
		c.Close()
	}
	for _, l := range tcp {
		l.Close()
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (g *Gateway) serveUDP(ctx context.Context, c *net.UDPConn, slots chan struct{}, wg *sync.WaitGroup) error {
	buf, oob := make([]byte, 4096), make([]byte, 256)
	for {
		n, on, _, from, err := c.ReadMsgUDPAddrPort(buf, oob)
		if err != nil {
			return err
		}
		select {
		case slots <- struct{}{}:
		default:
			continue // as if it got lost: the client asks again
		}
		raw, back := slices.Clone(buf[:n]), answerFrom(oob[:on])
		wg.Go(func() {
			defer func() { <-slots }()
			if reply := g.reply(ctx, raw, false); reply != nil {
				_, _, _ = c.WriteMsgUDPAddrPort(reply, back, from) // lost, then
			}
		})
	}
}

func (g *Gateway) serveDNSTCP(ctx context.Context, l net.Listener, conns, slots chan struct{}, wg *sync.WaitGroup) error {
	for {
		select {
		case conns <- struct{}{}:
		case <-ctx.Done():
			return nil
		}
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return err
		}
		if err != nil {
			// Out of descriptors: wait for one to come free, not in a tight loop.
			<-conns
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(acceptPause):
			}
			continue
		}
		wg.Go(func() {
			defer func() { c.Close(); <-conns }()
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			var size [2]byte
			for {
				c.SetDeadline(time.Now().Add(dnsIdle))
				if _, err := io.ReadFull(c, size[:]); err != nil {
					return
				}
				raw := make([]byte, binary.BigEndian.Uint16(size[:]))
				if _, err := io.ReadFull(c, raw); err != nil {
					return
				}
				select {
				case slots <- struct{}{}:
				case <-ctx.Done():
					return
				}
				reply := g.reply(ctx, raw, true)
				<-slots
				if reply == nil {
					return
				}
				c.SetDeadline(time.Now().Add(dnsIdle))
				if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
					return
				}
			}
		})
	}
}

const dnsHeader = 12 // bytes

var errNotOneQuestion = errors.New("not a packet with one question")

// parseQuery reads the header and the one question of a packet; whether its sender knows EDNS, and
// how long an answer over UDP it then takes, in bytes. The rest is not read: each name there may be
// two bytes that point at a long one, and a packet would become five hundred times as large.
func parseQuery(raw []byte) (q dns.Msg, edns bool, takes int, err error) {
	count := func(at int) uint16 { return binary.BigEndian.Uint16(raw[at:]) }
	_, end, err := dns.UnpackDomainName(raw, dnsHeader)
	if end += 4; err != nil || count(4) != 1 || end > len(raw) {
		return q, false, 0, errNotOneQuestion
	}
	head := slices.Clone(raw[:end])
	clear(head[6:dnsHeader]) // of answers, authorities and additional records there are none in it
	if err = q.Unpack(head); err != nil {
		return q, false, 0, err
	}
	// An OPT record: the root's name, type, and where others have a class the size.
	rest := raw[end:]
	if count(6) == 0 && count(8) == 0 && count(10) > 0 && len(rest) >= 11 && rest[0] == 0 && binary.BigEndian.Uint16(rest[1:]) == dns.TypeOPT {
		edns, takes = true, int(binary.BigEndian.Uint16(rest[3:]))
	}
	return q, edns, takes, nil
}

// reply answers one packet; nil: there is nothing to answer.
func (g *Gateway) reply(ctx context.Context, raw []byte, tcp bool) []byte {
	if len(raw) < dnsHeader || raw[2]&0x80 != 0 { // no header, or itself an answer
		return nil
	}
	q, edns, takes, err := parseQuery(raw)
	m := new(dns.Msg)
	switch {
	case err != nil:
		m.Id, m.Response, m.Rcode = binary.BigEndian.Uint16(raw), true, dns.RcodeFormatError
	case q.Opcode != dns.OpcodeQuery:
		m.SetRcode(&q, dns.RcodeNotImplemented)
	case q.Question[0].Qclass != dns.ClassINET:
		m.SetRcode(&q, dns.RcodeRefused)
	default:
		m.SetReply(&q)
		m.RecursionAvailable = true
		g.answer(ctx, m)
	}
	size := dns.MaxMsgSize
	if !tcp {
		size = min(max(takes, dns.MinMsgSize), maxUDP)
	}
	opt := m.IsEdns0()
	switch {
	case !edns:
		m.Extra = nil // the client knows no EDNS
	case opt == nil:
		m.SetEdns0(maxUDP, false)
	}
	m.Truncate(size)
	out, err := m.Pack()
	if err != nil {
		m.Answer, m.Ns, m.Extra, m.Rcode = nil, nil, nil, dns.RcodeServerFailure
		if out, err = m.Pack(); err != nil {
			return nil
		}
	}
	return out
}

// answer fills in the answer to m's one question.
func (g *Gateway) answer(ctx context.Context, m *dns.Msg) {
	q := m.Question[0]
	asked := strings.TrimSuffix(q.Name, ".")
	if a, ok := reverse(asked); ok {
		g.answerPTR(m, a)
		return
	}
	name, ok := rules.ASCIIName(asked)
	if !ok {
		g.refuse(m, "not a host name")
		g.denied(record{Kind: kindDNS, Name: asked, Reason: "not a host name"})
		return
	}
	switch {
	case name == HostName:
		if v := g.rules().Host(0); !v.Allowed {
			g.refuse(m, "no rule opens a port of the host")
		} else if q.Qtype == dns.TypeA {
			g.addresses(m, []netip.Addr{HostAddr})
		}
		return
	case name == "localhost" || strings.HasSuffix(name, ".localhost"):
		g.addresses(m, []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()})
		return
	}
	isAddr := q.Qtype == dns.TypeA || q.Qtype == dns.TypeAAAA
	v := g.judgeName(ctx, name, isAddr)
	switch {
	case !v.Allowed:
		why := g.why(v)
		g.refuse(m, why)
		g.denied(record{Kind: kindDNS, Name: name, Rule: v.Rule, Reason: why})
	case isAddr:
		g.answerAddresses(ctx, m, name)
	case slices.Contains(carried, q.Qtype):
		g.carry(ctx, m, name)
	}
}

// answerAddresses looks name up and gives what of it may be reached.
func (g *Gateway) answerAddresses(ctx context.Context, m *dns.Msg, name string) {
	addrs, err := g.lookup(ctx, name)
	var dnsErr *net.DNSError
	switch {
	case err == nil:
	case g.proxy.only(name, g.rules()):
		// The host does not know the name, and its proxy may.
		addrs = g.invented.of(name)
	case errors.As(err, &dnsErr) && dnsErr.IsNotFound:
		m.Rcode = dns.RcodeNameError
		return
	default:
		m.Rcode = dns.RcodeServerFailure
		explain(m, dns.ExtendedErrorCodeNetworkError, "the host's resolver did not answer")
		return
	}
	set := g.rules()
	var good, bad []netip.Addr
	for _, a := range addrs {
		if g.invented.has(a) || set.Reachable(a, g.own.has(a)) {
			good = append(good, a)
		} else {
			bad = append(bad, a)
		}
	}
	if len(good) == 0 && len(bad) > 0 {
		why := g.whyAddr(bad[0])
		g.refuse(m, why)
		g.denied(record{Kind: kindDNS, Name: name, Address: bad[0].String(), Reason: why})
		return
	}
	g.given.give(name, good)
	g.addresses(m, good)
}

// addresses answers with those of the family that was asked for.
func (g *Gateway) addresses(m *dns.Msg, addrs []netip.Addr) {
	q := m.Question[0]
	for _, a := range addrs {
		head := dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: ttl}
		switch {
		case q.Qtype == dns.TypeA && a.Is4():
			m.Answer = append(m.Answer, &dns.A{Hdr: head, A: a.AsSlice()})
		case q.Qtype == dns.TypeAAAA && a.Is6():
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: head, AAAA: a.AsSlice()})
		}
	}
}

// reverse reads the name of a PTR question.
func reverse(name string) (netip.Addr, bool) {
	name = strings.ToLower(name)
	if s, ok := strings.CutSuffix(name, ".in-addr.arpa"); ok {
		parts := strings.Split(s, ".")
		slices.Reverse(parts)
		a, err := netip.ParseAddr(strings.Join(parts, "."))
		return a, err == nil && a.Is4()
	}
	if s, ok := strings.CutSuffix(name, ".ip6.arpa"); ok && len(s) == 63 {
		var b strings.Builder
		for n := range 32 {
			if n > 0 && n%4 == 0 {
				b.WriteByte(':')
			}
			b.WriteByte(s[62-2*n])
		}
		a, err := netip.ParseAddr(b.String())
		return a, err == nil
	}
	return netip.Addr{}, false
}

// answerPTR names an address by what it was given for. Nothing is asked upstream.
func (g *Gateway) answerPTR(m *dns.Msg, a netip.Addr) {
	q := m.Question[0]
	names := g.given.names(a)
	if a == HostAddr {
		names = []string{HostName}
	}
	if len(names) == 0 {
		m.Rcode = dns.RcodeNameError
		return
	}
	if q.Qtype != dns.TypePTR {
		return
	}
	for _, n := range names[:min(len(names), 8)] {
		m.Answer = append(m.Answer, &dns.PTR{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypePTR, Class: dns.ClassINET, Ttl: ttl}, Ptr: dns.Fqdn(n)})
	}
}

// refuse answers that there is no such name, and why.
func (g *Gateway) refuse(m *dns.Msg, why string) {
	m.Rcode = dns.RcodeNameError
	explain(m, dns.ExtendedErrorCodeBlocked, why)
}

// explain adds an Extended DNS Error; reply takes it out for a client that knows no EDNS.
func explain(m *dns.Msg, code uint16, text string) {
	m.SetEdns0(maxUDP, false)
	opt := m.IsEdns0()
	opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: code, ExtraText: text})
}

// carry asks the host's name servers for records other than addresses.
func (g *Gateway) carry(ctx context.Context, m *dns.Msg, name string) {
	q := m.Question[0]
	got, err := g.exchange(ctx, name, q.Qtype)
	if err != nil {
		m.Rcode = dns.RcodeServerFailure
		explain(m, dns.ExtendedErrorCodeNetworkError, "the host's name servers did not answer")
		return
	}
	m.Rcode = got.Rcode
	for _, rr := range got.Answer {
		if h := rr.Header(); h.Rrtype == q.Qtype && h.Class == dns.ClassINET && len(m.Answer) < maxAnswers {
			h.Name = q.Name // of a chain of CNAMEs the end stands for all
			m.Answer = append(m.Answer, rr)
		}
	}
}

// exchange asks the name servers of the host's resolv.conf one after the other.
func (g *Gateway) exchange(ctx context.Context, name string, kind uint16) (*dns.Msg, error) {
	conf, err := dns.ClientConfigFromFile(g.resolvConf)
	if err != nil {
		return nil, err
	}
	if len(conf.Servers) == 0 {
		return nil, fmt.Errorf("%s names no name server", g.resolvConf)
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), kind)
	m.SetEdns0(maxUDP, false)
	var errs []error
	for _, s := range conf.Servers {
		addr := net.JoinHostPort(s, conf.Port)
		c := dns.Client{Timeout: lookupTime / 2}
		r, _, err := c.ExchangeContext(ctx, m, addr)
		if err == nil && r.Truncated {
			c.Net = "tcp"
			r, _, err = c.ExchangeContext(ctx, m, addr)
		}
		if err == nil && (r.Rcode == dns.RcodeSuccess || r.Rcode == dns.RcodeNameError) {
			return r, nil
		}
		if err == nil {
			err = fmt.Errorf("%s: %s", s, dns.RcodeToString[r.Rcode])
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}
