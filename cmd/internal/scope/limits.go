package scope

import (
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/units"
)

// Limits are the wire's limits as package units takes them.
func Limits(l wire.Limits) units.Limits {
	some := func(v uint64) *uint64 {
		if v == 0 {
			return nil
		}
		return &v
	}
	return units.Limits{
		MemoryHigh: some(l.MemoryHigh), MemoryMax: some(l.MemoryMax), MemorySwapMax: l.MemorySwapMax,
		CPUQuota: some(l.CPUQuota), CPUWeight: some(l.CPUWeight), TasksMax: some(l.TasksMax),
	}
}
