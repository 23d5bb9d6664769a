// agent logs: the messages of an agent's supervisor, from the journal or, under direct
// supervision, from the file; with or without a daemon.

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/fsnotify/fsnotify"
	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
)

func (a *app) agentLogs() *cobra.Command {
	var follow bool
	var lines int
	c := &cobra.Command{
		Use: "logs ID", Short: "print what an agent's supervisor and runtime said", Args: a.idArgs(1, 1),
		Long: "Prints the end of the agent's log. With --json each line is an object {\"line\"}.",
		RunE: func(c *cobra.Command, args []string) error {
			if lines < 0 {
				return &usageError{text: "--lines must not be negative", see: c.CommandPath()}
			}
			s, err := a.site()
			if err != nil {
				return err
			}
			path := daemon.AgentLog(s.cfg.Root, args[0])
			if _, err := s.agent(args[0]); errors.Is(err, agent.ErrNotFound) {
				if _, serr := os.Stat(path); serr != nil {
					return err
				}
			}
			if there, err := a.journal(c.Context(), s, args[0], lines, follow); there {
				return err
			}
			return a.logs(c.Context(), path, lines, follow)
		},
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	c.Flags().IntVarP(&lines, "lines", "n", 200, "how many lines from the end")
	return c
}

func (a *app) logs(ctx context.Context, path string, lines int, follow bool) error {
	var events <-chan fsnotify.Event
	var lost <-chan error
	if follow {
		// Watched before the first read, so that nothing falls between. The directory,
		// not the file: the log starts over under the same name.
		w, err := fsnotify.NewWatcher()
		if err != nil {
			return err
		}
		defer func() { _ = w.Close() }()
		if err := w.Add(filepath.Dir(path)); err != nil {
			return fmt.Errorf("%s: %w; no daemon has run here yet: %s", filepath.Dir(path), err, control.HowToStart)
		}
		events, lost = w.Events, w.Errors
	}
	var at int64
	f, err := os.Open(path)
	if err == nil {
		if at, err = f.Seek(0, io.SeekEnd); err != nil {
			f.Close()
			return err
		}
	}
	defer func() {
		if f != nil {
			f.Close()
		}
	}()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	var last []string
	rest := ""
	if f != nil {
		// A line that is still being written comes whole later.
		unended := follow && !lineEnds(f, at)
		if unended {
			lines++
		}
		// Up to where what comes is read from: no line is twice there.
		if last, err = daemon.TailOf(f, at, lines); err != nil {
			return err
		}
		if n := len(last) - 1; unended && n >= 0 {
			last, rest = last[:n], last[n]
		}
	}
	if err := a.logLines(last); err != nil || !follow {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case e, ok := <-events:
			if !ok {
				return nil
			}
			if e.Name != path {
				continue
			}
		case err, ok := <-lost:
			if !ok {
				return nil
			}
			if !errors.Is(err, fsnotify.ErrEventOverflow) { // what was lost is read all the same
				return err
			}
		}
		if f != nil {
			if at, rest, err = a.logRest(f, at, rest); err != nil {
				return err
			}
		}
		now, err := os.Stat(path)
		if err != nil {
			continue // between two generations
		}
		if f != nil {
			if old, err := f.Stat(); err == nil && os.SameFile(old, now) {
				continue
			}
			if at, rest, err = a.logRest(f, at, rest); err != nil { // what came before it was renamed
				return err
			}
			f.Close()
		}
		if f, err = os.Open(path); err != nil {
			f = nil
			continue
		}
		if at, rest, err = a.logRest(f, 0, rest); err != nil {
			return err
		}
	}
}

// lineEnds reports whether a line ends, or none has begun, at this offset.
func lineEnds(f *os.File, at int64) bool {
	var b [1]byte
	n, _ := f.ReadAt(b[:], max(at-1, 0)) // what cannot be read is no line
	return n == 0 || at == 0 || b[0] == '\n'
}

// logRest prints the whole lines of f after at and returns where it stopped and what of
// a line is there already.
func (a *app) logRest(f *os.File, at int64, rest string) (int64, string, error) {
	raw, err := io.ReadAll(io.NewSectionReader(f, at, 1<<62))
	if err != nil {
		return at, rest, err
	}
	lines := strings.Split(rest+string(raw), "\n")
	n := len(lines) - 1
	return at + int64(len(raw)), lines[n], a.logLines(lines[:n])
}

func (a *app) logLines(lines []string) error {
	for _, l := range lines {
		var err error
		if a.json {
			err = a.printLine(map[string]string{"line": l})
		} else {
			_, err = fmt.Fprintln(a.out, oneLine(l))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
