// Permissions that a runtime asks for in a turn nobody sits at: somebody at the control
// plane decides, or time does.

package placement

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

// Bounds of open questions.
const (
	askPatience = 10 * time.Minute
	mostAsks    = 256
)

// ask is one question.
type ask struct {
	ID            string  `json:"id"`
	AgentID       string  `json:"agentId"`
	SessionID     string  `json:"sessionId,omitempty"`
	CreatedAt     string  `json:"createdAt"`
	RequesterID   *string `json:"requesterId"` // null by the wire
	RequesterName *string `json:"requesterName"`
	Command       string  `json:"command"`
	Status        string  `json:"status"` // pending, allowed, denied, expired
	ResolvedAt    *string `json:"resolvedAt"`

	decided chan bool
}

// askPermission waits for a decision and returns the chosen option; "" is cancelled.
func (p *Placement) askPermission(ctx context.Context, agent, session, command, allow, deny string) string {
	q := &ask{ID: cp.NewID(), AgentID: agent, SessionID: session, CreatedAt: cp.Stamp(p.o.Now()), Command: cut(command, 230), Status: "pending", decided: make(chan bool, 1)}
	p.mu.Lock()
	if len(p.asks) >= mostAsks {
		p.mu.Unlock()
		return deny
	}
	p.asks[q.ID] = q
	p.mu.Unlock()
	timer := time.NewTimer(askPatience)
	defer timer.Stop()
	status, option := "expired", deny
	select {
	case yes := <-q.decided:
		status = "denied"
		if yes {
			status, option = "allowed", allow
		}
	case <-timer.C:
	case <-ctx.Done():
		option = ""
	}
	p.mu.Lock()
	delete(p.asks, q.ID)
	p.mu.Unlock()
	p.o.Log.Info("permission", "agent", agent, "command", q.Command, "decision", status)
	return option
}

func (p *Placement) permissionRequests(e cp.Envelope) (cp.Reply, *cp.FrameError) {
	var r struct {
		cp.AgentRef
		Limit int `json:"limit"`
	}
	if fe := cp.Decode(e.Payload, &r); fe != nil {
		return cp.Reply{}, fe
	}
	list := []*ask{}
	for _, q := range p.asks {
		if q.AgentID == r.AgentID {
			list = append(list, q)
		}
	}
	slices.SortFunc(list, func(a, b *ask) int { return cmp.Or(cmp.Compare(a.CreatedAt, b.CreatedAt), cmp.Compare(a.ID, b.ID)) })
	if r.Limit > 0 && len(list) > r.Limit {
		list = list[:r.Limit]
	}
	return cp.Reply{Type: "agent/permission-requests/page", Payload: map[string]any{"agentId": r.AgentID, "requests": list}}, nil
}

func (p *Placement) permissionDecision(e cp.Envelope) (cp.Reply, *cp.FrameError) {
	var d struct {
		AgentID   string `json:"agentId"`
		RequestID string `json:"requestId"`
		Decision  string `json:"decision"`
	}
	if fe := cp.Decode(e.Payload, &d); fe != nil {
		return cp.Reply{}, fe
	}
	q := p.asks[d.RequestID]
	switch {
	case q == nil || q.AgentID != d.AgentID:
		return cp.AckReply("no such request is open"), nil
	case d.Decision != "allow" && d.Decision != "deny":
		return reply("", nil, errors.New("decision must be allow or deny"))
	}
	select {
	case q.decided <- d.Decision == "allow":
	default: // decided already
	}
	return cp.AckReply(""), nil
}
