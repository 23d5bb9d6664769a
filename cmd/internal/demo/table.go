package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

// row is one attempt, seen from both sides.
type row struct {
	selftest.Result               // inside
	Outside         selftest.Seen // empty where the table outside lacks it
	// Wrong says what differs from what was to be seen; empty where nothing does.
	Wrong string
}

// planted are the attacks whose target the demo itself puts there, so that they work
// outside on any machine. One that fails there proves nothing by failing inside.
var planted = []string{
	"read-home", "read-home-dotdot", "read-link", "write-home",
	"read-root", "list-root", "list-agents", "read-other-agent", "read-host-tmp",
	"connect-ssh-agent", "connect-abstract", "tcp-host", "udp",
	"see-host-process", "kill-host-process",
}

// compare pairs the two reports. Wrong is also a planted attack that did not work
// outside, or that is missing.
func compare(inside, outside *selftest.Report) []row {
	seen := map[string]selftest.Result{}
	for _, result := range outside.Results {
		seen[result.ID] = result
	}
	var rows []row
	for _, result := range inside.Results {
		r := row{Result: result, Outside: seen[result.ID].Seen}
		switch {
		case !result.OK:
			r.Wrong = fmt.Sprintf("expected %s, seen %s: %s", result.Expected, result.Seen, result.Detail)
		case r.Outside == "":
			r.Wrong = "was not tried outside"
		case slices.Contains(planted, result.ID) && (result.Seen == selftest.Skipped || r.Outside != selftest.Worked):
			r.Wrong = fmt.Sprintf("proves nothing: inside %s, outside %s: %s", result.Seen, r.Outside, seen[result.ID].Detail)
		}
		rows = append(rows, r)
	}
	for _, id := range planted {
		if !slices.ContainsFunc(rows, func(r row) bool { return r.ID == id }) {
			rows = append(rows, row{Result: selftest.Result{ID: id, Title: id, Expected: selftest.Refused}, Wrong: "was not tried inside"})
		}
	}
	return rows
}

func writeRows(out io.Writer, rows []row) error {
	section(out, "what it could reach, and what not")
	table := tabwriter.NewWriter(out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(table, "\tpath or action\texpected\tseen inside\tseen outside")
	for _, r := range rows {
		mark := "ok"
		switch {
		case r.Wrong != "":
			mark = "WRONG"
		case r.Seen == selftest.Skipped:
			mark = "-"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", mark, r.Title, r.Expected, r.Seen, r.Outside)
	}
	return table.Flush()
}

// verdict sums up, and is an error if anything is not as it should be.
func verdict(out io.Writer, rows []row) error {
	var refused, worked, provable, skipped, wrong int
	for _, r := range rows {
		switch {
		case r.Wrong != "":
			if wrong == 0 {
				fmt.Fprintln(out)
			}
			wrong++
			fmt.Fprintf(out, "WRONG %s (%s): %s\n", r.ID, r.Title, r.Wrong)
		case r.Seen == selftest.Skipped:
			skipped++
		case r.Kind == selftest.MustWork:
			worked++
		default:
			refused++
			if r.Outside == selftest.Worked {
				provable++
			}
		}
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %d rows are not as they should be", wrong, len(rows))
	}
	if refused == 0 || worked == 0 {
		return fmt.Errorf("nothing was shown: %d attacks refused, %d promised things worked", refused, worked)
	}
	fmt.Fprintf(out, "\n%d attacks refused inside, of which %d work outside; %d things an agent needs work; %d had no target here.\n",
		refused, provable, worked, skipped)
	return nil
}
