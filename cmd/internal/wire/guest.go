// What the guest inside and the supervisor say to each other, over the socket
// sandbox.ChannelSocket: one JSON line each way, then, for OpMCP and OpPush, a stream.
// Whatever runs inside can speak it; a request is a wish, never a right.

package wire

// GuestVersion is the version of these words.
const GuestVersion = 1

// ChannelEnv names the socket where no boundary puts it in its fixed place.
const ChannelEnv = "AGENTCONNECT_CHANNEL"

// MaxGuestRequest bounds a request, in bytes.
const MaxGuestRequest = 16 << 10

// GuestRequest is what the guest asks.
type GuestRequest struct {
	Version int    `json:"v"`
	Op      string `json:"op"`
	// Credential is for OpCredential.
	Credential *CredentialQuery `json:"credential,omitempty"`
	// Setting is for OpGitConfig.
	Setting *GitSetting `json:"setting,omitempty"`
	// Name is for OpMCP.
	Name string `json:"name,omitempty"`
}

// Operations of the guest.
const (
	// OpCredential asks for a repository's credentials, or tells what git thinks of them.
	OpCredential = "credential"
	// OpMCP connects to a server that runs outside the boundary.
	OpMCP = "mcp"
	// OpGitConfig changes a variable of a sealed git configuration, if the operator allowed it.
	OpGitConfig = "git-config"
	// OpPush connects to git receive-pack for the repository that the agent's clone pushes to.
	OpPush = "push"
)

// CredentialQuery is what git (gitcredentials(7)) or gh wants to know.
type CredentialQuery struct {
	// Action is get, store or erase.
	Action   string `json:"action"`
	Protocol string `json:"protocol"`
	Host     string `json:"host"`
	Path     string `json:"path,omitempty"`
	Username string `json:"username,omitempty"`
	// Tool is who asks: git or gh. It decides nothing.
	Tool string `json:"tool,omitempty"`
}

// GitSetting is one variable of a repository's configuration.
type GitSetting struct {
	// Dir is the directory that the configuration lies in.
	Dir   string `json:"dir"`
	Key   string `json:"key"`
	Value string `json:"value,omitempty"`
	Unset bool   `json:"unset,omitempty"`
}

// GuestReply answers.
type GuestReply struct {
	Version  int    `json:"v"`
	OK       bool   `json:"ok"`
	Error    string `json:"error,omitempty"`
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
}
