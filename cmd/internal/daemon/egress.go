// Rules of the network that change while their agent runs.

package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// adjustNetwork takes the rules of a into force, where its agent runs in the same mode.
func (d *Daemon) adjustNetwork(ctx context.Context, id string, a *agent.Agent) {
	r := d.locked(id)
	defer r.wish.Unlock()
	d.mu.Lock()
	inForce, was, said := r.inForce, r.egress, r.text
	d.mu.Unlock()
	if inForce == nil || a.Network.Mode != inForce.Network.Mode {
		return // on its way up, or to be restarted
	}
	next := *inForce
	next.Network = a.Network
	text, err := next.Encode()
	if err != nil {
		d.log.Error("network", "agent", id, "error", err)
		return
	}
	b := d.builder()
	now := b.egress(&next)
	if now == nil {
		return
	}
	changed := was == nil || !reflect.DeepEqual(was.Policy, now.Policy)
	if !changed && string(text) == said {
		return
	}
	u := d.sup.State(id)
	if u.State != control.StateRunning {
		return
	}
	if changed {
		ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
		defer cancel()
		if err := sayEgress(ctx, u.Socket, wire.EgressWord{Policy: &now.Policy}); err != nil {
			d.log.Error("the network's rules of a running agent are not changed; its next start has the new ones", "agent", id, "error", err)
			return // status says that it is to be restarted
		}
		d.log.Info("network rules changed live", "agent", id)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if r.inForce == inForce { // not started anew meanwhile
		r.inForce, r.text, r.egress, r.network = &next, string(text), now, b.Network(&next)
	}
}

// egressWord passes the operator's word on to a running agent.
func (d *Daemon) egressWord(ctx context.Context, id string, w control.Egress) error {
	st, err := d.agentNow(ctx, id)
	if err != nil {
		return err
	}
	if st.State != control.StateRunning || st.Socket == "" {
		return &Refusal{Code: 1, Text: fmt.Sprintf("agent %s is not running, and your word would hold for a run alone; say it with --always", id)}
	}
	ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
	defer cancel()
	return sayEgress(ctx, st.Socket, wire.EgressWord{Allow: w.Allow, Host: w.Host, Scope: w.Scope})
}

// sayEgress says a word about the network to a supervisor.
func sayEgress(ctx context.Context, socket string, w wire.EgressWord) error {
	c, err := control.DialAgent(ctx, socket)
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	req, err := json.Marshal(wire.Request{Version: wire.Version, Op: wire.OpEgress, Egress: &w})
	if err != nil {
		return err
	}
	if _, err := c.Write(append(req, '\n')); err != nil {
		return err
	}
	var r wire.Reply
	if err := json.NewDecoder(io.LimitReader(c, maxState)).Decode(&r); err != nil {
		return err
	}
	if !r.OK {
		return errors.New(printable(r.Error))
	}
	return nil
}
