package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// noted counts what an agent's supervisors have noted.
func (s *site) noted(id, what string) int {
	raw, _ := os.ReadFile(filepath.Join(s.store.Dirs(id).Workspace, what))
	return strings.Count(string(raw), "\n")
}

// many adds so many agents, starts them, and gives their ids.
func (s *site) many(c *control.Client, n int, name string, words ...string) (ids []string) {
	s.t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		id := fmt.Sprintf("%s%d", name, i)
		s.agent(id, false, words...)
		wg.Go(func() { // what is said of a start waits for an answer, too
			if _, err := c.Start(s.t.Context(), id); err != nil {
				s.t.Error(err)
			}
		})
		ids = append(ids, id)
	}
	wg.Wait()
	return ids
}

// status gives what is said of each agent, and how long that took.
func (s *site) status(c *control.Client) (map[string]control.AgentStatus, time.Duration) {
	s.t.Helper()
	began := time.Now()
	st, err := c.Status(s.t.Context())
	took := time.Since(began)
	if err != nil {
		s.t.Fatal(err)
	}
	all := map[string]control.AgentStatus{}
	for _, a := range st.Agents {
		all[a.ID] = a
	}
	return all, took
}

func TestStatusAsksEachSupervisorOnce(t *testing.T) {
	s := newSite(t, "{}")
	c, _ := s.start()
	ids := append(s.many(c, 3, "new", "serve", "ready", "wait"), s.many(c, 1, "older", "serve:once", "ready", "wait")...)
	right := func(when string) {
		t.Helper()
		asked, connected := map[string]int{}, map[string]int{}
		for _, id := range ids {
			asked[id], connected[id] = s.noted(id, "asked"), s.noted(id, "connected")
		}
		all, _ := s.status(c)
		for _, id := range ids {
			want := 0
			if strings.HasPrefix(id, "older") {
				want = 1 // it closed the connection after the last answer
			}
			if asked, connected := s.noted(id, "asked")-asked[id], s.noted(id, "connected")-connected[id]; asked != 1 || connected != want {
				t.Errorf("%s: %s: asked %d times on %d new connections, want once on %d", when, id, asked, connected, want)
			}
			// It is the one that runs who answered.
			if a := all[id]; a.Clients != 7 || a.Line != fmt.Sprintf("at work as %d", a.PID) {
				t.Errorf("%s: %s: not as its supervisor says: %+v", when, id, a)
			}
		}
	}
	right("after the start")
	right("again")
	for _, id := range ids {
		if _, err := c.Restart(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	right("after a restart")
}

// kept counts the connections of this process to agents.
func (s *site) kept() (n int) {
	s.t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		s.t.Skip("missing: a list of this process's descriptors")
	}
	for _, e := range fds {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			s.t.Fatal(err)
		}
		// A connection that the other end has closed still has its name.
		peer, _ := unix.Getpeername(fd)
		if at, ok := peer.(*unix.SockaddrUnix); ok && strings.Contains(filepath.Base(at.Name), "agent-of-test-") {
			n++
		}
	}
	return n
}

func TestNoConnectionIsLeftOfAgentsThatAreGone(t *testing.T) {
	s := newSite(t, "{}")
	c, stop := s.start()
	ids := s.many(c, 3, "agent-of-test-", "serve", "ready", "wait")
	want := func(when string, n int) {
		t.Helper()
		if kept := s.kept(); kept != n {
			t.Errorf("%s there are %d connections to agents, want %d", when, kept, n)
		}
	}
	want("after the starts", 3)
	if _, err := c.Stop(t.Context(), ids[0]); err != nil {
		t.Fatal(err)
	}
	want("with one stopped", 2)
	if err := s.store.Remove(ids[1], true); err != nil {
		t.Fatal(err)
	}
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	want("with another one removed", 1)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	want("without a daemon", 0)
}

func TestHungSupervisorsHoldNobodyUp(t *testing.T) {
	s := newSite(t, `{"limits":{"maxAgents":100}}`)
	c, _ := s.start()
	// More than are asked at a time, and before the others by their names.
	hung := s.many(c, askedAtOnce+8, "hung", "listen", "ready", "wait")
	whole := s.many(c, 3, "whole", "serve", "ready", "wait")
	all, took := s.status(c)
	// Two rounds of supervisors that do not answer: 1.1 s; each to its end would be 2 s.
	if took > 2*askTimeout-2*askPromptly {
		t.Errorf("status took %v", took)
	}
	for _, id := range hung {
		if notes := strings.Join(all[id].Notes, "; "); all[id].State != control.StateRunning || !strings.Contains(notes, "does not answer: not within 1s") {
			t.Errorf("%s hangs, and is said to be %s: %s", id, all[id].State, notes)
		}
	}
	for _, id := range whole {
		if a := all[id]; a.Clients != 7 || strings.Contains(strings.Join(a.Notes, "; "), "does not answer") {
			t.Errorf("%s answers, and is said to be %+v", id, a)
		}
	}
}

func TestHaltedAndKilledSupervisorsAreSaidAtOnce(t *testing.T) {
	s := newSite(t, "{}")
	c, _ := s.start()
	ids := s.many(c, 2, "a", "serve", "ready", "wait")
	all, _ := s.status(c)
	pid := all[ids[0]].PID
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) })
	for end := time.Now().Add(20 * time.Second); halted(ids[0], pid) == ""; time.Sleep(time.Millisecond) { //nolint:forbidigo // asked with a deadline
		if time.Now().After(end) {
			t.Fatal("the kernel does not halt it")
		}
	}
	all, took := s.status(c)
	if took >= askTimeout {
		t.Errorf("status took %v with a supervisor that the kernel halts", took)
	}
	want := fmt.Sprintf("halted by a signal: it goes on after `kill -CONT %d`", pid)
	if notes := strings.Join(all[ids[0]].Notes, "; "); !strings.Contains(notes, want) {
		t.Errorf("notes %q, want %q", notes, want)
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if all, _ = s.status(c); all[ids[0]].Clients != 7 || strings.Contains(strings.Join(all[ids[0]].Notes, "; "), "halted") {
		t.Errorf("it goes on: %+v", all[ids[0]])
	}
	// One that is killed is never said to run as it did.
	killed := all[ids[1]].PID
	if err := syscall.Kill(killed, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	all, took = s.status(c)
	if a := all[ids[1]]; took >= askTimeout || a.Clients != 0 || a.State == control.StateRunning && !strings.Contains(strings.Join(a.Notes, "; "), "does not answer") {
		t.Errorf("after %v: %+v", took, a)
	}
}
