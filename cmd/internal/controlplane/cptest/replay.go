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
	"testing"

	"github.com/coder/websocket"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

// Replay plays recorded exchanges: what the control plane sent is sent, and what the
// daemon sent is awaited, in the recorded order, ids and times aside.
type Replay struct {
	lines []line
	http  *httptest.Server
	done  chan error
}

type line struct {
	Send json.RawMessage `json:"send"`
	Recv json.RawMessage `json:"recv"`
}

// NewReplay reads the recordings and listens.
func NewReplay(t testing.TB, files ...string) *Replay {
	r := &Replay{done: make(chan error, 1)}
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

// optional frames may be left out by a daemon; the rest of the recording goes on.
var optional = map[string]bool{"usage/report": true}

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
	for i, l := range r.lines {
		if l.Recv != nil {
			text := string(l.Recv)
			for recorded, real := range ids {
				text = strings.ReplaceAll(text, recorded, real)
			}
			if err := ws.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
				return fmt.Errorf("line %d: %w", i+1, err)
			}
			continue
		}
		var want map[string]any
		if err := json.Unmarshal(l.Send, &want); err != nil {
			return err
		}
		if optional[want["type"].(string)] {
			continue
		}
		_, data, err := ws.Read(ctx)
		if err != nil {
			return fmt.Errorf("line %d: waiting for %s: %w", i+1, want["type"], err)
		}
		var got map[string]any
		if err := json.Unmarshal(data, &got); err != nil {
			return fmt.Errorf("line %d: %w", i+1, err)
		}
		if err := same("", want, got, ids); err != nil {
			return fmt.Errorf("line %d: %w\nrecorded %s\ngot      %s", i+1, err, l.Send, data)
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
