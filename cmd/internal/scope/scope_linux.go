// Package scope puts an agent's processes into transient scopes of the user manager, and
// reads back that they are there with the limits that were asked for. Ending a scope and
// saying why it ended goes through the files of its control group, without a bus.
package scope

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/accounting"
	"agentconnect.md/sandbox/cmd/internal/cgroup"
	"agentconnect.md/sandbox/cmd/internal/supervisor"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/units"
)

// Bus makes transient units; package dbusctl is one.
type Bus interface {
	Version() units.Version
	// StartTransient returns when the unit's start job is done, with its true result.
	StartTransient(ctx context.Context, t units.Transient) error
	// Discard makes the name of a unit that is over free again.
	Discard(ctx context.Context, unit string) error
	Close()
}

// Placer places the processes of one agent.
type Placer struct {
	// Dial connects to the bus; each placement has a connection of its own, so that the
	// supervisor at rest holds none.
	Dial   func(ctx context.Context) (Bus, error)
	Agent  string
	Limits wire.Limits
	// Unbound: commands of an agent that does not run; their scopes hang on no service.
	Unbound bool

	runtime atomic.Pointer[cgroup.Group] // of the agent's own scope, the last one
}

var _ supervisor.Placer = (*Placer)(nil)

// Place puts pid into the agent's scope, or a command's, and reads back that it is there.
func (p *Placer) Place(ctx context.Context, at supervisor.Placement, pid int) (supervisor.Scope, error) {
	bus, err := p.Dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("scope: %w", err)
	}
	defer bus.Close()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("scope: %w", err)
	}
	defer unix.Close(fd)
	limits := p.limits(at)
	agent := units.Agent{ID: p.Agent, Runtime: Limits(limits), Unbound: p.Unbound}
	process := units.Process{PID: uint32(pid), FD: fd} //nolint:gosec // a pid
	t := agent.Scope(bus.Version(), process)
	if at.Exec > 0 {
		t = agent.Exec(bus.Version(), at.Exec, process)
	}
	if err := bus.StartTransient(ctx, t); err != nil {
		// One of the same name that is over but not collected, as after a crash.
		if derr := bus.Discard(ctx, t.Name); derr != nil {
			return nil, errors.Join(err, derr)
		}
		if err := bus.StartTransient(ctx, t); err != nil {
			return nil, err
		}
	}
	// When the call returned the job was done; only now the process is where it belongs.
	group, err := cgroup.Of(pid)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.Name, err)
	}
	if group.Unit() != t.Name {
		return nil, fmt.Errorf("%s: systemd made it, but process %d is in %s", t.Name, pid, group.Name)
	}
	s := &scope{group: group, slice: group.Parent()}
	for _, l := range t.Lost {
		s.notes = append(s.notes, l.String())
	}
	if s.unmet, err = accounting.Unmet(t.Name, accounting.InForce(group), limits); err != nil {
		return nil, &supervisor.LimitError{Err: err} // whoever started the process ends it
	}
	if at.Exec == 0 {
		p.runtime.Store(&group)
		s.watch()
	}
	return s, nil
}

// limits are those of the spec; for a command beside a running runtime those that are in
// force for it by now, since they change live.
func (p *Placer) limits(at supervisor.Placement) wire.Limits {
	l := p.Limits
	group := p.runtime.Load()
	if at.Exec == 0 || group == nil || !group.Populated() {
		return l
	}
	or := func(n *uint64) uint64 {
		if n == nil {
			return 0 // none
		}
		return *n
	}
	in := accounting.InForce(*group)
	l.MemoryMax, l.CPUQuota, l.TasksMax = or(in.Memory), or(in.CPUQuota), or(in.Tasks)
	return l
}

// scope is one running scope.
type scope struct {
	group, slice cgroup.Group
	notes, unmet []string

	mu     sync.Mutex
	before events  // of the slice, when the scope began
	seen   events  // of the scope
	limit  *uint64 // bytes, when memory ran out last

	done       chan struct{} // closed when the watch has ended
	closeWatch func()
}

// events are counters of memory.events.
type events struct {
	oom  uint64 // times that the group's own limit was reached for good
	kill uint64 // processes killed, for whosever limit
}

func memoryEvents(g cgroup.Group) (events, bool) {
	e := g.Events("memory.events")
	return events{e["oom"], e["oom_kill"]}, e != nil
}

// watch counts OOM kills as they happen: the group is gone soon after its last process.
// The kernel tells of a change of memory.events; at rest nothing runs here.
func (s *scope) watch() {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return
	}
	if _, err := unix.InotifyAddWatch(fd, s.group.Path+"/memory.events", unix.IN_MODIFY); err != nil {
		unix.Close(fd)
		return // no memory controller: nothing is killed for memory in this group alone
	}
	s.before, _ = memoryEvents(s.slice)
	s.limit = accounting.InForce(s.group).Memory
	f := os.NewFile(uintptr(fd), "memory.events")
	s.done = make(chan struct{})
	s.closeWatch = func() { f.Close() }
	go func() {
		defer close(s.done)
		buf := make([]byte, 4096)
		for {
			if _, err := f.Read(buf); err != nil {
				return
			}
			s.count()
		}
	}()
}

// count looks for kills that are new.
func (s *scope) count() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, ok := memoryEvents(s.group)
	if !ok {
		// The manager was faster and removed the empty group. Its slice has counted the same.
		if all, ok := memoryEvents(s.slice); ok && s.seen.kill == 0 {
			s.seen = events{all.oom - min(all.oom, s.before.oom), all.kill - min(all.kill, s.before.kill)}
		}
		return
	}
	more := now.kill > s.seen.kill
	s.seen = now
	if !more {
		return
	}
	// It may have been changed since the start.
	if l := accounting.InForce(s.group).Memory; l != nil {
		s.limit = l
	}
	// A runtime that lost one of its processes is not to go on half; systemd 253 and later
	// have the kernel end all of them.
	_ = s.group.Kill()
}

func (s *scope) Signal(sig syscall.Signal) error   { return s.group.Signal(sig) }
func (s *scope) Kill() error                       { return s.group.Kill() }
func (s *scope) Thaw() error                       { return s.group.Thaw() }
func (s *scope) Freeze() (already bool, err error) { return s.group.Freeze() }
func (s *scope) Notes() []string                   { return s.notes }
func (s *scope) Unmet() []string                   { return s.unmet }

// Why says whether memory ran out.
func (s *scope) Why() string {
	if s.closeWatch == nil {
		return "" // nothing counts memory here
	}
	s.count()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.seen.kill == 0:
		return ""
	case s.seen.oom == 0:
		return "out of memory: a limit above this agent's, or the machine's memory, was reached"
	case s.limit == nil:
		return "out of memory"
	}
	return "out of memory: " + accounting.Bytes(*s.limit) + " limit"
}

// Close lets go of the watch.
func (s *scope) Close() {
	if s.closeWatch != nil {
		s.closeWatch()
		<-s.done
	}
}
