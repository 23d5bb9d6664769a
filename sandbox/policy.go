// Package sandbox turns a policy into a plan: the ordered mounts, namespaces and
// bubblewrap arguments that confine one agent. It is pure: the same policy and
// the same host facts give the same plan. It opens no bus, starts nothing and
// changes nothing; the launcher is the only program that carries a plan out.
package sandbox

// Access says what the agent may do with a path inside the boundary.
type Access string

const (
	ReadOnly  Access = "ro"
	ReadWrite Access = "rw"
	// Hidden paths are covered with an empty read-only directory or file.
	Hidden Access = "hidden"
)

// ReadMode says how much of the host is readable.
type ReadMode string

const (
	// ReadSystem exposes the operating system's programs and a reviewed list of /etc.
	ReadSystem ReadMode = "system"
	// ReadHost exposes the whole host read-only, less what must stay hidden.
	ReadHost ReadMode = "host"
)

// NetworkMode says what the agent reaches.
type NetworkMode string

const (
	NetworkNone      NetworkMode = "none"
	NetworkAllowlist NetworkMode = "allowlist"
	NetworkOpen      NetworkMode = "open"
	NetworkHost      NetworkMode = "host"
)

// Grant is a path that the operator opened to an agent, mounted at the same path inside.
type Grant struct {
	Path   string `json:"path"`
	Access Access `json:"access"`
}

// File is a file that the boundary makes. It holds no secret.
type File struct {
	Path    string `json:"path"`
	Content string `json:"content"`
	Why     string `json:"why"`
}

// Policy is what one agent may touch. Every path is absolute. It holds no secret.
type Policy struct {
	Agent string `json:"agent"`
	UID   int    `json:"uid"`
	GID   int    `json:"gid"`
	User  string `json:"user"`
	// Home is the daemon user's home; the private home is mounted there.
	Home string `json:"home"`
	// OtherHomes are the other users' homes; hidden in read mode host.
	OtherHomes []string `json:"otherHomes,omitempty"`
	// Root is AgentConnect's ROOT. Hidden, but for AgentDir's parts named below.
	Root string `json:"root"`
	// AgentDir is ROOT/agents/ID and holds home, memory, tmp and mostly workspace.
	AgentDir string `json:"agentDir"`
	HomeDir  string `json:"homeDir"`
	TmpDir   string `json:"tmpDir"`
	// MemoryDir is the agent's memory; empty: not part of the view.
	MemoryDir string `json:"memoryDir,omitempty"`
	// Repository is the bare repository of an agent that works in a clone of its own:
	// read-only inside at RepositoryPath. Nobody runs git in such a clone on the host, so what
	// git obeys in the workspace is not sealed.
	Repository string `json:"repository,omitempty"`
	// Receive: what runs here takes in what that agent pushes. Objects and refs of the
	// repository are writable; its configuration is not even there to be changed.
	Receive bool `json:"receive,omitempty"`
	// Workspace is the agent's project folder, on the host and inside.
	Workspace string   `json:"workspace"`
	Read      ReadMode `json:"read"`
	Grants    []Grant  `json:"grants,omitempty"`
	// Expose lists the files and directories of the runtime's own installation,
	// read-only inside at the same path.
	Expose []string `json:"expose,omitempty"`
	// Own are directories of this product outside ROOT: its programs and its sockets. They
	// cannot be opened for writing, nor what holds them, nor anything in them at all.
	Own []string `json:"own,omitempty"`
	// Guest is the host path of agentconnect-guest; inside it is GuestPath.
	Guest string `json:"guest"`
	// ChannelDir holds the socket by which the guest talks to the supervisor, SecretsDir the
	// agent's secrets as files; read-only inside at ChannelPath and SecretsPath. The
	// supervisor makes them; empty: not part of the view.
	ChannelDir string      `json:"channelDir,omitempty"`
	SecretsDir string      `json:"secretsDir,omitempty"`
	Network    NetworkMode `json:"network"`
	// Files are generated files below /etc or the home, read-only inside, in place of what
	// lies there.
	Files []File `json:"files,omitempty"`
	// Nesting allows user namespaces inside, for runtimes with a sandbox of their own.
	Nesting bool `json:"nesting"`
	// DieWithParent ends the boundary with its supervisor (direct supervision).
	DieWithParent bool `json:"dieWithParent"`
	// OwnCgroup shows the control group that the boundary is in, read-only: the runtime finds
	// its limits where programs look for them.
	OwnCgroup bool `json:"ownCgroup,omitempty"`
	// Seals are what a look at the writable folders found that the host's programs obey
	// (package gitseal): looked for anew at each start, never stored.
	Seals []Seal `json:"-"`
	// SealNotes say what that look left out.
	SealNotes []string `json:"-"`
}

// SealKind says what a seal does to its path.
type SealKind string

const (
	// SealReadOnly: what stands there cannot be changed, renamed or removed inside.
	SealReadOnly SealKind = "read-only"
	// SealTrusted is SealReadOnly, unless a grant opens the very path for writing.
	SealTrusted SealKind = "trusted"
	// SealFile: a file with Text covers what stands there, a link perhaps.
	SealFile SealKind = "file"
	// SealOutside shows a path outside the writable folders, read-only: the git directory
	// of a linked worktree's main repository.
	SealOutside SealKind = "outside"
	// SealIsland opens a part of a SealOutside for writing.
	SealIsland SealKind = "island"
)

// Seal is one path that a program of the host obeys, and that a writable folder would
// otherwise leave to the agent.
type Seal struct {
	// Path is the host's, with every link in it resolved but the last.
	Path string
	Kind Kind
	// Source is what is shown there, where Path itself is a link to a file.
	Source string
	How    SealKind
	Text   string
	Why    string
}

// What of ours lies inside the boundary.
const (
	// GuestPath is agentconnect-guest.
	GuestPath = "/run/agentconnect/guest"
	// ChannelPath is the directory of ChannelSocket.
	ChannelPath = "/run/agentconnect/channel"
	// ChannelSocket is where the guest talks to the supervisor.
	ChannelSocket = ChannelPath + "/socket"
	// SecretsPath is the directory of the agent's secrets.
	SecretsPath = "/run/agentconnect/secrets"
	// CgroupPath is the agent's own control group, of version 2.
	CgroupPath = "/sys/fs/cgroup"
	// CgroupBelow is the group below its unit's that an agent is in which may make namespaces.
	CgroupBelow = "inside"
	// RepositoryPath is the repository that an agent's own clone came from and pushes to.
	RepositoryPath = "/run/agentconnect/repository.git"
)

// How git control files in writable folders are kept from the agent.
const (
	SealsHard    = "hard"    // it cannot change them, nor move them away
	SealsWatched = "watched" // it can move them in a namespace of its own, and they are moved back
)

// GitSeals says how the git control files are kept. Nested namespaces and hard seals
// exclude each other.
func GitSeals(nesting bool) string {
	if nesting {
		return SealsWatched
	}
	return SealsHard
}
