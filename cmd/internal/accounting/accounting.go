// Package accounting says what the processes of a unit use and which limits hold for them,
// read from the control group's files when somebody asks. It keeps nothing, polls nothing,
// sets no limit, and needs neither bus nor manager.
package accounting

// Usage is what the processes of a control group use. Nil: this kernel, or this user's
// manager, does not count it.
type Usage struct {
	Memory     *uint64 `json:"memory,omitempty"`     // bytes now
	MemoryPeak *uint64 `json:"memoryPeak,omitempty"` // bytes; Linux 5.19
	CPU        *uint64 `json:"cpuUsec,omitempty"`    // µs of processor time so far
	Tasks      *uint64 `json:"tasks,omitempty"`      // processes and threads now
	OOMKills   *uint64 `json:"oomKills,omitempty"`   // processes that the kernel killed for memory
	// The share of the last ten seconds in which some task waited for it, in percent.
	MemoryPressure *float64 `json:"memoryPressure,omitempty"`
	CPUPressure    *float64 `json:"cpuPressure,omitempty"`
	// Frozen: nothing in it runs until it is thawed.
	Frozen bool   `json:"frozen,omitempty"`
	Limits Limits `json:"limits"` // as they are in force
}

// Limits are in force in a control group. Nil: none.
type Limits struct {
	Memory   *uint64 `json:"memory,omitempty"`        // bytes
	CPUQuota *uint64 `json:"cpuUsecPerSec,omitempty"` // µs of processor time per second
	Tasks    *uint64 `json:"tasks,omitempty"`         // processes and threads
}
