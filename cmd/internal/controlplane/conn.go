// One connection: the handshake, one reader, one writer, one dispatcher.

package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

// Bounds of the queues, in frames.
const (
	mostQueued   = 1024 // of the control plane's frames not yet handled
	mostOutgoing = 1024
	mostAnswered = 4096 // request ids whose answers are remembered
)

// mostUnsent is how many bytes wait to be taken by the other side: pages of a session are long.
const mostUnsent = 16 << 20

type conn struct {
	c     *Client
	ws    *websocket.Conn
	key   string // never log it
	epoch atomic.Int64
	shook atomic.Bool
	ready atomic.Bool
	born  time.Time
	heard atomic.Int64 // when something was received last, since born: a clock that is set changes nothing

	out    chan outgoing
	unsent atomic.Int64 // bytes in out
	in     chan Envelope
	cancel context.CancelCauseFunc
	ctx    context.Context //nolint:containedctx // the connection's own life

	mu    sync.Mutex
	calls map[string]chan Envelope

	factsMu sync.Mutex
	told    Facts // last, without its number
	said    int64 // how often
}

type outgoing struct {
	data    []byte
	written func() // called after it was handed to the network; may be nil
}

func newConn(c *Client, ws *websocket.Conn, key string) *conn {
	return &conn{c: c, ws: ws, key: key, born: time.Now(), out: make(chan outgoing, mostOutgoing), in: make(chan Envelope, mostQueued), calls: map[string]chan Envelope{}}
}

// hear notes that something was received.
func (k *conn) hear() { k.heard.Store(int64(time.Since(k.born))) }

// silent is for how long nothing was.
func (k *conn) silent() time.Duration { return time.Since(k.born) - time.Duration(k.heard.Load()) }

// run lives until the connection ends and says why. All its goroutines have ended then.
func (k *conn) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	k.ctx, k.cancel = ctx, cancel
	var wg sync.WaitGroup
	wg.Go(func() { cancel(k.read(ctx)) })
	wg.Go(func() { k.write(ctx) })
	wg.Go(func() {
		if err := k.live(ctx, &wg); err != nil {
			cancel(err)
		}
	})
	<-ctx.Done()
	cause := context.Cause(ctx)
	k.c.mu.Lock()
	if k.c.conn == k {
		k.c.conn = nil
	}
	k.c.mu.Unlock()
	switch {
	case errors.Is(cause, context.Canceled):
		_ = k.ws.Close(websocket.StatusNormalClosure, "")
	case errors.Is(cause, errOverrun):
		_ = k.ws.Close(websocket.StatusInternalError, "too many frames wait")
	default:
		_ = k.ws.CloseNow()
	}
	wg.Wait()
	if websocket.CloseStatus(cause) == websocket.StatusMessageTooBig {
		if typ := k.c.outbox.dropLargest(); typ != "" {
			k.c.o.Log.Error("a report was too large for the control plane and is dropped", "type", typ)
		}
	}
	k.c.outbox.lost()
	return cause
}

// closeWord is how long a failed write waits for the reader to say why.
const closeWord = time.Second

var (
	errOverrun = errors.New("the control plane sent more than could be handled")
	errSilent  = errors.New("nothing was heard of the control plane; it is taken for gone")
	errSlow    = errors.New("the control plane takes nothing from us")
)

// live is the handshake, and after it the frames in their order.
func (k *conn) live(ctx context.Context, wg *sync.WaitGroup) error {
	k.c.mu.Lock()
	daemonID, last := k.c.status.DaemonID, k.c.status.Epoch
	k.c.mu.Unlock()
	auth := Auth{APIKey: k.key, AgentVersion: k.c.o.Version, DaemonID: daemonID}
	if last > 0 {
		auth.Resume = &Resume{LastEpoch: last}
	}
	wg.Go(func() { k.watch(ctx) })
	var ok AuthOK
	if err := k.shake(ctx, "auth", auth, "auth/ok", &ok); err != nil {
		return err
	}
	k.epoch.Store(ok.SessionEpoch)
	if k.c.o.Learned != nil {
		k.c.o.Learned(k.key, ok.DaemonID)
	}
	register := k.c.o.Register()
	register.Normalize()
	var held RegisterOK
	if err := k.shake(ctx, "register", register, "register/ok", &held); err != nil {
		return err
	}
	k.shook.Store(true)
	k.c.o.Handler.Registered(ctx, ok, held)
	k.c.mu.Lock()
	k.c.conn, k.c.caps = k, register.Capabilities
	k.c.mu.Unlock()
	k.ready.Store(true)
	k.c.set(func(s *Status) {
		s.State, s.DaemonID, s.Epoch, s.LastError, s.NextTry = StateReady, ok.DaemonID, ok.SessionEpoch, "", time.Time{}
		s.WebApp = ok.WebAppURL
		if ok.MemberSet != nil {
			s.State = StateSet
			s.LastError = fmt.Sprintf("this daemon was put into the member set %q, which this version cannot serve; take it out of the set", said(ok.MemberSet.Name, k.key))
			k.c.o.Log.Error(s.LastError)
		}
	})
	k.c.o.Log.Info("control plane connected", "epoch", ok.SessionEpoch, "agents", len(held.Agents))
	k.facts()
	// What changed between Register and now was nobody's to send.
	k.c.UpdateCapabilities(k.c.o.Register().Capabilities)
	wg.Go(func() { k.beat(ctx, ok.HeartbeatSec) })
	wg.Go(func() { k.c.outbox.drain(ctx, k) })
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-k.in:
			k.handle(ctx, e)
		}
	}
}

// shake is one step of the handshake.
func (k *conn) shake(ctx context.Context, typ string, payload any, want string, into any) error {
	e, err := k.request(ctx, typ, payload)
	if err != nil {
		var fe *FrameError
		if errors.As(err, &fe) && fe.Code == "AUTH_FAILED" {
			return &KeyRefusedError{Reason: fe.Message}
		}
		return fmt.Errorf("%s: %w", typ, err)
	}
	if e.Type != want {
		return fmt.Errorf("%s: answered with %.80q", typ, e.Type)
	}
	if fe := Decode(e.Payload, into); fe != nil {
		return fmt.Errorf("%s: %w", want, fe)
	}
	return nil
}

// facts tells of the runtimes, if they are others than was told last.
func (k *conn) facts() {
	if k.c.o.Facts == nil {
		return
	}
	f := k.c.o.Facts()
	full(&f.Runtimes)
	full(&f.MCPServers)
	for i := range f.Runtimes {
		full(&f.Runtimes[i].Models)
	}
	k.factsMu.Lock()
	defer k.factsMu.Unlock()
	if k.said > 0 && equalJSON(f, k.told) {
		return
	}
	k.said++
	k.told = f
	f.Seq = k.said
	k.tell("facts/daemon-runtimes", f)
}

// mostBeat bounds the time between heartbeats, in seconds.
const mostBeat = 60 * 60

func (k *conn) beat(ctx context.Context, sec int) {
	every := k.c.o.Timing.Heartbeat
	if every == 0 {
		every = time.Duration(min(max(sec, 1), mostBeat)) * time.Second
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if k.c.o.Load != nil {
			h := k.c.o.Load()
			full(&h.DegradedScopes)
			k.tell("heartbeat", h)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// watch pings, and drops a connection from which nothing comes.
func (k *conn) watch(ctx context.Context) {
	tick := time.NewTicker(k.c.o.Timing.Ping)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		mark := k.c.outbox.mark()
		ping, cancel := context.WithTimeout(ctx, k.c.o.Timing.Silence)
		err := k.ws.Ping(ping)
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			k.hear()
			k.c.outbox.passed(mark)
			continue
		}
		if k.silent() >= k.c.o.Timing.Silence {
			k.cancel(errSilent)
			return
		}
	}
}

func (k *conn) write(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case o := <-k.out:
			k.unsent.Add(-int64(len(o.data)))
			w, cancel := context.WithTimeout(ctx, k.c.o.Timing.Silence)
			err := k.ws.Write(w, websocket.MessageText, o.data)
			cancel()
			if err != nil {
				// When the other side closed, the reader knows why.
				timer := time.NewTimer(closeWord)
				defer timer.Stop()
				select {
				case <-ctx.Done():
				case <-timer.C:
					k.cancel(fmt.Errorf("write: %w", err))
				}
				return
			}
			if o.written != nil {
				o.written()
			}
		}
	}
}

// send queues a message, and gives the connection up when the other side takes nothing.
func (k *conn) send(o outgoing) {
	n := int64(len(o.data))
	if k.unsent.Add(n) > mostUnsent {
		k.cancel(errSlow)
		return
	}
	select {
	case k.out <- o:
		return
	case <-k.ctx.Done():
	default:
		k.cancel(errSlow)
	}
	k.unsent.Add(-n)
}

func (k *conn) tell(typ string, payload any) {
	data, err := encode(Envelope{Type: typ}, payload)
	if err != nil {
		k.c.o.Log.Error("frame not sent", "type", typ, "error", err)
		return
	}
	k.send(outgoing{data: data})
}

// request sends a request, again with the same id while no answer comes, and returns the
// answer.
func (k *conn) request(ctx context.Context, typ string, payload any) (Envelope, error) {
	return k.ask(ctx, typ, payload, k.c.o.Timing.Sends, k.c.o.Timing.Resend)
}

func (k *conn) ask(ctx context.Context, typ string, payload any, sends int, wait time.Duration) (Envelope, error) {
	id := NewID()
	data, err := encode(Envelope{ID: id, Type: typ}, payload)
	if err != nil {
		return Envelope{}, err
	}
	ch := make(chan Envelope, 1)
	k.mu.Lock()
	k.calls[id] = ch
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		delete(k.calls, id)
		k.mu.Unlock()
	}()
	tick := time.NewTicker(wait)
	defer tick.Stop()
	for range sends {
		k.send(outgoing{data: data})
		select {
		case e := <-ch:
			if e.Type == "error" {
				return e, k.refusal(e)
			}
			return e, nil
		case <-ctx.Done():
			return Envelope{}, context.Cause(ctx)
		case <-k.ctx.Done():
			return Envelope{}, fmt.Errorf("%w: %w", ErrNotConnected, context.Cause(k.ctx))
		case <-tick.C:
		}
	}
	return Envelope{}, fmt.Errorf("%s: no answer after %d tries", typ, sends)
}

// refusal reads an error frame, as it may be shown.
func (k *conn) refusal(e Envelope) *FrameError {
	var fe FrameError
	if err := Decode(e.Payload, &fe); err != nil {
		return err
	}
	return &FrameError{Code: Code(cut(said(string(fe.Code), k.key), 40)), Message: said(fe.Message, k.key), Retryable: fe.Retryable}
}

// read takes what comes until the connection ends.
func (k *conn) read(ctx context.Context) error {
	for {
		kind, data, err := k.ws.Read(ctx)
		if err != nil {
			return err
		}
		k.hear()
		if kind != websocket.MessageText {
			continue // not of this wire
		}
		e, id, err := decode(data)
		if err != nil {
			var fe *FrameError
			errors.As(err, &fe)
			k.c.o.Log.Warn("frame of the control plane cannot be read", "error", said(fe.Message, k.key))
			k.answer(Envelope{ID: id}, Reply{}, fe)
			continue
		}
		if e.Corr != "" {
			k.mu.Lock()
			ch := k.calls[e.Corr]
			k.mu.Unlock()
			if ch != nil {
				select {
				case ch <- e:
				default: // answered twice
				}
			} else if e.Type == "error" {
				fe := k.refusal(e)
				k.c.o.Log.Warn("the control plane refused a frame", "code", fe.Code, "message", fe.Message)
			}
			continue
		}
		if e.Type == "error" {
			continue // never answer an error with one
		}
		select {
		case k.in <- e:
		default:
			return errOverrun
		}
	}
}

// handle is one frame of the control plane's own, in order.
func (k *conn) handle(ctx context.Context, e Envelope) {
	if e.Epoch != nil && *e.Epoch < k.epoch.Load() {
		k.answer(e, Reply{}, &FrameError{Code: CodeStaleEpoch, Message: fmt.Sprintf("epoch %d is over; now %d", *e.Epoch, k.epoch.Load()), Retryable: true})
		return
	}
	if !requests[e.Type] {
		if !k.c.o.Handler.Event(ctx, e) {
			k.answer(e, Reply{}, unknownFrame(e.Type))
		}
		return
	}
	// The answer goes out on the connection that is up when it is there: the control plane
	// repeats what it asked, with the same id, also on a new one.
	// What is remembered of it holds no payload and no connection: both are large.
	c, to := k.c, Envelope{ID: e.ID, OrgID: e.OrgID, Type: e.Type}
	repeat, answer := c.seen.begin(e.ID, reads[e.Type], func(r Reply, fe *FrameError) { c.respond(to, r, fe) })
	if repeat {
		return
	}
	k.c.o.Handler.Request(ctx, e, answer)
}

func unknownFrame(typ string) *FrameError {
	return &FrameError{Code: CodeUnknownFrame, Message: fmt.Sprintf("%.80q is not a frame that this daemon knows", typ)}
}

func (c *Client) respond(e Envelope, r Reply, fe *FrameError) {
	c.mu.Lock()
	k := c.conn
	c.mu.Unlock()
	if k != nil {
		k.answer(e, r, fe)
	}
}

func (k *conn) answer(to Envelope, r Reply, fe *FrameError) {
	e := Envelope{Type: r.Type, Corr: to.ID, OrgID: to.OrgID}
	payload := r.Payload
	if fe != nil {
		e.Type, payload = "error", fe
	}
	data, err := encode(e, payload)
	if err != nil {
		k.c.o.Log.Error("answer not sent", "to", to.Type, "error", err)
		e.Type = "error"
		data, err = encode(e, &FrameError{Code: CodeInternal, Message: "the answer could not be sent: " + err.Error()})
		if err != nil {
			return
		}
	}
	k.send(outgoing{data: data})
}

// requests are the frames that want an answer, beyond which a type is an event, or unknown.
var requests = map[string]bool{
	"agent/upsert": true, "agent/detach": true, "agent/activate": true, "agent/stop": true,
	"agent/permission-requests": true, "agent/permission-decision": true,
	"cron/upsert": true, "cron/remove": true, "cron/run": true,
	"session/history": true, "session/tool-body": true, "session/list": true,
	"session/visibility": true, "session/visibility/snapshot": true, "session/child-status/probe": true,
	"daemon/restart": true, "daemon/upgrade": true, "daemon/drain": true,
}

// reads are the requests that change nothing.
var reads = map[string]bool{
	"session/history": true, "session/tool-body": true, "session/list": true,
	"session/child-status/probe": true, "agent/permission-requests": true,
}

// loopbackHost reports whether the name or address can only be this machine.
func loopbackHost(host string) bool {
	if host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}
