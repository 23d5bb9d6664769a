package placement

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"agentconnect.md/sandbox/cmd/internal/agent"
	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/controlplane/cptest"
)

// host is a daemon without processes: it holds what it is told and can refuse.
type host struct {
	mu      sync.Mutex
	agents  map[string]*agent.Agent
	secrets map[string]map[string]string
	purged  []string
	stopped []string
	refuse  func(*agent.Agent) error
	turn    func(ctx context.Context, id string, t Turn) error
	taken   map[string]bool
	empty   bool
	puts    int
	twice   int // an agent was put as it was already
}

func newHost() *host {
	return &host{agents: map[string]*agent.Agent{}, secrets: map[string]map[string]string{}, taken: map[string]bool{}, empty: true}
}

func (h *host) Put(a *agent.Agent, secrets map[string]string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.refuse != nil {
		if err := h.refuse(a); err != nil {
			return err
		}
	}
	if err := a.Validate(); err != nil {
		delete(h.agents, a.ID)
		return err
	}
	if old := h.agents[a.ID]; old != nil && maps.Equal(old.Env, a.Env) && len(a.Env) > 0 {
		h.twice++
	}
	h.puts++
	h.agents[a.ID], h.secrets[a.ID] = a, secrets
	return nil
}

func (h *host) Drop(id string, purge bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.agents, id)
	if purge && len(h.purged) < 1000 {
		h.purged = append(h.purged, id)
	}
	return nil
}

func (h *host) Stop(id string, _ bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopped = append(h.stopped, id)
	return nil
}

func (h *host) Turn(ctx context.Context, id string, t Turn) error {
	h.mu.Lock()
	f := h.turn
	h.mu.Unlock()
	if f != nil {
		return f(ctx, id, t)
	}
	return t.Update(json.RawMessage(`{"update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"Hello."}}}`))
}

func (h *host) EmptyWorkspace(string) (bool, error) { return h.empty, nil }
func (h *host) Taken(id string) bool                { return h.taken[id] }
func (h *host) Declared(id string) bool             { return h.taken[id] }
func (h *host) Restart(string) error                { return errors.New("not in this test") }

type daemon struct {
	dir  string
	host *host
	p    *Placement
	c    *cp.Client
}

func newDaemon(t *testing.T, url string, timing cp.Timing) *daemon {
	t.Helper()
	d := &daemon{dir: t.TempDir(), host: newHost()}
	d.start(t, url, timing)
	return d
}

func (d *daemon) start(t *testing.T, url string, timing cp.Timing) (stop func()) {
	t.Helper()
	sessions, err := OpenSessions(filepath.Join(d.dir, "sessions.db"))
	if err != nil {
		t.Fatal(err)
	}
	d.p, err = New(Options{Host: d.host, Marks: DirMarks{filepath.Join(d.dir, "agents")}, Sessions: sessions})
	if err != nil {
		t.Fatal(err)
	}
	d.c = cp.New(cp.Options{
		URL: url, Key: func() (string, error) { return cptest.Key, nil }, Version: "0.1.0", Handler: d.p, Taken: d.p.Taken, Timing: timing,
		Register: func() cp.Register {
			return cp.Register{
				Host: "host-1", MaxAgents: 8, LocalState: d.p.Local(),
				Capabilities: cp.Capabilities{Runtimes: []string{"claude-acp"}, ACP: true, Features: []string{cp.FeatureSandbox, cp.FeatureConfigRevision, cp.FeatureVisibility}},
			}
		},
		Facts: func() cp.Facts {
			return cp.Facts{Runtimes: []cp.RuntimeFact{{Runtime: "claude-acp", Version: "1.0.0", Models: []string{"opus"}, ACPSupport: "full", ToolCalling: true}}}
		},
		Load: func() cp.Heartbeat { return cp.Heartbeat{Health: "ok"} },
	})
	d.p.Use(d.c)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.c.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			<-ended
			d.p.Close()
			sessions.Close()
		})
	}
	t.Cleanup(stop)
	return stop
}

var quick = cp.Timing{Dial: time.Minute, Ping: 50 * time.Millisecond, Silence: time.Minute, Resend: time.Minute, FirstWait: time.Millisecond, MostWait: 20 * time.Millisecond, Heartbeat: time.Hour}

// patience is how long a test waits for what must come.
const patience = 2 * time.Minute

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// Both recorded exchanges with a real control plane, one after the other on one connection.
func TestRecordedExchanges(t *testing.T) {
	r := cptest.NewReplay(t, "testdata/exchange-a.jsonl", "testdata/exchange-b.jsonl")
	ctx := within(t, patience)
	d := &daemon{dir: t.TempDir(), host: newHost()}
	d.host.turn = func(_ context.Context, _ string, turn Turn) error {
		// The recorded turn took a while: its start was known before it spoke, and its session
		// before it ended.
		if err := r.Reached(ctx, "cron/report", 1); err != nil {
			return err
		}
		err := turn.Update(json.RawMessage(`{"update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"Hello."}}}`))
		return errors.Join(err, r.Reached(ctx, "cron/report", 2))
	}
	d.start(t, r.URL(), cp.Timing{Heartbeat: time.Hour, Resend: time.Hour})
	select {
	case err := <-r.Done():
		if err != nil {
			t.Fatal(err)
		}
	case <-ctx.Done():
		t.Fatal("the recording was not played to its end")
	}
	a := d.host.agents["demo"]
	if a == nil || !a.Sandboxed() || a.Env["MODE"] != "demo" || a.Runtime != "claude-acp" {
		t.Errorf("the agent is %+v", a)
	}
	if d.host.secrets["demo"]["TOKEN"] != "example" || a.Env["TOKEN"] != "" {
		t.Errorf("its secrets are %v, its environment %v", d.host.secrets["demo"], a.Env)
	}
}

func spec(uuid, name, revision string, more map[string]any) map[string]any {
	s := map[string]any{"agentId": uuid, "orgId": "org_example", "name": name, "runtime": "claude-acp", "configRevision": revision, "runInSandbox": true, "env": map[string]string{}, "secrets": map[string]string{}, "displayName": nil}
	maps.Copy(s, more)
	return s
}

func upsert(t *testing.T, ctx context.Context, c *cptest.Conn, s map[string]any) cp.Ack {
	t.Helper()
	return request(t, ctx, c, "agent/upsert", map[string]any{"agentId": s["agentId"], "spec": s})
}

func request(t *testing.T, ctx context.Context, c *cptest.Conn, typ string, payload any) cp.Ack {
	t.Helper()
	e, err := c.Ask(ctx, typ, payload)
	if err != nil {
		t.Fatal(err)
	}
	if e.Type != "ack" {
		t.Fatalf("%s was answered with %s %s", typ, e.Type, e.Payload)
	}
	var a cp.Ack
	if err := json.Unmarshal(e.Payload, &a); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestRevisions(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid := cp.NewID()
	for i, step := range []struct {
		revision, mode string
		ok             bool
		want           string // in force after it
	}{
		{"0", "one", true, "one"},
		{"0", "one", true, "one"},    // the same again: nothing
		{"0", "other", false, "one"}, // conflict
		{"5", "two", true, "two"},
		{"4", "old", true, "two"}, // stale: acknowledged, not applied
		{"18446744073709551615", "three", true, "three"},
	} {
		a := upsert(t, ctx, c, spec(uuid, "Demo Agent", step.revision, map[string]any{"env": map[string]string{"MODE": step.mode}}))
		if a.OK != step.ok || !a.OK && a.Reason == "" {
			t.Errorf("step %d: %+v", i, a)
		}
		if got := d.host.agents["demo-agent"].Env["MODE"]; got != step.want {
			t.Errorf("step %d: in force %q, want %q", i, got, step.want)
		}
	}
	for _, bad := range []string{"-1", "1.5", "x", "18446744073709551616", "01", "", " 1"} {
		e, err := c.Ask(ctx, "agent/upsert", map[string]any{"agentId": uuid, "spec": spec(uuid, "demo-agent", bad, nil)})
		if err != nil || e.Type != "error" || !strings.Contains(string(e.Payload), "BAD_PAYLOAD") {
			t.Errorf("revision %q: %s %s %v", bad, e.Type, e.Payload, err)
		}
	}
	if f := s.Faults(); len(f) > 0 {
		t.Error(f)
	}
}

func TestWhatTheLocalPolicyRefusesIsReportedInWordsAndNotRun(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	d.host.refuse = func(a *agent.Agent) error {
		if !a.Sandboxed() {
			return errors.New("the sandbox is required here")
		}
		return nil
	}
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid, cron := cp.NewID(), cp.NewID()
	a := upsert(t, ctx, c, spec(uuid, "bare", "1", map[string]any{"runInSandbox": false}))
	if a.OK || !strings.Contains(a.Reason, "required") {
		t.Errorf("answered %+v", a)
	}
	request(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "0 3 * * *", "timezone": "UTC", "trigger": "x", "enabled": true})
	if a := request(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); a.OK || !strings.Contains(a.Reason, "required") {
		t.Errorf("a turn of a refused agent: %+v", a)
	}
	if a := upsert(t, ctx, c, spec(uuid, "bare", "2", nil)); !a.OK {
		t.Errorf("after the change: %+v", a)
	}
	if a := request(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); !a.OK {
		t.Errorf("a turn after the change: %+v", a)
	}
}

func TestPausedAgentTakesNoTurn(t *testing.T) {
	s := cptest.New(t)
	newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid, cron := cp.NewID(), cp.NewID()
	upsert(t, ctx, c, spec(uuid, "a", "1", map[string]any{"pause": true}))
	request(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "", "trigger": "x", "enabled": false})
	if a := request(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); a.OK || !strings.Contains(a.Reason, "paused") {
		t.Errorf("answered %+v", a)
	}
	upsert(t, ctx, c, spec(uuid, "a", "2", map[string]any{"pause": false}))
	if a := request(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); !a.OK {
		t.Errorf("answered %+v", a)
	}
	s.Until(ctx, "a finished run", func() bool {
		f := s.Frames("cron/report")
		return len(f) > 0 && strings.Contains(string(f[len(f)-1].Payload), `"success"`)
	})
}

func TestWorkspaceFromARepository(t *testing.T) {
	s := cptest.New(t)
	s.Member("gitCommitIdentity", map[string]any{"name": "Ada", "email": "ada@example.org"})
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid := cp.NewID()
	for i, step := range []struct {
		workspace map[string]any
		refused   string // a word of why
		url       string
		rules     int
	}{
		{map[string]any{"mode": "scratch"}, "", "", 0},
		{map[string]any{"mode": "github", "gitRepo": "https://github.com/acme/app.git", "branch": "main", "agentDir": "sub", "isolation": "session"}, "", "https://github.com/acme/app", 1},
		{map[string]any{"mode": "gitlab", "gitRepo": "https://gitlab.com/g/s/app", "projectId": 7, "additionalRepos": []any{map[string]any{"repoFullName": "g/other"}}}, "", "https://gitlab.com/g/s/app", 2},
		{map[string]any{"mode": "github", "gitRepo": "git@github.com:acme/app"}, "cannot be made", "", 0},
		{map[string]any{"mode": "github", "gitRepo": "https://x:canary@github.com/acme/app"}, "user or a password", "", 0},
		{map[string]any{"mode": "github", "gitRepo": "https://x:canary/1@github.com/acme/app"}, "no address", "", 0},
		{map[string]any{"mode": "github", "gitRepo": "https://github.com/acme/app?token=canary"}, "cannot be made", "", 0},
		{map[string]any{"mode": "github", "gitRepo": "file:///etc"}, "cannot be made", "", 0},
		{map[string]any{"mode": "github", "gitRepo": "https://github.com/acme/app", "branch": "--upload-pack=x"}, "dash", "", 0},
		{map[string]any{"mode": "svn"}, "not known", "", 0},
	} {
		a := upsert(t, ctx, c, spec(uuid, "a", fmt.Sprint(i), map[string]any{"workspace": step.workspace}))
		if a.OK != (step.refused == "") || !strings.Contains(a.Reason, step.refused) || strings.Contains(a.Reason, "canary") {
			t.Errorf("%v: answered %+v", step.workspace, a)
		}
		conf := d.host.agents["a"]
		if step.refused != "" {
			if conf != nil {
				t.Errorf("%v: it is held", step.workspace)
			}
			continue
		}
		url := ""
		if conf.Checkout != nil {
			url = conf.Checkout.URL
		}
		if url != step.url || len(conf.GitCredentials) != step.rules || (conf.Env["GIT_AUTHOR_NAME"] == "Ada") != (step.rules > 0) {
			t.Errorf("%v: %+v %+v %v", step.workspace, conf.Checkout, conf.GitCredentials, conf.Env)
		}
	}
}

func TestScheduleThatCannotBeReadIsAnError(t *testing.T) {
	s := cptest.New(t)
	newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	for _, schedule := range []string{"", "never", "* * *", "99 * * * *", "TZ=", "CRON_TZ=UTC", "@every", strings.Repeat("*", 10_000)} {
		e, err := c.Ask(ctx, "cron/upsert", map[string]any{"cronId": cp.NewID(), "agentId": cp.NewID(), "schedule": schedule, "timezone": "UTC", "trigger": "x", "enabled": true})
		if err != nil || e.Type != "error" || !strings.Contains(string(e.Payload), "BAD_PAYLOAD") {
			t.Errorf("%.20q: %s %s %v", schedule, e.Type, e.Payload, err)
		}
	}
}

func TestMoveFencesTheAgentUntilTheRightActivate(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid, cron, move := cp.NewID(), cp.NewID(), cp.NewID()
	// The first step of every placement.
	if a := request(t, ctx, c, "agent/detach", map[string]any{"agentId": uuid, "moveId": move}); !a.OK {
		t.Errorf("detach of an unknown agent: %+v", a)
	}
	upsert(t, ctx, c, spec(uuid, "mover", "1", nil))
	request(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "UTC", "trigger": "x", "enabled": true})
	d.host.empty = false
	if a := request(t, ctx, c, "agent/detach", map[string]any{"agentId": uuid, "moveId": move, "requireEmptyWorkspace": true}); a.OK {
		t.Error("a workspace with something in it counted as empty")
	}
	if a := request(t, ctx, c, "agent/detach", map[string]any{"agentId": uuid, "moveId": move}); !a.OK {
		t.Errorf("detach: %+v", a)
	}
	if !slices.Contains(d.host.stopped, "mover") {
		t.Error("the agent was not stopped")
	}
	if a := request(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); a.OK {
		t.Error("a turn of a fenced agent")
	}
	if a := upsert(t, ctx, c, spec(uuid, "mover", "2", nil)); a.OK {
		t.Error("a fenced agent was changed")
	}
	if m, err := (DirMarks{filepath.Join(d.dir, "agents")}).Read("mover"); err != nil || m.MoveID != move {
		t.Errorf("the fence on disk: %+v, %v", m, err)
	}
	if st := d.p.Local().StagedAgents; len(st) != 1 || st[0].MoveID != move {
		t.Errorf("register would say %+v", st)
	}
	wrong := map[string]any{"agentId": uuid, "spec": spec(uuid, "mover", "3", nil), "integrations": []any{}, "crons": []any{}, "moveId": cp.NewID()}
	if a := request(t, ctx, c, "agent/activate", wrong); a.OK {
		t.Error("another move's activate lifted the fence")
	}
	wrong["moveId"] = move
	if a := request(t, ctx, c, "agent/activate", wrong); !a.OK {
		t.Errorf("activate: %+v", a)
	}
	if a := request(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); a.OK || !strings.Contains(a.Reason, "no such cron") {
		t.Errorf("the bundle had no cron: %+v", a)
	}
}

func TestRestartOfTheDaemonKeepsTheMarksAndNoSecret(t *testing.T) {
	s := cptest.New(t)
	d := &daemon{dir: t.TempDir(), host: newHost()}
	stop := d.start(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid := cp.NewID()
	upsert(t, ctx, c, spec(uuid, "keeper", "1", map[string]any{"secrets": map[string]string{"TOKEN": "canary-4711"}, "env": map[string]string{"V": "canary-4712"}}))
	stop()
	err := filepath.WalkDir(d.dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if strings.Contains(string(data), "canary") {
			t.Errorf("%s holds what the control plane said in confidence", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	n := len(s.Frames("register"))
	d.start(t, s.URL(), quick)
	reg := s.Wait(ctx, "register", n+1)
	if !strings.Contains(string(reg.Payload), fmt.Sprintf(`"agentId":%q,"origin":"cp"`, uuid)) {
		t.Errorf("register says %s", reg.Payload)
	}
}

// A turn that the daemon's end cut off runs on nowhere: the next daemon says so, and its session
// goes when its time is over like any other.
func TestTurnThatTheDaemonDidNotLiveToEndIsReportedByTheNext(t *testing.T) {
	s := cptest.New(t)
	d := &daemon{dir: t.TempDir(), host: newHost()}
	stop := d.start(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid, cron := cp.NewID(), cp.NewID()
	agent := spec(uuid, "worker", "1", nil)
	upsert(t, ctx, c, agent)
	request(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "UTC", "trigger": "x", "enabled": true})
	d.host.turn = func(ctx context.Context, _ string, turn Turn) error {
		if err := turn.Update(json.RawMessage(`{}`)); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}
	request(t, ctx, c, "cron/run", map[string]any{"cronId": cron})
	var begun cp.Session
	if err := json.Unmarshal(s.Wait(ctx, "event/session-sync", 1).Payload, &begun); err != nil || begun.Status != "running" {
		t.Fatalf("%+v, %v", begun, err)
	}
	reports := len(s.Frames("cron/report"))
	s.Hold(cp.RegisterOK{Agents: []json.RawMessage{raw(t, agent)}})
	stop()
	d.start(t, s.URL(), quick)
	var ended cp.Session
	if err := json.Unmarshal(s.Wait(ctx, "event/session-sync", 2).Payload, &ended); err != nil || ended.SessionID != begun.SessionID || ended.Phase != "end" || ended.Status != "failed" || ended.Summary == "" {
		t.Errorf("the next daemon says %+v, %v", ended, err)
	}
	var report cp.CronReport
	s.Until(ctx, "the run is reported", func() bool {
		for _, f := range s.Frames("cron/report")[reports:] {
			if json.Unmarshal(f.Payload, &report) == nil && report.Status == "failed" {
				return true
			}
		}
		return false
	})
	if report.CronID != cron || report.SessionID != begun.SessionID || report.FiredAt != begun.TS {
		t.Errorf("the run of %+v is reported as %+v", begun, report)
	}
	gone, err := d.p.o.Sessions.Purge(time.Now().Add(time.Hour))
	if err != nil || !slices.Equal(gone[uuid], []string{begun.SessionID}) {
		t.Errorf("it is not purged: %v, %v", gone, err)
	}
}

// A turn ended while the control plane was away, and so did the daemon: the next one tells of both,
// until it is heard, and then no more.
func TestTurnThatEndedWithNobodyToTellIsReportedByTheNextDaemon(t *testing.T) {
	s := cptest.New(t)
	d := &daemon{dir: t.TempDir(), host: newHost()}
	stop := d.start(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid, cron := cp.NewID(), cp.NewID()
	agent := spec(uuid, "worker", "1", nil)
	upsert(t, ctx, c, agent)
	request(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "UTC", "trigger": "x", "enabled": true})
	began, goOn := make(chan struct{}), make(chan struct{})
	d.host.turn = func(context.Context, string, Turn) error {
		close(began)
		<-goOn
		return nil
	}
	request(t, ctx, c, "cron/run", map[string]any{"cronId": cron})
	<-began
	s.OnAuth(func(*cptest.Conn) bool { return false }) // away
	s.Drop()
	close(goOn)
	for d.p.Running() > 0 {
		runtime.Gosched()
	}
	s.Hold(cp.RegisterOK{Agents: []json.RawMessage{raw(t, agent)}})
	stop()
	stop = d.start(t, s.URL(), quick) // and it ends again before it is heard
	stop()
	s.OnAuth(nil)
	stop = d.start(t, s.URL(), quick)
	var ended cp.Session
	if err := json.Unmarshal(s.Wait(ctx, "event/session-sync", 1).Payload, &ended); err != nil || ended.AgentID != uuid || ended.Phase != "end" || ended.Status != "completed" {
		t.Errorf("the next daemon says %+v, %v", ended, err)
	}
	var report cp.CronReport
	s.Until(ctx, "the run is reported", func() bool {
		for _, f := range s.Frames("cron/report") {
			if json.Unmarshal(f.Payload, &report) == nil && report.Status != "" {
				return true
			}
		}
		return false
	})
	if report.CronID != cron || report.Status != "success" || report.SessionID != ended.SessionID || report.DurationMS == nil {
		t.Errorf("the run is reported as %+v", report)
	}
	for d.c.Status().Waiting > 0 && ctx.Err() == nil { // until a ping came back
		runtime.Gosched()
	}
	stop()
	n := len(s.Frames("event/session-sync"))
	d.start(t, s.URL(), quick)
	s.Until(ctx, "an answer of the next", func() bool { return len(d.p.List()) == 1 && d.c.Status().State == cp.StateReady })
	if left, err := d.p.o.Sessions.Untold(); err != nil || len(left) > 0 || len(s.Frames("event/session-sync")) != n {
		t.Errorf("it is told again and again: %+v, %v", left, err)
	}
}

// An agent is removed in the middle of a turn: the turn ends, and what it says in doing so does not
// stay on the disk.
func TestNothingIsKeptOfATurnWhoseAgentWasRemoved(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid, cron := cp.NewID(), cp.NewID()
	began := make(chan struct{})
	d.host.turn = func(ctx context.Context, _ string, turn Turn) error {
		close(began)
		<-ctx.Done()
		if err := turn.Update(json.RawMessage(`{"update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"last words"}}}`)); err != nil {
			return err
		}
		return context.Canceled
	}
	upsert(t, ctx, c, spec(uuid, "worker", "1", nil))
	request(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "UTC", "trigger": "x", "enabled": true})
	request(t, ctx, c, "cron/run", map[string]any{"cronId": cron})
	<-began
	c.Tell("agent/remove", map[string]any{"agentId": uuid})
	var report cp.CronReport
	s.Until(ctx, "the end of the run", func() bool {
		for _, f := range s.Frames("cron/report") {
			if json.Unmarshal(f.Payload, &report) == nil && report.Status != "" {
				return true
			}
		}
		return false
	})
	if report.Status != "failed" || report.Reason != "the turn was cancelled" {
		t.Errorf("reported %+v", report)
	}
	for d.p.Running() > 0 {
		runtime.Gosched()
	}
	err := d.p.o.Sessions.db.View(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketSessions, bucketMessages, bucketBodies} {
			if k, v := tx.Bucket(name).Cursor().First(); k != nil {
				t.Errorf("%s: %s is kept: %s", name, k, v)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// A drain counts for the connection that it came on: who is connected anew is to work again.
func TestDrainEndsWithTheConnection(t *testing.T) {
	s := cptest.New(t)
	newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid, cron := cp.NewID(), cp.NewID()
	agent := spec(uuid, "worker", "1", nil)
	upsert(t, ctx, c, agent)
	daily := map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "UTC", "trigger": "x", "enabled": true}
	request(t, ctx, c, "cron/upsert", daily)
	if e, err := c.Ask(ctx, "daemon/drain", map[string]any{"scope": map[string]any{"kind": "daemon"}, "deadline": cp.Stamp(time.Now())}); err != nil || e.Type != "drain/done" {
		t.Fatalf("%s, %v", e.Type, err)
	}
	if a := request(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); a.OK || !strings.Contains(a.Reason, "draining") {
		t.Errorf("while it drains: %+v", a)
	}
	s.Hold(cp.RegisterOK{Agents: []json.RawMessage{raw(t, agent)}, Crons: []json.RawMessage{raw(t, daily)}})
	s.Drop()
	s.Wait(ctx, "register", 2)
	c = s.Ready(ctx)
	if a := request(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); !a.OK {
		t.Errorf("connected anew: %+v", a)
	}
}

// Each daemon of a set is told of all that the set has: without duties, none of it is this one's.
func TestInAMemberSetNothingIsServed(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid, other, cron := cp.NewID(), cp.NewID(), cp.NewID()
	own, theirs := spec(uuid, "own", "1", nil), spec(other, "theirs", "1", nil)
	upsert(t, ctx, c, own)
	request(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "UTC", "trigger": "x", "enabled": true})
	s.Hold(cp.RegisterOK{Agents: []json.RawMessage{raw(t, theirs)}})
	s.Set("pool")
	s.Drop()
	s.Wait(ctx, "register", 2)
	c = s.Ready(ctx)
	for typ, payload := range map[string]any{"cron/run": map[string]any{"cronId": cron}, "agent/upsert": map[string]any{"agentId": other, "spec": theirs}} {
		if a := request(t, ctx, c, typ, payload); a.OK || !strings.Contains(a.Reason, "member set") {
			t.Errorf("%s: %+v", typ, a)
		}
	}
	if list := d.p.List(); len(list) != 1 || list[0].Name != "own" {
		t.Errorf("it holds %+v", list)
	}
	s.Set("")
	s.Hold(cp.RegisterOK{Agents: []json.RawMessage{raw(t, own), raw(t, theirs)}})
	s.Drop()
	s.Wait(ctx, "register", 3)
	s.Until(ctx, "both agents", func() bool { return len(d.p.List()) == 2 })
}

// Only the turns of the agent that moves away are ended.
func TestMoveOfOneAgentEndsNoTurnOfAnother(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	began, ended := make(chan string, 2), make(chan string, 2)
	goOn := make(chan struct{})
	d.host.turn = func(ctx context.Context, id string, _ Turn) error {
		began <- id
		select {
		case <-ctx.Done():
		case <-goOn:
		}
		ended <- fmt.Sprint(id, " ", ctx.Err())
		return ctx.Err()
	}
	agents := map[string]string{}
	for _, name := range []string{"mover", "stayer"} {
		uuid, cron := cp.NewID(), cp.NewID()
		agents[name] = uuid
		upsert(t, ctx, c, spec(uuid, name, "1", nil))
		request(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "UTC", "trigger": "x", "enabled": true})
		request(t, ctx, c, "cron/run", map[string]any{"cronId": cron})
		<-began
		request(t, ctx, c, "cron/remove", map[string]any{"cronId": cron}) // its turn goes on
	}
	request(t, ctx, c, "agent/detach", map[string]any{"agentId": agents["mover"], "moveId": cp.NewID(), "discardActiveTurns": true})
	if got := <-ended; got != "mover context canceled" {
		t.Errorf("ended first: %s", got)
	}
	close(goOn)
	if got := <-ended; got != "stayer <nil>" {
		t.Errorf("the other agent's turn ended as %s", got)
	}
}

func raw(t *testing.T, v any) json.RawMessage {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestIDsAreSlugsThatNobodyHas(t *testing.T) {
	p := &Placement{o: Options{Host: &host{taken: map[string]bool{"demo": true, "demo-2": true}}}, agents: map[string]*placed{}}
	for name, want := range map[string]string{"Demo": "demo-3", "Ünïcode näme": "n-code-n-me", "---": "agent", "": "agent", "../../etc": "etc", "a.b@c": "a-b-c", strings.Repeat("x", 100): strings.Repeat("x", 56)} {
		if got := p.freeID(name); got != want || agent.ValidateID(got) != nil {
			t.Errorf("freeID(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestHistoryPages(t *testing.T) {
	st, err := OpenSessions(filepath.Join(t.TempDir(), "s.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	uuid, other := cp.NewID(), cp.NewID()
	if err := st.Put(cp.Session{SessionID: "s", AgentID: uuid, Phase: "start"}); err != nil {
		t.Fatal(err)
	}
	for i := range int64(100) {
		if err := st.Write("s", []cp.Message{{Seq: i + 1, Text: fmt.Sprint(i + 1)}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	seqs := func(p cp.HistoryPage) (out []int64) {
		for _, m := range p.Messages {
			out = append(out, m.Seq)
		}
		return out
	}
	// Backwards through all of it, each once.
	var all []int64
	cursor := ""
	for range 20 {
		p, err := st.History(cp.HistoryRequest{AgentID: uuid, SessionID: "s", Limit: 9, Cursor: cursor})
		if err != nil {
			t.Fatal(err)
		}
		all = append(seqs(p), all...)
		if cursor = p.NextCursor; cursor == "" {
			break
		}
	}
	if len(all) != 100 || !slices.IsSorted(all) {
		t.Errorf("backwards: %v", all)
	}
	p, err := st.History(cp.HistoryRequest{AgentID: uuid, SessionID: "s", Limit: 50})
	if err != nil || p.LiveCursor != "100" || seqs(p)[49] != 100 {
		t.Errorf("the newest: %v %v", p.LiveCursor, err)
	}
	p, err = st.History(cp.HistoryRequest{AgentID: uuid, SessionID: "s", Limit: 10, After: "85"})
	if err != nil || !p.LiveMore || p.LiveCursor != "95" || seqs(p)[0] != 86 {
		t.Errorf("after 85: %v %v %v", seqs(p), p.LiveCursor, err)
	}
	p, err = st.History(cp.HistoryRequest{AgentID: uuid, SessionID: "s", Limit: 10, After: "100"})
	if err != nil || p.LiveMore || p.LiveCursor != "100" || len(p.Messages) != 0 {
		t.Errorf("after the end: %+v %v", p, err)
	}
	// Another agent's question is not answered from this one's session.
	p, err = st.History(cp.HistoryRequest{AgentID: other, SessionID: "s", Limit: 10})
	if err != nil || len(p.Messages) != 0 {
		t.Errorf("another agent read %v %v", seqs(p), err)
	}
	if err := st.Put(cp.Session{SessionID: "s", AgentID: other}); err == nil {
		t.Error("another agent took the session over")
	}
}

func TestLongMessagesMakeShorterPages(t *testing.T) {
	st, err := OpenSessions(filepath.Join(t.TempDir(), "s.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	uuid := cp.NewID()
	if err := st.Put(cp.Session{SessionID: "s", AgentID: uuid}); err != nil {
		t.Fatal(err)
	}
	for i := range int64(20) {
		if err := st.Write("s", []cp.Message{{Seq: i + 1, Text: strings.Repeat("\x01", MaxText/6)}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	p, err := st.History(cp.HistoryRequest{AgentID: uuid, SessionID: "s", Limit: 200})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(p)
	if err != nil || len(raw) > cp.MaxReply || p.NextCursor == "" || len(p.Messages) == 0 {
		t.Errorf("%d bytes, %d messages, next %q, %v", len(raw), len(p.Messages), p.NextCursor, err)
	}
}

// A runtime names its tool calls as it likes; a name that no page could carry would keep the
// whole session from whoever reads it, and stay in memory with each call.
func TestAToolCallWithAnEndlessIDDoesNotHideItsSession(t *testing.T) {
	st, err := OpenSessions(filepath.Join(t.TempDir(), "s.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	session := cp.Session{SessionID: "s", AgentID: cp.NewID()}
	if err := st.Put(session); err != nil {
		t.Fatal(err)
	}
	tr := newTranscript(st, session, "demo")
	for _, id := range []string{"one", strings.Repeat("x", 2*cp.MaxReply), "two"} {
		update := `{"update":{"sessionUpdate":"tool_call","toolCallId":"` + id + `","title":"t"}}`
		if err := tr.update(json.RawMessage(update), time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	p, err := st.History(cp.HistoryRequest{AgentID: session.AgentID, SessionID: "s", Limit: 200})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(p)
	if err != nil || len(raw) > cp.MaxReply || len(p.Messages) != 2 || p.NextCursor != "" {
		t.Errorf("%d bytes, %d messages, next %q, %v", len(raw), len(p.Messages), p.NextCursor, err)
	}
}

// A text may be such that it takes six times its length in a message: no page would carry it, and
// whoever reads the session would see nothing of it.
func TestATextOfControlCharactersDoesNotHideItsSession(t *testing.T) {
	for name, word := range map[string]string{"control characters": "\x01", "quotes": `"`, "brackets": "<", "separators": "\u2028"} {
		st, tr := newSession(t)
		update := func(kind, text string) {
			t.Helper()
			content, err := json.Marshal(text)
			if err != nil {
				t.Fatal(err)
			}
			if err := tr.update(json.RawMessage(`{"update":{"sessionUpdate":"`+kind+`","toolCallId":"1","title":"t","content":{"type":"text","text":`+string(content)+`}}}`), time.Now()); err != nil {
				t.Fatal(err)
			}
		}
		update("agent_message_chunk", strings.Repeat(word, 2*MaxText))
		update("tool_call", "")
		update("agent_message_chunk", "the end")
		if err := tr.end(time.Now()); err != nil {
			t.Fatal(err)
		}
		// Read as a console does that follows, and as one that opens it.
		seen := map[int64]bool{}
		for _, h := range []cp.HistoryRequest{{After: "0"}, {}} {
			h.AgentID, h.SessionID, h.Limit = tr.session.AgentID, "s", 200
			for pages := 0; ; pages++ {
				p, err := st.History(h)
				if err != nil || len(p.Messages) == 0 || pages > 3 {
					t.Fatalf("%s: page %d of %+v has %d messages, %v", name, pages, h, len(p.Messages), err)
				}
				var raw bytes.Buffer
				enc := json.NewEncoder(&raw)
				enc.SetEscapeHTML(false) // as the wire has it
				if err := enc.Encode(p); err != nil || raw.Len() > cp.MaxReply {
					t.Errorf("%s: a page of %d bytes, %v", name, raw.Len(), err)
				}
				for _, m := range p.Messages {
					seen[m.Seq] = true
				}
				if h.After != "" && p.LiveMore {
					h.After = p.LiveCursor
				} else if p.NextCursor != "" {
					h.Cursor = p.NextCursor
				} else {
					break
				}
			}
			if len(seen) != 3 {
				t.Errorf("%s: of 3 messages %d were read by %+v", name, len(seen), h)
			}
			clear(seen)
		}
	}
}

func TestVisibilityGoesByRevision(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	if err := d.p.o.Sessions.Put(cp.Session{SessionID: "s", AgentID: cp.NewID()}); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		rev  int
		want string
	}{{2, "applied"}, {1, "superseded"}, {3, "applied"}} {
		e, err := c.Ask(ctx, "session/visibility", map[string]any{"sessionId": "s", "visibility": "private", "visibilityRev": step.rev})
		if err != nil || e.Type != "session/visibility/ok" || !strings.Contains(string(e.Payload), step.want) {
			t.Errorf("revision %d: %s %s %v", step.rev, e.Type, e.Payload, err)
		}
	}
}

// The daemon does nothing else for a control plane meanwhile, and says no status.
func TestASnapshotOfVisibilitiesIsOneWrite(t *testing.T) {
	st, err := OpenSessions(filepath.Join(t.TempDir(), "s.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if err := st.Put(cp.Session{SessionID: "s7", AgentID: cp.NewID()}); err != nil {
		t.Fatal(err)
	}
	var entries []cp.Visibility
	for i := range 1000 {
		entries = append(entries, cp.Visibility{SessionID: fmt.Sprint("s", i), Visibility: "private", Rev: 1})
	}
	payload := raw(t, cp.VisibilitySnapshot{Entries: entries})
	before := st.db.Stats()
	r, fe := st.answer(cp.Envelope{Type: "session/visibility/snapshot", Payload: payload}, nil)
	after := st.db.Stats()
	if fe != nil || !r.Payload.(cp.Ack).OK {
		t.Fatalf("%+v, %v", r, fe)
	}
	if n := after.TxStats.GetWrite() - before.TxStats.GetWrite(); n > 10 {
		t.Errorf("%d writes for one snapshot", n)
	}
	if list, err := st.List("", func(string) bool { return true }); err != nil || len(list) != 0 {
		t.Errorf("what is private is listed: %v, %v", list, err)
	}
}

func TestSessionsAreReadOfAgentsPlacedHereAndPrivateOnesAreNotListed(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	here, gone := cp.NewID(), cp.NewID()
	upsert(t, ctx, c, spec(here, "here", "1", nil))
	for id, uuid := range map[string]string{"open": here, "secret": here, "left": gone} {
		if err := d.p.o.Sessions.Put(cp.Session{SessionID: id, AgentID: uuid, Phase: "end", TS: cp.Stamp(time.Now())}); err != nil {
			t.Fatal(err)
		}
		if err := d.p.o.Sessions.Write(id, []cp.Message{{Seq: 1, Text: "words of " + id, Kind: "text", TS: "1", Sender: "x"}}, map[string]json.RawMessage{"t": json.RawMessage(`{"of":"` + id + `"}`)}); err != nil {
			t.Fatal(err)
		}
	}
	ask := func(typ string, payload any) string {
		t.Helper()
		e, err := c.Ask(ctx, typ, payload)
		if err != nil {
			t.Fatal(err)
		}
		return e.Type + " " + string(e.Payload)
	}
	ask("session/visibility", map[string]any{"sessionId": "secret", "agentId": here, "visibility": "private", "visibilityRev": 1})
	ask("session/visibility", map[string]any{"sessionId": "open", "agentId": gone, "visibility": "private", "visibilityRev": 1}) // another agent's
	for _, agent := range []map[string]any{{}, {"agentId": here}} {
		if got := ask("session/list", agent); !strings.Contains(got, `"open"`) || strings.Contains(got, "secret") || strings.Contains(got, "left") {
			t.Errorf("listed for %v: %s", agent, got)
		}
	}
	// Whoever the control plane lets see it asks by its id.
	if got := ask("session/history", map[string]any{"agentId": here, "sessionId": "secret"}); !strings.Contains(got, "words of secret") {
		t.Errorf("by its id: %s", got)
	}
	for _, agent := range []string{gone, here} {
		if got := ask("session/history", map[string]any{"agentId": agent, "sessionId": "left"}); strings.Contains(got, "words") {
			t.Errorf("of an agent that is not placed here: %s", got)
		}
		if got := ask("session/tool-body", map[string]any{"agentId": agent, "sessionId": "left", "toolCallId": "t", "offset": 0}); !strings.HasPrefix(got, "error") {
			t.Errorf("a body of an agent that is not placed here: %s", got)
		}
	}
	// With the agent go its sessions.
	c.Tell("agent/remove", map[string]any{"agentId": here})
	upsert(t, ctx, c, spec(here, "here", "1", nil))
	if got := ask("session/history", map[string]any{"agentId": here, "sessionId": "open"}); strings.Contains(got, "words") {
		t.Errorf("after the agent was removed: %s", got)
	}
	if f := s.Faults(); len(f) > 0 {
		t.Error(f)
	}
}

func TestPermissionIsAskedForAndDecided(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	got := make(chan string, 1)
	d.host.turn = func(ctx context.Context, _ string, turn Turn) error {
		got <- turn.Permission(ctx, "rm -rf build", "yes", "no")
		return nil
	}
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid, cron := cp.NewID(), cp.NewID()
	upsert(t, ctx, c, spec(uuid, "a", "1", nil))
	request(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "UTC", "trigger": "x", "enabled": true})
	request(t, ctx, c, "cron/run", map[string]any{"cronId": cron})
	s.Wait(ctx, "event/session-sync", 1) // the question stands before the session is announced, or soon after
	var page struct {
		Requests []struct{ ID, Command, Status string }
	}
	for len(page.Requests) == 0 {
		e, err := c.Ask(ctx, "agent/permission-requests", map[string]any{"agentId": uuid, "limit": 10})
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(e.Payload, &page); err != nil {
			t.Fatal(err)
		}
	}
	if page.Requests[0].Command != "rm -rf build" || page.Requests[0].Status != "pending" {
		t.Errorf("%+v", page)
	}
	if a := request(t, ctx, c, "agent/permission-decision", map[string]any{"agentId": cp.NewID(), "requestId": page.Requests[0].ID, "decision": "allow"}); a.OK {
		t.Error("a decision in another agent's name was taken")
	}
	request(t, ctx, c, "agent/permission-decision", map[string]any{"agentId": uuid, "requestId": page.Requests[0].ID, "decision": "allow"})
	if o := <-got; o != "yes" {
		t.Errorf("decided %q", o)
	}
}

// memMarks keeps marks in memory.
type memMarks map[string]Mark

func (m memMarks) All() (map[string]Mark, error)    { return maps.Clone(m), nil }
func (m memMarks) Write(id string, mark Mark) error { m[id] = mark; return nil }
func (m memMarks) Remove(id string) error           { delete(m, id); return nil }
func (m memMarks) Leave(id string, _ Mark) error    { return m.Remove(id) }
func (m memMarks) Left() (map[string]string, error) { return map[string]string{}, nil }
func (m memMarks) Waits(string, string) bool        { return false }

// FuzzFrames sends every frame that the control plane may send with a payload of the
// fuzzer's: nothing may panic, and each request is answered or deferred once.
func FuzzFrames(f *testing.F) {
	types := []string{
		"agent/upsert", "agent/remove", "agent/detach", "agent/activate", "agent/stop", "agent/permission-requests", "agent/permission-decision",
		"cron/upsert", "cron/remove", "cron/run", "session/history", "session/tool-body", "session/list", "session/visibility",
		"session/visibility/snapshot", "session/child-status/probe", "daemon/restart", "daemon/upgrade", "daemon/drain",
		"mcpserver/upsert", "mcpserver/remove", "config/push", "collaboration/routes",
	}
	u := cp.NewID()
	for i := range types {
		f.Add(i, []byte(`{"agentId":"`+u+`","moveId":"`+u+`","cronId":"`+u+`","sessionId":"s","limit":1,"spec":{"agentId":"`+u+`","name":"x","configRevision":"1"},"name":"m","schedule":"* * * * *","scope":{"kind":"daemon"},"keys":{"sessions.retention":"3d"},"crons":[{}],"visibility":"org"}`))
	}
	st, err := OpenSessions(filepath.Join(f.TempDir(), "s.db"))
	if err != nil {
		f.Fatal(err)
	}
	// A disk would be all that is tried.
	st.db.NoSync, st.db.NoGrowSync, st.db.NoFreelistSync = true, true, true
	f.Cleanup(func() { _ = st.Close() })
	f.Fuzz(func(t *testing.T, which int, payload []byte) {
		p, err := New(Options{Host: newHost(), Marks: memMarks{}, Sessions: st})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		e := cp.Envelope{V: 1, ID: cp.NewID(), Type: types[((which%len(types))+len(types))%len(types)], Payload: payload}
		answers := 0
		p.Registered(t.Context(), cp.AuthOK{}, cp.RegisterOK{Agents: []json.RawMessage{payload}, Crons: []json.RawMessage{payload}, MCPServers: []json.RawMessage{payload}})
		p.Event(t.Context(), e)
		p.Request(t.Context(), e, func(cp.Reply, *cp.FrameError) { answers++ })
		if answers > 1 {
			t.Errorf("%s was answered %d times", e.Type, answers)
		}
	})
}

// What this daemon does not do of a spec is said, and nothing of it keeps the agent away.
func TestWhatIsNotTakenUpIsSaid(t *testing.T) {
	s := cptest.New(t)
	d := newDaemon(t, s.URL(), quick)
	ctx := within(t, patience)
	c := s.Ready(ctx)
	uuid := cp.NewID()
	for i, step := range []struct {
		more  map[string]any
		notes []string
	}{
		{map[string]any{"skills": []any{}, "managedSkills": []any{}, "fastMode": false, "approvalsReviewer": nil}, nil},
		{map[string]any{"skills": []any{map[string]any{"name": "x"}}, "managedSkills": []any{map[string]any{"id": uuid}}, "fastMode": true, "approvalsReviewer": "auto_review"},
			[]string{"skills are", "managed skills are", "fast mode", "automatic review"}},
		{map[string]any{"skills": "odd", "managedSkills": nil, "fastMode": 7, "approvalsReviewer": "user"}, []string{"skills are"}},
	} {
		if a := upsert(t, ctx, c, spec(uuid, "a", fmt.Sprint(i), step.more)); !a.OK {
			t.Fatalf("%v: %+v", step.more, a)
		}
		notes := d.p.List()[0].Notes
		if len(notes) != len(step.notes) {
			t.Errorf("%v: %q", step.more, notes)
			continue
		}
		for n, want := range step.notes {
			if !strings.HasPrefix(notes[n], want) {
				t.Errorf("%v: %q, want %q", step.more, notes[n], want)
			}
		}
	}
}

// What a control plane calls an agent never keeps the daemon from starting again.
func TestNoNameIsTooLongForTheNextStart(t *testing.T) {
	marks := DirMarks{filepath.Join(t.TempDir(), "agents")}
	p, err := New(Options{Host: newHost(), Marks: marks})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for _, name := range []string{strings.Repeat("<", 200_000), strings.Repeat("é", 129), strings.Repeat("x", 256)} {
		uuid := cp.NewID()
		payload := fmt.Sprintf(`{"agentId":%q,"spec":{"agentId":%q,"orgId":"org_example","name":%q,"runtime":"claude-acp","configRevision":"1","runInSandbox":true}}`, uuid, uuid, name)
		if len(payload) > cp.MaxMessage {
			t.Fatal("no control plane could send that")
		}
		p.Request(t.Context(), cp.Envelope{ID: cp.NewID(), Type: "agent/upsert", Payload: json.RawMessage(payload)}, func(_ cp.Reply, fe *cp.FrameError) {
			if refused := fe != nil && strings.Contains(fe.Message, "name"); refused != (len(name) > 256) {
				t.Errorf("%d bytes: %v", len(name), fe)
			}
		})
	}
	if all, err := marks.All(); err != nil || len(all) != 1 {
		t.Errorf("%d marks; the next start ends with: %.300v", len(all), err)
	}
}

// A machine may begin with a clock that is years ahead. What was to be done by it is done by the
// right one.
func TestClockThatWasSetBackHoldsNoCronUp(t *testing.T) {
	sessions, err := OpenSessions(filepath.Join(t.TempDir(), "sessions.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer sessions.Close()
	var mu sync.Mutex
	now := time.Date(2031, 5, 6, 7, 0, 30, 0, time.UTC)
	turns := make(chan string, 100)
	h := newHost()
	h.turn = func(_ context.Context, id string, _ Turn) error { turns <- id; return nil }
	p, err := New(Options{Host: h, Marks: DirMarks{filepath.Join(t.TempDir(), "agents")}, Sessions: sessions, Now: func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return now
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	set := func(to time.Time) {
		mu.Lock()
		now = to
		mu.Unlock()
		p.crons.rearm()
	}
	// looked returns when the clock has looked since.
	looked := func() {
		for range 2 {
			p.crons.wake <- struct{}{} // the second is taken when the first look is over
		}
	}
	uuid := cp.NewID()
	p.mu.Lock()
	p.agents[uuid] = &placed{uuid: uuid, id: "a", known: true}
	p.crons.set(cp.Cron{CronID: cp.NewID(), AgentID: uuid, Schedule: "* * * * *", Trigger: "x", Enabled: true})
	p.mu.Unlock()
	fired := func(what string, want int) {
		t.Helper()
		looked()
		looked()
		for range want {
			select {
			case <-turns:
			case <-time.After(10 * time.Second):
				t.Fatalf("%s: no turn", what)
			}
		}
		for running := 1; running > 0; runtime.Gosched() {
			p.mu.Lock()
			running = len(p.crons.running)
			p.mu.Unlock()
		}
		if len(turns) > 0 {
			t.Errorf("%s: %d turns too many", what, len(turns))
		}
	}
	set(now.Add(30 * time.Second))
	fired("the next minute", 1)
	set(now.Add(-10 * time.Second))
	fired("set back a little", 0)
	set(now.Add(10 * time.Second))
	fired("the same minute again", 0)
	set(time.Date(2026, 5, 6, 7, 0, 30, 0, time.UTC))
	fired("set back by years", 0)
	set(now.Add(30 * time.Second))
	fired("the next minute of the right clock", 1)
}

// A file that was cut is an error with words, and nothing that ends the daemon.
func TestSessionsThatWereCutAreAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sessions.db")
	s, err := OpenSessions(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		id := fmt.Sprintf("ses_%d", i)
		if err := s.Put(cp.Session{SessionID: id, AgentID: "x", Phase: "end"}); err != nil {
			t.Fatal(err)
		}
		if err := s.Write(id, []cp.Message{{Seq: 1}}, map[string]json.RawMessage{"t": json.RawMessage(`"` + strings.Repeat("b", 5000) + `"`)}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for size := 4096; size < len(whole); size += 4096 {
		path := filepath.Join(t.TempDir(), "sessions.db") // one that could not be opened stays locked
		if err := os.WriteFile(path, whole[:size], 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := OpenSessions(path)
		if err != nil {
			if !strings.Contains(err.Error(), path) {
				t.Errorf("of %d bytes %d: %v", len(whole), size, err)
			}
			continue
		}
		_, _ = s.List("", func(string) bool { return true })
		for i := range 50 {
			_, _ = s.History(cp.HistoryRequest{AgentID: "x", SessionID: fmt.Sprintf("ses_%d", i), Limit: 10})
		}
		_ = s.RemoveOf("x")
		_ = s.Close()
	}
}

// A page that the disk lost is an error to whoever reads or writes there, and does not end the daemon.
func TestSessionsThatWereDamagedAreAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sessions.db")
	s, err := OpenSessions(path)
	if err != nil {
		t.Fatal(err)
	}
	s.db.NoSync = true
	for i := range 20 {
		id := fmt.Sprintf("ses_%d", i)
		if err := errors.Join(s.Put(cp.Session{SessionID: id, AgentID: "x", Phase: "start"}), s.Write(id, []cp.Message{{Seq: 1, Text: strings.Repeat("b", 5000)}}, nil)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	damaged := 0
	for at := 0; at < len(whole); at += os.Getpagesize() {
		data := slices.Clone(whole)
		clear(data[at:min(at+os.Getpagesize(), len(data))])
		path := filepath.Join(t.TempDir(), "sessions.db")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := OpenSessions(path)
		if err != nil {
			continue
		}
		s.db.NoSync = true
		placed := func(string) bool { return true }
		_, err = s.List("", placed)
		for i := range 20 {
			_, herr := s.History(cp.HistoryRequest{AgentID: "x", SessionID: fmt.Sprintf("ses_%d", i), Limit: 10})
			err = errors.Join(err, herr)
		}
		_, berr := s.Untold()
		_, perr := s.Purge(time.Now())
		for range 2 { // the second does not wait for the first
			err = errors.Join(err, s.Put(cp.Session{SessionID: "new", AgentID: "x"}), s.RemoveOf("x"))
		}
		if err = errors.Join(err, berr, perr); err != nil && strings.Contains(err.Error(), "damaged") {
			damaged++
			if !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "remove it") {
				t.Errorf("page %d: %v", at/os.Getpagesize(), err)
			}
		}
		_ = s.Close()
	}
	if damaged == 0 {
		t.Error("control: no page was missed")
	}
}

func TestMarkThatCannotBeReadSaysWhatToDo(t *testing.T) {
	for name, text := range map[string]string{"cut": `{"agentId":`, "not a mark": `{"agentId":"x","name":"y"}`, "empty": ""} {
		dir := t.TempDir()
		path := filepath.Join(dir, "a", MarkName)
		if err := errors.Join(os.Mkdir(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
		if _, err := (DirMarks{dir}).All(); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "remove") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A control plane cannot fill the daemon: what it has held is bounded, and more is refused in
// words.
func TestWhatIsHeldForAControlPlaneIsBounded(t *testing.T) {
	p, err := New(Options{Host: newHost(), Marks: noMarks{}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	uuid := cp.NewID()
	ask := func(typ, payload string) (ack cp.Ack) {
		t.Helper()
		p.Request(t.Context(), cp.Envelope{ID: cp.NewID(), Type: typ, Payload: json.RawMessage(payload)}, func(r cp.Reply, fe *cp.FrameError) {
			if fe != nil {
				t.Fatal(fe)
			}
			ack = r.Payload.(cp.Ack)
		})
		return ack
	}
	place := func(uuid string) cp.Ack {
		return ask("agent/upsert", fmt.Sprintf(`{"agentId":%q,"spec":{"agentId":%q,"name":%q,"runtime":"claude-acp","runInSandbox":true}}`, uuid, uuid, uuid))
	}
	cron := func(id string) cp.Ack {
		return ask("cron/upsert", fmt.Sprintf(`{"cronId":%q,"agentId":%q,"schedule":"@daily","timezone":"UTC","trigger":"x","enabled":false}`, id, uuid))
	}
	last := cp.NewID()
	for i := range mostHeld {
		if a := place(cp.NewID()); !a.OK {
			t.Fatalf("agent %d: %s", i, a.Reason)
		}
		if a := cron(last); !a.OK {
			t.Fatalf("cron %d: %s", i, a.Reason)
		}
		if i < mostHeld-1 {
			last = cp.NewID()
		}
		p.Event(t.Context(), cp.Envelope{Type: "mcpserver/upsert", Payload: json.RawMessage(fmt.Sprintf(`{"name":"s%d"}`, i))})
	}
	if a := place(cp.NewID()); a.OK || !strings.Contains(a.Reason, "at most") {
		t.Errorf("one agent more: %+v", a)
	}
	if a := cron(cp.NewID()); a.OK || !strings.Contains(a.Reason, "at most") {
		t.Errorf("one cron more: %+v", a)
	}
	if a := cron(last); !a.OK {
		t.Errorf("one that is held: %+v", a)
	}
	p.Event(t.Context(), cp.Envelope{Type: "mcpserver/upsert", Payload: json.RawMessage(`{"name":"more"}`)})
	if n := len(p.servers); n != mostHeld {
		t.Errorf("%d servers are held", n)
	}
}

// Each drain waits until turns end, and with them its answer.
func TestDrainsThatWaitAreBounded(t *testing.T) {
	sessions, err := OpenSessions(filepath.Join(t.TempDir(), "sessions.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer sessions.Close()
	h, runs, end := newHost(), make(chan struct{}), make(chan struct{})
	h.turn = func(context.Context, string, Turn) error { close(runs); <-end; return nil }
	p, err := New(Options{Host: h, Marks: noMarks{}, Sessions: sessions})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var mu sync.Mutex
	done, refused := 0, 0
	ask := func(typ, payload string) {
		p.Request(t.Context(), cp.Envelope{ID: cp.NewID(), Type: typ, Payload: json.RawMessage(payload)}, func(r cp.Reply, fe *cp.FrameError) {
			mu.Lock()
			defer mu.Unlock()
			switch {
			case fe != nil:
				refused++
			case r.Type == "drain/done":
				done++
			}
		})
	}
	uuid, cron := cp.NewID(), cp.NewID()
	ask("agent/upsert", fmt.Sprintf(`{"agentId":%q,"spec":{"agentId":%q,"name":"a","runtime":"claude-acp","runInSandbox":true}}`, uuid, uuid))
	ask("cron/upsert", fmt.Sprintf(`{"cronId":%q,"agentId":%q,"schedule":"@daily","timezone":"UTC","trigger":"x","enabled":false}`, cron, uuid))
	ask("cron/run", fmt.Sprintf(`{"cronId":%q}`, cron))
	<-runs
	before := runtime.NumGoroutine()
	for range 500 {
		ask("daemon/drain", `{"scope":{"kind":"daemon"},"deadline":"2099-01-01T00:00:00Z"}`)
	}
	if n := runtime.NumGoroutine() - before; n > mostDrains {
		t.Errorf("500 drains hold %d goroutines", n)
	}
	close(end)
	p.Close() // waits for the turn
	mu.Lock()
	defer mu.Unlock()
	if done != mostDrains || refused != 500-mostDrains {
		t.Errorf("%d were answered at the end of the turn and %d refused", done, refused)
	}
}

// noMarks keeps none.
type noMarks struct{}

func (noMarks) All() (map[string]Mark, error)    { return nil, nil }
func (noMarks) Write(string, Mark) error         { return nil }
func (noMarks) Remove(string) error              { return nil }
func (noMarks) Leave(string, Mark) error         { return nil }
func (noMarks) Left() (map[string]string, error) { return map[string]string{}, nil }
func (noMarks) Waits(string, string) bool        { return false }
