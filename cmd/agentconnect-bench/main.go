// agentconnect-bench measures our programs beside their peers, in one run: the machine's
// noise hits both sides, so the ratios hold where the figures do not. It prints a table, or
// writes a report of what it and the measurements on real systemd printed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"agentconnect.md/sandbox/cmd/internal/figures"
)

// measurement gives some figures. Their keys lie below its name.
type measurement struct {
	name string
	run  func(ctx context.Context, pairs int) ([]figures.Figure, error)
}

type options struct {
	pairs, gigabytes    int
	only, guard, report string
	lines               bool
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == peerArg {
		if err := peer(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "agentconnect-bench:", err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.IntVar(&o.pairs, "pairs", 50, "how many pairs of starts are measured")
	flag.StringVar(&o.only, "only", "", "measure only what has this in its name")
	flag.IntVar(&o.gigabytes, "gigabytes", 0, "download so much through the gateway, too: \"network/large\"")
	flag.BoolVar(&o.lines, "lines", false, "print figures as lines for -report, and the table to the standard error")
	flag.StringVar(&o.guard, "guard", "", "measure what this file has accepted ratios of, and fail on a clear step back")
	flag.StringVar(&o.report, "report", "", "measure nothing: write `FOLDER`/bench.md and its plots from the lines in the files given")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "agentconnect-bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, files []string) error {
	if o.report != "" {
		return report(ctx, o.report, files)
	}
	if os.Getuid() == 0 {
		return errors.New("agents do not run as root; `make bench` uses an ordinary user")
	}
	if o.pairs < 3 {
		return fmt.Errorf("-pairs %d: at least 3", o.pairs)
	}
	all := measurements(o.gigabytes)
	if all == nil {
		return fmt.Errorf("nothing can be measured on %s: there is no boundary", runtime.GOOS)
	}
	if o.guard != "" {
		return guard(ctx, o.guard, all, o.pairs)
	}
	found, err := measure(ctx, all, o.pairs, func(name string) bool { return strings.Contains(name, o.only) })
	if err != nil {
		return err
	}
	if !o.lines {
		return figures.Table(os.Stdout, found)
	}
	for _, f := range found {
		if err := figures.Print(os.Stdout, f); err != nil {
			return err
		}
	}
	return figures.Table(os.Stderr, found)
}

func measure(ctx context.Context, all []measurement, pairs int, wanted func(name string) bool) ([]figures.Figure, error) {
	var found []figures.Figure
	for _, m := range all {
		if !wanted(m.name) {
			continue
		}
		some, err := m.run(ctx, pairs)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.name, err)
		}
		for _, f := range some {
			if !figures.Below(f.Key, m.name) {
				return nil, fmt.Errorf("%s gives a figure called %s", m.name, f.Key)
			}
		}
		found = append(found, some...)
	}
	return found, nil
}

// guard measures what has accepted ratios. What stepped back is measured twice more, since a busy
// moment of the machine looks the same: a step back is there each time.
func guard(ctx context.Context, path string, all []measurement, pairs int) error {
	accepted, err := figures.ReadAccepted(path)
	if err != nil {
		return err
	}
	keys := slices.Collect(maps.Keys(accepted.Ratios))
	for try := 1; ; try++ {
		found, err := measure(ctx, all, pairs, func(name string) bool {
			return slices.ContainsFunc(keys, func(key string) bool { return figures.Below(key, name) })
		})
		if err != nil {
			return err
		}
		if err := figures.Table(os.Stdout, found); err != nil {
			return err
		}
		if try == 1 { // all of it
			var kind string
			if accepted, kind = accepted.On(found); kind != "" {
				fmt.Printf("a machine on which %s\n", kind)
			}
		}
		lines, bad := accepted.Among(keys).Worse(found)
		if len(bad) == 0 {
			return nil
		}
		if try == 3 {
			return fmt.Errorf("a step back from %s, three times:\n  %s\nif it is meant, write the new ratio there and say why in the commit", path, strings.Join(lines, "\n  "))
		}
		fmt.Printf("measured again:\n  %s\n", strings.Join(lines, "\n  "))
		keys = bad
	}
}
