// What the control plane says of an agent, as this daemon's own configuration.

package placement

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/agent"
	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

// merge returns the spec after an update: what is absent in it stays as it was.
func merge(old, upd cp.AgentSpec) cp.AgentSpec {
	out := upd
	keep(&out.DisplayName, old.DisplayName)
	keep(&out.Description, old.Description)
	keep(&out.Runtime, old.Runtime)
	keep(&out.Model, old.Model)
	keep(&out.ReasoningEffort, old.ReasoningEffort)
	keep(&out.PermissionMode, old.PermissionMode)
	keep(&out.Pause, old.Pause)
	keep(&out.Env, old.Env)
	keep(&out.Secrets, old.Secrets)
	keep(&out.ConfigRevision, old.ConfigRevision)
	keep(&out.MCPServers, old.MCPServers)
	keep(&out.Memory, old.Memory)
	keep(&out.RunInSandbox, old.RunInSandbox)
	keep(&out.RuntimeOverrides, old.RuntimeOverrides)
	keep(&out.Workspace, old.Workspace)
	keep(&out.Skills, old.Skills)
	keep(&out.ManagedSkills, old.ManagedSkills)
	keep(&out.FastMode, old.FastMode)
	keep(&out.ApprovalsReviewer, old.ApprovalsReviewer)
	return out
}

func keep[T any](field *cp.Optional[T], old cp.Optional[T]) {
	if !field.Set {
		*field = old
	}
}

// canonical is the content of a spec, for comparison: a null is the same as what is absent.
func canonical(s cp.AgentSpec) map[string]any {
	return map[string]any{
		"name": s.Name, "displayName": s.DisplayName.V, "description": s.Description.V, "runtime": s.Runtime.V, "model": s.Model.V,
		"effort": s.ReasoningEffort.V, "mode": s.PermissionMode.V, "pause": s.Pause.V, "env": s.Env.V, "secrets": s.Secrets.V,
		"mcp": s.MCPServers.V, "memory": s.Memory.V, "sandbox": s.RunInSandbox.V, "overrides": string(s.RuntimeOverrides.V), "workspace": s.Workspace.V,
		"skills": string(s.Skills.V), "managedSkills": string(s.ManagedSkills.V), "fastMode": string(s.FastMode.V), "reviewer": string(s.ApprovalsReviewer.V),
	}
}

// convert makes the configuration of a placed agent and names what this daemon does not do
// of it. An error is what it cannot do without.
func (p *Placement) convert(a *placed) (conf *agent.Agent, secrets map[string]string, warnings []string, err error) {
	s := a.spec
	sandboxed := s.RunInSandbox.V
	conf = &agent.Agent{
		ID: a.id, Name: s.Name, Runtime: s.Runtime.V, RunInSandbox: &sandboxed,
		PermissionMode: s.PermissionMode.V, Env: maps.Clone(s.Env.V),
	}
	if s.Memory.Set && !s.Memory.Null {
		switch s.Memory.V.Provider {
		case "managed", "native", "none":
			conf.Memory = s.Memory.V.Provider
		default:
			conf.Memory = "none"
			warnings = append(warnings, fmt.Sprintf("memory provider %.40q is not known here; the agent has none", s.Memory.V.Provider))
		}
	}
	if s.RuntimeOverrides.Set && !s.RuntimeOverrides.Null {
		conf.RuntimeOverrides = s.RuntimeOverrides.V
	}
	more, err := p.workspace(conf, s.Workspace.V)
	if err != nil {
		return nil, nil, nil, err
	}
	warnings = append(warnings, more...)
	servers := map[string]json.RawMessage{}
	own := map[string]json.RawMessage{}
	if p.o.MCPServers != nil {
		own = p.o.MCPServers()
	}
	for _, name := range s.MCPServers.V {
		if reg, ok := p.servers[name]; ok {
			if strings.Contains(reg.Command, "/") {
				// Where a program lies decides what the agent sees: a script's folder comes with it.
				warnings = append(warnings, fmt.Sprintf("MCP server %.60q names the path %.80q: a control plane names programs alone; skipped. To use it, define a server of another name in mcpServers of this machine's config.json", name, reg.Command))
				continue
			}
			raw, err := json.Marshal(server(reg))
			if err == nil {
				servers[name] = raw
			}
			continue
		}
		if raw, ok := own[name]; ok {
			servers[name] = raw
			continue
		}
		warnings = append(warnings, fmt.Sprintf("MCP server %.60q is known neither here nor to the control plane; skipped", name))
	}
	if len(servers) > 0 {
		if raw, err := json.Marshal(servers); err == nil {
			conf.MCPServers = raw
		}
	}
	for _, w := range []struct {
		field   cp.Optional[json.RawMessage]
		asked   bool
		warning string
	}{
		{s.Skills, len(s.Skills.V) > len("[]"), "skills are not taken up; the agent has those of its workspace and its home"},
		{s.ManagedSkills, len(s.ManagedSkills.V) > len("[]"), "managed skills are not taken up; the agent has those of its workspace and its home"},
		{s.FastMode, string(s.FastMode.V) == "true", "fast mode is not taken up"},
		{s.ApprovalsReviewer, string(s.ApprovalsReviewer.V) == `"auto_review"`, "automatic review of approvals is not taken up"},
	} {
		if w.field.Set && !w.field.Null && w.asked {
			warnings = append(warnings, w.warning)
		}
	}
	secrets = maps.Clone(s.Secrets.V)
	// A secret wins over a variable of its name.
	for name := range secrets {
		delete(conf.Env, name)
	}
	return conf, secrets, slices.Clip(warnings), nil
}

// workspace puts into conf what the agent works on, with the credentials for it.
func (p *Placement) workspace(conf *agent.Agent, w cp.WorkspaceSpec) (warnings []string, err error) {
	repos, bad := repositories(w)
	switch w.Mode {
	case "", "scratch":
	case "github", "gitlab":
		own, wrong := repositories(cp.WorkspaceSpec{Mode: w.Mode, GitRepo: w.GitRepo})
		if len(own) == 0 {
			return nil, fmt.Errorf("the workspace cannot be made: %s", strings.Join(wrong, "; "))
		}
		conf.Checkout = &agent.Checkout{URL: own[0].String(), Branch: w.Branch}
		if w.AgentDir != "" {
			warnings = append(warnings, fmt.Sprintf("agentDir %.80q is not taken up; sessions start at the top of the repository", w.AgentDir))
		}
	default:
		return nil, fmt.Errorf("workspace mode %.20q is not known here", w.Mode)
	}
	if w.Isolation != "" && w.Isolation != "shared" {
		warnings = append(warnings, fmt.Sprintf("workspace isolation %.20q is not taken up; all sessions share one workspace", w.Isolation))
	}
	for _, r := range repos {
		conf.GitCredentials = append(conf.GitCredentials, agent.GitCredential{URL: r.String(), ControlPlane: true})
	}
	if who := p.author; who != nil && len(repos) > 0 {
		if conf.Env == nil {
			conf.Env = map[string]string{}
		}
		for name, value := range map[string]string{"GIT_AUTHOR_NAME": who.Name, "GIT_AUTHOR_EMAIL": who.Email, "GIT_COMMITTER_NAME": who.Name, "GIT_COMMITTER_EMAIL": who.Email} {
			if _, set := conf.Env[name]; !set && value != "" {
				conf.Env[name] = value
			}
		}
	}
	return append(warnings, bad...), nil
}

// server is an entry of the registry as the daemon's own configuration writes one.
func server(s cp.MCPServer) map[string]any {
	out := map[string]any{}
	pairs := func(list []cp.NamedValue) map[string]string {
		m := map[string]string{}
		for _, v := range list {
			m[v.Name] = v.Value
		}
		return m
	}
	if s.Transport == "stdio" || s.Transport == "" {
		out["command"], out["args"], out["env"] = s.Command, s.Args, pairs(s.Env)
		return out
	}
	out["type"], out["url"], out["headers"] = s.Transport, s.URL, pairs(s.Headers)
	return out
}
