package acp

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// desk is an editor on a bridge whose connections the test plays.
type desk struct {
	t      *testing.T
	editor *end
	links  chan *end
	refuse chan error
	done   chan error
	cancel context.CancelFunc
}

func newDesk(t *testing.T) *desk {
	in, edOut := net.Pipe()
	edIn, out := net.Pipe()
	d := &desk{t: t, editor: newEnd(t, "editor", edIn, edOut), links: make(chan *end, 1), refuse: make(chan error, 1), done: make(chan error, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	d.cancel = cancel
	dial := func(context.Context) (io.ReadWriteCloser, error) {
		select {
		case err := <-d.refuse:
			return nil, err
		default:
		}
		mine, its := net.Pipe()
		d.links <- newEnd(t, "supervisor", mine, mine)
		return its, nil
	}
	go func() { d.done <- Bridge(ctx, in, out, dial) }()
	t.Cleanup(func() {
		cancel()
		select {
		case <-d.done:
		case <-time.After(must):
			t.Error("Bridge does not return")
		}
	})
	return d
}

func (d *desk) link() *end {
	d.t.Helper()
	select {
	case l := <-d.links:
		return l
	case <-time.After(must):
		d.t.Fatal("no dial")
		return nil
	}
}

func TestBridgeReconnectsAfterTheRuntimeEnded(t *testing.T) {
	d := newDesk(t)
	ed := d.editor
	init := `{"jsonrpc":"2.0","id":"i","method":"initialize","params":{"protocolVersion":1,"x":[1.50]}}`
	ed.send(init)
	l := d.link()
	l.wantRaw(init)
	l.send(`{"jsonrpc":"2.0","id":"i","result":{"protocolVersion":1}}`)
	ed.wantRaw(`{"jsonrpc":"2.0","id":"i","result":{"protocolVersion":1}}`)

	ed.call("1", "session/prompt", `{"sessionId":"s"}`)
	l.want("session/prompt")
	ed.call(`"1"`, "session/list", `{}`)
	l.want("session/list")
	l.send(`{"jsonrpc":"2.0","id":700,"method":"session/request_permission","params":{"sessionId":"s"}}`)
	ed.want("session/request_permission")
	l.conn.Close()
	got := map[string]bool{}
	for range 2 {
		m := ed.recv()
		if m.Error == nil || !strings.Contains(m.Error.Message, "agent runtime ended") {
			t.Errorf("editor got %s", m.raw)
		}
		got[string(m.ID)] = true
	}
	if !got["1"] || !got[`"1"`] {
		t.Errorf("answered: %v", got)
	}
	ed.wantRaw(`{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":700}}`)

	// What belongs to the old connection is not sent to a new one, nor makes one.
	ed.result("700", `{"outcome":{"outcome":"selected","optionId":"allow"}}`)
	ed.call("", "session/cancel", `{"sessionId":"s"}`)

	d.refuse <- errors.New("agent alice is stopped: start it with: agentconnect agent start alice")
	ed.call("2", "session/load", `{"sessionId":"s"}`)
	ed.wantError("2", CodeInternal, "agent alice is stopped")

	ed.call("3", "session/load", `{"sessionId":"s"}`)
	l = d.link()
	again := l.want("initialize")
	if string(again.Params) != `{"protocolVersion":1,"x":[1.50]}` || string(again.ID) == `"i"` {
		t.Errorf("second initialize: %s", again.raw)
	}
	l.result(string(again.ID), `{"protocolVersion":1}`)
	l.want("session/load")
	l.result("3", `{}`)
	ed.wantRaw(`{"jsonrpc":"2.0","id":3,"result":{}}`)
	ed.result("700", `{}`) // still stale
	ed.call("4", "session/list", `{}`)
	l.want("session/list")
}

// The word of the runtime's end comes before the end of the connection: what the editor
// sends in between belongs to the next runtime, and is not lost with this one.
func TestEditorSendsAgainBeforeTheOldConnectionIsClosed(t *testing.T) {
	d := newDesk(t)
	ed := d.editor
	ed.call("1", "initialize", `{}`)
	old := d.link()
	old.want("initialize")
	old.result("1", `{}`)
	ed.recv()
	ed.call("2", "session/prompt", `{"sessionId":"s"}`)
	old.want("session/prompt")
	ed.call("3", "session/prompt", `{"sessionId":"t"}`)
	old.want("session/prompt")
	go old.send(strings.TrimSuffix(string(endedFrame([]byte("2"), "it is over")), "\n"))
	ed.wantError("2", CodeInternal, "it is over")
	ed.call("4", "session/load", `{"sessionId":"s"}`)
	l := d.link()
	l.result(string(l.want("initialize").ID), `{}`)
	l.want("session/load")
	old.conn.Close() // answers what was open there, and only that
	ed.wantError("3", CodeInternal, "agent runtime ended")
	l.result("4", `{}`)
	ed.wantRaw(`{"jsonrpc":"2.0","id":4,"result":{}}`)
}

func TestBridgeSaysWhyARestartedAgentDoesNotInitialize(t *testing.T) {
	d := newDesk(t)
	ed := d.editor
	ed.call("1", "initialize", `{}`)
	l := d.link()
	l.want("initialize")
	l.result("1", `{}`)
	ed.recv()
	l.conn.Close()
	// The bridge may still see the old connection as alive; then the request fails with it.
	for {
		go ed.call("2", "session/list", `{}`)
		var again message
		select {
		case l = <-d.links:
			again = l.want("initialize")
		case <-time.After(50 * time.Millisecond):
			ed.wantError("2", CodeInternal, "agent runtime ended")
			continue
		}
		go l.send(`{"jsonrpc":"2.0","id":` + string(again.ID) + `,"error":{"code":-32603,"message":"npm is broken"}}`)
		ed.wantError("2", CodeInternal, "does not initialize", "npm is broken")
		break
	}
	// Broken off in the middle of it.
	ed.call("3", "session/list", `{}`)
	l = d.link()
	l.want("initialize")
	l.conn.Close()
	ed.wantError("3", CodeInternal, "agent runtime ended")
}

func TestEditorSendsJunkToTheBridge(t *testing.T) {
	d := newDesk(t)
	for range maxJunkRow {
		go io.WriteString(d.editor.conn, "{}\n")
		d.editor.wantError("null", CodeInvalidRequest, "not a JSON-RPC")
	}
	if err := <-d.done; err == nil || !strings.Contains(err.Error(), "100 lines") {
		t.Errorf("Bridge: %v", err)
	}
	d.done <- nil
}

func TestEditorClosesItsPipe(t *testing.T) {
	d := newDesk(t)
	ed := d.editor
	ed.call("1", "session/prompt", `{"sessionId":"s"}`)
	l := d.link()
	l.want("session/prompt")
	ed.call("2", "session/list", `{}`)
	l.want("session/list")
	ed.conn.Close()
	// A script's last answer still arrives; the turn is not waited for.
	l.result("2", `{}`)
	ed.wantRaw(`{"jsonrpc":"2.0","id":2,"result":{}}`)
	l.wantEnd()
	// net.Pipe has no half to close, so the connection is over, and the turn with it.
	ed.wantError("1", CodeInternal, "ended")
	if err := <-d.done; err != nil {
		t.Errorf("Bridge: %v", err)
	}
	d.done <- nil
}

func TestEditorClosesItsPipeAndGetsTheLastWordsOfASocket(t *testing.T) {
	ln, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	rd, out := io.Pipe()
	done := make(chan error, 1)
	in := `{"jsonrpc":"2.0","id":1,"method":"session/prompt","params":{"sessionId":"s"}}`
	go func() {
		done <- Bridge(t.Context(), strings.NewReader(in), out, func(context.Context) (io.ReadWriteCloser, error) { return net.Dial("unix", ln.Addr().String()) })
		out.Close()
	}()
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	sup := newEnd(t, "supervisor", conn, conn)
	sup.wantRaw(in)
	sup.wantEnd()
	sup.result("1", `{"stopReason":"cancelled"}`)
	conn.Close()
	got, err := io.ReadAll(rd)
	if err != nil || string(got) != `{"jsonrpc":"2.0","id":1,"result":{"stopReason":"cancelled"}}`+"\n" {
		t.Errorf("editor got %q, %v", got, err)
	}
	if err := <-done; err != nil {
		t.Errorf("Bridge: %v", err)
	}
}

func TestEditorThatNoLongerReads(t *testing.T) {
	d := newDesk(t)
	d.editor.call("1", "session/list", `{}`)
	l := d.link()
	l.want("session/list")
	d.editor.in.Close()
	l.result("1", `{}`)
	if err := <-d.done; err == nil || !strings.Contains(err.Error(), "no longer reads") {
		t.Errorf("Bridge: %v", err)
	}
	d.done <- nil
}

// The bridge on a real broker: a runtime dies, another one takes its place.
func TestBridgeOnABroker(t *testing.T) {
	r := newRig(t, nil)
	d := newDesk(t)
	ed := d.editor
	serve := func(r *rig) {
		l := d.link()
		r.attach.Go(func() { r.b.Attach(context.Background(), rejoin{l.conn}, "zed") })
	}
	ed.call("0", "initialize", initParams)
	serve(r)
	m := r.rt.want("initialize")
	r.rt.result(string(m.ID), `{"protocolVersion":1}`)
	ed.recv()
	r.session(ed, "s")
	ed.call("1", "session/prompt", `{"sessionId":"s"}`)
	r.rt.want("session/prompt")
	r.rt.conn.Close()
	<-r.run
	r.run <- nil
	go r.b.Fail("agent runtime ended: out of memory: 2 GiB limit")
	ed.wantError("1", CodeInternal, "out of memory: 2 GiB limit")

	// The editor may be faster than the end of the connection.
	r = newRig(t, nil)
	for {
		ed.call("2", "session/prompt", `{"sessionId":"s"}`)
		select {
		case l := <-d.links:
			r.attach.Go(func() { r.b.Attach(context.Background(), rejoin{l.conn}, "zed") })
		case <-time.After(100 * time.Millisecond):
			ed.wantError("2", CodeInternal, "ended")
			continue
		}
		break
	}
	m = r.rt.want("initialize")
	r.rt.result(string(m.ID), `{"protocolVersion":1}`)
	ed.wantError("2", CodeInvalidRequest, "load it first")
	ed.call("3", "session/load", `{"sessionId":"s","cwd":"/ws"}`)
	m = r.rt.want("session/load")
	ed.wantRaw(r.update("s", "history"))
	r.rt.result(string(m.ID), `{}`)
	ed.recv()
}

type rejoin struct{ net.Conn }
