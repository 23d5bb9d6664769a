// Reaching the other side.

package egress

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// stream is a connection whose two directions end by themselves.
type stream interface {
	net.Conn
	CloseWrite() error
}

func (g *Gateway) dialer() *net.Dialer {
	return &net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true}, FallbackDelay: -1}
}

// dial reaches the other side of a connection that was judged: dst itself, and where that
// fails or takes long the other addresses that the host's resolver has for its name. Each
// is judged by itself.
func (g *Gateway) dial(ctx context.Context, dst netip.AddrPort, name string, v rules.Verdict) (stream, string, error) {
	ctx, cancel := context.WithTimeout(ctx, g.times.connect)
	defer cancel()
	if dst.Addr() == HostAddr {
		return g.race(ctx, []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, dst.Port(), nil)
	}
	host := dst.Addr().String()
	if name != "" && v.Reason == rules.ByRule && v.ByName || g.invented.has(dst.Addr()) {
		// By its name where a rule names it: a company's proxy goes by names. Otherwise by
		// the address that was looked at here.
		host = name
	}
	if u := g.proxy.forHost(host, dst.Port()); u != nil {
		s, err := g.proxy.dial(ctx, g.dialer(), u, host, dst.Port())
		return s, "by proxy", err
	}
	if g.invented.has(dst.Addr()) {
		return nil, "", errors.New("the host's resolver does not know the name")
	}
	var others func(ctx context.Context) []netip.Addr
	if name != "" {
		others = func(ctx context.Context) []netip.Addr {
			all, err := g.lookup(ctx, name)
			if err != nil {
				return nil
			}
			all = slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool {
				return a == dst.Addr() || !g.rules().Decide(g.query(name, netip.AddrPortFrom(a, dst.Port()))).Allowed
			})
			// The other family first: that it is missing here is the most common reason.
			slices.SortStableFunc(all, func(a, b netip.Addr) int {
				return b2i(a.Is4() == dst.Addr().Is4()) - b2i(b.Is4() == dst.Addr().Is4())
			})
			return all
		}
	}
	return g.race(ctx, []netip.Addr{dst.Addr()}, dst.Port(), others)
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// mostTries is how many addresses are tried at once for one connection: a name may have thousands
// on which nobody answers, and each attempt is a descriptor.
const mostTries = 8

// race tries addresses, the next one when those before have failed or take long; others is
// asked for more when the first ones do.
func (g *Gateway) race(ctx context.Context, addrs []netip.Addr, port uint16, others func(context.Context) []netip.Addr) (stream, string, error) {
	type result struct {
		c    tcp.Conn
		addr netip.Addr
		err  error
	}
	finish, now := beginTCP(netip.AddrPortFrom(addrs[0], port))
	var errs []error
	if now {
		c, err := finish(ctx)
		if err == nil {
			return c, addrs[0].String(), nil
		}
		errs, addrs, finish = append(errs, err), addrs[1:], nil
	}
	ctx, cancel := context.WithCancel(ctx)
	results, more := make(chan result), make(chan []netip.Addr, 1)
	running, asking := 0, false
	defer func() {
		cancel()
		for ; running > 0; running-- {
			if r := <-results; r.c != nil {
				r.c.Close()
			}
		}
	}()
	next := func() {
		switch {
		case running == mostTries: // when one has failed
		case len(addrs) > 0:
			a := addrs[0]
			addrs = addrs[1:]
			running++
			begun := finish
			finish = nil
			go func() {
				if begun == nil {
					begun, _ = beginTCP(netip.AddrPortFrom(a, port))
				}
				c, err := begun(ctx)
				results <- result{c, a, err}
			}()
		case others != nil:
			asking = true
			ask := others
			others = nil
			go func() { more <- ask(ctx) }()
		}
	}
	next()
	timer := time.NewTimer(g.times.stagger)
	defer timer.Stop()
	for running > 0 || asking {
		select {
		case r := <-results:
			running--
			if r.err == nil {
				return r.c, r.addr.String(), nil
			}
			errs = append(errs, r.err)
			next()
		case addrs = <-more:
			asking = false
			next()
			timer.Reset(g.times.stagger)
		case <-timer.C:
			next()
			if len(addrs) > 0 || others != nil {
				timer.Reset(g.times.stagger)
			}
		}
	}
	return nil, "", errors.Join(errs...)
}
