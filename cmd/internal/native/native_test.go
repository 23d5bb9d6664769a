package native

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"

	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/sandbox"
)

// host has the files that it holds, and nothing else.
type host map[string]string

func (h host) Resolve(path string) (string, sandbox.Kind, error) {
	if _, ok := h[path]; ok {
		return path, sandbox.KindFile, nil
	}
	return "", "", fs.ErrNotExist
}
func (h host) Readlink(string) (string, error) { return "", fs.ErrInvalid }
func (h host) ReadFile(path string) (string, error) {
	text, ok := h[path]
	if !ok {
		return "", fs.ErrNotExist
	}
	return text, nil
}
func (h host) ReadDir(dir string) (names []string, err error) {
	for p := range h {
		if filepath.Dir(p) == dir {
			names = append(names, filepath.Base(p))
		}
	}
	if names == nil {
		return nil, fs.ErrNotExist
	}
	return names, nil
}
func (h host) Sockets([]string) ([]string, bool, error)             { return nil, false, nil }
func (h host) SocketsBelow(string, bool) ([]string, []string, bool) { return nil, nil, true }

func runtime(t *testing.T, id string) runtimes.Runtime {
	t.Helper()
	rt, err := runtimes.NewRegistry(nil).Get(id)
	if err != nil {
		t.Fatal(err)
	}
	return rt
}

func files(t *testing.T, id string, h host, private string) map[string]string {
	t.Helper()
	list, err := Files(runtime(t, id), h, "/home/u", private, "/m", true)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range list {
		out[f.Path] = f.Content
	}
	return out
}

func TestAdministratorsClaudePolicyStaysAndCannotLoosenOurs(t *testing.T) {
	h := host{
		ClaudePath:                   `{"permissions":{"deny":["WebFetch"]},"model":"m","sandbox":{"enabled":false,"excludedCommands":["docker *"],"network":{"allowedDomains":["a.example"]}}}`,
		claudeMore + "/10-more.json": `{"sandbox":{"allowUnsandboxedCommands":true,"filesystem":{"denyRead":["/srv"]}},"model":"n"}`,
		claudeMore + "/.hidden.json": `{"model":"hidden"}`,
		claudeMore + "/readme.txt":   "no JSON",
		socat:                        "",
	}
	var got struct {
		Model       string
		Permissions struct{ Deny []string }
		Hooks       bool `json:"allowManagedHooksOnly"`
		Sandbox     map[string]any
	}
	if err := json.Unmarshal([]byte(files(t, "claude-acp", h, t.TempDir())[ClaudePath]), &got); err != nil {
		t.Fatal(err)
	}
	sb := got.Sandbox
	for k, want := range map[string]any{"enabled": true, "failIfUnavailable": true, "allowUnsandboxedCommands": false, "enableWeakerNestedSandbox": false, "allowNestedUserNamespaces": false, "excludedCommands": nil, "bwrapPath": "/usr/bin/bwrap", "socatPath": socat} {
		if sb[k] != want {
			t.Errorf("sandbox.%s is %v, want %v", k, sb[k], want)
		}
	}
	if d := cmp.Diff(map[string]any{"allowedDomains": []any{"a.example"}}, sb["network"]); d != "" {
		t.Error(d)
	}
	read := sb["filesystem"].(map[string]any)["denyRead"].([]any)
	for _, p := range []string{"/srv", Secrets, "~/.claude/.credentials.json"} {
		if !slices.Contains(read, any(p)) {
			t.Errorf("%s may be read: %v", p, read)
		}
	}
	if !got.Hooks || got.Model != "n" || !slices.Contains(got.Permissions.Deny, "WebFetch") || !slices.Contains(got.Permissions.Deny, "Edit(~/.claude/settings.json)") {
		t.Errorf("%+v", got)
	}
}

func TestMemoryLiesWhereTheAgentsIsUnlessAnAdministratorSaysOtherwise(t *testing.T) {
	for _, c := range []struct{ admin, memory, want string }{
		{"", "/m", "/m"}, {"", "", ""}, {`{"autoMemoryDirectory":"/theirs"}`, "/m", "/theirs"}, {`{"autoMemoryEnabled":false}`, "/m", "/m"},
	} {
		h := host{}
		if c.admin != "" {
			h[ClaudePath] = c.admin
		}
		list, err := Files(runtime(t, "claude-acp"), h, "/home/u", t.TempDir(), c.memory, true)
		if err != nil {
			t.Fatal(err)
		}
		var got struct{ AutoMemoryDirectory string }
		if err := json.Unmarshal([]byte(list[0].Content), &got); err != nil || got.AutoMemoryDirectory != c.want {
			t.Errorf("%+v: %q %v", c, got.AutoMemoryDirectory, err)
		}
	}
}

// Without namespaces inside nothing is pinned, and an administrator's word is there all the same.
func TestAdministratorsPolicyIsThereWithoutASandboxOfTheRuntimes(t *testing.T) {
	h := host{ClaudePath: `{"permissions":{"deny":["WebFetch"]}}`, CodexPath: "allowed_approval_policies = [\"on-request\"]\n"}
	for _, c := range []struct {
		id, memory string
		h          host
		want       map[string]string
	}{
		{"claude-acp", "/m", h, map[string]string{ClaudePath: `{"autoMemoryDirectory":"/m","permissions":{"deny":["WebFetch"]}}`}},
		{"claude-acp", "", h, map[string]string{ClaudePath: `{"permissions":{"deny":["WebFetch"]}}`}},
		{"claude-acp", "/m", host{}, map[string]string{ClaudePath: `{"autoMemoryDirectory":"/m"}`}},
		{"claude-acp", "", host{}, map[string]string{}},
		{"codex-acp", "/m", h, map[string]string{CodexPath: h[CodexPath]}},
		{"codex-acp", "/m", host{}, map[string]string{}},
	} {
		list, err := Files(runtime(t, c.id), c.h, "/home/u", t.TempDir(), c.memory, false)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for _, f := range list {
			got[f.Path] = f.Content
			var compact bytes.Buffer
			if json.Compact(&compact, []byte(f.Content)) == nil {
				got[f.Path] = compact.String()
			}
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s: %s", c.id, d)
		}
	}
	if _, err := Files(runtime(t, "claude-acp"), host{ClaudePath: "{"}, "/home/u", t.TempDir(), "", false); err == nil {
		t.Error("a policy that cannot be understood is left out")
	}
}

func TestAdministratorsCodexPolicyStaysAndCannotLoosenOurs(t *testing.T) {
	h := host{
		CodexPath:       "allowed_sandbox_modes = [\"read-only\", \"danger-full-access\"]\nallowed_approval_policies = [\"on-request\"]\n[permissions.filesystem]\ndeny_read = [\"/srv\"]\n[[remote_sandbox_config]]\nhostname_patterns = [\"*\"]\nallowed_sandbox_modes = [\"danger-full-access\"]\n",
		codexConfigPath: "[shell_environment_policy]\nexclude = [\"MINE\"]\n",
	}
	got := files(t, "codex-acp", h, t.TempDir())
	var req, conf map[string]any
	if err := toml.Unmarshal([]byte(got[CodexPath]), &req); err != nil {
		t.Fatal(err)
	}
	if err := toml.Unmarshal([]byte(got[codexConfigPath]), &conf); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"allowed_sandbox_modes": []any{"read-only"}, "allowed_approval_policies": []any{"on-request"}, "allow_managed_hooks_only": true,
		"permissions": map[string]any{"filesystem": map[string]any{"deny_read": []any{"/srv", Secrets, "~/.codex/auth.json"}}},
	}
	if d := cmp.Diff(want, req); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(map[string]any{"shell_environment_policy": map[string]any{"exclude": []any{"MINE", "OPENAI_API_KEY", "CODEX_API_KEY"}}}, conf); d != "" {
		t.Error(d)
	}
}

func TestPolicyThatCannotBeKeptIsAnError(t *testing.T) {
	for name, c := range map[string]struct {
		id string
		h  host
	}{
		"broken JSON":             {"claude-acp", host{ClaudePath: "{"}},
		"a key twice":             {"claude-acp", host{ClaudePath: `{"sandbox":{},"sandbox":{}}`}},
		"broken drop-in":          {"claude-acp", host{claudeMore + "/a.json": "[]"}},
		"broken TOML":             {"codex-acp", host{CodexPath: "a ="}},
		"no sandboxed mode":       {"codex-acp", host{CodexPath: `allowed_sandbox_modes = ["danger-full-access"]`}},
		"broken TOML, the config": {"codex-acp", host{codexConfigPath: "["}},
	} {
		if _, err := Files(runtime(t, c.id), c.h, "/home/u", t.TempDir(), "", true); err == nil {
			t.Errorf("%s: no error", name)
		} else {
			t.Log(err)
		}
	}
	if f, err := Files(runtime(t, "gemini"), host{ClaudePath: "{"}, "/home/u", "", "", true); f != nil || err != nil {
		t.Errorf("gemini: %v %v", f, err)
	}
}

// The agent writes its settings: nothing it leaves there may stop a start, lead out, or take
// commands out of the sandbox.
func TestSettingsThatAnAgentLeftAreCleanedOrPassedOver(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret.json")
	if err := os.WriteFile(secret, []byte(`{"secret":1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		plant func(path string) error
		want  string
	}{
		"settings": {func(p string) error {
			return os.WriteFile(p, []byte(`{"theme":"dark","sandbox":{"enabled":false}}`), 0o600)
		}, `{"theme":"dark"}`},
		"a link":   {func(p string) error { return os.Symlink(secret, p) }, `{}`},
		"a folder": {func(p string) error { return os.Mkdir(p, 0o700) }, `{}`},
		"a pipe":   {func(p string) error { return mkfifo(p) }, `{}`},
		"too much": {func(p string) error {
			return os.WriteFile(p, []byte(`{"a":"`+strings.Repeat("x", maxPolicy)+`"}`), 0o600)
		}, `{}`},
		"twice":   {func(p string) error { return os.WriteFile(p, []byte(`{"a":1,"sandbox":{},"sandbox":1}`), 0o600) }, `{}`},
		"nothing": {func(string) error { return nil }, `{}`},
	} {
		t.Run(name, func(t *testing.T) {
			private := t.TempDir()
			if err := os.Mkdir(filepath.Join(private, ".claude"), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := c.plant(filepath.Join(private, claudeUser)); err != nil {
				t.Fatal(err)
			}
			got := files(t, "claude-acp", host{}, private)["/home/u/"+claudeUser]
			if strings.Join(strings.Fields(got), "") != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
}

func FuzzCleanSettings(f *testing.F) {
	for _, s := range []string{`{}`, `{"sandbox":{"enabled":false},"a":1}`, `{"sandbox":1,"Sandbox":2}`, `[]`, `{"a":{"sandbox":1}}`, "{\"sandbox\":1}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		own := cleanSettings(b)
		out, err := json.Marshal(own)
		if err != nil {
			t.Fatal(err)
		}
		var again map[string]any
		if err := json.Unmarshal(out, &again); err != nil {
			t.Fatal(err)
		}
		for k := range again {
			if strings.EqualFold(k, "sandbox") {
				t.Errorf("%q is left", k)
			}
		}
	})
}
