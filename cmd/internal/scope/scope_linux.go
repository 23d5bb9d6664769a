// Package scope puts an agent's processes into transient scopes of the user manager, and
// reads back that they are there with the limits that were asked for. Ending a scope and
// saying why it ended goes through the files of its control group, without a bus.
package scope

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

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
	agent := units.Agent{ID: p.Agent, Runtime: Limits(p.Limits), Unbound: p.Unbound}
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
	s := &scope{group: group, limits: p.Limits}
	for _, l := range t.Lost {
		s.notes = append(s.notes, l.String())
	}
	if err := s.readBack(); err != nil {
		return nil, errors.Join(err, group.Kill())
	}
	if at.Exec == 0 {
		s.watch()
	}
	return s, nil
}

// scope is one running scope.
type scope struct {
	group  cgroup.Group
	limits wire.Limits
	notes  []string

	mu    sync.Mutex
	kills uint64 // OOM kills seen

	done       chan struct{} // closed when the watch has ended
	closeWatch func()
}

// readBack compares each limit with what the control group says. An administrator's
// drop-in wins over what we pass, so a limit is never assumed. One that an operator
// asked for and the group lacks is an error; a default that it lacks is a note.
func (s *scope) readBack() error {
	for _, c := range []struct {
		name, file string
		want       uint64
		asked      string
	}{
		{"memory limit", "memory.max", s.limits.MemoryMax, "memory"},
		{"limit of processes and threads", "pids.max", s.limits.TasksMax, "tasks"},
		{"cpu limit", "cpu.max", s.limits.CPUQuota, "cpu"},
	} {
		if c.want == 0 {
			continue
		}
		got, ok := s.limit(c.file)
		switch {
		case !ok && slices.Contains(s.limits.Asked, c.asked):
			return fmt.Errorf("the %s that was asked for is not in force: %s has none in %s (its controller is not delegated to this user); see `systemctl cat user@.service` for Delegate=, or take the limit away with `agentconnect agent edit`", c.name, s.group.Unit(), c.file)
		case !ok:
			s.notes = append(s.notes, fmt.Sprintf("no %s: this user's control groups have no controller for it", c.name))
		case !near(got, c.want):
			s.notes = append(s.notes, fmt.Sprintf("the %s is %d, not %d: a drop-in of this machine's administrator changed it", c.name, got, c.want))
		}
	}
	return nil
}

// limit reads a limit in the units of wire.Limits.
func (s *scope) limit(file string) (uint64, bool) {
	v, ok := s.group.Value(file)
	if !ok {
		return 0, false
	}
	quota, period, _ := strings.Cut(v, " ")
	n, err := strconv.ParseUint(quota, 10, 64)
	if err != nil {
		return 0, false // "max": no limit
	}
	if file != "cpu.max" {
		return n, true
	}
	per, err := strconv.ParseUint(period, 10, 64)
	if err != nil || per == 0 {
		return 0, false
	}
	return n * 1_000_000 / per, true
}

// near allows for the kernel's rounding to pages and periods.
func near(got, want uint64) bool {
	return math.Abs(float64(got)-float64(want)) <= math.Max(float64(want)/50, 1<<16)
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

func (s *scope) count() {
	n, ok := s.group.Events("memory.events")["oom_kill"]
	if !ok {
		return
	}
	s.mu.Lock()
	more := n > s.kills
	s.kills = max(s.kills, n)
	s.mu.Unlock()
	if more {
		// A runtime that lost one of its processes is not to go on half; systemd 253 and later
		// have the kernel end all of them.
		_ = s.group.Kill()
	}
}

func (s *scope) Signal(sig syscall.Signal) error { return s.group.Signal(sig) }
func (s *scope) Kill() error                     { return s.group.Kill() }
func (s *scope) Notes() []string                 { return s.notes }

// Why says whether memory ran out.
func (s *scope) Why() string {
	s.count()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.kills == 0:
		return ""
	case s.limits.MemoryMax > 0:
		return "out of memory: " + bytes(s.limits.MemoryMax) + " limit"
	}
	return "out of memory"
}

// Close lets go of the watch.
func (s *scope) Close() {
	if s.closeWatch != nil {
		s.closeWatch()
		<-s.done
	}
}

// bytes writes a size with a binary unit.
func bytes(n uint64) string {
	for _, u := range []struct {
		size uint64
		name string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.size {
			return strings.TrimSuffix(strconv.FormatFloat(float64(n)/float64(u.size), 'f', 1, 64), ".0") + " " + u.name
		}
	}
	return strconv.FormatUint(n, 10) + " bytes"
}
