//go:build !linux

package daemon

import (
	"agentconnect.md/sandbox/cmd/internal/accounting"
	"agentconnect.md/sandbox/cmd/internal/control"
)

// account: only Linux has control groups.
func (d *Daemon) account(*control.AgentStatus) *accounting.Usage { return nil }
