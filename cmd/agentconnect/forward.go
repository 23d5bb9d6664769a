// forward: a port of this machine that leads to a server inside an agent's boundary.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/egress"
	"agentconnect.md/sandbox/cmd/internal/tcp"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

func (a *app) forward() *cobra.Command {
	return &cobra.Command{
		Use: "forward ID [HOSTPORT:]PORT", Short: "lead a port of this machine to a server inside the agent's boundary", Args: a.idArgs(2, 2),
		Long: "Listens on 127.0.0.1 and ::1 of this machine, port HOSTPORT (PORT without one; 0 for any that is free), and leads each connection to\n" +
			"the server that listens on PORT of 127.0.0.1 or ::1 inside the agent's boundary. Ends with Ctrl-C, or with the agent.\n" +
			"Every user of this machine can connect to HOSTPORT.",
		RunE: func(c *cobra.Command, args []string) error {
			hostPort, port, err := forwardPorts(args[1])
			if err != nil {
				return &usageError{text: err.Error(), see: c.CommandPath()}
			}
			where, err := a.execWhere(args[0])
			if err != nil {
				return err
			}
			s, err := a.site()
			if err != nil {
				return err
			}
			// A socket for commands alone would be made for an agent that does not run.
			st, err := s.client().Status(c.Context())
			if err != nil {
				return err
			}
			for _, ag := range st.Agents {
				if ag.ID == args[0] && ag.State != control.StateRunning {
					return fmt.Errorf("agent %s is not running: nothing listens inside; start it with `agentconnect agent start %s`", ag.ID, ag.ID)
				}
			}
			return a.forwardPort(c.Context(), where, args[0], hostPort, port)
		},
	}
}

// forwardPorts reads [HOSTPORT:]PORT.
func forwardPorts(s string) (hostPort, port uint16, err error) {
	host, inside, two := strings.Cut(s, ":")
	if !two {
		inside = host
	}
	n, err := strconv.ParseUint(inside, 10, 16)
	if err != nil || n == 0 {
		return 0, 0, fmt.Errorf("%q: write [HOSTPORT:]PORT, as in 8080 or 3000:8080", s)
	}
	m, err := strconv.ParseUint(host, 10, 16)
	if err != nil {
		return 0, 0, fmt.Errorf("%q: write [HOSTPORT:]PORT, as in 8080 or 3000:8080", s)
	}
	return uint16(m), uint16(n), nil
}

// forwardPort listens and forwards until ctx or the agent ends.
func (a *app) forwardPort(ctx context.Context, at where, id string, hostPort, port uint16) error {
	c, extra, err := reach(ctx, at, wire.Request{Op: wire.OpForward, Client: "forward", Port: port})
	closeAll(extra)
	if err != nil {
		return err
	}
	f := &forwarding{c: c, answers: make(chan forwarded), say: func(err error) {
		text := fmt.Sprintf("port %d of agent %s: %s", port, id, oneLine(err.Error()))
		if !a.json || !a.saidJSON(map[string]string{"warning": text}) {
			fmt.Fprintln(a.err, "agentconnect: "+text)
		}
	}}
	ls, err := a.listenLoopback(ctx, hostPort)
	if err != nil {
		c.Close()
		return err
	}
	addr := ls[0].Addr().String()
	if err := a.say(map[string]any{"agent": id, "port": port, "address": addr}, "%s leads to port %d of agent %s; Ctrl-C ends it", addr, port, id); err != nil {
		c.Close()
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	all.Go(func() { cancel(f.read(ctx, id)) })
	for _, l := range ls {
		all.Go(func() { cancel(f.serve(ctx, l)) })
	}
	<-ctx.Done()
	for _, l := range ls {
		l.Close()
	}
	c.Close()
	f.cut()
	all.Wait()
	var signalled daemon.SignalError
	err = context.Cause(ctx)
	if errors.As(err, &signalled) {
		return nil // that is how it ends
	}
	return err
}

// listenLoopback listens on a port of both loopbacks, or of that which there is.
func (a *app) listenLoopback(ctx context.Context, port uint16) ([]net.Listener, error) {
	var lc net.ListenConfig
	four, err := lc.Listen(ctx, "tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("port %d of this machine is taken; give another one: `agentconnect forward ID HOSTPORT:PORT`, 0 for any", port)
	}
	if errors.Is(err, syscall.EACCES) {
		return nil, fmt.Errorf("port %d of this machine is for root; give another one: `agentconnect forward ID HOSTPORT:PORT`", port)
	}
	if err != nil {
		return nil, err
	}
	ls := []net.Listener{four}
	// Where the port is taken there, or IPv6 is missing, 127.0.0.1 does.
	six, err := lc.Listen(ctx, "tcp6", net.JoinHostPort("::1", strconv.Itoa(four.Addr().(*net.TCPAddr).Port)))
	switch {
	case err == nil:
		ls = append(ls, six)
	case errors.Is(err, syscall.EADDRINUSE):
		a.warn("[::1]:%d is another program's, maybe another user's: connect to %s, since localhost may lead to that one", four.Addr().(*net.TCPAddr).Port, four.Addr())
	}
	return ls, nil
}

// forwarded is a connection that came out, or why there is none.
type forwarded struct {
	conn *net.TCPConn
	err  error
}

// forwarding is one forward. Connections are asked for one after the other.
type forwarding struct {
	c       *net.UnixConn
	answers chan forwarded
	say     func(error)

	asking sync.Mutex
	mu     sync.Mutex
	open   map[*net.TCPConn]bool
	over   bool
}

// read takes the answers, until the agent ends.
func (f *forwarding) read(ctx context.Context, id string) error {
	for {
		line, files, err := readLine(f.c)
		if err != nil {
			closeAll(files)
			return fmt.Errorf("agent %s has ended, and the forward with it", id)
		}
		var answer wire.Forwarded
		got := forwarded{err: json.Unmarshal(line, &answer)}
		if got.err == nil && answer.Error != "" {
			got.err = errors.New(answer.Error)
		}
		if got.err == nil && len(files) == 1 {
			var conn net.Conn
			if conn, got.err = net.FileConn(files[0]); got.err == nil {
				var ok bool
				if got.conn, ok = conn.(*net.TCPConn); !ok {
					conn.Close()
				}
			}
		}
		closeAll(files)
		if got.err == nil && got.conn == nil {
			got.err = errors.New("the supervisor sent no connection")
		}
		select {
		case f.answers <- got:
		case <-ctx.Done():
			if got.conn != nil {
				got.conn.Close()
			}
			return ctx.Err()
		}
	}
}

// serve accepts connections and joins each to one that leads inside.
func (f *forwarding) serve(ctx context.Context, l net.Listener) error {
	var all sync.WaitGroup
	defer all.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return ctx.Err()
			}
			f.say(err)
			select { // out of descriptors: wait for one to come free
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		all.Go(func() {
			out := c.(*net.TCPConn)
			defer out.Close()
			in, err := f.ask(ctx)
			if err != nil {
				if ctx.Err() == nil {
					f.say(err)
				}
				tcp.Reset(out) // a refusal, not a clean end
				return
			}
			defer in.Close()
			if f.hold(in, out) {
				egress.Join(in, out)
				f.release(in, out)
			}
		})
	}
}

// ask asks for one connection.
func (f *forwarding) ask(ctx context.Context) (*net.TCPConn, error) {
	f.asking.Lock()
	defer f.asking.Unlock()
	if _, err := f.c.Write([]byte{1}); err != nil {
		return nil, err
	}
	select {
	case a := <-f.answers:
		return a.conn, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// hold remembers open connections, so that cut can end them; false: it has been.
func (f *forwarding) hold(conns ...*net.TCPConn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.open == nil {
		f.open = map[*net.TCPConn]bool{}
	}
	for _, c := range conns {
		f.open[c] = true
	}
	return !f.over
}

func (f *forwarding) release(conns ...*net.TCPConn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range conns {
		delete(f.open, c)
	}
}

// cut ends what is open.
func (f *forwarding) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
	for c := range f.open {
		tcp.Reset(c)
	}
}
