package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Lines that a control plane can bring about go into the log so many at once, and then so many a
// second: it must not fill the disk, nor push out what else is there.
const (
	calmBurst = 500
	calmRate  = 1
)

// calm is a log that leaves out what comes faster, and says how much that was.
type calm struct {
	slog.Handler
	pace *calmPace // of all that came of it
}

func newCalm(log *slog.Logger) *slog.Logger {
	return slog.New(calm{log.Handler(), &calmPace{}})
}

type calmPace struct {
	mu   sync.Mutex
	done float64 // of the burst
	at   time.Time
	over int
}

// take reports whether a line goes in, and how many before it did not.
func (p *calmPace) take(now time.Time) (ok bool, over int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done, p.at = max(0, p.done-max(0, now.Sub(p.at).Seconds())*calmRate), now
	if p.done+1 > calmBurst {
		p.over++
		return false, 0
	}
	p.done++
	over, p.over = p.over, 0
	return true, over
}

func (c calm) Handle(ctx context.Context, r slog.Record) error {
	ok, over := c.pace.take(r.Time)
	if !ok {
		return nil
	}
	if over > 0 {
		said := slog.NewRecord(r.Time, slog.LevelWarn, "lines about the control plane came too fast and are left out", 0)
		said.AddAttrs(slog.Int("lines", over))
		if err := c.Handler.Handle(ctx, said); err != nil {
			return err
		}
	}
	return c.Handler.Handle(ctx, r)
}

func (c calm) WithAttrs(attrs []slog.Attr) slog.Handler {
	return calm{c.Handler.WithAttrs(attrs), c.pace}
}

func (c calm) WithGroup(name string) slog.Handler { return calm{c.Handler.WithGroup(name), c.pace} }
