// The table of ACP runtimes. It is reviewed as one piece: what stands here decides
// which program an operator's word starts and whether user namespaces are on inside.

package runtimes

// npm is the hint for a program that an npm package brings.
func npm(id, pkg string) string {
	return "agentconnect runtimes install " + id + ", or npm install -g " + pkg
}

var table = []Runtime{
	{
		ID: "claude-acp", Title: "Claude Code",
		Programs: []string{"claude-agent-acp", "claude-code-acp"}, // the older package's name second
		NPM:      "@agentclientprotocol/claude-agent-acp", Version: "0.101.0",
		StateDirs:   []string{".claude"},
		Credentials: []string{".claude/.credentials.json", ".claude.json"},
		KeyEnv:      []string{"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"},
		Nesting:     true,
		Inner:       InnerClaude,
		MemoryOff:   map[string]string{"CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1"},
		Install:     npm("claude-acp", "@agentclientprotocol/claude-agent-acp"),
	},
	{
		ID: "codex-acp", Title: "Codex",
		Programs: []string{"codex-acp"},
		NPM:      "@zed-industries/codex-acp", Version: "0.16.0",
		StateDirs:   []string{".codex"},
		Credentials: []string{".codex/auth.json"},
		KeyEnv:      []string{"OPENAI_API_KEY", "CODEX_API_KEY"},
		Nesting:     true,
		Inner:       InnerCodex,
		Install:     npm("codex-acp", "@zed-industries/codex-acp"),
	},
	{
		ID: "gemini", Title: "Gemini CLI",
		Programs: []string{"gemini"},
		Args:     []string{"--acp"},
		NPM:      "@google/gemini-cli", Version: "0.61.0",
		StateDirs:   []string{".gemini"},
		Credentials: []string{".gemini/oauth_creds.json", ".gemini/google_accounts.json"},
		KeyEnv:      []string{"GEMINI_API_KEY", "GOOGLE_API_KEY"},
		Install:     npm("gemini", "@google/gemini-cli"),
	},
	{
		ID: "opencode", Title: "OpenCode",
		Programs: []string{"opencode"},
		Args:     []string{"acp"},
		NPM:      "opencode-ai", Version: "1.18.33",
		StateDirs:   []string{".config/opencode", ".local/share/opencode", ".local/state/opencode", ".cache/opencode"},
		Credentials: []string{".local/share/opencode/auth.json"},
		KeyEnv:      []string{"ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENROUTER_API_KEY", "OPENCODE_API_KEY"},
		Install:     npm("opencode", "opencode-ai"),
	},
	{
		ID: "qwen", Title: "Qwen Code",
		Programs: []string{"qwen"},
		Args:     []string{"--acp"},
		NPM:      "@qwen-code/qwen-code", Version: "0.24.4",
		StateDirs:   []string{".qwen"},
		Credentials: []string{".qwen/oauth_creds.json"},
		KeyEnv:      []string{"DASHSCOPE_API_KEY", "OPENAI_API_KEY"},
		Install:     npm("qwen", "@qwen-code/qwen-code"),
	},
	{
		ID: "copilot", Title: "GitHub Copilot CLI",
		Programs: []string{"copilot"},
		Args:     []string{"--acp"},
		NPM:      "@github/copilot", Version: "1.0.102",
		StateDirs:   []string{".copilot"},
		Credentials: []string{".copilot/config.json"},
		KeyEnv:      []string{"COPILOT_GITHUB_TOKEN", "GH_TOKEN", "GITHUB_TOKEN"},
		Install:     npm("copilot", "@github/copilot"),
	},
	{
		ID: "cline", Title: "Cline",
		Programs: []string{"cline"},
		Args:     []string{"--acp"},
		NPM:      "cline", Version: "3.0.65",
		StateDirs:   []string{".cline"},
		Credentials: []string{".cline/data/secrets.json"},
		KeyEnv:      []string{"ANTHROPIC_API_KEY", "OPENAI_API_KEY", "OPENROUTER_API_KEY"},
		Install:     npm("cline", "cline"),
	},
	{
		ID: "auggie", Title: "Auggie",
		Programs: []string{"auggie"},
		Args:     []string{"--acp"},
		Env:      map[string]string{"AUGMENT_DISABLE_AUTO_UPDATE": "1"}, // its installation is read-only inside
		NPM:      "@augmentcode/auggie", Version: "0.36.0",
		StateDirs:   []string{".augment"},
		Credentials: []string{".augment/session.json"},
		KeyEnv:      []string{"AUGMENT_SESSION_AUTH", "AUGMENT_API_TOKEN"},
		Install:     npm("auggie", "@augmentcode/auggie"),
	},
	{
		ID: "goose", Title: "goose",
		Programs:    []string{"goose"},
		Args:        []string{"acp"},
		StateDirs:   []string{".config/goose", ".local/share/goose", ".local/state/goose"},
		Credentials: []string{".config/goose/secrets.yaml"},
		KeyEnv:      []string{"ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GOOGLE_API_KEY", "OPENROUTER_API_KEY"},
		Install:     "download it from https://github.com/block/goose/releases into ~/.local/bin",
	},
	{
		ID: "selftest", Title: "Self test of the boundary",
		Args:     []string{"selftest"},
		Internal: true,
	},
}
