package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
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
	if e.in, err = cmd.StdinPipe(); err != nil {
		return nil, err
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
	e.in.Close()
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
	srt := os.Getenv("AGENTCONNECT_BENCH_SRT")
	if srt == "" {
		c.without = "srt is not installed: packaging/dev/npm-peer.sh"
		return c, nil
	}
	settings := filepath.Join(b.dir, "srt.json")
	if err := os.WriteFile(settings, []byte(`{"network":{"allowedDomains":["localhost","127.0.0.1"],"deniedDomains":[]},"filesystem":{"denyRead":[],"allowWrite":[],"denyWrite":[]}}`), 0o600); err != nil {
		return nil, err
	}
	if c.srt, err = begin(exec.CommandContext(ctx, srt, "--settings", settings, self, peerArg, "client", at("127.0.0.1"))); err != nil {
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

// beside says what the others reached.
func (c *contest) beside(direct, theirs string) string {
	if c.srt == nil {
		return direct + " direct"
	}
	return direct + " direct, " + theirs + " srt"
}

func (c *contest) skipped(rows []row) []row {
	if c.srt == nil {
		rows = append(rows, row{"  left out", c.without, "", "", ""})
	}
	return rows
}

func networkStreams(ctx context.Context, pairs int) ([]row, error) {
	c, err := newContest(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	const size = 256 << 20
	speed := func(ns float64) string { return fmt.Sprintf("%.0f MB/s", size/1e6/(ns/1e9)) }
	var rows []row
	for streams, limit := range map[int]string{1: "≥ 0.8", 64: ""} {
		ours, direct, theirs, err := c.compare(max(pairs/5, 3), "stream %d %d", streams, size)
		if err != nil {
			return nil, err
		}
		rows = append(rows, row{fmt.Sprintf("download, streams: %2d", streams), speed(ours), c.beside(speed(direct), speed(theirs)), ratio(direct / ours), limit})
	}
	slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.what, b.what) })
	return c.skipped(rows), nil
}

func networkConnections(ctx context.Context, pairs int) ([]row, error) {
	c, err := newContest(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	time := func(ns float64) string { return fmt.Sprintf("%.2f ms", ns/1e6) }
	ours, direct, theirs, err := c.compare(max(pairs/5, 3), "connect 100")
	if err != nil {
		return nil, err
	}
	rows := []row{{"connection to its first answer, added p50", time(ours - direct), c.beside(time(direct), time(theirs-direct)+" added by"), "", "≤ 0.3 ms"}}
	const short = 10_000
	rate := func(ns float64) string { return fmt.Sprintf("%.0f/s", short/(ns/1e9)) }
	if ours, direct, theirs, err = c.compare(1, "short %d 16", short); err != nil {
		return nil, err
	}
	return c.skipped(append(rows, row{"10,000 short connections, 16 at once", rate(ours), c.beside(rate(direct), rate(theirs)), ratio(direct / ours), ""})), nil
}

func networkMemory(ctx context.Context, _ int) ([]row, error) {
	c, err := newContest(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	pid, err := c.live.supervisor()
	if err != nil {
		return nil, err
	}
	before, err := pssOf(pid)
	if err != nil {
		return nil, err
	}
	if _, err := c.inside.say("hold 1000"); err != nil {
		return nil, err
	}
	after, err := pssOf(pid)
	if err != nil {
		return nil, err
	}
	return []row{{"supervisor under 1,000 connections, PSS", fmt.Sprintf("%.1f MB", after), fmt.Sprintf("%.1f MB before", before), "", ""}}, nil
}

// networkLarge is one download of many GB, and what the supervisor has at its end.
func networkLarge(gigabytes int) func(context.Context, int) ([]row, error) {
	return func(ctx context.Context, _ int) ([]row, error) {
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
		ns, err := c.inside.say("stream 1 %d", size)
		if err != nil {
			return nil, err
		}
		pss, err := pssOf(pid)
		if err != nil {
			return nil, err
		}
		return []row{{fmt.Sprintf("download of %d GB, nothing missing", gigabytes), fmt.Sprintf("%.0f MB/s", float64(size)/1e6/(ns/1e9)), fmt.Sprintf("supervisor's PSS after it %.1f MB", pss), "", ""}}, nil
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
