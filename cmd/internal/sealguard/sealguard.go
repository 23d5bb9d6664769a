// Package sealguard watches the git seals of a running agent from outside. The host itself
// takes a seal away when it replaces a sealed file (`git config` renames over it); and where
// the agent may make namespaces, it can move a sealed path in one of its own. The guard
// hears of both from the kernel, halts the agent, puts things right, and lets it go on; what
// it cannot put right ends the agent. It finds nothing by itself: it is told what is sealed.
package sealguard

import (
	"log/slog"

	"agentconnect.md/sandbox/cmd/internal/audit"
)

// Options of a guard.
type Options struct {
	Log   *slog.Logger
	Audit *audit.Log // may be nil
	// Roots are the folders that the agent can write.
	Roots []string
	// Nesting: the agent can make namespaces, so a sealed path that moved was moved by it.
	Nesting bool
	// Stop is told why the agent was ended; its sandboxes are dead by then.
	Stop func(why string)
}

// Sandbox is one running sandbox of the agent.
type Sandbox interface {
	// Init waits until the sandbox is set up and gives the host's pid of its first process.
	Init() int
	// Freeze returns when nothing in it runs; Thaw lets it go on.
	Freeze() error
	Thaw() error
	// Kill ends it at once, frozen or not.
	Kill()
	Ended() bool
}
