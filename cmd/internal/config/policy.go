// What the machine's policy and required mode forbid, and agents that the machine
// declares.

package config

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/strictjson"
	"agentconnect.md/sandbox/sandbox"
)

func parsePolicy(path string, raw json.RawMessage, home string) (*Policy, error) {
	p := &Policy{Source: path}
	members, err := strictjson.Members(raw)
	if err != nil {
		return nil, bad(path, "policy", "must be an object, not %s", brief(raw))
	}
	flat := []strictjson.Member{}
	for _, m := range members {
		if strings.Contains(m.Key, ".") { // would be taken for a key of limitMax
			return nil, bad(path, "policy", "unknown key %q: write it as an object: {\"limitMax\": {...}}", m.Key)
		}
		if m.Key != "limitMax" || string(m.Value) == "null" {
			flat = append(flat, m)
			continue
		}
		inner, err := strictjson.Members(m.Value)
		if err != nil {
			return nil, bad(path, "policy.limitMax", "must be an object, not %s", brief(m.Value))
		}
		for _, i := range inner {
			flat = append(flat, strictjson.Member{Key: "limitMax." + i.Key, Value: i.Value})
		}
	}
	for _, m := range flat {
		s, ok := find(policySettings, m.Key)
		if !ok && m.Key != "limitMax" {
			known := []string{"limitMax"}
			for _, s := range policySettings {
				known = append(known, s.key)
			}
			near := cmp.Or(strictjson.Nearest(m.Key, known), known[1])
			return nil, &Error{File: path, Err: fmt.Errorf("%w correct or remove it", &strictjson.UnknownKeyError{Path: "policy." + m.Key, Nearest: "policy." + near})}
		}
		// null would read as "no limit", which nobody writes a policy for.
		if string(m.Value) == "null" {
			return nil, bad(path, "policy."+m.Key, "must not be null; remove the key to set no limit")
		}
		v, err := s.fromJSON(m.Value)
		if err != nil {
			return nil, &Error{File: path, Key: "policy." + m.Key, Err: err}
		}
		switch m.Key {
		case "requireSandbox":
			p.RequireSandbox = v.(bool)
		case "networkMax":
			p.NetworkMax = sandbox.NetworkMode(v.(string))
		case "grantRoots":
			p.GrantRoots = []string{}
			for _, r := range v.([]string) {
				abs, ok := expand(r, home)
				if !ok {
					return nil, bad(path, "policy.grantRoots", "%q: write an absolute path, or one that starts with ~/", r)
				}
				p.GrantRoots = append(p.GrantRoots, abs)
			}
		case "limitMax.memory":
			p.LimitMax.Memory = v.(string)
		case "limitMax.cpu":
			p.LimitMax.CPU = v.(string)
		case "limitMax.tasks":
			p.LimitMax.Tasks = int(v.(int64))
		}
	}
	return p, nil
}

func (p *Policy) values() []Value {
	var vs []Value
	add := func(key string, v any) { vs = append(vs, Value{"policy." + key, show(v), p.Source}) }
	if p.RequireSandbox {
		add("requireSandbox", true)
	}
	if p.NetworkMax != "" {
		add("networkMax", p.NetworkMax)
	}
	if p.GrantRoots != nil {
		add("grantRoots", p.GrantRoots)
	}
	if p.LimitMax.Memory != "" {
		add("limitMax.memory", p.LimitMax.Memory)
	}
	if p.LimitMax.CPU != "" {
		add("limitMax.cpu", p.LimitMax.CPU)
	}
	if p.LimitMax.Tasks != 0 {
		add("limitMax.tasks", p.LimitMax.Tasks)
	}
	return vs
}

// Forbidden says why an agent may not start as it is configured: exit code 78.
type Forbidden struct {
	Agent   string
	Reasons []Reason
	// Required: the sandbox is off for it, and required.
	Required bool
}

// Reason is one thing that is forbidden, by whom, and what to do.
type Reason struct {
	Field  string // of agent.json
	Why    string
	Remedy string
}

func (e *Forbidden) Error() string {
	parts := make([]string, len(e.Reasons))
	for i, r := range e.Reasons {
		parts[i] = r.Field + ": " + r.Why + "; " + r.Remedy
	}
	return "agent " + e.Agent + " is not allowed: " + strings.Join(parts, "; ")
}

// ExitCode is 69 where required mode refuses the agent, as it does where the sandbox cannot
// start; else 78.
func (e *Forbidden) ExitCode() int {
	if e.Required {
		return exitRefused
	}
	return ExitCode
}

const exitRefused = 69

// CheckAgent judges an agent that is valid by itself. The error is a *Forbidden with
// every reason. What an agent leaves to the defaults is never forbidden: AgentLimits
// and AgentNetwork keep those within the policy.
func CheckAgent(c *Config, a *agent.Agent) error {
	f := &Forbidden{Agent: a.ID}
	add := func(field, remedy, why string, args ...any) {
		f.Reasons = append(f.Reasons, Reason{field, fmt.Sprintf(why, args...), remedy})
	}
	if c.RequireSandbox && !a.Sandboxed() {
		f.Required = true
		add("runInSandbox", "run: agentconnect agent edit "+a.ID+" --sandbox", "is off, and the sandbox is required (%s)", c.source("security.requireSandbox"))
	}
	for _, p := range c.Policies {
		if m := a.Network.Mode; m != "" && p.NetworkMax != "" && rank(m) > rank(p.NetworkMax) {
			add("network.mode", fmt.Sprintf("run: agentconnect agent edit %s --network %s", a.ID, p.NetworkMax), "%s reaches more than %s, the most that %s allows", m, p.NetworkMax, p.Source)
		}
		if p.NetworkMax != "" && p.NetworkMax != sandbox.NetworkHost && !a.Sandboxed() {
			add("runInSandbox", "run: agentconnect agent edit "+a.ID+" --sandbox", "is off, so the agent has the host's network, and %s allows %s at most", p.Source, p.NetworkMax)
		}
		if p.GrantRoots != nil {
			if !a.Sandboxed() {
				add("runInSandbox", "run: agentconnect agent edit "+a.ID+" --sandbox", "is off, so the agent reads all files, and %s allows %s only", p.Source, rootsText(p.GrantRoots))
			}
			for i, g := range a.Grants {
				if g.Access != sandbox.Hidden && !below(g.Path, p.GrantRoots) {
					add(fmt.Sprintf("grants[%d]", i), "take the grant away, or ask the administrator", "%s lies outside what %s allows (%s)", g.Path, p.Source, rootsText(p.GrantRoots))
				}
			}
			if filepath.IsAbs(a.Workspace) && !below(a.Workspace, p.GrantRoots) {
				add("workspace", "choose a folder there, or ask the administrator", "%s lies outside what %s allows (%s)", a.Workspace, p.Source, rootsText(p.GrantRoots))
			}
			if a.Read == sandbox.ReadHost {
				add("read", "run: agentconnect agent edit "+a.ID+" --read system", "host shows the whole host, and %s allows %s only", p.Source, rootsText(p.GrantRoots))
			}
		}
		for _, l := range over(a.Limits, p.LimitMax) {
			add("limits."+l.name, fmt.Sprintf("run: agentconnect agent edit %s --%s %s", a.ID, l.name, l.most), "%s is more than %s, the most that %s allows", l.asked, l.most, p.Source)
		}
	}
	if len(f.Reasons) == 0 {
		return nil
	}
	return f
}

func (c *Config) source(key string) string {
	for _, v := range c.values {
		if v.Key == key {
			return v.Source
		}
	}
	return "unknown"
}

func rank(m sandbox.NetworkMode) int { return slices.Index(agent.NetworkModes, m) }

func rootsText(roots []string) string {
	if len(roots) == 0 {
		return "no grants"
	}
	return strings.Join(roots, ", ")
}

// below reports whether path lies in one of roots, by its name and, so that a link
// leads nowhere else, by what it resolves to.
func below(path string, roots []string) bool {
	path = filepath.Clean(path)
	real := resolve(path)
	return slices.ContainsFunc(roots, func(r string) bool {
		rr := resolve(r)
		return (inside(path, r) || inside(path, rr)) && inside(real, rr)
	})
}

// resolve follows the links of the part of path that exists.
func resolve(path string) string {
	rest := ""
	for p := path; ; p = filepath.Dir(p) {
		if real, err := filepath.EvalSymlinks(p); err == nil {
			return filepath.Join(real, rest)
		}
		if p == "/" {
			return path
		}
		rest = filepath.Join(filepath.Base(p), rest)
	}
}

type overLimit struct{ name, asked, most string }

// over names the limits that ask for more than most. Both were checked before.
func over(asked, most agent.Limits) []overLimit {
	var list []overLimit
	if a, m := memory(asked), memory(most); m > 0 && a > m {
		list = append(list, overLimit{"memory", asked.Memory, most.Memory})
	}
	if a, m := cpu(asked), cpu(most); m > 0 && a > m {
		list = append(list, overLimit{"cpu", asked.CPU, most.CPU})
	}
	if most.Tasks > 0 && asked.Tasks > most.Tasks {
		list = append(list, overLimit{"tasks", fmt.Sprint(asked.Tasks), fmt.Sprint(most.Tasks)})
	}
	return list
}

// memory and cpu are 0 for what was not set, and for what no check let through.
func memory(l agent.Limits) uint64 {
	n, err := l.MemoryBytes()
	if err != nil {
		return 0
	}
	return n
}

func cpu(l agent.Limits) int {
	n, err := l.CPUPercent()
	if err != nil {
		return 0
	}
	return n
}

// AgentLimits are the limits that hold for the agent: its own, else the default, and
// no default above the policy's.
func (c *Config) AgentLimits(a *agent.Agent) agent.Limits {
	l := agent.Limits{
		Memory: cmp.Or(a.Limits.Memory, c.Limits.Memory),
		CPU:    cmp.Or(a.Limits.CPU, c.Limits.CPU),
		Tasks:  cmp.Or(a.Limits.Tasks, c.Limits.Tasks),
	}
	for _, p := range c.Policies {
		if m := memory(p.LimitMax); m > 0 && (l.Memory == "" || memory(l) > m) {
			l.Memory = p.LimitMax.Memory
		}
		if m := cpu(p.LimitMax); m > 0 && (l.CPU == "" || cpu(l) > m) {
			l.CPU = p.LimitMax.CPU
		}
		if m := p.LimitMax.Tasks; m > 0 && (l.Tasks == 0 || l.Tasks > m) {
			l.Tasks = m
		}
	}
	return l
}

// AgentNetwork is the mode that holds for the agent: its own, else the default, and
// never above the policy's.
func (c *Config) AgentNetwork(a *agent.Agent) sandbox.NetworkMode {
	return c.MaxNetwork(cmp.Or(a.Network.Mode, c.Network))
}

// MaxNetwork is a mode, or the policy's where that allows less.
func (c *Config) MaxNetwork(m sandbox.NetworkMode) sandbox.NetworkMode {
	for _, p := range c.Policies {
		if p.NetworkMax != "" && rank(m) > rank(p.NetworkMax) {
			m = p.NetworkMax
		}
	}
	return m
}

func (c *Config) loadSystemAgents(dir string) error {
	des, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return bad(dir, "", "%w; make it readable, or remove it", errors.Unwrap(err))
	}
	for _, de := range des {
		id, ok := strings.CutSuffix(de.Name(), ".json")
		if !ok || strings.HasPrefix(id, ".") {
			continue
		}
		s := SystemAgent{ID: id, Path: filepath.Join(dir, de.Name())}
		if s.Agent, err = readSystemAgent(s.Path, id); err != nil {
			s.Err = err
			c.Warnings = append(c.Warnings, err.Error())
		}
		c.SystemAgents = append(c.SystemAgents, s)
	}
	return nil
}

func readSystemAgent(path, id string) (*agent.Agent, error) {
	data, err := agent.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("agent %s: %w", id, err)
	}
	a, err := agent.Parse(data)
	if err == nil {
		err = a.Validate()
	}
	if err == nil && a.ID != id {
		err = fmt.Errorf("%w: id is %q in a file named %s.json: make them the same", agent.ErrInvalid, a.ID, id)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return a, nil
}

// AgentEntry is an agent of the user or of the machine. Exactly one of Agent and Err
// is set.
type AgentEntry struct {
	ID     string
	Agent  *agent.Agent
	Err    error
	System bool   // declared for every user: read-only
	Path   string // of its file
}

// Agents gives the user's agents and the machine's together, by id. On a clash of
// names the machine's holds, also when it is broken, and a warning says so.
func (c *Config) Agents(store *agent.Store) (list []AgentEntry, warnings []string, err error) {
	own, err := store.List()
	if err != nil {
		return nil, nil, err
	}
	for _, e := range own {
		i := slices.IndexFunc(c.SystemAgents, func(s SystemAgent) bool { return s.ID == e.ID })
		if i >= 0 {
			warnings = append(warnings, fmt.Sprintf("agent %s: your own has no effect: %s declares it for every user; rename yours", e.ID, c.SystemAgents[i].Path))
			continue
		}
		list = append(list, AgentEntry{ID: e.ID, Agent: e.Agent, Err: e.Err, Path: store.Dirs(e.ID).File})
	}
	for _, s := range c.SystemAgents {
		list = append(list, AgentEntry{ID: s.ID, Agent: s.Agent, Err: s.Err, System: true, Path: s.Path})
	}
	slices.SortFunc(list, func(a, b AgentEntry) int { return strings.Compare(a.ID, b.ID) })
	return list, warnings, nil
}

// Agent gives one agent, as Agents does. Errors are agent.ErrNotFound and those of
// reading it.
func (c *Config) Agent(store *agent.Store, id string) (AgentEntry, error) {
	if err := agent.ValidateID(id); err != nil {
		return AgentEntry{}, err
	}
	for _, s := range c.SystemAgents {
		if s.ID == id {
			return AgentEntry{ID: id, Agent: s.Agent, Err: s.Err, System: true, Path: s.Path}, s.Err
		}
	}
	a, err := store.Load(id)
	return AgentEntry{ID: id, Agent: a, Err: err, Path: store.Dirs(id).File}, err
}
