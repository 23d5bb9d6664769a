// What has to be told: reports that wait for a connection, and answers that are remembered.

package controlplane

import (
	"context"
	"slices"
	"sync"
	"time"
)

// mostReports bounds what waits for a control plane that is gone; the oldest go first.
const mostReports = 10_000

// outbox holds reports in their order, the latest of each key alone.
type outbox struct {
	mu    sync.Mutex
	items []*report
	seq   uint64
	deaf  bool          // a connection was given up since no answer came, and none has come since
	more  chan struct{} // one token when there may be something to send
}

type report struct {
	key, typ string
	payload  any
	acked    bool   // wants an acknowledgement
	stamp    uint64 // changes when the report is replaced
	written  uint64 // for one without acknowledgement: when it was written; 0: not yet
	sending  bool
	deaf     bool // a connection was given up since no answer came to this one
}

func newOutbox() *outbox { return &outbox{more: make(chan struct{}, 1)} }

func (o *outbox) len() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.items)
}

func (o *outbox) put(key, typ string, payload any, acked bool) {
	o.mu.Lock()
	o.seq++
	r := &report{key: key, typ: typ, payload: payload, acked: acked, stamp: o.seq}
	// Behind everything else: a session's end must not overtake its start by taking its place.
	if i := slices.IndexFunc(o.items, func(r *report) bool { return r.key == key }); i >= 0 {
		o.items = slices.Delete(o.items, i, i+1)
	}
	o.items = append(o.items, r)
	if len(o.items) > mostReports {
		o.items = slices.Delete(o.items, 0, len(o.items)-mostReports)
	}
	o.mu.Unlock()
	o.wake()
}

func (o *outbox) wake() {
	select {
	case o.more <- struct{}{}:
	default:
	}
}

// next is the oldest report that is not under way.
func (o *outbox) next() *report {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, r := range o.items {
		if !r.sending && r.written == 0 {
			r.sending = true
			return r
		}
	}
	return nil
}

// done takes a report out, unless another has taken its place.
func (o *outbox) done(r *report) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.items = slices.DeleteFunc(o.items, func(other *report) bool { return other == r })
}

// drain sends what waits, one after the other, while the connection lives.
func (o *outbox) drain(ctx context.Context, k *conn) {
	o.wake()
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.more:
		}
		for r := o.next(); r != nil; r = o.next() {
			if !o.send(ctx, k, r) {
				return
			}
		}
	}
}

func (o *outbox) send(ctx context.Context, k *conn, r *report) bool {
	if !r.acked {
		data, err := encode(Envelope{Type: r.typ}, r.payload)
		if err != nil {
			o.done(r)
			return true
		}
		written := make(chan struct{})
		k.send(outgoing{data: data, written: func() { close(written) }})
		select {
		case <-written:
		case <-ctx.Done():
			return false
		}
		o.mu.Lock()
		o.seq++
		r.sending, r.written = false, o.seq
		o.mu.Unlock()
		return true
	}
	e, err := k.request(ctx, r.typ, r.payload)
	if ctx.Err() != nil {
		return false
	}
	fe, refused := err.(*FrameError) //nolint:errorlint // ask returns it as it is
	if err == nil || refused {
		o.mu.Lock()
		o.deaf = false
		o.mu.Unlock()
	}
	if refused {
		k.c.o.Log.Warn("the control plane refused a report", "type", r.typ, "code", fe.Code, "message", fe.Message)
		if fe.Retryable {
			return o.later(ctx, k, r)
		}
		o.taken(k, r)
		return true
	}
	if err != nil {
		if o.givesUp(r) {
			k.cancel(err) // deaf: a new connection may hear
			return false
		}
		k.c.o.Log.Warn("the control plane does not answer a report", "type", r.typ)
		return o.later(ctx, k, r)
	}
	var ack Ack
	if fe := Decode(e.Payload, &ack); fe != nil || !ack.OK {
		k.c.o.Log.Warn("the control plane did not take a report", "type", r.typ, "reason", said(ack.Reason, k.key))
	}
	o.taken(k, r)
	return true
}

// taken is done with a report that the control plane has heard.
func (o *outbox) taken(k *conn, r *report) {
	if k.c.o.Taken != nil {
		k.c.o.Taken(r.typ, r.payload)
	}
	o.done(r)
}

// givesUp reports whether to give a connection up for a report that is not answered: once. One that
// never is must neither end each connection nor keep the others back.
func (o *outbox) givesUp(r *report) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.deaf || r.deaf {
		return false
	}
	o.deaf, r.deaf = true, true
	return true
}

// later puts a report behind the others and leaves the control plane alone for a while.
func (o *outbox) later(ctx context.Context, k *conn, r *report) bool {
	o.again(r)
	timer := time.NewTimer(k.c.o.Timing.Resend)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// again puts a report behind the others; the next wake sends it.
func (o *outbox) again(r *report) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r.sending = false
	if i := slices.Index(o.items, r); i >= 0 {
		o.items = append(slices.Delete(o.items, i, i+1), r)
	}
}

// mark is a moment; passed says that the connection lived on past it: what was written
// before has arrived.
func (o *outbox) mark() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.seq
}

func (o *outbox) passed(mark uint64) {
	o.mu.Lock()
	o.items = slices.DeleteFunc(o.items, func(r *report) bool { return r.written != 0 && r.written <= mark })
	waits := slices.ContainsFunc(o.items, func(r *report) bool { return !r.sending && r.written == 0 })
	o.mu.Unlock()
	if waits {
		o.wake()
	}
}

// dropLargest gives up what was too large for the other side: of all that was under way the
// largest. Sent again it would end each connection.
func (o *outbox) dropLargest() (typ string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	at, most := -1, 0
	for i, r := range o.items {
		if !r.sending && r.written == 0 {
			continue
		}
		if data, err := encode(Envelope{Type: r.typ}, r.payload); err == nil && len(data) > most {
			at, most = i, len(data)
		}
	}
	if at < 0 {
		return ""
	}
	typ = o.items[at].typ
	o.items = slices.Delete(o.items, at, at+1)
	return typ
}

// lost puts everything back that was under way on a connection that is gone.
func (o *outbox) lost() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, r := range o.items {
		r.sending, r.written = false, 0
	}
}

// answered remembers requests: a repeated one is not run again and gets the same answer.
type answered struct {
	most int

	mu    sync.Mutex
	byID  map[string]*answeredOne
	order []string
}

type answeredOne struct {
	done    bool
	reply   Reply
	failure *FrameError
	send    func(Reply, *FrameError)
}

func newAnswered(most int) *answered { return &answered{most: most, byID: map[string]*answeredOne{}} }

// begin notes a request. For a repeated one it sends the answer again, if there is one
// already; one that is still being worked on goes to the newest asker. What only reads is
// remembered until it is answered: reading again does no harm, and pages are long.
func (a *answered) begin(id string, reads bool, send func(Reply, *FrameError)) (repeat bool, answer Responder) {
	a.mu.Lock()
	if one := a.byID[id]; one != nil {
		one.send = send
		done, reply, failure := one.done, one.reply, one.failure
		a.mu.Unlock()
		if done {
			send(reply, failure)
		}
		return true, nil
	}
	one := &answeredOne{send: send}
	a.byID[id] = one
	a.order = append(a.order, id)
	for len(a.order) > a.most {
		delete(a.byID, a.order[0])
		a.order = a.order[1:]
	}
	a.mu.Unlock()
	return false, func(r Reply, fe *FrameError) {
		a.mu.Lock()
		if one.done {
			a.mu.Unlock()
			return
		}
		one.done, one.reply, one.failure = true, r, fe
		to := one.send
		if reads {
			delete(a.byID, id)
		}
		a.mu.Unlock()
		to(r, fe)
	}
}
