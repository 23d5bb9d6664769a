// Putting the layers together.

package config

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/viper"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/cmd/internal/strictjson"
	"agentconnect.md/sandbox/sandbox"
)

// Load reads everything anew. Errors are *Error, or *atomicfile.Error where ROOT
// cannot be made.
func Load(o Options) (*Config, error) {
	if o.SystemDir == "" {
		o.SystemDir = SystemDir
	}
	loc, err := locate(o)
	if err != nil {
		return nil, err
	}
	c := &Config{Root: loc.root, Home: loc.home, Warnings: loc.warnings}
	c.values = []Value{{"root", loc.root, loc.rootSource}, {"home", loc.home, "passwd database"}}

	var files []*layer // the system's first
	for _, path := range []string{filepath.Join(o.SystemDir, "config.json"), filepath.Join(loc.root, "config.json")} {
		l, err := readLayer(path, loc.home)
		if err != nil {
			return nil, err
		}
		if l != nil {
			files = append(files, l)
			c.Warnings = append(c.Warnings, l.warnings...)
		}
	}
	if err := c.merge(o.Flags, files); err != nil {
		return nil, err
	}
	if err := c.loadSystemAgents(filepath.Join(o.SystemDir, "agents.d")); err != nil {
		return nil, err
	}
	slices.SortFunc(c.values, func(a, b Value) int { return strings.Compare(a.Key, b.Key) })
	return c, nil
}

// effective is a value and its source.
type effective struct {
	value  any
	source string
}

func (c *Config) merge(flags []Flag, files []*layer) error {
	v := viper.New()
	for _, l := range files {
		if err := v.MergeConfigMap(nested(l.values)); err != nil {
			return bad(l.path, "", "%w", err)
		}
	}
	for _, s := range settings {
		if s.def != nil {
			v.SetDefault(s.key, s.def)
		}
		if err := v.BindEnv(append([]string{s.key}, s.variables()...)...); err != nil {
			return bad("", s.key, "%w", err)
		}
	}
	for _, f := range flags {
		s, ok := find(settings, f.Key)
		if !ok {
			return bad("flag --"+f.Name, "", "sets no key of the configuration: %s", f.Key)
		}
		val, err := s.fromText(f.Value)
		if err != nil {
			return &Error{File: "flag --" + f.Name, Err: err}
		}
		v.Set(f.Key, val)
	}
	if err := c.checkEnvironment(); err != nil {
		return err
	}
	got := map[string]effective{}
	for _, s := range settings {
		e := effective{v.Get(s.key), source(s, flags, files)}
		if str, ok := e.value.(string); ok && strings.HasPrefix(e.source, "environment ") {
			val, err := s.fromText(str)
			if err != nil {
				return &Error{File: e.source, Err: err}
			}
			e.value = val
		}
		got[s.key] = e
	}
	if got["controlPlane.enabled"].value == nil {
		got["controlPlane.enabled"] = effective{got["controlPlane.url"].value != "", "default: on when there is a url"}
	}
	if err := c.require(got, flags, files); err != nil {
		return err
	}
	for _, l := range files {
		if l.policy != nil {
			c.Policies = append(c.Policies, *l.policy)
			c.values = append(c.values, l.policy.values()...)
		}
	}
	c.Runtimes, c.MCPServers = map[string]runtimes.Def{}, map[string]json.RawMessage{}
	from := map[string]effective{}
	for _, l := range files {
		for name, d := range l.runtimes {
			c.Runtimes[name] = d
			from["runtimes."+name] = effective{strings.Join(append([]string{d.Command}, d.Args...), " "), l.path}
		}
		for name, raw := range l.mcpServers {
			c.MCPServers[name] = raw
			from["mcpServers."+name] = effective{"(set)", l.path} // env, headers and args hold secrets
		}
	}
	for k, e := range from {
		c.values = append(c.values, Value{k, show(e.value), e.source})
	}
	for _, s := range settings {
		e := got[s.key]
		shown := show(e.value)
		if s.secret && shown != "" {
			shown = "(set)"
		}
		c.values = append(c.values, Value{s.key, shown, e.source})
	}
	c.assign(got)
	return nil
}

func (c *Config) assign(got map[string]effective) {
	str := func(k string) string { return got[k].value.(string) }
	yes := func(k string) bool { return got[k].value.(bool) }
	num := func(k string) int { return int(got[k].value.(int64)) }
	c.RequireSandbox = yes("security.requireSandbox")
	c.AllowUnsandboxedFallback = yes("security.allowUnsandboxedFallback")
	c.ControlPlane = ControlPlane{Enabled: yes("controlPlane.enabled"), URL: str("controlPlane.url"), Key: str("controlPlane.key"),
		KeyFile: str("controlPlane.keyFile"), CAFile: str("controlPlane.caFile"), AllowInsecure: yes("controlPlane.allowInsecure")}
	c.MaxAgents = num("limits.maxAgents")
	c.Limits = agent.Limits{Memory: str("limits.memory"), CPU: str("limits.cpu"), Tasks: num("limits.tasks")}
	c.Network = sandbox.NetworkMode(str("network.mode"))
	for _, p := range got["projects"].value.([]string) {
		abs, ok := expand(p, c.Home)
		if !ok {
			c.Warnings = append(c.Warnings, fmt.Sprintf("projects: %q is left out: write an absolute path, or one that starts with ~/", p))
			continue
		}
		c.Projects = append(c.Projects, abs)
	}
	c.ClientFiles, c.LogLevel, c.Supervisor = str("acp.clientFiles"), str("logging.level"), str("supervisor")
	c.StopGrace = got["stop.grace"].value.(time.Duration)
	c.KillGrace = got["stop.killGrace"].value.(time.Duration)
}

// require decides required mode: whoever says yes is not outvoted, so that a
// terminal's environment or a user's file cannot switch the protection off.
func (c *Config) require(got map[string]effective, flags []Flag, files []*layer) error {
	const key = "security.requireSandbox"
	s, _ := find(settings, key)
	var yes, no []string
	say := func(on bool, source string) {
		if on {
			yes = append(yes, source)
		} else {
			no = append(no, source)
		}
	}
	for _, f := range flags {
		if f.Key == key {
			v, err := s.fromText(f.Value)
			if err != nil {
				return &Error{File: "flag --" + f.Name, Err: err}
			}
			say(v.(bool), "flag --"+f.Name)
		}
	}
	for _, name := range s.variables() {
		str := os.Getenv(name)
		if str == "" {
			continue
		}
		v, err := s.fromText(str)
		if err != nil {
			return &Error{File: "environment " + name, Err: err}
		}
		say(v.(bool), "environment "+name)
	}
	for _, l := range slices.Backward(files) {
		if v, ok := l.values[key]; ok {
			say(v.(bool), l.path)
		}
		if l.policy != nil && l.policy.RequireSandbox {
			say(true, l.path+" (policy)")
		}
	}
	if len(yes) == 0 {
		return nil
	}
	got[key] = effective{true, strings.Join(yes, ", ")}
	for _, n := range no {
		c.Warnings = append(c.Warnings, fmt.Sprintf("%s says that the sandbox is not required, which has no effect: %s requires it", n, yes[0]))
	}
	const fallback = "security.allowUnsandboxedFallback"
	if got[fallback].value == true {
		c.Warnings = append(c.Warnings, fmt.Sprintf("%s (%s) has no effect: %s requires the sandbox", fallback, got[fallback].source, yes[0]))
		got[fallback] = effective{false, yes[0] + " requires the sandbox"}
	}
	return nil
}

// source says where viper takes the value from: the same order, told for people.
func source(s setting, flags []Flag, files []*layer) string {
	for _, f := range slices.Backward(flags) {
		if f.Key == s.key {
			return "flag --" + f.Name
		}
	}
	for _, name := range s.variables() {
		if os.Getenv(name) != "" {
			return "environment " + name
		}
	}
	for _, l := range slices.Backward(files) {
		if _, ok := l.values[s.key]; ok {
			return l.path
		}
	}
	return "default"
}

// checkEnvironment finds misspelt variables. Under security they are errors, as the
// keys of a file are.
func (c *Config) checkEnvironment() error {
	known := []string{RootEnv, programs.LibexecEnv}
	for _, s := range settings {
		known = append(known, s.variables()...)
	}
	for _, kv := range os.Environ() {
		name, value, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, "AGENTCONNECT_") || value == "" || slices.Contains(known, name) {
			continue
		}
		near := strictjson.Nearest(name, known)
		switch {
		case strings.HasPrefix(name, "AGENTCONNECT_SECURITY_"), strings.HasPrefix(name, "AGENTCONNECT_REQUIRE"):
			if near == "" {
				near = "AGENTCONNECT_REQUIRE_SANDBOX"
			}
			return bad("environment "+name, "", "unknown variable: did you mean %s? correct or unset it", near)
		case near != "":
			c.Warnings = append(c.Warnings, fmt.Sprintf("environment %s: unknown variable, without effect: did you mean %s?", name, near))
		}
	}
	return nil
}

// nested turns keys with a dot into objects, as viper merges them.
func nested(flat map[string]any) map[string]any {
	m := map[string]any{}
	for k, v := range flat {
		section, name, dotted := strings.Cut(k, ".")
		if !dotted {
			m[k] = v
			continue
		}
		sub, ok := m[section].(map[string]any)
		if !ok {
			sub = map[string]any{}
			m[section] = sub
		}
		sub[name] = v
	}
	return m
}

// expand makes a path of the configuration absolute.
func expand(p, home string) (string, bool) {
	if p == "~" {
		return home, true
	}
	if rest, ok := strings.CutPrefix(p, "~/"); ok {
		return filepath.Join(home, rest), true
	}
	if !filepath.IsAbs(p) || strings.ContainsRune(p, 0) {
		return "", false
	}
	return filepath.Clean(p), true
}
