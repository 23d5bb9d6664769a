package config

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/atomicfile"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/sandbox"
)

// host is a made-up machine: a home, ROOT in it and a system directory.
type host struct {
	t                  *testing.T
	home, root, system string
}

func newHost(t *testing.T) *host {
	t.Helper()
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); strings.HasPrefix(name, "AGENTCONNECT_") {
			t.Setenv(name, "") // empty counts as unset
		}
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t, filepath.Join(dir, "jo"), filepath.Join(dir, "jo", ".agentconnect"), filepath.Join(dir, "etc")}
	for _, d := range []string{h.root, filepath.Join(h.system, "agents.d")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return h
}

func (h *host) write(path, content string) string {
	h.t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		h.t.Fatal(err)
	}
	return path
}

func (h *host) user(content string) string {
	return h.write(filepath.Join(h.root, "config.json"), content)
}
func (h *host) machine(content string) string {
	return h.write(filepath.Join(h.system, "config.json"), content)
}

func (h *host) options(flags ...Flag) Options {
	return Options{SystemDir: h.system, Home: h.home, Flags: flags}
}

func (h *host) load(flags ...Flag) *Config {
	h.t.Helper()
	c, err := Load(h.options(flags...))
	if err != nil {
		h.t.Fatal(err)
	}
	return c
}

// fails wants a *Error with the text.
func (h *host) fails(want string, flags ...Flag) {
	h.t.Helper()
	c, err := Load(h.options(flags...))
	var e *Error
	if !errors.As(err, &e) || e.ExitCode() != 78 || !strings.Contains(err.Error(), want) {
		h.t.Errorf("got %+v, %v; want a *Error with %q", c, err, want)
	}
}

func value(t *testing.T, c *Config, key string) Value {
	t.Helper()
	for _, v := range c.Values() {
		if v.Key == key {
			return v
		}
	}
	t.Fatalf("no value %s", key)
	return Value{}
}

func TestDefaults(t *testing.T) {
	h := newHost(t)
	c := h.load()
	want := &Config{
		Root: h.root, Home: h.home, MaxAgents: 32, Limits: agent.Limits{Tasks: 4096}, Network: sandbox.NetworkOpen,
		LogLevel: "info", Supervisor: "auto", StopGrace: 5 * time.Second, KillGrace: 10 * time.Second,
		Runtimes: c.Runtimes, MCPServers: c.MCPServers,
	}
	values := c.values
	c.values = nil
	if diff := cmp.Diff(want, c, cmp.AllowUnexported(Config{})); diff != "" {
		t.Error(diff)
	}
	for _, v := range values {
		if v.Key != "root" && v.Key != "home" && !strings.HasPrefix(v.Source, "default") {
			t.Errorf("%s comes from %q", v.Key, v.Source)
		}
	}
}

func TestEachLayerGoesOverTheNext(t *testing.T) {
	h := newHost(t)
	check := func(want, source string, flags ...Flag) {
		t.Helper()
		c := h.load(flags...)
		if got := value(t, c, "logging.level"); got != (Value{"logging.level", want, source}) || c.LogLevel != want {
			t.Errorf("%+v (%s), want %s from %s", got, c.LogLevel, want, source)
		}
	}
	check("info", "default")
	sys := h.machine(`{"logging": {"level": "trace"}, "limits": {"maxAgents": 7}}`)
	check("trace", sys)
	usr := h.user(`{"logging": {"level": "debug"}}`)
	check("debug", usr)
	t.Setenv("AGENTCONNECT_LOGGING_LEVEL", "warn")
	check("warn", "environment AGENTCONNECT_LOGGING_LEVEL")
	check("error", "flag --log-level", Flag{"log-level", "logging.level", "error"})
	if c := h.load(); c.MaxAgents != 7 || value(t, c, "limits.maxAgents").Source != sys {
		t.Errorf("a key of the same section: %d", c.MaxAgents)
	}
}

func TestTheFlagSaysRequiredAndTheEnvironmentSaysOtherwise(t *testing.T) {
	h := newHost(t)
	t.Setenv("AGENTCONNECT_REQUIRE_SANDBOX", "false")
	t.Setenv("AGENTCONNECT_SECURITY_ALLOWUNSANDBOXEDFALLBACK", "true")
	c := h.load(Flag{"require-sandbox", "security.requireSandbox", "true"})
	if !c.RequireSandbox || c.AllowUnsandboxedFallback {
		t.Errorf("required %v, fallback %v", c.RequireSandbox, c.AllowUnsandboxedFallback)
	}
	if v := value(t, c, "security.requireSandbox"); v.Value != "true" || v.Source != "flag --require-sandbox" {
		t.Errorf("%+v", v)
	}
	if w := strings.Join(c.Warnings, "\n"); !strings.Contains(w, "environment AGENTCONNECT_REQUIRE_SANDBOX says that the sandbox is not required, which has no effect") {
		t.Errorf("warnings: %s", w)
	}
}

func TestRequiredModeIsOnWhoeverSaysSo(t *testing.T) {
	const key = "security.requireSandbox"
	off := Flag{"require-sandbox", key, "false"}
	sources := []struct {
		name string
		set  func(h *host, on bool) []Flag
	}{
		{"flag", func(h *host, on bool) []Flag { return []Flag{{"require-sandbox", key, strconv.FormatBool(on)}} }},
		{"short variable", func(h *host, on bool) []Flag {
			h.t.Setenv("AGENTCONNECT_REQUIRE_SANDBOX", strconv.FormatBool(on))
			return nil
		}},
		{"long variable", func(h *host, on bool) []Flag {
			h.t.Setenv("AGENTCONNECT_SECURITY_REQUIRESANDBOX", strconv.FormatBool(on))
			return nil
		}},
		{"user file", func(h *host, on bool) []Flag {
			h.user(fmt.Sprintf(`{"security": {"requireSandbox": %v}}`, on))
			return nil
		}},
		{"system file", func(h *host, on bool) []Flag {
			h.machine(fmt.Sprintf(`{"security": {"requireSandbox": %v}, "policy": {}}`, on))
			return nil
		}},
		{"system policy", func(h *host, on bool) []Flag {
			if on {
				h.machine(`{"security": {"requireSandbox": false}, "policy": {"requireSandbox": true}}`)
			}
			return nil
		}},
	}
	for _, on := range sources {
		t.Run(on.name, func(t *testing.T) {
			h := newHost(t)
			var flags []Flag
			for _, s := range sources {
				if s.name != on.name && !(on.name == "system policy" && s.name == "system file") {
					flags = append(flags, s.set(h, false)...)
				}
			}
			flags = append(flags, on.set(h, true)...)
			if c := h.load(flags...); !c.RequireSandbox || value(t, c, key).Value != "true" {
				t.Errorf("everyone else says no, and required is %v: %+v", c.RequireSandbox, value(t, c, key))
			}
		})
	}
	t.Run("nobody", func(t *testing.T) {
		h := newHost(t)
		h.user(`{"security": {"requireSandbox": false}}`)
		if c := h.load(off); c.RequireSandbox {
			t.Error("required although nobody said so")
		}
	})
}

func TestAMistypedKeyThatProtectsIsAnError(t *testing.T) {
	for in, want := range map[string]string{
		`{"security": {"requireSandbx": true}}`:                  `did you mean "security.requireSandbox"?`,
		`{"security": {"RequireSandbox": true}}`:                 `did you mean "security.requireSandbox"?`,
		`{"security": {"zzz": true}}`:                            `unknown key "security.zzz"`,
		`{"securty": {"requireSandbox": true}}`:                  `unknown key "securty"`,
		`{"Security": {"requireSandbox": true}}`:                 `unknown key "Security"`,
		`{"security.requireSandbox": true}`:                      `write it as an object: {"security": {"requireSandbox"`,
		`{"Security.RequireSandbox": true}`:                      `unknown key "Security.RequireSandbox"`,
		`{"requireSandbox": true, "policy": {"x": 1}}`:           `unknown key "policy.x"`,
		`{"policy": {"requireSandbx": true}}`:                    `did you mean "policy.requireSandbox"?`,
		`{"policy": {"limitMax": {"memroy": "1G"}}}`:             `did you mean "policy.limitMax.memory"?`,
		`{"policy": {"networkMax": null}}`:                       `must not be null`,
		`{"policy": {"grantRoots": null}}`:                       `must not be null`,
		`{"policy": {"limitMax": null}}`:                         `must not be null`,
		`{"policy": {"networkMax": "some"}}`:                     `write "none" or "allowlist"`,
		`{"policy": {"grantRoots": ["src"]}}`:                    `absolute path`,
		`{"policy": {"grantRoots": ["/a", null]}}`:               `must be a list of strings`,
		`{"policy": {"limitMax": {"memory": "2"}}}`:              `is a unit missing`,
		`{"policy": {"limitMax.memory": "1G"}}`:                  `write it as an object`,
		`{"policy": []}`:                                         `must be an object`,
		`{"security": true}`:                                     `must be an object`,
		`{"security": {"requireSandbox": "true"}}`:               `must be true or false, not "true"`,
		`{"security": {"requireSandbox": 1}}`:                    `must be true or false`,
		`{"security": {"requireSandbox": true}, "security": {}}`: `twice`,
		`{"LIMITS": {}}`:                                         `did you mean "limits"?`,
		`{"supervisor": "systmd"}`:                               `"auto" or "systemd" or "direct"`,
		`{"stop": {"grace": 5}}`:                                 `a duration such as "5s"`,
		`{"stop": {"grace": "-5s"}}`:                             `from 0s to 10m`,
		`{"controlPlane": {"url": "ftp://x"}}`:                   `not the address of a control plane`,
		`{"controlPlane": {"url": "wss://u:p@x/"}}`:              `put the key into controlPlane.key`,
		`{"limits": {"maxAgents": 0}}`:                           `1 or more`,
		`{"limits": {"maxAgents": 1.5}}`:                         `a whole number`,
		`{"network": {"mode": "full"}}`:                          `write "none"`,
		`{"runtimes": {"x": {"command": 1}}}`:                    `runtimes.x`,
		`{"runtimes": {"x": {"command": "a/b"}}}`:                `absolute path`,
		`{"runtimes": {"x": {"env": {"LD_PRELOAD": "y"}}}}`:      `LD_PRELOAD`,
		`{"runtimes": {"x": {"readRoots": ["../y"]}}}`:           `readRoots`,
		`{"runtimes": []}`:                                       `must be an object`,
		`{"mcpServers": {"x": 1}}`:                               `must be an object`,
		`{"security": {`:                                         `ends in the middle`,
		``:                                                       `empty`,
		`null`:                                                   `expected a JSON object`,
	} {
		h := newHost(t)
		path := h.user(in)
		h.fails(want)
		if _, err := Load(h.options()); err != nil && !strings.Contains(err.Error(), path) {
			t.Errorf("%s: the error does not name the file: %v", in, err)
		}
	}
}

func TestAMistypedKeyElsewhereIsAWarning(t *testing.T) {
	h := newHost(t)
	h.user(`{"colour": "blue", "limits": {"maxAgnets": 3, "maxAgents": 4}, "loging": {"level": "debug"}, "a.b": 1, "runtimes": {"x": {"command": "y", "cwd": "/"}}}`)
	c := h.load()
	w := strings.Join(c.Warnings, "\n")
	for _, want := range []string{`unknown key "colour"`, `did you mean "limits.maxAgents"?`, `did you mean "logging"?`, `unknown key "a.b"`, `unknown key "cwd"`} {
		if !strings.Contains(w, want) {
			t.Errorf("no warning with %s in:\n%s", want, w)
		}
	}
	if c.MaxAgents != 4 || c.LogLevel != "info" || c.Runtimes["x"].Command != "y" {
		t.Errorf("%+v", c)
	}
}

func TestEnvironment(t *testing.T) {
	h := newHost(t)
	t.Setenv("AGENTCONNECT_PROJECTS", h.home+"/src:/srv")
	t.Setenv("AGENTCONNECT_STOP_KILLGRACE", "3s")
	t.Setenv("AGENTCONNECT_LIMITS_MAXAGENTS", "9")
	t.Setenv("AGENTCONNECT_API_URL", "wss://cp.example/ws")
	t.Setenv("AGENTCONNECT_API_KEY", "s3cret")
	t.Setenv("AGENTCONNECT_LOGING_LEVEL", "debug")
	t.Setenv("AGENTCONNECT_LIBEXEC", "/opt/agentconnect") // no key, and of effect
	c := h.load()
	if !slices.Equal(c.Projects, []string{h.home + "/src", "/srv"}) || c.KillGrace != 3*time.Second || c.MaxAgents != 9 ||
		c.ControlPlane != (ControlPlane{Enabled: true, URL: "wss://cp.example/ws", Key: "s3cret"}) {
		t.Errorf("%+v", c)
	}
	if w := strings.Join(c.Warnings, "\n"); !strings.Contains(w, "AGENTCONNECT_LOGGING_LEVEL?") || strings.Contains(w, "LIBEXEC") {
		t.Errorf("warnings: %s", w)
	}
	for name, v := range map[string]string{
		"AGENTCONNECT_REQUIRE_SANDBOX": "maybe", "AGENTCONNECT_SECURITY_REQUIRESANDBX": "true", "AGENTCONNECT_REQUIRE_SANDBX": "true",
		"AGENTCONNECT_SUPERVISOR": "x", "AGENTCONNECT_LIMITS_TASKS": "many",
	} {
		t.Setenv(name, v)
		h.fails(name)
		t.Setenv(name, "")
	}
	h.fails("flag --supervisor", Flag{"supervisor", "supervisor", "x"})
}

func TestSecretsAreNotShown(t *testing.T) {
	h := newHost(t)
	h.user(`{"controlPlane": {"url": "wss://x/", "key": "s3cret"}, "mcpServers": {"Search": {"command": "x", "args": ["s3cret"], "env": {"T": "s3cret"}}},
		"runtimes": {"Mine": {"command": "mine", "env": {"K": "s3cret"}}}}`)
	c := h.load()
	if s := fmt.Sprint(c.Values(), c.Warnings); strings.Contains(s, "s3cret") {
		t.Error(s)
	}
	if v := value(t, c, "controlPlane.key"); v.Value != "(set)" {
		t.Errorf("%+v", v)
	}
}

func TestNamesInMapsKeepTheirCase(t *testing.T) {
	h := newHost(t)
	h.machine(`{"runtimes": {"Mine": {"command": "old"}, "Theirs": {"command": "/t", "env": [{"name": "Aa", "value": "1"}]}}}`)
	h.user(`{"runtimes": {"Mine": {"command": "new", "env": {"XyZ": "1"}}, "mine": {"command": "other"}}, "mcpServers": {"SearchIt": {"url": "https://x"}}}`)
	c := h.load()
	want := map[string]runtimes.Def{
		"Mine": {Command: "new", Env: runtimes.Env{"XyZ": "1"}}, "mine": {Command: "other"},
		"Theirs": {Command: "/t", Env: runtimes.Env{"Aa": "1"}},
	}
	if diff := cmp.Diff(want, c.Runtimes); diff != "" {
		t.Error(diff)
	}
	if string(c.MCPServers["SearchIt"]) != `{"url": "https://x"}` {
		t.Errorf("%s", c.MCPServers)
	}
	value(t, c, "runtimes.Mine")
}

// agentConnects is a config.json as AgentConnect writes it.
const agentConnects = `{
  "version": 1, "daemonId": "d", "webAppUrl": "https://app",
  "controlPlane": {"enabled": true, "url": "wss://cp/", "key": "k", "heartbeatMs": 15000},
  "usageReporting": {"enabled": false}, "agentsDir": "agents", "memoryPlugins": {}, "relays": [],
  "runtimes": {"claude-acp": {"command": "claude-agent-acp", "args": [], "env": [], "skillsAgentId": null}},
  "mcpServers": {"s": {"transport": "stdio", "command": "x", "args": [], "env": [], "headers": []}},
  "security": {"isolateAccountApps": true, "requireSandbox": false, "workspaceGitAllowedOrigins": []},
  "logging": {"level": "info"}, "features": {"turnFinalContextRefresh": true}, "sessions": {"x": 1},
  "limits": {"maxAgents": 8, "maxConcurrentSessions": 32, "agentIdleTimeoutMs": 900000, "idleSweepMs": 1}
}`

func TestAgentConnectsOwnFileIsAcceptedAsItIs(t *testing.T) {
	h := newHost(t)
	h.user(agentConnects)
	c := h.load()
	if c.MaxAgents != 8 || !c.ControlPlane.Enabled || c.ControlPlane.Key != "k" || c.Runtimes["claude-acp"].Command != "claude-agent-acp" {
		t.Errorf("%+v", c)
	}
	if len(c.Warnings) != 1 {
		t.Errorf("%d warnings, want one that names what has no effect: %q", len(c.Warnings), c.Warnings)
	}
	for _, k := range []string{"webAppUrl", "usageReporting", "agentsDir", "memoryPlugins", "relays", "features", "sessions", "security.isolateAccountApps", "limits.idleSweepMs", "controlPlane.heartbeatMs"} {
		if !strings.Contains(c.Warnings[0], k) {
			t.Errorf("the warning does not name %s: %s", k, c.Warnings[0])
		}
	}
}

func TestSetKeepsEverythingElse(t *testing.T) {
	h := newHost(t)
	path := h.user(agentConnects)
	if err := Set(h.root, "logging.level", "debug"); err != nil {
		t.Fatal(err)
	}
	if err := Set(h.root, "projects", []string{"~/src"}); err != nil {
		t.Fatal(err)
	}
	if err := Set(h.root, "limits.maxAgents", nil); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, keep := range []string{`"daemonId": "d"`, `"heartbeatMs": 15000`, `"skillsAgentId": null`, `"idleSweepMs": 1`, `"turnFinalContextRefresh": true`} {
		if !strings.Contains(string(data), keep) {
			t.Errorf("%s is lost:\n%s", keep, data)
		}
	}
	if c := h.load(); c.LogLevel != "debug" || !slices.Equal(c.Projects, []string{h.home + "/src"}) || c.MaxAgents != 32 {
		t.Errorf("%s, %q, %d", c.LogLevel, c.Projects, c.MaxAgents)
	}
	for key, v := range map[string]any{"logging.level": "loud", "logging.levle": "debug", "stop.grace": 5} {
		if err := Set(h.root, key, v); err == nil {
			t.Errorf("%s = %v is written", key, v)
		}
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(data) {
		t.Errorf("a refused value changed the file: %s", after)
	}
	h.user(`{"logging": {`)
	if err := Set(h.root, "logging.level", "debug"); err == nil {
		t.Error("a broken file was written over")
	}
}

func TestSetWritesThroughALinkToAFileElsewhere(t *testing.T) {
	h := newHost(t)
	dotfile := h.write(filepath.Join(h.home, "dotfile.json"), `{"version": 1}`)
	link := filepath.Join(h.root, "config.json")
	if err := os.Symlink(dotfile, link); err != nil {
		t.Fatal(err)
	}
	if err := Set(h.root, "logging.level", "debug"); err != nil {
		t.Fatal(err)
	}
	if to, err := os.Readlink(link); err != nil || to != dotfile || h.load().LogLevel != "debug" {
		t.Errorf("link %q, %v", to, err)
	}
}

func TestFilesThatOthersCanReadOrWrite(t *testing.T) {
	h := newHost(t)
	path := h.user(`{"controlPlane": {"key": "k"}}`)
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if c := h.load(); len(c.Warnings) != 1 || !strings.Contains(c.Warnings[0], "chmod 600 "+path) {
		t.Errorf("warnings: %q", c.Warnings)
	}
	if err := os.Chmod(path, 0o620); err != nil {
		t.Fatal(err)
	}
	h.fails("chmod go-w " + path)
	h.user(`{}`)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	sys := h.machine(`{}`)
	if err := os.Chmod(sys, 0o666); err != nil {
		t.Fatal(err)
	}
	h.fails("others may write")
	if err := os.Remove(sys); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	h.fails("not a regular file")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/no/such/file", path); err != nil {
		t.Fatal(err)
	}
	h.fails("link to a file that is not there")
}

func TestAFileThatCannotBeReadIsNotTakenForAbsent(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root reads everything: run this test as an ordinary user")
	}
	h := newHost(t)
	sys := h.machine(`{"policy": {"requireSandbox": true}}`)
	if err := os.Chmod(sys, 0); err != nil {
		t.Fatal(err)
	}
	h.fails("permission denied")
}

func TestRoot(t *testing.T) {
	h := newHost(t)
	other, third := filepath.Join(h.home, "other", "root"), filepath.Join(h.home, "third")
	c := h.load()
	if c.Root != h.root || value(t, c, "root").Source != "default" {
		t.Errorf("default: %s", c.Root)
	}
	t.Setenv(RootEnv, other)
	if c := h.load(); c.Root != other || value(t, c, "root").Source != "environment AGENTCONNECT_ROOT" {
		t.Errorf("environment: %s", c.Root)
	}
	o := h.options()
	o.Root = third
	c, err := Load(o)
	if err != nil || c.Root != third || value(t, c, "root").Source != "flag --root" {
		t.Errorf("flag: %+v, %v", c, err)
	}
	for _, p := range []string{other, third} {
		if fi, err := os.Stat(p); err != nil || fi.Mode().Perm() != 0o700 {
			t.Errorf("%s: %v, %v", p, fi.Mode(), err)
		}
	}
	t.Setenv(RootEnv, "")
	link := filepath.Join(h.home, "link")
	if err := os.Symlink(third, link); err != nil {
		t.Fatal(err)
	}
	o.Root = link
	if c, err := Load(o); err != nil || c.Root != third {
		t.Errorf("a link: %+v, %v", c, err)
	}
	file := h.write(filepath.Join(h.home, "file"), "")
	dangling := filepath.Join(h.home, "dangling")
	if err := os.Symlink("nowhere", dangling); err != nil {
		t.Fatal(err)
	}
	for root, want := range map[string]string{h.home: "the home or above", "/": "the home or above", filepath.Dir(h.home): "the home or above", "~/x": "not expanded", file: "not a directory", dangling: "no such file"} {
		o.Root = root
		_, err := Load(o)
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", root, err, want)
		}
	}
	if err := os.Chmod(third, 0o770); err != nil {
		t.Fatal(err)
	}
	o.Root = third
	if _, err := Load(o); err == nil || !strings.Contains(err.Error(), "chmod 700 "+third) {
		t.Errorf("writable for the group: %v", err)
	}
	if err := os.Chmod(third, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(o); err == nil || !strings.Contains(err.Error(), "may not read "+third+" (mode 0600): chmod 700 ") {
		t.Errorf("without the right to enter: %v", err)
	}
	if err := os.Chmod(third, 0o755); err != nil {
		t.Fatal(err)
	}
	if c, err := Load(o); err != nil || len(c.Warnings) != 1 || !strings.Contains(c.Warnings[0], "chmod 700 "+third) {
		t.Errorf("readable for others: %+v, %v", c, err)
	}
	o.Root = "/proc/nowhere/root"
	var we *atomicfile.Error
	if _, err := Load(o); !errors.As(err, &we) {
		t.Errorf("cannot be made: %v, want an *atomicfile.Error", err)
	}
}

// Who shows what a daemon left finds it whatever is wrong with the configuration, and HOME.
func TestRootOfABrokenConfiguration(t *testing.T) {
	h := newHost(t)
	h.user("{")
	t.Setenv("HOME", "")
	if root, err := Root(h.options()); err != nil || root != h.root {
		t.Errorf("%q, %v", root, err)
	}
	if err := os.Chmod(h.root, 0o777); err != nil {
		t.Fatal(err)
	}
	if root, err := Root(h.options()); err != nil || root != h.root {
		t.Errorf("others may write to it: %q, %v", root, err)
	}
	o := h.options()
	o.Root = "/proc/nowhere/root"
	if root, err := Root(o); err == nil {
		t.Errorf("it cannot be made: %q", root)
	}
}

func TestRootOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give a directory away: run this test as root")
	}
	h := newHost(t)
	if err := os.Chown(h.root, 4711, 4711); err != nil {
		t.Fatal(err)
	}
	h.fails("belongs to uid 4711")
	if err := os.Chown(h.root, 0, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(h.user(`{}`), 4711, 4711); err != nil {
		t.Fatal(err)
	}
	h.fails("belongs to uid 4711")
}

func TestHomeIsThatOfThePasswdDatabase(t *testing.T) {
	u, err := user.LookupId(strconv.Itoa(os.Geteuid()))
	if err != nil {
		t.Skipf("this user is not in the passwd database: %v", err)
	}
	want, err := filepath.EvalSymlinks(u.HomeDir)
	if err != nil {
		t.Skipf("this user has no home: %v", err)
	}
	h := newHost(t)
	t.Setenv("HOME", h.home)
	o := h.options()
	o.Home, o.Root = "", h.root
	c, err := Load(o)
	if err != nil || c.Home != want || len(c.Warnings) != 1 || !strings.Contains(c.Warnings[0], "HOME is "+h.home) {
		t.Errorf("%+v, %v; want %s and a warning", c, err, want)
	}
	t.Setenv("HOME", u.HomeDir)
	if c, err := Load(o); err != nil || len(c.Warnings) != 0 {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestAReloadWithAnErrorLeavesTheOldValue(t *testing.T) {
	h := newHost(t)
	h.user(`{"security": {"requireSandbox": true}}`)
	old := h.load()
	h.user(`{"security": {"requireSandbox": false`)
	if c, err := Load(h.options()); err == nil || c != nil {
		t.Errorf("%+v, %v", c, err)
	}
	if !old.RequireSandbox {
		t.Error("the old value changed")
	}
}

func reasons(err error) string {
	var f *Forbidden
	if !errors.As(err, &f) {
		return ""
	}
	var fields []string
	for _, r := range f.Reasons {
		if r.Why == "" || r.Remedy == "" {
			return fmt.Sprintf("%s without a reason or a remedy: %+v", r.Field, r)
		}
		fields = append(fields, r.Field)
	}
	return strings.Join(fields, " ")
}

func TestWhatThePolicyForbids(t *testing.T) {
	off := false
	grant := func(path string, a sandbox.Access) []sandbox.Grant { return []sandbox.Grant{{Path: path, Access: a}} }
	tests := []struct {
		name, policy string
		agent        agent.Agent
		want         string
	}{
		{"nothing said", `{}`, agent.Agent{RunInSandbox: &off, Network: agent.Network{Mode: "host"}, Read: "host"}, ""},
		{"no sandbox in required mode", `{"requireSandbox": true}`, agent.Agent{RunInSandbox: &off}, "runInSandbox"},
		{"sandbox by default in required mode", `{"requireSandbox": true}`, agent.Agent{}, ""},
		{"network at the most", `{"networkMax": "allowlist"}`, agent.Agent{Network: agent.Network{Mode: "allowlist"}}, ""},
		{"network above", `{"networkMax": "allowlist"}`, agent.Agent{Network: agent.Network{Mode: "open"}}, "network.mode"},
		{"open above none", `{"networkMax": "none"}`, agent.Agent{Network: agent.Network{Mode: "allowlist"}}, "network.mode"},
		{"network below", `{"networkMax": "open"}`, agent.Agent{Network: agent.Network{Mode: "none"}}, ""},
		{"no network said", `{"networkMax": "none"}`, agent.Agent{}, ""},
		{"no sandbox is all of the network", `{"networkMax": "open"}`, agent.Agent{RunInSandbox: &off}, "runInSandbox"},
		{"grant inside", `{"grantRoots": ["DIR/ok"]}`, agent.Agent{Grants: grant("DIR/ok/x", "rw")}, ""},
		{"the root itself", `{"grantRoots": ["DIR/ok"]}`, agent.Agent{Grants: grant("DIR/ok", "rw")}, ""},
		{"grant beside", `{"grantRoots": ["DIR/ok"]}`, agent.Agent{Grants: grant("DIR/okay", "ro")}, "grants[0]"},
		{"grant above", `{"grantRoots": ["DIR/ok"]}`, agent.Agent{Grants: grant("DIR", "ro")}, "grants[0]"},
		{"grant through a link that leads out", `{"grantRoots": ["DIR/ok"]}`, agent.Agent{Grants: grant("DIR/ok/out", "ro")}, "grants[0]"},
		{"grant below a link that leads out", `{"grantRoots": ["DIR/ok"]}`, agent.Agent{Grants: grant("DIR/ok/out/not/there", "ro")}, "grants[0]"},
		{"hiding is no grant", `{"grantRoots": []}`, agent.Agent{Grants: grant("/anything", "hidden")}, ""},
		{"no roots means no grants", `{"grantRoots": []}`, agent.Agent{Grants: grant("DIR/ok", "ro")}, "grants[0]"},
		{"workspace outside", `{"grantRoots": ["DIR/ok"]}`, agent.Agent{Workspace: "/srv/app"}, "workspace"},
		{"workspace in the agent directory", `{"grantRoots": []}`, agent.Agent{Workspace: "app"}, ""},
		{"root below the home", `{"grantRoots": ["~/src"]}`, agent.Agent{Workspace: "HOME/src/app"}, ""},
		{"the whole host", `{"grantRoots": ["DIR/ok"]}`, agent.Agent{Read: "host"}, "read"},
		{"memory", `{"limitMax": {"memory": "2G"}}`, agent.Agent{Limits: agent.Limits{Memory: "2049M"}}, "limits.memory"},
		{"memory at the most", `{"limitMax": {"memory": "2G"}}`, agent.Agent{Limits: agent.Limits{Memory: "2048M"}}, ""},
		{"cpu and tasks", `{"limitMax": {"cpu": "100%", "tasks": 10}}`, agent.Agent{Limits: agent.Limits{CPU: "101%", Tasks: 11}}, "limits.cpu limits.tasks"},
	}
	for _, where := range []string{"machine", "user"} {
		for _, tt := range tests {
			t.Run(where+"/"+tt.name, func(t *testing.T) {
				h := newHost(t)
				dir := filepath.Dir(h.home)
				if err := os.Mkdir(filepath.Join(dir, "ok"), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink(h.home, filepath.Join(dir, "ok", "out")); err != nil {
					t.Fatal(err)
				}
				replace := strings.NewReplacer("DIR", dir, "HOME", h.home)
				write := h.machine
				if where == "user" {
					write = h.user
				}
				write(replace.Replace(`{"policy": ` + tt.policy + `}`))
				a := tt.agent
				a.ID, a.Runtime = "alice", "gemini"
				a.Grants = slices.Clone(a.Grants)
				for i := range a.Grants {
					a.Grants[i].Path = replace.Replace(a.Grants[i].Path)
				}
				a.Workspace = replace.Replace(a.Workspace)
				if err := a.Validate(); err != nil {
					t.Fatal(err)
				}
				if got := reasons(CheckAgent(h.load(), &a)); got != tt.want {
					t.Errorf("forbidden: %q, want %q", got, tt.want)
				}
			})
		}
	}
}

func TestTheUserCannotLoosenTheMachinesPolicy(t *testing.T) {
	h := newHost(t)
	h.machine(`{"policy": {"networkMax": "none", "limitMax": {"memory": "1G", "tasks": 10}, "grantRoots": []}, "limits": {"memory": "512M"}}`)
	h.user(`{"policy": {"networkMax": "host", "limitMax": {"memory": "8G", "cpu": "50%"}, "grantRoots": ["/"]}, "network": {"mode": "host"}, "limits": {"memory": "4G", "tasks": 99}}`)
	c := h.load()
	a := &agent.Agent{ID: "a", Runtime: "x", Network: agent.Network{Mode: "open"}, Grants: []sandbox.Grant{{Path: "/srv", Access: "ro"}}}
	if got := reasons(CheckAgent(c, a)); got != "network.mode grants[0]" {
		t.Errorf("forbidden: %q", got)
	}
	if n := c.AgentNetwork(&agent.Agent{}); n != sandbox.NetworkNone {
		t.Errorf("the default network is %s", n)
	}
	if l := c.AgentLimits(&agent.Agent{}); l != (agent.Limits{Memory: "1G", CPU: "50%", Tasks: 10}) {
		t.Errorf("the default limits are %+v", l)
	}
	if l := c.AgentLimits(&agent.Agent{Limits: agent.Limits{Memory: "256M", Tasks: 5}}); l != (agent.Limits{Memory: "256M", CPU: "50%", Tasks: 5}) {
		t.Errorf("an agent's own lower limits are %+v", l)
	}
}

func TestAgentsThatTheMachineDeclares(t *testing.T) {
	h := newHost(t)
	store := agent.NewStore(h.root)
	for _, id := range []string{"both", "mine", "broken"} {
		if err := store.Create(&agent.Agent{ID: id, Runtime: "gemini", Name: "user's"}); err != nil {
			t.Fatal(err)
		}
	}
	declare := func(file, content string) string {
		return h.write(filepath.Join(h.system, "agents.d", file), content)
	}
	both := declare("both.json", `{"id": "both", "runtime": "codex-acp", "name": "machine's"}`)
	declare("ours.json", `{"id": "ours", "runtime": "gemini"}`)
	declare("broken.json", `{"id": "broken", "runtime": `)
	declare("other.json", `{"id": "another", "runtime": "gemini"}`)
	declare("readme.txt", "not an agent")
	c := h.load()
	list, warnings, err := c.Agents(store)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, e := range list {
		switch {
		case e.Err != nil:
			got[e.ID] = "broken"
		default:
			got[e.ID] = e.Agent.Name
		}
		if e.System != (e.ID != "mine") {
			t.Errorf("%s: system %v", e.ID, e.System)
		}
	}
	if diff := cmp.Diff(map[string]string{"both": "machine's", "mine": "user's", "ours": "", "broken": "broken", "other": "broken"}, got); diff != "" {
		t.Error(diff)
	}
	if w := strings.Join(warnings, "\n"); !strings.Contains(w, "agent both: your own has no effect: "+both) {
		t.Errorf("warnings: %s", w)
	}
	if w := strings.Join(c.Warnings, "\n"); !strings.Contains(w, "broken.json") || !strings.Contains(w, "other.json") {
		t.Errorf("warnings: %s", w)
	}
	if e, err := c.Agent(store, "both"); err != nil || !e.System || e.Agent.Runtime != "codex-acp" {
		t.Errorf("both: %+v, %v", e, err)
	}
	if e, err := c.Agent(store, "broken"); err == nil || e.Agent != nil {
		t.Errorf("a broken declaration gives way to the user's: %+v", e)
	}
	if _, err := c.Agent(store, "nobody"); !errors.Is(err, agent.ErrNotFound) {
		t.Errorf("nobody: %v", err)
	}
}

func FuzzParseLayer(f *testing.F) {
	f.Add([]byte(agentConnects))
	f.Add([]byte(`{"policy": {"requireSandbox": true, "networkMax": "open", "grantRoots": ["~/src"], "limitMax": {"memory": "2G", "cpu": "100%", "tasks": 5}}}`))
	f.Add([]byte(`{"Security": {"requireSandbox": true}, "security.requireSandbox": true, "projects": [], "stop": {"grace": "5s"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := parseLayer("config.json", data, "/home/jo")
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				t.Errorf("%v is not a *Error", err)
			}
			return
		}
		// Whatever of security was accepted is a value, not a warning.
		w := strings.Join(l.warnings, "\n")
		for _, key := range []string{`"security"`, `"security.`, `"policy"`, `"policy.`} {
			if strings.Contains(w, "unknown key "+key) {
				t.Errorf("%q: only a warning: %s", data, w)
			}
		}
		var c Config
		c.Home = "/home/jo"
		if err := c.merge(nil, []*layer{l}); err != nil {
			t.Fatalf("%q was accepted and cannot be merged: %v", data, err)
		}
		if on, ok := l.values["security.requireSandbox"]; ok && on == true && !c.RequireSandbox {
			t.Errorf("%q: not in required mode", data)
		}
		if l.policy != nil && l.policy.RequireSandbox && !c.RequireSandbox {
			t.Errorf("%q: not in required mode", data)
		}
	})
}
