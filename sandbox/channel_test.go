package sandbox

import (
	"slices"
	"testing"
)

func TestTheGuestsSocketIsNotCoveredLikeOthers(t *testing.T) {
	const run = "/run/user/1000/agentconnect/in-1"
	p, h := alice(), debian()
	p.ChannelDir, p.SecretsDir = run+"/c", run+"/s"
	h.socket(run + "/c/socket").socket(run + "/s/foreign")
	plan := mustCompile(t, p, h)
	for path, want := range map[string]Verdict{
		ChannelSocket:            {Path: ChannelSocket, Access: ReadOnly, Source: run + "/c/socket", Why: "the socket of our helper inside"},
		SecretsPath + "/TOKEN":   {Path: SecretsPath + "/TOKEN", Access: ReadOnly, Source: run + "/s/TOKEN", Why: "the agent's secrets"},
		SecretsPath + "/foreign": {Path: SecretsPath + "/foreign", Access: Hidden, Why: "a socket of the host"},
	} {
		if got := plan.Explain(path); got != want {
			t.Errorf("%s: %+v, want %+v", path, got, want)
		}
	}
	p.SecretsDir = "run/../s"
	if _, err := Compile(p, h); err == nil {
		t.Error("a path that is not clean was taken")
	}
}

func TestOwnControlGroupIsShown(t *testing.T) {
	for _, read := range []ReadMode{ReadSystem, ReadHost} {
		p, h := alice(), debian()
		p.Read = read
		if got := mustCompile(t, p, h).Explain(CgroupPath).Why; got == "the control group that the agent is in" {
			t.Errorf("read %s: shown where there is none", read)
		}
		p.OwnCgroup = true
		plan := mustCompile(t, p, h)
		want := Verdict{Path: CgroupPath + "/memory.max", Access: ReadOnly, Why: "the control group that the agent is in"}
		if got := plan.Explain(want.Path); got != want || !plan.OwnCgroup {
			t.Errorf("read %s: %+v, want %+v", read, got, want)
		}
		// In read mode host the mount point is the host's.
		if got := slices.ContainsFunc(plan.Mounts, func(m Mount) bool { return m.Target == CgroupPath && m.Op == OpDir }); got != (read == ReadSystem) {
			t.Errorf("read %s: made: %v", read, got)
		}
	}
}
