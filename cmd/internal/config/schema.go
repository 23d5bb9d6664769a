// The keys of config.json: one table for reading, checking, showing and writing them.

package config

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/sandbox"
)

type kind int

const (
	boolean kind = iota
	text
	number
	list     // of strings
	duration // a Go duration, "5s"
)

var kindNames = map[kind]string{
	boolean: "true or false", text: "a string", number: "a whole number",
	list: "a list of strings", duration: `a duration such as "5s"`,
}

// setting is a key that has an effect here.
type setting struct {
	key    string
	kind   kind
	def    any
	secret bool
	env    []string // further variables, before AGENTCONNECT_SECTION_KEY
	check  func(any) error
}

var settings = []setting{
	{key: "security.requireSandbox", kind: boolean, def: false, env: []string{"AGENTCONNECT_REQUIRE_SANDBOX"}},
	{key: "security.allowUnsandboxedFallback", kind: boolean, def: false},
	{key: "controlPlane.url", kind: text, def: "", env: []string{"AGENTCONNECT_API_URL"}, check: checkURL},
	{key: "controlPlane.key", kind: text, def: "", secret: true, env: []string{"AGENTCONNECT_API_KEY"}},
	{key: "controlPlane.enabled", kind: boolean}, // default: whether there is a url
	{key: "controlPlane.keyFile", kind: text, def: ""},
	{key: "controlPlane.caFile", kind: text, def: ""},
	{key: "controlPlane.allowInsecure", kind: boolean, def: false},
	{key: "limits.maxAgents", kind: number, def: int64(32), check: atLeast(1)},
	{key: "limits.memory", kind: text, def: "", check: checkMemory},
	{key: "limits.cpu", kind: text, def: "", check: checkCPU},
	{key: "limits.tasks", kind: number, def: int64(4096), check: atLeast(1)},
	{key: "network.mode", kind: text, def: string(sandbox.NetworkOpen), check: checkNetwork},
	{key: "projects", kind: list, def: []string{}},
	{key: "acp.clientFiles", kind: text, def: "", check: oneOf("", "workspace")},
	{key: "logging.level", kind: text, def: "info", check: oneOf("trace", "debug", "info", "warn", "error")},
	{key: "supervisor", kind: text, def: "auto", check: oneOf("auto", "systemd", "direct")},
	{key: "stop.grace", kind: duration, def: 5 * time.Second, check: wait},
	{key: "stop.killGrace", kind: duration, def: 10 * time.Second, check: wait},
}

// policySettings are the keys of the policy object; see Policy.
var policySettings = []setting{
	{key: "requireSandbox", kind: boolean},
	{key: "networkMax", kind: text, check: checkNetwork},
	{key: "grantRoots", kind: list},
	{key: "limitMax.memory", kind: text, check: checkMemory},
	{key: "limitMax.cpu", kind: text, check: checkCPU},
	{key: "limitMax.tasks", kind: number, check: atLeast(1)},
}

// Keys lists every key that has an effect, those of the policy object included.
func Keys() []string {
	var keys []string
	for _, s := range settings {
		keys = append(keys, s.key)
	}
	for _, s := range policySettings {
		keys = append(keys, "policy."+s.key)
	}
	return append(keys, maps...)
}

// withoutEffect are AgentConnect's keys that nothing here acts on. quiet ones are kept
// without a warning: every file of AgentConnect has them.
var withoutEffect = map[string]bool{ // key: whether a warning names it
	"version": false, "daemonId": false,
	"webAppUrl": true, "usageReporting": true, "agentsDir": true, "memoryPlugins": true,
	"relays": true, "features": true, "sessions": true,
	"controlPlane.heartbeatMs":            true,
	"security.isolateAccountApps":         true,
	"security.workspaceGitAllowedOrigins": true,
	"limits.maxConcurrentSessions":        true,
	"limits.agentIdleTimeoutMs":           true,
	"limits.agentMaxLifetimeMs":           true,
	"limits.idleSweepMs":                  true,
	"limits.configFilesIdleMs":            true,
	"limits.shutdownDrainMs":              true,
	"limits.cancelBackstopMs":             true,
	"limits.agentStartAttempts":           true,
	"limits.agentStartBackoffMs":          true,
	"limits.maxAttachmentBytes":           true,
}

// maps are read beside viper, which would fold the case of their names.
var maps = []string{"runtimes", "mcpServers"}

// strictSections are those where a misspelt key would switch protection off.
var strictSections = []string{"security", "policy"}

func find(table []setting, key string) (setting, bool) {
	i := slices.IndexFunc(table, func(s setting) bool { return s.key == key })
	if i < 0 {
		return setting{}, false
	}
	return table[i], true
}

// variables are the environment variables of a key, the first one set counts.
func (s setting) variables() []string {
	return append(slices.Clone(s.env), "AGENTCONNECT_"+strings.ToUpper(strings.ReplaceAll(s.key, ".", "_")))
}

// fromJSON reads a value of a file; it takes the JSON type that belongs there and no
// other: "false" in quotes would otherwise be a true that nobody meant, or the reverse.
func (s setting) fromJSON(raw json.RawMessage) (any, error) {
	var v any
	var err error
	switch s.kind {
	case boolean:
		v, err = as[bool](raw)
	case text:
		v, err = as[string](raw)
	case number:
		v, err = as[int64](raw)
	case list:
		var ps []*string
		ps, err = as[[]*string](raw)
		ss := make([]string, 0, len(ps))
		for _, p := range ps {
			if p == nil {
				err = strconv.ErrSyntax
				break
			}
			ss = append(ss, *p)
		}
		v = ss
	case duration:
		var str string
		if str, err = as[string](raw); err == nil {
			v, err = time.ParseDuration(str)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("must be %s, not %s", kindNames[s.kind], brief(raw))
	}
	return v, s.verify(v)
}

// fromText reads a value of a flag or an environment variable. A list is separated as
// PATH is.
func (s setting) fromText(str string) (any, error) {
	var v any
	var err error
	switch s.kind {
	case boolean:
		v, err = parseBool(str)
	case text:
		v = str
	case number:
		v, err = strconv.ParseInt(str, 10, 64)
	case list:
		v = slices.DeleteFunc(strings.Split(str, ":"), func(p string) bool { return p == "" })
	case duration:
		v, err = time.ParseDuration(str)
	}
	if err != nil {
		return nil, fmt.Errorf("must be %s, not %q", kindNames[s.kind], str)
	}
	return v, s.verify(v)
}

func (s setting) verify(v any) error {
	if str, ok := v.(string); ok && strings.ContainsRune(str, 0) {
		return fmt.Errorf("has a NUL byte")
	}
	if s.check == nil {
		return nil
	}
	return s.check(v)
}

func as[T any](raw json.RawMessage) (T, error) {
	var v T
	err := json.Unmarshal(raw, &v)
	return v, err
}

func parseBool(s string) (bool, error) {
	switch strings.ToLower(s) {
	case "1", "true", "yes", "on":
		return true, nil
	case "0", "false", "no", "off":
		return false, nil
	}
	return false, strconv.ErrSyntax
}

func brief(raw json.RawMessage) string {
	s := string(raw)
	if len(s) > 40 {
		s = s[:40] + "…"
	}
	return s
}

func show(v any) string {
	switch v := v.(type) {
	case []string:
		b, err := json.Marshal(v)
		if err != nil {
			return err.Error()
		}
		return string(b)
	case time.Duration:
		return v.String()
	}
	return fmt.Sprint(v)
}

func checkURL(v any) error {
	s := v.(string)
	if s == "" {
		return nil
	}
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || !slices.Contains([]string{"ws", "wss", "http", "https"}, u.Scheme) {
		return fmt.Errorf("%q is not the address of a control plane: write it as \"wss://HOST/PATH\" or \"https://HOST\"", s)
	}
	if u.User != nil {
		return fmt.Errorf("the address holds a user or a password: put the key into controlPlane.key")
	}
	return nil
}

func checkMemory(v any) error {
	if v.(string) == "" {
		return nil
	}
	_, err := agent.ParseMemory(v.(string))
	return err
}

func checkCPU(v any) error {
	if v.(string) == "" {
		return nil
	}
	_, err := agent.ParseCPU(v.(string))
	return err
}

func checkNetwork(v any) error {
	words := make([]string, len(agent.NetworkModes))
	for i, m := range agent.NetworkModes {
		words[i] = string(m)
	}
	return oneOf(words...)(v)
}

func oneOf(words ...string) func(any) error {
	return func(v any) error {
		if slices.Contains(words, v.(string)) {
			return nil
		}
		quoted := make([]string, len(words))
		for i, w := range words {
			quoted[i] = strconv.Quote(w)
		}
		return fmt.Errorf("%q: write %s", v, strings.Join(quoted, " or "))
	}
}

func atLeast(n int64) func(any) error {
	return func(v any) error {
		if v.(int64) < n || v.(int64) > 1<<31-1 {
			return fmt.Errorf("%d: write a number of %d or more", v, n)
		}
		return nil
	}
}

func wait(v any) error {
	if d := v.(time.Duration); d < 0 || d > 10*time.Minute {
		return fmt.Errorf("%s: write a duration from 0s to 10m", d)
	}
	return nil
}
