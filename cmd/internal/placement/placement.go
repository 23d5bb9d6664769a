// Package placement holds the agents that a control plane placed on this daemon: what it
// said of them, in memory, and on disk no more than the mark that says whose they are. It
// turns frames into wishes of a Host, which judges them by the operator's own policy:
// nothing here can open what the operator did not.
package placement

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/gitcred"
)

// Host is the daemon, as far as a control plane may move it. Its errors are words for
// people at the control plane. Its methods, but for Turn, return soon: what takes time
// goes on behind them.
type Host interface {
	// Put makes or changes an agent. It is judged by the local configuration: an error is a
	// refusal, and what was in force before stays.
	Put(a *agent.Agent, secrets map[string]string) error
	// Drop stops an agent and forgets it, with purge its directory, too.
	Drop(id string, purge bool) error
	// Stop stops an agent and does not start it again by itself. With now its turns get no time.
	Stop(id string, now bool) error
	// Turn runs one turn in a session of its own.
	Turn(ctx context.Context, id string, t Turn) error
	// EmptyWorkspace reports whether an agent's workspace holds nothing.
	EmptyWorkspace(id string) (bool, error)
	// Taken reports whether an id is in use by an agent that is not the control plane's.
	Taken(id string) bool
	// Declared reports whether an id is that of an agent of the machine's administrator.
	Declared(id string) bool
	// Restart ends the daemon, whose service manager starts it again, or says why not.
	Restart(reason string) error
}

// Turn is one prompt.
type Turn struct {
	Text string
	// Update gets the params of each session/update.
	Update func(params json.RawMessage) error
	// Permission asks somebody at the control plane.
	Permission func(ctx context.Context, title string, allow, deny string) (option string)
}

// Reporter is the connection, as far as this package tells it things.
type Reporter interface {
	Report(key, typ string, payload any, acked bool) error
	Tell(typ string, payload any)
	AskOnce(ctx context.Context, typ string, payload any) (cp.Envelope, error)
}

// mostHeld bounds how many agents, crons and servers of the registry a control plane can have this
// daemon hold, of each: they are in memory, and each may be as long as a message.
const mostHeld = 2000

// mostReason bounds why an agent is refused, in bytes.
const mostReason = 2000

// tooMany says so.
func tooMany(what string) string {
	return fmt.Sprintf("this daemon holds %d %s at most; remove some first", mostHeld, what)
}

// placed is one agent of the control plane's.
type placed struct {
	uuid, id string
	spec     cp.AgentSpec
	merged   []byte   // the spec as it is in force, for comparison
	known    bool     // its spec has come since this daemon started
	moveID   string   // fence: it moves away and takes no turn
	refusal  string   // why it cannot run, in words
	marked   Mark     // as it stands on disk
	notes    []string // what is not done of its spec
	grants   map[gitcred.Repo]*grant
}

// Mark is what stands on disk of a placed agent. Its spec, which has secrets, does not.
type Mark struct {
	AgentID string `json:"agentId"`
	Name    string `json:"name"`
	MoveID  string `json:"moveId,omitempty"`
}

// Marks keeps the marks below the agents' directories.
type Marks interface {
	// All returns the marks by local id.
	All() (map[string]Mark, error)
	Write(id string, m Mark) error
	Remove(id string) error
	// Leave removes a mark; the directory stays for this agent, should it come back.
	Leave(id string, m Mark) error
	// Left returns the ids of the directories that wait, by agent; Waits whether one still does.
	Left() (map[string]string, error)
	Waits(id, agentID string) bool
}

// Options of a Placement.
type Options struct {
	Host     Host
	Marks    Marks
	Sessions *Sessions
	Log      *slog.Logger
	// MCPServers are those of the operator's own configuration, by name.
	MCPServers func() map[string]json.RawMessage
	Now        func() time.Time
}

// Placement implements controlplane.Handler.
type Placement struct {
	o    Options
	tell atomic.Pointer[Reporter] // set anew with each client, while turns run

	// ids may be asked for by a Host that is being called.
	marksMu sync.Mutex
	ids     map[string]bool

	mu      sync.Mutex
	agents  map[string]*placed // by UUID
	left    map[string]string  // ids of directories by the UUID of the agent that left them
	crons   *crons
	servers map[string]cp.MCPServer // of the registry
	asks    map[string]*ask         // permission requests by id
	retain  time.Duration           // of sessions; 0: for ever
	offers  []string                // the control plane's own features
	author  *cp.GitIdentity         // of commits; nil: not said
	untold  []Ended                 // of an earlier daemon
	// unserved says why this daemon serves nothing; "" if it does.
	unserved string
}

// New reads the marks of an earlier daemon. The reporter is set before the first frame.
func New(o Options) (*Placement, error) {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	p := &Placement{o: o, ids: map[string]bool{}, agents: map[string]*placed{}, servers: map[string]cp.MCPServer{}, asks: map[string]*ask{}}
	p.crons = newCrons(p)
	marks, err := o.Marks.All()
	if err != nil {
		return nil, err
	}
	if p.left, err = o.Marks.Left(); err != nil {
		return nil, err
	}
	for id, m := range marks {
		p.ids[id] = true
		p.agents[m.AgentID] = &placed{uuid: m.AgentID, id: id, moveID: m.MoveID, marked: m, spec: cp.AgentSpec{AgentID: m.AgentID, Name: m.Name}}
	}
	if o.Sessions != nil {
		if p.untold, err = o.Sessions.Untold(); err != nil {
			o.Log.Error("sessions that an earlier daemon did not end stay as they were", "error", err)
		}
	}
	return p, nil
}

// Use sets who reports are told to.
func (p *Placement) Use(r Reporter) { p.tell.Store(&r) }

// reporter is who reports are told to now; nil before the first.
func (p *Placement) reporter() Reporter {
	if r := p.tell.Load(); r != nil {
		return *r
	}
	return nil
}

// Close ends the clock and waits for turns under way, whose contexts end.
func (p *Placement) Close() { p.crons.close() }

// Info is what status says of a placed agent.
type Info struct {
	ID, UUID, Name, Refusal string
	Paused, Known, Moving   bool
	Revision                string
	Notes                   []string // what is not done of its spec
}

// List returns the placed agents in the order of their ids.
func (p *Placement) List() []Info {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]Info, 0, len(p.agents))
	for _, a := range p.agents {
		out = append(out, Info{
			ID: a.id, UUID: a.uuid, Name: a.spec.Name, Refusal: a.refusal, Paused: a.spec.Pause.V,
			Known: a.known, Moving: a.moveID != "", Revision: a.spec.ConfigRevision.V, Notes: a.notes,
		})
	}
	slices.SortFunc(out, func(a, b Info) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// Has reports whether id is an agent of the control plane's.
func (p *Placement) Has(id string) bool {
	p.marksMu.Lock()
	defer p.marksMu.Unlock()
	return p.ids[id]
}

// Running is how many turns run now.
func (p *Placement) Running() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.crons.running)
}

// Judge has the Host judge all of them again: the probe, or the configuration, changed.
func (p *Placement) Judge() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.agents {
		if a.known && a.moveID == "" {
			p.put(a)
		}
	}
}

// put has the Host make or change an agent, and keeps why it did not.
func (p *Placement) put(a *placed) {
	conf, secrets, warnings, err := p.convert(a)
	if !slices.Equal(warnings, a.notes) {
		for _, w := range warnings {
			p.o.Log.Warn("agent of the control plane", "agent", a.id, "note", w)
		}
	}
	was := a.refusal
	a.refusal, a.notes = "", warnings
	if err == nil {
		err = p.o.Host.Put(conf, secrets)
	} else if derr := p.o.Host.Drop(a.id, false); derr != nil {
		p.o.Log.Error("an agent of the control plane was not stopped", "agent", a.id, "error", derr)
	}
	if err != nil {
		a.refusal = cut(err.Error(), mostReason) // words of the spec may be in it
		if a.refusal != was {
			p.o.Log.Warn("an agent of the control plane is refused", "agent", a.id, "reason", a.refusal)
		}
	}
}

// Local is what register says of the agents held here.
func (p *Placement) Local() cp.LocalState {
	p.mu.Lock()
	defer p.mu.Unlock()
	var l cp.LocalState
	for _, uuid := range slices.Sorted(maps.Keys(p.agents)) {
		if a := p.agents[uuid]; a.moveID != "" {
			l.StagedAgents = append(l.StagedAgents, cp.StagedAgent{AgentID: uuid, MoveID: a.moveID})
		} else {
			l.Agents = append(l.Agents, cp.LocalAgent{AgentID: uuid, Origin: "cp"})
		}
	}
	l.Crons = p.crons.ids()
	return l
}

// Registered applies the whole of what this daemon is to hold.
func (p *Placement) Registered(_ context.Context, auth cp.AuthOK, ok cp.RegisterOK) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.crons.drained = false
	p.unserved = ""
	if auth.MemberSet != nil {
		// Others of the set are told of the same agents and crons: who serves which needs a duty.
		p.unserved = "this daemon was put into a member set, which it cannot serve; take it out of the set"
		return
	}
	p.setRetention(ok.SessionRetention)
	p.offers, p.author = ok.ServerFeatures, ok.GitCommitIdentity
	servers := map[string]cp.MCPServer{}
	for _, raw := range ok.MCPServers {
		var s cp.MCPServer
		if fe := cp.Decode(raw, &s); fe != nil {
			p.o.Log.Warn("an MCP server of the control plane is skipped", "error", fe.Message)
			continue
		}
		if _, held := servers[s.Name]; !held && len(servers) >= mostHeld {
			p.o.Log.Warn("an MCP server of the control plane is skipped", "error", tooMany("MCP servers"))
			continue
		}
		servers[s.Name] = s
	}
	p.servers = servers
	for _, d := range ok.Drop.Agents {
		p.drop(d.AgentID, d.Action == "remove")
	}
	hold := map[string]bool{}
	for _, raw := range ok.Agents {
		spec, fe := readSpec("", raw)
		if fe != nil {
			// One that cannot be read is not one that is gone.
			var ref struct {
				AgentID string `json:"agentId"`
			}
			if json.Unmarshal(raw, &ref) == nil {
				hold[ref.AgentID] = true
			}
			p.o.Log.Warn("an agent of the control plane is skipped", "error", fe.Message)
			continue
		}
		hold[spec.AgentID] = true
		if reason := p.upsert(spec); reason != "" {
			p.o.Log.Warn("an agent of the control plane is not as it wants it", "agent", spec.Name, "reason", reason)
		}
	}
	for uuid, a := range p.agents {
		if !hold[uuid] && a.moveID == "" {
			p.o.Log.Info("the control plane no longer places this agent here", "agent", a.id)
			p.drop(uuid, false)
		}
	}
	p.crons.replace(p.readCrons(ok.Crons))
	for _, id := range ok.Drop.Crons {
		p.crons.remove(id)
	}
	p.tellUntold()
	p.purge()
}

// tellUntold tells of the turns that ended with an earlier daemon, or in its time: there they run
// until somebody says otherwise.
func (p *Placement) tellUntold() {
	for _, e := range p.untold {
		if p.agents[e.Session.AgentID] == nil {
			continue
		}
		p.report("session "+e.Session.SessionID, "event/session-sync", e.Session, true)
		if e.Report.CronID != "" {
			p.report("cron "+e.Report.CronID+e.Report.FiredAt, "cron/report", e.Report, false)
		}
	}
	p.untold = nil
}

// Taken hears of each report that the control plane acknowledged.
func (p *Placement) Taken(typ string, payload any) {
	if s, ok := payload.(cp.Session); ok && typ == "event/session-sync" && s.Phase == "end" {
		if err := p.o.Sessions.Told(s.SessionID); err != nil {
			p.o.Log.Error("that a session's end was told is not kept", "session", s.SessionID, "error", err)
		}
	}
}

func (p *Placement) readCrons(list []json.RawMessage) []cp.Cron {
	var out []cp.Cron
	for _, raw := range list {
		var c cp.Cron
		if fe := cp.Decode(raw, &c); fe != nil {
			p.o.Log.Warn("a cron of the control plane is skipped", "error", fe.Message)
			continue
		}
		out = append(out, c)
	}
	return out
}

func readSpec(uuid string, raw json.RawMessage) (cp.AgentSpec, *cp.FrameError) {
	var s cp.AgentSpec
	if len(raw) == 0 {
		return s, &cp.FrameError{Code: cp.CodeBadPayload, Message: "spec is missing"}
	}
	if fe := cp.Decode(raw, &s); fe != nil {
		return s, fe
	}
	if uuid != "" && s.AgentID != uuid {
		return s, &cp.FrameError{Code: cp.CodeBadPayload, Message: "spec.agentId is not agentId"}
	}
	return s, nil
}

// upsert applies a spec by the rule of revisions and returns why it was not taken. What
// the local policy refuses is taken, kept and not run: the answer says so in words.
func (p *Placement) upsert(spec cp.AgentSpec) string {
	a := p.agents[spec.AgentID]
	if a == nil {
		if len(p.agents) >= mostHeld {
			return tooMany("agents")
		}
		a = &placed{uuid: spec.AgentID, id: p.idFor(spec)}
	}
	if a.moveID != "" {
		return "the agent is fenced: it moves away from this daemon"
	}
	merged := spec
	if a.known {
		merged = merge(a.spec, spec)
	}
	text, err := json.Marshal(canonical(merged))
	if err != nil {
		return err.Error()
	}
	if a.known {
		was, _ := a.spec.Revision() // read when it came
		now, _ := spec.Revision()
		switch {
		case now < was:
			return "" // older than what is in force: nothing to do
		case now == was && bytes.Equal(text, a.merged):
			return ""
		case now == was && spec.ConfigRevision.Set:
			return fmt.Sprintf("revision %d is in force with another content", was)
		}
	}
	if err := p.mark(a, Mark{AgentID: a.uuid, Name: merged.Name}); err != nil {
		return "cannot write the agent's mark: " + err.Error()
	}
	p.agents[a.uuid] = a
	a.spec, a.merged, a.known, a.grants = merged, text, true, nil
	p.put(a)
	return a.refusal
}

// mark writes an agent's mark when it differs from the one on disk.
func (p *Placement) mark(a *placed, m Mark) error {
	if a.marked == m {
		return nil
	}
	if err := p.o.Marks.Write(a.id, m); err != nil {
		return err
	}
	a.marked = m
	p.know(a.id, true)
	return nil
}

func (p *Placement) know(id string, yes bool) {
	p.marksMu.Lock()
	defer p.marksMu.Unlock()
	if yes {
		p.ids[id] = true
	} else {
		delete(p.ids, id)
	}
}

// drop gives an agent up; its crons go with it.
func (p *Placement) drop(uuid string, remove bool) {
	a := p.agents[uuid]
	if a == nil {
		return
	}
	p.crons.removeOf(uuid)
	if remove {
		p.crons.discardOf(uuid)
	}
	p.know(a.id, false)
	if err := p.o.Host.Drop(a.id, remove); err != nil {
		p.o.Log.Error("an agent of the control plane was not removed", "agent", a.id, "error", err)
	}
	away := p.o.Marks.Remove
	if !remove {
		p.left[uuid] = a.id
		away = func(id string) error { return p.o.Marks.Leave(id, Mark{AgentID: uuid, Name: a.spec.Name}) }
	}
	if err := away(a.id); err != nil {
		p.o.Log.Error("the mark of an agent was not removed", "agent", a.id, "error", err)
	}
	delete(p.agents, uuid)
	if remove && p.o.Sessions != nil {
		if err := p.o.Sessions.RemoveOf(uuid); err != nil {
			p.o.Log.Error("the sessions of a removed agent were not removed", "agent", a.id, "error", err)
		}
	}
}

// DropFenced gives up the agents that were to move away, but for their directories: this daemon is
// another one now, or elsewhere, where nobody knows of those moves.
func (p *Placement) DropFenced() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for uuid, a := range p.agents {
		if a.moveID != "" {
			p.drop(uuid, false)
		}
	}
}

// idFor is the id of an agent that is placed here: the one it had, if what it left is still there.
func (p *Placement) idFor(spec cp.AgentSpec) string {
	id, ok := p.left[spec.AgentID]
	if ok && !p.o.Host.Declared(id) && p.o.Marks.Waits(id, spec.AgentID) {
		return id
	}
	return p.freeID(spec.Name)
}

// freeID makes a local id of an agent's name that nobody has.
func (p *Placement) freeID(name string) string {
	slug := strings.Trim(strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '-' || r == '_':
			return r
		case 'A' <= r && r <= 'Z':
			return r - 'A' + 'a'
		}
		return '-'
	}, name), "-_")
	if slug == "" {
		slug = "agent"
	}
	slug = slug[:min(len(slug), 56)]
	taken := func(id string) bool {
		for _, a := range p.agents {
			if a.id == id {
				return true
			}
		}
		return p.o.Host.Taken(id)
	}
	id := slug
	for n := 2; taken(id); n++ {
		id = fmt.Sprintf("%s-%d", slug, n)
	}
	return id
}

// Event is told what wants no answer.
func (p *Placement) Event(_ context.Context, e cp.Envelope) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e.Type {
	case "agent/remove":
		var r cp.AgentRef
		if p.bad(e, &r) {
			return true
		}
		p.drop(r.AgentID, true)
	case "mcpserver/upsert":
		var s cp.MCPServer
		if p.bad(e, &s) {
			return true
		}
		held, ok := p.servers[s.Name]
		switch {
		case ok && older(s.IssuedAt, held.IssuedAt):
			return true
		case !ok && len(p.servers) >= mostHeld:
			p.o.Log.Warn("an MCP server of the control plane is skipped", "error", tooMany("MCP servers"))
			return true
		}
		p.servers[s.Name] = s
		p.again(s.Name)
	case "mcpserver/remove":
		var s struct {
			Name string `json:"name"`
		}
		if p.bad(e, &s) {
			return true
		}
		delete(p.servers, s.Name)
		p.again(s.Name)
	case "config/push":
		var c cp.ConfigPush
		if p.bad(e, &c) {
			return true
		}
		var keep string
		if raw, ok := c.Keys["sessions.retention"]; ok && json.Unmarshal(raw, &keep) == nil {
			p.setRetention(keep)
			p.purge()
		}
	case "collaboration/routes", "relay/roster", "route/update", "codehost/note-desired",
		"integration/upsert", "integration/remove", "memoryconnection/upsert", "memoryconnection/remove":
		// Known, and nothing here has a use for it.
	default:
		return false
	}
	return true
}

// again converts the agents that use a server of the registry anew.
func (p *Placement) again(server string) {
	for _, a := range p.agents {
		if a.known && slices.Contains(a.spec.MCPServers.V, server) {
			p.put(a)
		}
	}
}

func older(a, b string) bool {
	x, err1 := time.Parse(time.RFC3339Nano, a)
	y, err2 := time.Parse(time.RFC3339Nano, b)
	return err1 == nil && err2 == nil && x.Before(y)
}

func (p *Placement) bad(e cp.Envelope, into any) bool {
	if fe := cp.Decode(e.Payload, into); fe != nil {
		p.o.Log.Warn("an event of the control plane cannot be read", "type", e.Type, "error", fe.Message)
		return true
	}
	return false
}

// Request is asked what wants an answer.
func (p *Placement) Request(ctx context.Context, e cp.Envelope, answer cp.Responder) {
	p.mu.Lock()
	defer p.mu.Unlock()
	reply, fe := p.request(ctx, e, answer)
	if fe != nil || reply.Type != "" {
		answer(reply, fe)
	}
}

// request answers at once, or returns nothing and has the answer given later.
func (p *Placement) request(ctx context.Context, e cp.Envelope, answer cp.Responder) (cp.Reply, *cp.FrameError) {
	if p.unserved != "" {
		switch e.Type {
		case "agent/upsert", "agent/activate", "cron/upsert", "cron/run":
			return cp.AckReply(p.unserved), nil
		}
	}
	switch e.Type {
	case "agent/upsert":
		var u cp.AgentUpsert
		if fe := cp.Decode(e.Payload, &u); fe != nil {
			return cp.Reply{}, fe
		}
		spec, fe := readSpec(u.AgentID, u.Spec)
		if fe != nil {
			return cp.Reply{}, fe
		}
		return cp.AckReply(p.upsert(spec)), nil
	case "agent/detach":
		var d cp.AgentDetach
		if fe := cp.Decode(e.Payload, &d); fe != nil {
			return cp.Reply{}, fe
		}
		return cp.AckReply(p.detach(d)), nil
	case "agent/activate":
		var a cp.AgentActivate
		if fe := cp.Decode(e.Payload, &a); fe != nil {
			return cp.Reply{}, fe
		}
		return p.activate(a)
	case "agent/stop":
		var s cp.AgentStop
		if fe := cp.Decode(e.Payload, &s); fe != nil {
			return cp.Reply{}, fe
		}
		a := p.agents[s.AgentID]
		if a == nil {
			return cp.AckReply("no such agent here"), nil
		}
		return cp.AckReply(words(p.o.Host.Stop(a.id, false))), nil
	case "agent/permission-requests":
		return p.permissionRequests(e)
	case "agent/permission-decision":
		return p.permissionDecision(e)
	case "cron/upsert":
		var c cp.Cron
		if fe := cp.Decode(e.Payload, &c); fe != nil {
			return cp.Reply{}, fe
		}
		return cp.AckReply(p.crons.set(c)), nil
	case "cron/remove":
		var c cp.CronRef
		if fe := cp.Decode(e.Payload, &c); fe != nil {
			return cp.Reply{}, fe
		}
		p.crons.remove(c.CronID)
		return cp.AckReply(""), nil
	case "cron/run":
		var c cp.CronRef
		if fe := cp.Decode(e.Payload, &c); fe != nil {
			return cp.Reply{}, fe
		}
		if reason := p.crons.run(c.CronID, answer); reason != "" {
			return cp.AckReply(reason), nil
		}
		return cp.Reply{}, nil // acknowledged before the turn started
	case "session/history", "session/tool-body", "session/list", "session/visibility", "session/visibility/snapshot":
		return p.o.Sessions.answer(e, func(uuid string) bool { return p.agents[uuid] != nil })
	case "session/child-status/probe":
		return cp.Reply{Type: "session/child-status/probe/ok", Payload: map[string]bool{"found": false}}, nil
	case "daemon/restart":
		var c cp.DaemonControl
		if fe := cp.Decode(e.Payload, &c); fe != nil {
			return cp.Reply{}, fe
		}
		why := words(p.o.Host.Restart(c.Reason))
		return cp.Reply{Type: "daemon/control/ack", Payload: cp.ControlAck{Accepted: why == "", Reason: why}}, nil
	case "daemon/upgrade":
		return cp.Reply{Type: "daemon/control/ack", Payload: cp.ControlAck{Reason: "this daemon is upgraded by its package: run `sudo apt-get install --only-upgrade agentconnect-sandbox` on its machine"}}, nil
	case "daemon/drain":
		var d cp.Drain
		if fe := cp.Decode(e.Payload, &d); fe != nil {
			return cp.Reply{}, fe
		}
		p.crons.drain(ctx, d, answer)
		return cp.Reply{}, nil
	}
	return cp.Reply{}, &cp.FrameError{Code: cp.CodeUnknownFrame, Message: "not a frame that this daemon knows"}
}

func words(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// detach fences an agent: it takes no turn from here on, and stops.
func (p *Placement) detach(d cp.AgentDetach) string {
	a := p.agents[d.AgentID]
	if a == nil {
		return "" // the first step of every placement
	}
	if d.RequireEmptyWorkspace {
		empty, err := p.o.Host.EmptyWorkspace(a.id)
		if err != nil {
			return "the workspace cannot be looked at: " + err.Error()
		}
		if !empty {
			return "the workspace is not empty"
		}
	}
	if err := p.mark(a, Mark{AgentID: a.uuid, Name: a.spec.Name, MoveID: d.MoveID}); err != nil {
		return "the fence cannot be written: " + err.Error()
	}
	a.moveID = d.MoveID
	p.crons.removeOf(a.uuid)
	if d.DiscardActiveTurns {
		p.crons.cancelOf(a.uuid)
	}
	if err := p.o.Host.Stop(a.id, d.DiscardActiveTurns); err != nil {
		p.o.Log.Error("a detached agent was not stopped", "agent", a.id, "error", err)
	}
	return ""
}

// activate opens an agent with exactly this bundle.
func (p *Placement) activate(m cp.AgentActivate) (cp.Reply, *cp.FrameError) {
	spec, fe := readSpec(m.AgentID, m.Spec)
	if fe != nil {
		return cp.Reply{}, fe
	}
	a := p.agents[m.AgentID]
	if a != nil && m.MoveID != a.moveID && (m.MoveID != "" || a.moveID != "") {
		return cp.AckReply("the move is not the one that this agent is fenced for"), nil
	}
	if a != nil && a.moveID != "" {
		if why := words(p.mark(a, Mark{AgentID: a.uuid, Name: a.spec.Name})); why != "" {
			return cp.AckReply("the fence cannot be lifted: " + why), nil
		}
		a.moveID, a.known = "", false // what comes now is the whole of it
	}
	if reason := p.upsert(spec); reason != "" {
		return cp.AckReply(reason), nil
	}
	p.crons.removeOf(m.AgentID)
	for _, c := range p.readCrons(m.Crons) {
		if c.AgentID != m.AgentID {
			continue
		}
		if reason := p.crons.set(c); reason != "" {
			return cp.AckReply(reason), nil
		}
	}
	return cp.AckReply(""), nil
}

func (p *Placement) setRetention(s string) {
	var days int
	if n, err := fmt.Sscanf(s, "%dd", &days); err == nil && n == 1 && days > 0 && days < 100_000 {
		p.retain = time.Duration(days) * 24 * time.Hour
		return
	}
	p.retain = 0
}

// purge removes sessions older than the organization keeps them.
func (p *Placement) purge() {
	if p.retain == 0 || p.o.Sessions == nil {
		return
	}
	gone, err := p.o.Sessions.Purge(p.o.Now().Add(-p.retain))
	if err != nil {
		p.o.Log.Error("old sessions were not removed", "error", err)
	}
	for uuid, ids := range gone {
		for chunk := range slices.Chunk(ids, 200) {
			p.report("purged "+chunk[0], "event/session-purged", map[string]any{
				"agentId": uuid, "sessionIds": chunk, "reason": "retention", "ts": cp.Stamp(p.o.Now()),
			}, true)
		}
	}
}

func (p *Placement) report(key, typ string, payload any, acked bool) {
	tell := p.reporter()
	if tell == nil {
		return
	}
	if err := tell.Report(key, typ, payload, acked); err != nil {
		p.o.Log.Error("a report was not sent", "type", typ, "error", err)
	}
}

// Why a turn does not start, in words for the control plane.
var (
	errPaused = errors.New("the agent is paused")
	errMoving = errors.New("the agent moves away from this daemon")
	errGone   = errors.New("no such agent here")
	errUnread = errors.New("the agent's spec has not come yet")
)
