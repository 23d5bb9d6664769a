// Package prober runs the probe on this host: it plants the canaries, starts the real
// launcher with the real plan, and asks the guest what it can reach. What the checks
// mean is package probe's.
package prober

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/selftest"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/hostfacts"
	"agentconnect.md/sandbox/sandbox/probe"
)

// Prober probes for one daemon user.
type Prober struct {
	User       string
	UserID     int // of the daemon user
	GroupID    int
	Home       string // from the passwd database
	Root       string
	RuntimeDir string // holds our sockets
	Launcher   string
	Guest      string
	// Bwrap replaces probe.Bwrap in tests.
	Bwrap string
	// Path replaces PATH in tests.
	Path string
	// Tamper changes the policy before the proof; tests show with it that a leak is found.
	Tamper func(*sandbox.Policy) `json:"-"`
}

// timeout bounds one start of the proof.
const timeout = 30 * time.Second

// Run probes now.
func (p *Prober) Run(ctx context.Context) probe.Result {
	return probe.Run(ctx, p, p, time.Now())
}

var (
	_ probe.Host   = (*Prober)(nil)
	_ probe.Runner = (*Prober)(nil)
)

// UID of the probing user.
func (p *Prober) UID() int { return p.UserID }

func (p *Prober) bwrap() string {
	if p.Bwrap != "" {
		return p.Bwrap
	}
	return probe.Bwrap
}

// Program runs a program and gives its first line. A name is looked for in PATH as a
// file: shell functions and aliases are no programs.
func (p *Prober) Program(ctx context.Context, name string, args ...string) (string, error) {
	if name == probe.Bwrap {
		name = p.bwrap()
	}
	path := name
	if !filepath.IsAbs(name) {
		var err error
		if path, err = p.lookPath(name); err != nil {
			return "", err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, args...).Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", path, strings.Join(args, " "), err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line), nil
}

func (p *Prober) lookPath(name string) (string, error) {
	if p.Path == "" {
		return exec.LookPath(name)
	}
	for _, dir := range filepath.SplitList(p.Path) {
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s: not found in %s", name, p.Path)
}

// Sysctl reads a value below /proc/sys.
func (p *Prober) Sysctl(name string) string {
	b, err := os.ReadFile("/proc/sys/" + name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// errReached ends a reduced start on purpose, when it has come as far as it should.
var errReached = errors.New("reached")

// Try starts a part of the recipe.
func (p *Prober) Try(ctx context.Context, what probe.Reduced) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	args := []string{"--ro-bind", "/", "/", "--dev", "/dev", "--unshare-all"}
	switch what {
	case probe.ReducedBwrap:
	case probe.ReducedBwrapProc:
		args = append(args, "--proc", "/proc")
	case probe.ReducedUserns:
		return p.tryUserns(ctx)
	case probe.ReducedMount, probe.ReducedNetns:
		network := sandbox.NetworkHost
		if what == probe.ReducedNetns {
			network = sandbox.NetworkOpen // the most that is set up
		}
		s := launch.Start{
			Launcher: p.Launcher, Bwrap: p.bwrap(), Argv: []string{"/bin/true"}, Dir: "/",
			Compile: func() (*sandbox.Plan, error) { return &sandbox.Plan{Network: network}, nil },
			Place:   func(context.Context, int) error { return errReached },
		}
		process, err := s.Run(ctx)
		if process != nil {
			process.Kill()
			process.Network.Close()
		}
		if errors.Is(err, errReached) {
			return nil
		}
		return err
	}
	return exec.CommandContext(ctx, p.bwrap(), append(args, p.bwrap(), "--version")...).Run()
}

// Inside plants canaries, starts the boundary and looks from inside. The canaries are
// first read from outside: what cannot be reached anyway proves nothing.
func (p *Prober) Inside(ctx context.Context, nesting bool) ([]probe.Finding, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	stage, err := p.plant()
	defer stage.remove()
	if err != nil {
		return nil, &probe.NotLaidError{Err: err}
	}
	req := selftest.CheckRequest{
		Unreachable: stage.canaries, ConnectRefused: stage.sockets,
		Writable: stage.writable, Readable: []string{"/usr", "/etc/passwd"}, Nested: nesting,
	}
	policy := sandbox.Policy{
		Agent: "probe", UID: p.UserID, GID: p.GroupID, User: p.User, Home: p.Home, Root: p.Root,
		AgentDir: stage.dir, HomeDir: stage.dir + "/home", TmpDir: stage.dir + "/tmp", MemoryDir: stage.dir + "/memory",
		Workspace: "workspace", Read: sandbox.ReadSystem, Guest: p.Guest, Network: sandbox.NetworkOpen,
		Nesting: nesting, DieWithParent: true,
	}
	if p.Tamper != nil {
		p.Tamper(&policy)
	}
	report, weaker, err := p.ask(ctx, policy, req)
	if err != nil {
		return nil, err
	}
	out := []probe.Finding{{What: probe.FindingNetwork, OK: true, Detail: weaker}}
	for _, r := range report.Results {
		what := r.What
		if what == selftest.CheckNested {
			what = probe.FindingNested
		}
		out = append(out, probe.Finding{What: what, Path: r.Path, OK: r.OK, Detail: r.Detail})
	}
	return out, nil
}

// ask runs the guest's check in a boundary of the policy. weaker says what its network
// lacks.
func (p *Prober) ask(ctx context.Context, policy sandbox.Policy, req selftest.CheckRequest) (r *selftest.CheckReport, weaker string, err error) {
	question, err := json.Marshal(req)
	if err != nil {
		return nil, "", err
	}
	inR, inW, err := os.Pipe()
	if err != nil {
		return nil, "", err
	}
	defer inR.Close()
	outR, outW, err := os.Pipe()
	if err != nil {
		inW.Close()
		return nil, "", err
	}
	defer outR.Close()
	s := launch.Start{
		Launcher: p.Launcher, Bwrap: p.bwrap(), Dir: policy.AgentDir + "/workspace",
		Compile: func() (*sandbox.Plan, error) { return sandbox.Compile(policy, hostfacts.Host{}) },
		Argv:    []string{sandbox.GuestPath, "check"},
		Env:     []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + p.Home, fmt.Sprintf("XDG_RUNTIME_DIR=/run/user/%d", p.UserID)},
		Stdin:   inR, Stdout: outW, Stderr: outW,
	}
	process, err := s.Run(ctx)
	outW.Close()
	if err != nil {
		inW.Close()
		return nil, "", err
	}
	defer process.Kill()
	if process.Network != nil {
		weaker = process.Network.Weaker
		process.Network.Close() // nobody carries what the guest connects to
	}
	stop := context.AfterFunc(ctx, func() { process.Kill() })
	defer stop()
	written := make(chan struct{})
	go func() {
		defer close(written)
		defer inW.Close()
		_, _ = inW.Write(question) // an answer that is missing tells of a failure here
	}()
	answer, err := io.ReadAll(io.LimitReader(outR, 4<<20))
	<-written
	<-process.Done()
	if err != nil {
		return nil, "", err
	}
	var report selftest.CheckReport
	start := bytes.IndexByte(answer, '{')
	if start < 0 || json.Unmarshal(answer[start:], &report) != nil {
		return nil, "", fmt.Errorf("no answer from inside: %s: %q", process.End().Text, tail(answer, 300))
	}
	return &report, weaker, nil
}

func tail(b []byte, n int) []byte {
	if len(b) > n {
		return b[len(b)-n:]
	}
	return b
}

// stage is what is planted for one proof.
type stage struct {
	dir      string // the probe's agent directory
	canaries []string
	sockets  []string
	writable []string
	undo     []func()
}

func (s *stage) remove() {
	for i := len(s.undo) - 1; i >= 0; i-- {
		s.undo[i]()
	}
}

// plant makes the probe's own agent directory and the canaries. What of it exists is
// taken away by remove, also after an error.
func (p *Prober) plant() (*stage, error) {
	s := &stage{}
	var nonce [8]byte
	if _, err := rand.Read(nonce[:]); err != nil {
		return s, err
	}
	id := hex.EncodeToString(nonce[:])
	base := filepath.Join(p.Root, "state", "probe-"+id)
	if err := os.MkdirAll(base, 0o700); err != nil {
		return s, err
	}
	s.undo = append(s.undo, func() { os.RemoveAll(base) })
	s.dir = filepath.Join(base, "agent")
	other := filepath.Join(base, "other")
	for _, d := range []string{s.dir + "/home", s.dir + "/tmp", s.dir + "/memory", s.dir + "/workspace", other} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return s, err
		}
	}
	s.writable = []string{s.dir + "/workspace", s.dir + "/memory", p.Home, "/tmp", "/var/tmp", fmt.Sprintf("/run/user/%d", p.UserID)}
	for _, c := range []struct {
		path  string
		maybe bool // the place may be read-only on this host
	}{
		{p.Root + "/state/probe-" + id + "/canary", false},
		{s.dir + "/agent.json", false},
		{other + "/agent.json", false},
		{filepath.Join(os.TempDir(), ".agentconnect-canary-"+id), false},
		{p.Home + "/.agentconnect-canary-" + id, true},
	} {
		s.undo = append(s.undo, func() { os.Remove(c.path) }) // on a full disk an empty one is left
		if err := os.WriteFile(c.path, []byte("canary\n"), 0o600); err != nil {
			if c.maybe {
				continue
			}
			return s, err
		}
		if b, err := os.ReadFile(c.path); err != nil || len(b) == 0 {
			return s, fmt.Errorf("%s cannot be read from outside either", c.path)
		}
		s.canaries = append(s.canaries, c.path)
	}
	// What a home holds anyway is as good a canary as ours.
	for _, name := range []string{".ssh", ".gnupg", ".bashrc", ".profile"} {
		if _, err := os.Lstat(filepath.Join(p.Home, name)); err == nil {
			s.canaries = append(s.canaries, filepath.Join(p.Home, name))
		}
	}
	for _, path := range []string{filepath.Join(p.RuntimeDir, "canary-"+id+".sock"), s.dir + "/workspace/canary.sock"} {
		if len(path) > 100 {
			continue // longer than a socket's name can be
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return s, err
		}
		l, err := new(net.ListenConfig).Listen(context.Background(), "unix", path)
		if err != nil {
			return s, err
		}
		s.undo = append(s.undo, func() { l.Close() })
		s.sockets = append(s.sockets, path)
	}
	if run := os.Getenv("XDG_RUNTIME_DIR"); run != "" {
		for _, name := range []string{"bus", "systemd/private"} {
			if _, err := os.Lstat(filepath.Join(run, name)); err == nil {
				s.sockets = append(s.sockets, filepath.Join(run, name))
			}
		}
	}
	if _, err := os.Lstat("/run/dbus/system_bus_socket"); err == nil {
		s.sockets = append(s.sockets, "/run/dbus/system_bus_socket")
	}
	return s, nil
}
