package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/figures"
	"agentconnect.md/sandbox/cmd/internal/netns"
	"agentconnect.md/sandbox/cmd/internal/peers"
)

// end is a process of this program that is told what to do.
type end struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	said bytes.Buffer // its stderr
}

func newEnd(cmd *exec.Cmd) (*end, error) {
	e := &end{cmd: cmd}
	var err error
	if cmd.Stdin == nil {
		if e.in, err = cmd.StdinPipe(); err != nil {
			return nil, err
		}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	e.out = bufio.NewReader(out)
	cmd.Stderr = &e.said
	cmd.WaitDelay = 10 * time.Second
	return e, cmd.Start()
}

// say tells it something and reads a number in return.
func (e *end) say(format string, args ...any) (float64, error) {
	if _, err := fmt.Fprintf(e.in, format+"\n", args...); err != nil {
		return 0, err
	}
	return e.number()
}

func (e *end) number() (float64, error) {
	line, err := e.out.ReadString('\n')
	if err != nil {
		e.close()
		return 0, fmt.Errorf("%s: %w: %s", e.cmd, err, e.said.Bytes())
	}
	return strconv.ParseFloat(strings.TrimSpace(line), 64)
}

func (e *end) close() {
	if e.in != nil {
		e.in.Close()
	}
	_ = e.cmd.Wait() // what went wrong was said before
}

// contest is the same client of one server three times: behind our boundary, without one, and
// behind the sandbox-runtime package from npm where that is installed.
type contest struct {
	live           *live
	inside, direct *end
	srt            *end   // nil: not there
	without        string // why
	closing        []func()
}

func (c *contest) close() {
	for i := range slices.Backward(c.closing) {
		c.closing[i]()
	}
}

func newContest(ctx context.Context) (c *contest, err error) {
	c = &contest{}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	b, err := newBed()
	if err != nil {
		return nil, err
	}
	c.closing = append(c.closing, b.close)
	self, err := b.self()
	if err != nil {
		return nil, err
	}
	begin := func(cmd *exec.Cmd) (*end, error) {
		e, err := newEnd(cmd)
		if err == nil {
			c.closing = append(c.closing, e.close)
		}
		return e, err
	}
	server, err := begin(exec.CommandContext(ctx, self, peerArg, "server"))
	if err != nil {
		return nil, err
	}
	port, err := server.number()
	if err != nil {
		return nil, err
	}
	at := func(host string) string { return fmt.Sprintf("%s:%.0f", host, port) }
	if c.direct, err = begin(exec.CommandContext(ctx, self, peerArg, "client", at("127.0.0.1"))); err != nil {
		return nil, err
	}
	if c.live, err = b.live(ctx, "--network", "allowlist", "--allow", at("host"), "--grant", self+":ro"); err != nil {
		return nil, err
	}
	c.closing = append(c.closing, c.live.stop)
	if c.inside, err = begin(c.live.command("agent", "exec", "a", "--", self, peerArg, "client", at("host"))); err != nil {
		return nil, err
	}
	cmd, err := b.srt(ctx, self, peerArg, "client", at("127.0.0.1"))
	if errors.Is(err, errNoPeer) {
		c.without = err.Error()
		return c, nil
	}
	if err != nil {
		return nil, err
	}
	if c.srt, err = begin(cmd); err != nil {
		return nil, err
	}
	if _, err := c.srt.say("connect 1"); err != nil {
		c.giveUp(err)
	}
	return c, nil
}

// giveUp leaves the peer out.
func (c *contest) giveUp(err error) {
	why, _, _ := strings.Cut(err.Error(), "\n")
	if _, after, ok := strings.Cut(why, peerArg+" client "); ok {
		why = after // less the command
	}
	c.srt, c.without = nil, "srt did not do it: "+why
}

// compare has each do the same, n times in turn, and gives the median of what each said, in
// ns; theirs is 0 where the peer is not there.
func (c *contest) compare(n int, format string, args ...any) (ours, direct, theirs float64, err error) {
	said := map[*end][]float64{}
	for range n {
		for _, e := range []*end{c.inside, c.direct, c.srt} {
			if e == nil {
				continue
			}
			v, err := e.say(format, args...)
			switch {
			case err != nil && e == c.srt: // what the peer cannot do stops nobody else
				c.giveUp(err)
				continue
			case err != nil:
				return 0, 0, 0, err
			}
			said[e] = append(said[e], v)
		}
	}
	if c.srt != nil {
		theirs = median(said[c.srt])
	}
	return median(said[c.inside]), median(said[c.direct]), theirs, nil
}

// peers are what the others reached. Where one is missing the note says why.
func (c *contest) peers(f figures.Figure, direct, theirs float64) figures.Figure {
	peers := []figures.Peer{{Name: "direct", Value: direct}}
	if c.srt != nil {
		peers = append(peers, figures.Peer{Name: "sandbox-runtime", Value: theirs})
	} else {
		f.Note = c.without
	}
	return f.Beside(peers...)
}

func networkStreams(ctx context.Context, pairs int) ([]figures.Figure, error) {
	c, err := newContest(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	const size = 256 << 20
	speed := func(ns float64) float64 { return size / 1e6 / (ns / 1e9) }
	var all []figures.Figure
	for _, n := range []struct {
		word              string // for the server
		streams           int
		key, what, wanted string
	}{
		{"s", 1, "network/streams/1", "download, streams: 1", "≥ 0.8"},
		{"s", 64, "network/streams/64", "download, streams: 64", ""},
		{"u", 1, "network/streams/unpaced/1", "download, streams: 1, from a server that does not pace", ""},
	} {
		ours, direct, theirs, err := c.compare(max(pairs/5, 3), "stream %s %d %d", n.word, n.streams, size)
		if err != nil {
			return nil, err
		}
		f := figures.Figure{Key: n.key, What: n.what, Unit: "MB/s", Ours: speed(ours), Wanted: n.wanted}
		if theirs != 0 {
			theirs = speed(theirs)
		}
		all = append(all, c.peers(f, speed(direct), theirs))
	}
	return all, nil
}

func networkConnections(ctx context.Context, pairs int) ([]figures.Figure, error) {
	c, err := newContest(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	ours, direct, theirs, err := c.compare(max(pairs/5, 3), "connect 100")
	if err != nil {
		return nil, err
	}
	set := figures.Figure{Key: "network/connections/added", What: "connection to its first answer, added p50", Unit: "ms", Ours: (ours - direct) / 1e6, Wanted: "≤ 0.3 ms",
		Peers: []figures.Peer{{Name: "direct, whole", Value: direct / 1e6}}}
	if c.srt != nil {
		set.Peers = append(set.Peers, figures.Peer{Name: "sandbox-runtime, added", Value: (theirs - direct) / 1e6})
	}
	const short = 10_000
	rate := func(ns float64) float64 { return short / (ns / 1e9) }
	if ours, direct, theirs, err = c.compare(1, "short %d 16", short); err != nil {
		return nil, err
	}
	if theirs != 0 {
		theirs = rate(theirs)
	}
	many := figures.Figure{Key: "network/connections/short", What: "10,000 short connections, 16 at once", Unit: "/s", Ours: rate(ours)}
	return []figures.Figure{set, c.peers(many, rate(direct), theirs)}, nil
}

func networkMemory(ctx context.Context, _ int) ([]figures.Figure, error) {
	c, err := newContest(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	pid, err := c.live.supervisor()
	if err != nil {
		return nil, err
	}
	before, err := peers.PSS(pid)
	if err != nil {
		return nil, err
	}
	if _, err := c.inside.say("hold 1000"); err != nil {
		return nil, err
	}
	after, err := peers.PSS(pid)
	if err != nil {
		return nil, err
	}
	return []figures.Figure{{Key: "network/memory/1000", What: "supervisor under 1,000 connections, PSS", Unit: "MB", Ours: after, Peers: []figures.Peer{{Name: "itself before", Value: before}}}}, nil
}

// networkLarge is one download of many GB, and what the supervisor has at its end.
func networkLarge(gigabytes int) func(context.Context, int) ([]figures.Figure, error) {
	return func(ctx context.Context, _ int) ([]figures.Figure, error) {
		c, err := newContest(ctx)
		if err != nil {
			return nil, err
		}
		defer c.close()
		pid, err := c.live.supervisor()
		if err != nil {
			return nil, err
		}
		size := int64(gigabytes) * 1e9
		ns, err := c.inside.say("stream s 1 %d", size)
		if err != nil {
			return nil, err
		}
		pss, err := peers.PSS(pid)
		if err != nil {
			return nil, err
		}
		return []figures.Figure{{Key: "network/large", What: fmt.Sprintf("download of %d GB, nothing missing", gigabytes), Unit: "MB/s", Ours: float64(size) / 1e6 / (ns / 1e9),
			Note: fmt.Sprintf("the supervisor's PSS after it: %.1f MB", pss)}}, nil
	}
}

// self copies this program to where an agent may see it, which is never where ours lie.
func (b *bed) self() (string, error) {
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return "", err
	}
	path := filepath.Join(b.dir, "peer")
	return path, os.WriteFile(path, program, 0o700)
}

// live is a running agent with a daemon of its own.
type live struct {
	command func(args ...string) *exec.Cmd
	daemon  *exec.Cmd
}

func (l *live) stop() {
	l.daemon.Process.Signal(os.Interrupt)
	_ = l.daemon.Wait()
}

// supervisor is its supervisor's process.
func (l *live) supervisor() (int, error) {
	out, err := l.command("status", "--json").Output()
	if err != nil {
		return 0, fmt.Errorf("status: %w", err)
	}
	var st control.Status
	if err := json.Unmarshal(out, &st); err != nil {
		return 0, err
	}
	for _, a := range st.Agents {
		if a.PID != 0 {
			return a.PID, nil
		}
	}
	return 0, fmt.Errorf("no supervisor in %s", out)
}

// live adds and starts the agent "a" of the selftest runtime.
func (b *bed) live(ctx context.Context, flags ...string) (*live, error) {
	cli := filepath.Join(filepath.Dir(b.programs.Guest), "agentconnect")
	if _, err := os.Stat(cli); err != nil {
		return nil, err
	}
	root := filepath.Join(b.dir, "root")
	l := &live{command: func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, cli, append([]string{"--root", root}, args...)...)
		// Short, since a socket's path has a limit.
		cmd.Env = append(os.Environ(), "XDG_RUNTIME_DIR=")
		return cmd
	}}
	if out, err := l.command(append([]string{"agent", "add", "a", "--runtime", "selftest"}, flags...)...).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("agent add: %w: %s", err, out)
	}
	l.daemon = l.command("run", "--supervisor", "direct")
	var said bytes.Buffer
	l.daemon.Stderr = &said
	if err := l.daemon.Start(); err != nil {
		return nil, err
	}
	for {
		out, err := l.command("agent", "start", "a").CombinedOutput()
		if err == nil {
			return l, nil
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 75 || ctx.Err() != nil {
			l.stop()
			return nil, fmt.Errorf("agent start: %w: %s%s", err, out, said.Bytes())
		}
	}
}

// unpaced has c send as on a host that is not set to pace.
func unpaced(c net.Conn) error {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return fmt.Errorf("%T", c)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, netns.Unpaced)
	})
	return errors.Join(cerr, err)
}
