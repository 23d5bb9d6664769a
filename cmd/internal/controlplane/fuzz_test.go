package controlplane

import (
	"encoding/json"
	"testing"
	"time"
)

// FuzzEnvelope: whatever a control plane sends is read or refused, and a refusal can be
// answered.
func FuzzEnvelope(f *testing.F) {
	id := NewID()
	f.Add([]byte(`{"v":1,"id":"` + id + `","ts":"2026-11-29T14:20:24.795Z","type":"agent/upsert","payload":{},"epoch":1,"orgId":"o"}`))
	f.Add([]byte(`{"v":1,"id":7}`))
	f.Add([]byte(`{"v":1,"id":"` + id + `","type":"a","payload":null,"corr":"x"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, to, err := decode(data)
		if !ValidID(to) && to != nilID {
			t.Errorf("the answer would go to %q", to)
		}
		if err != nil {
			return
		}
		if !ValidID(e.ID) || e.Type == "" || len(e.Payload) == 0 {
			t.Errorf("taken: %+v", e)
		}
		if _, err := encode(Envelope{Type: e.Type, Corr: e.ID, OrgID: e.OrgID}, Ack{}); err != nil && len(data) < MaxMessage/8 {
			t.Errorf("no answer can be made: %v", err)
		}
	})
}

// FuzzPayloads reads every payload that is read after a handshake.
func FuzzPayloads(f *testing.F) {
	f.Add([]byte(`{"agentId":"x","name":"y","configRevision":"1","env":{"a":"b"},"memory":{"provider":"none"},"schedule":"@daily","timezone":"Europe/Berlin"}`))
	f.Fuzz(func(_ *testing.T, data []byte) {
		for _, v := range []any{
			&AuthOK{}, &RegisterOK{}, &AgentSpec{}, &AgentUpsert{}, &AgentDetach{}, &AgentActivate{}, &AgentStop{}, &Cron{}, &CronRef{}, &HistoryRequest{},
			&ToolBodyRequest{}, &Visibility{}, &VisibilitySnapshot{}, &MCPServer{}, &DaemonControl{}, &Drain{}, &CredentialGrant{}, &ConfigPush{}, &FrameError{},
		} {
			_ = Decode(data, v)
		}
		var c Cron
		if json.Unmarshal(data, &c) == nil {
			if s, err := c.Parse(); err == nil {
				s.Next(time.Unix(1_800_000_000, 0))
			}
		}
	})
}
