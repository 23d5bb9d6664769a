// Package selftest is what agentconnect-guest runs to show where the boundary
// lies: a table of attacks, a table of checks for the probe, and a tiny ACP agent
// that runs them on a prompt. The same table run outside the boundary, as the same
// ordinary user, shows which of the attacks would have worked.
//
// It judges nothing but what it sees from where it runs, and it changes nothing: an
// attack that works touches only the paths its Targets name, and takes back what it
// made. It refuses to run as the host's root, for whom several attacks are not harmless.
//
// # The agent
//
// Serve speaks ACP version 1, one JSON object per line. It keeps its sessions in
// $HOME/.agentconnect-selftest.json, so that session/load works after a kill, and
// replays them. session/set_mode and everything else unknown answers -32601, an
// unknown session -32002. A prompt's text is one word and what follows it:
//
//	attack [JSON]            run the attack table against Targets; one text line per attack as it
//	                         ends, then one chunk with a Report in a ```json fence
//	echo TEXT                TEXT, in chunks of four characters
//	permission TEXT          session/request_permission for a tool call titled TEXT, options "allow" and
//	                         "reject"; then "permission: selected allow|reject" or "permission: cancelled"
//	write REL TEXT           writes TEXT to REL below the session's cwd; "wrote N bytes to PATH"
//	client-read PATH         fs/read_text_file; "client-read: ok: CONTENT"
//	client-write PATH TEXT   fs/write_text_file; "client-write: ok"
//	client-terminal CMD      terminal/create of sh -c CMD, waits, reads; "client-terminal: ok: exit N: OUTPUT"
//	                         each of the three on an error: "WORD: error CODE: MESSAGE"
//	big N                    one chunk of N bytes of "x"
//	junk banner              a line on stdout that is no JSON
//	junk escape              a line of terminal escapes
//	junk half                half a JSON line, without its end, in front of the next message
//	junk mb N                N MiB on stdout without a newline
//	fork [TAG]               a process in a session of its own whose parent is gone (argv: linger TAG), for ten
//	                         minutes at most; "forked PID"
//	exit N                   the process ends with status N
//	crash SIG                the process dies of the signal (SEGV, KILL, ABRT, 9, …)
//	sleep N                  N seconds; session/cancel ends it with stopReason "cancelled"
//	eat N                    allocates and touches N MiB and keeps them; "ate N MiB"
//	stderr TEXT              a line on stderr
//	env                      the environment, sorted, one K=V per line
//	servers                  the mcpServers that the session was opened with
//	server NAME TEXT         starts that server, gives it TEXT as a line and the end of its stdin; what it says
//	help                     these words
//
// A word that fails streams "WORD: error: WHY". Every other text gets an answer that names the words.
package selftest

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Kind says what the boundary promises about an attack.
type Kind string

const (
	MustFail Kind = "must-fail"
	MustWork Kind = "must-work"
)

// Seen is what came of an attack.
type Seen string

const (
	Worked  Seen = "worked"
	Refused Seen = "refused"
	// Skipped: there was no target for it, or the policy opens just this.
	Skipped Seen = "skipped"
)

// Targets are what the attacks aim at. An empty one is left out or has a default;
// every path is as the host knows it, since that is what an attacker would try.
type Targets struct {
	// Token is a text that each canary file holds. A file of the same name without it
	// does not count as reached: the private home has the real home's path.
	Token      string `json:"token,omitempty"`
	HomeCanary string `json:"homeCanary,omitempty"` // a file in the real home; read, and opened for writing
	Root       string `json:"root,omitempty"`       // AgentConnect's ROOT
	RootCanary string `json:"rootCanary,omitempty"` // a file in it
	OtherAgent string `json:"otherAgent,omitempty"` // a file in another agent's directory
	TmpCanary  string `json:"tmpCanary,omitempty"`  // a file in the host's /tmp
	// Sockets by name: bus, system-bus, systemd-private, ssh-agent, gpg-agent, docker, wayland.
	// Those not named are looked for where they usually lie.
	Sockets         map[string]string `json:"sockets,omitempty"`
	ExposedSocket   string            `json:"exposedSocket,omitempty"`   // a host program listens here, in a read-only exposed tree
	WorkspaceSocket string            `json:"workspaceSocket,omitempty"` // the same, in the workspace
	AbstractSocket  string            `json:"abstractSocket,omitempty"`  // a host program listens here; without the "@"
	HostTCP         string            `json:"hostTCP,omitempty"`         // 127.0.0.1:PORT where a host program listens
	PublicTCP       string            `json:"publicTCP,omitempty"`       // an address that the host reaches
	MetadataTCP     string            `json:"metadataTCP,omitempty"`     // the cloud's metadata address; not for a run outside
	HostUDP         string            `json:"hostUDP,omitempty"`         // a host program answers every datagram here
	HostPID         int               `json:"hostPID,omitempty"`         // a process of the same user outside, with OpenCanary open
	HostSecret      string            `json:"hostSecret,omitempty"`      // a text in that process's environment
	Sibling         string            `json:"sibling,omitempty"`         // a canary in a folder whose name begins as the workspace's
	ShmCanary       string            `json:"shmCanary,omitempty"`       // a canary in the host's /dev/shm
	IPCKey          int               `json:"ipcKey,omitempty"`          // of System V objects of the host
	AgentJSON       string            `json:"agentJSON,omitempty"`       // the agent's own configuration
	Link            string            `json:"link,omitempty"`            // a canary by way of a link in the workspace
	Pinned          []string          `json:"pinned,omitempty"`          // directories that may not be renamed
	Covers          []string          `json:"covers,omitempty"`          // mounts that hide something
	Git             string            `json:"git,omitempty"`             // what PlantGit made, in a folder that the agent writes, before it started
	// Secrets are texts that no process inside may show.
	Secrets []string `json:"secrets,omitempty"`
	// EnvGiven are names of variables that the operator gave on purpose.
	EnvGiven []string `json:"envGiven,omitempty"`

	Workspace string `json:"workspace,omitempty"` // default: the working directory
	Home      string `json:"home,omitempty"`      // default: $HOME
	Tmp       string `json:"tmp,omitempty"`       // default: /tmp
	Memory    string `json:"memory,omitempty"`

	UID int `json:"uid,omitempty"` // what getuid must say; default: anything but 0
	// Network is the policy's mode. "open" reaches public addresses, "host" everything.
	Network string `json:"network,omitempty"`
	Nesting bool   `json:"nesting,omitempty"`
}

// Result is one attack and what came of it.
type Result struct {
	ID string `json:"id"`
	// Ref is what the attack stands for: a case from the field, a published fault, or the
	// design's own promise.
	Ref      string `json:"ref"`
	Title    string `json:"title"`
	Means    string `json:"means"` // what an attacker would gain, or who needs it
	Kind     Kind   `json:"kind"`
	Expected Seen   `json:"expected"`
	Seen     Seen   `json:"seen"`
	// OK: as the boundary promises, or skipped.
	OK bool `json:"ok"`
	// Control: an ordinary user outside the boundary can do this on a usual host.
	Control bool   `json:"control"`
	Detail  string `json:"detail,omitempty"`
}

// Report is the outcome of the whole table.
type Report struct {
	Results []Result `json:"results"`
	OK      int      `json:"ok"`
	Failed  int      `json:"failed"`
	Skipped int      `json:"skipped"`
}

func (r *Report) add(x Result) {
	r.Results = append(r.Results, x)
	switch {
	case x.Seen == Skipped:
		r.Skipped++
	case x.OK:
		r.OK++
	default:
		r.Failed++
	}
}

// Line is r for people, without a newline.
func (r Result) Line() string {
	return fmt.Sprintf("%s %s: expected %s, seen %s: %s (%s)", r.verdict(), r.ID, r.Expected, r.Seen, r.Title, r.Detail)
}

func (r Result) verdict() string {
	switch {
	case r.Seen == Skipped:
		return "skip"
	case r.OK:
		return "ok"
	}
	return "FAIL"
}

// WriteTable prints the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(tw, "\tATTACK\tEXPECTED\tSEEN\tWHAT\tDETAIL")
	for _, x := range r.Results {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", x.verdict(), x.ID, x.Expected, x.Seen, x.Title, x.Detail)
	}
	fmt.Fprintf(tw, "\n%s\n", r.Summary())
	return tw.Flush()
}

// Summary is the report in one line.
func (r *Report) Summary() string {
	return fmt.Sprintf("%d as promised, %d not, %d skipped", r.OK, r.Failed, r.Skipped)
}

// CheckRequest is what the probe asks from inside a boundary (agentconnect-guest check, on stdin).
type CheckRequest struct {
	// Unreachable files may not be there, or must be empty covers.
	Unreachable []string `json:"unreachable,omitempty"`
	// ConnectRefused are Unix sockets that a connect must not reach.
	ConnectRefused []string `json:"connectRefused,omitempty"`
	Writable       []string `json:"writable,omitempty"` // directories
	Readable       []string `json:"readable,omitempty"` // files that hold something, directories with an entry
	Nested         bool     `json:"nested,omitempty"`   // start an inner bwrap with a fresh /proc
}

// What a CheckResult is about. Those below CheckNested are always looked at.
const (
	CheckUnreachable    = "unreachable"
	CheckConnectRefused = "connect-refused"
	CheckWritable       = "writable"
	CheckReadable       = "readable"
	CheckNested         = "nested"
	CheckLoopback       = "loopback"
	CheckProc           = "proc"
	CheckCapabilities   = "capabilities"
	CheckNoNewPrivs     = "no-new-privs"
	CheckSeccomp        = "seccomp"
	CheckUID            = "uid"
)

// CheckResult is one check; Path is empty where it is about no path.
type CheckResult struct {
	What   string `json:"what"`
	Path   string `json:"path,omitempty"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail,omitempty"`
}

// CheckReport is what `agentconnect-guest check` prints.
type CheckReport struct {
	Results []CheckResult `json:"results"`
}
