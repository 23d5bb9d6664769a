// What a control plane may do to agents here: each wish judged by the local configuration.

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"time"

	"agentconnect.md/sandbox/cmd/internal/acp"
	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/placement"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// Put makes or changes an agent. The local configuration decides: required mode gives it
// the sandbox whatever was asked, and where the sandbox cannot start the agent is held and
// not run.
func (r *remote) Put(a *agent.Agent, secrets map[string]string) error {
	d := r.d
	cfg := d.config()
	if cfg.RequireSandbox && !a.Sandboxed() {
		yes := true
		a.RunInSandbox = &yes
	}
	gate := d.gate(a)
	if gate != nil && cfg.AllowUnsandboxedFallback {
		no := false
		a.RunInSandbox = &no
		r.log.Warn("an agent of the control plane runs WITHOUT the sandbox that it asks for: security.allowUnsandboxedFallback is on", "agent", a.ID)
		gate = nil
	}
	err := a.Validate()
	if err == nil {
		err = d.builder().Judge(a)
	}
	if err != nil {
		d.store.Release(a.ID)
		r.stopLater(a.ID)
		return err
	}
	old := d.store.Held(a.ID)
	r.mu.Lock()
	was := r.secrets[a.ID]
	r.secrets[a.ID] = secrets
	r.mu.Unlock()
	if err := d.store.Hold(a); err != nil {
		return err
	}
	if gate != nil {
		r.stopLater(a.ID)
		return gate
	}
	why := "the control plane placed it here"
	state := d.sup.State(a.ID).State
	if state == control.StateRunning {
		why = "" // as each connection says again
	}
	if active(state) && (old == nil && !d.inForce(a) || old != nil && (!sameAgent(old, a) || !sameMap(was, secrets))) {
		r.log.Info("an agent is started anew: the control plane changed it", "agent", a.ID)
		r.later(func(ctx context.Context) {
			p, err := d.startAsWanted(a.ID, "", true) // one that is being stopped stays so
			if err == nil && p != nil {
				err = p.Wait(ctx)
			}
			if err != nil {
				r.log.Warn("an agent that the control plane changed did not start", "agent", a.ID, "error", err)
			}
		})
	} else {
		r.later(func(context.Context) { _ = d.startIfWanted(a.ID, why) })
	}
	return nil
}

// inForce reports whether the agent runs with this configuration, as far as is known.
func (d *Daemon) inForce(a *agent.Agent) bool {
	text, err := a.Encode()
	d.mu.Lock()
	defer d.mu.Unlock()
	r := d.records[a.ID]
	return err == nil && (r == nil || r.text == "" || r.text == string(text))
}

func sameAgent(a, b *agent.Agent) bool {
	x, err1 := a.Encode()
	y, err2 := b.Encode()
	return err1 == nil && err2 == nil && string(x) == string(y)
}

func sameMap(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			return false
		}
	}
	return true
}

// later runs what takes time behind the control plane's back; it ends with the daemon.
func (r *remote) later(f func(context.Context)) {
	r.turns.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), r.d.patience())
		defer cancel()
		f(ctx)
	})
}

func (d *Daemon) patience() time.Duration {
	cfg := d.config()
	return cfg.StopGrace + cfg.KillGrace + endMargin
}

func (r *remote) stopLater(id string) {
	if !active(r.d.sup.State(id).State) {
		return
	}
	r.later(func(ctx context.Context) {
		if err := r.d.sup.Stop(id).Wait(ctx); err != nil {
			r.d.log.Warn("an agent did not stop", "agent", id, "error", err)
		}
	})
}

// Drop stops an agent and forgets it.
func (r *remote) Drop(id string, purge bool) error {
	r.mu.Lock()
	delete(r.secrets, id)
	r.mu.Unlock()
	r.d.store.Release(id)
	if r.d.placedHere(id) {
		// It stays the control plane's, and has no configuration that can be used.
		r.stopLater(id)
		return nil
	}
	r.later(func(context.Context) {
		r.d.forget(id, r.d.patience())
		if !purge {
			return
		}
		if err := r.d.store.Remove(id, true); err != nil && !errors.Is(err, agent.ErrNotFound) {
			r.d.log.Error("the directory of a removed agent was not removed", "agent", id, "error", err)
		}
		if err := agent.RemoveServers(r.d.config().Root, id); err != nil {
			r.d.log.Error("what a removed agent's MCP servers kept was not removed", "agent", id, "error", err)
		}
	})
	return nil
}

// Stop stops an agent; it stays stopped until there is work for it.
func (r *remote) Stop(id string, _ bool) error {
	_, err := r.d.stop(id)
	if errors.Is(err, agent.ErrNotFound) || errors.Is(err, errUnread) {
		r.d.sup.Stop(id)
		return nil
	}
	return err
}

// Turn runs one prompt in a session of its own.
func (r *remote) Turn(ctx context.Context, id string, t placement.Turn) error {
	d := r.d
	a, err := d.load(id)
	if err != nil {
		return err
	}
	socket, err := d.attach(ctx, id)
	if err != nil {
		return err
	}
	conn, err := attachTo(ctx, socket)
	if err != nil {
		return err
	}
	policy, err := d.builder().Policy(a)
	if err != nil {
		conn.Close()
		return err
	}
	res, err := acp.Prompt(ctx, conn, acp.PromptOptions{
		Cwd: policy.Workspace, Text: t.Text, OnUpdate: t.Update, Client: "agentconnect", Version: d.o.Build,
		Permission: func(ctx context.Context, title string, options []acp.PermissionOption) string {
			allow, deny := "", ""
			for _, o := range options {
				switch o.Kind {
				case "allow_once":
					allow = o.ID
				case "reject_once":
					deny = o.ID
				}
			}
			return t.Permission(ctx, title, allow, deny)
		},
	})
	switch {
	case err != nil:
		return err
	case res.StopReason == "cancelled":
		return context.Canceled
	case res.StopReason != "end_turn":
		return fmt.Errorf("the turn ended with %s", res.StopReason)
	}
	return nil
}

// attachTo connects to an agent's socket as an ACP client.
func attachTo(ctx context.Context, socket string) (net.Conn, error) {
	c, err := control.DialAgent(ctx, socket)
	if err != nil {
		return nil, err
	}
	if err := request(ctx, c, wire.Request{Version: wire.Version, Op: wire.OpAttach}); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// request sends one request line and reads the reply line, byte by byte: what follows is
// the agent's.
func request(ctx context.Context, c *net.UnixConn, req wire.Request) error {
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	line, err := json.Marshal(req)
	if err != nil {
		return err
	}
	if _, err := c.Write(append(line, '\n')); err != nil {
		return err
	}
	var answer []byte
	for b := make([]byte, 1); len(answer) < maxState; {
		if _, err := c.Read(b); err != nil {
			return err
		}
		if b[0] == '\n' {
			break
		}
		answer = append(answer, b[0])
	}
	var r wire.Reply
	if err := json.Unmarshal(answer, &r); err != nil {
		return fmt.Errorf("agent socket: %w", err)
	}
	if !r.OK {
		return errors.New(printable(r.Error))
	}
	return nil
}

// EmptyWorkspace reports whether there is nothing in an agent's workspace.
func (r *remote) EmptyWorkspace(id string) (bool, error) {
	dir := r.d.store.Dirs(id).Workspace
	if a := r.d.store.Held(id); a != nil {
		dir = r.d.store.WorkspacePath(a)
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return len(entries) == 0, err
}

// Declared reports whether the machine's administrator has an agent of this id.
func (r *remote) Declared(id string) bool {
	return slices.ContainsFunc(r.d.config().SystemAgents, func(s config.SystemAgent) bool { return s.ID == id })
}

// Taken reports whether an id, or its directory, is somebody's.
func (r *remote) Taken(id string) bool {
	if r.Declared(id) {
		return true
	}
	_, err := os.Lstat(r.d.store.Dirs(id).Agent)
	return !errors.Is(err, fs.ErrNotExist)
}

// Restart ends the daemon where something starts it again.
func (r *remote) Restart(reason string) error {
	if getenv(r.d.o.Environ, "INVOCATION_ID") == "" {
		return errors.New("nothing would start this daemon again: it does not run as a service; run `agentconnect up` on its machine")
	}
	r.log.Info("restart asked for by the control plane", "reason", printable(reason))
	// The answer goes out first.
	r.later(func(ctx context.Context) {
		timer := time.NewTimer(500 * time.Millisecond)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		r.d.shutdown(errRestart)
	})
	return nil
}

// placedConfig is the configuration of a placed agent, without its secrets.
func (d *Daemon) placedConfig(id string) (json.RawMessage, error) {
	a := d.store.Held(id)
	if a == nil {
		return nil, fmt.Errorf("%w: %s", agent.ErrNotFound, id)
	}
	return a.Encode()
}
