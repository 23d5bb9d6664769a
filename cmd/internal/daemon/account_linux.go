package daemon

import (
	"agentconnect.md/sandbox/cmd/internal/accounting"
	"agentconnect.md/sandbox/cmd/internal/cgroup"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/units"
)

// account fills in what a running agent's runtime uses, and which limits are not in
// force. It returns what all agents use together. It goes by the supervisor's group and
// through files alone, so that it works for a frozen agent, too.
func (d *Daemon) account(a *control.AgentStatus) (all *accounting.Usage) {
	if d.sup.Name() == "direct" || a.PID <= 1 {
		return nil
	}
	service, err := cgroup.Of(a.PID)
	if err != nil || service.Unit() != units.ServiceName(a.ID) {
		return nil // it ended just now
	}
	slice := service.Parent()
	if root := slice.Parent(); root.Unit() == units.Root {
		all = accounting.Read(root)
	}
	scope := slice.Child(units.ScopeName(a.ID))
	if !scope.Populated() {
		return all
	}
	a.Usage = accounting.Read(scope)
	// The slice's counter outlives the scope that ran out of memory.
	if kills := accounting.Read(slice).OOMKills; kills != nil {
		a.Usage.OOMKills = kills
	}
	d.mu.Lock()
	r := d.records[a.ID]
	if r == nil || r.limits == nil {
		d.mu.Unlock()
		return all
	}
	want := *r.limits
	d.mu.Unlock()
	notes, err := accounting.Unmet(scope, want)
	if err != nil {
		notes = append(notes, err.Error())
	}
	a.Unmet = notes
	return all
}
