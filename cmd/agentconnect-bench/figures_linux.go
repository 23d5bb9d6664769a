package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"agentconnect.md/sandbox/cmd/internal/acp"
	"agentconnect.md/sandbox/cmd/internal/figures"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/peers"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

func measurements(gigabytes int) []measurement {
	all := []measurement{
		{"start", func(ctx context.Context, pairs int) ([]figures.Figure, error) {
			return start(ctx, pairs, 0, figures.Figure{Key: "start/default", What: "boundary start, default view", Wanted: "≤ 1.25"})
		}},
		{"mounts", func(ctx context.Context, pairs int) ([]figures.Figure, error) {
			return start(ctx, max(pairs/5, 3), 500, figures.Figure{Key: "mounts/500", What: "boundary start, 500 more mounts", Wanted: "≤ 0.2"})
		}},
		{"trees", startsInTrees},
		{"exec", execTrip},
		{"probe", probeTime},
		{"relay/latency", relayLatency},
		{"relay/throughput", relayThroughput},
		{"memory", memory},
		{"network/streams", networkStreams},
		{"network/connections", networkConnections},
		{"network/memory", networkMemory},
		{"size", sizes},
	}
	if gigabytes > 0 {
		all = append(all, measurement{"network/large", networkLarge(gigabytes)})
	}
	return all
}

// bed is an agent in a home of its own, gone after the measurement.
type bed struct {
	programs programs.Set
	policy   sandbox.Policy
	dir      string
}

func newBed() (*bed, error) {
	set, err := programs.Find()
	if err != nil {
		return nil, err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(home, "agentconnect-bench-")
	if err != nil {
		return nil, err
	}
	agent := filepath.Join(dir, ".agentconnect", "agents", "a")
	for _, d := range []string{"home", "tmp", "memory", "workspace"} {
		if err := os.MkdirAll(filepath.Join(agent, d), 0o700); err != nil {
			return nil, err
		}
	}
	return &bed{programs: set, dir: dir, policy: sandbox.Policy{
		Agent: "a", UID: os.Getuid(), GID: os.Getgid(), User: "bench", Home: dir, Root: filepath.Join(dir, ".agentconnect"),
		AgentDir: agent, HomeDir: agent + "/home", TmpDir: agent + "/tmp", MemoryDir: agent + "/memory", Workspace: agent + "/workspace",
		Read: sandbox.ReadSystem, Guest: set.Guest, Network: sandbox.NetworkNone, DieWithParent: true,
	}}, nil
}

// warm starts the boundary once: the first start makes the mount points in the private
// home that bubblewrap alone does not make.
func (b *bed) warm(ctx context.Context) (*sandbox.Plan, error) {
	plan, err := sandbox.Compile(b.policy, hostfacts.Host{})
	if err != nil {
		return nil, err
	}
	s := launch.Start{
		Launcher: b.programs.Launcher, Bwrap: b.programs.Bwrap, Compile: func() (*sandbox.Plan, error) { return plan, nil },
		Argv: []string{"/bin/true"}, Dir: b.policy.Workspace,
	}
	p, err := s.Run(ctx)
	if err != nil {
		return nil, err
	}
	<-p.Done()
	return plan, nil
}

func (b *bed) close() { os.RemoveAll(b.dir) }

// start measures from the launcher's start to the first byte that the program inside
// writes, beside bubblewrap alone making the same mounts.
func start(ctx context.Context, pairs, extra int, f figures.Figure) ([]figures.Figure, error) {
	b, err := newBed()
	if err != nil {
		return nil, err
	}
	defer b.close()
	for i := range extra {
		dir := filepath.Join(b.dir, "many", strconv.Itoa(i))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
		b.policy.Grants = append(b.policy.Grants, sandbox.Grant{Path: dir, Access: sandbox.ReadOnly})
	}
	began := time.Now()
	plan, err := sandbox.Compile(b.policy, hostfacts.Host{})
	if err != nil {
		return nil, err
	}
	compiled := time.Since(began)
	s := launch.Start{
		Launcher: b.programs.Launcher, Bwrap: b.programs.Bwrap, Compile: func() (*sandbox.Plan, error) { return plan, nil },
		BwrapIs: launch.AskBwrap(ctx, b.programs.Bwrap, wire.BwrapIs{}), // as a supervisor has it from the daemon
		Argv:    []string{"/bin/echo", "x"}, Env: []string{"PATH=/usr/bin:/bin"}, Dir: b.policy.Workspace,
	}
	args := append(rawArgs(plan), "--", "/bin/echo", "x")
	var ours, peers []float64
	for range pairs {
		o, err := untilFirstByte(func(w *os.File) (func(), error) {
			s.Stdout, s.Stderr = w, os.Stderr
			p, err := s.Run(ctx)
			if err != nil {
				return nil, err
			}
			return func() { <-p.Done() }, nil
		})
		if err != nil {
			return nil, err
		}
		p, err := untilFirstByte(func(w *os.File) (func(), error) {
			cmd := exec.CommandContext(ctx, b.programs.Bwrap, args...)
			cmd.Stdout, cmd.Stderr = w, os.Stderr
			if err := cmd.Start(); err != nil {
				return nil, err
			}
			return func() { _ = cmd.Wait() }, nil // bubblewrap's end was its output's
		})
		if err != nil {
			return nil, err
		}
		ours, peers = append(ours, o), append(peers, p)
	}
	f.Unit, f.Ours = "ms", median(ours)
	f.Note = fmt.Sprintf("%d pairs; compiling the plan of %d steps takes %.1f ms besides", pairs, len(plan.Mounts), float64(compiled.Microseconds())/1e3)
	f = f.Beside(figures.Peer{Name: "bwrap, same mounts", Value: median(peers)})
	if extra > 0 {
		return []figures.Figure{f}, nil
	}
	theirs, err := b.besidePeer(ctx, pairs, median(ours))
	return []figures.Figure{f, theirs}, err
}

// rawArgs is what bubblewrap is given, as it is started here.
func rawArgs(plan *sandbox.Plan) []string { return append(peers.Bwrap(plan), "--die-with-parent") }

// untilFirstByte gives the milliseconds from the start to the first byte written.
func untilFirstByte(start func(*os.File) (func(), error)) (float64, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer r.Close()
	began := time.Now()
	wait, err := start(w)
	w.Close()
	if err != nil {
		return 0, err
	}
	_, err = r.Read(make([]byte, 16))
	took := time.Since(began)
	wait()
	if err != nil {
		return 0, fmt.Errorf("the program wrote nothing: %w", err)
	}
	return float64(took.Microseconds()) / 1e3, nil
}

// execTrip measures `agentconnect agent exec ID -- true`, all of it, beside bubblewrap
// alone running true.
func execTrip(ctx context.Context, pairs int) ([]figures.Figure, error) {
	b, err := newBed()
	if err != nil {
		return nil, err
	}
	defer b.close()
	l, err := b.live(ctx)
	if err != nil {
		return nil, err
	}
	defer l.stop()
	return b.besideTrue(ctx, pairs, figures.Figure{Key: "exec/true", What: "`agentconnect agent exec ID -- true`, whole"},
		func() *exec.Cmd { return l.command("agent", "exec", "a", "--", "true") })
}

// besideTrue measures a whole command in turns with bubblewrap running true.
func (b *bed) besideTrue(ctx context.Context, pairs int, f figures.Figure, command func() *exec.Cmd) ([]figures.Figure, error) {
	plan, err := b.warm(ctx)
	if err != nil {
		return nil, err
	}
	args := append(rawArgs(plan), "--", "/bin/true")
	var ours, theirs []float64
	for range pairs {
		o, err := took(command())
		if err != nil {
			return nil, err
		}
		p, err := took(exec.CommandContext(ctx, b.programs.Bwrap, args...))
		if err != nil {
			return nil, err
		}
		ours, theirs = append(ours, o), append(theirs, p)
	}
	f.Unit, f.Ours = "ms", median(ours)
	return []figures.Figure{f.Beside(figures.Peer{Name: "bwrap true, same mounts", Value: median(theirs)})}, nil
}

func took(cmd *exec.Cmd) (float64, error) {
	began := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("%s: %w: %s", cmd.Path, err, out)
	}
	return float64(time.Since(began).Microseconds()) / 1e3, nil
}

// relay is a broker between pipes and a Unix socket, as a supervisor has it.
type relay struct {
	w      *os.File      // the runtime's stdout
	r      *bufio.Reader // the client's side
	near   net.Conn      // what r reads
	finish func()
}

type everywhere struct{}

func (everywhere) CheckDir(p string) (string, error)          { return p, nil }
func (everywhere) CheckFile(p string, _ bool) (string, error) { return p, nil }

// socketPair is two ends of a connection of a Unix socket.
func socketPair(ctx context.Context) (near, far net.Conn, err error) {
	dir, err := os.MkdirTemp("", "agentconnect-bench-")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(dir)
	l, err := new(net.ListenConfig).Listen(ctx, "unix", filepath.Join(dir, "s"))
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	if near, err = new(net.Dialer).DialContext(ctx, "unix", l.Addr().String()); err != nil {
		return nil, nil, err
	}
	far, err = l.Accept()
	return near, far, err
}

func newRelay(ctx context.Context) (*relay, error) {
	inR, inW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	near, far, err := socketPair(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	broker := acp.NewBroker(acp.Options{RuntimeIn: inW, RuntimeOut: outR, Sandboxed: true, Paths: everywhere{}})
	ended := make(chan error, 1)
	go func() { ended <- broker.Run(ctx) }()
	go func() { _ = broker.Attach(ctx, far, "bench") }() // ends with finish
	runtimeIn, client := bufio.NewReader(inR), bufio.NewReaderSize(near, 64<<10)
	for _, step := range []struct {
		w    io.Writer
		r    *bufio.Reader
		line string
	}{
		{near, runtimeIn, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}`},
		{outW, client, `{"jsonrpc":"2.0","id":1,"result":{}}`},
		{near, runtimeIn, `{"jsonrpc":"2.0","id":2,"method":"session/new","params":{"cwd":"/ws","mcpServers":[]}}`},
		{outW, client, `{"jsonrpc":"2.0","id":2,"result":{"sessionId":"s"}}`},
	} {
		if _, err := io.WriteString(step.w, step.line+"\n"); err != nil {
			cancel()
			return nil, err
		}
		if _, err := step.r.ReadString('\n'); err != nil {
			cancel()
			return nil, err
		}
	}
	return &relay{w: outW, r: client, near: near, finish: func() {
		cancel()
		_ = <-ended // it was cancelled
		broker.Fail("over")
		near.Close()
	}}, nil
}

func relayLatency(ctx context.Context, _ int) ([]figures.Figure, error) {
	rel, err := newRelay(ctx)
	if err != nil {
		return nil, err
	}
	defer rel.finish()
	pr, pw, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer pr.Close()
	defer pw.Close()
	line := update(frameSize)
	pipe := bufio.NewReaderSize(pr, 64<<10)
	buf := make([]byte, len(line))
	one := func(w io.Writer, r io.Reader) (float64, error) {
		began := time.Now()
		if _, err := w.Write(line); err != nil {
			return 0, err
		}
		_, err := io.ReadFull(r, buf)
		return float64(time.Since(began).Nanoseconds()) / 1e3, err
	}
	var ours, peers []float64
	for range 5000 {
		o, err := one(rel.w, rel.r)
		if err != nil {
			return nil, err
		}
		p, err := one(pw, pipe)
		if err != nil {
			return nil, err
		}
		ours, peers = append(ours, o), append(peers, p)
	}
	at := func(v []float64, q float64) float64 {
		slices.Sort(v)
		return v[int(float64(len(v)-1)*q)]
	}
	added := func(key string, q float64, wanted string) figures.Figure {
		return figures.Figure{Key: "relay/latency/" + key, What: "ACP relay, 4 KB frame, added " + key, Unit: "µs", Ours: at(ours, q) - at(peers, q), Wanted: wanted,
			Peers: []figures.Peer{{Name: "a pipe alone", Value: at(peers, q)}}}
	}
	return []figures.Figure{added("p50", .5, "≤ 60 µs"), added("p99", .99, "")}, nil
}

// relayThroughput has one process write frames and another read them, as a runtime and an editor
// do, with nothing between but what is measured.
func relayThroughput(ctx context.Context, _ int) ([]figures.Figure, error) {
	rel, err := newRelay(ctx)
	if err != nil {
		return nil, err
	}
	defer rel.finish()
	pr, pw, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer pr.Close()
	defer pw.Close()
	near, far, err := socketPair(ctx)
	if err != nil {
		return nil, err
	}
	defer near.Close()
	defer far.Close()
	cr, cw, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer cw.Close()
	go func() {
		defer cr.Close()
		for block := make([]byte, 64<<10); ; {
			n, err := cr.Read(block)
			if err != nil {
				return
			}
			if _, err := far.Write(block[:n]); err != nil {
				return
			}
		}
	}()
	relayed, err := rel.near.(*net.UnixConn).File()
	if err != nil {
		return nil, err
	}
	defer relayed.Close()
	copied, err := near.(*net.UnixConn).File()
	if err != nil {
		return nil, err
	}
	defer copied.Close()
	var ours, peers, copies []float64
	for range 7 {
		for _, way := range []struct {
			w, r *os.File
			took *[]float64
		}{{rel.w, relayed, &ours}, {pw, pr, &peers}, {cw, copied, &copies}} {
			speed, err := streamed(ctx, way.w, way.r)
			if err != nil {
				return nil, err
			}
			*way.took = append(*way.took, speed)
		}
	}
	f := figures.Figure{Key: "relay/throughput", What: "ACP relay, 4 KB frames, from process to process", Unit: "MB/s", Ours: median(ours), Wanted: "≥ 0.5",
		Note: "whoever copies from a pipe to a socket has the second peer's speed before it looks at a byte"}
	return []figures.Figure{f.Beside(figures.Peer{Name: "a pipe", Value: median(peers)}, figures.Peer{Name: "a pipe copied to a socket", Value: median(copies)})}, nil
}

// streamed is how many MB/s go from a process that writes frames to w to one that reads r.
func streamed(ctx context.Context, w, r *os.File) (float64, error) {
	const count = 40_000
	size := len(update(frameSize)) * count
	read := exec.CommandContext(ctx, "/proc/self/exe", peerArg, "drain", strconv.Itoa(size))
	read.Stdin = r
	reader, err := newEnd(read)
	if err != nil {
		return 0, err
	}
	write := exec.CommandContext(ctx, "/proc/self/exe", peerArg, "frames", strconv.Itoa(count))
	write.Stdout, write.Stderr = w, os.Stderr
	start, err := write.StdinPipe()
	if err == nil {
		err = write.Start()
	}
	if err != nil {
		return 0, errors.Join(err, read.Process.Kill())
	}
	if _, err := reader.number(); err != nil { // it is ready
		return 0, err
	}
	began := time.Now()
	start.Close()
	if _, err := reader.number(); err != nil {
		return 0, err
	}
	took := time.Since(began)
	reader.close()
	return float64(size) / 1e6 / took.Seconds(), write.Wait()
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[len(s)/2]
}
