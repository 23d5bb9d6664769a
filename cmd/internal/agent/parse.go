// Reading and writing agent.json: what the text may be, and what AgentConnect's own
// agent.json has that ours does not.

package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/strictjson"
)

// MaxSize bounds agent.json, in bytes.
const MaxSize = 1 << 20

// ErrInvalid is the class of everything wrong with an agent's configuration: exit
// code 78.
var ErrInvalid = errors.New("invalid agent configuration")

// foreignKeys are AgentConnect's keys of agent.json that have no effect here. A
// rewrite keeps them.
var foreignKeys = []string{
	"allowRuntimeChangesInChat", "allowedCallerAgentIds", "allowedTargetAgentIds",
	"approvalsReviewer", "builtin", "callPolicy", "crons", "description",
	"displayName", "executionMode", "fastMode", "iconUrl", "integrations",
	"introduceOnJoin", "managedSkills", "origin", "outboundPolicy", "output",
	"pause", "permissions", "reasoningEffort", "skills", "status",
}

// onDisk is agent.json's text. AgentConnect writes workspace and memory as objects;
// ours are strings.
type onDisk struct {
	plain
	Workspace json.RawMessage `json:"workspace,omitempty"`
	Memory    json.RawMessage `json:"memory,omitempty"`
}

type plain Agent

// Parse reads agent.json strictly: an unknown key, a key that stands there twice,
// text after the object, invalid UTF-8 and more than MaxSize bytes are errors. It
// checks the form, not the content: see Validate. Errors are ErrInvalid.
func Parse(data []byte) (*Agent, error) {
	a, err := parse(data)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return a, nil
}

func parse(data []byte) (*Agent, error) {
	var d onDisk
	if err := strictjson.Decode(data, MaxSize, &d, foreignKeys...); err != nil {
		return nil, err
	}
	a := Agent(d.plain)
	members, err := strictjson.Members(data)
	if err != nil {
		return nil, err
	}
	for _, m := range members {
		if slices.Contains(foreignKeys, m.Key) {
			a.keep(m.Key, m.Value)
		}
	}
	if a.Workspace, err = a.textOr("workspace", d.Workspace, "path"); err != nil {
		return nil, err
	}
	if a.Memory, err = a.textOr("memory", d.Memory, "provider"); err != nil {
		return nil, err
	}
	if a.Memory == "external" && a.Kept["memory"] != nil {
		a.Memory = "none" // an external memory is the control plane's; nothing of it is here
	}
	a.MCPServers, a.RuntimeOverrides = present(a.MCPServers), present(a.RuntimeOverrides)
	return &a, nil
}

// textOr reads a string, or the named string of an object, which is then kept.
func (a *Agent) textOr(key string, raw json.RawMessage, inner string) (string, error) {
	raw = present(raw)
	if raw == nil {
		return "", nil
	}
	if raw[0] != '{' {
		var s string
		if json.Unmarshal(raw, &s) != nil {
			return "", fmt.Errorf("%s must be a string", key)
		}
		return s, nil
	}
	s, err := innerText(raw, inner)
	if err != nil {
		return "", fmt.Errorf("%s.%s must be a string", key, inner)
	}
	a.keep(key, raw)
	return s, nil
}

func innerText(raw json.RawMessage, inner string) (string, error) {
	members, err := strictjson.Members(raw)
	if err != nil {
		return "", err
	}
	for _, m := range members {
		if m.Key == inner {
			var s string
			err := json.Unmarshal(m.Value, &s)
			return s, err
		}
	}
	return "", nil
}

func (a *Agent) keep(key string, raw json.RawMessage) {
	if a.Kept == nil {
		a.Kept = map[string]json.RawMessage{}
	}
	a.Kept[key] = slices.Clone(raw)
}

func present(raw json.RawMessage) json.RawMessage {
	if bytes.Equal(raw, []byte("null")) {
		return nil
	}
	return raw
}

// Unused names the keys of the file that have no effect here, sorted.
func (a *Agent) Unused() []string {
	var keys []string
	for k := range a.Kept {
		if slices.Contains(foreignKeys, k) {
			keys = append(keys, k)
		}
	}
	if p, _ := innerText(a.Kept["memory"], "provider"); p == "external" {
		keys = append(keys, "memory.provider external")
	}
	slices.Sort(keys)
	return keys
}

// Encode writes agent.json: our keys in the order of the struct, then what was kept.
// runInSandbox is always written.
func (a *Agent) Encode() ([]byte, error) {
	on := a.Sandboxed()
	d := plain(*a)
	d.RunInSandbox = &on
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(d); err != nil {
		return nil, err
	}
	members, err := strictjson.Members(b.Bytes())
	if err != nil {
		return nil, err
	}
	objects := []struct{ key, inner, text string }{
		{"workspace", "path", a.Workspace},
		{"memory", "provider", a.Memory},
	}
	for _, o := range objects {
		raw, err := a.object(o.key, o.inner, o.text)
		if err != nil {
			return nil, err
		}
		if raw == nil {
			continue
		}
		if i := slices.IndexFunc(members, func(m strictjson.Member) bool { return m.Key == o.key }); i >= 0 {
			members[i].Value = raw
		} else {
			members = append(members, strictjson.Member{Key: o.key, Value: raw})
		}
	}
	for _, k := range foreignKeys {
		if raw := a.Kept[k]; raw != nil {
			members = append(members, strictjson.Member{Key: k, Value: raw})
		}
	}
	return strictjson.Encode(members)
}

// object gives the kept object of key with its inner string brought up to date.
func (a *Agent) object(key, inner, text string) (json.RawMessage, error) {
	raw := a.Kept[key]
	if raw == nil {
		return nil, nil
	}
	old, err := innerText(raw, inner)
	if err != nil || old == text || (old == "external" && text == "none") {
		return raw, err
	}
	members, err := strictjson.Members(raw)
	if err != nil {
		return nil, err
	}
	quoted, err := json.Marshal(text)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(members, func(m strictjson.Member) bool { return m.Key == inner })
	if i < 0 {
		members = append(members, strictjson.Member{Key: inner})
		i = len(members) - 1
	}
	members[i].Value = quoted
	return strictjson.Encode(members)
}

// ExtraEnv is the environment that the operator gave the agent, as a map: env of
// agent.json, over AgentConnect's runtimeOverrides.secrets, over its
// runtimeOverrides.env. It may hold secrets.
func (a *Agent) ExtraEnv() (map[string]string, error) {
	env := map[string]string{}
	if len(a.RuntimeOverrides) > 0 {
		type pair struct {
			Name  string `json:"name"`
			Value string `json:"value"`
		}
		var o struct {
			Env     []pair `json:"env"`
			Secrets []pair `json:"secrets"`
		}
		if err := json.Unmarshal(a.RuntimeOverrides, &o); err != nil {
			return nil, fmt.Errorf("%w: runtimeOverrides: env and secrets must be lists of {\"name\", \"value\"}", ErrInvalid)
		}
		for _, p := range append(o.Env, o.Secrets...) {
			env[p.Name] = p.Value
		}
	}
	for k, v := range a.Env {
		env[k] = v
	}
	return env, nil
}

// invalid collects what is wrong, so that one run tells all of it.
type invalid []string

func (p *invalid) add(format string, args ...any) { *p = append(*p, fmt.Sprintf(format, args...)) }

func (p invalid) err() error {
	if len(p) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrInvalid, strings.Join(p, "; "))
}
