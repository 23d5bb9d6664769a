// agentconnect-bench measures our programs beside their peers, in one run: the machine's
// noise hits both sides, so the ratios hold where the figures do not. It prints a table.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"text/tabwriter"
)

// row is one line of the table.
type row struct {
	what, ours, peer, ratio, limit string
}

// figure measures one thing.
type figure struct {
	name string
	run  func(ctx context.Context, pairs int) ([]row, error)
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == peerArg {
		if err := peer(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "agentconnect-bench:", err)
			os.Exit(1)
		}
		return
	}
	pairs := flag.Int("pairs", 50, "how many pairs of starts are measured")
	only := flag.String("only", "", "measure only the figures whose name holds this")
	gigabytes := flag.Int("gigabytes", 0, "download so much through the gateway, too: \"network large\"")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := bench(ctx, *pairs, *only, *gigabytes); err != nil {
		fmt.Fprintln(os.Stderr, "agentconnect-bench:", err)
		os.Exit(1)
	}
}

func bench(ctx context.Context, pairs int, only string, gigabytes int) error {
	if os.Getuid() == 0 {
		return fmt.Errorf("agents do not run as root; `make bench` uses an ordinary user")
	}
	if pairs < 3 {
		return fmt.Errorf("-pairs %d: at least 3", pairs)
	}
	figures := figures(gigabytes)
	if figures == nil {
		return fmt.Errorf("nothing can be measured on %s: there is no boundary", runtime.GOOS)
	}
	tab := tabwriter.NewWriter(os.Stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintln(tab, "FIGURE\tOURS\tPEER, SAME RUN\tRATIO\tWANTED")
	for _, f := range figures {
		if !strings.Contains(f.name, only) {
			continue
		}
		rows, err := f.run(ctx, pairs)
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		for _, r := range rows {
			fmt.Fprintf(tab, "%s\t%s\t%s\t%s\t%s\n", r.what, r.ours, r.peer, r.ratio, r.limit)
		}
	}
	return tab.Flush()
}
