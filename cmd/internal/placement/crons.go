// Prompts sent by the clock: one timer for the next that is due, and the turns they start.

package placement

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

// turnLimit ends a turn that nobody watches.
const turnLimit = 2 * time.Hour

type crons struct {
	p *Placement

	ctx    context.Context //nolint:containedctx // the life of the clock and of its turns
	cancel context.CancelFunc
	wg     sync.WaitGroup
	wake   chan struct{}

	// The rest under Placement.mu.
	byID    map[string]*cronEntry
	running map[string]*running // by cron id
	drained bool                // the daemon takes no more turns
	idle    []func()            // called when no turn runs
}

// running is a turn under way.
type running struct {
	agent string
	stop  context.CancelFunc
	gone  bool // the agent was removed, and what the turn said goes with it
}

type cronEntry struct {
	cron  cp.Cron
	when  cp.Schedule
	since time.Time // when next was found
	next  time.Time
}

// setBack is by how much a clock is set back for what was found by it not to count any more. By
// less, nothing is done a second time.
const setBack = time.Hour

// plan finds when it is due next.
func (e *cronEntry) plan(now time.Time) { e.since, e.next = now, e.when.Next(now) }

func newCrons(p *Placement) *crons {
	c := &crons{p: p, wake: make(chan struct{}, 1), byID: map[string]*cronEntry{}, running: map[string]*running{}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.wg.Go(c.clock)
	return c
}

func (c *crons) close() {
	c.cancel()
	c.wg.Wait()
}

func (c *crons) ids() []string { return slices.Sorted(maps.Keys(c.byID)) }

func (c *crons) rearm() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// set takes a cron over, or says why not; its schedule was read when it came.
func (c *crons) set(cron cp.Cron) string {
	when, err := cron.Parse()
	if err != nil {
		return err.Error()
	}
	if c.byID[cron.CronID] == nil && len(c.byID) >= mostHeld {
		return tooMany("crons")
	}
	e := &cronEntry{cron: cron, when: when}
	e.plan(c.p.o.Now())
	c.byID[cron.CronID] = e
	c.rearm()
	return ""
}

func (c *crons) remove(id string) {
	delete(c.byID, id)
	c.rearm()
}

func (c *crons) removeOf(agent string) {
	maps.DeleteFunc(c.byID, func(_ string, e *cronEntry) bool { return e.cron.AgentID == agent })
	c.rearm()
}

// replace holds exactly these; one that stays as it was keeps its next time.
func (c *crons) replace(list []cp.Cron) {
	old := c.byID
	c.byID = map[string]*cronEntry{}
	for _, cron := range list {
		if e := old[cron.CronID]; e != nil && e.cron == cron {
			c.byID[cron.CronID] = e
			continue
		}
		if reason := c.set(cron); reason != "" {
			c.p.o.Log.Warn("a cron of the control plane is skipped", "error", reason)
		}
	}
	c.rearm()
}

func (c *crons) cancelOf(agent string) {
	for _, turn := range c.running {
		if turn.agent == agent {
			turn.stop()
		}
	}
}

// discardOf ends the turns of an agent that is removed; nothing is kept of them.
func (c *crons) discardOf(agent string) {
	for _, turn := range c.running {
		if turn.agent == agent {
			turn.gone = true
			turn.stop()
		}
	}
}

// clock sleeps until the next cron is due. With none it sleeps until there is one.
func (c *crons) clock() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		c.p.mu.Lock()
		now := c.p.o.Now()
		var next time.Time
		for _, e := range c.byID {
			if now.Before(e.since.Add(-setBack)) {
				e.plan(now)
			}
			if !e.cron.Enabled || e.next.IsZero() {
				continue
			}
			if !e.next.After(now) {
				e.plan(now)             // ticks missed meanwhile are skipped
				_ = c.fire(e.cron, nil) // what stood in the way is reported
			}
			if next.IsZero() || e.next.Before(next) {
				next = e.next
			}
		}
		c.p.mu.Unlock()
		var due <-chan time.Time
		if !next.IsZero() {
			// Wall clocks are set: look again at least each hour.
			timer.Reset(min(time.Until(next), time.Hour))
			due = timer.C
		}
		select {
		case <-c.ctx.Done():
			return
		case <-c.wake:
		case <-due:
		}
	}
}

// run fires a cron by hand, also a disabled one. The acknowledgement goes out before the
// turn starts; an empty return has been answered.
func (c *crons) run(id string, answer cp.Responder) string {
	e := c.byID[id]
	if e == nil {
		return "no such cron here"
	}
	return c.fire(e.cron, func() { answer(cp.AckReply(""), nil) })
}

// fire starts a turn, or says why not.
func (c *crons) fire(cron cp.Cron, before func()) string {
	a := c.p.agents[cron.AgentID]
	reason := ""
	switch {
	case a == nil:
		reason = errGone.Error()
	case a.moveID != "":
		reason = errMoving.Error()
	case !a.known:
		reason = errUnread.Error()
	case a.spec.Pause.V:
		reason = errPaused.Error()
	case a.refusal != "":
		reason = a.refusal
	case c.drained:
		reason = "the daemon is draining"
	case c.p.unserved != "":
		reason = c.p.unserved
	case c.running[cron.CronID] != nil:
		reason = "its last run is not over"
	}
	fired := cp.Stamp(c.p.o.Now())
	report := cp.CronReport{CronID: cron.CronID, AgentID: cron.AgentID, FiredAt: fired}
	if reason != "" {
		if before == nil && c.p.unserved == "" { // by the clock: nobody else hears of it
			report.Status, report.Reason = "failed", reason
			c.p.report("cron "+cron.CronID+fired, "cron/report", report, false)
		}
		return reason
	}
	if before != nil {
		before()
	}
	ctx, stop := context.WithTimeout(c.ctx, turnLimit)
	turn := &running{agent: cron.AgentID, stop: stop}
	c.running[cron.CronID] = turn
	id, name, runtime := a.id, a.spec.Name, a.spec.Runtime.V
	c.wg.Go(func() {
		defer stop()
		session := c.turn(ctx, cron, report, id, name, runtime)
		c.p.mu.Lock()
		delete(c.running, cron.CronID)
		if turn.gone {
			if err := c.p.o.Sessions.Remove(session); err != nil {
				c.p.o.Log.Error("a session of a removed agent was not removed", "session", session, "error", err)
			}
		}
		var idle []func()
		if len(c.running) == 0 {
			idle, c.idle = c.idle, nil
		}
		c.p.mu.Unlock()
		for _, f := range idle {
			f()
		}
	})
	return ""
}

// turn runs one prompt and tells of it: fired, session known, finished.
func (c *crons) turn(ctx context.Context, cron cp.Cron, report cp.CronReport, id, name, runtime string) (sessionID string) {
	p := c.p
	began := p.o.Now()
	key := "cron " + cron.CronID + report.FiredAt
	p.report(key, "cron/report", report, false)
	session := cp.Session{
		SessionID: "ses_" + cp.NewID(), AgentID: cron.AgentID, Platform: "slack", Channel: "cron:" + cron.CronID,
		Thread: "cron:" + cron.CronID + ":" + cp.NewID(), SourceBindingKind: "local", ConversationKind: "channel",
		TriggeredBy: "cron:" + cron.CronID, Title: title(cron.Trigger), Runtime: runtime, WorkspaceIsolation: "shared",
		Phase: "start", Status: "running", LastActivityAt: report.FiredAt, TS: report.FiredAt,
	}
	t := newTranscript(p.o.Sessions, session, name)
	t.prompt(cron.Trigger, session.TriggeredBy, began)
	started := false
	announce := func() {
		if started {
			return
		}
		started = true
		p.report("session "+session.SessionID, "event/session-sync", session, true)
		report.SessionID = session.SessionID
		p.report(key, "cron/report", report, false)
	}
	err := p.o.Sessions.Put(session)
	if err == nil {
		err = p.o.Host.Turn(ctx, id, Turn{
			Text: cron.Trigger,
			Update: func(params json.RawMessage) error {
				announce()
				return t.update(params, p.o.Now())
			},
			Permission: func(ctx context.Context, title, allow, deny string) string {
				announce()
				return p.askPermission(ctx, cron.AgentID, session.SessionID, title, allow, deny)
			},
		})
	}
	announce()
	if werr := t.end(p.o.Now()); werr != nil && err == nil {
		err = werr
	}
	if err != nil && c.ctx.Err() != nil {
		return session.SessionID // the daemon ends, and the next one tells of it: nobody is connected any more
	}
	done := p.o.Now()
	session.Phase, session.Status, session.LastActivityAt, session.TS = "end", "completed", cp.Stamp(done), cp.Stamp(done)
	ms := done.Sub(began).Milliseconds()
	report.Status, report.DurationMS = "success", &ms
	if err != nil {
		session.Status, report.Status, report.Reason = "failed", "failed", cut(err.Error(), 500)
		switch {
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			report.Reason = fmt.Sprintf("the turn was ended: it took longer than %v", turnLimit)
		case errors.Is(err, context.Canceled):
			session.Status, report.Reason = "canceled", "the turn was cancelled"
		}
		session.Summary = report.Reason
	}
	if err := p.o.Sessions.End(session, &report); err != nil {
		p.o.Log.Error("a session's end was not written", "session", session.SessionID, "error", err)
	}
	if tell := p.reporter(); tell != nil {
		tell.Tell("event/session-activity", cp.SessionActivity{SessionID: session.SessionID, AgentID: cron.AgentID, Revision: t.revision(), TS: cp.Stamp(done)})
	}
	p.report("session "+session.SessionID, "event/session-sync", session, true)
	p.report(key, "cron/report", report, false)
	return session.SessionID
}

// title is the first line of a prompt, bounded.
func title(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return cut(line, 120)
}

// cut bounds a text in bytes, at a rune.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

// mostDrains is how many drains wait at once, each with a timer of its own.
const mostDrains = 16

// drain lets turns end and takes no more; it answers when none runs or time is up.
func (c *crons) drain(ctx context.Context, d cp.Drain, answer cp.Responder) {
	done := func() {
		answer(cp.Reply{Type: "drain/done", Payload: cp.DrainDone{Released: []json.RawMessage{}}}, nil)
	}
	if d.Scope.Kind == "daemon" && !c.drained {
		c.drained = true
		c.p.o.Log.Warn("the control plane has this daemon drained: it takes no turn until it is connected anew")
	}
	if len(c.running) == 0 || d.Scope.Kind != "daemon" {
		done()
		return
	}
	if len(c.idle) >= mostDrains {
		answer(cp.Reply{}, &cp.FrameError{Code: cp.CodeRateLimited, Message: fmt.Sprintf("%d drains are waited for already", mostDrains), Retryable: true})
		return
	}
	var once sync.Once
	c.idle = append(c.idle, func() { once.Do(done) })
	deadline, err := time.Parse(time.RFC3339Nano, d.Deadline)
	if err != nil {
		return
	}
	c.wg.Go(func() {
		timer := time.NewTimer(deadline.Sub(c.p.o.Now()))
		defer timer.Stop()
		select {
		case <-c.ctx.Done():
		case <-ctx.Done():
		case <-timer.C:
			once.Do(done)
		}
	})
}
