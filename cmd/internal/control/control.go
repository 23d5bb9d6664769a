// Package control holds the words of the daemon's control socket, HTTP and JSON on
// $XDG_RUNTIME_DIR/agentconnect/control.sock, and a client for it. The socket is 0600
// in a 0700 directory and both ends check the peer's uid.
package control

import (
	"time"

	"agentconnect.md/sandbox/cmd/internal/accounting"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// Probe is the result of the live probe: what status, features and exit 69 go by.
type Probe struct {
	OK     bool      `json:"ok"`
	Code   string    `json:"code"` // "ok" or the first failing check's code
	At     time.Time `json:"at"`
	Checks []Check   `json:"checks"`
}

// Check is one typed check of the probe.
type Check struct {
	Code   string `json:"code"` // what a failure of this check is called; stable
	Title  string `json:"title"`
	Result string `json:"result"` // "ok", "failed", "skipped", "info"
	Detail string `json:"detail,omitempty"`
	Remedy string `json:"remedy,omitempty"` // names the command to run
}

// Agent states.
const (
	StateStopped  = "stopped"
	StateStarting = "starting"
	StateRunning  = "running"
	StateStopping = "stopping"
	StateBackoff  = "restarting" // waiting to be restarted after a failure
	StateFailed   = "failed"
	StateRefused  = "refused" // not started: the boundary is missing or the configuration forbids it
)

// AgentStatus is one agent as the daemon sees it.
type AgentStatus struct {
	ID        string `json:"id"`
	Runtime   string `json:"runtime"`
	State     string `json:"state"`
	Sandboxed bool   `json:"sandboxed"`
	Workspace string `json:"workspace"`
	Network   string `json:"network"`
	// GitSeals is "hard" or "watched"; empty without a boundary.
	GitSeals string `json:"gitSeals,omitempty"`
	// Git says how `agent add` made its workspace from a repository; nil where it did not.
	Git *AgentGit `json:"git,omitempty"`
	// Findings counts what the audit log has of the last run that somebody should look at.
	Findings int       `json:"findings,omitempty"`
	PID      int       `json:"pid,omitempty"` // supervisor
	Since    time.Time `json:"since,omitzero"`
	Restarts int       `json:"restarts"`
	Reason   string    `json:"reason,omitempty"` // why it is not running, or ended last, in the user's terms
	Line     string    `json:"line,omitempty"`   // the supervisor's status line
	Clients  int       `json:"clients"`
	Build    string    `json:"build,omitempty"` // set when an older build still runs
	Notes    []string  `json:"notes,omitempty"`
	// Egress is set while it runs in network mode allowlist or open: counters, and what waits
	// for the operator's word.
	Egress *wire.EgressState `json:"egress,omitempty"`
	Socket string            `json:"socket,omitempty"` // the agent socket while running
	// Changed: its configuration changed since it started, in what a running agent cannot take over.
	Changed bool `json:"changed,omitempty"`
	// Usage is what its runtime uses, read for this answer; nil under direct supervision and
	// while it does not run. OOMKills are those of all its starts since its units were made.
	Usage *accounting.Usage `json:"usage,omitempty"`
	// Unmet are limits that are wanted and not in force as they are wanted.
	Unmet []string `json:"unmet,omitempty"`
	// DropIns are files by which somebody changes its units.
	DropIns []string `json:"dropIns,omitempty"`
}

// AgentGit is where a workspace came from, and where an own clone's commits come out.
type AgentGit struct {
	Clone      string `json:"clone,omitempty"`
	Repository string `json:"repository,omitempty"`
	Worktree   string `json:"worktree,omitempty"`
}

// Status is the whole picture; also what a daemon that ended or refused leaves behind in ROOT.
type Status struct {
	State          string        `json:"state"` // "running", "stopped", "refused"
	Reason         string        `json:"reason,omitempty"`
	ExitCode       int           `json:"exitCode,omitempty"`
	Version        string        `json:"version"`
	PID            int           `json:"pid,omitempty"`
	Since          time.Time     `json:"since,omitzero"`
	Root           string        `json:"root"`
	Supervisor     string        `json:"supervisor"` // "direct" or "systemd"
	SupervisorNote string        `json:"supervisorNote,omitempty"`
	RequireSandbox bool          `json:"requireSandbox"`
	Probe          *Probe        `json:"probe,omitempty"`
	Agents         []AgentStatus `json:"agents"`
	// Usage of all agents together, their supervisors included; nil under direct supervision
	// and while none runs.
	Usage *accounting.Usage `json:"usage,omitempty"`
	// ControlPlane is the connection to one; nil where none is configured.
	ControlPlane *ControlPlane `json:"controlPlane,omitempty"`
	ConfigError  string        `json:"configError,omitempty"` // a reload that failed; the old policy is in force
	Warnings     []string      `json:"warnings,omitempty"`
	Log          []string      `json:"log,omitempty"` // the end of the daemon's log
}

// ControlPlane is the connection to a control plane.
type ControlPlane struct {
	URL       string    `json:"url"`
	State     string    `json:"state"` // connecting, ready, waiting, refused, member-set
	Since     time.Time `json:"since,omitzero"`
	LastError string    `json:"lastError,omitempty"`
	NextTry   time.Time `json:"nextTry,omitzero"`
	DaemonID  string    `json:"daemonId,omitempty"`
	// Waiting is how many reports it has not taken yet.
	Waiting int `json:"waiting,omitempty"`
}

// Error is the body of every answer that is not 2xx. Code is the exit code for the
// command line: 1, 66, 69, 73, 75 or 78.
type Error struct {
	Message string `json:"error"`
	Code    int    `json:"code"`
}

func (e *Error) Error() string { return e.Message }

// Paths of the control socket.
//
//	GET  /v1/status                      Status
//	POST /v1/probe                       Probe (runs it now)
//	POST /v1/reload                      {} (reads configuration again)
//	POST /v1/agents/{id}/start|stop|restart   AgentStatus (after it took effect, or Error)
//	POST /v1/agents/{id}/attach          Attach (starts the agent if needed)
//	POST /v1/agents/{id}/exec            Attach (a supervisor that serves exec; starts no runtime)
//	POST /v1/agents/{id}/egress          {} (takes an Egress: in force at once, while the agent runs)
//	GET  /v1/agents/{id}                 AgentStatus
//	GET  /v1/agents/{id}/placed          agent.json of an agent that a control plane placed
//	POST /v1/shutdown                    {} (ends the daemon and what it runs directly)

// Attach names the socket to connect to.
type Attach struct {
	Socket string `json:"socket"`
}

// Egress is the operator's word about one host. For good it holds only if it also stands in
// agent.json, where the one who says it writes it first; a word for once or for this run
// stands nowhere.
type Egress struct {
	Allow bool             `json:"allow"`
	Host  string           `json:"host"` // HOST[:PORT], as in a rule
	Scope wire.EgressScope `json:"scope"`
}
