package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress"
)

// The operator sees in one terminal what waits, and answers in another; a no cuts what runs.
func TestTheOperatorAnswersWhatWaitsAndCutsWhatRuns(t *testing.T) {
	s := newSite(t)
	port := lineServer(t)
	s.start()
	s.add("alice", "--network", "allowlist", "--ask", "5m", "--allow", "host:1") // without a port of the host there is no name for it
	s.ok("agent", "start", "alice")
	s.write(filepath.Join(s.workspace("alice"), "talk.py"), `
import socket, sys
c = socket.create_connection(('host', int(sys.argv[1])))
c.settimeout(600)
f = c.makefile()
for line in sys.stdin:
    try:
        c.sendall(b'echo ' + line.encode()); print('heard', f.readline().strip() or 'the end', flush=True)
    except OSError as e: print('broken', flush=True)
`)
	follow := s.agentconnect(context.Background(), "egress", "alice", "--follow", "--json")
	out, err := follow.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end := func() {
		if !ended {
			ended = true
			follow.Process.Signal(os.Interrupt)
			follow.Wait()
		}
	}
	defer end()
	records := make(chan egress.Record, 100)
	go func() {
		defer close(records)
		for in := bufio.NewScanner(out); in.Scan(); {
			var r egress.Record
			if json.Unmarshal(in.Bytes(), &r) == nil && r.Kind == "tcp" {
				records <- r
			}
		}
	}()
	shown := func(verdict string) egress.Record {
		t.Helper()
		late := time.After(2 * time.Minute)
		for {
			select {
			case r, ok := <-records:
				if !ok {
					t.Fatalf("--follow ended before it showed %q", verdict)
				}
				if r.Verdict == verdict {
					return r
				}
			case <-late:
				t.Fatalf("--follow does not show %q", verdict)
			}
		}
	}
	type talk struct {
		say  func(string)
		next func() string
		end  func()
	}
	begin := func() talk {
		cmd := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "python3", "-u", "talk.py", port)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := newLines(out)
		return talk{
			say: func(text string) { in.Write([]byte(text + "\n")) },
			next: func() string {
				line, ok := lines.next(2 * time.Minute)
				if !ok {
					t.Error("it says nothing")
				}
				return line
			},
			end: func() { in.Close(); cmd.Wait() },
		}
	}
	c := begin()
	defer c.end()
	c.say("one")
	if r := shown(egress.Asking); r.Name != "host" {
		t.Errorf("%+v", r)
	}
	if got := s.ok("status"); !strings.Contains(got, "it wants to reach host:"+port) || !strings.Contains(got, "egress allow alice host:"+port) {
		t.Errorf("status: %s", got)
	}
	s.ok("egress", "allow", "alice", "host:"+port, "--once")
	if got := c.next(); got != "heard one" {
		t.Fatalf("after a yes for once: %q", got)
	}
	// Once is once: the next one waits again.
	d := begin()
	defer d.end()
	d.say("two")
	shown(egress.Asking)
	s.ok("egress", "deny", "alice", "host:"+port, "--once")
	if got := d.next(); got != "broken" && got != "heard the end" {
		t.Errorf("after a no for once: %q", got)
	}
	c.say("three")
	if got := c.next(); got != "heard three" {
		t.Errorf("a no to the other one cut this one: %q", got)
	}
	s.ok("egress", "allow", "alice", "host:"+port)
	e := begin()
	defer e.end()
	e.say("four")
	if got := e.next(); got != "heard four" {
		t.Errorf("after a yes for the run: %q", got)
	}
	s.ok("egress", "deny", "alice", "host:"+port)
	shown(egress.Cut)
	for _, x := range []talk{c, e} {
		x.say("five")
		if got := x.next(); got != "broken" && got != "heard the end" {
			t.Errorf("a live connection after a no: %q", got)
		}
	}
	f := begin()
	defer f.end()
	f.say("six")
	if got := f.next(); strings.Contains(got, "six") {
		t.Errorf("a new one after a no: %q", got)
	}
	end()
}
