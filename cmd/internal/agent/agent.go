// Package agent holds the configuration of one agent: the id rule, agent.json read
// strictly, and the store below ROOT that writes it atomically. It starts nothing,
// and it does not know what a system policy forbids; package config judges that.
package agent

import (
	"encoding/json"
	"strings"

	"agentconnect.md/sandbox/sandbox"
)

// Agent is the content of ROOT/agents/ID/agent.json. Keys that AgentConnect already
// has keep their names.
type Agent struct {
	ID      string `json:"id"`
	Name    string `json:"name,omitempty"`
	Runtime string `json:"runtime,omitempty"` // a name of package runtimes, or empty with Command
	// Command and Args start an ACP program that the registry does not know.
	Command string   `json:"command,omitempty"`
	Args    []string `json:"args,omitempty"`
	// RunInSandbox is written by us always; absent means true.
	RunInSandbox   *bool  `json:"runInSandbox,omitempty"`
	PermissionMode string `json:"permissionMode,omitempty"`
	// Credentials says whose login the runtime has: CredentialsHost, CredentialsPrivate, or
	// CredentialsSecret; empty: private.
	Credentials string `json:"credentials,omitempty"`
	// Workspace is absolute, or relative to the agent directory ("workspace" by default).
	Workspace string            `json:"workspace,omitempty"`
	Git       Git               `json:"git,omitzero"`     // how the workspace was made, instead of Workspace
	Memory    string            `json:"memory,omitempty"` // managed, native, none
	Grants    []sandbox.Grant   `json:"grants,omitempty"`
	Read      sandbox.ReadMode  `json:"read,omitempty"`
	Nesting   string            `json:"nesting,omitempty"` // on, off; empty: the runtime's default
	Network   Network           `json:"network,omitzero"`
	Limits    Limits            `json:"limits,omitzero"`
	Env       map[string]string `json:"env,omitempty"`
	ACP       ACP               `json:"acp,omitzero"`
	// Checkout stands in no agent.json: the control plane gives the workspace.
	Checkout *Checkout `json:"checkout,omitempty"`
	// Allow are small things that the supervisor does for the agent: "git-config:branch.*".
	Allow []string `json:"allow,omitempty"`
	// GitCredentials are the repositories whose credentials the agent may use.
	GitCredentials []GitCredential `json:"gitCredentials,omitempty"`
	// MCPServers and RuntimeOverrides are AgentConnect's, kept as they were written.
	MCPServers       json.RawMessage `json:"mcpServers,omitempty"`
	RuntimeOverrides json.RawMessage `json:"runtimeOverrides,omitempty"`
	// Kept holds what AgentConnect wrote and nothing here acts on, so that a rewrite
	// loses none of it: keys of its own (see Unused), and workspace and memory where
	// they were objects.
	Kept map[string]json.RawMessage `json:"-"`
}

// Git says that `agent add` made the workspace in the agent directory from a repository. At
// most one is set.
type Git struct {
	// Clone is what the agent's own clone was made from: an address, or an absolute path.
	Clone string `json:"clone,omitempty"`
	// Worktree is the operator's repository of which the workspace is a worktree.
	Worktree string `json:"worktree,omitempty"`
}

// Network says what the agent reaches. An empty Mode means the default of the configuration.
type Network struct {
	Mode sandbox.NetworkMode `json:"mode,omitempty"`
	// Allow and Deny are rules, as package rules reads them; deny beats allow.
	Allow []string `json:"allow,omitempty"`
	Deny  []string `json:"deny,omitempty"`
	// Ask is how long what no rule names waits for the operator's word, in mode allowlist
	// ("30s"); empty: it is refused at once.
	Ask string `json:"ask,omitempty"`
}

// Limits of the agent's scope. Zero values mean the default.
type Limits struct {
	Memory string `json:"memory,omitempty"` // bytes with K, M, G, T (1024-based), as systemd's MemoryMax=
	CPU    string `json:"cpu,omitempty"`    // percent of one CPU, "200%"
	Tasks  int    `json:"tasks,omitempty"`
}

// ACP settings of the broker.
type ACP struct {
	ClientFiles string `json:"clientFiles,omitempty"` // "workspace" or empty
}

// Whose login a runtime has.
const (
	CredentialsHost    = "host"    // a copy of the user's own
	CredentialsPrivate = "private" // its own, made inside
	CredentialsSecret  = "secret"  // an agent's secret
)

// Checkout is the repository whose clone, made inside at the first start, is the workspace.
type Checkout struct {
	URL    string `json:"url"`              // https://HOST/PATH
	Branch string `json:"branch,omitempty"` // empty: the repository's own choice
}

// GitCredential says where the credentials for a repository come from: a secret of the
// agent, a command that runs outside the boundary, or the control plane that placed the
// agent here. Exactly one of them is set.
type GitCredential struct {
	URL string `json:"url"` // https://HOST/OWNER/REPOSITORY, or https://HOST/OWNER/*
	// Username goes with it; empty: what the source says, or x-access-token.
	Username string   `json:"username,omitempty"`
	Secret   string   `json:"secret,omitempty"`
	Command  []string `json:"command,omitempty"`
	// ControlPlane stands in no agent.json: the control plane assigned the repository.
	ControlPlane bool `json:"controlPlane,omitempty"`
}

// Kinds of memory.
const (
	// MemoryManaged is the agent's memory directory, which the runtime is told of; the default.
	MemoryManaged = "managed"
	// MemoryNative leaves it to the runtime, in its private home.
	MemoryNative = "native"
	// MemoryNone is neither.
	MemoryNone = "none"
)

// DefaultWorkspace is the workspace, relative to the agent directory, of an agent
// that names none.
const DefaultWorkspace = "workspace"

// gitConfigWord begins what Allow says of git variables.
const gitConfigWord = "git-config:"

// GitConfig are the groups of git variables in Allow.
func (a *Agent) GitConfig() []string {
	var groups []string
	for _, w := range a.Allow {
		if group, ok := strings.CutPrefix(w, gitConfigWord); ok {
			groups = append(groups, group)
		}
	}
	return groups
}

// AllowGitConfig is how Allow says that a group of variables may be changed.
func AllowGitConfig(group string) string { return gitConfigWord + group }

// Sandboxed reports whether the agent runs behind the boundary; the default is yes.
func (a *Agent) Sandboxed() bool { return a.RunInSandbox == nil || *a.RunInSandbox }
