// What the shells' completion offers: ids where an id belongs, the words of a flag that has a
// few, and file names only where a file is meant.

package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/runtimes"
)

// flagWords are the flags with a few words.
var flagWords = map[string][]string{
	"network": {"none", "allowlist", "open", "host"}, "read": {"system", "host"}, "nesting": {"on", "off"},
	"credentials": {"host", "private", "secret"}, "agent-memory": {"managed", "native", "none"},
	"supervisor": {"auto", "systemd", "direct"},
}

// complete tells c and all below it what to offer.
func (a *app) complete(c *cobra.Command) {
	for _, sub := range c.Commands() {
		a.complete(sub)
	}
	for name, words := range flagWords {
		if c.LocalFlags().Lookup(name) != nil {
			_ = c.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)) // it is there
		}
	}
	if c.LocalFlags().Lookup("runtime") != nil {
		_ = c.RegisterFlagCompletionFunc("runtime", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return a.runtimeNames(), cobra.ShellCompDirectiveNoFileComp
		})
	}
	words := append(strings.Fields(c.Use), "")
	offer := func() []string { return nil }
	switch {
	case words[1] == "ID" && words[0] != "add":
		offer = a.ids
	case strings.HasPrefix(words[1], "NAME"):
		offer = a.runtimeNames
	case words[1] == "DIR":
		return // a folder
	}
	files := slices.Contains([]string{"exec", "shell", "explain"}, words[0])
	c.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		switch {
		case len(args) == 0:
			return offer(), cobra.ShellCompDirectiveNoFileComp
		case files:
			return nil, cobra.ShellCompDirectiveDefault
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
}

// ids are the agents', with or without a daemon.
func (a *app) ids() []string {
	s, err := a.site()
	if err != nil {
		return nil
	}
	entries, _, err := s.cfg.Agents(s.store)
	if err != nil {
		return nil
	}
	var ids []string
	for _, e := range entries {
		ids = append(ids, e.ID)
	}
	return ids
}

func (a *app) runtimeNames() []string {
	s, err := a.site()
	if err != nil {
		return nil
	}
	var names []string
	for _, r := range runtimes.NewRegistry(s.cfg.Runtimes).All() {
		names = append(names, r.ID)
	}
	return names
}
