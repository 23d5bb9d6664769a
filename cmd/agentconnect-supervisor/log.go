package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"

	"github.com/coreos/go-systemd/v22/journal"
)

// newHandler writes log lines for whoever started us: the daemon reads our stderr and
// stamps the lines; under systemd they go to the journal, with the agent's id as a field
// (`journalctl --user AGENT_ID=alice`).
func newHandler(w io.Writer, agent string) slog.Handler {
	if agent != "" {
		return &journalHandler{w: w, agent: agent, mu: &sync.Mutex{}}
	}
	return slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && len(groups) == 0 {
			return slog.Attr{}
		}
		return a
	}})
}

// journalHandler speaks the journal's own protocol; a record that cannot be sent so goes to
// stderr with its priority in front, which the journal takes off again (sd-daemon(3)).
type journalHandler struct {
	w     io.Writer
	agent string
	mu    *sync.Mutex
	attrs string
}

func (h *journalHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

func (h *journalHandler) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	b.WriteString(r.Message + h.attrs)
	from := "supervisor"
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "from" {
			from = a.Value.String()
			return true
		}
		b.WriteString(attr(a))
		return true
	})
	message := strings.ReplaceAll(b.String(), "\n", " ")
	h.mu.Lock()
	defer h.mu.Unlock()
	err := journal.Send(message, priority(r.Level), map[string]string{
		"AGENT_ID": h.agent, "AGENT_SOURCE": from, "SYSLOG_IDENTIFIER": "agent@" + h.agent,
		// What journald adds of itself it reads from the sender's /proc, and last words are often
		// read when that is gone. `journalctl --user -u` and `systemctl --user status` go by this
		// field, too.
		"USER_UNIT": "agent@" + h.agent + ".service",
	})
	if err != nil {
		_, err = fmt.Fprintf(h.w, "<%d>%s\n", priority(r.Level), message)
	}
	return err
}

func (h *journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	c := *h
	for _, a := range attrs {
		c.attrs += attr(a)
	}
	return &c
}

func (h *journalHandler) WithGroup(string) slog.Handler { return h }

func attr(a slog.Attr) string { return fmt.Sprintf(" %s=%v", a.Key, a.Value) }

// priority is syslog's number of a level.
func priority(l slog.Level) journal.Priority {
	switch {
	case l >= slog.LevelError:
		return journal.PriErr
	case l >= slog.LevelWarn:
		return journal.PriWarning
	case l >= slog.LevelInfo:
		return journal.PriInfo
	}
	return journal.PriDebug
}
