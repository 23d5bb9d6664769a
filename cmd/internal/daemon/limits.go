// Limits that change while their agent runs, and what its units say besides what we asked for.

package daemon

import (
	"context"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// limiter is a Supervision that enforces limits.
type limiter interface {
	// SetLimits changes the limits of a running agent from was (nil: not known) to now. What
	// somebody else set by a drop-in stays.
	SetLimits(ctx context.Context, id string, was *wire.Limits, now wire.Limits) error
	// DropIns are the files by which somebody changes the agent's units.
	DropIns(ctx context.Context, id string) ([]string, error)
}

// lister is a Supervision that tells at once how all agents are; one that it leaves out was
// never started. Its error says why nothing is known.
type lister interface {
	States(ctx context.Context) (map[string]Unit, error)
}

// states says how the agents are, asking for all of them at once where that can be done.
func (d *Daemon) states(ctx context.Context) func(id string) Unit {
	sup, ok := d.sup.(lister)
	if !ok {
		return d.sup.State
	}
	all, err := sup.States(ctx)
	if err != nil {
		return func(string) Unit { return Unit{State: control.StateFailed, Reason: err.Error()} }
	}
	return func(id string) Unit { return all[id] }
}

// limitsTimeout bounds the change of one agent's limits.
const limitsTimeout = 5 * time.Second

// adjustAll gives running agents the limits that the configuration now has for them.
func (d *Daemon) adjustAll(entries []config.AgentEntry) {
	for _, e := range entries {
		if e.Agent == nil {
			continue
		}
		d.adjustNetwork(context.Background(), e.ID, e.Agent)
		d.adjust(context.Background(), e.ID, e.Agent)
	}
}

// adjust takes the limits of a into force, where a differs from what runs in nothing else.
// Limits that come from the defaults can change without a.
func (d *Daemon) adjust(ctx context.Context, id string, a *agent.Agent) {
	sup, ok := d.sup.(limiter)
	if !ok {
		return
	}
	r := d.locked(id)
	defer r.wish.Unlock()
	d.mu.Lock()
	inForce, was, said := r.inForce, r.limits, r.text
	d.mu.Unlock()
	if inForce == nil {
		return // on its way up: it gets what is in force then
	}
	if !sameButLimits(inForce, a) {
		a = inForce
	}
	text, err := a.Encode()
	if err != nil {
		d.log.Error("limits", "agent", id, "error", err)
		return
	}
	now := d.builder().limits(a)
	if now == nil {
		return
	}
	changed := was == nil || !sameLimits(*was, *now)
	if !changed && string(text) == said {
		return
	}
	if d.sup.State(id).State != control.StateRunning {
		return
	}
	if changed {
		ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
		defer cancel()
		if err := sup.SetLimits(ctx, id, was, *now); err != nil {
			d.log.Error("the limits of a running agent are not changed; its next start has the new ones", "agent", id, "error", err)
			return // status says that it is to be restarted
		}
		d.log.Info("limits changed live", "agent", id)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if r.inForce == inForce { // not started anew meanwhile
		r.inForce, r.text, r.limits = a, string(text), now
	}
}

// sameButLimits reports whether two configurations differ in their limits at most.
func sameButLimits(a, b *agent.Agent) bool {
	x, y := *a, *b
	x.Limits, y.Limits = agent.Limits{}, agent.Limits{}
	tx, xerr := x.Encode()
	ty, yerr := y.Encode()
	return xerr == nil && yerr == nil && string(tx) == string(ty)
}

// sameLimits compares what is enforced. Who asked for it counts at a start alone.
func sameLimits(a, b wire.Limits) bool {
	swap := func(l wire.Limits) uint64 {
		if l.MemorySwapMax == nil {
			return ^uint64(0)
		}
		return *l.MemorySwapMax
	}
	return a.MemoryMax == b.MemoryMax && swap(a) == swap(b) && a.CPUQuota == b.CPUQuota && a.CPUWeight == b.CPUWeight && a.TasksMax == b.TasksMax
}

// dropIns fills in by which files somebody changes the agent's units.
func (d *Daemon) dropIns(ctx context.Context, a *control.AgentStatus) {
	sup, ok := d.sup.(limiter)
	if !ok {
		return
	}
	files, err := sup.DropIns(ctx, a.ID)
	if err != nil {
		a.Notes = append(a.Notes, "whether somebody changed its units is not known: "+err.Error())
		return
	}
	a.DropIns = files
}
