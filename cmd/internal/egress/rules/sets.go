// The named sets: hosts that belong together, so that a rule can say "npm". This is the
// one list; a change here opens or closes hosts for everybody who uses the set. A member
// must be run by whoever the set is named after, and must not serve what anybody uploads
// under a name of their own choice beyond what the service is for: no storage.googleapis.com,
// no *.amazonaws.com, no *.github.io.

package rules

var sets = map[string][]string{
	// Claude's API, and logging in to it.
	"anthropic": {
		"api.anthropic.com:443", "console.anthropic.com:443", "statsig.anthropic.com:443", "mcp-proxy.anthropic.com:443",
		"platform.claude.com:443", "claude.ai:443", "claude.com:443", "downloads.claude.ai:443",
	},
	// The API, Codex with a ChatGPT login, and logging in.
	"openai": {
		"api.openai.com:443", "auth.openai.com:443", "chatgpt.com:443",
	},
	// Gemini's API by key, by Google login and by Vertex, and logging in.
	"google": {
		"generativelanguage.googleapis.com:443", "cloudcode-pa.googleapis.com:443", "aiplatform.googleapis.com:443",
		"oauth2.googleapis.com:443", "www.googleapis.com:443", "accounts.google.com:443",
	},
	// git over https and ssh, the API, archives, releases, LFS and packages. Whoever may
	// write there can also be written to: gists and issues carry data out.
	"github": {
		"github.com:443", "github.com:22", "ssh.github.com:443", "api.github.com:443", "uploads.github.com:443",
		"codeload.github.com:443", "raw.githubusercontent.com:443", "objects.githubusercontent.com:443",
		"release-assets.githubusercontent.com:443", "github-cloud.githubusercontent.com:443",
		"ghcr.io:443", "pkg-containers.githubusercontent.com:443",
	},
	"gitlab": {
		"gitlab.com:443", "gitlab.com:22", "altssh.gitlab.com:443", "registry.gitlab.com:443",
	},
	"npm":  {"registry.npmjs.org:443", "registry.yarnpkg.com:443"},
	"pypi": {"pypi.org:443", "files.pythonhosted.org:443"},
	"crates": {
		"index.crates.io:443", "static.crates.io:443", "crates.io:443",
	},
	// Modules, their checksums, and toolchains.
	"golang": {
		"proxy.golang.org:443", "sum.golang.org:443", "go.dev:443", "golang.org:443", "dl.google.com:443",
	},
	// apt speaks plain HTTP to these; the packages are signed.
	"debian": {
		"deb.debian.org:80", "deb.debian.org:443", "security.debian.org:80", "security.debian.org:443",
	},
}
