// One connection of the agent, from its judgement to its end.

package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// flow is a connection that is being carried, or refused.
type flow struct {
	g      *Gateway
	client tcp.Conn
	dst    netip.AddrPort
	began  time.Time

	// name and verdict are what it was let out by, once that is known.
	name    string
	verdict rules.Verdict
	// tunnel is where a proxy at the other end leads to, once it has said so; tunnels how many
	// did, one through the other.
	tunnel  *place
	tunnels int
	// uses are all that the client asked for: answers to earlier requests may be on their way.
	// Written by what looks at the client alone, as are name, verdict and tunnel.
	uses []use

	sent, received atomic.Uint64
	once           sync.Once
	refusing       atomic.Bool
	down           chan struct{} // closed when nothing more comes from the server

	mu     sync.Mutex
	server stream
	rec    Record
	why    string // it was cut, and this is why
}

// place is a server, by its name or address, and its port.
type place struct {
	name string
	port uint16
}

func (p place) query() rules.Query {
	if a, err := netip.ParseAddr(p.name); err == nil {
		return rules.Query{Addr: a, Port: p.port}
	}
	return rules.Query{Name: p.name, Port: p.port}
}

// to is where what the client says now goes.
func (f *flow) to() place {
	if f.tunnel != nil {
		return *f.tunnel
	}
	return place{f.name, f.dst.Port()}
}

// use is a place that the client asked for, there or through a proxy.
type use struct {
	place
	proxied bool
	once    string // the rule of a word for one connection, if it was let out by one
}

func onceRule(v rules.Verdict) string {
	if strings.HasSuffix(v.Rule, onceMark) {
		return v.Rule
	}
	return ""
}

// maxUses bounds them.
const maxUses = 64

var tooManyUses = fmt.Sprintf("more than %d hosts on one connection", maxUses)

// noteUse comes before the last look at the rules, so that whoever changes them finds u; false:
// there are too many.
func (f *flow) noteUse(u use) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if slices.Contains(f.uses, u) {
		return true
	}
	if len(f.uses) == maxUses {
		return false
	}
	f.uses = append(f.uses, u)
	return true
}

// HandleTCP carries one connection of the agent that was meant for dst, to its end. It
// owns conn. It returns when the connection is over or ctx ends, which cuts it.
func (g *Gateway) HandleTCP(ctx context.Context, conn tcp.Conn, dst netip.AddrPort) {
	defer conn.Close()
	dst = netip.AddrPortFrom(dst.Addr().Unmap().WithZone(""), dst.Port())
	f := &flow{g: g, client: conn, dst: dst, began: time.Now(), down: make(chan struct{}),
		rec: Record{Agent: g.cfg.Agent, Kind: kindTCP, Address: dst.Addr().String(), Port: dst.Port()}}
	if !dst.IsValid() || dst.Port() == 0 || dst.Addr().IsLoopback() || dst.Addr().IsUnspecified() || dst.Addr().IsMulticast() {
		// Not what it was meant for, or nothing that is ours to reach.
		f.refused("not an address to connect to")
		tcp.Reset(conn)
		return
	}
	if why := g.admit(f); why != "" {
		f.refused(why)
		tcp.Reset(conn)
		return
	}
	defer g.over(f)
	ctx, cancel := g.while(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { f.cut("the agent ends") })
	defer stop()
	f.run(ctx)
}

// admit takes a connection in, unless there are too many.
func (g *Gateway) admit(f *flow) (why string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return "the agent ends"
	case len(g.flows) >= g.maxFlows:
		return "there are " + strconv.Itoa(len(g.flows)) + " connections already"
	}
	g.flows[f] = struct{}{}
	g.wg.Add(1)
	return ""
}

func (g *Gateway) over(f *flow) {
	g.mu.Lock()
	delete(g.flows, f)
	none := len(g.flows) == 0
	g.mu.Unlock()
	if none {
		dropPipes()
	}
	g.wg.Done()
}

// run judges, dials and carries.
func (f *flow) run(ctx context.Context) {
	g := f.g
	set := g.rules()
	v, name := g.judgeConn(ctx, f.dst)
	f.mu.Lock()
	f.name, f.verdict = name, v
	f.rec.Name, f.rec.Rule = name, v.Rule
	f.mu.Unlock()
	if !v.Allowed {
		f.refuse(g.why(v))
		return
	}
	if why := f.since(set); why != "" {
		f.refuse(why)
		return
	}
	server, dialled, err := g.dial(ctx, f.dst, name, v)
	if err == nil {
		defer server.Close()
	}
	f.mu.Lock()
	f.server = server
	if dialled != f.rec.Address {
		f.rec.Dialled = dialled
	}
	cut := f.why
	f.mu.Unlock()
	switch {
	case cut != "": // while it was dialled
		f.end(Cut, cut)
		tcp.Reset(f.client)
		return
	case err != nil:
		g.failures.Add(1)
		f.end(Failed, err.Error())
		tcp.Reset(f.client)
		return
	}
	f.carry()
}

// carry copies both ways until both have ended.
func (f *flow) carry() {
	stop := f.watch()
	defer stop()
	gate := newGate()
	go func() {
		defer close(f.down)
		if err := pump(f.client, f.server, &f.received, gate); err == nil {
			_ = f.client.CloseWrite() // the client may go on: it is half closed
		} else if !f.refusing.Load() {
			f.drop() // there is nobody left, or nothing more to tell
		}
	}()
	err := f.up(gate)
	var no *refusal
	var unread *writeError
	switch {
	case errors.As(err, &no):
		f.refusing.Store(true)
		f.server.Close()
		<-f.down
		f.refuseSaid(no)
		return
	case err == nil:
		_ = f.server.CloseWrite()
	case errors.As(err, &unread):
		// The server reads no more; what it has sent still reaches the client.
	default:
		f.drop()
	}
	<-f.down
	if err != nil {
		f.drop()
	}
	f.letOut()
	f.mu.Lock()
	why := f.why
	f.mu.Unlock()
	if why != "" {
		f.end(Cut, why)
	} else {
		f.end(Allowed, "")
	}
}

// letOut counts the connection as let out, once.
func (f *flow) letOut() {
	f.once.Do(func() {
		f.g.allowed.Add(1)
		f.g.notice.changed()
	})
}

// drop ends both sides so that each is told that something went wrong.
func (f *flow) drop() {
	tcp.Reset(f.client)
	if s, ok := f.server.(tcp.Conn); ok {
		tcp.Reset(s)
	} else {
		f.server.Close()
	}
}

// longAfter is when a connection that goes on is recorded for the first time.
const longAfter = 2 * time.Second

// watch records that the connection goes on, and cuts it when no byte has passed for long.
func (f *flow) watch() (stop func()) {
	var mu sync.Mutex
	var t *time.Timer
	last, long, over := uint64(0), false, false
	mu.Lock()
	defer mu.Unlock()
	t = time.AfterFunc(longAfter, func() {
		mu.Lock()
		defer mu.Unlock()
		now := f.sent.Load() + f.received.Load()
		switch {
		case over:
			return
		case !long:
			long = true
			f.mu.Lock()
			r, server := f.rec, f.server
			f.mu.Unlock()
			if s, ok := server.(tcp.Conn); ok {
				_ = tcp.KeepAlive(s) // without it a dead one ends when no byte has passed for long
			}
			r.Verdict = Open
			f.g.records.add(&r)
		case now == last:
			f.cut("no byte passed for " + f.g.times.idle.String())
			return
		}
		last = now
		t.Reset(f.g.times.idle)
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		over = true
		t.Stop()
	}
}

// refusal is why a connection that was let out by its address is refused for what the
// client said.
type refusal struct {
	seen  string
	port  uint16 // of seen, where that is another than the connection's
	why   string
	alert byte // for TLS
	http  bool
}

func (r *refusal) Error() string { return r.why }

// up carries what the client sends, and looks at it where that matters.
func (f *flow) up(gate *gate) error {
	open := f.g.rules().Open()
	strict := f.verdict.ByName && !open
	if !strict && !open {
		f.letOut()
		return pump(f.server, f.client, &f.sent, nil)
	}
	in := newIntake(f.client)
	defer in.release()
	return f.look(in, gate, strict)
}

// look finds out what the client speaks and carries it on accordingly.
func (f *flow) look(in *intake, gate *gate, strict bool) error {
	looked := 0
	for wait := len(in.held()) == 0; ; wait = true {
		var err error
		if wait {
			err = in.more()
		}
		switch {
		case errors.Is(err, errTooLong) && strict:
			return &refusal{why: "the request " + errTooLong.Error(), http: true}
		case errors.Is(err, errTooLong):
			return f.rest(in)
		case errors.Is(err, io.EOF):
			// Nothing more will make a request of it, unless the server takes it as it is.
			if strict && looksLikeHTTP(append(in.held(), '\n')) == alike {
				return &refusal{why: "the request " + errBadHTTP.Error(), http: true}
			}
			return nil
		case err != nil:
			return err
		}
		b := in.held()
		header := unlike
		if strict {
			header = looksLikeBalancer(b)
		}
		if header == alike {
			return &refusal{why: "it began with a balancer's header (PROXY protocol), behind which no name is compared; a rule with any-sni lets it pass"}
		}
		switch looksLikeTLS(b) {
		case alike:
			return f.upTLS(in, strict)
		case unlike:
			switch looksLikeHTTP(b) {
			case alike:
				return f.upHTTP(in, gate, strict)
			case unlike:
				if header == unlike {
					return f.rest(in)
				}
			case unsure:
			}
		case unsure:
		}
		// Not even a line yet: without its end no server of these acts on it, and one of
		// another kind may answer.
		looked += len(b)
		switch {
		case len(b) <= maxHead && looked <= maxLooked:
		case strict:
			return &refusal{why: "the request " + errTooLong.Error(), http: true}
		default:
			return f.rest(in)
		}
		if err := f.send(in, len(b)); err != nil {
			return err
		}
	}
}

// rest sends on what is held and all that follows, without a further look.
func (f *flow) rest(in *intake) error {
	f.letOut()
	f.client.SetReadDeadline(time.Time{})
	if err := f.pass(in, len(in.held())); err != nil {
		return err
	}
	in.release()
	return pump(f.server, f.client, &f.sent, nil)
}

// send sends the first n held bytes on, and still holds them.
func (f *flow) send(in *intake, n int) error {
	if n <= in.gone {
		return nil
	}
	m, err := f.server.Write(in.held()[in.gone:n])
	f.sent.Add(uint64(m))
	in.gone += m
	if err != nil {
		return &writeError{err}
	}
	return nil
}

// pass sends the first n held bytes on.
func (f *flow) pass(in *intake, n int) error {
	if err := f.send(in, n); err != nil {
		return err
	}
	in.take(n)
	return nil
}

// within sets how long the client may take for what it has begun.
func (f *flow) within() { f.client.SetReadDeadline(time.Now().Add(f.g.times.inspect)) }

// admits reports whether the name that the client tells the server is one that this address
// was given for and that is allowed.
func (f *flow) admits(name string) (v rules.Verdict, ok bool) {
	if name == f.to().name {
		return f.verdict, true
	}
	if f.tunnel != nil || !f.g.given.has(name, f.dst.Addr()) {
		return rules.Verdict{Reason: rules.Unlisted}, false
	}
	i := slices.IndexFunc(f.uses, func(u use) bool { return u.name == name && u.once != "" })
	if i >= 0 {
		v = rules.Verdict{Allowed: true, Reason: rules.ByRule, Rule: f.uses[i].once, ByName: true}
	}
	if now, _ := f.g.decide([]string{name}, f.dst, i < 0); i < 0 || now.Allowed || now.Reason == rules.Denied {
		v = now
	}
	return v, v.Allowed
}

// judgeSaid judges the name that the client told, strictly or, in mode open, by what a rule
// denies. The refusal has no words for the client yet.
func (f *flow) judgeSaid(name string, strict bool) *refusal {
	set := f.g.rules()
	if !strict {
		v := set.Decide(f.g.query(name, f.dst))
		if v.Reason == rules.Denied {
			f.mu.Lock()
			f.rec.Rule = v.Rule
			f.mu.Unlock()
			return &refusal{seen: name, why: f.g.why(v)}
		}
		f.says(name, rules.Verdict{})
		if why := f.since(set); why != "" {
			return &refusal{seen: name, why: why}
		}
		return nil
	}
	v, ok := f.admits(name)
	if ok {
		f.says(name, v)
		why := tooManyUses
		if f.tunnel != nil || f.noteUse(use{place: f.to(), once: onceRule(v)}) {
			why = f.since(set)
		}
		if why != "" {
			return &refusal{seen: name, why: why}
		}
		return nil
	}
	if v.Reason == rules.Unlisted {
		if f.g.rules().Decide(f.g.query(name, f.dst)).Allowed {
			return &refusal{seen: name, why: fmt.Sprintf("%s was not looked up at this address: it leads elsewhere", name)}
		}
		return &refusal{seen: name, why: fmt.Sprintf("the address was given for %s, and %s was asked for there, which no rule allows", f.to().name, name)}
	}
	return &refusal{seen: name, why: f.g.why(v)}
}

// says notes what the client told: the connection is that name's from here on.
func (f *flow) says(name string, v rules.Verdict) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if name == f.rec.Name {
		return
	}
	if f.tunnel == nil && f.g.given.has(name, f.dst.Addr()) {
		f.name, f.rec.Name = name, name
		if v.Allowed {
			f.verdict, f.rec.Rule = v, v.Rule
		}
	} else {
		f.rec.Seen = name
	}
}

// upTLS looks at the ClientHello, and at a second one that the server may ask for.
func (f *flow) upTLS(in *intake, strict bool) error {
	f.within()
	first, err := f.nextHello(in, strict, "")
	if first == nil || err != nil || !strict {
		if err != nil {
			return err
		}
		return f.rest(in)
	}
	f.letOut()
	f.client.SetReadDeadline(time.Time{})
	for {
		// After a HelloRetryRequest the client says all of it again.
		kind, body, n, err := parseRecord(in.held())
		switch {
		case kind == recordData && !first.early:
			return f.rest(in)
		case err != nil && !errors.Is(err, errShort):
			return &refusal{why: "what came after the ClientHello is no TLS"}
		case errors.Is(err, errShort):
			if err := in.more(); err != nil {
				if !errors.Is(err, io.EOF) {
					return err
				}
				return f.pass(in, len(in.held()))
			}
		case kind == recordChangeCipherSpec, kind == recordData, kind == recordAlert: // servers pass over a warning
			if err := f.pass(in, n); err != nil {
				return err
			}
		case kind == recordHandshake && body[0] == clientHello:
			if _, err := f.nextHello(in, strict, first.name); err != nil {
				return err
			}
			return f.rest(in)
		default:
			return f.rest(in)
		}
	}
}

// nextHello reads a ClientHello, judges it and sends it on; nil in mode open, where it is
// none that can be read. same is the name that it must have, if it is the second one.
func (f *flow) nextHello(in *intake, strict bool, same string) (*hello, error) {
	var p helloParser
	for {
		h, n, err := p.parse(in.held())
		if errors.Is(err, errShort) {
			if err = in.more(); err == nil {
				continue
			}
		}
		switch {
		case err != nil && !strict:
			return nil, nil // what follows is not looked at
		case err != nil && !errors.Is(err, errBadHello) && !errors.Is(err, errTooLong) && !timedOut(err):
			return nil, err
		case err != nil:
			return nil, &refusal{why: "it began like TLS, and " + sayHello(err), alert: alertAccessDenied}
		case same != "" && h.name != same:
			return nil, &refusal{seen: h.name, why: "the server's name changed in the middle of the TLS handshake"}
		case strict && h.encrypted:
			return nil, &refusal{seen: h.name, why: "the server's name is encrypted (ECH), so it cannot be compared; a rule with any-sni lets it pass", alert: alertAccessDenied}
		case strict && h.name == "":
			return nil, &refusal{why: "no server name in TLS, so it cannot be compared; a rule with any-sni lets it pass", alert: alertUnrecognizedName}
		case h.name != "":
			if no := f.judgeSaid(h.name, strict); no != nil {
				no.alert = alertUnrecognizedName
				return nil, no
			}
		}
		return &h, f.pass(in, n)
	}
}

func sayHello(err error) string {
	if timedOut(err) {
		return "the ClientHello did not come to an end in time"
	}
	return "its ClientHello is " + err.Error()
}

func timedOut(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// upHTTP judges each request. In mode open only the first is looked at.
func (f *flow) upHTTP(in *intake, gate *gate, strict bool) error {
	for first := true; ; first = false {
		head, err := f.nextHead(in)
		if err == nil && head == nil {
			return nil // ended between two requests
		}
		var r *request
		if err == nil {
			r, err = parseRequest(head)
		}
		switch {
		case err != nil && !strict && (!errors.Is(err, io.EOF) || len(in.held()) > 0):
			return f.rest(in)
		case timedOut(err):
			return f.refuseRequest(first, &refusal{why: "the request did not come to an end in time", http: true})
		case errors.Is(err, errNoHost), errors.Is(err, errBadHTTP), errors.Is(err, errTooLong):
			return f.refuseRequest(first, &refusal{why: "the request " + err.Error(), http: true})
		case err != nil:
			return err
		}
		if no := f.judgeRequest(r, strict); no != nil {
			return f.refuseRequest(first, no)
		}
		if !strict {
			return f.rest(in)
		}
		f.letOut()
		f.client.SetReadDeadline(time.Time{})
		switching := r.upgrade != "" || r.method == "CONNECT"
		if switching {
			if !first {
				return f.refuseRequest(first, &refusal{seen: r.host, why: "an upgrade in the middle of a connection"})
			}
			if f.tunnels == maxTunnels {
				return &refusal{seen: r.host, why: fmt.Sprintf("more than %d proxies, each through another", maxTunnels), http: true}
			}
			gate.want()
		}
		out := r.passOn(head)[in.gone:] // what went ahead is of the first line
		n, err := f.server.Write(out)
		f.sent.Add(uint64(n))
		if err != nil {
			return &writeError{err}
		}
		in.take(len(head))
		switch err := f.body(in, r.length); {
		case errors.Is(err, errBadHTTP):
			return f.refuseRequest(false, &refusal{why: "the body of a request is " + errBadBody.Error(), http: true})
		case err != nil:
			return err
		}
		if !switching {
			continue
		}
		select {
		case status := <-gate.status:
			switch {
			case r.method == "CONNECT" && status/100 == 2:
				return f.through(in, gate, r)
			case status == 101:
				return f.rest(in)
			}
		case <-f.down:
			return errNoAnswer
		}
	}
}

// maxTunnels bounds the layers of a connection, each of which costs memory.
const maxTunnels = 8

// through carries on what goes through a proxy. It is judged as it would be on the way to
// where the proxy leads; and a server that says yes and is none gets nothing else, either.
func (f *flow) through(in *intake, gate *gate, r *request) error {
	to := place{r.host, r.port}
	f.tunnels++
	if to == f.to() {
		return f.look(in, gate, true)
	}
	v := f.g.rules().Decide(to.query())
	f.mu.Lock()
	f.tunnel = &to
	f.mu.Unlock()
	switch {
	case !v.Allowed: // since it was asked for
		return &refusal{seen: to.name, why: f.g.why(v)}
	case v.ByName:
		return f.look(in, gate, true)
	}
	return f.rest(in)
}

var errNoAnswer = errors.New("the server ended without an answer")

// nextHead waits for a request's head; nil: the connection ended before one began. The time
// it may take begins with its first byte.
func (f *flow) nextHead(in *intake) ([]byte, error) {
	seen, began := 0, false
	for {
		b := in.held()
		skip := 0
		for skip < len(b) && (b[skip] == '\r' || b[skip] == '\n') {
			skip++
		}
		if skip > 0 {
			in.take(skip)
			seen = 0
			continue
		}
		switch end := headEnd(b, seen); {
		case end > maxHead:
			return nil, errTooLong
		case end > 0:
			return b[:end], nil
		}
		if seen = len(b); seen > maxHead {
			return nil, errTooLong
		}
		if seen > 0 && !began {
			began = true
			f.within()
		}
		if err := in.more(); err != nil {
			if errors.Is(err, io.EOF) && len(in.held()) == 0 {
				err = nil
			}
			return nil, err
		}
	}
}

// judgeRequest judges the host that a request is for.
func (f *flow) judgeRequest(r *request, strict bool) *refusal {
	var no *refusal
	if to := (place{r.host, r.port}); r.through && to != f.to() {
		// Asked of a proxy: what it would reach is judged by itself, in mode open by what a rule denies.
		few := f.noteUse(use{place: to, proxied: true})
		v := f.g.rules().Decide(to.query())
		switch {
		case v.Reason == rules.Denied && !strict:
			f.mu.Lock()
			f.rec.Rule = v.Rule
			f.mu.Unlock()
			no = &refusal{seen: r.host, why: f.g.why(v)}
		case !v.Allowed && strict:
			no = &refusal{seen: r.host, why: fmt.Sprintf("a proxy (%s) was asked for port %d of %s, and %s", f.to().name, r.port, r.host, f.g.why(v))}
		case !few:
			no = &refusal{seen: r.host, why: tooManyUses}
		default:
			f.mu.Lock()
			f.rec.Seen = r.host
			f.mu.Unlock()
		}
	} else {
		no = f.judgeSaid(r.host, strict)
	}
	if no != nil {
		no.http = true
		if r.through {
			no.port = r.port
		}
	}
	return no
}

// refuseRequest is the refusal of the first request; of a later one only the end, as the
// answers of those before may be on their way.
func (f *flow) refuseRequest(first bool, no *refusal) error {
	if first {
		return no
	}
	f.cut(no.why)
	f.mu.Lock()
	f.rec.Seen = no.seen
	f.mu.Unlock()
	return no
}

// body sends a request's body on.
func (f *flow) body(in *intake, length int64) error {
	if length >= 0 {
		if err := f.noRequest(in, length); err != nil {
			return err
		}
		return f.exactly(in, length)
	}
	for {
		var size int64
		if _, err := f.line(in, maxChunkLine, func(line string) (err error) { size, err = chunkSize(line); return err }); err != nil {
			return err
		}
		if size == 0 {
			break
		}
		if err := f.exactly(in, size); err != nil {
			return err
		}
		if _, err := f.line(in, 2, func(string) error { return nil }); err != nil {
			return err
		}
	}
	for { // trailers
		line, err := f.line(in, maxChunkLine, trailer)
		if err != nil || line == "" {
			return err
		}
	}
}

// noRequest looks at how a body of length bytes begins: some servers read the body of a GET
// as the next request. Nothing is held back of what is no line yet.
func (f *flow) noRequest(in *intake, length int64) error {
	for looked := 0; ; {
		b := in.held()
		if looked += len(b); looked > maxLooked {
			return errBadHTTP
		}
		whole := int64(len(b)) >= length
		if whole {
			b = slices.Concat(b[:length], []byte{'\n'}) // whatever comes behind it
		}
		switch looksLikeHTTP(b) {
		case alike:
			return errBadHTTP
		case unlike:
			return nil
		case unsure:
		}
		if whole || len(b) > maxHead {
			return nil
		}
		if err := f.send(in, len(b)); err != nil {
			return err
		}
		if err := in.more(); err != nil {
			return err
		}
	}
}

// exactly sends n bytes on.
func (f *flow) exactly(in *intake, n int64) error {
	for n > 0 {
		if len(in.held()) == 0 {
			if n > firstBytes {
				return pumpN(f.server, f.client, n, &f.sent)
			}
			if err := in.more(); err != nil {
				return err
			}
		}
		now := int(min(n, int64(len(in.held()))))
		if err := f.pass(in, now); err != nil {
			return err
		}
		n -= int64(now)
	}
	return nil
}

// trailer judges a line behind the last chunk: for a server that knows no trailers a request
// would begin there.
func trailer(line string) error {
	if name, _, ok := strings.Cut(line, ":"); line != "" && (!ok || !token(name)) {
		return errBadHTTP
	}
	return nil
}

// line sends a line on that has at most most bytes and that fits, and gives it without its end.
func (f *flow) line(in *intake, most int, fits func(string) error) (string, error) {
	for {
		b := in.held()
		for i, c := range b {
			if c == '\n' {
				if i >= most {
					return "", errBadHTTP
				}
				text, _, err := cutLine(b[:i+1])
				if err == nil {
					err = fits(text)
				}
				if err != nil {
					return "", err
				}
				return text, f.pass(in, i+1)
			}
		}
		if len(b) > most {
			return "", errBadHTTP
		}
		if err := in.more(); err != nil {
			return "", err
		}
	}
}

// refuse ends a connection that was not let out: where the client speaks first and waits for
// an answer, it gets one that says so.
func (f *flow) refuse(why string) {
	f.mu.Lock()
	cut := f.why
	f.mu.Unlock()
	port := f.dst.Port()
	if cut != "" || port != 443 && port != 80 {
		f.refused(why)
		tcp.Reset(f.client)
		return
	}
	in := newIntake(f.client)
	defer in.release()
	f.client.SetReadDeadline(time.Now().Add(f.g.times.refusal))
	seen := ""
	var p helloParser
	for n := 0; ; {
		if port == 443 {
			h, _, err := p.parse(in.held())
			if !errors.Is(err, errShort) {
				seen = h.name
				break
			}
		} else {
			if end := headEnd(in.held(), n); end > 0 {
				if r, err := parseRequest(in.held()[:end]); err == nil {
					seen = r.host
				}
				break
			}
			if n = len(in.held()); n > maxHead {
				break
			}
		}
		if in.more() != nil {
			break
		}
	}
	f.mu.Lock()
	if seen != f.rec.Name {
		f.rec.Seen = seen
	}
	f.mu.Unlock()
	f.refused(why)
	if len(in.held()) == 0 {
		tcp.Reset(f.client)
		return
	}
	if port == 443 {
		f.lastWords(tlsAlert(alertAccessDenied))
	} else {
		f.lastWords(f.page(why, port))
	}
}

// refuseSaid ends a connection for what the client said.
func (f *flow) refuseSaid(no *refusal) {
	f.mu.Lock()
	f.rec.Seen = no.seen
	f.mu.Unlock()
	f.refused(no.why)
	switch {
	case f.received.Load() > 0: // the server has spoken already
		tcp.Reset(f.client)
	case no.alert != 0:
		f.lastWords(tlsAlert(no.alert))
	case no.http && no.port != 0:
		f.lastWords(f.page(no.why, no.port))
	case no.http:
		f.lastWords(f.page(no.why, f.to().port))
	default:
		tcp.Reset(f.client)
	}
}

// page is what a browser shows of a refusal.
func (f *flow) page(why string, port uint16) []byte {
	f.mu.Lock()
	r := f.rec
	f.mu.Unlock()
	host := r.Seen
	if host == "" {
		if host = r.Name; host == "" {
			host = r.Address
		}
	}
	to := net.JoinHostPort(host, strconv.Itoa(int(port)))
	who, remedy := "agent "+f.g.cfg.Agent, "agentconnect egress allow "+f.g.cfg.Agent+" "+to
	if server := f.g.cfg.Server; server != "" {
		who, remedy = "MCP server "+server+" of "+who, `a rule in "allow" of its definition`
	}
	body := fmt.Sprintf("agentconnect: %s may not connect to %s: %s\nThe operator can let it through: %s\n", who, to, why, remedy)
	return fmt.Appendf(nil, "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body)
}

// lastWords are sent before the end. What the client still sends is read away for a moment:
// bytes that nobody read would turn the end into a reset, and the words would be lost.
func (f *flow) lastWords(b []byte) {
	f.client.SetDeadline(time.Now().Add(f.g.times.refusal))
	if _, err := f.client.Write(b); err != nil {
		return
	}
	if f.client.CloseWrite() == nil {
		_, _ = io.CopyN(io.Discard, f.client, 1<<20)
	}
}

// refused counts and records that the connection was refused.
func (f *flow) refused(why string) {
	f.mu.Lock()
	r := f.rec
	if r.Reason = why; f.why != "" {
		r.Reason = f.why
	}
	f.mu.Unlock()
	r.Sent, r.Received = f.sent.Load(), f.received.Load()
	f.g.denied(r)
}

// end records how it ended.
func (f *flow) end(verdict, why string) {
	f.mu.Lock()
	r := f.rec
	f.mu.Unlock()
	r.Verdict, r.Reason = verdict, why
	r.Sent, r.Received = f.sent.Load(), f.received.Load()
	r.Millis = time.Since(f.began).Milliseconds()
	f.g.sent.Add(r.Sent)
	f.g.received.Add(r.Received)
	f.g.records.add(&r)
	f.g.notice.changed()
}

// cut ends it at once, whatever it is doing.
func (f *flow) cut(why string) {
	f.mu.Lock()
	if f.why == "" {
		f.why = why
	}
	server := f.server
	f.mu.Unlock()
	tcp.Reset(f.client)
	if s, ok := server.(tcp.Conn); ok {
		tcp.Reset(s)
	} else if server != nil {
		server.Close()
	}
}

// cutDenied cuts the connections that the rules no longer allow.
func (g *Gateway) cutDenied() {
	g.mu.Lock()
	all := make([]*flow, 0, len(g.flows))
	for f := range g.flows {
		all = append(all, f)
	}
	g.mu.Unlock()
	for _, f := range all {
		if why := f.noLonger(); why != "" {
			f.cut(why)
		}
	}
}

// since is noLonger where other rules than set are in force: whoever changed them may have
// looked before it was known what this connection is.
func (f *flow) since(set *rules.Set) string {
	if f.g.rules() == set {
		return ""
	}
	return f.noLonger()
}

// noLonger says why the rules in force do not let out what has been; empty: they do.
func (f *flow) noLonger() string {
	f.mu.Lock()
	name, seen, was, uses := f.name, f.rec.Seen, f.verdict, slices.Clone(f.uses)
	f.mu.Unlock()
	if !was.Allowed {
		return "" // refused, or waits and looks itself
	}
	uses = append(uses, use{place: place{name, f.dst.Port()}, once: onceRule(was)})
	for _, u := range uses {
		var v rules.Verdict
		if u.proxied {
			set := f.g.rules()
			v = set.Decide(u.query())
			v.Allowed = v.Allowed || set.Open() && v.Reason != rules.Denied // its own network is the proxy's matter
			seen = ""                                                       // it is the same, and the port is another
		} else {
			v, _ = f.g.decide([]string{u.name}, f.dst, false)
		}
		if !v.Allowed && (u.once == "" || v.Reason == rules.Denied) {
			why := f.g.why(v)
			if u.name != name && v.Reason != rules.Denied { // the record names another
				why = fmt.Sprintf("%s was asked for, and %s", net.JoinHostPort(u.name, strconv.Itoa(int(u.port))), why)
			}
			return why
		}
	}
	if seen != "" {
		// What only mode open let be asked for is no more than any other name without it.
		set := f.g.rules()
		v := set.Decide(f.g.query(seen, f.dst))
		if v.Reason == rules.Denied || !v.Allowed && !set.Open() && (was.Reason == rules.ByMode || was.ByName) {
			return f.g.why(v)
		}
	}
	return ""
}
