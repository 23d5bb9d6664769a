// Package wire holds what the daemon, the supervisor, the launcher and the
// command line say to each other: the sealed spec of one start, and the words
// spoken on an agent's socket. It does no I/O beyond encoding.
package wire

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"agentconnect.md/sandbox/sandbox"
)

// Version of the protocol between our own programs. Programs of different
// versions refuse each other and say which side is older.
const Version = 1

// BwrapIs is one bubblewrap as the daemon found it.
type BwrapIs struct {
	// File is the identity of the program file: another one has to be asked anew.
	File string `json:"file,omitempty"`
	// Old: it is known to lack --disable-userns.
	Old bool `json:"old,omitempty"`
}

// Spec is everything a supervisor needs for one start. It may hold secrets, so it
// travels only as a sealed memfd (file descriptor 3 of the supervisor), never as
// an argument, a file or a unit property.
type Spec struct {
	Version int    `json:"version"`
	Build   string `json:"build"`
	Agent   string `json:"agent"`
	// Sandboxed is false only where the operator said --no-sandbox.
	Sandboxed bool           `json:"sandboxed"`
	Policy    sandbox.Policy `json:"policy"`
	// Argv and Env start the runtime. Env ("K=V") is what the boundary itself decides: the
	// sandbox's first process shows it to whatever runs inside.
	Argv []string `json:"argv"`
	Env  []string `json:"env"`
	// Given is what the operator set, for the runtime and for commands; it may hold secrets.
	Given []string `json:"given,omitempty"`
	// SecretEnv are secrets in the environment of the runtime alone.
	SecretEnv []string `json:"secretEnv,omitempty"`
	// Inside is the supervisor's own directory in the directory of sockets, for what it
	// shows inside: Policy.ChannelDir and Policy.SecretsDir lie in it.
	Inside string `json:"inside,omitempty"`
	// Secrets are the agent's, with their values.
	Secrets []Secret `json:"secrets,omitempty"`
	// Credentials are the repositories whose credentials the agent may ask for.
	Credentials []Credential `json:"credentials,omitempty"`
	// Daemon is the socket where the daemon answers its supervisors.
	Daemon string `json:"daemon,omitempty"`
	// HostPath is the PATH of programs of the operator's that run outside on the agent's behalf.
	HostPath string `json:"hostPath,omitempty"`
	// GitConfig are groups of git variables that the agent may have changed ("branch.*").
	GitConfig []string `json:"gitConfig,omitempty"`
	// Notes are things that an operator should know, for status.
	Notes []string `json:"notes,omitempty"`
	// MCP are the agent's MCP servers.
	MCP []MCPServer `json:"mcp,omitempty"`
	// Dir is the runtime's working directory, as seen inside.
	Dir string `json:"dir"`
	// Socket is the agent socket the supervisor listens on.
	Socket string `json:"socket"`
	// Managed: processes are put into scopes of the user's service manager.
	Managed bool `json:"managed,omitempty"`
	// ExecOnly: do not start the runtime; serve exec requests, end after the last one.
	ExecOnly bool `json:"execOnly,omitempty"`
	// Launcher and Bwrap are absolute paths of our launcher and of bubblewrap.
	Launcher string `json:"launcher"`
	Bwrap    string `json:"bwrap"`
	// BwrapIs says which file the daemon asked for its version, and what that means.
	BwrapIs BwrapIs `json:"bwrapIs,omitzero"`
	// ClientFiles allows fs/* requests towards ACP clients ("workspace") or not ("").
	ClientFiles string `json:"clientFiles,omitempty"`
	// Mode is the permission mode that each session is put into ("": the runtime's choice).
	Mode string `json:"mode,omitempty"`
	// Inner: the runtime brings a sandbox of its own, and does not start where none can.
	Inner bool `json:"inner,omitempty"`
	// Checkout is the repository that is cloned into Dir, inside, before the runtime starts
	// there for the first time; nil: none.
	Checkout *Checkout `json:"checkout,omitempty"`
	// Login is whose login the agent has a copy of ("claude", "codex"; "": nobody's).
	Login string `json:"login,omitempty"`
	// LoginHint says that the runtime is not logged in, and how to.
	LoginHint string `json:"loginHint,omitempty"`
	// Egress is what the agent reaches, in network modes allowlist and open; nil in the others.
	Egress *Egress `json:"egress,omitempty"`
	// Limits of the runtime's scope; nil under direct supervision.
	Limits *Limits `json:"limits,omitempty"`
	// ProbeFile is where the probe's last result stands, under a service manager: a
	// sandboxed agent does not start against it.
	ProbeFile string `json:"probeFile,omitempty"`
	// StopGrace and KillGrace are the waits after end of stdin and after SIGTERM.
	StopGrace Duration `json:"stopGrace"`
	KillGrace Duration `json:"killGrace"`
}

// Checkout names a repository and a branch of it ("": its own choice).
type Checkout struct {
	URL    string `json:"url"`
	Branch string `json:"branch,omitempty"`
}

// Egress is the way out of an agent, of which its supervisor is the gateway.
type Egress struct {
	Policy EgressPolicy `json:"policy"`
	// Records is the path of the record of connections.
	Records string `json:"records"`
	Proxy   Proxy  `json:"proxy,omitzero"`
}

// EgressPolicy is what the operator wrote, as package rules reads it. Its rules have no
// order; deny beats allow.
type EgressPolicy struct {
	// Open: what no rule names is reached, if it is public. Otherwise (an allow-list) it is
	// not; an empty allow-list lets nothing out.
	Open  bool     `json:"open,omitempty"`
	Allow []string `json:"allow,omitempty"`
	Deny  []string `json:"deny,omitempty"`
	// Ask is for how many seconds what no rule names waits for the operator's word, in an
	// allow-list; 0: it is refused at once.
	Ask int `json:"ask,omitempty"`
}

// Proxy holds the proxy variables of the daemon's environment. They may contain a password.
type Proxy struct {
	HTTPS string `json:"https,omitempty"` // HTTPS_PROXY
	HTTP  string `json:"http,omitempty"`  // HTTP_PROXY
	All   string `json:"all,omitempty"`   // ALL_PROXY
	No    string `json:"no,omitempty"`    // NO_PROXY
}

// EgressState is what a gateway says of itself.
type EgressState struct {
	Stats   EgressStats `json:"stats"`
	Pending []EgressAsk `json:"pending,omitempty"`
}

// EgressStats counts since the agent started.
type EgressStats struct {
	Allowed  uint64 `json:"allowed"`  // connections that were let out
	Denied   uint64 `json:"denied"`   // connections and names that were refused
	Failed   uint64 `json:"failed"`   // let out, and the other side was not reached
	Active   int    `json:"active"`   // connections now
	Sent     uint64 `json:"sent"`     // bytes, agent to outside, of connections that ended
	Received uint64 `json:"received"` // bytes, the other way
}

// EgressAsk is something that waits for the operator's word.
type EgressAsk struct {
	Host  string    `json:"host"`           // a name, or an address
	Port  uint16    `json:"port,omitempty"` // 0: the name was asked for, no connection yet
	Since time.Time `json:"since"`
	Until time.Time `json:"until"` // refused then
}

// EgressScope says for how long an operator's word holds.
type EgressScope string

const (
	EgressOnce   EgressScope = "once"   // the next connection, or what waits
	EgressRun    EgressScope = "run"    // until the agent ends
	EgressAlways EgressScope = "always" // as run; that agent.json says so, too, is the caller's work
)

// EgressWord is an operator's word, or with Policy set a whole new policy.
type EgressWord struct {
	Allow  bool          `json:"allow"`
	Host   string        `json:"host,omitempty"` // as in a rule
	Scope  EgressScope   `json:"scope,omitempty"`
	Policy *EgressPolicy `json:"policy,omitempty"`
}

// Limits bound a scope. Zero means no word about it.
type Limits struct {
	MemoryHigh    uint64  `json:"memoryHigh,omitempty"`    // bytes
	MemoryMax     uint64  `json:"memoryMax,omitempty"`     // bytes
	MemorySwapMax *uint64 `json:"memorySwapMax,omitempty"` // bytes; 0 is no swap
	CPUQuota      uint64  `json:"cpuQuota,omitempty"`      // µs of processor time per second
	CPUWeight     uint64  `json:"cpuWeight,omitempty"`
	TasksMax      uint64  `json:"tasksMax,omitempty"`
	// Asked names those that an operator set ("memory", "cpu", "tasks"): without them the
	// agent does not start. The others are defaults, whose lack status says.
	Asked []string `json:"asked,omitempty"`
}

// Secret is one secret of an agent.
type Secret struct {
	Name  string `json:"name"`
	Value []byte `json:"value,omitempty"`
	// File is its file, relative to the directory of secrets; empty: none inside.
	File string `json:"file,omitempty"`
	// Env are the variables of the runtime that hold it.
	Env []string `json:"env,omitempty"`
}

// Credential says where the credentials for a repository come from: a secret, the output
// of a command that runs outside the boundary, or the daemon, which asks the control plane.
type Credential struct {
	// URL is https://HOST/PATH; a last segment * stands for all repositories below.
	URL      string   `json:"url"`
	Username string   `json:"username,omitempty"`
	Secret   string   `json:"secret,omitempty"`
	Command  []string `json:"command,omitempty"`
	Daemon   bool     `json:"daemon,omitempty"`
}

// MCPServer is one MCP server of an agent.
type MCPServer struct {
	Name string `json:"name"`
	// Transport is stdio, with Argv and Env, or http or sse, with URL and Headers.
	Transport string   `json:"transport"`
	Argv      []string `json:"argv,omitempty"`
	Env       []Var    `json:"env,omitempty"`
	URL       string   `json:"url,omitempty"`
	Headers   []Var    `json:"headers,omitempty"`
	// Host runs it outside the agent's boundary; with a Policy in a boundary of its own,
	// whose environment is BaseEnv and Env, and whose way out is Egress, in a gated network.
	Host    bool            `json:"host,omitempty"`
	Policy  *sandbox.Policy `json:"policy,omitempty"`
	BaseEnv []string        `json:"baseEnv,omitempty"`
	Egress  *Egress         `json:"egress,omitempty"`
}

// Var is a variable or a header: a value, or the name of the secret that holds it.
type Var struct {
	Name   string `json:"name"`
	Value  string `json:"value,omitempty"`
	Secret string `json:"secret,omitempty"`
}

// Duration is a time.Duration that reads and writes as Go's text form ("5s").
type Duration time.Duration

func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return err
	}
	v, err := time.ParseDuration(s)
	*d = Duration(v)
	return err
}

// MaxRequest bounds a Request, in bytes.
const MaxRequest = 256 << 10

// Request is the first line a client writes on an agent socket, as one JSON object
// and a newline.
type Request struct {
	Version int    `json:"v"`
	Op      string `json:"op"`
	// Agent is for OpSpec.
	Agent string `json:"agent,omitempty"`
	// Client names who attaches, for status ("zed", "prompt").
	Client string `json:"client,omitempty"`
	// Argv, Env ("K=V", added), Dir and TTY are for OpExec. Without TTY the
	// request's message carries three pipes as SCM_RIGHTS: stdin, stdout, stderr.
	Argv []string `json:"argv,omitempty"`
	Env  []string `json:"env,omitempty"`
	Dir  string   `json:"dir,omitempty"`
	TTY  *WinSize `json:"tty,omitempty"`
	// Secret is for OpSecret.
	Secret *Secret `json:"secret,omitempty"`
	// Port is for OpForward.
	Port uint16 `json:"port,omitempty"`
	// Egress is for OpEgress.
	Egress *EgressWord `json:"egress,omitempty"`
	// Credential is for OpCredential on the daemon's socket, where it stands as the
	// supervisor normalised it.
	Credential *CredentialQuery `json:"credential,omitempty"`
}

// SpecRequest and SpecReply are what a Request and a Reply have of OpSpec and OpStopped. An agent's
// start waits for them, and package json takes longer to get to know a type the more is in it.
type SpecRequest struct {
	Version int    `json:"v"`
	Op      string `json:"op"`
	Agent   string `json:"agent,omitempty"`
}

// SpecReply is the answer.
type SpecReply struct {
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
	Code  int    `json:"code,omitempty"`
}

// Forwarded answers one byte of an OpForward.
type Forwarded struct {
	Error string `json:"error,omitempty"`
}

// WinSize is a terminal's size in character cells.
type WinSize struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Operations on an agent socket.
const (
	// OpAttach: after the Reply the connection carries ACP frames both ways.
	OpAttach = "attach"
	// OpExec: after the Reply (with TTY: carrying the terminal's master as
	// SCM_RIGHTS) the supervisor sends one more line, an ExecEnd. If the client
	// goes away first, the command is ended.
	OpExec = "exec"
	// OpForward: after the Reply each byte that the client writes asks for a connection to
	// Port of the loopback inside; a Forwarded line answers, with the connection as SCM_RIGHTS.
	OpForward = "forward"
	// OpSpec, on the daemon's own socket for supervisors alone (OpCredential is answered
	// there, too): the Reply carries the sealed spec of Agent as SCM_RIGHTS, or an error with
	// the supervisor's exit code.
	OpSpec = "spec"
	// OpStopped, there too: Agent is being stopped. OK means that the daemon watches and has
	// seen by whom; else the supervisor finds out.
	OpStopped = "stopped"
	// OpSecret gives the running agent a secret's new value, or without a value takes the
	// secret away. Files change at once; the environment of what runs cannot.
	OpSecret = "secret"
	// OpStatus: the Reply carries Status. Further requests may follow on the connection; older
	// supervisors close it.
	OpStatus = "status"
	// OpEgress says a word about the network; the Reply carries Status.
	OpEgress = "egress"
)

// Reply answers a Request, one JSON line.
type Reply struct {
	Version int     `json:"v"`
	OK      bool    `json:"ok"`
	Error   string  `json:"error,omitempty"`
	Code    int     `json:"code,omitempty"` // with Error, of OpSpec
	Status  *Status `json:"status,omitempty"`
	// Username and Password answer OpCredential.
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
}

// ExecEnd ends an exec: the command's exit code (128+n after signal n).
type ExecEnd struct {
	Code  int    `json:"code"`
	Error string `json:"error,omitempty"`
}

// Status is what a running supervisor says of itself.
type Status struct {
	Build     string    `json:"build"`
	Agent     string    `json:"agent"`
	Sandboxed bool      `json:"sandboxed"`
	PID       int       `json:"pid"`        // supervisor
	Runtime   int       `json:"runtimePid"` // bwrap's pid, or the runtime's without sandbox
	Since     time.Time `json:"since"`
	Clients   int       `json:"clients"`
	Sessions  int       `json:"sessions"`
	Network   string    `json:"network"`
	GitSeals  string    `json:"gitSeals,omitempty"`
	// Egress is set in network modes allowlist and open.
	Egress *EgressState `json:"egress,omitempty"`
	// Notes are things the operator should know: what is weaker than asked, and why.
	Notes []string `json:"notes,omitempty"`
	Line  string   `json:"line"` // the STATUS= line
}

// Launch is what the supervisor hands to the launcher: a plan to carry out and the
// program to start in it. It travels as a sealed memfd on descriptor LaunchFD.
type Launch struct {
	Version int
	// Plan is nil for a program without a boundary (the operator said --no-sandbox).
	Plan *sandbox.Plan
	Argv []string
	Env  []string
	Dir  string
	// Bwrap is bubblewrap's path and Seccomp the filter for it.
	Bwrap   string
	Seccomp []byte
	// PassFD keeps descriptor ExtraFD open for the program, PassEnv descriptor EnvFD.
	PassFD  bool
	PassEnv bool
	// Ports are listened on, in a gated network, where the kernel cannot lead all
	// connections to one listener.
	Ports []uint16
	// Join: not new namespaces, but those of UserNSFD and NetNSFD. The launcher says Joined
	// first, and the process of that number, its sibling, is the one that goes on.
	Join bool
	// Dial: no program; connect to ports of the loopback there. Each question on GateFD is a
	// port in two bytes, each answer a line: empty with the connection as SCM_RIGHTS, or why
	// there is none.
	Dial bool
}

// Descriptors of the launcher, besides 0, 1 and 2 of the runtime.
const (
	// LaunchFD holds the Launch.
	LaunchFD = 3
	// GateFD is a stream socket: the launcher writes a Ready word when the view is built, with
	// the sockets of a gated network as SCM_RIGHTS, or a LaunchError; the supervisor answers
	// GateOpen. End of file after that means that the program was executed.
	GateFD = 4
	// InfoFD is a pipe to which bubblewrap writes the pid of the sandbox's first process.
	InfoFD = 5
	// ExtraFD is a socket for the program, with PassFD.
	ExtraFD = 6
	// UserNSFD and NetNSFD are the namespaces of a sandbox, with Join.
	UserNSFD = 7
	NetNSFD  = 8
	// EnvFD holds further environment for the program, with PassEnv: a sealed memfd with
	// "K=V" and a NUL each. bubblewrap's own processes never read it.
	EnvFD = 9
)

// ExitNoCheckout is how `agentconnect-guest checkout` ends without a clone.
const ExitNoCheckout = 70

// ExitNoInner is how `agentconnect-guest inner` ends where no inner sandbox starts.
const ExitNoInner = 69

// Exit codes of the process that joins a sandbox, before it is a launcher again.
const (
	JoinWait = 100 + iota
	JoinUser
	JoinProcesses
	JoinNet
	JoinMounts
	JoinRights
	JoinExec
)

// Joined is the launcher's first word with Join.
func Joined(pid int) []byte { return fmt.Appendf(nil, "%s%0*d\n", joined, joinedDigits, pid) }

const joined = "pid "

// joinedDigits is how many digits the number has, with zeros before it: that form can be filled
// in by who can do nothing but system calls.
const joinedDigits = 10

// JoinedSize is the length of a JoinedLine.
const JoinedSize = len(joined) + joinedDigits + len("\n")

// JoinedLine is a Joined whose number is still to be filled in, ending before the newline. With a pid namespace of its own the process of the
// first Joined says a second one, whose process is the one that goes on.
func JoinedLine() (b [JoinedSize]byte) {
	for i := range b {
		b[i] = '0'
	}
	copy(b[:], joined)
	b[JoinedSize-1] = '\n'
	return b
}

// ParseJoined reads it; 0: it is something else.
func ParseJoined(line string) int {
	rest, ok := strings.CutPrefix(line, joined)
	digits := strings.TrimSuffix(rest, "\n")
	if !ok || len(digits) != joinedDigits || strings.Trim(digits, "0123456789") != "" {
		return 0
	}
	pid, err := strconv.ParseInt(digits, 10, 32)
	if err != nil || pid <= 1 {
		return 0
	}
	return int(pid)
}

// AheadArg is the argument of a launcher that was begun before its plan was made: it waits for
// PlanThere on GateFD before it reads anything else.
const AheadArg = "ahead"

// The supervisor's words on GateFD.
const (
	PlanThere = 'p'
	GateOpen  = 'g'
)

// gateReady begins the launcher's word on GateFD that all is prepared.
const gateReady = "ready"

// Ready is the launcher's word that all is prepared: "ready", the kinds of the sockets that
// come with it (package netns), and why the network is weaker than it could be, if it is.
func Ready(kinds, weaker string) []byte {
	return []byte(gateReady + " " + kinds + " " + strings.ReplaceAll(weaker, "\n", " ") + "\n")
}

// ParseReady reads it. Until it has come whole done is false.
func ParseReady(word []byte) (kinds, weaker string, done bool) {
	line, ok := strings.CutSuffix(string(word), "\n")
	if !ok {
		return "", "", false
	}
	first, rest, _ := strings.Cut(line, " ")
	kinds, weaker, ok = strings.Cut(rest, " ")
	return kinds, weaker, ok && first == gateReady
}

// LaunchError is what the launcher writes to its control socket when it fails.
type LaunchError struct {
	Step string
	Path string
	Err  string
	// Retry: the tree changed while it was built; compile the plan anew and try again.
	Retry bool
}

func (e *LaunchError) Error() string {
	if e.Path != "" {
		return e.Step + ": " + e.Path + ": " + e.Err
	}
	return e.Step + ": " + e.Err
}
