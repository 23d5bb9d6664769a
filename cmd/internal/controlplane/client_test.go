package controlplane_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/controlplane/cptest"
)

// quick are times for tests: what comes of itself comes soon, and what a busy machine must
// not bring about comes late.
var quick = cp.Timing{
	Dial: time.Minute, Ping: 20 * time.Millisecond, Silence: time.Minute, Resend: time.Minute,
	FirstWait: time.Millisecond, MostWait: 20 * time.Millisecond, Heartbeat: 50 * time.Millisecond,
}

// recorder is a Handler that writes down what it is told and acknowledges it.
type recorder struct {
	mu         sync.Mutex
	registered int
	held       cp.RegisterOK
	requests   []cp.Envelope
	events     []cp.Envelope
	answer     func(context.Context, cp.Envelope, cp.Responder)
}

func (r *recorder) Registered(_ context.Context, _ cp.AuthOK, ok cp.RegisterOK) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.registered++
	r.held = ok
}

func (r *recorder) Request(ctx context.Context, e cp.Envelope, answer cp.Responder) {
	r.mu.Lock()
	r.requests = append(r.requests, e)
	f := r.answer
	r.mu.Unlock()
	if f != nil {
		f(ctx, e, answer)
		return
	}
	answer(cp.AckReply(""), nil)
}

func (r *recorder) Event(_ context.Context, e cp.Envelope) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
	return e.Type != "from/the-future"
}

func (r *recorder) counts() (requests, events int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.requests), len(r.events)
}

func register() cp.Register {
	return cp.Register{Host: "host-1", MaxAgents: 8, Capabilities: cp.Capabilities{Runtimes: []string{"claude-acp"}, ACP: true, Features: []string{cp.FeatureSandbox}}}
}

type harness struct {
	s       *cptest.Server
	c       *cp.Client
	h       *recorder
	ended   chan error
	changes chan cp.Status
}

func start(t *testing.T, s *cptest.Server, change func(*cp.Options)) *harness {
	t.Helper()
	h := &harness{s: s, h: &recorder{}, ended: make(chan error, 1), changes: make(chan cp.Status, 1000)}
	o := cp.Options{
		URL: s.URL(), Key: func() (string, error) { return cptest.Key, nil }, Version: "0.1.0", Register: register,
		Facts: func() cp.Facts {
			return cp.Facts{Runtimes: []cp.RuntimeFact{{Runtime: "claude-acp", Version: "1.0.0", ACPSupport: "full", ToolCalling: true}}}
		},
		Load:    func() cp.Heartbeat { return cp.Heartbeat{Health: "ok"} },
		Handler: h.h, Timing: quick, Changed: func(s cp.Status) { h.changes <- s },
	}
	if change != nil {
		change(&o)
	}
	h.c = cp.New(o)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { h.ended <- h.c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-h.ended:
			h.ended <- err
		case <-time.After(patience):
			t.Error("the client does not end")
		}
	})
	return h
}

// patience is how long a test waits for what must come.
const patience = 2 * time.Minute

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func noFaults(t *testing.T, s *cptest.Server) {
	t.Helper()
	if f := s.Faults(); len(f) > 0 {
		t.Errorf("a real control plane would have refused: %s", strings.Join(f, "; "))
	}
}

func TestHandshakeFactsAndHeartbeats(t *testing.T) {
	s := cptest.New(t)
	h := start(t, s, nil)
	ctx := within(t)
	s.Wait(ctx, "heartbeat", 3)
	got := s.Frames("")
	for i, want := range []string{"auth", "register", "facts/daemon-runtimes", "heartbeat"} {
		if got[i].Type != want {
			t.Errorf("frame %d is %s, want %s", i, got[i].Type, want)
		}
	}
	if st := h.c.Status(); st.State != cp.StateReady || st.DaemonID == "" || st.Epoch != 1 {
		t.Errorf("status %+v", st)
	}
	noFaults(t, s)
}

func TestRepeatedRequestRunsOnceAndGetsTheSameAnswer(t *testing.T) {
	s := cptest.New(t)
	h := start(t, s, nil)
	n := 0
	h.h.answer = func(_ context.Context, _ cp.Envelope, answer cp.Responder) {
		n++
		answer(cp.AckReply(fmt.Sprintf("number %d", n)), nil)
	}
	ctx := within(t)
	c := s.Ready(ctx)
	id := cp.NewID()
	var first string
	for i := range 3 {
		e, err := c.AskAs(ctx, id, c.Epoch, "agent/upsert", map[string]any{"agentId": cp.NewID()})
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			first = string(e.Payload)
		} else if string(e.Payload) != first {
			t.Errorf("answer %d: %s, the first was %s", i, e.Payload, first)
		}
		if e.OrgID != "org_example" {
			t.Errorf("the answer names organization %q", e.OrgID)
		}
	}
	if requests, _ := h.h.counts(); requests != 1 {
		t.Errorf("the work ran %d times", requests)
	}
	noFaults(t, s)
}

// The control plane repeats what it asked, also on the next connection, while the first
// asking is still worked on.
func TestAnswerGoesToTheConnectionThatIsUp(t *testing.T) {
	s := cptest.New(t)
	h := start(t, s, nil)
	held := make(chan cp.Responder, 1)
	h.h.answer = func(_ context.Context, _ cp.Envelope, answer cp.Responder) { held <- answer }
	ctx := within(t)
	c := s.Ready(ctx)
	id := cp.NewID()
	go func() { _, _ = c.AskAs(ctx, id, c.Epoch, "agent/activate", map[string]any{}) }()
	answer := <-held
	s.Drop()
	s.Until(ctx, "a new connection", func() bool { return s.Conns() == 2 })
	c = s.Ready(ctx)
	reply := make(chan cp.Envelope, 1)
	go func() {
		e, _ := c.AskAs(ctx, id, c.Epoch, "agent/activate", map[string]any{})
		reply <- e
	}()
	// The repeat is there when a later request on the same connection is answered.
	h.h.mu.Lock()
	h.h.answer = nil
	h.h.mu.Unlock()
	if _, err := c.Ask(ctx, "cron/remove", map[string]any{}); err != nil {
		t.Fatal(err)
	}
	answer(cp.AckReply(""), nil)
	if e := <-reply; e.Type != "ack" {
		t.Errorf("answered with %q", e.Type)
	}
	if requests, _ := h.h.counts(); requests != 2 {
		t.Errorf("%d requests were worked on, want activate once and the other", requests)
	}
}

func TestOldEpochIsFenced(t *testing.T) {
	s := cptest.New(t)
	h := start(t, s, nil)
	ctx := within(t)
	s.Ready(ctx)
	s.Drop()
	s.Until(ctx, "a new connection", func() bool { return s.Conns() == 2 })
	c := s.Ready(ctx)
	e, err := c.AskAs(ctx, cp.NewID(), c.Epoch-1, "agent/upsert", map[string]any{})
	if err != nil {
		t.Fatal(err)
	}
	var fe cp.FrameError
	if err := json.Unmarshal(e.Payload, &fe); err != nil || e.Type != "error" || fe.Code != cp.CodeStaleEpoch || !fe.Retryable {
		t.Errorf("answered %s %s", e.Type, e.Payload)
	}
	if requests, _ := h.h.counts(); requests != 0 {
		t.Error("the request of an old session was applied")
	}
	noFaults(t, s)
}

func TestUnknownFramesAndUnreadableOnesAreAnsweredAndCloseNothing(t *testing.T) {
	s := cptest.New(t)
	start(t, s, nil)
	ctx := within(t)
	c := s.Ready(ctx)
	e, err := c.Ask(ctx, "from/the-future", map[string]any{})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(e.Payload), "UNKNOWN_FRAME") {
		t.Errorf("answered %s", e.Payload)
	}
	id := cp.NewID()
	bad := []string{
		`{`, `[]`, `{"v":2,"id":"` + id + `","ts":"x","type":"a","payload":{}}`, `{"v":1,"id":"no","ts":"x","type":"a","payload":{}}`,
		`{"v":1,"id":"` + id + `","ts":"x","payload":{}}`, `{"v":1,"id":"` + id + `","ts":"x","type":"a"}`,
	}
	before := len(s.Frames("error"))
	for _, b := range bad {
		c.Raw([]byte(b))
	}
	s.Wait(ctx, "error", before+len(bad))
	for _, e := range s.Frames("error")[before:] {
		if !strings.Contains(string(e.Payload), "BAD_PAYLOAD") {
			t.Errorf("answered %s", e.Payload)
		}
	}
	if e, err := c.Ask(ctx, "cron/remove", map[string]any{"unknown": map[string]any{"deep": 1}}); err != nil || e.Type != "ack" {
		t.Errorf("after all that: %v %s", err, e.Type)
	}
	if s.Conns() != 1 {
		t.Error("the connection was closed over it")
	}
	noFaults(t, s)
}

func TestRefusedKeyEndsItAndSaysWhatToDo(t *testing.T) {
	s := cptest.New(t)
	h := start(t, s, nil)
	ctx := within(t)
	s.Ready(ctx)
	s.Revoke(cptest.Key)
	s.Drop()
	err := <-h.ended
	h.ended <- err
	var refused *cp.KeyRefusedError
	if !errors.As(err, &refused) || !strings.Contains(err.Error(), "agentconnect login") {
		t.Errorf("ended with %v", err)
	}
	if st := h.c.Status(); st.State != cp.StateRefused || st.LastError == "" {
		t.Errorf("status %+v", st)
	}
	if n := s.Conns(); n != 2 {
		t.Errorf("%d connections: a refused key must not be tried again", n)
	}
}

func TestCloseCodesLeadToAReconnectAndAreSaid(t *testing.T) {
	for code, word := range map[websocket.StatusCode]string{
		cp.CloseReplaced: "a key of its own", 1012: "restarting", 1011: "internal error", 1009: "too large", 1000: "1000", 4429: "4429",
	} {
		t.Run(fmt.Sprint(int(code)), func(t *testing.T) {
			s := cptest.New(t)
			h := start(t, s, nil)
			ctx := within(t)
			s.Ready(ctx).Close(code, "because")
			s.Until(ctx, "a new connection", func() bool { return s.Conns() == 2 })
			s.Ready(ctx)
			for {
				select {
				case st := <-h.changes:
					if st.State != cp.StateWaiting {
						continue
					}
					if !strings.Contains(st.LastError, word) || st.NextTry.IsZero() {
						t.Errorf("status %+v, want it to say %q", st, word)
					}
					return
				case <-ctx.Done():
					t.Fatal("no status said that the connection was lost")
				}
			}
		})
	}
}

// Two daemons that share a key must not take the connection from each other as fast as they can.
func TestReplacedConnectionIsMadeAnewMoreAndMoreSlowly(t *testing.T) {
	s := cptest.New(t)
	const first = 2 * time.Millisecond
	h := start(t, s, func(o *cp.Options) { o.Timing.FirstWait, o.Timing.MostWait = first, time.Minute })
	ctx := within(t)
	for {
		select {
		case st := <-h.changes:
			if st.State == cp.StateReady {
				s.Ready(ctx).Close(cp.CloseReplaced, "replaced")
			}
			// At first it is less than twice as much.
			if st.State == cp.StateWaiting && st.NextTry.Sub(st.Since) > 8*first {
				return
			}
		case <-ctx.Done():
			t.Fatalf("no pause was longer than the first ones after %d connections", s.Conns())
		}
	}
}

// What the other side says is logged and shown: bounded, harmless, and without the key.
func TestWordsOfTheControlPlaneAreBounded(t *testing.T) {
	s := cptest.New(t)
	words, err := json.Marshal(cptest.Key + "\x1b[31m" + strings.Repeat("x", 100_000))
	if err != nil {
		t.Fatal(err)
	}
	refuse := make(chan *cptest.Conn, 100)
	s.OnAuth(func(c *cptest.Conn) bool {
		refuse <- c
		return false
	})
	var log lines
	h := start(t, s, func(o *cp.Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) })
	ctx := within(t)
	c := <-refuse
	c.Raw(fmt.Appendf(nil, `{"v":1,"id":%q,"ts":"x","type":"error","payload":{"code":"INTERNAL","message":%s,"retryable":true}}`, cp.NewID(), words))
	c.Raw(fmt.Appendf(nil, `{"v":%s,"id":%q,"ts":"x","type":"a","payload":{}}`, strings.Repeat("1", 100_000), cp.NewID()))
	c.Raw(fmt.Appendf(nil, `{"v":1,"id":%q,"ts":"x","type":"error","corr":%q,"payload":{"code":"INTERNAL","message":%s,"retryable":true}}`, cp.NewID(), s.Wait(ctx, "auth", 1).ID, words))
	for st := range h.changes {
		if st.State == cp.StateWaiting {
			if n := len(st.LastError); n > 2000 || strings.Contains(st.LastError, cptest.Key) || strings.Contains(st.LastError, "\x1b") {
				t.Errorf("the status has %d bytes: %.600q", n, st.LastError)
			}
			break
		}
	}
	if text := log.String(); !strings.Contains(text, "control plane lost") || strings.Contains(text, cptest.Key) {
		t.Errorf("logged %.2000s", text)
	}
	for _, line := range strings.Split(log.String(), "\n") {
		if len(line) > 2000 {
			t.Errorf("a line of %d bytes: %.300s", len(line), line)
		}
	}
}

// lines is a log that may be read meanwhile.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// What one control plane finds too large would end each further connection.
func TestReportThatIsTooLargeIsDropped(t *testing.T) {
	s := cptest.New(t)
	h := start(t, s, nil)
	ctx := within(t)
	now := cp.Stamp(time.Now())
	s.OnRequest(func(e cp.Envelope) (string, any, bool) {
		if strings.Contains(string(e.Payload), "large") {
			go s.Ready(ctx).Close(1009, "too big")
			return "", nil, false
		}
		return "ack", cp.Ack{OK: true}, true
	})
	s.Ready(ctx)
	for id, title := range map[string]string{"a": "small", "b": "large " + strings.Repeat("x", 1000), "c": "small"} {
		if err := h.c.Report(id, "event/session-sync", cp.Session{SessionID: id, AgentID: cp.NewID(), Title: title, Phase: "end", TS: now}, true); err != nil {
			t.Fatal(err)
		}
	}
	s.Until(ctx, "a new connection", func() bool { return s.Conns() >= 2 })
	s.Until(ctx, "an empty outbox", func() bool { return h.c.Status().Waiting == 0 })
	if n := s.Conns(); n != 2 {
		t.Errorf("%d connections: the report ended more than one", n)
	}
}

// Clocks are advice: what matters is told by order and by epoch.
func TestWrongClocksChangeNothing(t *testing.T) {
	s := cptest.New(t)
	h := start(t, s, nil)
	ctx := within(t)
	c := s.Ready(ctx)
	for _, ts := range []string{"1970-01-01T00:00:00Z", "2999-12-31T23:59:59.999Z", ""} {
		id := cp.NewID()
		c.Raw([]byte(`{"v":1,"id":"` + id + `","ts":"` + ts + `","type":"cron/remove","payload":{},"orgId":"org_example","epoch":` + fmt.Sprint(c.Epoch) + `}`))
		s.Until(ctx, "an answer", func() bool {
			for _, e := range s.Frames("ack") {
				if e.Corr == id {
					return true
				}
			}
			return false
		})
	}
	if requests, _ := h.h.counts(); requests != 3 {
		t.Errorf("%d requests were worked on", requests)
	}
}

func TestTLSIsChecked(t *testing.T) {
	s := cptest.New(t)
	target, err := url.Parse(strings.Replace(strings.TrimSuffix(s.URL(), "/daemon/ws"), "ws://", "http://", 1))
	if err != nil {
		t.Fatal(err)
	}
	front := httptest.NewTLSServer(httputil.NewSingleHostReverseProxy(target))
	t.Cleanup(front.Close)
	// An HTTP proxy on the way, as the environment would name one.
	var passed atomic.Int32
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			http.Error(w, "CONNECT", http.StatusMethodNotAllowed)
			return
		}
		passed.Add(1)
		to, err := net.Dial("tcp", r.Host)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		w.WriteHeader(http.StatusOK)
		from, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			to.Close()
			return
		}
		go func() { _, _ = io.Copy(to, from); to.Close() }()
		go func() { _, _ = io.Copy(from, to); from.Close() }()
	}))
	t.Cleanup(proxy.Close)
	via, err := url.Parse(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	address := strings.Replace(front.URL, "https://", "wss://", 1) + "/daemon/ws"
	h := start(t, s, func(o *cp.Options) { o.URL, o.TLS = address, &tls.Config{MinVersion: tls.VersionTLS12} })
	ctx := within(t)
	for said := false; !said; {
		select {
		case st := <-h.changes:
			said = st.State == cp.StateWaiting && strings.Contains(st.LastError, "certificate")
			if st.State == cp.StateReady {
				t.Fatal("an unknown certificate was taken")
			}
		case <-ctx.Done():
			t.Fatal("nothing was said of the certificate")
		}
	}
	roots := x509.NewCertPool()
	roots.AddCert(front.Certificate())
	start(t, s, func(o *cp.Options) {
		o.URL, o.TLS = address, &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
		o.Proxy = func(*http.Request) (*url.URL, error) { return via, nil }
	})
	s.Ready(ctx)
	if passed.Load() == 0 {
		t.Error("the proxy was not asked")
	}
}

// Half open: the other side's machine is gone and no packet says so.
func TestSilentConnectionIsDroppedAndMadeAnew(t *testing.T) {
	s := cptest.New(t)
	proxy := newProxy(t, strings.TrimPrefix(strings.TrimSuffix(s.URL(), "/daemon/ws"), "ws://"))
	slow := quick
	slow.Silence = 200 * time.Millisecond
	start(t, s, func(o *cp.Options) { o.URL, o.Timing = "ws://"+proxy.addr()+"/daemon/ws", slow })
	ctx := within(t)
	s.Ready(ctx)
	proxy.freeze()
	s.Until(ctx, "a new connection", func() bool { return s.Conns() >= 2 })
	noFaults(t, s)
}

func TestReportsWaitForTheConnectionAndAreToldOnce(t *testing.T) {
	s := cptest.New(t)
	s.OnAuth(func(*cptest.Conn) bool { return false }) // nobody gets in yet
	again := quick
	again.Resend = 200 * time.Millisecond
	h := start(t, s, func(o *cp.Options) { o.Timing = again })
	agent := cp.NewID()
	now := cp.Stamp(time.Now())
	for i := range 5 {
		if err := h.c.Report(fmt.Sprintf("session %d", i), "event/session-sync", cp.Session{SessionID: fmt.Sprint(i), AgentID: agent, Phase: "start", TS: now}, true); err != nil {
			t.Fatal(err)
		}
	}
	// The latest of a session counts.
	if err := h.c.Report("session 0", "event/session-sync", cp.Session{SessionID: "0", AgentID: agent, Phase: "end", TS: now}, true); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Report("cron", "cron/report", cp.CronReport{CronID: cp.NewID(), AgentID: agent, FiredAt: now}, false); err != nil {
		t.Fatal(err)
	}
	if n := h.c.Status().Waiting; n != 6 {
		t.Errorf("%d reports wait, want 6", n)
	}
	s.OnAuth(nil)
	ctx := within(t)
	s.Wait(ctx, "event/session-sync", 5)
	s.Wait(ctx, "cron/report", 1)
	s.Until(ctx, "an empty outbox", func() bool { return h.c.Status().Waiting == 0 })
	s.Drop()
	s.Until(ctx, "a new connection", func() bool { return s.Conns() == 2 })
	s.Ready(ctx)
	beats := len(s.Frames("heartbeat"))
	s.Wait(ctx, "heartbeat", beats+2)
	records := map[string]bool{}
	for _, e := range s.Frames("event/session-sync") {
		records[e.ID] = true // one that is repeated has the same id
	}
	if n := len(records); n != 5 {
		t.Errorf("%d records were sent, want each session's once", n)
	}
	if n := len(s.Frames("cron/report")); n != 1 {
		t.Errorf("%d cron reports, want one", n)
	}
	for _, e := range s.Frames("event/session-sync") {
		if strings.Contains(string(e.Payload), `"sessionId":"0"`) && !strings.Contains(string(e.Payload), `"end"`) {
			t.Errorf("the older state of a session was sent: %s", e.Payload)
		}
	}
	noFaults(t, s)
}

// A key is refused, or another is given, while there is something to tell.
func TestWhatWaitsGoesOverToTheNextClient(t *testing.T) {
	s := cptest.New(t)
	first := start(t, s, nil)
	ctx := within(t)
	c := s.Ready(ctx)
	id := cp.NewID()
	if _, err := c.AskAs(ctx, id, c.Epoch, "cron/run", map[string]any{}); err != nil {
		t.Fatal(err)
	}
	s.Revoke(cptest.Key)
	s.Drop()
	first.ended <- <-first.ended
	if err := first.c.Report("s", "event/session-sync", cp.Session{SessionID: "s", AgentID: cp.NewID(), Phase: "end", TS: cp.Stamp(time.Now())}, true); err != nil {
		t.Fatal(err)
	}
	s.Give("ANOTHER-KEY", cp.NewID())
	second := start(t, s, func(o *cp.Options) {
		o.Key = func() (string, error) { return "ANOTHER-KEY", nil }
		o.After = first.c
	})
	s.Wait(ctx, "event/session-sync", 1)
	c = s.Ready(ctx)
	if _, err := c.AskAs(ctx, id, c.Epoch, "cron/run", map[string]any{}); err != nil {
		t.Fatal(err)
	}
	if n, _ := second.h.counts(); n != 0 {
		t.Error("a request that the first client answered ran again")
	}
	s.Until(ctx, "an empty outbox", func() bool { return second.c.Status().Waiting == 0 })
	noFaults(t, s)
}

// One report that never gets an answer ends one connection, not each, and keeps no other back.
func TestReportThatIsNeverAnsweredHoldsNothingUp(t *testing.T) {
	s := cptest.New(t)
	soon := quick
	soon.Resend, soon.Sends = 5*time.Millisecond, 2
	h := start(t, s, func(o *cp.Options) { o.Timing = soon })
	s.OnRequest(func(e cp.Envelope) (string, any, bool) {
		return "ack", cp.Ack{OK: true}, !strings.Contains(string(e.Payload), "never")
	})
	ctx := within(t)
	s.Ready(ctx)
	for _, id := range []string{"never", "soon", "then"} {
		if err := h.c.Report(id, "event/session-sync", cp.Session{SessionID: id, AgentID: cp.NewID(), Phase: "end", TS: cp.Stamp(time.Now())}, true); err != nil {
			t.Fatal(err)
		}
	}
	s.Until(ctx, "the others told", func() bool { return h.c.Status().Waiting == 1 })
	// Told over and over, on a connection that stays.
	n, conns := len(s.Frames("event/session-sync")), s.Conns()
	s.Wait(ctx, "event/session-sync", n+20)
	if now := s.Conns(); now > conns || now > 2 {
		t.Errorf("%d connections, and then %d", conns, now)
	}
}

// Pages are long: who asks for many and takes none must not have them all kept here.
func TestWhatIsNotTakenIsBoundedInBytes(t *testing.T) {
	stop, asked := make(chan struct{}), make(chan struct{})
	defer close(stop)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{cp.Subprotocol}})
		if err != nil {
			return
		}
		defer ws.CloseNow()
		for _, answer := range []string{
			`"auth/ok","payload":{"daemonId":"d","sessionEpoch":1,"heartbeatSec":3600}`, `"register/ok","payload":{}`,
		} {
			var e cp.Envelope
			if _, data, err := ws.Read(r.Context()); err != nil || json.Unmarshal(data, &e) != nil {
				return
			}
			_ = ws.Write(r.Context(), websocket.MessageText, fmt.Appendf(nil, `{"v":1,"id":%q,"ts":"x","corr":%q,"type":%s}`, cp.NewID(), e.ID, answer))
		}
		for range 500 {
			_ = ws.Write(r.Context(), websocket.MessageText, fmt.Appendf(nil, `{"v":1,"id":%q,"ts":"x","type":"session/history","payload":{}}`, cp.NewID()))
		}
		select {
		case asked <- struct{}{}:
		case <-stop:
		}
		<-stop
	}))
	defer srv.Close()
	page := strings.Repeat("x", 200_000)
	h := &recorder{answer: func(_ context.Context, _ cp.Envelope, answer cp.Responder) {
		answer(cp.Reply{Type: "session/history/page", Payload: map[string]string{"text": page}}, nil)
	}}
	changes := make(chan cp.Status, 1000)
	slow := quick
	slow.Ping = time.Hour
	c := cp.New(cp.Options{
		URL: "ws" + strings.TrimPrefix(srv.URL, "http") + "/daemon/ws", Key: func() (string, error) { return cptest.Key, nil },
		Register: register, Handler: h, Timing: slow, Changed: func(s cp.Status) { changes <- s },
	})
	ctx, cancel := context.WithCancel(within(t))
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	for over := false; !over; {
		select {
		case st := <-changes:
			if over = st.State == cp.StateWaiting; over && !strings.Contains(st.LastError, "takes nothing") {
				t.Errorf("lost for another reason: %s", st.LastError)
			}
		case <-asked:
			if requests, _ := h.counts(); requests == 500 {
				over = true
				t.Errorf("all %d pages of %d bytes were kept", requests, len(page))
			}
		case <-ctx.Done():
			t.Fatal("neither the connection ended nor was all answered")
		}
	}
	cancel()
	<-ended
}

func TestUnansweredRequestIsRepeatedWithTheSameID(t *testing.T) {
	s := cptest.New(t)
	soon := quick
	soon.Resend = 50 * time.Millisecond
	h := start(t, s, func(o *cp.Options) { o.Timing = soon })
	n := 0
	s.OnRequest(func(cp.Envelope) (string, any, bool) {
		n++
		return "ack", cp.Ack{OK: true}, n >= 3
	})
	ctx := within(t)
	s.Ready(ctx)
	s.Until(ctx, "ready here, too", func() bool { return h.c.Status().State == cp.StateReady })
	if err := h.c.Report("s", "event/session-sync", cp.Session{SessionID: "s", AgentID: cp.NewID(), Phase: "start", TS: cp.Stamp(time.Now())}, true); err != nil {
		t.Fatal(err)
	}
	s.Wait(ctx, "event/session-sync", 3)
	f := s.Frames("event/session-sync")
	if len(f) < 3 || f[0].ID != f[1].ID || f[1].ID != f[2].ID {
		t.Errorf("%d sends with ids %v", len(f), f)
	}
}

func TestCapabilitiesAreAnnouncedWhenTheyChange(t *testing.T) {
	s := cptest.New(t)
	h := start(t, s, nil)
	ctx := within(t)
	s.Ready(ctx)
	s.Wait(ctx, "heartbeat", 1)
	same := register().Capabilities
	h.c.UpdateCapabilities(same)
	none := same
	none.Features = nil
	h.c.UpdateCapabilities(none)
	h.c.UpdateCapabilities(none)
	s.Wait(ctx, "capabilities/update", 1)
	beats := len(s.Frames("heartbeat"))
	s.Wait(ctx, "heartbeat", beats+2)
	f := s.Frames("capabilities/update")
	if len(f) != 1 || strings.Contains(string(f[0].Payload), "sandbox") {
		t.Errorf("%d updates: %v", len(f), f)
	}
	noFaults(t, s)
}

// A flood that nobody can handle ends the connection, not the memory.
func TestMoreThanCanBeHandledClosesTheConnection(t *testing.T) {
	s := cptest.New(t)
	h := start(t, s, nil)
	h.h.answer = func(ctx context.Context, _ cp.Envelope, _ cp.Responder) { <-ctx.Done() }
	ctx := within(t)
	c := s.Ready(ctx)
	for range 1100 {
		c.Tell("cron/remove", map[string]any{})
	}
	for {
		select {
		case st := <-h.changes:
			if st.State == cp.StateWaiting {
				if !strings.Contains(st.LastError, "more than could be handled") {
					t.Errorf("lost for another reason: %s", st.LastError)
				}
				return
			}
		case <-ctx.Done():
			t.Fatal("the flood did not end the connection")
		}
	}
}

func TestNoGoroutineIsLeft(t *testing.T) {
	before := runtime.NumGoroutine()
	s := cptest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	c := cp.New(cp.Options{URL: s.URL(), Key: func() (string, error) { return cptest.Key, nil }, Register: register, Handler: &recorder{}, Timing: quick})
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	for i := range 5 {
		s.Until(within(t), "a connection", func() bool { return s.Conns() > i })
		s.Ready(within(t))
		s.Drop()
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	deadline := time.Now().Add(patience)
	for runtime.NumGoroutine() > before+8 { // the test server's own
		if time.Now().After(deadline) {
			buf := make([]byte, 1<<16)
			t.Fatalf("%d goroutines, %d before\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
		}
		runtime.Gosched()
	}
}

func TestEndpoint(t *testing.T) {
	for raw, want := range map[string]string{
		"wss://cp.example":                  "wss://cp.example/daemon/ws",
		"https://cp.example/":               "wss://cp.example/daemon/ws",
		"wss://cp.example/x/daemon/ws":      "wss://cp.example/x/daemon/ws",
		"ws://127.0.0.1:8080":               "ws://127.0.0.1:8080/daemon/ws",
		"ws://[::1]:1/base/":                "ws://[::1]:1/base/daemon/ws",
		"http://localhost":                  "ws://localhost/daemon/ws",
		"ws://cp.example":                   "",
		"ws://10.0.0.1":                     "",
		"ws://localhost.evil.example":       "",
		"ftp://cp.example":                  "",
		"wss://":                            "",
		"wss://key@cp.example":              "",
		"cp.example":                        "",
		"ws://127.0.0.1.evil.example:80/ok": "",
	} {
		got, err := cp.Endpoint(raw, false)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("Endpoint(%q) = %q, %v; want %q", raw, got, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "key@") {
			t.Errorf("the error shows the key: %v", err)
		}
	}
	if got, err := cp.Endpoint("ws://cp.example", true); err != nil || got != "ws://cp.example/daemon/ws" {
		t.Errorf("insecure: %q, %v", got, err)
	}
}

// proxy passes bytes on until it is frozen: then it takes and gives nothing, and closes nothing.
type proxy struct {
	l    net.Listener
	mu   sync.Mutex
	cond *sync.Cond
	cold map[net.Conn]bool
	all  []net.Conn
}

func newProxy(t *testing.T, to string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{l: l, cold: map[net.Conn]bool{}}
	p.cond = sync.NewCond(&p.mu)
	t.Cleanup(func() {
		l.Close()
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, c := range p.all {
			c.Close()
		}
		p.cold = map[net.Conn]bool{}
		p.cond.Broadcast()
	})
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", to)
			if err != nil {
				a.Close()
				continue
			}
			p.mu.Lock()
			p.all = append(p.all, a, b)
			p.mu.Unlock()
			go p.copy(a, b, a)
			go p.copy(b, a, a)
		}
	}()
	return p
}

func (p *proxy) addr() string { return p.l.Addr().String() }

func (p *proxy) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.all {
		p.cold[c] = true
	}
}

func (p *proxy) copy(dst, src, which net.Conn) {
	buf := make([]byte, 4096)
	for {
		n, err := src.Read(buf)
		p.mu.Lock()
		for p.cold[which] {
			p.cond.Wait()
		}
		p.mu.Unlock()
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				return
			}
			dst.Close()
			return
		}
	}
}

// What a control plane says of heartbeats is kept within reason.
func TestHeartbeatsOfAnyNumber(t *testing.T) {
	for _, sec := range []int64{-1, 0, 10_000_000_000, 1 << 62} {
		s := cptest.New(t)
		s.Beat(sec)
		start(t, s, func(o *cp.Options) { o.Timing.Heartbeat = 0 })
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		s.Ready(ctx)
		s.Wait(ctx, "heartbeat", 1)
		cancel()
	}
}
