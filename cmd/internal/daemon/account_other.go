//go:build !linux

package daemon

import (
	"agentconnect.md/sandbox/cmd/internal/accounting"
	"agentconnect.md/sandbox/cmd/internal/control"
)

// account: only Linux has control groups.
func (d *Daemon) account(*control.AgentStatus, func(read func() *accounting.Usage)) (here bool) {
	return true
}

// halted: nothing here tells.
func halted(string, int) string { return "" }
