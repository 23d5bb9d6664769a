// The connection's life: dial, handshake, ready, lost, again.

package controlplane

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"
)

// Close codes of the wire.
const (
	CloseAuthFailed websocket.StatusCode = 4401
	CloseReplaced   websocket.StatusCode = 4409
)

// Timing of a connection; zero values mean the wire's own.
type Timing struct {
	Dial      time.Duration // 10 s
	Ping      time.Duration // our own, 15 s
	Silence   time.Duration // nothing received for so long: drop and reconnect, 45 s
	Resend    time.Duration // of an unanswered request, 5 s, with the same id
	Sends     int           // of one request, 5
	Once      time.Duration // for the answer to a request that is sent once, 10 s
	FirstWait time.Duration // before reconnecting: 1 s, doubled each time, as much again at random
	MostWait  time.Duration // 30 s
	Heartbeat time.Duration // 0: as auth/ok says
}

func (t Timing) orDefault() Timing {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&t.Dial, 10*time.Second)
	set(&t.Ping, 15*time.Second)
	set(&t.Silence, 45*time.Second)
	set(&t.Once, 10*time.Second)
	set(&t.Resend, 5*time.Second)
	set(&t.FirstWait, time.Second)
	set(&t.MostWait, 30*time.Second)
	if t.Sends == 0 {
		t.Sends = 5
	}
	return t
}

// Responder answers one request, once; later calls do nothing. It may be called from any
// goroutine, also after the connection that brought the request is gone.
type Responder func(Reply, *FrameError)

// Handler does what the control plane says. Registered, Request and Event are called one
// after the other, in the order of the wire; they must return soon.
type Handler interface {
	// Registered gets the whole of what the daemon is to hold, after each handshake.
	Registered(ctx context.Context, auth AuthOK, ok RegisterOK)
	// Request is asked what wants an answer. A request repeated with the same id does not
	// come again: it gets the first one's answer.
	Request(ctx context.Context, frame Envelope, answer Responder)
	// Event is told what wants none. False means that the type is unknown.
	Event(ctx context.Context, frame Envelope) bool
}

// State of the connection.
type State string

const (
	StateOff        State = "off"
	StateConnecting State = "connecting"
	StateReady      State = "ready"
	StateWaiting    State = "waiting" // until the next try
	StateRefused    State = "refused" // the key was refused; nothing is tried any more
	StateSet        State = "member-set"
)

// Status of the connection, for people and heartbeats.
type Status struct {
	State     State     `json:"state"`
	URL       string    `json:"url"`
	Since     time.Time `json:"since"`
	LastError string    `json:"lastError,omitempty"`
	NextTry   time.Time `json:"nextTry,omitzero"`
	DaemonID  string    `json:"daemonId,omitempty"`
	Epoch     int64     `json:"epoch,omitempty"`
	WebApp    string    `json:"webApp,omitempty"`
	Waiting   int       `json:"waiting,omitempty"` // reports not yet taken
}

// Options of a Client.
type Options struct {
	URL string
	// Key reads the API key for each handshake, so that a new one counts without a restart.
	Key     func() (string, error)
	Version string
	// Known is the id that came with this key before; "" for none, as with nil. An id that came with
	// another key may be another daemon's, and naming it would have the new key refused.
	Known func(key string) (daemonID string)
	TLS   *tls.Config
	// Proxy for the connection; nil: from the environment.
	Proxy    func(*http.Request) (*url.URL, error)
	Register func() Register
	Facts    func() Facts
	Load     func() Heartbeat
	Handler  Handler
	Log      *slog.Logger
	// Changed hears of each new status; may be nil. Learned hears, before it registers, of the id
	// that the daemon has there with this key.
	Changed func(Status)
	Learned func(key, daemonID string)
	Timing  Timing
	// Taken hears of each report that was acknowledged, or refused for good; may be nil.
	Taken func(typ string, payload any)
	// After is the client that was connected there before, and has ended: what it still had to tell,
	// and which requests it answered, goes over. May be nil.
	After *Client
}

// Client keeps one connection to a control plane.
type Client struct {
	o        Options
	endpoint string
	outbox   *outbox
	seen     *answered

	mu     sync.Mutex
	status Status
	conn   *conn // the one that is ready, or nil
	caps   Capabilities
}

// Endpoint returns the address to dial for a configured URL, or says what is wrong with
// it. Without TLS only a loopback host is taken, unless insecure.
func Endpoint(raw string, insecure bool) (string, error) {
	u, err := url.Parse(strings.TrimSpace(raw))
	if err != nil {
		return "", fmt.Errorf("control plane URL: %w", err)
	}
	switch u.Scheme {
	case "http":
		u.Scheme = "ws"
	case "https":
		u.Scheme = "wss"
	case "ws", "wss":
	default:
		return "", fmt.Errorf("control plane URL %q: give a wss:// or ws:// address", u.Redacted())
	}
	if u.Host == "" || u.Hostname() == "" {
		return "", fmt.Errorf("control plane URL %q: the host is missing", u.Redacted())
	}
	if u.User != nil {
		return "", errors.New("control plane URL: the key does not belong in the address; use `agentconnect login`, AGENTCONNECT_API_KEY or controlPlane.key")
	}
	if u.Scheme == "ws" && !insecure && !loopbackHost(u.Hostname()) {
		return "", fmt.Errorf("control plane URL %q: without TLS the key could be read on the way; use wss://, or --allow-insecure if that is meant", u.Redacted())
	}
	u.Fragment = ""
	if !strings.HasSuffix(strings.TrimSuffix(u.Path, "/"), "/daemon/ws") {
		u.Path = strings.TrimSuffix(u.Path, "/") + "/daemon/ws"
	}
	return u.String(), nil
}

// New makes a client; Run connects it. The URL must have passed Endpoint.
func New(o Options) *Client {
	o.Timing = o.Timing.orDefault()
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Proxy == nil {
		o.Proxy = http.ProxyFromEnvironment
	}
	c := &Client{
		o: o, endpoint: o.URL, outbox: newOutbox(), seen: newAnswered(mostAnswered),
		status: Status{State: StateOff, URL: o.URL, Since: time.Now()},
	}
	if last := o.After; last != nil {
		c.outbox, c.seen, c.o.After = last.outbox, last.seen, nil
	}
	return c
}

// Status returns how the connection is now.
func (c *Client) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.status
	s.Waiting = c.outbox.len()
	return s
}

func (c *Client) set(change func(*Status)) {
	c.mu.Lock()
	before := c.status.State
	change(&c.status)
	if c.status.State != before {
		c.status.Since = time.Now()
	}
	s := c.status
	c.mu.Unlock()
	if c.o.Changed != nil {
		c.o.Changed(s)
	}
}

// KeyRefusedError: the control plane does not take the key. Trying again would not help.
type KeyRefusedError struct{ Reason string }

func (e *KeyRefusedError) Error() string {
	return "the key was refused by the control plane" + prefixed(": ", e.Reason) + "; make a new one there and give it with `agentconnect login`"
}

func prefixed(prefix, s string) string {
	if s == "" {
		return ""
	}
	return prefix + s
}

// Run keeps the connection up until ctx ends (nil) or the key is refused
// (*KeyRefusedError).
func (c *Client) Run(ctx context.Context) error {
	wait := c.o.Timing.FirstWait
	for {
		c.set(func(s *Status) { s.State, s.NextTry = StateConnecting, time.Time{} })
		shook, err := c.once(ctx)
		if ctx.Err() != nil {
			c.set(func(s *Status) { s.State = StateOff })
			return nil //nolint:nilerr // the caller ended it
		}
		var refused *KeyRefusedError
		if errors.As(err, &refused) {
			c.o.Log.Error(err.Error())
			c.set(func(s *Status) { s.State, s.LastError = StateRefused, err.Error() })
			return err
		}
		// Two daemons with one key would take the connection from each other without end.
		if shook && !errors.Is(err, errReplaced) {
			wait = c.o.Timing.FirstWait
		}
		// As much again at random: daemons that lost one control plane must not come back as one.
		pause := min(wait+rand.N(wait), c.o.Timing.MostWait)
		wait = min(2*wait, c.o.Timing.MostWait)
		c.o.Log.Warn("control plane lost", "error", err, "next", pause.Round(time.Millisecond))
		c.set(func(s *Status) {
			s.State, s.LastError, s.NextTry = StateWaiting, err.Error(), time.Now().Add(pause)
		})
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			c.set(func(s *Status) { s.State = StateOff })
			return nil
		case <-timer.C:
		}
	}
}

// once is one connection, from the dial to its end. shook says that the handshake was
// completed.
func (c *Client) once(ctx context.Context) (shook bool, err error) {
	key, err := c.o.Key()
	if err != nil {
		return false, err
	}
	id := ""
	if c.o.Known != nil {
		id = c.o.Known(key)
	}
	c.set(func(s *Status) { s.DaemonID = id })
	dialing, cancel := context.WithTimeout(ctx, c.o.Timing.Dial)
	defer cancel()
	transport := &http.Transport{Proxy: c.o.Proxy, TLSClientConfig: c.o.TLS, ForceAttemptHTTP2: false}
	defer transport.CloseIdleConnections()
	ws, resp, err := websocket.Dial( //nolint:bodyclose // the library closes it, or it is the connection
		dialing, c.endpoint, &websocket.DialOptions{
			HTTPClient:   &http.Client{Transport: transport, CheckRedirect: noRedirect},
			Subprotocols: []string{Subprotocol}, CompressionMode: websocket.CompressionDisabled,
		})
	if err != nil {
		switch {
		case resp != nil:
			return false, fmt.Errorf("connect: HTTP %s", said(resp.Status, key))
		case errors.Is(dialing.Err(), context.DeadlineExceeded):
			return false, fmt.Errorf("connect: no answer within %v", c.o.Timing.Dial)
		}
		return false, fmt.Errorf("connect: %s", said(bare(err).Error(), key))
	}
	if ws.Subprotocol() != Subprotocol {
		_ = ws.Close(websocket.StatusProtocolError, "subprotocol")
		return false, fmt.Errorf("connect: the server does not speak %s; is this the address of a control plane?", Subprotocol)
	}
	ws.SetReadLimit(MaxMessage)
	k := newConn(c, ws, key)
	err = k.run(ctx)
	return k.shook.Load(), closeError(err, key)
}

var errReplaced = errors.New("another daemon connected with the same key (or an older connection of this one did); each daemon needs a key of its own")

func noRedirect(*http.Request, []*http.Request) error {
	return errors.New("the server redirects elsewhere; configure the address that it names")
}

// closeError puts the close codes of the wire into words.
func closeError(err error, key string) error {
	var ce websocket.CloseError
	if !errors.As(err, &ce) {
		return err
	}
	switch ce.Code { //nolint:exhaustive // the others are told by their number
	case CloseAuthFailed:
		return &KeyRefusedError{Reason: said(ce.Reason, key)}
	case CloseReplaced:
		return errReplaced
	case websocket.StatusMessageTooBig:
		return errors.New("a message of ours was too large for the control plane; it was dropped")
	case websocket.StatusServiceRestart:
		return errors.New("the control plane is restarting")
	case websocket.StatusInternalError:
		return errors.New("the control plane has an internal error" + prefixed(": ", said(ce.Reason, key)))
	}
	return fmt.Errorf("closed by the control plane (%d%s)", int(ce.Code), prefixed(": ", said(ce.Reason, key)))
}

// bare takes the address with its query out of a dial error.
func bare(err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		return ue.Err
	}
	return err
}

// mostSaid bounds the other side's words where they are logged and shown, in bytes.
const mostSaid = 500

// said is what the other side said, as it may be logged and shown: bounded, without what could
// drive a terminal, and without the key, should it be repeated to us.
func said(s, key string) string {
	if key != "" {
		s = strings.ReplaceAll(s, key, "[the key]")
	}
	return printable(cut(s, mostSaid))
}

// cut bounds a text in bytes, at a rune.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?'
		}
		return r
	}, s)
}

// UpdateCapabilities announces them anew when they differ from what was announced last.
func (c *Client) UpdateCapabilities(caps Capabilities) {
	r := Register{Capabilities: caps}
	r.Normalize()
	caps = r.Capabilities
	c.mu.Lock()
	k, same := c.conn, equalJSON(c.caps, caps)
	if k != nil && !same {
		c.caps = caps
	}
	c.mu.Unlock()
	if k == nil || same {
		return // the next registration says it
	}
	k.tell("capabilities/update", map[string]any{"capabilities": caps})
}

// UpdateFacts sends what was found anew.
func (c *Client) UpdateFacts() {
	c.mu.Lock()
	k := c.conn
	c.mu.Unlock()
	if k != nil {
		k.facts()
	}
}

func equalJSON(a, b any) bool {
	x, err1 := json.Marshal(a)
	y, err2 := json.Marshal(b)
	return err1 == nil && err2 == nil && string(x) == string(y)
}

// Tell sends an event now, or drops it when there is no connection: for what is only
// worth knowing at the moment.
func (c *Client) Tell(typ string, payload any) {
	c.mu.Lock()
	k := c.conn
	c.mu.Unlock()
	if k != nil {
		k.tell(typ, payload)
	}
}

// Report sends what the control plane has to know, now or on return. A report with the
// key of one that still waits takes its place. With acked it is repeated until the
// control plane says that it has it; without, until the connection has lived on past it.
func (c *Client) Report(key, typ string, payload any, acked bool) error {
	if _, err := encode(Envelope{Type: typ}, payload); err != nil {
		return err // nobody would ever take it
	}
	c.outbox.put(key, typ, payload, acked)
	return nil
}

// ErrNotConnected: nobody can be asked now.
var ErrNotConnected = errors.New("the control plane is not connected")

// AskOnce sends a request, once, and waits for its answer. Refusals are *FrameError.
func (c *Client) AskOnce(ctx context.Context, typ string, payload any) (Envelope, error) {
	c.mu.Lock()
	k := c.conn
	c.mu.Unlock()
	if k == nil {
		return Envelope{}, ErrNotConnected
	}
	return k.ask(ctx, typ, payload, 1, c.o.Timing.Once)
}
