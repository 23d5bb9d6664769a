// man: the pages of section 1, made of the commands themselves, so that no flag is missing.

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"agentconnect.md/sandbox/cmd/internal/version"
)

func (a *app) manCommand() *cobra.Command {
	return &cobra.Command{
		Use: "man DIR", Short: "write the manual pages of the commands into DIR", Hidden: true, Args: a.args(1, 1),
		RunE: func(c *cobra.Command, args []string) error {
			// Two builds of one source give the same pages.
			at := time.Now()
			if s, err := strconv.ParseInt(a.getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil {
				at = time.Unix(s, 0)
			}
			c.Root().InitDefaultHelpCmd()
			for _, page := range pages(c.Root()) {
				path := filepath.Join(args[0], pageName(page)+".1")
				if err := os.WriteFile(path, []byte(manPage(page, at.UTC().Format(time.DateOnly))), 0o644); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// pages lists the commands that have a page: all that help shows.
func pages(c *cobra.Command) []*cobra.Command {
	list := []*cobra.Command{c}
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() && sub.Name() != "help" {
			list = append(list, pages(sub)...)
		}
	}
	return list
}

func pageName(c *cobra.Command) string { return strings.ReplaceAll(c.CommandPath(), " ", "-") }

// manPage is the page of one command, in man(7).
func manPage(c *cobra.Command, date string) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %s 1 %s %s %s\n", quoted(strings.ToUpper(pageName(c))), quoted(date), quoted("agentconnect-sandbox "+version.Version), quoted("AgentConnect"))
	fmt.Fprintf(&b, ".SH NAME\n%s \\- %s\n", roff(pageName(c)), roff(c.Short))
	fmt.Fprintf(&b, ".SH SYNOPSIS\n.B %s\n", roff(c.CommandPath()))
	words := strings.TrimSpace(strings.TrimPrefix(c.UseLine(), c.CommandPath()))
	if c.HasAvailableSubCommands() {
		words = "COMMAND [flags]"
	}
	b.WriteString(roff(words) + "\n")
	long := c.Long
	if long == "" {
		long = c.Short
		long = strings.ToUpper(long[:1]) + long[1:] + "."
	}
	b.WriteString(".SH DESCRIPTION\n" + paragraphs(long))
	if c.HasAvailableSubCommands() {
		b.WriteString(".SH COMMANDS\n")
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() && sub.Name() != "help" {
				fmt.Fprintf(&b, ".TP\n.BR %s (1)\n%s\n", roff(pageName(sub)), roff(sub.Short))
			}
		}
	}
	options(&b, "OPTIONS", c.NonInheritedFlags())
	options(&b, "OPTIONS OF EVERY COMMAND", c.InheritedFlags())
	if c.Example != "" {
		b.WriteString(".SH EXAMPLES\n.nf\n" + roff(c.Example) + "\n.fi\n")
	}
	if !c.HasParent() {
		b.WriteString(manFiles)
	}
	b.WriteString(".SH SEE ALSO\n")
	if c.HasParent() {
		fmt.Fprintf(&b, ".BR %s (1),\n", roff(pageName(c.Parent())))
	}
	b.WriteString(".BR agentconnect.json (5),\n.BR agentconnect\\-units (7),\n.BR agentconnect\\-sandbox (7)\n")
	return b.String()
}

const manFiles = `.SH ENVIRONMENT
.TP
.B AGENTCONNECT_ROOT
AgentConnect's directory, in place of ~/.agentconnect.
.TP
.B AGENTCONNECT_REQUIRE_SANDBOX
Turns required mode on; nothing turns it off again. It counts in the daemon's environment, which a shell that runs
.B agentconnect up
does not reach: up says so then and ends with 78.
.TP
.B AGENTCONNECT_*
Every key of the configuration but runtimes, mcpServers and policy: its name in capitals, with an underscore for each dot.
AGENTCONNECT_LIMITS_MAXAGENTS is limits.maxAgents. A list is written with colons, as PATH is.
.TP
.B NO_COLOR
No colour, also on a terminal; so it is with TERM=dumb, or without TERM.
.SH FILES
.TP
.I ~/.agentconnect/config.json
The configuration; see
.BR agentconnect.json (5).
.TP
.I ~/.agentconnect/agents/ID/
An agent: its policy (agent.json), workspace, private home, memory and tmp.
.TP
.I /etc/agentconnect/config.json
The machine's configuration; its policy can only tighten.
.TP
.I /etc/agentconnect/agents.d/*.json
Agents for every user of the machine.
.TP
.I /usr/lib/systemd/user/agentconnect.service
The daemon's unit; see
.BR agentconnect\-units (7).
.TP
.I /usr/share/doc/agentconnect\-sandbox/
More to read, and examples.
`

func options(b *strings.Builder, title string, flags *pflag.FlagSet) {
	if !flags.HasAvailableFlags() {
		return
	}
	fmt.Fprintf(b, ".SH %s\n", quoted(title))
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		value, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		fmt.Fprintf(b, ".TP\n.B %s\n", roff(strings.TrimSpace(name+" "+value)))
		switch f.DefValue {
		case "", "0", "false", "[]":
		default:
			if !strings.Contains(usage, "default") {
				usage += " (default " + f.DefValue + ")"
			}
		}
		b.WriteString(roff(usage) + "\n")
	})
}

// paragraphs are text's, empty lines between them.
func paragraphs(text string) string {
	var b strings.Builder
	for i, p := range strings.Split(strings.TrimSpace(text), "\n\n") {
		if i > 0 {
			b.WriteString(".PP\n")
		}
		b.WriteString(roff(p) + "\n")
	}
	return b.String()
}

// roff is text with nothing in it that troff takes for its own.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "~", `\(ti`, "^", `\(ha`, "`", `\(ga`, "…", "...", "–", `\(en`).Replace(text)
	lines := strings.Split(text, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, ".") || strings.HasPrefix(l, "'") {
			lines[i] = `\&` + l
		}
	}
	return strings.Join(lines, "\n")
}

func quoted(text string) string { return `"` + strings.ReplaceAll(roff(text), `"`, `\(dq`) + `"` }
