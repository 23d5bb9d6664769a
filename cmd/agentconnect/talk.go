// acp and prompt: ACP with an agent.

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/acp"
	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/cmd/internal/version"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

func (a *app) acpCommand() *cobra.Command {
	var runtime string
	c := &cobra.Command{
		Use: "acp ID | acp --runtime NAME", Short: "speak ACP with an agent on stdin and stdout, for editors",
		Long: "The second form makes or finds an agent for the project folder it is started in, which must lie below one of \"projects\" in config.json.",
		Args: func(c *cobra.Command, args []string) error {
			if c.Flags().Changed("runtime") {
				return a.args(0, 0)(c, args)
			}
			return a.idArgs(1, 1)(c, args)
		},
		RunE: func(c *cobra.Command, args []string) error {
			s, err := a.site()
			if err != nil {
				return err
			}
			var id string
			if len(args) == 1 {
				id = args[0]
				if err := s.known(id); err != nil {
					return err
				}
			} else if id, err = s.projectAgent(c.Context(), runtime); err != nil {
				return err
			}
			// The editor shows what dial answers. When nothing else ever came, it is
			// also how the command ends.
			var failed error
			err = acp.Bridge(c.Context(), a.in, a.out, func(ctx context.Context) (io.ReadWriteCloser, error) {
				conn, err := s.attach(ctx, id, "acp")
				failed = err
				return conn, err
			})
			if err == nil {
				err = failed
			}
			return err
		},
	}
	c.Flags().StringVar(&runtime, "runtime", "", "runtime of the agent for this project folder")
	return c
}

// attach connects to an agent as an ACP client, starting it if needed.
func (s *site) attach(ctx context.Context, id, client string) (io.ReadWriteCloser, error) {
	where := func(ctx context.Context) (*control.Attach, error) { return s.client().Attach(ctx, id) }
	c, extra, err := reach(ctx, where, wire.Request{Op: wire.OpAttach, Client: client})
	closeAll(extra)
	if err != nil {
		return nil, err // as an interface: a nil *UnixConn would not be nil
	}
	return c, nil
}

// projectAgent finds the agent of runtime whose workspace is the working directory, or
// adds one. The directory counts only below a root that the operator named: the editor
// that starts us may stand in any folder that somebody sent.
func (s *site) projectAgent(ctx context.Context, runtime string) (string, error) {
	if _, err := runtimes.NewRegistry(s.cfg.Runtimes).Get(runtime); err != nil {
		return "", &daemon.Refusal{Code: 78, Text: err.Error()}
	}
	cwd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	host := hostfacts.Host{}
	dir, _, err := host.Resolve(cwd)
	if err != nil {
		return "", err
	}
	if len(s.cfg.Projects) == 0 {
		return "", &daemon.Refusal{Code: 78, Text: `no project folders are allowed; name their roots in config.json: "projects": ["~/src"]`}
	}
	allowed := false
	for _, p := range s.cfg.Projects {
		root, _, err := host.Resolve(p)
		if err != nil {
			continue
		}
		rel, err := filepath.Rel(root, dir)
		allowed = allowed || err == nil && rel != "." && filepath.IsLocal(rel)
	}
	if !allowed {
		return "", &daemon.Refusal{Code: 78, Text: fmt.Sprintf("%s does not lie below a folder of \"projects\" in config.json (%s); start there, or add its parent", dir, strings.Join(s.cfg.Projects, ", "))}
	}
	entries, _, err := s.cfg.Agents(s.store)
	if err != nil {
		return "", err
	}
	taken := map[string]bool{}
	for _, e := range entries {
		taken[e.ID] = true
		if e.Agent == nil || e.Agent.Runtime != runtime {
			continue
		}
		if ws, _, err := host.Resolve(s.store.WorkspacePath(e.Agent)); err == nil && ws == dir {
			return e.ID, nil
		}
	}
	for n := 1; ; n++ {
		id := projectID(filepath.Base(dir), runtime, n)
		if taken[id] {
			continue
		}
		on := true
		err := s.add(ctx, &agent.Agent{ID: id, Runtime: runtime, Workspace: dir, RunInSandbox: &on})
		if errors.Is(err, agent.ErrExists) {
			continue // another editor was faster
		}
		return id, err
	}
}

var notID = regexp.MustCompile(`[^a-z0-9_]+`)

// projectID is an id made of a folder's name and a runtime's, the n-th of that kind.
func projectID(folder, runtime string, n int) string {
	const longest = 63
	slug := func(s string) string { return strings.Trim(notID.ReplaceAllString(strings.ToLower(s), "-"), "-_") }
	tail := slug(runtime)
	if n > 1 {
		tail += "-" + strconv.Itoa(n)
	}
	head := slug(folder)
	if head == "" {
		head = "project"
	}
	if room := longest - len(tail) - 1; len(head) > room {
		head = strings.Trim(head[:max(room, 1)], "-_")
	}
	return head + "-" + tail
}

func (a *app) promptCommand() *cobra.Command {
	var allow, deny bool
	c := &cobra.Command{
		Use: "prompt ID TEXT", Short: "one turn with an agent: the answer on stdout, the tools on stderr",
		Long: "TEXT \"-\" is read from stdin. With --json each update is a line of JSON, and the last line is the result.",
		Args: a.idArgs(2, 2),
		RunE: func(c *cobra.Command, args []string) error {
			if allow && deny {
				return &usageError{text: "--allow-all and --deny-all contradict each other: give one", see: c.CommandPath()}
			}
			text := args[1]
			if text == "-" {
				raw, err := io.ReadAll(io.LimitReader(a.in, acp.MaxFrame+1))
				if err != nil {
					return fmt.Errorf("stdin: %w", err)
				}
				if len(raw) > acp.MaxFrame/2 {
					return &usageError{text: fmt.Sprintf("the text on stdin is longer than %d bytes", acp.MaxFrame/2)}
				}
				text = string(raw)
			}
			return a.prompt(c.Context(), args[0], text, permission(a, allow, deny))
		},
	}
	c.Flags().BoolVar(&allow, "allow-all", false, "allow whatever the agent asks permission for")
	c.Flags().BoolVar(&deny, "deny-all", false, "deny whatever the agent asks permission for")
	return c
}

func (a *app) prompt(ctx context.Context, id, text string, ask acp.PermissionFunc) error {
	s, err := a.site()
	if err != nil {
		return err
	}
	e, err := s.agent(id)
	if err != nil {
		return err
	}
	conn, err := s.attach(ctx, id, "prompt")
	if err != nil {
		return err
	}
	cwd, _, err := hostfacts.Host{}.Resolve(s.store.WorkspacePath(e.Agent))
	if err != nil {
		conn.Close()
		return err
	}
	out := &lastByte{w: a.out}
	o := acp.PromptOptions{Cwd: cwd, Text: text, Out: out, Notes: a.err, Terminal: terminal(a.out),
		Permission: ask, Client: "agentconnect", Version: version.Version}
	if a.json {
		o.OnUpdate = func(params json.RawMessage) error { return a.printLine(params) }
	}
	r, err := acp.Prompt(ctx, conn, o)
	if out.last != 0 && out.last != '\n' {
		fmt.Fprintln(a.out)
	}
	var answer *acp.RPCError
	if errors.As(err, &answer) && answer.Code == acp.CodeAuthRequired {
		if hint := s.builder().LoginHint(e.Agent); hint != "" {
			return fmt.Errorf("%w; %s", err, hint)
		}
		return fmt.Errorf("%w; log in inside: `agentconnect agent shell %s`", err, id)
	}
	if err != nil {
		return err
	}
	if a.json {
		err = a.printLine(r)
	}
	if err == nil && r.StopReason != "end_turn" {
		err = fmt.Errorf("the turn ended early: %s", oneLine(r.StopReason))
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}
	return err
}

// lastByte remembers how the answer ended, to end its last line.
type lastByte struct {
	w    io.Writer
	last byte
}

func (l *lastByte) Write(p []byte) (int, error) {
	if len(p) > 0 {
		l.last = p[len(p)-1]
	}
	return l.w.Write(p)
}

// permission answers permission requests by flag, or asks on the terminal, or denies.
func permission(a *app, allow, deny bool) acp.PermissionFunc {
	return func(ctx context.Context, title string, options []acp.PermissionOption) string {
		switch {
		case allow:
			return choose(options, "allow_once", "allow_always")
		case deny:
			return choose(options, "reject_once", "reject_always")
		}
		tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
		if err != nil || !terminal(tty) {
			if err == nil {
				tty.Close()
			}
			a.warn("denied, since there is no terminal to ask on: %s (--allow-all or --deny-all decides beforehand)", title)
			return choose(options, "reject_once", "reject_always")
		}
		defer tty.Close()
		return askOn(ctx, tty, title, options)
	}
}

func choose(options []acp.PermissionOption, kinds ...string) string {
	for _, k := range kinds {
		for _, o := range options {
			if o.Kind == k {
				return o.ID
			}
		}
	}
	return ""
}

// askOn asks a person on a terminal until one of the numbers comes.
func askOn(ctx context.Context, tty io.ReadWriter, title string, options []acp.PermissionOption) string {
	fmt.Fprintf(tty, "\nThe agent asks: %s\n", oneLine(title))
	for i, o := range options {
		fmt.Fprintf(tty, "  %d  %s\n", i+1, oneLine(o.Name))
	}
	answers := make(chan string)
	// A read of a terminal cannot be taken back; the goroutine ends with the next line
	// typed, or with the process.
	go func() {
		defer close(answers)
		in := bufio.NewScanner(tty)
		for in.Scan() {
			select {
			case answers <- strings.TrimSpace(in.Text()):
			case <-ctx.Done():
				return
			}
		}
	}()
	for {
		fmt.Fprintf(tty, "1-%d? ", len(options))
		select {
		case <-ctx.Done():
			return ""
		case line, ok := <-answers:
			if !ok {
				return ""
			}
			if n, err := strconv.Atoi(line); err == nil && n >= 1 && n <= len(options) {
				return options[n-1].ID
			}
		}
	}
}
