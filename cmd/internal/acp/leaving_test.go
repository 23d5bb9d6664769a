package acp

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// socket attaches a client over a Unix socket, as supervisors have them.
func (r *rig) socket(name string) (*net.UnixConn, chan error) {
	r.t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(r.t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		r.t.Fatal(err)
	}
	defer l.Close()
	mine, err := net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
	if err != nil {
		r.t.Fatal(err)
	}
	its, err := l.AcceptUnix()
	if err != nil {
		r.t.Fatal(err)
	}
	done := make(chan error, 1)
	r.attach.Go(func() { done <- r.b.Attach(context.Background(), its, name) })
	r.t.Cleanup(func() { mine.Close() })
	return mine, done
}

func wantGone(t *testing.T, what string, done chan error) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal(what + " is still held 10 s after it left")
	}
}

// full is a frame with which as much waits for the runtime as clients may queue.
var full = `{"jsonrpc":"2.0","method":"_x","params":{"text":"` + strings.Repeat("a", runtimeMark) + `"}}`

func TestClientsThatLeaveARuntimeThatNeverReadsAreLetGo(t *testing.T) {
	r := newRig(t, nil)
	for range 3 {
		mine, done := r.socket("zed")
		c := newEnd(t, "zed", mine, mine)
		c.send(full) // this waits in the queue, and the others behind it with their client
		c.call("1", "_ask", `{}`)
		c.call("2", "_ask", `{}`)
		mine.Close()
		wantGone(t, "a client", done)
	}
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	if len(r.b.up) > 0 {
		t.Errorf("%d calls are open that the runtime will never see", len(r.b.up))
	}
}

func TestClientThatStoppedSendingIsWaitedForByARuntimeThatReadsLate(t *testing.T) {
	r := newRig(t, nil)
	mine, done := r.socket("script")
	c := newEnd(t, "script", mine, mine)
	c.send(full)
	c.call("1", "_ask", `{}`)
	if err := mine.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-done:
		t.Fatal("let go before the runtime had what it sent")
	case <-time.After(2 * lookEvery):
	}
	r.rt.want("_x")
	r.rt.want("_ask")
	wantGone(t, "the script", done)
}

func TestClientsThatWaitForInitializeAreForgottenWhenTheyLeave(t *testing.T) {
	r := newRig(t, nil)
	for range 5 {
		c, done := r.client("zed")
		c.call("0", "initialize", initParams)
		c.conn.Close()
		wantGone(t, "a client", done)
	}
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	if n := len(r.b.init.waiting); n > 0 {
		t.Errorf("%d of those who left wait for initialize", n)
	}
}

func TestAnswerThatWaitsForItsModeGoesWithItsClient(t *testing.T) {
	r := newRig(t, func(o *Options) { o.Mode = "plan" })
	c, done := r.client("zed")
	r.initialize(c)
	c.call("7", "session/new", `{"cwd":"/ws"}`)
	m := r.rt.want("session/new")
	r.rt.result(string(m.ID), `{"sessionId":"s1","x":"`+strings.Repeat("a", 1<<20)+`"}`)
	set := r.rt.want("session/set_mode")
	c.conn.Close()
	r.rt.want("session/close")
	wantGone(t, "a client", done)
	r.b.mu.Lock()
	for _, u := range r.b.up {
		if u.held != nil && len(u.held.result) > 0 {
			t.Errorf("%d bytes are kept for a client that left", len(u.held.result))
		}
	}
	r.b.mu.Unlock()
	// A late answer is nobody's, and harms nobody.
	r.rt.result(string(set.ID), `{}`)
	next := r.ready("nvim")
	next.call("8", "session/new", `{"cwd":"/ws"}`)
	m = r.rt.want("session/new")
	r.rt.result(string(m.ID), `{"sessionId":"s2","modes":{"currentModeId":"plan","availableModes":[{"id":"plan"}]}}`)
	if m := next.recv(); string(m.ID) != "8" || m.Result == nil {
		t.Errorf("the next client: %s", m.raw)
	}
}
