package daemon

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func TestLinesThatTheControlPlaneBringsAboutAreBounded(t *testing.T) {
	var b bytes.Buffer
	c := calm{slog.NewTextHandler(&b, nil), &calmPace{}}
	log := func(at time.Time, words string) {
		t.Helper()
		if err := c.WithAttrs([]slog.Attr{slog.String("agent", "a")}).Handle(context.Background(), slog.NewRecord(at, slog.LevelWarn, words, 0)); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	for range 100_000 {
		log(now, "flood")
	}
	if n := strings.Count(b.String(), "flood"); n != calmBurst {
		t.Errorf("%d lines of a flood are logged", n)
	}
	b.Reset()
	log(now.Add(-time.Hour), "set back") // the clock was
	log(now.Add(time.Minute), "later")
	if text := b.String(); strings.Contains(text, "set back") || !strings.Contains(text, "later") || !strings.Contains(text, "lines=99501") {
		t.Errorf("after the flood: %s", text)
	}
}
