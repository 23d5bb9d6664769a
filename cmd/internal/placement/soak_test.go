package placement

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/controlplane/cptest"
)

// fleet is what the control plane of a soak says of its agents.
type fleet struct {
	mu    sync.Mutex
	uuids []string
	names map[string]string
	model map[string]*wish // nil: not placed
}

type wish struct {
	revision int
	value    string
}

func newFleet(many int) *fleet {
	f := &fleet{names: map[string]string{}, model: map[string]*wish{}}
	for i := range many {
		u := cp.NewID()
		f.uuids = append(f.uuids, u)
		f.names[u] = fmt.Sprintf("agent-%d", i)
	}
	return f
}

func (f *fleet) spec(uuid string) map[string]any {
	w := f.model[uuid]
	return spec(uuid, f.names[uuid], strconv.Itoa(w.revision), map[string]any{"env": map[string]string{"V": w.value}})
}

// change gives an agent a new revision and returns what an upsert of it says.
func (f *fleet) change(uuid, value string) map[string]any {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := f.model[uuid]
	if w == nil {
		w = &wish{revision: -1}
		f.model[uuid] = w
	}
	w.revision++
	w.value = value
	return map[string]any{"agentId": uuid, "spec": f.spec(uuid)}
}

func (f *fleet) remove(uuid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.model, uuid)
}

func (f *fleet) held() cp.RegisterOK {
	f.mu.Lock()
	defer f.mu.Unlock()
	var ok cp.RegisterOK
	for _, u := range f.uuids {
		if f.model[u] == nil {
			continue
		}
		raw, err := json.Marshal(f.spec(u))
		if err != nil {
			panic(err)
		}
		ok.Agents = append(ok.Agents, raw)
	}
	return ok
}

// counter takes numbered session records: each must come, in order, and may come again only
// while its acknowledgement may have been lost.
type counter struct {
	mu    sync.Mutex
	last  int
	wrong []string
}

func (c *counter) take(e cp.Envelope) (string, any, bool) {
	if e.Type == "event/session-sync" {
		var s cp.Session
		n, err := 0, json.Unmarshal(e.Payload, &s)
		if err == nil {
			n, err = strconv.Atoi(s.SessionID)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		switch {
		case err != nil, n != c.last && n != c.last+1:
			if len(c.wrong) < 10 {
				c.wrong = append(c.wrong, fmt.Sprintf("after %d came %q", c.last, s.SessionID))
			}
		default:
			c.last = n
		}
	}
	return "ack", cp.Ack{OK: true}, true
}

const (
	// remembered is more than how many requests a daemon remembers: its memory grows until so
	// many have come.
	remembered = 5000
	batch      = 500 // of them at a time
)

// TestSoak upserts, changes and removes agents at random while connections drop, some of
// them with a request under way that is repeated on the next one: nothing is applied twice,
// no report is lost, the daemon then holds what a model says, and its memory is flat.
// AGENTCONNECT_TEST_SOAK=5m makes it long, with 1,000 agents.
func TestSoak(t *testing.T) {
	length, many, pause := 8*time.Second, 60, 400*time.Millisecond
	long := os.Getenv("AGENTCONNECT_TEST_SOAK")
	if long != "" {
		var err error
		if length, err = time.ParseDuration(long); err != nil {
			t.Fatal(err)
		}
		many, pause = 1000, 2*time.Second
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d, %d agents, %v", seed, many, length)
	rnd := rand.New(rand.NewPCG(seed, 1))
	s := cptest.New(t)
	s.Keep(100)
	var told counter
	s.OnRequest(told.take)
	f := newFleet(many)
	s.HoldWhat(f.held)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, length+2*patience)

	var heap []uint64
	drops, asked, reported := 0, 0, 0
	inForce := func(uuid string) string {
		d.host.mu.Lock()
		defer d.host.mu.Unlock()
		if a := d.host.agents[f.names[uuid]]; a != nil {
			return a.Env["V"]
		}
		return ""
	}
	reconnected := func() *cptest.Conn {
		n := s.Conns()
		s.Drop()
		s.Until(ctx, "a new connection", func() bool { return s.Conns() > n })
		drops++
		return s.Ready(ctx)
	}
	ask := func(c *cptest.Conn, id string, payload map[string]any) error {
		e, err := c.AskAs(ctx, id, c.Epoch, "agent/upsert", payload)
		if err == nil && e.Type != "ack" {
			err = fmt.Errorf("answered with %s %s", e.Type, e.Payload)
		}
		return err
	}
	c := s.Ready(ctx)
	for _, u := range f.uuids {
		if err := ask(c, cp.NewID(), f.change(u, "first")); err != nil {
			t.Fatal(err)
		}
	}
	for range remembered / batch {
		var all sync.WaitGroup
		for range batch {
			all.Go(func() { _, _ = c.Ask(ctx, "cron/remove", map[string]any{"cronId": cp.NewID()}) })
		}
		all.Wait()
	}
	start := time.Now()
	nextDrop, nextLook := start.Add(pause), start
	for step := 0; time.Since(start) < length; step++ {
		u := f.uuids[rnd.IntN(many)]
		value := fmt.Sprintf("%d-%d", step, rnd.IntN(1000))
		dropping := time.Now().After(nextDrop)
		if dropping {
			nextDrop = time.Now().Add(pause/2 + rand.N(pause))
		}
		switch {
		case dropping && rnd.IntN(2) == 0:
			c = reconnected()
		case dropping:
			// The connection goes with the request under way; the control plane repeats it.
			id, payload := cp.NewID(), f.change(u, value)
			gone, cancel := context.WithCancel(ctx)
			waits := make(chan struct{})
			go func() { defer close(waits); _, _ = c.AskAs(gone, id, c.Epoch, "agent/upsert", payload) }()
			next := reconnected()
			cancel()
			<-waits
			c = next
			if err := ask(c, id, payload); err != nil {
				t.Fatal(err)
			}
			asked++
			if got := inForce(u); got != value {
				t.Fatalf("%s: acknowledged %q, in force is %q", f.names[u], value, got)
			}
		case rnd.IntN(20) == 0:
			f.remove(u)
			c.Tell("agent/remove", map[string]any{"agentId": u})
		default:
			if err := ask(c, cp.NewID(), f.change(u, value)); err != nil {
				t.Fatal(err)
			}
			asked++
			if got := inForce(u); got != value {
				t.Fatalf("%s: acknowledged %q, in force is %q", f.names[u], value, got)
			}
		}
		if rnd.IntN(10) == 0 {
			reported++
			id := strconv.Itoa(reported)
			if err := d.c.Report("session "+id, "event/session-sync", cp.Session{SessionID: id, AgentID: u, Phase: "end", TS: cp.Stamp(time.Now())}, true); err != nil {
				t.Fatal(err)
			}
		}
		if time.Now().After(nextLook) {
			nextLook = time.Now().Add(length / 40)
			// What waits differs from moment to moment.
			for d.c.Status().Waiting > 0 {
				request(t, ctx, c, "agent/detach", map[string]any{"agentId": cp.NewID(), "moveId": cp.NewID()})
			}
			heap = append(heap, heapNow())
		}
	}
	// The last registration tells all of it.
	c = reconnected()
	request(t, ctx, c, "agent/detach", map[string]any{"agentId": cp.NewID(), "moveId": cp.NewID()}) // everything before is done
	s.Until(ctx, "the last report", func() bool { told.mu.Lock(); defer told.mu.Unlock(); return told.last == reported })
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	if len(d.host.agents) != len(f.model) {
		t.Errorf("%d agents are held, the model has %d", len(d.host.agents), len(f.model))
	}
	for u, m := range f.model {
		if a := d.host.agents[f.names[u]]; a == nil || a.Env["V"] != m.value {
			t.Errorf("%s is %+v, the model has %q", f.names[u], a, m.value)
		}
	}
	if d.host.twice > 0 {
		t.Errorf("%d changes were applied twice", d.host.twice)
	}
	if len(told.wrong) > 0 {
		t.Errorf("reports: %v", told.wrong)
	}
	if faults := s.Faults(); len(faults) > 0 {
		t.Errorf("a real control plane would have refused: %v", faults)
	}
	t.Logf("%d connections, %d drops, %d requests answered, %d applied, %d reports, %d agents at the end", s.Conns(), drops, asked, d.host.puts, reported, len(f.model))
	if drops == 0 || asked == 0 {
		t.Error("nothing was tried")
	}
	checkFlat(t, heap)
}

func heapNow() uint64 {
	runtime.GC()
	runtime.GC() // what the first one's finalizers let go
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// checkFlat compares the last third of the looks at the heap with the first.
func checkFlat(t *testing.T, heap []uint64) {
	t.Helper()
	if len(heap) < 3 {
		t.Errorf("only %d looks at the heap", len(heap))
		return
	}
	third := len(heap) / 3
	median := func(list []uint64) uint64 { return slices.Sorted(slices.Values(list))[len(list)/2] }
	first, last := median(heap[:third]), median(heap[len(heap)-third:])
	t.Logf("heap: %d KiB in the first third, %d KiB in the last, of %d looks", first>>10, last>>10, len(heap))
	if last > first+first/10+(1<<20) {
		t.Errorf("the heap grew from %d to %d bytes: %v", first, last, heap)
	}
}
