// Package cptest is a scripted control plane for tests: as strict as the real one on what
// a daemon sends, and able to misbehave. It listens on loopback only.
package cptest

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

// Key is the one that is taken unless Server.Keys says otherwise.
const Key = "EXAMPLE-KEY"

// Server is a control plane with one organization.
type Server struct {
	t    testing.TB
	http *httptest.Server

	mu      sync.Mutex
	keys    map[string]string // key → daemon id
	epoch   int64
	held    cp.RegisterOK
	raw     map[string]any // extra members of register/ok
	frames  []cp.Envelope  // what arrived, in order
	keep    int            // how many of them; 0: all
	hold    func() cp.RegisterOK
	faults  []string // what the real one would have refused, or closed for
	arrived chan struct{}
	live    *Conn
	onAuth  func(*Conn) bool // false: do not answer
	ack     func(cp.Envelope) (string, any, bool)
	conns   int
	beat    int64  // what auth/ok says of heartbeats, seconds
	set     string // name of the member set that the daemons are in; "" for none
}

// Conn is one daemon's connection.
type Conn struct {
	s     *Server
	ws    *websocket.Conn
	state string // "", authed, ready
	Epoch int64

	mu    sync.Mutex
	calls map[string]chan cp.Envelope
}

// New starts a server that ends with the test.
func New(t testing.TB) *Server {
	s := &Server{
		t: t, keys: map[string]string{Key: "d0000000-0000-4000-8000-000000000001"},
		arrived: make(chan struct{}), raw: map[string]any{}, beat: 15,
	}
	s.http = httptest.NewServer(http.HandlerFunc(s.serve))
	t.Cleanup(func() {
		s.Drop()
		s.http.Close()
	})
	return s
}

// URL to configure.
func (s *Server) URL() string { return "ws" + strings.TrimPrefix(s.http.URL, "http") + "/daemon/ws" }

// Hold sets what register/ok says.
func (s *Server) Hold(ok cp.RegisterOK) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = ok
}

// HoldWhat has f say at each registration what Hold would have set.
func (s *Server) HoldWhat(f func() cp.RegisterOK) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold = f
}

// Keep has the server forget all but the latest n frames.
func (s *Server) Keep(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep = n
}

// Member adds a member to register/ok, as the real one has many that nobody here reads.
func (s *Server) Member(name string, v any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.raw[name] = v
}

// Beat sets how often auth/ok says that the daemon is to tell how it is, in seconds.
func (s *Server) Beat(sec int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.beat = sec
}

// Give makes the key one that is taken, of the daemon with this id.
func (s *Server) Give(key, daemonID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys[key] = daemonID
}

// Set puts the daemons into a member set, from their next connection on.
func (s *Server) Set(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set = name
}

// Revoke makes the key one that is refused at the next auth.
func (s *Server) Revoke(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.keys, key)
}

// OnAuth lets a test misbehave at the handshake: false leaves auth unanswered.
func (s *Server) OnAuth(f func(*Conn) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onAuth = f
}

// OnRequest answers the daemon's own requests; ok false leaves one unanswered. Without it
// each is acknowledged.
func (s *Server) OnRequest(f func(cp.Envelope) (typ string, payload any, ok bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ack = f
}

// Faults are what the real control plane would have refused.
func (s *Server) Faults() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.faults...)
}

// Conns is how many connections were made.
func (s *Server) Conns() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns
}

// Frames returns what arrived of a type ("" for all), in order.
func (s *Server) Frames(typ string) []cp.Envelope {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []cp.Envelope
	for _, e := range s.frames {
		if typ == "" || e.Type == typ {
			out = append(out, e)
		}
	}
	return out
}

// Wait waits until n frames of a type have arrived, and returns the last of them.
func (s *Server) Wait(ctx context.Context, typ string, n int) cp.Envelope {
	s.t.Helper()
	var got cp.Envelope
	s.Until(ctx, fmt.Sprintf("%d %s", n, typ), func() bool {
		f := s.Frames(typ)
		if len(f) < n {
			return false
		}
		got = f[n-1]
		return true
	})
	return got
}

// Until waits until cond holds; it is asked whenever a frame arrived or a connection changed.
func (s *Server) Until(ctx context.Context, what string, cond func() bool) {
	s.t.Helper()
	for {
		s.mu.Lock()
		ch := s.arrived
		s.mu.Unlock()
		if cond() {
			return
		}
		select {
		case <-ch:
		case <-ctx.Done():
			s.t.Fatalf("waited in vain for %s; got %s", what, s.types())
		}
	}
}

func (s *Server) types() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	for _, e := range s.frames {
		b.WriteString(e.Type + " ")
	}
	return b.String()
}

func (s *Server) news() { // under mu
	close(s.arrived)
	s.arrived = make(chan struct{})
}

// Ready waits for a daemon that is registered.
func (s *Server) Ready(ctx context.Context) *Conn {
	s.t.Helper()
	var c *Conn
	s.Until(ctx, "a registered daemon", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		c = s.live
		return c != nil && c.state == "ready"
	})
	return c
}

// Drop cuts the connection without a word.
func (s *Server) Drop() {
	s.mu.Lock()
	c := s.live
	s.live = nil
	s.mu.Unlock()
	if c != nil {
		_ = c.ws.CloseNow()
	}
}

// Stop ends the server: connections are refused from then on.
func (s *Server) Stop() {
	_ = s.http.Listener.Close()
	s.Drop()
}

// Close closes the connection with a code.
func (c *Conn) Close(code websocket.StatusCode, reason string) { _ = c.ws.Close(code, reason) }

func (s *Server) fault(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = append(s.faults, fmt.Sprintf(format, args...))
	s.news()
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/daemon/ws" {
		http.NotFound(w, r)
		return
	}
	if !strings.Contains(r.Header.Get("Sec-WebSocket-Protocol"), cp.Subprotocol) {
		http.Error(w, "subprotocol", http.StatusBadRequest)
		return
	}
	if r.Header.Get("Authorization") != "" {
		s.fault("the key stands in a header")
	}
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{cp.Subprotocol}})
	if err != nil {
		return
	}
	ws.SetReadLimit(cp.MaxMessage)
	c := &Conn{s: s, ws: ws, calls: map[string]chan cp.Envelope{}}
	s.mu.Lock()
	s.conns++
	s.news()
	s.mu.Unlock()
	for {
		kind, data, err := ws.Read(r.Context())
		if err != nil {
			s.mu.Lock()
			if s.live == c {
				s.live = nil
			}
			s.news()
			s.mu.Unlock()
			return
		}
		if kind != websocket.MessageText {
			continue
		}
		c.take(data)
	}
}

var stampForm = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$`)

func (c *Conn) take(data []byte) {
	var e cp.Envelope
	if err := json.Unmarshal(data, &e); err != nil {
		c.s.fault("unreadable: %v", err)
		return
	}
	switch {
	case e.V != 1:
		c.refuse(e, "v is %d", e.V)
		return
	case !cp.ValidID(e.ID):
		c.refuse(e, "id %q", e.ID)
		return
	case !stampForm.MatchString(e.TS):
		c.refuse(e, "ts %q", e.TS)
		return
	case e.Epoch != nil:
		c.refuse(e, "the daemon sent an epoch")
		return
	case e.OrgID != "" && e.OrgID != "org_example":
		c.refuse(e, "orgId %q", e.OrgID)
		return
	}
	if null := nullMember(data); null != "" {
		c.refuse(e, "null at %s", null)
		return
	}
	if err := shape(e.Type, e.Payload); err != nil {
		c.refuse(e, "%v", err)
		return
	}
	c.s.mu.Lock()
	c.s.frames = append(c.s.frames, e)
	if k := c.s.keep; k > 0 && len(c.s.frames) > 2*k {
		c.s.frames = append([]cp.Envelope(nil), c.s.frames[len(c.s.frames)-k:]...)
	}
	c.s.news()
	c.s.mu.Unlock()
	if e.Corr != "" {
		c.mu.Lock()
		ch := c.calls[e.Corr]
		c.mu.Unlock()
		if ch != nil {
			select {
			case ch <- e:
			default:
			}
		}
		return
	}
	c.act(e)
}

func (c *Conn) refuse(e cp.Envelope, format string, args ...any) {
	c.s.fault(e.Type+": "+format, args...)
	c.write(cp.Envelope{Type: "error", Corr: e.ID}, cp.FrameError{Code: cp.CodeBadPayload, Message: fmt.Sprintf(format, args...)})
}

func (c *Conn) act(e cp.Envelope) {
	s := c.s
	s.mu.Lock()
	onAuth, ack := s.onAuth, s.ack
	s.mu.Unlock()
	s.mu.Lock()
	state := c.state
	s.mu.Unlock()
	if state == "" && e.Type != "auth" || state == "authed" && e.Type != "register" {
		c.s.fault("%s before the handshake was over", e.Type)
		c.write(cp.Envelope{Type: "error", Corr: e.ID}, cp.FrameError{Code: cp.CodeProtocolState, Message: "handshake"})
		return
	}
	switch e.Type {
	case "auth":
		if onAuth != nil && !onAuth(c) {
			return
		}
		var a cp.Auth
		_ = json.Unmarshal(e.Payload, &a)
		s.mu.Lock()
		id, ok := s.keys[a.APIKey]
		if ok && (a.DaemonID == "" || a.DaemonID == id) {
			s.epoch++
			c.Epoch = s.epoch
			old := s.live
			s.live = c
			c.state = "authed"
			said := map[string]any{
				"daemonId": id, "sessionEpoch": c.Epoch, "heartbeatSec": s.beat, "dutyLeaseMs": 120000,
				"serverTime": cp.Stamp(time.Now()), "organizationMode": "connection", "orgSlug": "-",
			}
			if s.set != "" {
				said["memberSet"] = map[string]any{"setId": cp.NewID(), "name": s.set}
			}
			s.mu.Unlock()
			if old != nil && old != c {
				_ = old.ws.Close(cp.CloseReplaced, "replaced")
			}
			c.write(cp.Envelope{Type: "auth/ok", Corr: e.ID}, said)
			return
		}
		s.mu.Unlock()
		_ = c.ws.Close(cp.CloseAuthFailed, "AUTH_FAILED")
	case "register":
		s.mu.Lock()
		hold := s.hold
		s.mu.Unlock()
		var said *cp.RegisterOK
		if hold != nil {
			said = new(cp.RegisterOK)
			*said = hold()
		}
		s.mu.Lock()
		if said != nil {
			s.held = *said
		}
		ok := map[string]any{
			"routingEpoch": 0, "sessionRetention": "7d", "assignments": []any{}, "integrations": []any{}, "memoryConnections": []any{}, "leases": []any{}, "relays": []any{},
			"serverFeatures": []string{"gitcred-provider-v2", "session-live-tail-v1", "session-metadata-ack-v1", "session-purge-v1", "session-visibility-v1"},
			"collabRoutes":   map[string]any{"generation": 0, "channels": []any{}, "agents": []any{}, "platformKinds": []any{}},
			"agents":         orEmpty(s.held.Agents), "crons": orEmpty(s.held.Crons), "mcpServers": orEmpty(s.held.MCPServers),
			"drop": map[string]any{"agents": orEmpty(s.held.Drop.Agents), "crons": orEmpty(s.held.Drop.Crons), "assignments": []any{}, "integrations": []any{}},
		}
		for k, v := range s.raw {
			ok[k] = v
		}
		s.mu.Unlock()
		c.write(cp.Envelope{Type: "register/ok", Corr: e.ID}, ok)
		s.mu.Lock()
		c.state = "ready"
		s.news()
		s.mu.Unlock()
	case "event/session-sync", "event/session-purged", "gitcred/request", "daemon/bootstrap/result":
		if ack != nil {
			if typ, payload, ok := ack(e); ok {
				c.write(cp.Envelope{Type: typ, Corr: e.ID}, payload)
			}
			return
		}
		c.write(cp.Envelope{Type: "ack", Corr: e.ID}, cp.Ack{OK: true})
	}
}

func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func (c *Conn) write(e cp.Envelope, payload any) {
	raw, err := json.Marshal(payload)
	if err != nil {
		c.s.t.Error(err)
		return
	}
	e.V, e.Payload = 1, raw
	if e.ID == "" {
		e.ID = cp.NewID()
	}
	if e.TS == "" {
		e.TS = cp.Stamp(time.Now())
	}
	data, err := json.Marshal(e)
	if err != nil {
		c.s.t.Error(err)
		return
	}
	c.Raw(data)
}

// Raw sends bytes as they are.
func (c *Conn) Raw(data []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = c.ws.Write(ctx, websocket.MessageText, data)
}

// Tell sends an event.
func (c *Conn) Tell(typ string, payload any) {
	epoch := c.Epoch
	c.write(cp.Envelope{Type: typ, OrgID: "org_example", Epoch: &epoch}, payload)
}

// Ask sends a request and returns the answer.
func (c *Conn) Ask(ctx context.Context, typ string, payload any) (cp.Envelope, error) {
	return c.AskAs(ctx, cp.NewID(), c.Epoch, typ, payload)
}

// AskAs is Ask with an id and an epoch of the caller's.
func (c *Conn) AskAs(ctx context.Context, id string, epoch int64, typ string, payload any) (cp.Envelope, error) {
	ch := make(chan cp.Envelope, 1)
	c.mu.Lock()
	c.calls[id] = ch
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.calls[id] == ch {
			delete(c.calls, id)
		}
	}()
	c.write(cp.Envelope{ID: id, Type: typ, OrgID: "org_example", Epoch: &epoch}, payload)
	select {
	case e := <-ch:
		return e, nil
	case <-ctx.Done():
		return cp.Envelope{}, fmt.Errorf("%s: %w", typ, ctx.Err())
	}
}

// nullMember names a member that is null, which the real one refuses but for a few.
func nullMember(data []byte) string {
	var v any
	if json.Unmarshal(data, &v) != nil {
		return ""
	}
	return findNull("", v)
}

func findNull(path string, v any) string {
	switch v := v.(type) {
	case nil:
		return path
	case map[string]any:
		for k, m := range v {
			switch k {
			case "observedModel", "requesterId", "requesterName", "resolvedAt":
				continue // "or null" on the wire
			}
			if at := findNull(path+"."+k, m); at != "" {
				return at
			}
		}
	case []any:
		for _, m := range v {
			if at := findNull(path+"[]", m); at != "" {
				return at
			}
		}
	}
	return ""
}

// required are the members that a payload must have, with their JSON type: s string, n
// number, i integer, b boolean, a array, o object, u UUID, t time.
var required = map[string]map[string]byte{
	"auth":                           {"apiKey": 's', "agentVersion": 's'},
	"register":                       {"host": 's', "capabilities": 'o', "maxAgents": 'i', "localState": 'o'},
	"capabilities/update":            {"capabilities": 'o'},
	"facts/daemon-runtimes":          {"runtimes": 'a', "mcpServers": 'a'},
	"heartbeat":                      {"load": 'o', "health": 's', "activeSessions": 'i'},
	"ack":                            {"ok": 'b'},
	"cron/report":                    {"cronId": 'u', "agentId": 'u', "firedAt": 't'},
	"event/session-sync":             {"sessionId": 's', "agentId": 'u', "phase": 's', "ts": 't'},
	"event/session":                  {"sessionId": 's', "agentId": 'u', "phase": 's', "ts": 't'},
	"event/session-activity":         {"sessionId": 's', "agentId": 'u', "revision": 's', "ts": 't'},
	"event/session-purged":           {"agentId": 'u', "sessionIds": 'a', "reason": 's', "ts": 't'},
	"usage/report":                   {"sessionId": 's', "agentId": 'u', "lastActivityAt": 't', "usage": 'o'},
	"session/history/page":           {"sessionId": 's', "messages": 'a'},
	"session/tool-body/chunk":        {"sessionId": 's', "toolCallId": 's', "data": 's', "totalBytes": 'i'},
	"session/list/page":              {"sessions": 'a'},
	"session/visibility/ok":          {"sessionId": 's', "visibilityRev": 'i', "status": 's'},
	"session/child-status/probe/ok":  {"found": 'b'},
	"agent/permission-requests/page": {"agentId": 'u', "requests": 'a'},
	"daemon/control/ack":             {"accepted": 'b'},
	"drain/progress":                 {"remaining": 'i', "drained": 'a'},
	"drain/done":                     {"released": 'a'},
	"gitcred/request":                {"agentId": 'u'},
	"error":                          {"code": 's', "message": 's', "retryable": 'b'},
}

func shape(typ string, payload json.RawMessage) error {
	want, known := required[typ]
	if !known {
		return fmt.Errorf("the control plane does not know %s", typ)
	}
	var got map[string]json.RawMessage
	if err := json.Unmarshal(payload, &got); err != nil {
		return err
	}
	for name, kind := range want {
		raw, ok := got[name]
		if !ok {
			return fmt.Errorf("%s is missing", name)
		}
		if err := is(raw, kind); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	switch typ {
	case "register", "capabilities/update":
		var r struct {
			Capabilities map[string]json.RawMessage `json:"capabilities"`
			LocalState   map[string]json.RawMessage `json:"localState"`
		}
		if err := json.Unmarshal(payload, &r); err != nil {
			return err
		}
		for name, kind := range map[string]byte{"platforms": 'a', "runtimes": 'a', "acp": 'b'} {
			if err := is(r.Capabilities[name], kind); err != nil {
				return fmt.Errorf("capabilities.%s: %w", name, err)
			}
		}
		if typ == "register" {
			for _, name := range []string{"assignments", "crons", "leases"} {
				if err := is(r.LocalState[name], 'a'); err != nil {
					return fmt.Errorf("localState.%s: %w", name, err)
				}
			}
		}
	case "facts/daemon-runtimes":
		var f struct {
			Runtimes []map[string]json.RawMessage `json:"runtimes"`
		}
		if err := json.Unmarshal(payload, &f); err != nil {
			return err
		}
		for _, r := range f.Runtimes {
			for name, kind := range map[string]byte{"runtime": 's', "version": 's', "models": 'a', "acpSupport": 's', "toolCalling": 'b'} {
				if err := is(r[name], kind); err != nil {
					return fmt.Errorf("runtimes[].%s: %w", name, err)
				}
			}
		}
	case "session/history/page":
		var p struct {
			Messages []map[string]json.RawMessage `json:"messages"`
		}
		if err := json.Unmarshal(payload, &p); err != nil {
			return err
		}
		for _, m := range p.Messages {
			for name, kind := range map[string]byte{"seq": 'i', "sender": 's', "ts": 's', "kind": 's', "text": 's'} {
				if err := is(m[name], kind); err != nil {
					return fmt.Errorf("messages[].%s: %w", name, err)
				}
			}
		}
	}
	return nil
}

func is(raw json.RawMessage, kind byte) error {
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		return fmt.Errorf("is missing or unreadable")
	}
	ok := false
	switch kind {
	case 's':
		_, ok = v.(string)
	case 'u':
		s, isString := v.(string)
		ok = isString && cp.ValidID(s)
	case 't':
		s, isString := v.(string)
		ok = isString && stampForm.MatchString(s)
	case 'b':
		_, ok = v.(bool)
	case 'a':
		_, ok = v.([]any)
	case 'o':
		_, ok = v.(map[string]any)
	case 'i':
		f, isNumber := v.(float64)
		ok = isNumber && f == float64(int64(f))
	case 'n':
		_, ok = v.(float64)
	}
	if !ok {
		return fmt.Errorf("%s is not of the type that is wanted", raw)
	}
	return nil
}
