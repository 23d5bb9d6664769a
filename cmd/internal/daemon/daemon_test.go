package daemon

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/sandbox"
	"agentconnect.md/sandbox/sandbox/hostfacts"
)

// site is a ROOT with what a daemon on it needs. Its supervisors are fakes.
type site struct {
	t       *testing.T
	root    string
	options Options
	store   *agent.Store

	mu    sync.Mutex
	probe control.Probe
}

func newSite(t *testing.T, configJSON string) *site {
	t.Helper()
	if os.Getuid() == 0 {
		t.Skip("needs an ordinary user: a daemon refuses to run as root")
	}
	base := shortDir(t)
	s := &site{t: t, root: filepath.Join(base, "root")}
	home, system := filepath.Join(base, "home"), filepath.Join(base, "etc")
	for _, dir := range []string{s.root, home, system} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	s.write(filepath.Join(s.root, "config.json"), configJSON, 0o600)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The daemon gives its supervisors no variable of ours, so a script puts it back.
	supervisor := filepath.Join(base, "supervisor")
	s.write(supervisor, "#!/bin/sh\n"+fakeEnv+" exec "+exe+"\n", 0o700)
	bwrap := filepath.Join(base, "bwrap")
	s.write(bwrap, "#!/bin/sh\n", 0o700)
	load := func() (*config.Config, error) {
		return config.Load(config.Options{Root: s.root, SystemDir: system, Home: home})
	}
	cfg, err := load()
	if err != nil {
		t.Fatal(err)
	}
	s.store = agent.NewStore(cfg.Root)
	s.setProbe(true)
	s.options = Options{
		Config: cfg, Reload: load, Host: hostfacts.Host{}, Build: "test", UID: os.Getuid(), Stderr: io.Discard,
		Programs: programs.Set{Supervisor: supervisor, Launcher: "/bin/true", Guest: exe, Bwrap: bwrap},
		Probe: func(context.Context, string) control.Probe {
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.probe
		},
		Environ: []string{"PATH=/usr/bin:/bin", "GITHUB_TOKEN=secret", "LC_TIME=C"},
	}
	return s
}

func (s *site) write(path, text string, mode os.FileMode) {
	s.t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) setProbe(ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.probe = control.Probe{OK: ok, Code: "ok", At: time.Now()}
	if !ok {
		s.probe.Code = "userns-disabled"
		s.probe.Checks = []control.Check{{Code: "userns-disabled", Result: "failed", Detail: "user namespaces are off", Remedy: "run `sudo sysctl kernel.unprivileged_userns_clone=1`"}}
	}
}

// agent adds an agent whose supervisor does the words.
func (s *site) agent(id string, sandboxed bool, words ...string) {
	s.t.Helper()
	if err := s.store.Create(&agent.Agent{ID: id, Command: "/usr/bin/env", Args: words, RunInSandbox: &sandboxed}); err != nil {
		s.t.Fatal(err)
	}
}

// edit changes an agent's file.
func (s *site) edit(id string, change func(*agent.Agent)) {
	s.t.Helper()
	if _, err := s.store.Update(id, func(a *agent.Agent) error { change(a); return nil }); err != nil {
		s.t.Fatal(err)
	}
}

// runs counts the supervisors that the agent ever had.
func (s *site) runs(id string) int {
	raw, _ := os.ReadFile(filepath.Join(s.store.Dirs(id).Workspace, "runs"))
	return strings.Count(string(raw), "\n")
}

// start runs a daemon until the returned stop, which returns how it ended.
func (s *site) start() (*control.Client, func() error) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, s.options) }()
	var once sync.Once
	var err error
	stop := func() error {
		once.Do(func() { cancel(); err = <-ended })
		return err
	}
	s.t.Cleanup(func() { stop() })
	c := control.NewClient(ControlSocket("", s.root))
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(5 * time.Millisecond) { //nolint:forbidigo // asked with a deadline
		if _, err := c.Status(s.t.Context()); err == nil {
			return c, stop
		}
		select {
		case err := <-ended:
			s.t.Fatalf("the daemon ended: %v", err)
		default:
		}
		if time.Now().After(end) {
			s.t.Fatal("the daemon never answered")
		}
	}
}

func answered(t *testing.T, err error, code int, words ...string) {
	t.Helper()
	if Code(err) != code {
		t.Fatalf("error %v has code %d, want %d", err, Code(err), code)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q lacks %q", err, w)
		}
	}
}

func (s *site) until(c *control.Client, id, state string) *control.AgentStatus {
	s.t.Helper()
	for end := time.Now().Add(90 * time.Second); ; time.Sleep(5 * time.Millisecond) { //nolint:forbidigo // asked with a deadline
		st, err := c.Agent(s.t.Context(), id)
		if err == nil && st.State == state {
			return st
		}
		if time.Now().After(end) {
			s.t.Fatalf("agent %s: %+v, %v; want %s", id, st, err, state)
		}
	}
}

func TestRootIsRefused(t *testing.T) {
	err := Run(t.Context(), Options{UID: 0})
	answered(t, err, 1, "do not run agents as root", "su - USER")
}

// What a daemon at rest has to be stirred by: requests, and what becomes of agents by itself.
func TestWhatHappensStirs(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	stirred := make(chan struct{}, 1000)
	s.options.Stir = func() { stirred <- struct{}{} }
	c, _ := s.start()
	if _, err := c.Start(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	pid := s.until(c, "a", control.StateRunning).PID
	drained := func() (n int) {
		for {
			select {
			case <-stirred:
				n++
			default:
				return n
			}
		}
	}
	drained()
	if _, err := c.Agent(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if n := drained(); n != 1 {
		t.Errorf("one request stirs %d times", n)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-stirred:
	case <-time.After(90 * time.Second):
		t.Error("the end of an agent stirs nobody")
	}
}

func TestRequiredModeWithAFailingProbeStartsNothing(t *testing.T) {
	s := newSite(t, `{"security":{"requireSandbox":true}}`)
	s.agent("a", true, "ready", "wait")
	if err := os.MkdirAll(filepath.Join(s.root, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.write(wantedPath(s.root), `{"agents":["a"]}`, 0o600)
	s.setProbe(false)
	err := Run(t.Context(), s.options)
	answered(t, err, 69, "userns-disabled", "sysctl")
	if n := s.runs("a"); n != 0 {
		t.Errorf("%d supervisors started", n)
	}
	rec, err := Record(s.root)
	if err != nil {
		t.Fatal(err)
	}
	if rec.State != control.StateRefused || rec.ExitCode != 69 || !strings.Contains(rec.Reason, "userns-disabled") || len(rec.Log) == 0 {
		t.Errorf("record %+v", rec)
	}
}

func TestAFailingProbeRefusesSandboxedAgentsOnly(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("boxed", true, "ready", "wait")
	s.agent("free", false, "ready", "wait")
	s.setProbe(false)
	c, _ := s.start()
	_, err := c.Start(t.Context(), "boxed")
	answered(t, err, 69, "boxed", "userns-disabled", "sysctl")
	if st := s.until(c, "boxed", control.StateRefused); !strings.Contains(st.Reason, "userns-disabled") {
		t.Errorf("reason %q", st.Reason)
	}
	if st, err := c.Start(t.Context(), "free"); err != nil || st.State != control.StateRunning || st.Sandboxed {
		t.Errorf("%+v, %v", st, err)
	}
	if n := s.runs("boxed"); n != 0 {
		t.Errorf("%d starts without the boundary", n)
	}
	// Recovery starts what was wanted.
	s.setProbe(true)
	if p, err := c.Probe(t.Context()); err != nil || !p.OK {
		t.Fatalf("%+v, %v", p, err)
	}
	s.until(c, "boxed", control.StateRunning)
}

func TestBwrapRemovedAfterTheProbe(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	c, _ := s.start()
	if err := os.Remove(s.options.Programs.Bwrap); err != nil {
		t.Fatal(err)
	}
	_, err := c.Start(t.Context(), "a")
	answered(t, err, 69, "bwrap", "install bubblewrap")
	_, err = c.Exec(t.Context(), "a")
	answered(t, err, 69, "bwrap")
	if n := s.runs("a"); n != 0 {
		t.Errorf("%d starts without the boundary", n)
	}
}

func TestWantedAgentsComeBack(t *testing.T) {
	s := newSite(t, `{}`)
	for _, id := range []string{"kept", "stopped", "never"} {
		s.agent(id, true, "ready", "wait")
	}
	c, stop := s.start()
	for _, id := range []string{"kept", "stopped"} {
		if _, err := c.Start(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Stop(t.Context(), "stopped"); err != nil {
		t.Fatal(err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	rec, err := Record(s.root)
	if err != nil || rec.State != control.StateStopped {
		t.Fatalf("%+v, %v", rec, err)
	}
	c, _ = s.start()
	s.until(c, "kept", control.StateRunning)
	for _, id := range []string{"stopped", "never"} {
		if st, err := c.Agent(t.Context(), id); err != nil || st.State != control.StateStopped {
			t.Errorf("%+v, %v", st, err)
		}
	}
}

func TestABrokenStateFileIsSetAside(t *testing.T) {
	s := newSite(t, `{}`)
	if err := os.MkdirAll(filepath.Join(s.root, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.write(wantedPath(s.root), `{"agents":["a"`, 0o600)
	s.write(recordPath(s.root), `{"state":`, 0o600)
	if rec, err := Record(s.root); err != nil || rec.State != control.StateStopped || !strings.Contains(rec.Reason, "cannot be read") {
		t.Errorf("%+v, %v", rec, err)
	}
	c, _ := s.start()
	st, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(st.Warnings, func(w string) bool { return strings.Contains(w, "wanted.json") }) {
		t.Errorf("warnings %q", st.Warnings)
	}
	kept, _ := filepath.Glob(wantedPath(s.root) + ".broken-*")
	if len(kept) != 1 {
		t.Errorf("kept %v", kept)
	}
}

func TestReloadWithAnErrorKeepsTheOldPolicy(t *testing.T) {
	s := newSite(t, `{"security":{"requireSandbox":true}}`)
	s.agent("free", false, "ready", "wait")
	c, _ := s.start()
	s.write(filepath.Join(s.root, "config.json"), `{"security":{"requireSandbx":false}}`, 0o600)
	if err := c.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "requireSandbx") {
		t.Errorf("reload: %v", err)
	}
	st, err := c.Status(t.Context())
	if err != nil || !st.RequireSandbox || !strings.Contains(st.ConfigError, "requireSandbx") {
		t.Errorf("%+v, %v", st, err)
	}
	_, err = c.Start(t.Context(), "free")
	answered(t, err, 69, "sandbox is required")
}

func TestRequiredModeStopsAnUnsandboxedAgent(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("free", false, "ready", "wait")
	c, _ := s.start()
	if _, err := c.Start(t.Context(), "free"); err != nil {
		t.Fatal(err)
	}
	// By the file alone: the daemon watches it.
	s.write(filepath.Join(s.root, "config.json"), `{"security":{"requireSandbox":true}}`, 0o600)
	s.until(c, "free", control.StateRefused)
	s.write(filepath.Join(s.root, "config.json"), `{}`, 0o600)
	s.until(c, "free", control.StateRunning)
}

func TestARemovedAgentIsStopped(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	c, _ := s.start()
	st, err := c.Start(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.store.Remove("a", false); err != nil {
		t.Fatal(err)
	}
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Agent(t.Context(), "a"); Code(err) != 66 {
		t.Errorf("%v", err)
	}
	if alive(st.PID) {
		t.Errorf("supervisor %d still runs", st.PID)
	}
}

func TestABrokenAgentStopsNoOther(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("bad", true, "ready", "wait")
	s.agent("good", true, "ready", "wait")
	s.write(s.store.Dirs("bad").File, `{"id":"bad","comand":"x"}`, 0o600)
	c, _ := s.start()
	_, err := c.Start(t.Context(), "bad")
	answered(t, err, 78, "comand")
	if _, err := c.Start(t.Context(), "good"); err != nil {
		t.Error(err)
	}
	s.until(c, "bad", control.StateRefused)
}

func TestRulesOfTheNetworkAreJudgedBeforeAnythingStarts(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	c, _ := s.start()
	for _, n := range []struct {
		network agent.Network
		want    []string
	}{
		{agent.Network{Mode: sandbox.NetworkNone, Allow: []string{"example.com"}}, []string{"network.allow", "--network allowlist"}},
		{agent.Network{Mode: sandbox.NetworkHost, Deny: []string{"example.com"}}, []string{"network.deny", "--network allowlist"}},
	} {
		s.edit("a", func(a *agent.Agent) { a.Network = n.network })
		_, err := c.Start(t.Context(), "a")
		answered(t, err, 78, n.want...)
	}
}

func TestSecondDaemonIsToldThePid(t *testing.T) {
	s := newSite(t, `{}`)
	c, _ := s.start()
	st, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = Run(t.Context(), s.options)
	var locked *LockedError
	if !errors.As(err, &locked) || locked.PID != st.PID || Code(err) != 1 {
		t.Errorf("%v", err)
	}
	if rec, err := Record(s.root); err != nil || !strings.Contains(rec.Reason, "without a word") {
		t.Errorf("the second daemon changed the first one's record: %+v, %v", rec, err)
	}
	if Holder(s.root) != st.PID {
		t.Errorf("holder %d", Holder(s.root))
	}
}

func TestShutdownReturnsWhenTheAgentsHaveEnded(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	c, stop := s.start()
	st, err := c.Start(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if alive(st.PID) {
		t.Error("the agent still runs")
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if _, err := c.Status(t.Context()); !errors.Is(err, control.ErrNotRunning) {
		t.Errorf("%v", err)
	}
}

func TestStateThatCannotBeWrittenIsAClearError(t *testing.T) {
	for name, spoil := range map[string]func(s *site) error{
		"lock":   func(s *site) error { return os.WriteFile(filepath.Join(s.root, "daemon.lock"), nil, 0o400) },
		"record": func(s *site) error { return os.MkdirAll(filepath.Join(recordPath(s.root), "x"), 0o700) },
		"log":    func(s *site) error { return os.MkdirAll(DaemonLog(s.root), 0o700) },
		"run":    func(s *site) error { return os.WriteFile(filepath.Join(s.root, "state"), nil, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t, `{}`)
			if err := spoil(s); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
			defer cancel()
			err := Run(ctx, s.options)
			if name == "run" {
				answered(t, err, 1, "not a directory")
				return
			}
			answered(t, err, 73, s.root)
		})
	}
}

// What cannot be remembered is not started, and the list on disk stays as it was.
func TestAWishThatCannotBeWrittenDown(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	s.agent("b", true, "ready", "wait")
	c, _ := s.start()
	if _, err := c.Start(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(s.root, "state")
	if err := os.Chmod(state, 0o500); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod(state, 0o700)
	_, err := c.Start(t.Context(), "b")
	answered(t, err, 73, "wanted.json")
	if n := s.runs("b"); n != 0 {
		t.Errorf("%d supervisors", n)
	}
	// A stop stops all the same, and says what is wrong.
	_, err = c.Stop(t.Context(), "a")
	answered(t, err, 73, "stopped, but")
	s.until(c, "a", control.StateStopped)
	if raw, _ := os.ReadFile(wantedPath(s.root)); !strings.Contains(string(raw), `"a"`) {
		t.Errorf("list %q", raw)
	}
	os.Chmod(state, 0o700)
}

func TestTheRuntimeGetsNothingOfTheDaemons(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true)
	s.edit("a", func(a *agent.Agent) { a.Env = map[string]string{"GIVEN": "yes"} })
	a, err := s.store.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	b := &Builder{Config: s.options.Config, Store: s.store, Programs: s.options.Programs, Host: s.options.Host, Environ: s.options.Environ}
	spec, err := b.Spec(a, "/x/a.sock")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	if !slices.Equal(spec.Given, []string{"GIVEN=yes"}) {
		t.Errorf("given by the operator: %v", spec.Given)
	}
	for _, kv := range spec.Env {
		k, v, _ := strings.Cut(kv, "=")
		names = append(names, k)
		if strings.Contains(v, "secret") {
			t.Errorf("%s leaked", k)
		}
	}
	want := []string{"AGENTCONNECT_MEMORY_DIR", "HOME", "LANG", "LC_TIME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER", "XDG_RUNTIME_DIR"}
	if !slices.Equal(names, want) {
		t.Errorf("environment %v, want %v", names, want)
	}
}

func TestTheBoundaryDecidesHome(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true)
	a, err := s.store.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	a.Env = map[string]string{"HOME": "/elsewhere"}
	b := &Builder{Config: s.options.Config, Store: s.store, Programs: s.options.Programs, Host: s.options.Host}
	_, err = b.Spec(a, "/x/a.sock")
	answered(t, err, 78, "HOME")
}

// A server outside is no way past the machine's word about the network.
func TestServersNetworkIsWithinTheMachinesPolicy(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true)
	a, err := s.store.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	b := &Builder{Config: s.options.Config, Store: s.store, Programs: s.options.Programs, Host: s.options.Host}
	b.Config.Policies = append(b.Config.Policies, config.Policy{NetworkMax: sandbox.NetworkAllowlist})
	for mode, rules := range map[sandbox.NetworkMode]bool{"": false, sandbox.NetworkNone: false, sandbox.NetworkAllowlist: true, sandbox.NetworkOpen: false, sandbox.NetworkHost: false} {
		a.MCPServers = fmt.Appendf(nil, `[{"name":"s","command":"/bin/cat","host":true,"sandbox":true,"network":%q}]`, mode)
		spec, err := b.Spec(a, "/x/a.sock")
		if mode == sandbox.NetworkOpen || mode == sandbox.NetworkHost {
			answered(t, err, 78, "policy allows")
			continue
		}
		if err != nil {
			t.Fatalf("%q: %v", mode, err)
		}
		if got := spec.MCP[0]; (got.Egress != nil) != rules || got.Policy.Network.Gated() != rules {
			t.Errorf("%q: %+v", mode, got)
		}
	}
}

// What runs outside on the agent's word is nothing that an agent could have put there: not by
// a link on the way, nor by the interpreter of a script, nor by the search path.
func TestNothingThatAnAgentCanChangeDecidesWhatRunsOutside(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true)
	s.agent("other", true)
	a, err := s.store.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	tools, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ws := s.store.Dirs("a").Workspace
	theirs := s.store.Dirs("other").Workspace
	for _, dir := range []string{ws + "/bin", theirs, tools + "/bin"} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	script := func(path, first string) string {
		s.write(path, first+"\necho password=x\n", 0o755)
		return path
	}
	link := func(to, at string) string {
		t.Helper()
		if err := os.Symlink(to, at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	good := script(tools+"/good", "#!/bin/sh")
	link(tools, ws+"/release")
	link(tools+"/good", theirs+"/passes")
	script(ws+"/bin/python", "#!/bin/sh")
	script(tools+"/bin/outer", "#!"+ws+"/bin/python")
	script(ws+"/bin/evil", "#!/bin/sh")
	link(ws+"/bin/evil", tools+"/bin/sly")
	b := &Builder{Config: s.options.Config, Store: s.store, Programs: s.options.Programs, Host: s.options.Host,
		Environ: []string{"PATH=" + strings.Join([]string{ws + "/bin", "bin", tools + "/bin", link(ws+"/bin", tools+"/path"), "/usr/bin"}, ":")}}
	for name, c := range map[string]struct {
		argv []string
		ok   bool
	}{
		"a script":                          {[]string{good}, true},
		"by a link":                         {[]string{link("good", tools+"/alias")}, true},
		"by env":                            {[]string{script(tools+"/env", "#!/usr/bin/env sh")}, true},
		"a file of the agent's":             {[]string{ws + "/bin/evil"}, false},
		"a link to one":                     {[]string{link(ws+"/bin/evil", tools+"/evil")}, false},
		"a folder by a link of the agent's": {[]string{link(ws+"/release", tools+"/current") + "/good"}, false},
		"a file by a link of another's":     {[]string{link(theirs+"/passes", tools+"/passes")}, false},
		"an argument by such a link":        {[]string{"/bin/sh", tools + "/passes"}, false},
		"its interpreter":                   {[]string{script(tools+"/venv", "#!"+ws+"/bin/python -u")}, false},
		"its interpreter's":                 {[]string{script(tools+"/twice", "#! "+tools+"/bin/outer")}, false},
		"an interpreter by env":             {[]string{script(tools+"/envs", "#!/usr/bin/env -S "+ws+"/bin/python")}, false},
		"one by its name":                   {[]string{script(tools+"/named", "#!/usr/bin/env -S X=1 sly")}, false},
		"one that is searched elsewhere":    {[]string{script(tools+"/search", "#!/usr/bin/env python")}, true},
	} {
		t.Run(name, func(t *testing.T) {
			a.GitCredentials, a.MCPServers = []agent.GitCredential{{URL: "https://git.example/x/y", Command: c.argv}}, nil
			_, err := b.Spec(a, "/x/a.sock")
			list, merr := json.Marshal([]any{map[string]any{"name": "s", "command": "/bin/sh", "args": c.argv, "host": true}})
			if merr != nil {
				t.Fatal(merr)
			}
			a.GitCredentials, a.MCPServers = nil, list
			_, serr := b.Spec(a, "/x/a.sock")
			if !c.ok {
				answered(t, err, 78, "an agent can write")
				answered(t, serr, 78, "an agent can write")
			} else if err != nil || serr != nil {
				t.Errorf("%v, %v", err, serr)
			}
		})
	}
	a.MCPServers = []byte(`[{"name":"s","command":"/bin/cat","host":true}]`)
	spec, err := b.Spec(a, "/x/a.sock")
	if err != nil {
		t.Fatal(err)
	}
	if want := tools + "/bin:/usr/bin:"; !strings.HasPrefix(spec.HostPath, want) || strings.Contains(spec.HostPath, tools+"/path") {
		t.Errorf("the search path of what runs outside is %s, want %s…", spec.HostPath, want)
	}
}

func TestAServerInABoundaryOfItsOwnSeesNoCloneOfTheAgents(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true)
	a, err := s.store.Load("a")
	if err != nil {
		t.Fatal(err)
	}
	a.Git.Clone = "https://git.example/x/y"
	if err := os.MkdirAll(filepath.Join(s.store.Dirs("a").Repository, "objects", "info"), 0o700); err != nil {
		t.Fatal(err)
	}
	a.MCPServers = []byte(`[{"name":"s","command":"/bin/cat","host":true,"sandbox":true}]`)
	b := &Builder{Config: s.options.Config, Store: s.store, Programs: s.options.Programs, Host: s.options.Host}
	spec, err := b.Spec(a, "/x/a.sock")
	if err != nil {
		t.Fatal(err)
	}
	if spec.Policy.Repository == "" {
		t.Fatal("the control: the agent itself has none")
	}
	plan, err := sandbox.Compile(*spec.MCP[0].Policy, s.options.Host)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range plan.Mounts {
		if strings.HasPrefix(m.Target, sandbox.RepositoryPath) {
			t.Errorf("it sees %s at %s", m.Source, m.Target)
		}
	}
}

func TestLockOfTheOtherKind(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "daemon.lock")
	child, err := os.StartProcess("/bin/sleep", []string{"sleep", "60"}, &os.ProcAttr{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { child.Kill(); child.Wait() }()
	// A live holder that knows no flock.
	for _, text := range []string{`{"pid":PID,"startedAt":"x"}`, "PID\n"} {
		text = strings.ReplaceAll(text, "PID", strconv.Itoa(child.Pid))
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := takeLock(root)
		var locked *LockedError
		if !errors.As(err, &locked) || locked.PID != child.Pid {
			t.Errorf("%q: %v", text, err)
		}
		if raw, _ := os.ReadFile(path); string(raw) != text {
			t.Errorf("its lock was changed: %q", raw)
		}
	}
	// The number belongs to a process that began long after the file was written.
	if err := os.Chtimes(path, time.Time{}, time.Now().Add(-time.Hour)); err != nil {
		t.Fatal(err)
	}
	f, err := takeLock(root)
	if err != nil {
		t.Fatalf("a stale lock: %v", err)
	}
	if _, err := takeLock(root); err == nil {
		t.Error("taken twice")
	}
	f.Close()
	// Ours needs no look at the pid: the kernel gave the lock back.
	if f, err = takeLock(root); err != nil {
		t.Errorf("our own after its end: %v", err)
	} else {
		f.Close()
	}
}

func TestWaitingForTheEndOfADaemon(t *testing.T) {
	root := t.TempDir()
	if err := WaitEnded(t.Context(), root); err != nil || Holder(root) != 0 {
		t.Errorf("without a lock: %v, %d", err, Holder(root))
	}
	child := exec.Command("/bin/cat")
	in, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer child.Process.Kill()
	if err := os.WriteFile(filepath.Join(root, "daemon.lock"), fmt.Appendf(nil, `{"pid":%d,"program":%q}`, child.Process.Pid, lockProgram), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := Holder(root); got != child.Process.Pid {
		t.Errorf("holder %d", got)
	}
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	waited := make(chan error, 1)
	go func() { waited <- WaitEnded(ctx, root) }()
	cancel(cause)
	if err := <-waited; !errors.Is(err, cause) {
		t.Errorf("cancelled: %v", err)
	}
	// Looking and waiting never hold the lock itself.
	go func() { waited <- WaitEnded(t.Context(), root) }()
	f, err := os.OpenFile(filepath.Join(root, "daemon.lock"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := flock(f); err != nil {
		t.Errorf("lock: %v", err)
	}
	f.Close()
	in.Close()
	child.Wait()
	if err := <-waited; err != nil {
		t.Error(err)
	}
}

// Started from cron or after su, a client has no runtime directory: it finds the daemon of the
// user's session all the same, and takes no other's for it.
func TestClientWithoutARuntimeDirectoryFindsTheDaemon(t *testing.T) {
	was := sessionDirs
	t.Cleanup(func() { sessionDirs = was })
	sessionDirs = t.TempDir()
	xdg, a, b := filepath.Join(sessionDirs, strconv.Itoa(os.Getuid())), t.TempDir(), t.TempDir()
	if err := os.Mkdir(xdg, 0o700); err != nil {
		t.Fatal(err)
	}
	dir, err := claimRunDir(xdg, a)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if got, want := ControlSocket("", a), filepath.Join(xdg, "agentconnect", controlName); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, want := ControlSocket("", b), filepath.Join(b, "run", controlName); got != want {
		t.Errorf("another ROOT: %s, want %s", got, want)
	}
	// A later daemon without a session listens below ROOT; the claim of the first is still there.
	own := filepath.Join(a, "run", controlName)
	if err := os.Mkdir(filepath.Dir(own), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(own, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := ControlSocket("", a); got != own {
		t.Errorf("below ROOT: %s, want %s", got, own)
	}
}

func TestRunDirOfTwoRoots(t *testing.T) {
	xdg, a, b := shortDir(t), shortDir(t), shortDir(t)
	first, err := claimRunDir(xdg, a)
	if err != nil {
		t.Fatal(err)
	}
	second, err := claimRunDir(xdg, b)
	if err != nil {
		t.Fatal(err)
	}
	if first.Path != filepath.Join(xdg, "agentconnect") || second.Path != filepath.Join(b, "run") {
		t.Errorf("%s and %s", first.Path, second.Path)
	}
	for root, dir := range map[string]*runDir{a: first, b: second} {
		if got := ControlSocket(xdg, root); got != filepath.Join(dir.Path, controlName) {
			t.Errorf("%s: client looks at %s", root, got)
		}
	}
	first.Close()
	// A runtime directory that others may write to is nobody's.
	if err := os.Chmod(xdg, 0o777); err != nil {
		t.Fatal(err)
	}
	third, err := claimRunDir(xdg, a)
	if err != nil || third.Path != filepath.Join(a, "run") {
		t.Errorf("%+v, %v", third, err)
	}
	long := &runDir{Path: a}
	name := strings.Repeat("x", 63) + ".sock"
	if p, err := (&runDir{Path: a + "/" + strings.Repeat("d", 40)}).Socket(name); err != nil || len(p) > maxSocketPath {
		t.Errorf("%q, %v", p, err)
	}
	if p, err := long.Socket("a.sock"); err != nil || p != filepath.Join(a, "a.sock") {
		t.Errorf("%q, %v", p, err)
	}
}

func TestLogsAreBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.log")
	l, err := openLog(path, 100)
	if err != nil {
		t.Fatal(err)
	}
	w := &lineWriter{to: l, now: func() time.Time { return time.Unix(0, 0) }}
	io.WriteString(w, "half \x1b[31m")
	io.WriteString(w, "line\n"+strings.Repeat("y", 3*maxWord)+"\nend")
	w.Close()
	l.Close()
	got, err := Tail(path, 10)
	if err != nil || len(got) != 1 || got[0] != "1970-01-01T00:00:00.000Z end" {
		t.Errorf("%q, %v", got, err)
	}
	old, err := os.ReadFile(path + ".1")
	if err != nil || len(old) > maxWord+100 {
		t.Errorf("%d bytes, %v", len(old), err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	// Lines and their order survive where nothing starts over.
	l, _ = openLog(filepath.Join(t.TempDir(), "y.log"), 1<<20)
	w = &lineWriter{to: l, now: func() time.Time { return time.Unix(0, 0) }}
	io.WriteString(w, "half \x1b[31m")
	io.WriteString(w, "line\n")
	l.Close()
	if got, _ := Tail(l.path, 10); len(got) != 1 || !strings.HasSuffix(got[0], `half \x1b[31mline`) {
		t.Errorf("%q", got)
	}
}

// An agent writes where it could when it started, whatever its file says now.
func TestFolderOfWhatRunsIsWritableWhateverItsFileSays(t *testing.T) {
	s := newSite(t, `{}`)
	base := shortDir(t)
	work, other := filepath.Join(base, "work"), filepath.Join(base, "other")
	for _, dir := range []string{work, other} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	tool := filepath.Join(work, "tool")
	s.write(tool, "#!/bin/sh\n", 0o700)
	s.agent("a", true, "ready", "wait")
	s.agent("b", true, "ready", "wait")
	s.edit("a", func(a *agent.Agent) { a.Workspace = work })
	s.edit("b", func(b *agent.Agent) {
		b.GitCredentials = []agent.GitCredential{{URL: "https://git.example/acme/*", Command: []string{tool}}}
	})
	c, _ := s.start()
	start := func(id string) error { _, err := c.Start(t.Context(), id); return err }
	if err := start("a"); err != nil {
		t.Fatal(err)
	}
	s.until(c, "a", control.StateRunning)
	answered(t, start("b"), 78, "runs outside the sandbox", work)
	s.edit("a", func(a *agent.Agent) { a.Workspace = other })
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	answered(t, start("b"), 78, "runs outside the sandbox", work)
	if _, err := c.Restart(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	s.until(c, "a", control.StateRunning)
	if err := start("b"); err != nil {
		t.Errorf("nobody writes there any more: %v", err)
	}
}

// Required mode counts for what runs, not for what its file would start.
func TestRequiredModeStopsWhatRunsBareWhateverItsFileSays(t *testing.T) {
	s := newSite(t, `{}`)
	c, _ := s.start()
	pids := map[string]int{}
	for _, id := range []string{"edited", "broken"} {
		s.agent(id, false, "ready", "wait")
		st, err := c.Start(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		pids[id] = st.PID
	}
	s.edit("edited", func(a *agent.Agent) { yes := true; a.RunInSandbox = &yes })
	s.write(s.store.Dirs("broken").File, `{`, 0o600)
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	for id := range pids {
		if st, err := c.Agent(t.Context(), id); err != nil || st.State != control.StateRunning || st.Sandboxed {
			t.Fatalf("it is to run bare on, as long as it may: %+v, %v", st, err)
		}
	}
	s.write(filepath.Join(s.root, "config.json"), `{"security":{"requireSandbox":true}}`, 0o600)
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); alive(pids["edited"]) || alive(pids["broken"]); time.Sleep(5 * time.Millisecond) { //nolint:forbidigo // asked with a deadline
		if time.Now().After(end) {
			t.Fatalf("what runs bare goes on in required mode: edited %v, broken %v", alive(pids["edited"]), alive(pids["broken"]))
		}
	}
	if st := s.until(c, "edited", control.StateRunning); !st.Sandboxed {
		t.Errorf("started anew: %+v", st)
	}
	s.until(c, "broken", control.StateRefused)
}

// A mode of the network that the machine's policy no longer allows ends with the agent that has it.
func TestTightenedNetworkReachesWhatRuns(t *testing.T) {
	for name, mode := range map[string]sandbox.NetworkMode{"by default": "", "by its own word": sandbox.NetworkHost} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t, `{"network":{"mode":"host"}}`)
			s.agent("a", true, "ready", "wait")
			edit := func(mode sandbox.NetworkMode) {
				t.Helper()
				s.edit("a", func(a *agent.Agent) { a.Network.Mode = mode })
			}
			edit(mode)
			c, _ := s.start()
			st, err := c.Start(t.Context(), "a")
			if err != nil || st.Network != "host" {
				t.Fatalf("%+v, %v", st, err)
			}
			edit("")
			s.write(filepath.Join(s.root, "config.json"), `{"network":{"mode":"none"}}`, 0o600)
			if err := c.Reload(t.Context()); err != nil {
				t.Fatal(err)
			}
			if st, err = c.Agent(t.Context(), "a"); err != nil || st.Network != "host" || !st.Changed {
				t.Errorf("it runs with the host's network, and status says %q, changed %v (%v)", st.Network, st.Changed, err)
			}
			s.write(filepath.Join(s.root, "config.json"), `{"network":{"mode":"none"},"policy":{"networkMax":"none"}}`, 0o600)
			if err := c.Reload(t.Context()); err != nil {
				t.Fatal(err)
			}
			for end := time.Now().Add(20 * time.Second); alive(st.PID); time.Sleep(5 * time.Millisecond) { //nolint:forbidigo // asked with a deadline
				if time.Now().After(end) {
					t.Fatal("it goes on with the host's network")
				}
			}
			if st := s.until(c, "a", control.StateRunning); st.Network != "none" {
				t.Errorf("started anew: %+v", st)
			}
		})
	}
}

// Somebody may ask for an agent between its removal and the daemon's look at the files.
func TestARemovedAgentIsStoppedAlsoWhenItWasAskedFor(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	c, _ := s.start()
	st, err := c.Start(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.store.Remove("a", false); err != nil {
		t.Fatal(err)
	}
	_, err = c.Start(t.Context(), "a")
	answered(t, err, 66)
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if alive(st.PID) {
		t.Errorf("supervisor %d still runs", st.PID)
	}
}

func TestMistypedIDsAreNotKept(t *testing.T) {
	d := &Daemon{records: map[string]*record{}, cfg: &config.Config{}, store: agent.NewStore(t.TempDir()), log: slog.New(slog.DiscardHandler), sup: NewDirect(DirectOptions{}), run: &runDir{}}
	for _, id := range []string{"none", "No Such Agent", strings.Repeat("x", 200)} {
		if _, err := d.start(id, false); err == nil {
			t.Errorf("%q started", id)
		}
	}
	if len(d.records) > 0 {
		t.Errorf("%d records are kept of agents that there never were", len(d.records))
	}
}

// A command in an agent that does not run writes where it could when it started.
func TestFolderOfACommandIsWritableWhateverTheFileSays(t *testing.T) {
	s := newSite(t, `{}`)
	base := shortDir(t)
	work, other := filepath.Join(base, "work"), filepath.Join(base, "other")
	for _, dir := range []string{work, other} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	tool := filepath.Join(work, "tool")
	s.write(tool, "#!/bin/sh\n", 0o700)
	s.agent("a", true, "listen", "ready", "wait")
	s.agent("b", true, "ready", "wait")
	s.edit("a", func(a *agent.Agent) { a.Workspace = work })
	s.edit("b", func(b *agent.Agent) {
		b.GitCredentials = []agent.GitCredential{{URL: "https://git.example/acme/*", Command: []string{tool}}}
	})
	c, _ := s.start()
	if _, err := c.Exec(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	s.edit("a", func(a *agent.Agent) { a.Workspace = other })
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := c.Start(t.Context(), "b")
	answered(t, err, 78, "runs outside the sandbox", work)
}

func TestProgramInAnotherAgentsDirectoryIsNotRunOutside(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	s.agent("b", true, "ready", "wait")
	c, _ := s.start()
	mcp := filepath.Join(s.root, "mcp", "a", "server", "home")
	if err := os.MkdirAll(mcp, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{s.store.Dirs("a").Home, s.store.Dirs("a").Workspace, mcp} {
		tool := filepath.Join(dir, "tool")
		s.write(tool, "#!/bin/sh\n", 0o700)
		s.edit("b", func(b *agent.Agent) {
			b.GitCredentials = []agent.GitCredential{{URL: "https://git.example/acme/*", Command: []string{tool}}}
		})
		_, err := c.Start(t.Context(), "b")
		answered(t, err, 78, "runs outside the sandbox", tool)
	}
}

// What cannot be read now may be readable again: it is not written over.
func TestAStateFileThatCannotBeReadIsSetAside(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	if err := os.MkdirAll(filepath.Join(s.root, "state"), 0o700); err != nil {
		t.Fatal(err)
	}
	const list = `{"agents":["gone","lost"]}`
	s.write(wantedPath(s.root), list, 0)
	c, _ := s.start()
	if _, err := c.Start(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	kept, _ := filepath.Glob(wantedPath(s.root) + ".broken-*")
	if len(kept) != 1 {
		t.Fatalf("kept %v", kept)
	}
	if err := os.Chmod(kept[0], 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(kept[0]); err != nil || string(got) != list {
		t.Errorf("%q, %v", got, err)
	}
}

// Where it is not known what agents can write, nothing is taken for what they cannot.
func TestUnknownFoldersRefuseTheStart(t *testing.T) {
	s := newSite(t, `{}`)
	work := filepath.Join(shortDir(t), "work")
	if err := os.Mkdir(work, 0o700); err != nil {
		t.Fatal(err)
	}
	tool := filepath.Join(work, "tool")
	s.write(tool, "#!/bin/sh\n", 0o700)
	s.agent("a", true, "ready", "wait")
	s.edit("a", func(a *agent.Agent) {
		a.Workspace = work
		a.GitCredentials = []agent.GitCredential{{URL: "https://git.example/acme/*", Command: []string{tool}}}
	})
	c, _ := s.start()
	agents := filepath.Join(s.root, "agents")
	if err := os.Chmod(agents, 0o300); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Chmod(agents, 0o700) })
	_, err := c.Start(t.Context(), "a")
	answered(t, err, 1, "cannot be told", "permission denied")
}

// The machine went down in the middle of `agent rm --purge`.
func TestRemovalThatWasCutShortIsFinishedByTheNextDaemon(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	left := filepath.Join(s.root, "agents", ".a."+rand.Text())
	if err := os.Rename(s.store.Dirs("a").Agent, left); err != nil {
		t.Fatal(err)
	}
	s.start()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) { //nolint:forbidigo // asked with a deadline
		if _, err := os.Lstat(left); errors.Is(err, os.ErrNotExist) {
			return
		}
		if time.Now().After(end) {
			t.Fatal("what it had lies there for ever")
		}
	}
}

// Whoever waited for an agent's wishes while it was removed, and added again, has the record that
// counts: what it starts is known to the next look at the files.
func TestRecordOfAnAgentThatIsRemovedMeanwhile(t *testing.T) {
	for range 200 {
		d := &Daemon{records: map[string]*record{}}
		r := d.locked("a")
		got := make(chan *record)
		waits := make(chan struct{})
		go func() {
			close(waits)
			got <- d.locked("a")
		}()
		<-waits
		runtime.Gosched()
		d.mu.Lock()
		delete(d.records, "a")
		d.mu.Unlock()
		r.wish.Unlock()
		if now := <-got; d.records["a"] != now {
			t.Fatal("it has a record that nobody else has")
		}
	}
}

// A server with a boundary of its own has a network of its own.
func TestTightenedNetworkReachesServersThatRun(t *testing.T) {
	s := newSite(t, `{}`)
	s.agent("a", true, "ready", "wait")
	s.edit("a", func(a *agent.Agent) {
		a.Network.Mode = sandbox.NetworkNone
		a.MCPServers = []byte(`[{"name":"s","command":"/bin/cat","host":true,"sandbox":true,"network":"open"}]`)
	})
	c, _ := s.start()
	st, err := c.Start(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	s.write(filepath.Join(s.root, "config.json"), `{"policy":{"networkMax":"none"}}`, 0o600)
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if st := s.until(c, "a", control.StateRefused); !strings.Contains(st.Reason, "MCP server s") {
		t.Errorf("refused: %s", st.Reason)
	}
	if alive(st.PID) {
		t.Error("it goes on with a server that reaches everything")
	}
}

// Who is given a folder later could change what was judged when another agent started.
func TestFolderOfWhatRunsOutsideForAnotherIsRefused(t *testing.T) {
	s := newSite(t, `{}`)
	base := shortDir(t)
	work, tools, link := filepath.Join(base, "work"), filepath.Join(base, "tools"), filepath.Join(base, "link")
	for _, dir := range []string{work, tools} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("tools", link); err != nil {
		t.Fatal(err)
	}
	s.write(filepath.Join(tools, "tool"), "#!/bin/sh\n", 0o700)
	s.agent("a", true, "ready", "wait")
	s.agent("b", true, "ready", "wait")
	s.edit("a", func(a *agent.Agent) { a.Workspace = work })
	s.edit("b", func(b *agent.Agent) {
		b.GitCredentials = []agent.GitCredential{{URL: "https://git.example/acme/*", Command: []string{filepath.Join(link, "tool")}}}
	})
	c, _ := s.start()
	start := func(id string) error { _, err := c.Start(t.Context(), id); return err }
	for _, id := range []string{"b", "a"} {
		if err := start(id); err != nil {
			t.Fatal(err)
		}
		s.until(c, id, control.StateRunning)
	}
	if _, err := c.Stop(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	s.until(c, "a", control.StateStopped)
	for _, workspace := range []string{tools, base} { // base: the link lies there
		s.edit("a", func(a *agent.Agent) { a.Workspace = workspace })
		answered(t, start("a"), 78, "runs outside the sandbox for agent b", workspace)
	}
	if _, err := c.Stop(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	s.until(c, "b", control.StateStopped)
	if err := start("a"); err != nil {
		t.Errorf("nothing runs outside any more: %v", err)
	}
	s.until(c, "a", control.StateRunning)
	answered(t, start("b"), 78, "runs outside the sandbox", base)
}
