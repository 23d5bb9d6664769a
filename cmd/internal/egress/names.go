// Which name was given which address. A program may keep an address for as long as it
// runs, so the table lasts as long as the gateway; what was given longest ago goes first
// when it is full.

package egress

import (
	"container/list"
	"net/netip"
	"sync"
)

// maxGiven bounds the table, in pairs of a name and an address: some 4 MiB.
const maxGiven = 16 << 10

// maxNames is how many names of one address are looked at, the newest first.
const maxNames = 64

type pair struct {
	addr netip.Addr
	name string
}

// given is the table. The zero value is not usable.
type given struct {
	mu     sync.Mutex
	most   int
	pairs  map[pair]*list.Element // of a pair
	order  *list.List             // the newest in front
	byAddr map[netip.Addr][]string
}

func newGiven(most int) *given {
	return &given{most: most, pairs: map[pair]*list.Element{}, order: list.New(), byAddr: map[netip.Addr][]string{}}
}

// give notes that addrs were given for name.
func (t *given) give(name string, addrs []netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, a := range addrs {
		p := pair{a, name}
		if e, ok := t.pairs[p]; ok {
			t.order.MoveToFront(e)
			t.unlist(p)
		} else {
			t.pairs[p] = t.order.PushFront(p)
		}
		t.byAddr[a] = append(t.byAddr[a], name)
	}
	for t.order.Len() > t.most {
		e := t.order.Back()
		p := t.order.Remove(e).(pair)
		delete(t.pairs, p)
		t.unlist(p)
	}
}

// unlist takes a name from those of its address.
func (t *given) unlist(p pair) {
	names := t.byAddr[p.addr]
	for i, n := range names {
		if n == p.name {
			names = append(names[:i], names[i+1:]...)
			break
		}
	}
	if len(names) == 0 {
		delete(t.byAddr, p.addr)
	} else {
		t.byAddr[p.addr] = names
	}
}

// has reports whether addr was given for name.
func (t *given) has(name string, addr netip.Addr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.pairs[pair{addr, name}]
	return ok
}

// names are those that addr was given for, the newest first.
func (t *given) names(addr netip.Addr) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.byAddr[addr]
	out := make([]string, 0, min(len(all), maxNames))
	for i := len(all) - 1; i >= 0 && len(out) < maxNames; i-- {
		out = append(out, all[i])
	}
	return out
}
