package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// Bounds of a gateway.
const (
	maxFlows   = 4096 // connections at once; fewer where there are fewer descriptors
	maxWords   = 1000 // that the operator said for one run
	maxAsks    = 64   // different things that wait for the operator
	maxWaiters = 128  // queries and connections that wait for them
	onceLasts  = 5 * time.Minute

	// What a connection has open: itself and what is tried for it; then two sockets and, while data
	// is under way, both ends of a pipe for each direction.
	flowFiles = 1 + mostTries
)

// Gateway is the way out of one agent.
type Gateway struct {
	cfg        Config
	log        *slog.Logger
	ctx        context.Context // ends with Close
	cancel     context.CancelFunc
	wg         sync.WaitGroup // of what may outlive its call
	proxy      *proxy
	given      *given
	invented   *invented
	lookups    lookups
	own        ownAddrs
	records    *recorder
	resolvConf string
	times      times
	maxFlows   int

	set atomic.Pointer[rules.Set]

	allowed, denials, failures, sent, received atomic.Uint64

	mu      sync.Mutex
	policy  rules.Policy
	words   []word
	once    []onceWord
	changed chan struct{} // closed and made anew when what is decided changed
	asks    map[askKey]*ask
	waiters int
	flows   map[*flow]struct{}
	closed  bool

	notice notice
}

// times are how long things may take; tests shorten them.
type times struct {
	connect time.Duration // to reach the other side
	stagger time.Duration // between two attempts
	inspect time.Duration // from a client's first byte to its whole hello or head
	refusal time.Duration // for a client to say what it is refused
	idle    time.Duration // without a byte in either direction
}

// word is what the operator said for this run.
type word struct {
	allow bool
	rule  string
}

// onceWord lets one connection out.
type onceWord struct {
	set   *rules.Set
	rule  string
	until time.Time
}

// New makes a gateway. The error names the rule that cannot be read, or the record that
// cannot be opened.
func New(c Config) (*Gateway, error) {
	g := &Gateway{
		cfg: c, log: c.Log, policy: c.Policy, given: newGiven(maxGiven), resolvConf: "/etc/resolv.conf",
		lookups: lookups{ask: hostLookup, kept: map[string]*found{}},
		changed: make(chan struct{}), asks: map[askKey]*ask{}, flows: map[*flow]struct{}{}, maxFlows: maxFlows,
		times: times{connect: 30 * time.Second, stagger: 250 * time.Millisecond, inspect: 10 * time.Second, refusal: 2 * time.Second, idle: 4 * time.Hour},
	}
	if g.log == nil {
		g.log = slog.New(slog.DiscardHandler)
	}
	set, err := rules.Compile(c.Policy)
	if err != nil {
		return nil, err
	}
	g.set.Store(set)
	if g.proxy, err = newProxy(c.Proxy); err != nil {
		return nil, err
	}
	g.invented = newInvented()
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err == nil && limit.Cur < flowFiles*maxFlows+256 {
		g.maxFlows = int(max(16, (int64(limit.Cur)-256)/flowFiles))
	}
	g.records, err = newRecorder(c.Records, c.Server, func(err error) {
		g.log.Warn("connections are no longer recorded", "error", err)
	})
	if err != nil {
		return nil, err
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.notice.tell = c.Changed
	return g, nil
}

// while gives a context that ends with ctx and with the gateway.
func (g *Gateway) while(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(g.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// enter makes Close wait for the caller, who says g.wg.Done at the end; false: it is closed.
func (g *Gateway) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed {
		g.wg.Add(1)
	}
	return !g.closed
}

// rules are those in force.
func (g *Gateway) rules() *rules.Set { return g.set.Load() }

// SetRules replaces the policy. Words that were said for this run stay. Connections that
// the new one denies are cut.
func (g *Gateway) SetRules(p rules.Policy) error {
	if _, err := rules.Compile(p); err != nil {
		return err
	}
	g.mu.Lock()
	g.policy = p
	err := g.compile()
	g.mu.Unlock()
	g.cutDenied()
	return err
}

// compile makes the rules in force anew and wakes those who wait for them. The caller holds
// g.mu.
func (g *Gateway) compile() error {
	p := g.policy
	p.Allow, p.Deny = slices.Clone(p.Allow), slices.Clone(p.Deny)
	for _, w := range g.words {
		if w.allow {
			p.Allow = append(p.Allow, w.rule)
		} else {
			p.Deny = append(p.Deny, w.rule)
		}
	}
	set, err := rules.Compile(p)
	if err != nil {
		return err // cannot be: each was read before
	}
	g.set.Store(set)
	g.wake()
	return nil
}

// wake lets what waits look again. The caller holds g.mu.
func (g *Gateway) wake() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// Stats returns the counters.
func (g *Gateway) Stats() wire.EgressStats {
	g.mu.Lock()
	active := len(g.flows)
	g.mu.Unlock()
	return wire.EgressStats{Allowed: g.allowed.Load(), Denied: g.denials.Load(), Failed: g.failures.Load(), Active: active,
		Sent: g.sent.Load(), Received: g.received.Load()}
}

// Allow lets host (HOST[:PORT], as in a rule) through, what waits for it included. It is
// an error where a rule of the policy denies it, since that would win.
func (g *Gateway) Allow(host string, s wire.EgressScope) error {
	parsed, err := rules.Parse(host)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	same := func(d string) bool { return rules.Same(d, host) }
	switch d := rules.Denying(slices.DeleteFunc(slices.Clone(g.policy.Deny), same), host); {
	case d != "":
		return fmt.Errorf("%s stays denied: the agent's rules deny %s, and deny beats allow; take that rule away with `agentconnect agent edit ID --deny`, which names those that stay (\"\": none)", host, d)
	case s != wire.EgressAlways && slices.ContainsFunc(g.policy.Deny, same):
		return fmt.Errorf("%s stays denied: the agent's rules say so, and deny beats allow; take that rule away with `agentconnect egress allow ID %s --always`", host, host)
	}
	switch s {
	case wire.EgressOnce:
		set, err := rules.Compile(rules.Policy{Allow: []string{host}})
		if err != nil {
			return err
		}
		now := time.Now()
		g.once = slices.DeleteFunc(g.once, func(w onceWord) bool { return now.After(w.until) })
		if len(g.once) >= maxWords {
			return errTooManyWords
		}
		g.once = append(g.once, onceWord{set, parsed[0].Text(), now.Add(onceLasts)})
		g.wake()
		return nil
	case wire.EgressRun, wire.EgressAlways:
		return g.say(word{true, host}, s)
	}
	return fmt.Errorf("scope %q: once, run or always", s)
}

// Deny refuses host, and cuts what is connected to it.
func (g *Gateway) Deny(host string, s wire.EgressScope) error {
	parsed, err := rules.Parse(host)
	if err != nil {
		return err
	}
	g.mu.Lock()
	switch s {
	case wire.EgressOnce:
		n := 0
		for key, a := range g.asks {
			if slices.ContainsFunc(parsed, func(r rules.Rule) bool { return r.Matches(key.host, key.port) }) {
				a.refused = true
				n++
			}
		}
		g.wake()
		g.mu.Unlock()
		if n == 0 {
			return fmt.Errorf("%s: nothing waits for it; to deny what comes leave --once out, or say --always", host)
		}
		return nil
	case wire.EgressRun, wire.EgressAlways:
		g.once = slices.DeleteFunc(g.once, func(w onceWord) bool {
			return slices.ContainsFunc(parsed, func(r rules.Rule) bool { return r.Text() == w.rule })
		})
		err := g.say(word{false, host}, s)
		g.mu.Unlock()
		if err == nil {
			g.cutDenied()
		}
		return err
	}
	g.mu.Unlock()
	return fmt.Errorf("scope %q: once, run or always", s)
}

var errTooManyWords = errors.New("too many rules for one run; write them down with --always, and restart the agent")

// say takes a word in; what was said before of the same host is forgotten. One that holds
// for good goes into the policy, which the next SetRules replaces. The caller holds g.mu.
func (g *Gateway) say(w word, s wire.EgressScope) error {
	words := slices.DeleteFunc(slices.Clone(g.words), func(old word) bool { return rules.Same(old.rule, w.rule) })
	if s != wire.EgressAlways {
		if len(words) >= maxWords {
			return errTooManyWords
		}
		g.words = append(words, w)
		return g.compile()
	}
	g.words = words
	same := func(r string) bool { return rules.Same(r, w.rule) }
	p := g.policy
	p.Allow, p.Deny = slices.DeleteFunc(slices.Clone(p.Allow), same), slices.DeleteFunc(slices.Clone(p.Deny), same)
	if w.allow {
		p.Allow = append(p.Allow, w.rule)
	} else {
		p.Deny = append(p.Deny, w.rule)
	}
	g.policy = p
	return g.compile()
}

// Close refuses what waits, cuts what is connected, writes the last records and returns
// when all is over.
func (g *Gateway) Close() error {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.cancel()
	g.notice.stop()
	g.wg.Wait()
	g.records.close()
	return nil
}

// judgeName decides whether a name may be looked up; with ask the operator may be waited for.
func (g *Gateway) judgeName(ctx context.Context, name string, ask bool) rules.Verdict {
	return g.judge(ctx, askKey{name, 0}, ask, func() rules.Verdict {
		q := rules.Query{Name: name}
		v := g.rules().Decide(q)
		if !v.Allowed && v.Reason != rules.Denied {
			if w, ok := g.onceFor(q, false); ok {
				return w
			}
		}
		return v
	})
}

// judgeConn decides about a connection, by the names that its address was given for. name is
// the one that the verdict is about.
func (g *Gateway) judgeConn(ctx context.Context, dst netip.AddrPort) (v rules.Verdict, name string) {
	names := g.given.names(dst.Addr())
	key := askKey{dst.Addr().String(), dst.Port()}
	switch {
	case dst.Addr() == HostAddr:
		key.host = HostName // by its address no word would reach it
	case len(names) > 0:
		key.host = names[0]
	}
	v = g.judge(ctx, key, true, func() rules.Verdict {
		var v rules.Verdict
		v, name = g.decide(names, dst, true)
		return v
	})
	return v, name
}

// decide is the verdict on a connection to dst, and the name that it goes by. take uses up a
// word that was said for one connection.
func (g *Gateway) decide(names []string, dst netip.AddrPort, take bool) (best rules.Verdict, name string) {
	if dst.Addr() == HostAddr {
		v := g.rules().Host(dst.Port())
		if !v.Allowed && v.Reason != rules.Denied {
			if w, ok := g.onceBy(func(s *rules.Set) rules.Verdict { return s.Host(dst.Port()) }, take); ok {
				v = w
			}
		}
		return v, HostName
	}
	if len(names) == 0 {
		names = []string{""}
	}
	set := g.rules()
	for i, n := range names {
		if v := set.Decide(g.query(n, dst)); i == 0 || better(v, best) {
			best, name = v, n
		}
	}
	if best.Allowed || best.Reason == rules.Denied {
		return best, name
	}
	for _, n := range names {
		if v, ok := g.onceFor(g.query(n, dst), take); ok {
			return v, n
		}
	}
	return best, name
}

func (g *Gateway) query(name string, dst netip.AddrPort) rules.Query {
	q := rules.Query{Name: name, Addr: dst.Addr(), Port: dst.Port()}
	if g.invented.has(q.Addr) {
		q.Addr = netip.Addr{} // the operator's proxy finds the real one
	} else {
		q.Own = g.own.has(q.Addr)
	}
	return q
}

// better reports whether a says more for a connection than b: what needs no further look,
// then what is allowed, then what is denied by a rule.
func better(a, b rules.Verdict) bool {
	rank := func(v rules.Verdict) int {
		switch {
		case v.Allowed && !v.ByName:
			return 3
		case v.Allowed:
			return 2
		case v.Reason == rules.Denied:
			return 1
		}
		return 0
	}
	return rank(a) > rank(b)
}

// onceFor finds a word that was said for one connection and fits q.
func (g *Gateway) onceFor(q rules.Query, take bool) (rules.Verdict, bool) {
	return g.onceBy(func(s *rules.Set) rules.Verdict { return s.Decide(q) }, take && q.Port != 0)
}

// onceBy finds one by which decide allows; take uses it up.
func (g *Gateway) onceBy(decide func(*rules.Set) rules.Verdict, take bool) (rules.Verdict, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	for i, w := range g.once {
		if v := decide(w.set); v.Allowed && now.Before(w.until) {
			if take {
				g.once = slices.Delete(g.once, i, i+1)
			}
			v.Rule += onceMark
			return v, true
		}
	}
	return rules.Verdict{}, false
}

// why says a verdict to a person.
func (g *Gateway) why(v rules.Verdict) string {
	switch v.Reason {
	case rules.Denied:
		return "the rule " + v.Rule + " denies it"
	case rules.Range:
		return "the address is never reached without a rule that names it: " + v.What
	case rules.Own:
		return "the address is this machine's own; for a port of its loopback there are rules host:PORT"
	case reasonOperator:
		return "the operator said no"
	case rules.Unlisted, rules.ByRule, rules.ByMode: // nothing more to say of them
	}
	return "no rule allows it"
}

// whyAddr says why a name leads nowhere that is reached.
func (g *Gateway) whyAddr(a netip.Addr) string {
	if _, what, ok := rules.Special(a); ok {
		return "it leads to " + a.String() + ", which is never reached without a rule that names it: " + what
	}
	if g.own.has(a) {
		return "it leads to " + a.String() + ", which is this machine's own address"
	}
	return "it leads to " + a.String() + ", which a rule denies"
}

// denied counts and records a refusal.
func (g *Gateway) denied(r Record) {
	r.Agent, r.Verdict = g.cfg.Agent, Denied
	if r.Kind == kindDNS && g.records.repeated(&r) {
		return
	}
	g.denials.Add(1)
	g.records.add(&r)
	g.notice.changed()
}

// notice tells of changes, at once and then at most once a second.
type notice struct {
	tell func()

	calling sync.Mutex
	mu      sync.Mutex
	quiet   *time.Timer // runs for a second after tell was called
	again   bool        // something changed meanwhile
	stopped bool
}

func (n *notice) changed() {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.tell == nil || n.stopped:
	case n.quiet != nil:
		n.again = true
	default:
		n.quiet = time.AfterFunc(time.Second, n.over)
		go func() {
			n.calling.Lock()
			defer n.calling.Unlock()
			n.tell()
		}()
	}
}

// over ends the quiet second.
func (n *notice) over() {
	n.mu.Lock()
	n.quiet = nil
	again := n.again
	n.again = false
	n.mu.Unlock()
	if again {
		n.changed()
	}
}

func (n *notice) stop() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stopped = true
	if n.quiet != nil {
		n.quiet.Stop()
	}
}

// onceMark stands behind the rule of a word that was said for one connection.
const onceMark = " (once)"
