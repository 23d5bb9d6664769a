package follow

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/audit"
)

// A log that somebody emptied goes on from its beginning.
func TestFollowerGoesOnWithALogThatWasEmptied(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.jsonl")
	if err := os.WriteFile(path, []byte(`{"text":"a record of before"}`+"\n"+`{"text":"another"}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var got []string
	tail := &tail{path: path, f: func(line []byte) error {
		got = append(got, string(line))
		return nil
	}}
	defer tail.close()
	read := func() {
		t.Helper()
		if err := tail.read(); err != nil {
			t.Fatal(err)
		}
	}
	read()
	got = nil
	if err := os.WriteFile(path, []byte(`{"text":"new"}`+"\n"), 0o600); err != nil { // the same file
		t.Fatal(err)
	}
	read()
	if len(got) != 1 || got[0] != `{"text":"new"}` {
		t.Errorf("got %q", got)
	}
}

// A follower sees each record once, in order, also over rotations.
func TestFollowerSeesEveryRecordOverRotations(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.jsonl")
	a, err := audit.OpenSize(path, 4<<10) // rotates three times below
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := a.Append(audit.Record{Text: "before"}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	got := make(chan string)
	ended := make(chan error, 1)
	go func() {
		ended <- Lines(ctx, path, func(line []byte) error {
			var r audit.Record
			if err := json.Unmarshal(line, &r); err != nil {
				return err
			}
			select {
			case got <- r.Text:
			case <-ctx.Done():
			}
			return nil
		})
	}()
	// The watch is up once a marker is seen; markers before that are missed, as they may be.
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for up := false; !up; {
		select {
		case <-tick.C:
			if err := a.Append(audit.Record{Text: "marker"}); err != nil {
				t.Fatal(err)
			}
		case text := <-got:
			if text != "marker" {
				t.Fatalf("saw %q, which was written before", text)
			}
			up = true
		case err := <-ended:
			t.Fatal(err)
		}
	}
	go func() {
		for i := range 100 {
			if err := a.Append(audit.Record{Text: fmt.Sprint(i)}); err != nil {
				t.Error(err)
			}
		}
	}()
	for next := 0; next < 100; {
		select {
		case text := <-got:
			if text == "marker" && next == 0 {
				continue
			}
			if text != fmt.Sprint(next) {
				t.Fatalf("got %s, want %d", text, next)
			}
			next++
		case err := <-ended:
			t.Fatalf("ended: %v", err)
		}
	}
	if _, err := os.Stat(path + ".1"); err != nil {
		t.Errorf("nothing was rotated: %v", err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
