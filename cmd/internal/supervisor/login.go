package supervisor

import (
	"context"
	"sync"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/logins"
)

// carriedLogin is the agent's copy of its user's login, kept in step while the runtime runs.
// nil carries nothing.
type carriedLogin struct {
	s      *Supervisor
	sync   *logins.Sync
	log    *audit.Log
	stop   context.CancelFunc
	watch  sync.WaitGroup
	failed string
}

// carryLogin gives the agent the login that its spec names, before the runtime starts. That it
// cannot is said, and no reason not to start: the runtime says itself what it lacks.
func (s *Supervisor) carryLogin() *carriedLogin {
	if s.spec.Login == "" {
		return nil
	}
	c := &carriedLogin{s: s}
	p := s.spec.Policy
	var err error
	if c.log, err = audit.New(p.Root, s.spec.Agent, func(err error) { s.opts.Log.Warn("audit log", "error", err) }); err != nil {
		c.failed = "the login is not carried over: " + err.Error()
		return c
	}
	if c.sync, err = logins.Open(logins.Kind(s.spec.Login), p.Home, p.HomeDir, s.opts.Log, c.log); err == nil {
		err = c.sync.Begin()
	}
	if err != nil {
		c.failed = "the login is not carried over: " + err.Error()
		return c
	}
	ctx, stop := context.WithCancel(context.Background())
	c.stop = stop
	c.watch.Go(func() { c.sync.Watch(ctx) })
	return c
}

// hint says that the runtime is not logged in.
func (c *carriedLogin) hint(hint string) string {
	switch {
	case c == nil:
		return hint
	case c.failed != "":
		return c.failed
	}
	return hint
}

// end carries a last refresh over. The runtime has ended.
func (c *carriedLogin) end() {
	if c == nil {
		return
	}
	if c.stop != nil {
		c.stop()
		c.watch.Wait()
		if err := c.sync.Settle(); err != nil {
			c.s.opts.Log.Warn("the login could not be carried over", "reason", err)
		}
	}
	if c.sync != nil {
		c.sync.Close()
	}
	if err := c.log.Close(); err != nil {
		c.s.opts.Log.Warn("audit log", "error", err)
	}
}
