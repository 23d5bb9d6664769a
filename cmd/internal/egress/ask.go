// What no rule names may wait for the operator's word.

package egress

import (
	"context"
	"slices"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// reasonOperator: the operator was asked and said no.
const reasonOperator rules.Reason = "operator"

type askKey struct {
	host string
	port uint16
}

type ask struct {
	since, until time.Time
	waiters      int
	refused      bool
}

// Pending returns what waits for the operator, oldest first.
func (g *Gateway) Pending() []wire.EgressAsk {
	g.mu.Lock()
	defer g.mu.Unlock()
	var all []wire.EgressAsk
	for k, a := range g.asks {
		all = append(all, wire.EgressAsk{Host: k.host, Port: k.port, Since: a.since, Until: a.until})
	}
	slices.SortFunc(all, func(a, b wire.EgressAsk) int { return a.Since.Compare(b.Since) })
	return all
}

// judge decides, and waits for the operator where the verdict is that he may be asked: until
// decide says something else, he refuses, or time is over.
func (g *Gateway) judge(ctx context.Context, key askKey, may bool, decide func() rules.Verdict) rules.Verdict {
	v := decide()
	if v.Allowed || !v.Ask || !may {
		return v
	}
	a, first := g.begin(key)
	if a == nil {
		return v
	}
	if first {
		g.records.add(&Record{Agent: g.cfg.Agent, Kind: kind(key), Verdict: Asking, Name: key.host, Port: key.port})
		g.notice.changed()
	}
	defer g.end(key, a)
	timer := time.NewTimer(time.Until(a.until))
	defer timer.Stop()
	for {
		g.mu.Lock()
		changed, refused := g.changed, a.refused
		g.mu.Unlock()
		switch v = decide(); {
		case v.Allowed || !v.Ask:
			return v
		case refused:
			v.Reason = reasonOperator
			return v
		}
		select {
		case <-changed:
		case <-timer.C:
			return v
		case <-ctx.Done():
			return v
		}
	}
}

func kind(k askKey) string {
	if k.port == 0 {
		return kindDNS
	}
	return kindTCP
}

// begin makes the caller wait for key; nil: too many wait already. The first one that waits
// sets for how long.
func (g *Gateway) begin(key askKey) (a *ask, first bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	a = g.asks[key]
	if g.closed || g.waiters >= maxWaiters || a == nil && len(g.asks) >= maxAsks {
		return nil, false
	}
	if a == nil {
		now := time.Now()
		a = &ask{since: now, until: now.Add(time.Duration(g.rules().AskFor()) * time.Second)}
		g.asks[key] = a
		first = true
	}
	a.waiters++
	g.waiters++
	return a, first
}

func (g *Gateway) end(key askKey, a *ask) {
	g.mu.Lock()
	g.waiters--
	if a.waiters--; a.waiters == 0 {
		delete(g.asks, key)
	}
	g.mu.Unlock()
	g.notice.changed()
}
