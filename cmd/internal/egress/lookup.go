package egress

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// Bounds of what is kept of lookups: long enough for the second of the two questions that
// programs ask, and for the connection that follows.
const (
	keepLookup = 10 * time.Second
	maxLookups = 1024

	// maxAnswers is how many addresses of a family, or other records of a type, a name has inside.
	// With thousands each question for it would take a tenth of a second of our time, and not of
	// the agent's.
	maxAnswers = 128
)

// lookups asks the host's resolver, once for those who ask at the same time.
type lookups struct {
	ask func(ctx context.Context, name string) ([]netip.Addr, error)

	mu   sync.Mutex
	kept map[string]*found
}

type found struct {
	done  chan struct{}
	at    time.Time // of the answer
	addrs []netip.Addr
	err   error
}

// hostLookup asks the resolver that the host's programs use: hosts file, then DNS.
func hostLookup(ctx context.Context, name string) ([]netip.Addr, error) {
	if strings.Contains(name, ".") {
		name += "." // the host's search domains are not for names that are complete
	}
	r := net.Resolver{PreferGo: true}
	addrs, err := r.LookupNetIP(ctx, "ip", name)
	for i, a := range addrs {
		addrs[i] = a.Unmap().WithZone("")
	}
	return addrs, err
}

// lookup gives the addresses of name.
func (g *Gateway) lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	l := &g.lookups
	l.mu.Lock()
	f := l.kept[name]
	if f == nil || !f.at.IsZero() && time.Since(f.at) > keepLookup {
		if len(l.kept) >= maxLookups {
			for n, old := range l.kept {
				if !old.at.IsZero() {
					delete(l.kept, n)
				}
			}
		}
		f = &found{done: make(chan struct{})}
		l.kept[name] = f
		g.wg.Go(func() {
			// Not of whoever asks first: others wait for it, too.
			ctx, cancel := context.WithTimeout(g.ctx, lookupTime)
			defer cancel()
			f.addrs, f.err = l.ask(ctx, name)
			f.addrs = first(f.addrs)
			l.mu.Lock()
			f.at = time.Now()
			if f.err != nil {
				delete(l.kept, name)
			}
			l.mu.Unlock()
			close(f.done)
		})
	}
	l.mu.Unlock()
	select {
	case <-f.done:
		return f.addrs, f.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// first gives the first maxAnswers of each family.
func first(all []netip.Addr) []netip.Addr {
	count := map[bool]int{}
	return slices.DeleteFunc(all, func(a netip.Addr) bool {
		count[a.Is4()]++
		return count[a.Is4()] > maxAnswers
	})
}

// ownAddrs are this machine's own addresses. They change, so they are read again when they
// are asked for, at most once a second.
type ownAddrs struct {
	mu   sync.Mutex
	read time.Time
	all  map[netip.Addr]bool // nil: they could not be read
	led  map[netip.Addr]bool // of others, whether they lead here all the same
}

// maxLed bounds what is kept of ways that were asked for.
const maxLed = 1024

func (o *ownAddrs) has(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	o.mu.Lock()
	defer o.mu.Unlock()
	if time.Since(o.read) > time.Second {
		o.read, o.led = time.Now(), map[netip.Addr]bool{}
		addrs, err := net.InterfaceAddrs()
		if err == nil {
			o.all = map[netip.Addr]bool{}
		}
		for _, x := range addrs {
			if p, err := netip.ParsePrefix(x.String()); err == nil {
				o.all[p.Addr().Unmap().WithZone("")] = true
			}
		}
	}
	if o.all == nil || o.all[a] {
		return true
	}
	led, known := o.led[a]
	if !known {
		var err error
		if led, err = ledHere(a); err != nil {
			return true
		}
		if len(o.led) < maxLed {
			o.led[a] = led
		}
	}
	return led
}
