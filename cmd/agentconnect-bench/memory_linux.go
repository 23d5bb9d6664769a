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
	"strconv"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/figures"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/peers"
	"agentconnect.md/sandbox/cmd/internal/rest"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// spec has a supervisor start argv as the runtime.
func (b *bed) spec(argv ...string) wire.Spec {
	return wire.Spec{
		Version: wire.Version, Agent: "a", Sandboxed: true, Policy: b.policy, Argv: argv,
		Env: []string{"PATH=/usr/bin:/bin", "HOME=" + b.dir}, Dir: b.policy.Workspace, Socket: filepath.Join(b.dir, "a.sock"),
		Launcher: b.programs.Launcher, Bwrap: b.programs.Bwrap, StopGrace: wire.Duration(time.Second), KillGrace: wire.Duration(time.Second),
	}
}

// supervise starts a supervisor.
func (b *bed) supervise(ctx context.Context, spec wire.Spec, env ...string) (*exec.Cmd, error) {
	sealed, err := launch.Sealed("spec", spec)
	if err != nil {
		return nil, err
	}
	defer sealed.Close()
	cmd := exec.CommandContext(ctx, b.programs.Supervisor)
	cmd.Env = append([]string{}, env...) // never nil, which would be ours
	cmd.ExtraFiles = []*os.File{sealed}
	return cmd, cmd.Start()
}

func stopped(cmd *exec.Cmd) {
	cmd.Process.Signal(os.Interrupt)
	_ = cmd.Wait()
}

// memory measures a supervisor with its runtime and one attached client at rest.
func memory(ctx context.Context, _ int) ([]figures.Figure, error) {
	b, err := newBed()
	if err != nil {
		return nil, err
	}
	defer b.close()
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(b.dir, "n"), Net: "unixgram"})
	if err != nil {
		return nil, err
	}
	defer notify.Close()
	spec := b.spec(sandbox.GuestPath, "selftest")
	cmd, err := b.supervise(ctx, spec, "NOTIFY_SOCKET="+filepath.Join(b.dir, "n"))
	if err != nil {
		return nil, err
	}
	defer stopped(cmd)
	buf := make([]byte, 4096)
	if err := notify.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return nil, err
	}
	for {
		n, err := notify.Read(buf)
		if err != nil {
			return nil, fmt.Errorf("the supervisor did not become ready: %w", err)
		}
		if bytes.Contains(buf[:n], []byte("READY=1")) {
			break
		}
	}
	c, err := new(net.Dialer).DialContext(ctx, "unix", spec.Socket)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	hello, err := json.Marshal(wire.Request{Version: wire.Version, Op: wire.OpAttach, Client: "bench"})
	if err != nil {
		return nil, err
	}
	r := bufio.NewReader(c)
	for _, line := range []string{
		string(hello), `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}`,
		`{"jsonrpc":"2.0","id":2,"method":"session/new","params":{"cwd":"` + spec.Dir + `","mcpServers":[]}}`,
	} {
		if _, err := io.WriteString(c, line+"\n"); err != nil {
			return nil, err
		}
		if _, err := r.ReadString('\n'); err != nil {
			return nil, err
		}
	}
	used, err := peers.PSS(cmd.Process.Pid)
	if err != nil {
		return nil, err
	}
	select { // that is what rest is; a start is over a second after it is said to be
	case <-time.After(rest.After + 2*time.Second):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	supervisor, err := peers.PSS(cmd.Process.Pid)
	if err != nil {
		return nil, err
	}
	whole, err := around(cmd.Process.Pid, "guest")
	if err != nil {
		return nil, err
	}
	agent := figures.Figure{Key: "memory/agent", What: "memory added by an agent at rest, PSS without the runtime's", Unit: "MB", Ours: whole, Wanted: "≤ 12 MB"}
	per := figures.Figure{Key: "memory/sandbox-runtime", What: "the same, beside sandbox-runtime's around a command", Unit: "MB", Ours: whole, Wanted: "≤ 0.167"}
	switch theirs, err := b.theirMemory(ctx); {
	case errors.Is(err, errNoPeer):
		per.Note, per.Wanted = err.Error(), ""
	case err != nil:
		return nil, err
	default:
		per = per.Beside(figures.Peer{Name: "sandbox-runtime", Value: theirs})
	}
	return []figures.Figure{{Key: "memory/supervisor", What: "supervisor at rest, one client attached, PSS", Unit: "MB", Ours: supervisor, Wanted: "≤ 8 MB",
		Peers: []figures.Peer{{Name: "itself when the session is just set up", Value: used}}}, agent, per}, nil
}

// theirMemory is what sandbox-runtime has around a command that waits.
func (b *bed) theirMemory(ctx context.Context) (float64, error) {
	self, err := b.self()
	if err != nil {
		return 0, err
	}
	cmd, err := b.srt(ctx, self, peerArg, "client", "127.0.0.1:1")
	if err != nil {
		return 0, err
	}
	cmd.Env = append(os.Environ(), "HTTPS_PROXY=") // it is to wait, not to dial
	e, err := newEnd(cmd)
	if err != nil {
		return 0, err
	}
	defer e.close()
	if _, err := e.say("rest"); err != nil {
		return 0, err
	}
	return around(cmd.Process.Pid, filepath.Base(self))
}

// around is the memory of a process and all below it, in MB, but for what runs the program of that
// name: the one that all this is for.
func around(pid int, but string) (float64, error) {
	children := map[int][]int{}
	names := map[int]string{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	for _, entry := range entries {
		stat, err := os.ReadFile("/proc/" + entry.Name() + "/stat")
		if err != nil {
			continue // no process, or one that has ended
		}
		open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
		fields := strings.Fields(string(stat[end+1:]))
		id, err := strconv.Atoi(entry.Name())
		if err != nil || len(fields) < 2 {
			continue
		}
		parent, err := strconv.Atoi(fields[1])
		if err != nil {
			return 0, err
		}
		children[parent], names[id] = append(children[parent], id), string(stat[open+1:end])
	}
	var sum float64
	found := false
	for todo := []int{pid}; len(todo) > 0; {
		id := todo[0]
		todo = append(todo[1:], children[id]...)
		if names[id] == but && len(children[id]) == 0 {
			found = true
			continue
		}
		pss, err := peers.PSS(id)
		if err != nil {
			return 0, err
		}
		sum += pss
	}
	if !found {
		return 0, fmt.Errorf("%s does not run below process %d", but, pid)
	}
	return sum, nil
}
