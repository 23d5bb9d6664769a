// The secrets of an agent. A value comes on stdin, never as an argument.

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/secret"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

func (a *app) secretCommand() *cobra.Command {
	c := &cobra.Command{Use: "secret", Short: "set, list and remove an agent's secrets", RunE: a.group, Args: cobra.ArbitraryArgs}
	c.AddCommand(a.secretSet(), a.secretList(), a.secretRemove())
	return c
}

func (s *site) secrets() *secret.Store {
	return secret.NewStore(s.cfg.Root, secret.Systemd{Program: secret.SystemdCreds})
}

func (a *app) secretSet() *cobra.Command {
	var place secret.Place
	var outside bool
	c := &cobra.Command{
		Use:   "set ID NAME < VALUE",
		Short: "set a secret, or its new value; where it goes stays as it was unless a flag says otherwise",
		Long: `Set a secret of an agent. The value is read from stdin; of a single line the newline is dropped.

A new secret is a file inside, ` + sandbox.SecretsPath + `/NAME. A running agent sees its new value at
once. A secret in the environment (--env) is that of the runtime alone, and changes at its next start.
With --outside nothing inside gets it: it serves gitCredentials and MCP servers outside the sandbox.

  agentconnect secret set alice GITHUB --outside < token
  agentconnect secret set alice KEY --env ANTHROPIC_API_KEY < key
  agentconnect secret set alice kube --path-env KUBECONFIG < ~/.kube/config
  agentconnect secret set alice docker --path-env DOCKER_CONFIG < ~/.docker/config.json`,
		Args: a.idArgs(2, 2),
		RunE: func(c *cobra.Command, args []string) error {
			given := c.Flags().Changed
			if outside && (given("env") || given("path-env") || given("file")) {
				return &usageError{text: "--outside and a place inside contradict each other: give one", see: c.CommandPath()}
			}
			s, err := a.site()
			if err != nil {
				return err
			}
			id, name := args[0], args[1]
			if err := s.keepsSecrets(id); err != nil {
				return err
			}
			if err := secret.CheckName(name); err != nil {
				return &usageError{text: err.Error(), see: c.CommandPath()}
			}
			have, err := s.secrets().List(id)
			if err != nil {
				return err
			}
			place.File = place.File || len(place.PathEnv) > 0
			if !outside && place.Outside() {
				place.File = true
				for _, old := range have {
					if old.Name == name {
						place = old.Place
					}
				}
			}
			if err := place.Check(name); err != nil {
				return &usageError{text: err.Error(), see: c.CommandPath()}
			}
			value, err := a.readSecret(name)
			if err != nil {
				return err
			}
			info, why, err := s.secrets().Set(c.Context(), id, name, place, value)
			if err != nil {
				return err
			}
			s.auditSecret(id, name, "set", placeText(info))
			running, err := s.pushSecret(c.Context(), id, daemon.WireSecret(secret.Secret{Info: info, Value: value}))
			if err != nil {
				a.warn("the running agent did not take it over: %v; restart it with `agentconnect agent restart %s`", err, id)
			}
			text := fmt.Sprintf("secret %s of agent %s is set: %s; %s", name, id, placeText(info), sealText(info, why))
			if running && (len(info.Env) > 0 || len(info.PathEnv) > 0) {
				text += fmt.Sprintf("; its environment changes with `agentconnect agent restart %s`", id)
			}
			return a.say(info, "%s", text)
		},
	}
	f := c.Flags()
	f.StringArrayVar(&place.Env, "env", nil, "`VARIABLE` of the runtime that holds the value (repeat)")
	f.StringArrayVar(&place.PathEnv, "path-env", nil, "`VARIABLE` that holds the path of the file, such as KUBECONFIG or DOCKER_CONFIG (repeat)")
	f.BoolVar(&place.File, "file", false, "show it as a file inside (the default of a new secret)")
	f.BoolVar(&outside, "outside", false, "keep it outside: for repository credentials and MCP servers there")
	return c
}

// keepsSecrets refuses an agent that has none of the operator's: those of an agent that a
// control plane placed come with it, and whoever names it there must not choose what it gets.
func (s *site) keepsSecrets(id string) error {
	_, err := s.cfg.Agent(s.store, id)
	if errors.Is(err, agent.ErrNotFound) && s.isPlaced(id) {
		return &daemon.Refusal{Code: 78, Text: fmt.Sprintf("agent %s was placed here by the control plane, and its secrets come from there: set them there", id)}
	}
	return err
}

// readSecret reads the value; from a terminal it is not shown.
func (a *app) readSecret(name string) ([]byte, error) {
	if f, ok := a.in.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		fmt.Fprintf(a.err, "value of %s: ", name)
		value, err := term.ReadPassword(int(f.Fd()))
		fmt.Fprintln(a.err)
		return value, err
	}
	value, err := io.ReadAll(io.LimitReader(a.in, secret.MaxValue+2))
	if err != nil {
		return nil, fmt.Errorf("secret %s: stdin: %w", name, err)
	}
	// echo and most stores end a token with a newline; a file of several lines keeps its own.
	if line, ok := bytes.CutSuffix(value, []byte("\n")); ok && !bytes.Contains(line, []byte("\n")) {
		value = bytes.TrimSuffix(line, []byte("\r"))
	}
	return value, nil
}

// pushSecret gives a running agent what changed.
func (s *site) pushSecret(ctx context.Context, id string, sec wire.Secret) (running bool, err error) {
	st, err := s.client().Agent(ctx, id)
	alone := errors.Is(err, control.ErrNotRunning) // an agent outlives its daemon
	if err != nil && !alone {
		return false, err
	}
	var socket string
	switch {
	case alone:
		socket = daemon.AgentSocket(s.runDir(), id)
	case st.State == control.StateRunning:
		socket = st.Socket
	}
	if socket == "" {
		return false, nil
	}
	conn, files, err := ask(ctx, socket, wire.Request{Op: wire.OpSecret, Secret: &sec})
	if alone && (errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)) {
		return false, nil
	}
	if err != nil {
		return true, err
	}
	closeAll(files)
	return true, conn.Close()
}

// auditSecret records what a person did with a secret.
func (s *site) auditSecret(id, name, event, text string) {
	failed := func(err error) { s.a.warn("the audit log cannot be written: %v", err) }
	log, err := audit.New(s.cfg.Root, id, failed)
	if err != nil {
		failed(err)
		return
	}
	defer func() { _ = log.Close() }()
	log.Add(audit.Record{Kind: audit.KindSecret, Event: event, Text: strings.TrimSuffix(fmt.Sprintf("secret %s %s: %s", name, event, text), ": "), Detail: map[string]string{"name": name}})
}

// placeText says where a secret goes.
func placeText(i secret.Info) string {
	if i.Outside() {
		return "outside the sandbox alone"
	}
	var parts []string
	if i.File {
		file, _ := i.FileName(i.Name)
		parts = append(parts, sandbox.SecretsPath+"/"+file)
	}
	for _, v := range i.PathEnv {
		parts = append(parts, v+" holds its path")
	}
	for _, v := range i.Env {
		parts = append(parts, v+" of the runtime")
	}
	return strings.Join(parts, ", ")
}

func sealText(i secret.Info, why string) string {
	switch {
	case i.Sealed != "":
		return "encrypted on disk by " + i.Sealed
	case why != "":
		return "readable by your user alone, not encrypted: " + why
	}
	return "readable by your user alone, not encrypted"
}

func (a *app) secretList() *cobra.Command {
	return &cobra.Command{
		Use: "list ID", Short: "list an agent's secrets, without their values", Args: a.idArgs(1, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			s, err := a.site()
			if err != nil {
				return err
			}
			if err := s.keepsSecrets(args[0]); err != nil {
				return err
			}
			list, err := s.secrets().List(args[0])
			if err != nil {
				return err
			}
			if a.json {
				if list == nil {
					list = []secret.Info{}
				}
				return a.printJSON(list)
			}
			t := newTable(a.out, "NAME", "WHERE", "ON DISK", "SET")
			for _, i := range list {
				onDisk := "not encrypted"
				if i.Sealed != "" {
					onDisk = i.Sealed
				}
				t.row(i.Name, placeText(i), onDisk, i.At.Local().Format("2006-01-02 15:04"))
			}
			return t.end()
		},
	}
}

func (a *app) secretRemove() *cobra.Command {
	return &cobra.Command{
		Use: "rm ID NAME", Short: "remove a secret; its file inside goes at once", Args: a.idArgs(2, 2),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := a.site()
			if err != nil {
				return err
			}
			id, name := args[0], args[1]
			// Of an agent that is gone, too: rm without --purge leaves them.
			if err := agent.ValidateID(id); err != nil {
				return err
			}
			if err := s.secrets().Remove(id, name); err != nil {
				return err
			}
			s.auditSecret(id, name, "removed", "")
			running, err := s.pushSecret(c.Context(), id, wire.Secret{Name: name})
			if err != nil && code(err) != 66 {
				a.warn("the running agent still has it: %v; restart it with `agentconnect agent restart %s`", err, id)
			}
			text := fmt.Sprintf("secret %s of agent %s is removed", name, id)
			if running {
				text += "; what the runtime read or has in its environment stays until its restart"
			}
			return a.say(map[string]string{"removed": name}, "%s", text)
		},
	}
}
