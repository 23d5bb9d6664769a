// The guard of the git seals, as far as the supervisor has to do with it.

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync/atomic"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/sealguard"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/gitseal"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

// guardSeals begins to watch. Without a boundary there is nothing to watch.
func (s *Supervisor) guardSeals() error {
	if !s.spec.Sandboxed {
		return nil
	}
	s.audit.Add(audit.Record{Kind: audit.KindLife, Event: "start", Text: "started, git seals " + sandbox.GitSeals(s.spec.Policy.Nesting)})
	var err error
	s.guard, err = sealguard.New(sealguard.Options{
		Log: s.opts.Log, Audit: s.audit, Roots: gitseal.Roots(s.spec.Policy, hostfacts.Host{}), Nesting: s.spec.Policy.Nesting,
		Stop: func(why string) { s.ended.CompareAndSwap(nil, &why) },
	})
	return err
}

// review says, at the end, what the agent left that programs of the host would act on.
func (s *Supervisor) review() {
	s.mu.Lock()
	before := s.before
	s.mu.Unlock()
	if before == nil {
		return
	}
	for _, f := range before.Review(gitseal.Options{Roots: gitseal.Roots(s.spec.Policy, hostfacts.Host{}), Home: s.spec.Policy.Home, Own: s.spec.Policy.AgentDir}) {
		kind := audit.KindTrusted
		if f.Git {
			kind = audit.KindGit
		}
		s.audit.Add(audit.Record{Kind: kind, Event: f.Event, Path: f.Path, Text: f.Text})
	}
}

// expect has the guard watch before anything runs: behind the start gate.
func (s *Supervisor) expect(plan *sandbox.Plan) *sealguard.Expected {
	s.mu.Lock()
	found := s.found
	s.mu.Unlock()
	if s.guard == nil || plan == nil || found == nil {
		return nil
	}
	return s.guard.Expect(plan, found.Absent)
}

// endWait bounds how long a sandbox whose first process has ended takes to end.
const endWait = 10 * time.Second

// endsAtOnce reports whether the program has ended, or does, by what kept the guard from watching:
// when its first process has ended before it was known or looked at, all of its sandbox has, and
// the rest is only not waited for yet.
func (p *program) endsAtOnce(err error) bool {
	select {
	case <-p.Done():
		return true
	default:
	}
	if p.Plan == nil {
		return false
	}
	if p.Init(context.Background()) != 0 && !saysEnded(err) {
		return false
	}
	select {
	case <-p.Done():
		return true
	case <-time.After(endWait):
		return false
	}
}

// saysEnded reports whether a file of a process could not be opened or read because it has ended.
// Its mounts, while it is not waited for, are EINVAL to the kernel.
func saysEnded(err error) bool {
	return errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ESRCH) || errors.Is(err, fs.ErrNotExist)
}

// watched puts a started program under the guard.
func (s *Supervisor) watched(p *program, expected *sealguard.Expected) error {
	if expected == nil {
		return nil
	}
	remove, err := expected.Started(&guarded{program: p})
	if err != nil {
		if p.endsAtOnce(err) {
			return nil
		}
		p.Kill()
		return fmt.Errorf("the git seals cannot be watched: %w", err)
	}
	// Behind the start, which would wait for it: what links were there before was taken down.
	s.mu.Lock()
	before := s.before
	s.mu.Unlock()
	if err := s.guard.Inside(before.Inner()); err != nil {
		remove()
		p.Kill()
		return fmt.Errorf("the git seals cannot be watched: %w", err)
	}
	s.wg.Go(func() {
		<-p.Done()
		remove()
	})
	return nil
}

// guarded is a program as the guard sees it.
type guarded struct {
	*program
	already bool
}

func (g *guarded) Init() int { return g.SetUp(context.Background()) }

func (g *guarded) Freeze() (err error) {
	if g.scope == nil {
		err = g.Halt()
	} else {
		g.already, err = g.scope.Freeze()
	}
	if err != nil && g.Ended() {
		return nil
	}
	return err
}

func (g *guarded) Thaw() (err error) {
	switch {
	case g.scope == nil:
		err = g.Resume()
	case !g.already:
		err = g.scope.Thaw()
	}
	if err != nil && g.Ended() {
		return nil
	}
	return err
}

func (g *guarded) Kill() {
	g.sweep()
	g.Process.Kill()
}

func (g *guarded) Ended() bool {
	select {
	case <-g.Done():
		return true
	default:
		return false
	}
}

// stoppedFor is why the guard ended the agent, or nil.
func stoppedFor(why *atomic.Pointer[string]) error {
	if w := why.Load(); w != nil {
		return errors.New(*w)
	}
	return nil
}
