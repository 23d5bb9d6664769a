// Package config finds ROOT and reads the configuration: flag over environment over
// ROOT/config.json over /etc/agentconnect/config.json over default, each value with
// where it came from. It judges agents by required mode and the machine's policy. It
// watches nothing: Load gives a new value or an error, and the caller keeps the old
// value when it is an error.
package config

import (
	"encoding/json"
	"fmt"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/sandbox"
)

// SystemDir is the machine's configuration directory.
const SystemDir = "/etc/agentconnect"

// MaxSize bounds a config.json, in bytes.
const MaxSize = 4 << 20

// ExitCode is the exit code of a bad configuration.
const ExitCode = 78

// Options of Load.
type Options struct {
	// Root is the --root flag; empty if not given.
	Root string
	// SystemDir stands for /etc/agentconnect in tests.
	SystemDir string
	// Home stands for the home in the passwd database in tests.
	Home string
	// Flags are the flags that the user gave, and only those.
	Flags []Flag
}

// Flag is a command-line flag that sets the value of a key.
type Flag struct {
	Name  string // "require-sandbox"
	Key   string // "security.requireSandbox"
	Value string
}

// Config is the effective configuration. It is not changed after Load.
type Config struct {
	// Root is ROOT, absolute, links resolved, checked to be ours alone.
	Root string
	// Home is the user's home of the passwd database, links resolved.
	Home string

	// RequireSandbox is required mode: no agent without the boundary.
	RequireSandbox bool
	// AllowUnsandboxedFallback is always false in required mode.
	AllowUnsandboxedFallback bool
	ControlPlane             ControlPlane
	MaxAgents                int
	// Limits are the defaults of an agent that sets none; see AgentLimits.
	Limits agent.Limits
	// Network is the mode of an agent that sets none; see AgentNetwork.
	Network sandbox.NetworkMode
	// Projects are the roots below which `acp --runtime` may make an agent, absolute.
	Projects    []string
	ClientFiles string // "workspace" or empty
	LogLevel    string // trace, debug, info, warn, error
	Supervisor  string // auto, systemd, direct
	StopGrace   time.Duration
	KillGrace   time.Duration

	// Runtimes and MCPServers keep the case of their names.
	Runtimes   map[string]runtimes.Def
	MCPServers map[string]json.RawMessage

	// Policies are the machine's and, if it wrote one, the user's: all hold.
	Policies []Policy
	// SystemAgents are declared for every user of the machine, by id.
	SystemAgents []SystemAgent
	// Warnings are for the user: keys without effect, files others can read.
	Warnings []string

	values []Value
}

// ControlPlane is where the daemon connects out to.
type ControlPlane struct {
	Enabled bool
	URL     string
	Key     string // secret
	// KeyFile holds the key instead, and is read for each connection. CAFile has certificates
	// that are trusted besides the system's. AllowInsecure permits an address without TLS.
	KeyFile, CAFile string
	AllowInsecure   bool
}

// Policy can only tighten. A nil field means that it says nothing.
type Policy struct {
	Source         string // the file
	RequireSandbox bool
	NetworkMax     sandbox.NetworkMode // empty: no limit
	// GrantRoots are the only places that may be granted, absolute; nil: everywhere
	// the boundary allows, empty: nowhere.
	GrantRoots []string
	LimitMax   agent.Limits
}

// SystemAgent is a file of agents.d. Exactly one of Agent and Err is set.
type SystemAgent struct {
	ID    string
	Path  string
	Agent *agent.Agent
	Err   error
}

// Value is one effective value and where it came from. A secret's value is redacted.
type Value struct {
	Key    string `json:"key"`
	Value  string `json:"value"`
	Source string `json:"source"`
}

// Values lists every effective value by key.
func (c *Config) Values() []Value { return c.values }

// Error is a configuration that cannot be used: exit code 78.
type Error struct {
	File string // or the flag, or the variable; may be empty
	Key  string // may be empty
	Err  error  // what is wrong and what to do
}

func (e *Error) Error() string {
	s := ""
	if e.File != "" {
		s = e.File + ": "
	}
	if e.Key != "" {
		s += e.Key + ": "
	}
	return s + e.Err.Error()
}

func (e *Error) Unwrap() error { return e.Err }

// ExitCode is 78.
func (e *Error) ExitCode() int { return ExitCode }

func bad(file, key, format string, args ...any) *Error {
	return &Error{File: file, Key: key, Err: fmt.Errorf(format, args...)}
}
