package daemon

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path"
	"slices"
	"sync"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/peer"
	"agentconnect.md/sandbox/cmd/internal/strictjson"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// Bounds of the control socket.
const (
	maxBody       = 4 << 10 // one request says something in its body, a host
	headerTimeout = 10 * time.Second
	// answerTimeout covers the longest answer: a start or a stop with its graces.
	answerTimeout = 10 * time.Minute
	maxHeader     = 16 << 10
)

// peerListener hands on connections of one user only. The modes of the socket and its
// directory say the same; this holds also where those were changed.
type peerListener struct {
	*net.UnixListener
	uid int
	log *slog.Logger
}

// Accept waits for the next connection of the right user.
func (l *peerListener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		uid, err := peer.UID(c)
		if err == nil && uid == l.uid {
			return c, nil
		}
		l.log.Warn("connection refused on the control socket", "uid", uid, "error", err)
		c.Close()
	}
}

// newServer serves the words of package control.
func newServer(d *Daemon) *http.Server {
	words := handler(d)
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			d.stir()
			words.ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       headerTimeout,
		WriteTimeout:      answerTimeout,
		IdleTimeout:       headerTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(d.log.Handler(), slog.LevelWarn),
	}
}

// operations is what the control socket serves.
type operations interface {
	status(ctx context.Context, ask bool) *control.Status
	agentNow(ctx context.Context, id string) (*control.AgentStatus, error)
	probeAgain(ctx context.Context) control.Probe
	reload(why string) error
	start(id string, again bool) (Pending, error)
	stop(id string) (Pending, error)
	attach(ctx context.Context, id string) (string, error)
	exec(ctx context.Context, id string) (string, error)
	placedConfig(id string) (json.RawMessage, error)
	egressWord(ctx context.Context, id string, w control.Egress) error
	end(ctx context.Context) error
}

func handler(d operations) http.Handler {
	mux := http.NewServeMux()
	do := func(pattern string, f func(r *http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			v, err := any(nil), emptyBody(w, r)
			if err == nil {
				v, err = f(r)
			}
			answer(w, v, err)
		})
	}
	mux.HandleFunc("POST /v1/agents/{id}/egress", func(w http.ResponseWriter, r *http.Request) {
		word, err := egressBody(w, r)
		if err == nil {
			err = d.egressWord(r.Context(), r.PathValue("id"), *word)
		}
		answer(w, struct{}{}, err)
	})
	wish := func(p Pending, err error, r *http.Request) (any, error) {
		if err == nil {
			err = p.Wait(r.Context())
		}
		if err != nil {
			return nil, err
		}
		return d.agentNow(r.Context(), r.PathValue("id"))
	}
	do("GET /v1/status", func(r *http.Request) (any, error) { return d.status(r.Context(), true), nil })
	do("POST /v1/probe", func(r *http.Request) (any, error) { return d.probeAgain(r.Context()), nil })
	do("POST /v1/reload", func(*http.Request) (any, error) { return struct{}{}, d.reload("request") })
	do("POST /v1/shutdown", func(r *http.Request) (any, error) { return struct{}{}, d.end(r.Context()) })
	do("GET /v1/agents/{id}", func(r *http.Request) (any, error) { return d.agentNow(r.Context(), r.PathValue("id")) })
	do("GET /v1/agents/{id}/placed", func(r *http.Request) (any, error) { return d.placedConfig(r.PathValue("id")) })
	do("POST /v1/agents/{id}/start", func(r *http.Request) (any, error) {
		p, err := d.start(r.PathValue("id"), false)
		return wish(p, err, r)
	})
	do("POST /v1/agents/{id}/restart", func(r *http.Request) (any, error) {
		p, err := d.start(r.PathValue("id"), true)
		return wish(p, err, r)
	})
	do("POST /v1/agents/{id}/stop", func(r *http.Request) (any, error) {
		p, err := d.stop(r.PathValue("id"))
		if p != nil && err != nil { // it stops, and that is not written down
			err = cmp.Or(p.Wait(r.Context()), err)
		}
		return wish(p, err, r)
	})
	do("POST /v1/agents/{id}/attach", func(r *http.Request) (any, error) {
		s, err := d.attach(r.Context(), r.PathValue("id"))
		return control.Attach{Socket: s}, err
	})
	do("POST /v1/agents/{id}/exec", func(r *http.Request) (any, error) {
		s, err := d.exec(r.Context(), r.PathValue("id"))
		return control.Attach{Socket: s}, err
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, pattern := mux.Handler(r); pattern == "" || r.URL.Path != path.Clean(r.URL.Path) {
			// The mux's own answers (404, 405, a redirect) are not in the protocol's form.
			write(w, http.StatusNotFound, &control.Error{Message: fmt.Sprintf("%s %s: unknown request; are the daemon and the command line of the same version?", r.Method, r.URL.Path), Code: 1})
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// egressBody reads the one body that says something.
func egressBody(w http.ResponseWriter, r *http.Request) (*control.Egress, error) {
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return nil, &badRequest{fmt.Errorf("body: %w", err)}
	}
	word := &control.Egress{}
	if err := strictjson.Decode(raw, maxBody, word); err != nil {
		return nil, &badRequest{fmt.Errorf("body: %w", err)}
	}
	if !slices.Contains([]wire.EgressScope{wire.EgressOnce, wire.EgressRun, wire.EgressAlways}, word.Scope) {
		return nil, &badRequest{fmt.Errorf("body: scope %q: once, run or always", printable(string(word.Scope)))}
	}
	if _, err := rules.Parse(word.Host); err != nil {
		return nil, &badRequest{fmt.Errorf("body: host: %w", err)}
	}
	return word, nil
}

// emptyBody accepts no body, or an empty JSON object.
func emptyBody(w http.ResponseWriter, r *http.Request) error {
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return &badRequest{fmt.Errorf("body: %w", err)}
	}
	if raw = bytes.TrimSpace(raw); len(raw) == 0 {
		return nil
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil || members == nil {
		return &badRequest{errors.New("body: not a JSON object")}
	}
	for k := range members {
		return &badRequest{fmt.Errorf("body: unknown key %q", k)}
	}
	return nil
}

// badRequest is a request that is not in the protocol.
type badRequest struct{ err error }

func (e *badRequest) Error() string { return e.err.Error() }

// ExitCode is that of a usage error.
func (*badRequest) ExitCode() int { return 2 }

func answer(w http.ResponseWriter, v any, err error) {
	if err == nil {
		write(w, http.StatusOK, v)
		return
	}
	status := httpStatus(err)
	var bad *badRequest
	if errors.As(err, &bad) {
		status = http.StatusBadRequest
	}
	write(w, status, &control.Error{Message: err.Error(), Code: Code(err)})
}

func write(w http.ResponseWriter, status int, v any) {
	raw, err := json.Marshal(v)
	if err != nil {
		status, raw = http.StatusInternalServerError, []byte(`{"error":"the answer cannot be written as JSON","code":1}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(raw, '\n'))
}

// agentNow is one agent, its supervisor asked.
func (d *Daemon) agentNow(ctx context.Context, id string) (*control.AgentStatus, error) {
	if err := agent.ValidateID(id); err != nil {
		return nil, &Refusal{Code: 2, Text: err.Error()}
	}
	e, err := d.builder().Config.Agent(d.store, id)
	if errors.Is(err, agent.ErrNotFound) {
		return nil, err
	}
	if err != nil && e.Err == nil {
		e.ID, e.Err = id, err
	}
	one := []control.AgentStatus{d.agentStatus(id, &e, d.sup.State(id))}
	d.ask(ctx, one)
	if one[0].Socket == "" {
		d.lines.drop(id)
	}
	return &one[0], nil
}

// end ends the daemon and returns when its agents have ended.
func (d *Daemon) end(ctx context.Context) error {
	d.shutdown(errAsked)
	select {
	case <-d.down:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// wireStatus asks a supervisor for its status on its socket.
func wireStatus(ctx context.Context, socket string) (*wire.Status, error) {
	c, err := control.DialAgent(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	st, _, err := statusOn(ctx, c)
	return st, err
}

// statusOn asks on a connection, which whole says can be used again.
func statusOn(ctx context.Context, c net.Conn) (st *wire.Status, whole bool, err error) {
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer func() { whole = stop() && err == nil }()
	req, err := json.Marshal(wire.Request{Version: wire.Version, Op: wire.OpStatus})
	if err != nil {
		return nil, false, err
	}
	if _, err := c.Write(append(req, '\n')); err != nil {
		return nil, false, err
	}
	line := make([]byte, 0, 2<<10)
	for !bytes.HasSuffix(line, []byte("\n")) {
		if len(line) > maxState {
			return nil, false, fmt.Errorf("an answer above %d bytes", maxState)
		}
		line = slices.Grow(line, 1<<10)
		n, err := c.Read(line[len(line):cap(line)])
		if line = line[:len(line)+n]; err != nil {
			return nil, false, err
		}
	}
	var r wire.Reply
	if err := json.Unmarshal(line, &r); err != nil {
		return nil, false, err
	}
	if !r.OK || r.Status == nil {
		return nil, false, errors.New(printable(r.Error))
	}
	return r.Status, false, nil
}

// lines are connections to supervisors that were asked and can be asked again.
type lines struct {
	mu   sync.Mutex
	idle map[string]line // by the agent's id
}

type line struct {
	net.Conn
	pid int // of the supervisor
}

// status asks an agent's supervisor, which has that pid. A connection to another one, or that it has closed
// since, does not count.
func (l *lines) status(ctx context.Context, id, socket string, pid int) (*wire.Status, error) {
	l.mu.Lock()
	c, had := l.idle[id]
	delete(l.idle, id)
	l.mu.Unlock()
	if had {
		if c.pid == pid {
			st, whole, err := statusOn(ctx, c)
			if whole {
				l.put(id, c)
				return st, nil
			}
			if err == nil || ctx.Err() != nil {
				c.Close()
				return st, err
			}
		}
		c.Close()
	}
	conn, err := control.DialAgent(ctx, socket)
	if err != nil {
		return nil, err
	}
	st, whole, err := statusOn(ctx, conn)
	if whole {
		l.put(id, line{conn, pid})
	} else {
		conn.Close()
	}
	return st, err
}

func (l *lines) put(id string, c line) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.idle[id]; ok {
		c.Close() // of somebody who asked at the same time
		return
	}
	if l.idle == nil {
		l.idle = map[string]line{}
	}
	l.idle[id] = c
}

// keep closes the connections to others than the agents that run.
func (l *lines) keep(agents []control.AgentStatus) {
	run := map[string]int{}
	for _, a := range agents {
		run[a.ID] = a.PID
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, c := range l.idle {
		if run[id] != c.pid {
			c.Close()
			delete(l.idle, id)
		}
	}
}

// drop closes the connection to an agent.
func (l *lines) drop(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c, ok := l.idle[id]; ok {
		c.Close()
		delete(l.idle, id)
	}
}
