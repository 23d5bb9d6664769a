// The MCP servers of an agent: names looked up, programs found, secrets referred to.

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/mcp"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/cmd/internal/secret"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// serverDefs gives the definitions behind an agent's list. A name that nobody defines is
// an error: an agent without the tool that it was given would fail later and elsewhere.
func (b *Builder) serverDefs(a *agent.Agent) ([]mcp.Server, error) {
	refs, err := mcp.Refs(a.MCPServers)
	if err != nil {
		return nil, refusedConfig(a, fmt.Errorf("mcpServers: %w", err))
	}
	var out []mcp.Server
	for _, r := range refs {
		raw := r.Raw
		if raw == nil {
			if raw = b.Config.MCPServers[r.Name]; raw == nil {
				return nil, refusedConfig(a, fmt.Errorf("mcpServers: no server %q is defined; add it to mcpServers of %s, or take it out of agent.json", r.Name, filepath.Join(b.Config.Root, "config.json")))
			}
		}
		s, err := mcp.Parse(r.Name, raw)
		if err != nil {
			return nil, refusedConfig(a, err)
		}
		out = append(out, *s)
	}
	return out, nil
}

// exposeServers puts what servers inside need into the view.
func (b *Builder) exposeServers(a *agent.Agent, p *sandbox.Policy) error {
	defs, err := b.serverDefs(a)
	if err != nil {
		return err
	}
	for _, s := range defs {
		if s.Transport != mcp.Stdio || s.Host {
			continue
		}
		in, err := b.findServer(a, s)
		if err != nil {
			return err
		}
		p.Expose = slices.Concat(p.Expose, in.Expose, s.ReadRoots)
	}
	return nil
}

func (b *Builder) findServer(a *agent.Agent, s mcp.Server) (runtimes.Installation, error) {
	writable, err := b.writable(a)
	if err != nil {
		return runtimes.Installation{}, err
	}
	o := runtimes.Options{Home: b.Config.Home, Root: b.Config.Root, Path: getenv(b.Environ, "PATH"), Writable: writable}
	in, err := runtimes.Find(o, s.Command)
	if err != nil {
		err = notFound(a, fmt.Errorf("MCP server %s: %w", s.Name, err))
	}
	return in, err
}

// servers gives the agent's MCP servers as its supervisor starts or names them.
func (b *Builder) servers(a *agent.Agent, p sandbox.Policy, secrets []secret.Secret, look func() (*outer, error)) ([]wire.MCPServer, error) {
	defs, err := b.serverDefs(a)
	if err != nil {
		return nil, err
	}
	var list []wire.MCPServer
	for _, s := range defs {
		w := wire.MCPServer{Name: s.Name, Transport: s.Transport, URL: s.URL, Host: s.Host}
		for vars, to := range map[*mcp.Vars]*[]wire.Var{&s.Env: &w.Env, &s.Headers: &w.Headers} {
			for _, v := range *vars {
				if v.Secret != "" && !slices.ContainsFunc(secrets, func(x secret.Secret) bool { return x.Name == v.Secret }) {
					return nil, refusedConfig(a, fmt.Errorf("MCP server %s: secret %s is not set; run `agentconnect secret set %s %s --outside`", s.Name, v.Secret, a.ID, v.Secret))
				}
				*to = append(*to, wire.Var(v))
			}
		}
		if s.Transport == mcp.Stdio {
			in, err := b.findServer(a, s)
			if err != nil {
				return nil, err
			}
			w.Argv = in.Argv(s.Args...)
			if s.Host {
				if err := b.hostServer(a, p, s, in, &w, look); err != nil {
					return nil, err
				}
			}
		}
		list = append(list, w)
	}
	return list, nil
}

// hostServer judges a server that runs outside and gives it its boundary, if it has one.
func (b *Builder) hostServer(a *agent.Agent, p sandbox.Policy, s mcp.Server, in runtimes.Installation, w *wire.MCPServer, look func() (*outer, error)) error {
	o, err := look()
	if err == nil {
		err = o.judge(append([]string{in.Program}, w.Argv...))
	}
	if err != nil {
		return refusedConfig(a, fmt.Errorf("MCP server %s: %w", s.Name, err))
	}
	if !s.Sandbox {
		return nil
	}
	own, err := b.serverPolicy(a, p, s, slices.Concat(in.Expose, s.ReadRoots))
	if err != nil {
		return err
	}
	env, _, err := b.env(&agent.Agent{ID: a.ID}, start{install: in}, *own, nil)
	if err != nil {
		return err
	}
	w.Policy, w.BaseEnv = own, env
	if own.Network.Gated() {
		w.Egress = &wire.Egress{
			Policy:  wire.EgressPolicy{Open: own.Network == sandbox.NetworkOpen, Allow: s.Allow, Deny: s.Deny},
			Records: audit.EgressPath(b.Config.Root, a.ID), Proxy: b.Proxy(),
		}
		if _, err := rules.Compile(w.Egress.Policy); err != nil {
			return refusedConfig(a, fmt.Errorf("MCP server %s: network: %w", s.Name, err))
		}
	}
	return nil
}

// serverPolicy is the boundary of a server outside the agent's: a home, a tmp and a folder
// to work in of its own, nothing of the agent's.
func (b *Builder) serverPolicy(a *agent.Agent, p sandbox.Policy, s mcp.Server, expose []string) (*sandbox.Policy, error) {
	own := p
	own.AgentDir = filepath.Join(b.Config.Root, "mcp", a.ID, s.Name)
	own.HomeDir, own.TmpDir, own.MemoryDir = filepath.Join(own.AgentDir, "home"), filepath.Join(own.AgentDir, "tmp"), ""
	own.Workspace = filepath.Join(own.AgentDir, "workspace")
	own.Read, own.Grants, own.Expose, own.Nesting = sandbox.ReadSystem, nil, expose, false
	own.ChannelDir, own.SecretsDir, own.Repository, own.Files = "", "", "", nil
	own.Network = sandbox.NetworkNone
	if s.Network != "" {
		own.Network = sandbox.NetworkMode(s.Network)
	}
	switch own.Network {
	case sandbox.NetworkNone, sandbox.NetworkAllowlist, sandbox.NetworkOpen, sandbox.NetworkHost:
	default:
		return nil, refusedConfig(a, fmt.Errorf("MCP server %s: network %q: write none, allowlist, open or host", s.Name, s.Network))
	}
	if most := b.Config.MaxNetwork(own.Network); most != own.Network {
		return nil, refusedConfig(a, fmt.Errorf("MCP server %s: network %s is more than this machine's policy allows, which is %s", s.Name, own.Network, most))
	}
	for _, dir := range []string{own.HomeDir, own.TmpDir, own.Workspace} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, cannotWrite(dir, err)
		}
	}
	if _, err := sandbox.Compile(own, b.Host); err != nil {
		return nil, refusedConfig(a, fmt.Errorf("MCP server %s: %w", s.Name, err))
	}
	return &own, nil
}
