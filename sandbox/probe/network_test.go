package probe

import "testing"

func TestNetworkThatCannotLeadConnectionsIsAWarning(t *testing.T) {
	for detail, want := range map[string]string{"": OK, "this kernel has no nft address translation": Warning} {
		r := &run{}
		r.network([]Finding{{What: FindingNetwork, OK: true, Detail: detail}})
		if len(r.checks) != 1 || r.checks[0].Code != CodeNetnsRefused || r.checks[0].Result != want || (want == Warning) != (r.checks[0].Remedy != "") {
			t.Errorf("%q: %+v", detail, r.checks)
		}
	}
}
