package cptest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/coder/websocket"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

// Replay plays recorded exchanges: what the control plane sent is sent, and what the
// daemon sent is awaited, ids and times aside, in the recorded order where the wire
// promises one.
type Replay struct {
	lines []line
	http  *httptest.Server
	done  chan error

	mu    sync.Mutex
	got   map[string]int // frames of the daemon that were right, by type
	moved chan struct{}  // closed when got changes
}

type line struct {
	Send json.RawMessage `json:"send"`
	Recv json.RawMessage `json:"recv"`
}

// typ is the type of a frame that the daemon sent; "" of any other line.
func (l line) typ() string {
	var e struct {
		Type string `json:"type"`
	}
	_ = json.Unmarshal(l.Send, &e)
	return e.Type
}

// NewReplay reads the recordings and listens.
func NewReplay(t testing.TB, files ...string) *Replay {
	r := &Replay{done: make(chan error, 1), got: map[string]int{}, moved: make(chan struct{})}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		sc := bufio.NewScanner(bytes.NewReader(data))
		sc.Buffer(nil, 1<<20)
		for sc.Scan() {
			var l line
			if err := json.Unmarshal(sc.Bytes(), &l); err != nil {
				t.Fatal(err)
			}
			r.lines = append(r.lines, l)
		}
	}
	r.http = httptest.NewServer(http.HandlerFunc(r.serve))
	t.Cleanup(r.http.Close)
	return r
}

// URL to configure.
func (r *Replay) URL() string { return "ws" + strings.TrimPrefix(r.http.URL, "http") + "/daemon/ws" }

// Done delivers nil when all of it was played, else what was different.
func (r *Replay) Done() <-chan error { return r.done }

// Reached waits until n frames of a type have come as they were recorded. A report that
// still waits gives way to a newer one of its key, so a test that wants each of them holds
// its turn back as the recorded one was.
func (r *Replay) Reached(ctx context.Context, typ string, n int) error {
	for {
		r.mu.Lock()
		have, moved := r.got[typ], r.moved
		r.mu.Unlock()
		if have >= n {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d %s came: %w", have, n, typ, ctx.Err())
		}
	}
}

func (r *Replay) reached(typ string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.got[typ]++
	close(r.moved)
	r.moved = make(chan struct{})
}

var (
	// optional frames may be left out by a daemon; the rest of the recording goes on.
	optional = map[string]bool{"usage/report": true}
	// loose frames are not acknowledged and depend on no other: they may come at any time.
	loose = map[string]bool{"event/session-activity": true}
)

func (r *Replay) serve(w http.ResponseWriter, req *http.Request) {
	ws, err := websocket.Accept(w, req, &websocket.AcceptOptions{Subprotocols: []string{cp.Subprotocol}})
	if err != nil {
		return
	}
	defer func() { _ = ws.CloseNow() }()
	r.done <- r.play(req.Context(), ws)
	_, _, _ = ws.Read(req.Context()) // until the daemon goes
}

// play compares by a map of ids: an id stands for the same thing wherever it occurs.
func (r *Replay) play(ctx context.Context, ws *websocket.Conn) error {
	ids := map[string]string{} // recorded → real
	var apart, rest []line     // loose ones still to come; the others in their order
	for _, l := range r.lines {
		if loose[l.typ()] {
			apart = append(apart, l)
		} else if !optional[l.typ()] {
			rest = append(rest, l)
		}
	}
	// take reads one frame, and says whether it was the one that is wanted.
	take := func(want line) (bool, error) {
		_, data, err := ws.Read(ctx)
		if err != nil {
			return false, fmt.Errorf("waiting for %s: %w", want.typ(), err)
		}
		var got map[string]any
		if err := json.Unmarshal(data, &got); err != nil {
			return false, err
		}
		typ, _ := got["type"].(string)
		at := slices.IndexFunc(apart, func(l line) bool { return l.typ() == typ })
		inOrder := at < 0
		if !inOrder {
			want = apart[at]
			apart = slices.Delete(apart, at, at+1)
		}
		var recorded map[string]any
		if want.Send == nil {
			return false, fmt.Errorf("%s was not recorded", data)
		}
		if err := json.Unmarshal(want.Send, &recorded); err != nil {
			return false, err
		}
		if err := same("", recorded, got, ids); err != nil {
			return false, fmt.Errorf("%w\nrecorded %s\ngot      %s", err, want.Send, data)
		}
		r.reached(typ)
		return inOrder, nil
	}
	for i, l := range rest {
		if l.Recv != nil {
			text := string(l.Recv)
			for recorded, real := range ids {
				text = strings.ReplaceAll(text, recorded, real)
			}
			if err := ws.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
				return fmt.Errorf("frame %d: %w", i+1, err)
			}
			continue
		}
		for came := false; !came; {
			var err error
			if came, err = take(l); err != nil {
				return fmt.Errorf("frame %d: %w", i+1, err)
			}
		}
	}
	for len(apart) > 0 {
		if _, err := take(line{}); err != nil {
			return fmt.Errorf("at the end: %w", err)
		}
	}
	return nil
}

// own are members whose value is each daemon's and each moment's own.
var own = []string{"ts", "firedAt", "lastActivityAt", "durationMs", "revision", "cpu", "mem", "liveCursor", "observedModel", "features", "version", "models", "agentVersion"}

func same(path string, want, got any, ids map[string]string) error {
	switch w := want.(type) {
	case map[string]any:
		g, ok := got.(map[string]any)
		if !ok {
			return fmt.Errorf("%s: %T instead of an object", path, got)
		}
		for k, v := range w {
			if k == "observedModel" {
				continue
			}
			if _, ok := g[k]; !ok {
				return fmt.Errorf("%s.%s is missing", path, k)
			}
			if slices.Contains(own, k) {
				if reflect.TypeOf(v) != reflect.TypeOf(g[k]) {
					return fmt.Errorf("%s.%s: %T instead of %T", path, k, g[k], v)
				}
				continue
			}
			if err := same(path+"."+k, v, g[k], ids); err != nil {
				return err
			}
		}
		for k := range g {
			if _, ok := w[k]; !ok {
				return fmt.Errorf("%s.%s was not recorded", path, k)
			}
		}
	case []any:
		g, ok := got.([]any)
		if !ok || len(g) != len(w) {
			return fmt.Errorf("%s: %v instead of %v", path, got, want)
		}
		for i := range w {
			if err := same(fmt.Sprintf("%s[%d]", path, i), w[i], g[i], ids); err != nil {
				return err
			}
		}
	case string:
		g, ok := got.(string)
		if !ok {
			return fmt.Errorf("%s: %T instead of a string", path, got)
		}
		return sameText(path, w, g, ids)
	default:
		if !reflect.DeepEqual(want, got) {
			return fmt.Errorf("%s: %v instead of %v", path, got, want)
		}
	}
	return nil
}

// sameText compares texts that may hold ids: the parts between colons and underscores.
func sameText(path, want, got string, ids map[string]string) error {
	split := func(s string) []string {
		return strings.FieldsFunc(s, func(r rune) bool { return r == ':' || r == '_' })
	}
	w, g := split(want), split(got)
	if len(w) != len(g) {
		return fmt.Errorf("%s: %q instead of %q", path, got, want)
	}
	for i := range w {
		if !cp.ValidID(w[i]) {
			if w[i] != g[i] {
				return fmt.Errorf("%s: %q instead of %q", path, got, want)
			}
			continue
		}
		if real, known := ids[w[i]]; known && real != g[i] {
			return fmt.Errorf("%s: id %s instead of %s", path, g[i], real)
		}
		ids[w[i]] = g[i]
	}
	return nil
}
