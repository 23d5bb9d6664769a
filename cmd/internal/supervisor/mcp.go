// MCP servers of the agent. Those inside are started by the runtime. Those marked "host"
// run here, outside the boundary or in one of their own, one for each connection that the
// guest opens, and end with it or with the agent. Their secrets never come inside.

package supervisor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"agentconnect.md/sandbox/cmd/internal/acp"
	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/egress"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

// maxHosted bounds the servers outside that run at one time for one agent.
const maxHosted = 16

// servers are the agent's as a session carries them, with secrets as they are now. One
// whose secret is missing is left out and said.
func (s *Supervisor) servers() []acp.Server {
	type pair struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	var out []acp.Server
	for _, m := range s.spec.MCP {
		var object any
		needs := ""
		vars := m.Env
		if m.Transport != "stdio" {
			vars, needs = m.Headers, m.Transport
		}
		pairs := []pair{}
		if m.Host {
			if !s.spec.Sandboxed {
				pairs = append(pairs, pair{wire.ChannelEnv, s.channelSocket()})
			}
		} else {
			values, err := s.resolve(vars)
			if err != nil {
				s.opts.Log.Error("an MCP server is left out", "server", m.Name, "error", err)
				continue
			}
			if i := slices.IndexFunc(values, func(v string) bool { return !utf8.ValidString(v) || needs != "" && strings.ContainsAny(v, "\r\n") }); i >= 0 {
				// It would arrive as another one, or be said aloud by a runtime that refuses it.
				name, _, _ := strings.Cut(values[i], "=")
				s.opts.Log.Error("an MCP server is left out", "server", m.Name, "error", name+": the value is not UTF-8, or has a line break in a header")
				continue
			}
			for _, v := range values {
				name, value, _ := strings.Cut(v, "=")
				pairs = append(pairs, pair{name, value})
			}
		}
		switch {
		case m.Host:
			object = map[string]any{"name": m.Name, "command": s.guestPath(), "args": []string{"mcp", m.Name}, "env": pairs}
		case needs == "":
			object = map[string]any{"name": m.Name, "command": m.Argv[0], "args": append([]string{}, m.Argv[1:]...), "env": pairs}
		default:
			object = map[string]any{"type": needs, "name": m.Name, "url": m.URL, "headers": pairs}
		}
		text, err := json.Marshal(object)
		if err != nil {
			s.opts.Log.Error("an MCP server is left out", "server", m.Name, "error", err)
			continue
		}
		out = append(out, acp.Server{Name: m.Name, JSON: text, Needs: needs})
	}
	return out
}

// resolve gives "NAME=value" with the secrets' values.
func (s *Supervisor) resolve(vars []wire.Var) ([]string, error) {
	var out []string
	for _, v := range vars {
		value := v.Value
		if v.Secret != "" {
			b, ok := s.secretValue(v.Secret)
			if !ok {
				return nil, fmt.Errorf("secret %s is not set; run `agentconnect secret set %s %s`", v.Secret, s.spec.Agent, v.Secret)
			}
			value = string(b)
		}
		if strings.ContainsRune(value, 0) {
			return nil, fmt.Errorf("%s: the value has a NUL byte", v.Name)
		}
		out = append(out, v.Name+"="+value)
	}
	return out, nil
}

// mcp connects the guest to a server outside.
func (s *Supervisor) mcp(ctx context.Context, conn *net.UnixConn, name string) error {
	i := slices.IndexFunc(s.spec.MCP, func(m wire.MCPServer) bool { return m.Name == name && m.Host })
	if i < 0 {
		return fmt.Errorf("no MCP server %q runs outside for this agent", oneLine(name))
	}
	if err := s.paced.wait(ctx); err != nil {
		return err
	}
	select {
	case s.hosted <- struct{}{}:
		defer func() { <-s.hosted }()
	default:
		return fmt.Errorf("%d MCP servers run outside for this agent already", maxHosted)
	}
	m := s.spec.MCP[i]
	out, err := s.serverGateway(m)
	if err != nil {
		s.opts.Log.Error("an MCP server did not start", "server", m.Name, "error", err)
		return fmt.Errorf("MCP server %s did not start; see the agent's log", m.Name)
	}
	if out != nil {
		defer func() { _ = out.Close() }()
	}
	process, ends, err := s.startServer(ctx, m, out)
	if err != nil {
		s.opts.Log.Error("an MCP server did not start", "server", m.Name, "error", err)
		s.auditMCP(m, "failed", "did not start: "+err.Error())
		return fmt.Errorf("MCP server %s did not start; see the agent's log", m.Name)
	}
	defer process.close()
	s.auditMCP(m, "started", "started outside the agent's boundary")
	err = answerGuest(conn, wire.GuestReply{OK: true})
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err == nil {
		s.bridge(ctx, conn, process, ends, nil)
	}
	ends.close()
	process.stop(ctx, 0, execKillGrace)
	<-process.Done()
	process.sweep()
	s.auditMCP(m, "ended", "ended: "+process.why())
	return err
}

// serverGateway is a server's way out, with rules of its own; nil where it has none. Each
// process has its own: what one was told of names says nothing to another.
func (s *Supervisor) serverGateway(m wire.MCPServer) (*egress.Gateway, error) {
	if m.Egress == nil {
		return nil, nil
	}
	g, err := egress.New(egress.Config{Agent: s.spec.Agent, Server: m.Name, Egress: *m.Egress, Log: s.opts.Log})
	if err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	return g, nil
}

// streams are our ends of a server's stdin and stdout.
type streams struct{ in, out *pipe }

func (e streams) close() { e.in.close(); e.out.close() }

func (s *Supervisor) startServer(ctx context.Context, m wire.MCPServer, out *egress.Gateway) (*program, streams, error) {
	env, err := s.resolve(m.Env)
	if err != nil {
		return nil, streams{}, err
	}
	st := launch.Start{Launcher: s.spec.Launcher, Argv: m.Argv, Dir: "/", DieWithParent: s.spec.Policy.DieWithParent, Private: env}
	if m.Policy == nil {
		st.Env = s.hostEnv()
		s.outside.Store(true)
	} else {
		st.Bwrap, st.BwrapIs, st.Env, st.Dir = s.spec.Bwrap, s.spec.BwrapIs, m.BaseEnv, m.Policy.Workspace
		st.Compile = func() (*sandbox.Plan, error) { return sandbox.Compile(*m.Policy, hostfacts.Host{}) }
		st.Ports = ports(m.Egress)
	}
	return s.startBridged(ctx, "mcp "+m.Name, out, st)
}

// startBridged starts a program whose stdin and stdout are pipes of ours and whose stderr is
// logged as from whom it comes. Its connections, if it may make any, go through out.
func (s *Supervisor) startBridged(ctx context.Context, from string, out *egress.Gateway, st launch.Start) (_ *program, ends streams, err error) {
	if ends.in, err = newPipe(); err != nil {
		return nil, streams{}, err
	}
	if ends.out, err = newPipe(); err != nil {
		ends.in.close()
		return nil, streams{}, err
	}
	stderr, err := newPipe()
	if err != nil {
		ends.close()
		return nil, streams{}, err
	}
	st.Stdin, st.Stdout, st.Stderr = ends.in.r, ends.out.w, stderr.w
	process, err := s.run(ctx, st, Placement{Exec: s.lastExec.n.Add(1)}, out)
	stderr.closeWrite()
	s.wg.Go(func() {
		defer stderr.close()
		forEachLine(stderr.r, func(line string) { s.opts.Log.Info(line, "from", from) })
	})
	if err != nil {
		ends.close()
		return nil, streams{}, err
	}
	ends.in.closeRead()
	ends.out.closeWrite()
	return process, ends, nil
}

// bridge copies both ways until the server has ended or the guest is gone. Pipes and not
// the guest's own socket: nothing from inside is ever a descriptor of a program outside.
// ended, if any, runs after the server's end and before the guest hears of it.
func (s *Supervisor) bridge(ctx context.Context, conn *net.UnixConn, process *program, ends streams, ended func()) {
	said := make(chan struct{}) // the server's output is over, or nobody reads it
	asked := make(chan struct{})
	go func() {
		defer close(said)
		_, _ = io.Copy(conn, ends.out.r)
	}()
	go func() {
		defer close(asked)
		_, _ = io.Copy(ends.in.w, conn)
		ends.in.closeWrite() // its stdin ends, as MCP asks for
	}()
	select {
	case <-said:
	case <-process.Done():
	case <-asked:
		grace := time.NewTimer(time.Duration(s.spec.StopGrace))
		defer grace.Stop()
		select {
		case <-said:
		case <-process.Done():
		case <-grace.C:
		case <-ctx.Done():
		}
	case <-ctx.Done():
	}
	process.stop(ctx, 0, execKillGrace)
	<-process.Done()
	// What it said last still lies in the pipe; something that left it may hold the other end.
	last := time.NewTimer(lastFrames)
	defer last.Stop()
	select {
	case <-said:
	case <-last.C:
	}
	if ended != nil {
		ended()
	}
	conn.Close()
	ends.close()
	<-said
	<-asked
}

func (s *Supervisor) auditMCP(m wire.MCPServer, event, text string) {
	where := "outside"
	if m.Policy != nil {
		where = "sandboxed"
	}
	s.audit.Asked(audit.Record{Kind: audit.KindMCP, Event: event, Text: oneLine("MCP server " + m.Name + " " + text), Detail: map[string]string{"server": m.Name, "where": where}})
}

// guestPath is where the runtime finds the guest.
func (s *Supervisor) guestPath() string {
	if s.spec.Sandboxed {
		return sandbox.GuestPath
	}
	return s.spec.Policy.Guest
}
