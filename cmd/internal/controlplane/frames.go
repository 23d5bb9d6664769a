// The payloads of the frames, as far as this daemon reads or writes them. Fields that
// nothing here acts on are not listed: reading passes over what it does not know.

package controlplane

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"time"
)

// Auth opens a connection. The key is in it: never log one.
type Auth struct {
	APIKey       string  `json:"apiKey"`
	AgentVersion string  `json:"agentVersion"`
	DaemonID     string  `json:"daemonId,omitempty"`
	Resume       *Resume `json:"resume,omitempty"`
}

// Resume names the session of the last connection.
type Resume struct {
	LastEpoch int64 `json:"lastEpoch"`
}

// AuthOK answers it.
type AuthOK struct {
	DaemonID     string `json:"daemonId"`
	SessionEpoch int64  `json:"sessionEpoch"`
	HeartbeatSec int    `json:"heartbeatSec"`
	ServerTime   string `json:"serverTime"`
	OrgSlug      string `json:"orgSlug"`
	WebAppURL    string `json:"webAppUrl"`
	MemberSet    *struct {
		SetID string `json:"setId"`
		Name  string `json:"name"`
	} `json:"memberSet"`
}

func (a *AuthOK) check() error {
	if a.DaemonID == "" || a.SessionEpoch <= 0 {
		return errors.New("auth/ok without daemonId or sessionEpoch")
	}
	return nil
}

// Features that this daemon may announce.
const (
	FeatureSandbox         = "sandbox"
	FeatureSandboxRequired = "sandbox-required"
	FeatureAgentMove       = "agent-move-v1"
	FeatureConfigRevision  = "agent-config-revision-v1"
	FeatureVisibility      = "session-visibility-v1"
	FeatureGitLab          = "gitlab-com-v1"
)

// Capabilities are announced at registration and replaced whole by capabilities/update.
type Capabilities struct {
	Platforms []string `json:"platforms"`
	Runtimes  []string `json:"runtimes"`
	ACP       bool     `json:"acp"`
	Features  []string `json:"features"`
}

// Register says what this daemon is and holds.
type Register struct {
	Host         string       `json:"host"`
	Capabilities Capabilities `json:"capabilities"`
	MaxAgents    int          `json:"maxAgents"`
	LocalState   LocalState   `json:"localState"`
}

// LocalState is what the daemon believes it holds.
type LocalState struct {
	Assignments  []string      `json:"assignments"`
	Crons        []string      `json:"crons"`
	Leases       []string      `json:"leases"`
	Agents       []LocalAgent  `json:"agents"`
	Integrations []string      `json:"integrations"`
	StagedAgents []StagedAgent `json:"stagedAgents"`
}

// LocalAgent is a replica held; Origin is "cp" for what the control plane placed.
type LocalAgent struct {
	AgentID string `json:"agentId"`
	Origin  string `json:"origin"`
}

// StagedAgent is one fenced by an unfinished detach.
type StagedAgent struct {
	AgentID string `json:"agentId"`
	MoveID  string `json:"moveId,omitempty"`
}

// Normalize makes empty lists of missing ones: the wire refuses null.
func (r *Register) Normalize() {
	full(&r.Capabilities.Platforms)
	full(&r.Capabilities.Runtimes)
	full(&r.Capabilities.Features)
	full(&r.LocalState.Assignments)
	full(&r.LocalState.Crons)
	full(&r.LocalState.Leases)
	full(&r.LocalState.Agents)
	full(&r.LocalState.Integrations)
	full(&r.LocalState.StagedAgents)
}

func full[T any](list *[]T) {
	if *list == nil {
		*list = []T{}
	}
}

// RegisterOK is the whole of what this daemon is to hold. Agents, crons and servers stay
// raw: one that cannot be read must not take the others with it.
type RegisterOK struct {
	Agents []json.RawMessage `json:"agents"`
	Crons  []json.RawMessage `json:"crons"`
	Drop   struct {
		Agents []DropAgent `json:"agents"`
		Crons  []string    `json:"crons"`
	} `json:"drop"`
	MCPServers        []json.RawMessage `json:"mcpServers"`
	SessionRetention  string            `json:"sessionRetention"`
	ServerFeatures    []string          `json:"serverFeatures"`
	GitCommitIdentity *GitIdentity      `json:"gitCommitIdentity"`
}

// DropAgent is a replica to give up.
type DropAgent struct {
	AgentID string `json:"agentId"`
	Action  string `json:"action"` // detach, remove
}

// GitIdentity is the author of an agent's commits.
type GitIdentity struct {
	Name  string `json:"name"`
	Email string `json:"email"`
}

// Optional is a field whose absence ("leave it"), null ("the default again") and value
// are three things.
type Optional[T any] struct {
	Set  bool // the field was there
	Null bool
	V    T
}

// UnmarshalJSON is called only for a field that is there.
func (o *Optional[T]) UnmarshalJSON(data []byte) error {
	o.Set = true
	if bytes.Equal(data, []byte("null")) {
		o.Null = true
		return nil
	}
	return json.Unmarshal(data, &o.V)
}

// Or returns the value after a change: old where it was absent, def where it was null.
func (o Optional[T]) Or(old, def T) T {
	switch {
	case !o.Set:
		return old
	case o.Null:
		return def
	}
	return o.V
}

// AgentSpec is an agent as the control plane describes it.
type AgentSpec struct {
	AgentID          string                      `json:"agentId"`
	OrgID            string                      `json:"orgId"`
	Name             string                      `json:"name"`
	DisplayName      Optional[string]            `json:"displayName"`
	Description      Optional[string]            `json:"description"`
	Runtime          Optional[string]            `json:"runtime"`
	Model            Optional[string]            `json:"model"`
	ReasoningEffort  Optional[string]            `json:"reasoningEffort"`
	PermissionMode   Optional[string]            `json:"permissionMode"`
	Pause            Optional[bool]              `json:"pause"`
	Env              Optional[map[string]string] `json:"env"`
	Secrets          Optional[map[string]string] `json:"secrets"`
	ConfigRevision   Optional[string]            `json:"configRevision"`
	MCPServers       Optional[[]string]          `json:"mcpServers"`
	Memory           Optional[MemorySpec]        `json:"memory"`
	RunInSandbox     Optional[bool]              `json:"runInSandbox"`
	RuntimeOverrides Optional[json.RawMessage]   `json:"runtimeOverrides"`
	Workspace        Optional[WorkspaceSpec]     `json:"workspace"`
	// What is read only to say that it is not taken up, whatever its form.
	Skills            Optional[json.RawMessage] `json:"skills"`
	ManagedSkills     Optional[json.RawMessage] `json:"managedSkills"`
	FastMode          Optional[json.RawMessage] `json:"fastMode"`
	ApprovalsReviewer Optional[json.RawMessage] `json:"approvalsReviewer"`
}

// MemorySpec says who keeps the agent's memory.
type MemorySpec struct {
	Provider string `json:"provider"` // managed, native, none, external
}

// WorkspaceSpec says what the agent works on. The control plane never names a path.
type WorkspaceSpec struct {
	Mode            string `json:"mode"`      // scratch, github, gitlab
	Isolation       string `json:"isolation"` // shared, session
	GitRepo         string `json:"gitRepo"`
	Branch          string `json:"branch"`
	AgentDir        string `json:"agentDir"`
	GitCredential   string `json:"gitCredential"`
	ProjectID       Digits `json:"projectId"` // gitlab
	AdditionalRepos []struct {
		RepoFullName string `json:"repoFullName"`
		RepoID       Digits `json:"repoId"`
	} `json:"additionalRepos"`
}

// Digits is a number that some write as a string. What is neither counts as absent: an
// agent is not to be lost over it.
type Digits string

// UnmarshalJSON takes digits, bare or quoted.
func (d *Digits) UnmarshalJSON(data []byte) error {
	*d = ""
	if s := string(bytes.Trim(data, `"`)); len(s) <= 20 && strings.Trim(s, "0123456789") == "" {
		*d = Digits(s)
	}
	return nil
}

// mostName bounds an agent's name, in bytes: it is kept on disk.
const mostName = 256

func (s *AgentSpec) check() error {
	if !ValidID(s.AgentID) {
		return errors.New("agentId must be a UUID")
	}
	if s.Name == "" {
		return errors.New("name is missing")
	}
	if len(s.Name) > mostName {
		return fmt.Errorf("name: %d bytes, at most %d", len(s.Name), mostName)
	}
	if _, err := s.Revision(); err != nil {
		return err
	}
	return nil
}

// Revision is the 64-bit number of this state of the agent; 0 where it has none.
func (s *AgentSpec) Revision() (uint64, error) {
	if !s.ConfigRevision.Set || s.ConfigRevision.Null {
		return 0, nil
	}
	n, ok := new(big.Int).SetString(s.ConfigRevision.V, 10)
	if !ok || n.Sign() < 0 || !n.IsUint64() || n.String() != s.ConfigRevision.V {
		return 0, fmt.Errorf("configRevision %.40q must be a decimal number of 64 bits", s.ConfigRevision.V)
	}
	return n.Uint64(), nil
}

// AgentUpsert is agent/upsert.
type AgentUpsert struct {
	AgentID string          `json:"agentId"`
	Spec    json.RawMessage `json:"spec"`
}

func (a *AgentUpsert) check() error { return needID("agentId", a.AgentID) }

// AgentRef is agent/remove.
type AgentRef struct {
	AgentID string `json:"agentId"`
}

func (a *AgentRef) check() error { return needID("agentId", a.AgentID) }

// AgentDetach fences an agent that moves away.
type AgentDetach struct {
	AgentID               string `json:"agentId"`
	MoveID                string `json:"moveId"`
	DiscardActiveTurns    bool   `json:"discardActiveTurns"`
	RequireEmptyWorkspace bool   `json:"requireEmptyWorkspace"`
}

func (a *AgentDetach) check() error {
	return errors.Join(needID("agentId", a.AgentID), needID("moveId", a.MoveID))
}

// AgentActivate opens an agent with exactly this bundle.
type AgentActivate struct {
	AgentID            string            `json:"agentId"`
	Spec               json.RawMessage   `json:"spec"`
	Crons              []json.RawMessage `json:"crons"`
	MoveID             string            `json:"moveId"`
	PrepareWorkspace   bool              `json:"prepareWorkspace"`
	ReconcileWorkspace bool              `json:"reconcileWorkspace"`
}

func (a *AgentActivate) check() error {
	err := needID("agentId", a.AgentID)
	if a.MoveID != "" {
		err = errors.Join(err, needID("moveId", a.MoveID))
	}
	return err
}

// AgentStop is agent/stop.
type AgentStop struct {
	AgentID string `json:"agentId"`
	Reason  string `json:"reason"`
}

func (a *AgentStop) check() error { return needID("agentId", a.AgentID) }

// Cron is a prompt that is sent by the clock.
type Cron struct {
	CronID   string `json:"cronId"`
	AgentID  string `json:"agentId"`
	Schedule string `json:"schedule"`
	Timezone string `json:"timezone"`
	Trigger  string `json:"trigger"`
	Enabled  bool   `json:"enabled"`
}

func (c *Cron) check() error {
	if err := errors.Join(needID("cronId", c.CronID), needID("agentId", c.AgentID)); err != nil {
		return err
	}
	_, err := c.Parse()
	return err
}

// CronRef is cron/remove and cron/run.
type CronRef struct {
	CronID string `json:"cronId"`
}

func (c *CronRef) check() error { return needID("cronId", c.CronID) }

// CronReport tells of one firing; the same FiredAt is the same run.
type CronReport struct {
	CronID     string `json:"cronId"`
	AgentID    string `json:"agentId"`
	FiredAt    string `json:"firedAt"`
	Status     string `json:"status,omitempty"` // success, failed
	DurationMS *int64 `json:"durationMs,omitempty"`
	SessionID  string `json:"sessionId,omitempty"`
	Reason     string `json:"reason,omitempty"`
}

// Session is a session record.
type Session struct {
	SessionID          string `json:"sessionId"`
	AgentID            string `json:"agentId"`
	Platform           string `json:"platform,omitempty"`
	Channel            string `json:"channel,omitempty"`
	Thread             string `json:"thread,omitempty"`
	SourceBindingKind  string `json:"sourceBindingKind,omitempty"`
	ConversationKind   string `json:"conversationKind,omitempty"`
	TriggeredBy        string `json:"triggeredBy,omitempty"`
	Title              string `json:"title,omitempty"`
	Runtime            string `json:"runtime,omitempty"`
	WorkspaceIsolation string `json:"workspaceIsolation,omitempty"`
	Phase              string `json:"phase"`            // start, plan, problem, end
	Status             string `json:"status,omitempty"` // running, completed, canceled, failed
	Summary            string `json:"summary,omitempty"`
	LastActivityAt     string `json:"lastActivityAt,omitempty"`
	TS                 string `json:"ts"`
}

// SessionActivity tells open consoles that there is more to read.
type SessionActivity struct {
	SessionID string `json:"sessionId"`
	AgentID   string `json:"agentId"`
	Revision  string `json:"revision"`
	TS        string `json:"ts"`
}

// HistoryRequest asks for messages: the newest, those before Cursor, or those after After.
type HistoryRequest struct {
	AgentID   string `json:"agentId"`
	SessionID string `json:"sessionId"`
	Limit     int    `json:"limit"`
	Cursor    string `json:"cursor"`
	After     string `json:"after"`
}

// DefaultHistory and MostHistory bound a page, in messages.
const (
	DefaultHistory = 50
	MostHistory    = 200
)

func (h *HistoryRequest) check() error {
	if h.SessionID == "" {
		return errors.New("sessionId is missing")
	}
	if h.Cursor != "" && h.After != "" {
		return errors.New("cursor and after exclude each other")
	}
	if h.Limit < 0 || h.Limit > MostHistory {
		return fmt.Errorf("limit must be 1 to %d", MostHistory)
	}
	if h.Limit == 0 {
		h.Limit = DefaultHistory
	}
	return needID("agentId", h.AgentID)
}

// HistoryPage answers it, old to new.
type HistoryPage struct {
	SessionID  string    `json:"sessionId"`
	Messages   []Message `json:"messages"`
	NextCursor string    `json:"nextCursor,omitempty"`
	LiveCursor string    `json:"liveCursor,omitempty"`
	LiveMore   bool      `json:"liveMore"`
}

// Message is one entry of a session.
type Message struct {
	Seq        int64  `json:"seq"`
	Sender     string `json:"sender"`
	SenderName string `json:"senderName,omitempty"`
	TS         string `json:"ts"`
	Kind       string `json:"kind"` // text, tool
	Text       string `json:"text"`
	ToolCallID string `json:"toolCallId,omitempty"`
	ToolStatus string `json:"toolStatus,omitempty"`
	ToolKind   string `json:"toolKind,omitempty"`
}

// ToolBodyRequest asks for a tool call's body from an offset.
type ToolBodyRequest struct {
	AgentID    string `json:"agentId"`
	SessionID  string `json:"sessionId"`
	ToolCallID string `json:"toolCallId"`
	Offset     int64  `json:"offset"`
}

func (t *ToolBodyRequest) check() error {
	if t.SessionID == "" || t.ToolCallID == "" || t.Offset < 0 {
		return errors.New("sessionId, toolCallId and an offset of 0 or more are needed")
	}
	return needID("agentId", t.AgentID)
}

// ListRequest asks for the sessions, of one agent or of all.
type ListRequest struct {
	AgentID string `json:"agentId"`
}

// Visibility says who may see a session.
type Visibility struct {
	SessionID  string `json:"sessionId"`
	AgentID    string `json:"agentId,omitempty"`
	Visibility string `json:"visibility"` // private, org, external
	// SharedMemoryExcluded keeps the session out of memory that others read.
	SharedMemoryExcluded bool  `json:"sharedMemoryExcluded,omitempty"`
	Rev                  int64 `json:"visibilityRev"`
}

func (v *Visibility) check() error {
	if v.SessionID == "" {
		return errors.New("sessionId is missing")
	}
	switch v.Visibility {
	case "private", "org", "external":
		return nil
	}
	return fmt.Errorf("visibility %.40q must be private, org or external", v.Visibility)
}

// VisibilitySnapshot replaces nothing: each entry counts by its revision.
type VisibilitySnapshot struct {
	Entries []Visibility `json:"entries"`
}

func (v *VisibilitySnapshot) check() error {
	for i := range v.Entries {
		if err := v.Entries[i].check(); err != nil {
			return fmt.Errorf("entries[%d]: %w", i, err)
		}
	}
	return nil
}

// VisibilityOK answers session/visibility.
type VisibilityOK struct {
	SessionID string `json:"sessionId"`
	Rev       int64  `json:"visibilityRev"`
	Status    string `json:"status"` // applied, superseded
}

// MCPServer is one of the registry's servers. It holds bearer keys: never log one.
type MCPServer struct {
	Name      string       `json:"name"`
	Transport string       `json:"transport"` // stdio, http, sse
	URL       string       `json:"url,omitempty"`
	Command   string       `json:"command,omitempty"`
	Args      []string     `json:"args"`
	Env       []NamedValue `json:"env"`
	Headers   []NamedValue `json:"headers"`
	IssuedAt  string       `json:"issuedAt,omitempty"`
}

func (m *MCPServer) check() error {
	switch {
	case m.Name == "":
		return errors.New("name is missing")
	case m.Name == "agentconnect":
		return errors.New("the name agentconnect is reserved")
	}
	if m.IssuedAt != "" {
		if _, err := time.Parse(time.RFC3339Nano, m.IssuedAt); err != nil {
			return fmt.Errorf("issuedAt: %w", err)
		}
	}
	return nil
}

// NamedValue is a variable or a header.
type NamedValue struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// DaemonControl is daemon/restart and daemon/upgrade.
type DaemonControl struct {
	Reason        string `json:"reason"`
	TargetVersion string `json:"targetVersion"`
	DrainFirst    bool   `json:"drainFirst"`
}

// ControlAck answers it.
type ControlAck struct {
	Accepted       bool   `json:"accepted"`
	WillDrainUntil string `json:"willDrainUntil,omitempty"`
	Reason         string `json:"reason,omitempty"`
}

// Drain asks to let work end and take no more.
type Drain struct {
	Scope struct {
		Kind       string          `json:"kind"` // agent, daemon, session
		AgentID    string          `json:"agentId"`
		SessionKey json.RawMessage `json:"sessionKey"`
	} `json:"scope"`
	Deadline string `json:"deadline"`
}

func (d *Drain) check() error {
	switch d.Scope.Kind {
	case "agent":
		return needID("scope.agentId", d.Scope.AgentID)
	case "daemon", "session":
		return nil
	}
	return fmt.Errorf("scope.kind %.40q must be agent, daemon or session", d.Scope.Kind)
}

// DrainDone answers it.
type DrainDone struct {
	Released []json.RawMessage `json:"released"`
}

// Heartbeat is sent as often as auth/ok says.
type Heartbeat struct {
	Load           Load     `json:"load"`
	Health         string   `json:"health"` // ok, degraded
	ActiveSessions int      `json:"activeSessions"`
	DegradedScopes []string `json:"degradedScopes"`
}

// Load of the machine, 0 to 1, and the number of agents placed here.
type Load struct {
	CPU    float64 `json:"cpu"`
	Mem    float64 `json:"mem"`
	Agents int     `json:"agents"`
}

// Facts are the runtimes that this daemon found.
type Facts struct {
	Runtimes   []RuntimeFact `json:"runtimes"`
	MCPServers []MCPFact     `json:"mcpServers"`
	Seq        int64         `json:"seq,omitempty"`
}

// RuntimeFact is one runtime.
type RuntimeFact struct {
	Runtime      string   `json:"runtime"`
	Version      string   `json:"version"`
	Models       []string `json:"models"`
	ACPSupport   string   `json:"acpSupport"`
	ToolCalling  bool     `json:"toolCalling"`
	AuthRequired *bool    `json:"authRequired,omitempty"`
}

// MCPFact is one MCP server of the operator's configuration.
type MCPFact struct {
	Name      string `json:"name"`
	Transport string `json:"transport"`
}

// CredentialRequest asks for a token of a repository.
type CredentialRequest struct {
	AgentID      string `json:"agentId"`
	Reason       string `json:"reason,omitempty"` // clone, fetch, pull, push, helper
	RepoFullName string `json:"repoFullName,omitempty"`
	ForceRefresh bool   `json:"forceRefresh,omitempty"`
	// Provider and ExternalRepoID: only for a control plane that has FeatureProvider.
	Provider       string `json:"provider,omitempty"` // github, gitlab
	ExternalRepoID string `json:"externalRepoId,omitempty"`
}

// FeatureProvider is announced by a control plane that knows more than one provider.
const FeatureProvider = "gitcred-provider-v2"

// CredentialGrant answers it. It holds a token: never log one.
type CredentialGrant struct {
	Username       string `json:"username"`
	Token          string `json:"token"`
	TTLSec         int    `json:"ttlSec"`
	RepoFullName   string `json:"repoFullName"`
	Access         string `json:"access"`
	Provider       string `json:"provider"`
	ExternalRepoID Digits `json:"externalRepoId"`
}

func (g *CredentialGrant) check() error {
	if g.Username == "" || g.Token == "" || g.TTLSec <= 0 {
		return errors.New("gitcred/grant without username, token or ttlSec")
	}
	return nil
}

// ConfigPush carries settings of the organization.
type ConfigPush struct {
	Keys map[string]json.RawMessage `json:"keys"`
}

func needID(field, id string) error {
	if !ValidID(id) {
		return fmt.Errorf("%s must be a UUID", field)
	}
	return nil
}
