// The editor's end: its stdio on one side, a connection to the agent's supervisor on
// the other, which may break and be made again without the editor noticing more than
// errors for what was open.

package acp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"
)

// DialFunc connects to an agent, starting it if need be. Its error is shown in the editor.
type DialFunc func(ctx context.Context) (io.ReadWriteCloser, error)

const (
	bridgeEnded = "agent runtime ended: the connection to its supervisor closed; send again to start it, the session can be loaded again"
	// lingerWait is how long open requests other than a turn may still be answered after
	// the editor has closed its side, as a script does that pipes its requests in.
	lingerWait = 5 * time.Second
)

type bridge struct {
	dial   DialFunc
	cancel context.CancelCauseFunc

	outMu sync.Mutex
	out   io.Writer

	mu      sync.Mutex
	settled chan struct{} // signalled when a link's open shrinks
	link    *link
	init    []byte // the editor's initialize, for a new connection
	dials   int
}

type openCall struct {
	id    []byte
	count int // an editor may repeat an id
	turn  bool
}

// link is one connection.
type link struct {
	conn   io.ReadWriteCloser
	done   chan struct{} // closed when everything that was open has been answered
	open   map[string]*openCall
	down   map[string][]byte
	replay string // the id's key of the initialize that was sent again
	again  chan error
}

// Bridge relays between an editor (in, out) and the connection that dial makes on the
// first request. When the connection breaks, each open request gets an error, and the
// next request dials again and repeats the editor's initialize. It returns nil when the
// editor closes in. If in is no io.Closer whose Close ends a Read, the goroutine that
// reads it may outlive a cancelled ctx.
func Bridge(ctx context.Context, in io.Reader, out io.Writer, dial DialFunc) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	b := &bridge{dial: dial, cancel: cancel, out: out, settled: make(chan struct{}, 1)}
	read := make(chan error, 1)
	go func() { read <- b.readEditor(ctx, in) }()
	var err error
	select {
	case err = <-read:
	case <-ctx.Done():
		err = context.Cause(ctx)
		b.hangUp()
		if c, ok := in.(io.Closer); ok {
			c.Close()
		}
		select {
		case _ = <-read:
		case <-time.After(lastWords):
		}
	}
	if err == nil {
		b.linger(ctx)
	}
	b.hangUp()
	if ctx.Err() != nil && err == nil {
		err = context.Cause(ctx)
	}
	return err
}

// write sends whole lines to the editor. An editor that cannot be written to is gone.
func (b *bridge) write(lines []byte) {
	b.outMu.Lock()
	defer b.outMu.Unlock()
	if _, err := b.out.Write(lines); err != nil {
		b.cancel(fmt.Errorf("editor no longer reads: %w", err))
	}
}

func (b *bridge) readEditor(ctx context.Context, in io.Reader) error {
	lines := NewLineReader(in)
	var f Frame
	for junk := 0; ; {
		line, err := lines.Next()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if len(trimLine(line)) > 0 {
			if perr := ParseFrame(line, &f); perr != nil {
				b.write(errorFrame(nullID, frameErrorCode(perr), "editor sent a line that is "+perr.Error()))
				if junk++; junk >= maxJunkRow {
					return fmt.Errorf("editor sent %d lines in a row that are not ACP, the last: %s", junk, sample(line))
				}
			} else {
				junk = 0
				b.fromEditor(ctx, &f, line)
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, ErrFrameTooLarge):
			b.write(errorFrame(nullID, CodeInvalidRequest, "editor sent "+err.Error()))
			return err
		default:
			return fmt.Errorf("editor's messages: %w", err)
		}
	}
}

// wholeLine is the frame with its newline, which the stream's last line may lack.
func wholeLine(line []byte) []byte {
	if bytes.HasSuffix(line, newline) {
		return line
	}
	return append(bytes.Clone(line), '\n')
}

func (b *bridge) fromEditor(ctx context.Context, f *Frame, line []byte) {
	b.mu.Lock()
	l := b.link
	if !f.IsRequest() {
		ok := l != nil
		if ok && f.IsResponse() {
			// An answer to an earlier connection's question must not meet a new one.
			k := idKey(f.Bytes(f.ID))
			_, ok = l.down[k]
			delete(l.down, k)
		}
		b.mu.Unlock()
		if ok {
			b.send(l, wholeLine(line))
		}
		return
	}
	b.mu.Unlock()
	id := bytes.Clone(f.Bytes(f.ID))
	first := string(f.Method) == "initialize"
	if first {
		b.init = bytes.Clone(f.Raw)
	}
	if l == nil {
		var err error
		if l, err = b.connect(ctx, !first); err != nil {
			b.write(errorFrame(id, CodeInternal, oneLine(err.Error(), 4000)))
			return
		}
	}
	b.mu.Lock()
	if b.link != l {
		b.mu.Unlock()
		b.write(errorFrame(id, CodeInternal, bridgeEnded))
		return
	}
	k := idKey(id)
	if l.open[k] == nil {
		l.open[k] = &openCall{id: id}
	}
	l.open[k].count++
	l.open[k].turn = string(f.Method) == "session/prompt"
	b.mu.Unlock()
	b.send(l, wholeLine(line))
}

// send writes to the connection. After a failure the connection's reader ends and
// answers what is open.
func (b *bridge) send(l *link, line []byte) {
	if _, err := l.conn.Write(line); err != nil {
		l.conn.Close()
		<-l.done
	}
}

// connect dials and, where the editor has initialized before, does so again.
func (b *bridge) connect(ctx context.Context, replay bool) (*link, error) {
	conn, err := b.dial(ctx)
	if err != nil {
		return nil, err
	}
	b.dials++
	l := &link{conn: conn, done: make(chan struct{}), open: map[string]*openCall{}, down: map[string][]byte{}, again: make(chan error, 1)}
	var frame []byte
	var f Frame
	if replay && b.init != nil && ParseFrame(b.init, &f) == nil {
		id := strconv.AppendQuote(nil, "agentconnect-initialize-"+strconv.Itoa(b.dials))
		l.replay = idKey(id)
		before, after := f.Splice(f.ID)
		frame = bytes.Join([][]byte{before, id, after, newline}, nil)
	}
	b.mu.Lock()
	if ctx.Err() != nil {
		b.mu.Unlock()
		conn.Close()
		return nil, context.Cause(ctx)
	}
	b.link = l
	b.mu.Unlock()
	go b.readLink(l)
	if frame == nil {
		return l, nil
	}
	b.send(l, frame)
	select {
	case err = <-l.again:
	case <-l.done:
		select {
		case err = <-l.again:
		default:
			err = errors.New(bridgeEnded)
		}
	}
	if err != nil {
		conn.Close()
		<-l.done
		return nil, err
	}
	return l, nil
}

// readLink relays what comes over one connection, and at its end answers what is open.
// link.done tells that it has ended.
func (b *bridge) readLink(l *link) {
	defer close(l.done)
	lines := NewLineReader(l.conn)
	var f Frame
	for {
		line, err := lines.Next()
		if len(line) > 0 && ParseFrame(line, &f) == nil && b.fromLink(l, &f) {
			b.write(wholeLine(line))
		}
		if err != nil {
			break
		}
	}
	l.conn.Close()
	var answers []byte
	b.mu.Lock()
	if b.link == l {
		b.link = nil
	}
	for _, c := range l.open {
		for range c.count {
			answers = append(answers, errorFrame(c.id, CodeInternal, bridgeEnded)...)
		}
	}
	l.open = map[string]*openCall{}
	// The questions it asked are void; an editor that knows this closes its dialogs.
	for _, id := range l.down {
		answers = append(answers, `{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":`...)
		answers = append(append(answers, id...), "}}\n"...)
	}
	b.mu.Unlock()
	b.signal()
	if len(answers) > 0 {
		b.write(answers)
	}
}

func (b *bridge) signal() {
	select {
	case b.settled <- struct{}{}:
	default:
	}
}

// fromLink notes what a frame from the supervisor opens or settles, and reports
// whether the editor gets it.
func (b *bridge) fromLink(l *link, f *Frame) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case f.IsRequest():
		id := bytes.Clone(f.Bytes(f.ID))
		l.down[idKey(id)] = id
	case f.IsResponse():
		k := idKey(f.Bytes(f.ID))
		if l.replay != "" && k == l.replay {
			l.replay = ""
			var err error
			if f.Result.Empty() {
				msg, _ := member(f.Bytes(f.Error), "message")
				text, _ := stringValue(f.Bytes(f.Error)[msg.Start:msg.End])
				err = fmt.Errorf("agent restarted, but does not initialize: %s", strings.TrimSpace(string(text)))
			}
			l.again <- err
			return false
		}
		c := l.open[k]
		if c == nil {
			return k == "null" // a complaint about a line, not an answer
		}
		if c.count--; c.count == 0 {
			delete(l.open, k)
		}
		if saysEnded(f) {
			b.leave(l)
		}
		b.signal()
	}
	return true
}

// leave takes no further request to a connection whose other end said that the runtime
// ended: the editor may send one before that end is seen. b.mu is held.
func (b *bridge) leave(l *link) {
	if b.link == l {
		b.link = nil
	}
	// Whoever says so and stays must not keep the editor's sessions.
	if half, ok := l.conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite() // it has gone already
	}
}

// linger lets answers come that the editor may still want although it has closed its
// side. A turn is not waited for: its editor is gone, and it is to be cancelled.
func (b *bridge) linger(ctx context.Context) {
	timer := time.NewTimer(lingerWait)
	defer timer.Stop()
	for {
		b.mu.Lock()
		wanted := 0
		if b.link != nil {
			for _, c := range b.link.open {
				if !c.turn {
					wanted++
				}
			}
		}
		b.mu.Unlock()
		if wanted == 0 {
			break
		}
		select {
		case <-b.settled:
			continue
		case <-ctx.Done():
		case <-timer.C:
		}
		break
	}
	b.mu.Lock()
	l := b.link
	b.mu.Unlock()
	if l == nil {
		return
	}
	half, ok := l.conn.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return
	}
	last := time.NewTimer(lastWords)
	defer last.Stop()
	select {
	case <-l.done:
	case <-last.C:
	case <-ctx.Done():
	}
}

// hangUp ends the connection and waits for its reader, which an editor that does not
// read could hold for ever.
func (b *bridge) hangUp() {
	b.mu.Lock()
	l := b.link
	b.mu.Unlock()
	if l == nil {
		return
	}
	l.conn.Close()
	timer := time.NewTimer(lastWords)
	defer timer.Stop()
	select {
	case <-l.done:
	case <-timer.C:
	}
}
