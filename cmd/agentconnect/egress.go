// egress: what an agent reached and did not, and the operator's word about it.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/audit/follow"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/egress"
	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/egress/suggest"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

func (a *app) egressCommand() *cobra.Command {
	var followed, suggested bool
	var lines int
	c := &cobra.Command{
		Use: "egress ID", Short: "print what the agent reached, and what it was refused", Args: a.idArgs(1, 1),
		Long: "Prints the end of the agent's record of connections, and what waits for your word. With --json each record is a line.\n" +
			"VERDICT is allowed, denied, failed (the other side was not reached), cut, open (it goes on) or asking (it waits: `agentconnect egress allow ID HOST`).",
		RunE: func(c *cobra.Command, args []string) error {
			if lines < 0 {
				return &usageError{text: "--lines must not be negative", see: c.CommandPath()}
			}
			s, err := a.site()
			if err != nil {
				return err
			}
			path := audit.EgressPath(s.cfg.Root, args[0])
			if _, err := s.agent(args[0]); errors.Is(err, agent.ErrNotFound) {
				if _, serr := os.Stat(path); serr != nil {
					return err
				}
			}
			if suggested {
				return a.suggestRules(path, args[0])
			}
			return a.egress(c.Context(), s, args[0], path, lines, followed)
		},
	}
	c.Flags().BoolVarP(&followed, "follow", "f", false, "go on with what comes")
	c.Flags().BoolVar(&suggested, "suggest", false, "print the fewest rules that cover what was used")
	c.Flags().IntVarP(&lines, "lines", "n", 100, "how many records from the end")
	c.AddCommand(a.egressWord(true), a.egressWord(false))
	return c
}

func (a *app) egress(ctx context.Context, s *site, id, path string, lines int, followed bool) error {
	past := func(f func([]byte) error) error { return audit.Read(path, f) }
	var log *follow.Log
	if followed {
		if _, err := os.Stat(filepath.Dir(path)); err != nil {
			return fmt.Errorf("%w; no daemon has run here yet: %s", err, control.HowToStart)
		}
		var err error
		if log, err = follow.Open(path); err != nil {
			return err
		}
		defer log.Close()
		past = log.Past
	}
	var last [][]byte
	none := true
	if err := past(func(line []byte) error {
		none = false
		last = append(last, slices.Clone(line))
		if len(last) > 2*lines+100 { // only the end is of interest
			last = slices.Delete(last, 0, len(last)-lines)
		}
		return nil
	}); err != nil {
		return err
	}
	last = last[max(0, len(last)-lines):]
	for _, line := range last {
		if err := a.egressLine(line); err != nil {
			return err
		}
	}
	if !a.json {
		var asks []string
		if st, err := s.client().Agent(ctx, id); err == nil {
			asks = asksLines(st)
		}
		if none && len(asks) == 0 && !followed {
			asks = []string{"agent " + id + ": nothing is on record: it has reached nothing and was refused nothing"}
		}
		for _, l := range asks {
			if _, err := fmt.Fprintln(a.out, oneLine(l)); err != nil {
				return err
			}
		}
	}
	if !followed {
		return nil
	}
	return log.Next(ctx, a.egressLine)
}

// egressLine prints one record.
func (a *app) egressLine(line []byte) error {
	var r egress.Record
	if err := json.Unmarshal(line, &r); err != nil {
		return nil //nolint:nilerr // of a later version, or not ours
	}
	if a.json {
		return a.printLine(r)
	}
	_, err := fmt.Fprintln(a.out, oneLine(egressText(r)))
	return err
}

// egressText says a record in one line.
func egressText(r egress.Record) string {
	what := r.Name
	if what == "" {
		what = r.Address
	}
	if r.Port != 0 {
		what = net.JoinHostPort(what, strconv.Itoa(int(r.Port)))
	}
	parts := []string{r.Time.Local().Format("2006-01-02 15:04:05"), fmt.Sprintf("%-7s", r.Verdict), what}
	if r.Name != "" && r.Address != "" {
		parts = append(parts, "at "+r.Address)
	}
	if r.Dialled != "" {
		parts = append(parts, "("+r.Dialled+")")
	}
	if r.Seen != "" {
		parts = append(parts, "asked for "+r.Seen)
	}
	if r.Rule != "" {
		parts = append(parts, "by the rule "+r.Rule)
	}
	if r.Sent+r.Received > 0 {
		parts = append(parts, fmt.Sprintf("%d bytes out, %d in", r.Sent, r.Received))
	}
	if r.Reason != "" {
		parts = append(parts, "- "+r.Reason)
	}
	if r.Kind == "dns" {
		parts[2] = "name " + parts[2]
	}
	if r.Server != "" {
		parts[2] = "(MCP server " + r.Server + ") " + parts[2]
	}
	return strings.Join(parts, " ")
}

// asksLines say what waits for the operator's word.
func asksLines(st *control.AgentStatus) []string {
	if st.Egress == nil {
		return nil
	}
	var out []string
	for _, p := range st.Egress.Pending {
		host := p.Host
		if p.Port != 0 {
			host = net.JoinHostPort(host, strconv.Itoa(int(p.Port)))
		}
		out = append(out, fmt.Sprintf("it wants to reach %s and waits until %s: `agentconnect egress allow %s %s`, or deny", host, p.Until.Local().Format("15:04:05"), st.ID, host))
	}
	return out
}

// suggestRules prints the fewest rules that cover what the record says was let out.
func (a *app) suggestRules(path, id string) error {
	var used []suggest.Use
	if err := audit.Read(path, func(line []byte) error {
		var r egress.Record
		if err := json.Unmarshal(line, &r); err != nil || r.Kind != "tcp" || r.Port == 0 || r.Server != "" ||
			!slices.Contains([]string{egress.Allowed, egress.Open, egress.Failed, egress.Cut}, r.Verdict) {
			return nil //nolint:nilerr // not of interest
		}
		u := suggest.Use{Name: r.Name, Port: r.Port}
		if u.Name == "" {
			// What it called itself, where nothing else is known of it: a rule for a name lasts
			// longer than one for an address.
			u.Name = r.Seen
		}
		if name, ok := rules.ASCIIName(u.Name); ok {
			u.Name = name
		} else {
			u.Name = ""
		}
		addr, err := netip.ParseAddr(r.Address)
		if err != nil && u.Name == "" {
			return nil
		}
		u.Addr = addr
		used = append(used, u)
		return nil
	}); err != nil {
		return err
	}
	list := suggest.Rules(used)
	if a.json {
		if list == nil {
			list = []string{}
		}
		return a.printJSON(map[string][]string{"allow": list})
	}
	if len(list) == 0 {
		_, err := fmt.Fprintf(a.out, "agent %s has reached nothing that is on record\n", id)
		return err
	}
	if _, err := fmt.Fprintln(a.out, strings.Join(list, "\n")); err != nil {
		return err
	}
	words := make([]string, len(list))
	for i, r := range list {
		words[i] = "--allow '" + r + "'"
	}
	_, err := fmt.Fprintf(a.err, "to allow this and nothing else: agentconnect agent edit %s --network allowlist %s\n", id, strings.Join(words, " "))
	return err
}

// egressWord is `egress allow` and `egress deny`.
func (a *app) egressWord(allow bool) *cobra.Command {
	var once, always bool
	verb, short := "deny", "refuse a host, and cut what is connected to it"
	if allow {
		verb, short = "allow", "let the agent reach a host, also one that waits for your word"
	}
	c := &cobra.Command{
		Use: verb + " ID HOST[:PORT]", Short: short, Args: a.idArgs(2, 2),
		Long: "Takes effect at once, for as long as the agent runs. HOST[:PORT] is a rule as --allow of `agent add` takes it.",
		RunE: func(c *cobra.Command, args []string) error {
			if once && always {
				return &usageError{text: "--once and --always exclude each other", see: c.CommandPath()}
			}
			parsed, err := rules.Parse(args[1])
			if err != nil {
				return &usageError{text: err.Error(), see: c.CommandPath()}
			}
			s, err := a.site()
			if err != nil {
				return err
			}
			if err := s.known(args[0]); err != nil {
				return err
			}
			host := args[1]
			if len(parsed) == 1 {
				host = parsed[0].Text() // as it is compared: the supervisor gets no other form
			}
			word := control.Egress{Allow: allow, Host: host, Scope: wire.EgressRun}
			switch {
			case once:
				word.Scope = wire.EgressOnce
			case always:
				word.Scope = wire.EgressAlways
			}
			return s.sayEgress(c.Context(), args[0], word)
		},
	}
	if allow {
		c.Flags().BoolVar(&once, "once", false, "for the next connection alone, or for what waits")
	} else {
		c.Flags().BoolVar(&once, "once", false, "only what waits now")
	}
	c.Flags().BoolVar(&always, "always", false, "for good: written to agent.json as well")
	return c
}

// sayEgress writes the word down where it is for good, and says it to the running agent.
func (s *site) sayEgress(ctx context.Context, id string, w control.Egress) error {
	did := map[bool]string{true: "may reach", false: "may not reach"}[w.Allow]
	if w.Scope == wire.EgressAlways {
		if err := s.own(id); err != nil {
			return err
		}
		b := s.builder()
		if _, err := s.store.Update(id, func(ag *agent.Agent) error {
			to, from := &ag.Network.Allow, &ag.Network.Deny
			if !w.Allow {
				to, from = from, to
			}
			same := func(r string) bool { return rules.Same(r, w.Host) }
			*from = slices.DeleteFunc(*from, same)
			if d := rules.Denying(ag.Network.Deny, w.Host); w.Allow && d != "" {
				return &daemon.Refusal{Code: 1, Text: fmt.Sprintf("%s stays denied: the rules of agent %s deny %s, and deny beats allow; take that rule away with `agentconnect agent edit %s --deny`, which names those that stay (\"\": none)", w.Host, id, d, id)}
			}
			if !slices.ContainsFunc(*to, same) {
				*to = append(*to, w.Host)
			}
			if err := ag.Validate(); err != nil {
				return err
			}
			return b.Check(ag)
		}); err != nil {
			return err
		}
		s.tell(ctx) // the daemon passes the new rules to the running agent
	}
	if w.Scope == wire.EgressAlways {
		st, err := s.client().Agent(ctx, id)
		if errors.Is(err, control.ErrNotRunning) || err == nil && st.State != control.StateRunning {
			return s.a.say(w, "agent %s %s %s, from its next start", id, did, w.Host)
		}
		if err != nil {
			return err
		}
	}
	if err := s.client().Egress(ctx, id, w); err != nil {
		return err
	}
	how := map[wire.EgressScope]string{wire.EgressOnce: "once", wire.EgressRun: "until it ends", wire.EgressAlways: "from now on"}[w.Scope]
	return s.a.say(w, "agent %s %s %s, %s", id, did, w.Host, how)
}

// networkRows are the rules of an agent's network, the sets with their members.
func networkRows(t *table, n agent.Network) {
	for _, list := range []struct {
		name  string
		rules []string
	}{{"allow", n.Allow}, {"deny", n.Deny}} {
		for _, text := range list.rules {
			parsed, err := rules.Parse(text)
			if err != nil {
				t.row(list.name, text+": "+err.Error())
			}
			for _, r := range parsed {
				t.row(list.name, r.Text())
			}
		}
	}
	if n.Ask != "" {
		t.row("ask", "what no rule names waits "+n.Ask+" for your word")
	}
}
