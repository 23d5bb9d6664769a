package daemon

import (
	"bytes"
	"fmt"
	"os"

	"agentconnect.md/sandbox/cmd/internal/accounting"
	"agentconnect.md/sandbox/cmd/internal/cgroup"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/units"
)

// account fills in what a running agent's runtime uses, and which limits are not in
// force. It goes by the supervisor's group and through files alone, so that it works for a
// frozen agent, too. all is told how to read what all agents use together. here is false when
// the supervisor has ended just now.
func (d *Daemon) account(a *control.AgentStatus, all func(read func() *accounting.Usage)) (here bool) {
	if d.sup.Name() == "direct" || a.PID <= 1 {
		return true
	}
	service, err := cgroup.Of(a.PID)
	if err != nil || service.Unit() != units.ServiceName(a.ID) {
		return false
	}
	slice := service.Parent()
	if root := slice.Parent(); root.Unit() == units.Root {
		all(func() *accounting.Usage { return accounting.Read(root) })
	}
	scope, done := slice.Child(units.ScopeName(a.ID)).Open()
	defer done()
	if !scope.Populated() {
		return true
	}
	a.Usage = accounting.Read(scope)
	// The slice's counter outlives the scope that ran out of memory.
	if kills := accounting.OOMKills(slice); kills != nil {
		a.Usage.OOMKills = kills
	}
	d.mu.Lock()
	r := d.records[a.ID]
	if r == nil || r.limits == nil {
		d.mu.Unlock()
		return true
	}
	want := *r.limits
	d.mu.Unlock()
	notes, err := accounting.Unmet(scope.Unit(), a.Usage.Limits, want)
	if err != nil {
		notes = append(notes, err.Error())
	}
	a.Unmet = notes
	return true
}

// halted says why an agent's supervisor cannot answer, as the kernel tells; empty: nothing keeps
// it from that.
func halted(id string, pid int) string {
	if pid <= 1 {
		return ""
	}
	if g, err := cgroup.Of(pid); err == nil && g.Events("cgroup.events")["frozen"] == 1 {
		return fmt.Sprintf("its supervisor is frozen: it goes on after `systemctl --user thaw '%s' '%s'`", units.SliceName(id), units.ServiceName(id))
	}
	// The state stands behind the name, which may hold anything.
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	if i := bytes.LastIndex(b, []byte(") ")); i >= 0 && i+2 < len(b) && (b[i+2] == 'T' || b[i+2] == 't') {
		return fmt.Sprintf("its supervisor is halted by a signal: it goes on after `kill -CONT %d`", pid)
	}
	return ""
}
