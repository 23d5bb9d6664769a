// audit: what happened to an agent's boundary, with or without a daemon.

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/audit/follow"
)

func (a *app) auditCommand() *cobra.Command {
	var goOn bool
	c := &cobra.Command{
		Use: "audit ID", Short: "what happened to an agent's boundary: denials, git findings, policy changes", Args: a.idArgs(1, 1),
		Long: "Prints the audit log of an agent, oldest first. With --json each line is the record as it was written.",
		RunE: func(c *cobra.Command, args []string) error {
			s, err := a.site()
			if err != nil {
				return err
			}
			path := audit.Path(s.cfg.Root, args[0])
			// The log of an agent that was removed is still there to read.
			if _, err := s.agent(args[0]); errors.Is(err, agent.ErrNotFound) {
				if _, serr := os.Stat(path); serr != nil {
					return err
				}
			}
			if !goOn {
				return audit.Read(path, a.auditLine)
			}
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				return err
			}
			log, err := follow.Open(path)
			if err != nil {
				return err
			}
			defer log.Close()
			if err := log.Past(a.auditLine); err != nil {
				return err
			}
			if err := log.Next(c.Context(), a.auditLine); err != nil && c.Context().Err() == nil {
				return err
			}
			return nil
		},
	}
	c.Flags().BoolVarP(&goOn, "follow", "f", false, "go on with what comes")
	return c
}

// auditLine prints one record.
func (a *app) auditLine(line []byte) error {
	if a.json {
		return a.printLine(json.RawMessage(line))
	}
	var r audit.Record
	if json.Unmarshal(line, &r) != nil {
		return nil //nolint:nilerr // written by another version
	}
	what := r.Text
	if r.Path != "" {
		what = r.Path + ": " + what
	}
	_, err := fmt.Fprintf(a.out, "%s  %-8s %-16s %s\n", r.Time.Local().Format(time.DateTime), oneLine(r.Kind), oneLine(r.Event), oneLine(what))
	return err
}

// recordPolicy writes down that a person changed what an agent may do.
func (s *site) recordPolicy(id, event, text string) {
	log, err := audit.New(s.cfg.Root, id, func(err error) { s.a.warn("the audit log was not written: %v", err) })
	if err != nil {
		s.a.warn("%v", err)
		return
	}
	defer func() { _ = log.Close() }()
	log.Add(audit.Record{Kind: audit.KindPolicy, Event: event, Text: text})
}

// changedFlags are the command's own flags that were given, values of the environment left out.
func changedFlags(c *cobra.Command) []string {
	var out []string
	c.Flags().Visit(func(f *pflag.Flag) {
		if c.InheritedFlags().Lookup(f.Name) != nil {
			return // of every command
		}
		value := strings.Trim(f.Value.String(), "[]")
		if f.Name == "env" || f.Name == "arg" {
			value = redacted
		}
		out = append(out, "--"+f.Name+"="+value)
	})
	return out
}
