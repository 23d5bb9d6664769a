// Package native writes the policy files by which Claude Code and Codex turn their own tool
// sandbox on, in the places where they read an administrator's word: the boundary puts them
// there, read-only, so that neither the agent nor a project can loosen them. What an
// administrator of the host wrote there stays in force; where both speak, the stricter counts.
//
// It is a second layer, kept by the runtime itself: it stands between commands that a model
// writes and the runtime's own login. The boundary does not rely on it.
package native

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/pelletier/go-toml/v2"

	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/cmd/internal/strictjson"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/probe"
)

// Where the runtimes read an administrator's policy on Linux.
const (
	ClaudePath      = "/etc/claude-code/managed-settings.json"
	claudeMore      = "/etc/claude-code/managed-settings.d"
	CodexPath       = "/etc/codex/requirements.toml"
	codexConfigPath = "/etc/codex/managed_config.toml"
)

// maxPolicy bounds an administrator's file, in bytes.
const maxPolicy = 1 << 20

const socat = "/usr/bin/socat"

// Secrets is where the boundary shows an agent's secrets as files.
const Secrets = "/run/agentconnect/secrets"

// claudeUser is the user's settings, below a home. Claude Code takes exceptions from its
// sandbox from there, which no administrator's word can forbid.
const claudeUser = ".claude/settings.json"

// Files are the generated files for a runtime; nil for one without a sandbox of its own. home
// is where the private home, on the host at private, is seen inside; memory, if not empty, is
// the directory inside that a runtime is to keep its memory in, where it takes one. Without pin,
// where no sandbox of its own could start, they are what an administrator wrote, and the
// memory's place. An administrator's file that cannot be read or understood is an error:
// nothing starts without knowing what it forbids.
func Files(rt runtimes.Runtime, h sandbox.Host, home, private, memory string, pin bool) ([]sandbox.File, error) {
	switch rt.Inner {
	case runtimes.InnerClaude:
		return claude(rt, h, home, private, memory, pin)
	case runtimes.InnerCodex:
		return codex(rt, h, pin)
	}
	return nil, nil
}

const theirs = "an administrator's policy for the runtime"

// userSettings is what the private home has in the settings of its user, less what concerns
// the sandbox. The agent wrote the file: a link, a pipe or no JSON counts as none.
func userSettings(private string) object {
	root, err := os.OpenRoot(private)
	if err != nil {
		return nil
	}
	defer root.Close()
	f, err := root.OpenFile(claudeUser, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(f, maxPolicy+1))
	if err != nil {
		return nil
	}
	return cleanSettings(b)
}

func cleanSettings(text []byte) object {
	var own object
	if strictjson.Check(text, maxPolicy) != nil || json.Unmarshal(text, &own) != nil {
		return nil
	}
	for k := range own {
		if strings.EqualFold(k, "sandbox") {
			delete(own, k)
		}
	}
	return own
}

func read(h sandbox.Host, path string) (string, error) {
	text, err := h.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("%s: %w; the runtime's own sandbox follows it, so make it readable", path, err)
	}
	return text, nil
}

// object is a JSON object or a TOML table.
type object = map[string]any

// merge puts over on top of base: objects member by member, lists joined, else over's word.
func merge(base, over object) object {
	out := maps.Clone(base)
	if out == nil {
		out = object{}
	}
	for k, v := range over {
		switch v := v.(type) {
		case object:
			old, _ := out[k].(object)
			out[k] = merge(old, v)
		case []any:
			old, _ := out[k].([]any)
			out[k] = join(old, v)
		default:
			out[k] = v
		}
	}
	return out
}

func join(a, b []any) []any {
	out := slices.Clone(a)
	for _, v := range b {
		text, isText := v.(string)
		if !isText || !slices.ContainsFunc(out, func(o any) bool { s, ok := o.(string); return ok && s == text }) {
			out = append(out, v)
		}
	}
	return out
}

func list[T any](values ...T) []any {
	out := make([]any, len(values))
	for i, v := range values {
		out[i] = v
	}
	return out
}

// claude is the managed settings of Claude Code (2.1): its drop-ins are merged in, for they
// would be read after ours.
func claude(rt runtimes.Runtime, h sandbox.Host, home, private, memory string, pin bool) ([]sandbox.File, error) {
	var admin object
	paths := []string{ClaudePath}
	names, err := h.ReadDir(claudeMore)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", claudeMore, err)
	}
	slices.Sort(names)
	for _, n := range names {
		if len(n) > len(".json") && n[len(n)-len(".json"):] == ".json" && n[0] != '.' {
			paths = append(paths, claudeMore+"/"+n)
		}
	}
	for _, path := range paths {
		text, err := read(h, path)
		if err != nil {
			return nil, err
		}
		if text == "" {
			continue
		}
		var one object
		if err := strictjson.Check([]byte(text), maxPolicy); err != nil {
			return nil, fmt.Errorf("%s: %w; Claude Code's policy on this machine cannot be kept: correct the file", path, err)
		}
		if err := json.Unmarshal([]byte(text), &one); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		admin = merge(admin, one)
	}
	// It asks its policy first where its memory lies, then its user's settings, and a project's
	// only where somebody trusted that.
	if _, set := admin["autoMemoryDirectory"]; memory != "" && !set {
		admin = merge(admin, object{"autoMemoryDirectory": memory})
	}
	if !pin {
		if len(admin) == 0 {
			return nil, nil
		}
		text, err := json.MarshalIndent(admin, "", "  ")
		if err != nil {
			return nil, err
		}
		return []sandbox.File{{Path: ClaudePath, Content: string(text) + "\n", Why: theirs + ", and where its memory lies"}}, nil
	}
	// Nothing that a command writes there may make the next one free.
	deny := list("Edit(~/.claude/settings.json)", "Edit(~/.claude/settings.local.json)", "Edit(~/.claude.json)", "Read(/"+Secrets+"/**)")
	denyRead := list(Secrets)
	var files, vars []any
	for _, c := range rt.Credentials {
		deny = append(deny, "Read(~/"+c+")", "Edit(~/"+c+")")
		denyRead = append(denyRead, "~/"+c)
		files = append(files, object{"path": "~/" + c, "mode": "deny"})
	}
	for _, name := range rt.KeyEnv {
		vars = append(vars, object{"name": name, "mode": "deny"})
	}
	pinned := object{
		"sandbox": object{
			"enabled":                   true,
			"failIfUnavailable":         true,
			"allowUnsandboxedCommands":  false,
			"enableWeakerNestedSandbox": false,
			"allowNestedUserNamespaces": false,
			// By their paths: a PATH of the project's is not to choose them.
			"bwrapPath":   probe.Bwrap,
			"filesystem":  object{"denyRead": denyRead},
			"credentials": object{"files": files, "envVars": vars},
		},
		"permissions": object{"deny": deny},
		// A hook is a command that runs outside of that sandbox.
		"allowManagedHooksOnly": true,
	}
	if _, kind, err := h.Resolve(socat); err == nil && kind == sandbox.KindFile {
		pinned["sandbox"].(object)["socatPath"] = socat
	}
	all := merge(admin, pinned)
	// Commands that an administrator excluded would run outside of it.
	if sb, ok := all["sandbox"].(object); ok {
		delete(sb, "excludedCommands")
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return nil, err
	}
	own := userSettings(private)
	if own == nil {
		own = object{}
	}
	user, err := json.MarshalIndent(own, "", "  ")
	if err != nil {
		return nil, err
	}
	const why = "Claude Code's own sandbox, on and pinned"
	return []sandbox.File{
		{Path: ClaudePath, Content: string(text) + "\n", Why: why},
		{Path: filepath.Join(home, claudeUser), Content: string(user) + "\n", Why: why + ": the user's settings as they were at the start, less exceptions from it"},
	}, nil
}

// codex is the requirements of Codex (0.16x), and its managed configuration, which beats the
// user's and a project's.
func codex(rt runtimes.Runtime, h sandbox.Host, pin bool) ([]sandbox.File, error) {
	tables := map[string]object{}
	var as []sandbox.File // as they are
	for _, path := range []string{CodexPath, codexConfigPath} {
		text, err := read(h, path)
		if err != nil {
			return nil, err
		}
		t := object{}
		if len(text) > maxPolicy {
			return nil, fmt.Errorf("%s: larger than %d bytes", path, maxPolicy)
		}
		if err := toml.Unmarshal([]byte(text), &t); err != nil {
			return nil, fmt.Errorf("%s: %w; Codex's policy on this machine cannot be kept: correct the file", path, err)
		}
		tables[path] = t
		if text != "" {
			as = append(as, sandbox.File{Path: path, Content: text, Why: theirs})
		}
	}
	if !pin {
		return as, nil
	}
	deny := list(Secrets)
	for _, c := range rt.Credentials {
		deny = append(deny, "~/"+c)
	}
	modes := list("read-only", "workspace-write")
	if admin, ok := tables[CodexPath]["allowed_sandbox_modes"].([]any); ok {
		modes = slices.DeleteFunc(modes, func(m any) bool { return !slices.Contains(admin, m) })
		if len(modes) == 0 {
			return nil, fmt.Errorf("%s: allowed_sandbox_modes leaves none of Codex's sandboxed modes: add \"read-only\" or \"workspace-write\"", CodexPath)
		}
	}
	delete(tables[CodexPath], "allowed_sandbox_modes")
	delete(tables[CodexPath], "remote_sandbox_config") // names modes by host
	requirements := merge(tables[CodexPath], object{
		"allowed_sandbox_modes":    modes,
		"allow_managed_hooks_only": true,
		"permissions":              object{"filesystem": object{"deny_read": deny}},
	})
	config := merge(tables[codexConfigPath], object{
		"shell_environment_policy": object{"exclude": list(rt.KeyEnv...)},
	})
	var out []sandbox.File
	for _, f := range []struct {
		path string
		t    object
	}{{CodexPath, requirements}, {codexConfigPath, config}} {
		text, err := toml.Marshal(f.t)
		if err != nil {
			return nil, err
		}
		out = append(out, sandbox.File{Path: f.path, Content: string(text), Why: "Codex's own sandbox, on and pinned"})
	}
	return out, nil
}
