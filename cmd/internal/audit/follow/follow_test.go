package follow

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
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
	log, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	past := 0
	if err := log.Past(func([]byte) error { past++; return nil }); err != nil || past != 1 {
		t.Fatal(past, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	got := make(chan string)
	ended := make(chan error, 1)
	go func() {
		ended <- log.Next(ctx, func(line []byte) error {
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

// Between what there is already and what comes lies no record, and none is in both, whenever the
// log is rotated.
func TestNoRecordFallsBetweenThePastAndWhatComes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.jsonl")
	a, err := audit.OpenSize(path, 128<<10)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	const rounds, each = 40, 500 // rotates every third round or so
	for round := range rounds {
		last := (round + 1) * each
		wrote := make(chan error, 1)
		go func() {
			for i := last - each + 1; i <= last; i++ {
				if err := a.Append(audit.Record{Text: fmt.Sprint(i)}); err != nil {
					wrote <- err
					return
				}
			}
			wrote <- nil
		}()
		log, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		over := errors.New("over")
		was := 0
		next := func(line []byte) error {
			var r audit.Record
			if err := json.Unmarshal(line, &r); err != nil {
				return err
			}
			n, err := strconv.Atoi(r.Text)
			if err != nil || was > 0 && n != was+1 {
				return fmt.Errorf("%s follows %d", line, was)
			}
			if was = n; n == last {
				return over
			}
			return nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		if err = log.Past(next); err == nil {
			err = log.Next(ctx, next)
		}
		cancel()
		log.Close()
		if !errors.Is(err, over) {
			t.Fatalf("round %d: ends at %d: %v", round, was, err)
		}
		if err := <-wrote; err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(path + ".3"); err != nil {
		t.Errorf("it was not rotated: %v", err)
	}
}
