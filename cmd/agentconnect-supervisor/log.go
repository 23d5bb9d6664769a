package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
)

// newHandler writes log lines for whoever reads our stderr and stamps them: the daemon
// gets level=… msg=…, the journal the bare text with its priority in front, which it
// takes off again (sd-daemon(3)).
func newHandler(w io.Writer, journal bool) slog.Handler {
	if journal {
		return &journalHandler{w: w, mu: &sync.Mutex{}}
	}
	return slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && len(groups) == 0 {
			return slog.Attr{}
		}
		return a
	}})
}

type journalHandler struct {
	w     io.Writer
	mu    *sync.Mutex
	attrs string
}

func (h *journalHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

func (h *journalHandler) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	fmt.Fprintf(&b, "<%d>%s%s", priority(r.Level), r.Message, h.attrs)
	r.Attrs(func(a slog.Attr) bool {
		b.WriteString(attr(a))
		return true
	})
	// One line each: a newline would start a record without its priority.
	line := strings.ReplaceAll(b.String(), "\n", " ") + "\n"
	h.mu.Lock()
	defer h.mu.Unlock()
	_, err := io.WriteString(h.w, line)
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
func priority(l slog.Level) int {
	switch {
	case l >= slog.LevelError:
		return 3
	case l >= slog.LevelWarn:
		return 4
	case l >= slog.LevelInfo:
		return 6
	}
	return 7
}
