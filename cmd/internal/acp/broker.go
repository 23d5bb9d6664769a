// Package acp relays the Agent Client Protocol (JSON-RPC 2.0, one message a line)
// between one runtime and any number of clients, and holds the client's side of our
// own commands. The Broker is the runtime's only client: it rewrites request ids,
// keeps which client a session belongs to, and stands between a sandboxed runtime and
// what its clients could do for it outside the boundary. The package starts no
// process, listens on nothing, and does not interpret a conversation.
package acp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"
)

const (
	// runtimeMark is how much may wait for the runtime to read before a client's
	// next frame waits too.
	runtimeMark = 4 << 20
	// refusalMark is the same for the broker's own answers to the runtime. It lies
	// above all that clients can queue, so that they alone never stop the reading of
	// the runtime's output.
	refusalMark = MaxFrame + 2*runtimeMark
	// partingMark bounds what may wait when a client leaves: nobody is left to wait with what is
	// said of that, and beyond it is not said.
	partingMark = refusalMark + 2*runtimeMark
	clientMark  = 16 << 20
	clientLimit = MaxFrame + clientMark

	maxOpen     = 4096 // open requests of one client, and of the runtime
	maxOpenAll  = 1 << 16
	maxJunkRow  = 100
	maxHeld     = 256 // notifications kept for a session whose opener is not known yet
	maxHeldSize = 4 << 20

	closeWait = 5 * time.Second // for session/close before the session is loaded again
	lastWords = 2 * time.Second // for a client to take its last frames
	initWait  = 60 * time.Second
)

// Options of a Broker.
type Options struct {
	// RuntimeIn and RuntimeOut are the runtime's stdin and stdout. The broker owns
	// both: Run closes them.
	RuntimeIn  io.WriteCloser
	RuntimeOut io.ReadCloser
	// Sandboxed turns the rules for fs/*, terminal/* and login methods on.
	Sandboxed bool
	// Paths judges session directories and client files. Nil: a sandboxed broker
	// refuses every path, another one allows every path.
	Paths PathChecker
	// ClientFiles "workspace" lets a sandboxed runtime ask clients for files that
	// Paths allows. Anything else: never.
	ClientFiles string
	// Mode is the operator's permission mode, by the runtime's own name for it: each session
	// is put into it before its client hears of it. Empty: the runtime's choice.
	Mode string
	Log  *slog.Logger
	// Servers gives the MCP servers that every session has; may be nil. It must not call
	// the broker.
	Servers func() []Server
	// OnChange is told the number of clients and sessions after each change, one
	// call at a time. It must not call the broker.
	OnChange func(clients, sessions int)
	// ClientLimit bounds what waits for one client, in bytes; 0: 80 MiB. A single frame always fits.
	ClientLimit int
	// InitWait is how long an initialize may stay open once the runtime has printed
	// something that is not ACP; 0: one minute.
	InitWait time.Duration
}

// Stats counts what a broker met.
type Stats struct {
	Clients, Sessions int
	Junk              int    // lines of the runtime that are no message
	JunkSample        string // the first of them, escaped and cut
	Unknown           int    // answers that match no open request
	Unheld            int    // notifications for a session nobody holds
	Refused           int    // requests of the runtime that were refused
	Cut               int    // clients disconnected since they did not read
}

// Broker is the only client of one runtime. Run reads the runtime, Attach serves one
// client each, Fail ends both with a reason.
type Broker struct {
	o   Options
	log *slog.Logger
	in  *queue

	notify sync.Mutex // orders OnChange

	unsent []*client // have frames that deliver is to send; of the goroutine that reads the runtime

	mu       sync.Mutex
	clients  []*client // in the order they attached
	attached sync.WaitGroup
	sessions map[string]*session
	up       map[int64]*upCall    // clients' calls that the runtime has not answered
	down     map[int64]*downCall  // the runtime's calls that a client has not answered
	downKey  map[string]*downCall // the same by the runtime's own id
	lastUp   int64
	lastDown int64
	opening  []*upCall // session/new and session/fork among up, oldest first
	held     []heldFrame
	heldSize int
	init     initState
	initWait *time.Timer
	ended    string // the reason Fail gave; set once
	stats    Stats
	told     [2]int
	logged   map[string]bool
}

type initState struct {
	waiting []waiter // an initialize is with the runtime, and who wants its answer
	open    bool
	result  []byte          // the cached answer
	close   bool            // the runtime knows session/close
	mcp     map[string]bool // the kinds of MCP servers that it takes
}

type waiter struct {
	c  *client
	id []byte
}

// session is one that a client holds, or, while closing is set, one that a departed
// client held and the runtime is asked to close.
type session struct {
	owner   *client
	loading *upCall       // registered by a load that is not answered yet
	held    *heldAnswer   // its owner does not know of it yet
	closing chan struct{} // closed when the runtime has answered session/close
}

// upCall is a call of a client, or (client nil) the broker's own session/close or set_mode.
type upCall struct {
	client  *client
	id      []byte // the client's own id, byte for byte
	method  string
	rule    rule
	session string
	closing *session
	held    *heldAnswer // of the broker's own session/set_mode
	unsent  bool        // its client left before it was sent
}

// downCall is a call of the runtime that waits for a client.
type downCall struct {
	client *client
	id     []byte
	key    string
	num    int64
	method string
}

type heldFrame struct {
	session string
	frame   []byte
}

// EndedError is what Attach returns when the runtime side is over.
type EndedError struct{ Reason string }

func (e *EndedError) Error() string { return e.Reason }

// NewBroker makes a broker; Run starts it.
func NewBroker(o Options) *Broker {
	b := &Broker{
		o: o, log: o.Log, in: newQueue(),
		sessions: map[string]*session{},
		up:       map[int64]*upCall{},
		down:     map[int64]*downCall{},
		downKey:  map[string]*downCall{},
		logged:   map[string]bool{},
		// A client may answer a question of an earlier runtime after a reconnect; ids
		// that start anywhere keep that from being the answer to another one.
		lastDown: 1 + rand.Int64N(1<<50),
		initWait: time.NewTimer(time.Hour),
	}
	b.initWait.Stop()
	if b.log == nil {
		b.log = slog.New(slog.DiscardHandler)
	}
	if b.o.ClientLimit == 0 {
		b.o.ClientLimit = clientLimit
	}
	if b.o.InitWait == 0 {
		b.o.InitWait = initWait
	}
	return b
}

// Stats returns the counters.
func (b *Broker) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.stats
	s.Clients, s.Sessions = len(b.clients), b.holding()
	return s
}

// holding counts the sessions that a client holds. b.mu is held.
func (b *Broker) holding() int {
	n := 0
	for _, s := range b.sessions {
		if s.owner != nil {
			n++
		}
	}
	return n
}

func (b *Broker) changed() {
	if b.o.OnChange == nil {
		return
	}
	b.notify.Lock()
	defer b.notify.Unlock()
	b.mu.Lock()
	now := [2]int{len(b.clients), b.holding()}
	same := now == b.told
	b.told = now
	b.mu.Unlock()
	if !same {
		b.o.OnChange(now[0], now[1])
	}
}

// once logs the first event of a kind; the counters tell how many followed.
func (b *Broker) once(kind, msg string, args ...any) {
	b.mu.Lock()
	first := !b.logged[kind]
	if len(b.logged) < 1000 {
		b.logged[kind] = true
	} else {
		first = false
	}
	b.mu.Unlock()
	if first {
		b.log.Warn(msg, args...)
	}
}

// CloseInput ends the runtime's stdin after what is queued has been written: the
// polite way to ask a runtime to end.
func (b *Broker) CloseInput() { b.in.finish() }

// Run relays until the runtime's stdout ends, and returns why: io.EOF,
// ErrFrameTooLarge, a read error, or ctx's. Open requests stay open: whoever knows how
// the runtime ended tells the clients with Fail, which must follow.
func (b *Broker) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	done := make(chan struct{})
	deaf := make(chan error, 1)
	wg.Go(func() {
		if err := b.in.run(b.o.RuntimeIn); err != nil {
			deaf <- fmt.Errorf("runtime no longer reads its standard input: %w", err)
		}
		b.o.RuntimeIn.Close()
	})
	var why error
	wg.Go(func() {
		var over <-chan time.Time
		for {
			select {
			case <-ctx.Done():
				b.in.close()
				b.o.RuntimeOut.Close()
				return
			case why = <-deaf:
				// What it has printed is still read; then there is nothing to wait for.
				over = time.After(lastWords)
			case <-over:
				b.o.RuntimeOut.Close()
				return
			case <-b.initWait.C:
				b.initOverdue()
			case <-done:
				return
			}
		}
	})
	err := b.readRuntime()
	close(done)
	b.in.close()
	b.o.RuntimeIn.Close()
	b.o.RuntimeOut.Close()
	wg.Wait()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case why != nil && !errors.Is(err, io.EOF):
		return why
	}
	return err
}

// Fail answers every open request of every client with an error that says reason,
// then closes the clients' connections and waits until they are closed. What attaches
// later is turned away with the same reason.
func (b *Broker) Fail(reason string) {
	b.mu.Lock()
	if b.ended != "" {
		b.mu.Unlock()
		b.attached.Wait()
		return
	}
	if reason == "" {
		reason = "agent runtime ended"
	}
	b.ended = reason
	b.initWait.Stop()
	clients := b.clients
	calls := b.up
	waiting := b.init.waiting
	b.up = map[int64]*upCall{}
	b.down = map[int64]*downCall{}
	b.downKey = map[string]*downCall{}
	b.init.waiting, b.init.open = nil, false
	b.opening, b.held, b.heldSize = nil, nil, 0
	for _, s := range b.sessions {
		if s.closing != nil {
			close(s.closing)
		}
	}
	b.sessions = map[string]*session{}
	initReason := reason + b.junkHint()
	b.mu.Unlock()

	for _, w := range waiting {
		w.c.send(endedFrame(w.id, initReason))
	}
	for _, c := range calls {
		switch {
		case c.client != nil:
			c.client.send(endedFrame(c.id, reason))
		case c.held != nil:
			c.held.client.send(endedFrame(c.held.id, reason))
		}
	}
	b.in.close()
	for _, c := range clients {
		c.end(&EndedError{reason})
	}
	b.attached.Wait()
}

// junkHint tells what the runtime printed instead of ACP. b.mu is held.
func (b *Broker) junkHint() string {
	if b.stats.Junk == 0 {
		return ""
	}
	return fmt.Sprintf("; on its standard output, where only ACP messages belong, it printed %d other lines, the first: %s", b.stats.Junk, b.stats.JunkSample)
}

// initOverdue gives up on an initialize after the runtime printed something else.
func (b *Broker) initOverdue() {
	b.mu.Lock()
	waiting := b.init.waiting
	b.init.waiting = nil
	msg := fmt.Sprintf("agent runtime has not answered initialize for %v%s", b.o.InitWait, b.junkHint())
	b.mu.Unlock()
	for _, w := range waiting {
		w.c.send(errorFrame(w.id, CodeInternal, msg))
	}
}

// open registers a call to the runtime and returns its id there. b.mu is held.
func (b *Broker) open(c *upCall) []byte {
	b.lastUp++
	b.up[b.lastUp] = c
	if c.client != nil {
		c.client.open[idKey(c.id)] = b.lastUp
		c.client.openCount++
	}
	if c.rule.opens {
		b.opening = append(b.opening, c)
	}
	return strconv.AppendInt(nil, b.lastUp, 10)
}

// take removes and returns the call that an answer is for. b.mu is held.
func (b *Broker) take(id []byte) *upCall {
	n, ok := plainInt(id)
	if !ok {
		return nil
	}
	c := b.up[n]
	if c == nil {
		return nil
	}
	delete(b.up, n)
	if c.client != nil {
		if k := idKey(c.id); c.client.open[k] == n {
			delete(c.client.open, k)
		}
		c.client.openCount--
	}
	if c.rule.opens {
		for i, o := range b.opening {
			if o == c {
				b.opening = append(b.opening[:i:i], b.opening[i+1:]...)
				break
			}
		}
	}
	return c
}

// plainInt reads an id that this package has given out: digits, nothing else.
func plainInt(id []byte) (n int64, ok bool) {
	if len(id) == 0 || len(id) > 18 || (id[0] == '0' && len(id) > 1) {
		return 0, false
	}
	for _, c := range id {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// closeSession asks the runtime to close a session that lost its client, if it can.
// The caller holds b.mu and sends the frame after unlocking.
func (b *Broker) closeSession(id string) []byte {
	if !b.init.close || b.ended != "" {
		return nil
	}
	s := &session{closing: make(chan struct{})}
	b.sessions[id] = s
	return sessionFrame(b.open(&upCall{method: "session/close", session: id, closing: s}), "session/close", id)
}

// toRuntime sends the broker's own frame.
func (b *Broker) toRuntime(frame []byte) {
	if frame != nil {
		b.in.pushWait(refusalMark, nil, frame)
	}
}

// part sends what a client that left leaves to be said.
func (b *Broker) part(frame []byte) {
	if !b.in.push(partingMark, frame) && b.in.takes() {
		b.once("parting", "the runtime reads so little of its standard input that it is not told which clients have left")
	}
}

var errClientSlow = errors.New("client does not read: more is waiting for it than fits")
