package sandbox

import "testing"

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
