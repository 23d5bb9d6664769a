package supervisor_test

import (
	"bufio"
	"bytes"
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
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/testhost"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

func TestMain(m *testing.M) {
	code := m.Run()
	testhost.Clean()
	os.Exit(code)
}

const patience = 30 * time.Second

// agentOf is a spec for the selftest runtime in a home of its own.
func agentOf(t *testing.T) *wire.Spec {
	t.Helper()
	testhost.NeedBoundary(t)
	home := testhost.Home(t)
	root := filepath.Join(home, ".agentconnect")
	dir := filepath.Join(root, "agents", "a1")
	for _, d := range []string{"home", "tmp", "memory", "workspace"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	bin := testhost.Bin(t)
	return &wire.Spec{
		Version: wire.Version, Agent: "a1", Sandboxed: true,
		Policy: sandbox.Policy{
			Agent: "a1", UID: os.Getuid(), GID: os.Getgid(), User: "alice", Home: home, Root: root,
			AgentDir: dir, HomeDir: dir + "/home", TmpDir: dir + "/tmp", MemoryDir: dir + "/memory",
			Workspace: dir + "/workspace", Read: sandbox.ReadSystem, Guest: filepath.Join(bin, "agentconnect-guest"),
			Network: sandbox.NetworkNone, DieWithParent: true,
		},
		Argv: []string{sandbox.GuestPath, "selftest"}, Env: []string{"PATH=/usr/bin:/bin", "HOME=" + home, "SECRET=s3cret-of-the-agent"},
		Dir: dir + "/workspace", Socket: filepath.Join(home, "run", "a1.sock"),
		Launcher: filepath.Join(bin, "agentconnect-launch"), Bwrap: "/usr/bin/bwrap",
		StopGrace: wire.Duration(time.Second), KillGrace: wire.Duration(time.Second),
	}
}

// running is a supervisor process, seen as its manager sees it.
type running struct {
	t      *testing.T
	spec   *wire.Spec
	cmd    *exec.Cmd
	states chan string
	life   *os.File
	stderr *bytes.Buffer
	ended  chan struct{}
}

func supervise(t *testing.T, spec *wire.Spec) *running {
	t.Helper()
	sealed, err := launch.Sealed("spec", spec)
	if err != nil {
		t.Fatal(err)
	}
	defer sealed.Close()
	lifeR, lifeW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer lifeR.Close()
	notify := filepath.Join(testhost.Home(t), "n")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	r := &running{t: t, spec: spec, states: make(chan string, 1000), life: lifeW, stderr: &bytes.Buffer{}, ended: make(chan struct{})}
	r.cmd = exec.Command(filepath.Join(testhost.Bin(t), "agentconnect-supervisor"))
	r.cmd.Env = []string{"NOTIFY_SOCKET=" + notify}
	r.cmd.ExtraFiles = []*os.File{sealed, lifeR}
	r.cmd.Stderr = r.stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 64<<10)
		for {
			n, err := conn.Read(buf)
			if err != nil {
				return
			}
			r.states <- string(buf[:n])
		}
	}()
	go func() {
		defer close(r.ended)
		r.cmd.Wait()
		conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // what is queued is read
		<-read
		conn.Close()
		close(r.states)
	}()
	t.Cleanup(func() {
		r.cmd.Process.Kill()
		<-r.ended
		lifeW.Close()
		if t.Failed() {
			t.Logf("supervisor said:\n%s", r.stderr)
		}
	})
	return r
}

// ready waits for READY=1.
func (r *running) ready() *running {
	r.t.Helper()
	r.until("READY=1")
	return r
}

func (r *running) until(word string) string {
	r.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		select {
		case s, ok := <-r.states:
			if !ok {
				r.t.Fatalf("it ended before it said %q\n%s", word, r.stderr)
			}
			if strings.Contains(s, word) {
				return s
			}
		case <-timer.C:
			r.t.Fatalf("it never said %q", word)
		}
	}
}

// end waits for the supervisor's end and gives its exit code and last status.
func (r *running) end() (int, string) {
	r.t.Helper()
	select {
	case <-r.ended:
	case <-time.After(patience):
		r.t.Fatal("it does not end")
	}
	last := ""
	for s := range r.states {
		if v, ok := strings.CutPrefix(s, "STATUS="); ok {
			last = v
		}
	}
	return r.cmd.ProcessState.ExitCode(), last
}

func (r *running) dial() *net.UnixConn {
	r.t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: r.spec.Socket, Net: "unix"})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// ask sends one request and reads the reply.
func (r *running) ask(req wire.Request, fds ...int) (wire.Reply, *net.UnixConn, *bufio.Reader) {
	r.t.Helper()
	if req.Version == 0 {
		req.Version = wire.Version
	}
	c := r.dial()
	line, err := json.Marshal(req)
	if err != nil {
		r.t.Fatal(err)
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := c.WriteMsgUnix(append(line, '\n'), oob, nil); err != nil {
		r.t.Fatal(err)
	}
	br := bufio.NewReader(c)
	answer, err := br.ReadBytes('\n')
	if err != nil {
		r.t.Fatalf("no reply: %v", err)
	}
	var reply wire.Reply
	if err := json.Unmarshal(answer, &reply); err != nil {
		r.t.Fatal(err)
	}
	return reply, c, br
}

// client is an ACP client on the socket.
type client struct {
	t    *testing.T
	w    io.Writer
	r    *bufio.Reader
	next int
}

func (r *running) attach() *client {
	r.t.Helper()
	reply, c, br := r.ask(wire.Request{Op: wire.OpAttach, Client: "test"})
	if !reply.OK {
		r.t.Fatalf("attach: %s", reply.Error)
	}
	return &client{t: r.t, w: c, r: br}
}

type message struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
}

func (c *client) send(method string, params any) string {
	c.t.Helper()
	c.next++
	p, err := json.Marshal(params)
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := fmt.Fprintf(c.w, `{"jsonrpc":"2.0","id":%d,"method":%q,"params":%s}`+"\n", c.next, method, p); err != nil {
		c.t.Fatal(err)
	}
	return strconv.Itoa(c.next)
}

// answer reads until the answer to id and gives the text that was streamed before it.
func (c *client) answer(id string) (message, string) {
	c.t.Helper()
	var text strings.Builder
	for {
		line, err := c.r.ReadBytes('\n')
		if err != nil {
			c.t.Fatalf("before the answer: %v", err)
		}
		var m message
		if err := json.Unmarshal(line, &m); err != nil {
			c.t.Fatalf("%v: %q", err, line)
		}
		if m.Method == "" && string(m.ID) == id {
			return m, text.String()
		}
		var u struct {
			Update struct {
				Content struct{ Text string }
			}
		}
		if m.Method == "session/update" && json.Unmarshal(m.Params, &u) == nil {
			text.WriteString(u.Update.Content.Text)
		}
	}
}

func (c *client) call(method string, params any) json.RawMessage {
	c.t.Helper()
	m, _ := c.answer(c.send(method, params))
	if m.Error != nil {
		c.t.Fatalf("%s: %s", method, m.Error.Message)
	}
	return m.Result
}

// session opens one in dir.
func (c *client) session(dir string) string {
	c.t.Helper()
	c.call("initialize", map[string]any{"protocolVersion": 1})
	var s struct{ SessionID string }
	if err := json.Unmarshal(c.call("session/new", map[string]any{"cwd": dir, "mcpServers": []any{}}), &s); err != nil {
		c.t.Fatal(err)
	}
	return s.SessionID
}

func (c *client) begin(session, text string) string {
	c.t.Helper()
	return c.send("session/prompt", map[string]any{"sessionId": session, "prompt": []any{map[string]string{"type": "text", "text": text}}})
}

func (c *client) prompt(session, text string) string {
	c.t.Helper()
	m, out := c.answer(c.begin(session, text))
	if m.Error != nil {
		c.t.Fatalf("prompt %q: %s", text, m.Error.Message)
	}
	return out
}

func TestTurnThroughTheSocket(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	c := r.attach()
	if got := c.prompt(c.session(r.spec.Dir), "echo hello there"); got != "hello there" {
		t.Errorf("%q", got)
	}
	reply, _, _ := r.ask(wire.Request{Op: wire.OpStatus})
	if st := reply.Status; st == nil || !st.Sandboxed || st.Clients != 1 || st.Sessions != 1 || st.Network != "none" || st.PID != r.cmd.Process.Pid || st.Runtime == 0 {
		t.Errorf("status %+v", reply.Status)
	}
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code, last := r.end(); code != 0 || last != "stopped" {
		t.Errorf("exit %d, last words %q", code, last)
	}
	if _, err := os.Lstat(r.spec.Socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket stayed: %v", err)
	}
}

func TestSessionsOpenOnlyInTheWorkspaceOrAGrant(t *testing.T) {
	spec := agentOf(t)
	grant := filepath.Join(spec.Policy.Home, "granted")
	if err := os.MkdirAll(grant, 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(spec.Dir, "etc")
	if err := os.Symlink("/etc", link); err != nil {
		t.Fatal(err)
	}
	spec.Policy.Grants = []sandbox.Grant{{Path: grant, Access: sandbox.ReadOnly}}
	c := supervise(t, spec).ready().attach()
	c.session(spec.Dir)
	c.call("session/new", map[string]any{"cwd": grant, "mcpServers": []any{}})
	for _, cwd := range []string{"/", spec.Policy.AgentDir, link, spec.Policy.Home, "relative", ""} {
		m, _ := c.answer(c.send("session/new", map[string]any{"cwd": cwd, "mcpServers": []any{}}))
		if m.Error == nil || m.Error.Code != -32602 {
			t.Errorf("cwd %q: %+v", cwd, m)
		}
	}
}

func TestRuntimeCannotUseItsClientToReachOut(t *testing.T) {
	spec := agentOf(t)
	if err := os.Symlink("/tmp", filepath.Join(spec.Dir, "out")); err != nil {
		t.Fatal(err)
	}
	c := supervise(t, spec).ready().attach()
	s := c.session(spec.Dir)
	for _, word := range []string{"client-write /etc/x y", "client-write " + spec.Dir + "/out/x y", "client-write " + spec.Dir + "/../x y", "client-write " + spec.Dir + "/x y", "client-read /etc/passwd", "client-terminal id"} {
		if out := c.prompt(s, word); !strings.Contains(out, "error") {
			t.Errorf("%s: %q", word, out)
		}
	}
}

// A client writes outside the boundary, where no seal holds: what is sealed inside it must not write
// either, under whatever name git obeys it.
func TestRuntimeCannotHaveItsClientWriteWhatIsSealed(t *testing.T) {
	spec := agentOf(t)
	spec.ClientFiles = "workspace"
	for name, text := range map[string]string{
		".git/HEAD": "ref: refs/heads/main\n", ".git/config": "[core]\n\thooksPath = .husky\n\tfsmonitor = tools/watch\n[include]\n\tpath = ../shared/config\n",
		".git/objects/x": "", ".git/refs/x": "", ".husky/pre-push": "#!/bin/sh\n", "tools/watch": "#!/bin/sh\n", "shared/config": "[user]\n\tname = a\n", "notes": "my notes",
	} {
		path := filepath.Join(spec.Dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(".husky", filepath.Join(spec.Dir, "way-in")); err != nil {
		t.Fatal(err)
	}
	c := supervise(t, spec).ready().attach()
	c.call("initialize", map[string]any{"protocolVersion": 1, "clientCapabilities": map[string]any{"fs": map[string]bool{"readTextFile": true, "writeTextFile": true}}})
	var session struct{ SessionID string }
	if err := json.Unmarshal(c.call("session/new", map[string]any{"cwd": spec.Dir, "mcpServers": []any{}}), &session); err != nil {
		t.Fatal(err)
	}
	// asked is what the client is asked to do over one word.
	asked := func(word string) (paths []string) {
		t.Helper()
		id := c.begin(session.SessionID, word)
		for {
			line, err := c.r.ReadBytes('\n')
			if err != nil {
				t.Fatal(err)
			}
			var m message
			if err := json.Unmarshal(line, &m); err != nil {
				t.Fatal(err)
			}
			if m.Method == "" && string(m.ID) == id {
				return paths
			}
			if strings.HasPrefix(m.Method, "fs/") {
				var p struct{ Path string }
				if err := json.Unmarshal(m.Params, &p); err != nil {
					t.Fatal(err)
				}
				paths = append(paths, p.Path)
				fmt.Fprintf(c.w, `{"jsonrpc":"2.0","id":%s,"result":{"content":""}}`+"\n", m.ID)
			}
		}
	}
	for _, name := range []string{".husky/pre-commit", ".husky/pre-push", "way-in/pre-commit", "tools/watch", "shared/config", ".git/config"} {
		if paths := asked("client-write " + spec.Dir + "/" + name + " text"); len(paths) > 0 {
			t.Errorf("%s: the client is to write %q", name, paths)
		}
	}
	for _, word := range []string{"client-write " + spec.Dir + "/notes text", "client-write " + spec.Dir + "/tools/new text", "client-read " + spec.Dir + "/.husky/pre-push"} {
		if paths := asked(word); len(paths) != 1 {
			t.Errorf("control, %s: the client is asked for %q", word, paths)
		}
	}
}

func TestRuntimeKilledEveryOpenRequestIsAnswered(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	c := r.attach()
	s := c.session(r.spec.Dir)
	id := c.begin(s, "crash KILL")
	m, _ := c.answer(id)
	if m.Error == nil || !strings.Contains(m.Error.Message, "signal 9") || !strings.Contains(m.Error.Message, "loaded again") {
		t.Errorf("%+v", m.Error)
	}
	if code, last := r.end(); code != 1 || !strings.Contains(last, "signal 9") {
		t.Errorf("exit %d, last words %q", code, last)
	}
	// The next start finds the session where the runtime left it.
	c = supervise(t, r.spec).ready().attach()
	c.call("initialize", map[string]any{"protocolVersion": 1})
	c.call("session/load", map[string]any{"sessionId": s, "cwd": r.spec.Dir, "mcpServers": []any{}})
	if got := c.prompt(s, "echo again"); got != "again" {
		t.Errorf("%q", got)
	}
}

func TestRuntimeThatExitsWellEndsWell(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	c := r.attach()
	c.begin(c.session(r.spec.Dir), "exit 0")
	if code, _ := r.end(); code != 0 {
		t.Errorf("exit %d", code)
	}
}

func TestJunkOnStdoutIsSaidAndPassedOver(t *testing.T) {
	for _, kind := range []string{"banner", "escape", "half"} {
		t.Run(kind, func(t *testing.T) {
			r := supervise(t, agentOf(t)).ready()
			c := r.attach()
			s := c.session(r.spec.Dir)
			c.prompt(s, "junk "+kind)
			if got := c.prompt(s, "echo still here"); !strings.Contains(got, "still here") {
				t.Errorf("%q", got)
			}
			r.cmd.Process.Signal(syscall.SIGTERM)
			r.end()
			if !strings.Contains(r.stderr.String(), "standard output") && !strings.Contains(r.stderr.String(), "stdout") {
				t.Errorf("nobody is told of the junk: %s", r.stderr)
			}
			if strings.Contains(r.stderr.String(), "\x1b") {
				t.Errorf("an escape sequence reached the log: %q", r.stderr)
			}
		})
	}
}

func TestHundredMegabytesWithoutNewlineEndTheRuntimeWithAReason(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	c := r.attach()
	m, _ := c.answer(c.begin(c.session(r.spec.Dir), "junk mb 100"))
	if m.Error == nil {
		t.Errorf("%+v", m)
	}
	if code, last := r.end(); code != 1 || !strings.Contains(last, "64") {
		t.Errorf("exit %d, last words %q", code, last)
	}
}

func TestDaemonGoneStopsTheAgent(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	r.life.Close()
	if code, last := r.end(); code != 0 || last != "stopped" {
		t.Errorf("exit %d, last words %q", code, last)
	}
}

func TestSupervisorKilledLeavesNothingAndTheNextStartWorks(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	c := r.attach()
	out := c.prompt(c.session(r.spec.Dir), "fork tag-"+t.Name())
	if !strings.HasPrefix(out, "forked") {
		t.Fatalf("%q", out)
	}
	if len(withArgument(t, "tag-"+t.Name())) == 0 {
		t.Fatal("the forked process is not to be seen")
	}
	r.cmd.Process.Kill()
	r.end()
	deadline := time.Now().Add(patience)
	for len(withArgument(t, "tag-"+t.Name())) > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("processes of the agent outlived its supervisor: %v", withArgument(t, "tag-"+t.Name()))
		}
	}
	c = supervise(t, r.spec).ready().attach()
	if got := c.prompt(c.session(r.spec.Dir), "echo back"); got != "back" {
		t.Errorf("%q", got)
	}
}

func TestWithoutABoundaryWhatLeavesTheSessionEndsToo(t *testing.T) {
	spec := agentOf(t)
	spec.Sandboxed = false
	spec.Argv = []string{spec.Policy.Guest, "selftest"}
	r := supervise(t, spec).ready()
	c := r.attach()
	if out := c.prompt(c.session(spec.Dir), "fork tag-"+t.Name()); !strings.HasPrefix(out, "forked") {
		t.Fatalf("%q", out)
	}
	r.cmd.Process.Signal(syscall.SIGTERM)
	r.end()
	if left := withArgument(t, "tag-"+t.Name()); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// withArgument lists the processes that carry an argument.
func withArgument(t *testing.T, arg string) []string {
	t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && bytes.Contains(b, []byte(arg)) {
			out = append(out, p)
		}
	}
	return out
}

func TestOneSupervisorPerAgent(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	second := supervise(t, r.spec)
	if code, last := second.end(); code != 1 || !strings.Contains(last, "running already") {
		t.Errorf("exit %d, last words %q", code, last)
	}
	if got := r.attach(); got == nil {
		t.Error("the first lost its socket")
	}
}

func TestExitCodesTellWhetherToTryAgain(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*wire.Spec)
		code   int
		word   string
	}{
		"no bubblewrap":           {func(s *wire.Spec) { s.Bwrap = "/nonexistent/bwrap" }, 69, "agentconnect probe"},
		"a refused grant":         {func(s *wire.Spec) { s.Policy.Grants = []sandbox.Grant{{Path: "/etc", Access: "rw"}} }, 78, "belongs to the system"},
		"another version":         {func(s *wire.Spec) { s.Version++ }, 78, "version"},
		"nothing to start":        {func(s *wire.Spec) { s.Argv = nil }, 78, "no runtime"},
		"a missing program":       {func(s *wire.Spec) { s.Argv = []string{"/nonexistent/runtime"} }, 1, "exit status"},
		"a boundary unmade":       {func(s *wire.Spec) { s.Bwrap = "" }, 78, "without bubblewrap"},
		"a network without rules": {func(s *wire.Spec) { s.Policy.Network = "open" }, 78, "rules"},
		"rules without a network": {func(s *wire.Spec) { s.Egress = &wire.Egress{} }, 78, "rules"},
	} {
		t.Run(name, func(t *testing.T) {
			spec := agentOf(t)
			c.change(spec)
			r := supervise(t, spec)
			if code, last := r.end(); code != c.code || !strings.Contains(last, c.word) {
				t.Errorf("exit %d, last words %q; want %d, %q", code, last, c.code, c.word)
			}
		})
	}
}

// ran is what a command inside printed and how it ended.
func (r *running) exec(stdin string, argv ...string) (stdout, stderr string, code int) {
	r.t.Helper()
	in, inW, _ := os.Pipe()
	outR, out, _ := os.Pipe()
	errR, errW, _ := os.Pipe()
	reply, _, br := r.ask(wire.Request{Op: wire.OpExec, Argv: argv}, int(in.Fd()), int(out.Fd()), int(errW.Fd()))
	in.Close()
	out.Close()
	errW.Close()
	if !reply.OK {
		r.t.Fatalf("exec: %s", reply.Error)
	}
	go func() {
		io.WriteString(inW, stdin)
		inW.Close()
	}()
	o, _ := io.ReadAll(outR)
	e, _ := io.ReadAll(errR)
	line, err := br.ReadBytes('\n')
	var end wire.ExecEnd
	if err != nil || json.Unmarshal(line, &end) != nil {
		r.t.Fatalf("no end: %v %q", err, line)
	}
	return string(o), string(e), end.Code
}

// A command may be over before its sandbox's first process is known: that is its end, and not one
// whose git seals cannot be watched.
func TestCommandThatIsOverBeforeItIsKnown(t *testing.T) {
	spec := agentOf(t)
	spec.Bwrap = filepath.Join(spec.Policy.Home, "bwrap")
	never := spec.Bwrap + ".never"
	if err := unix.Mkfifo(never, 0o600); err != nil {
		t.Fatal(err)
	}
	// It tells of a process that has ended, and takes its time to end itself, without a child.
	script := `#!/bin/bash
case "$*" in *at-once*) ;; *) exec /usr/bin/bwrap "$@" ;; esac
info=$(tr '\0' '\n' </proc/self/fd/"$2" | sed -n '/^--info-fd$/{n;p}')
: & wait $!
printf '{"child-pid": %d}\n' $! >&"$info"
read -r -t 0.3 <>'` + never + `'
exit 127
`
	if err := os.WriteFile(spec.Bwrap, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	r := supervise(t, spec).ready()
	if _, stderr, code := r.exec("", "at-once"); code != 127 || stderr != "" {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if _, stderr, code := r.exec("", "/bin/sh", "-c", "exit 3"); code != 3 {
		t.Errorf("control: exit %d: %s", code, stderr)
	}
}

// Why there is no terminal inside is known there alone.
func TestShellWithoutATerminalSaysWhy(t *testing.T) {
	spec := agentOf(t)
	spec.Sandboxed, spec.Argv = false, []string{spec.Policy.Guest, "selftest"}
	guest := spec.Policy.Guest
	spec.Policy.Guest = filepath.Join(spec.Policy.Home, "guest")
	script := `#!/bin/sh
case "$1" in pty) echo "pty: the terminals are all taken" >&2; exit 1 ;; *) exec '` + guest + `' "$@" ;; esac
`
	if err := os.WriteFile(spec.Policy.Guest, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	r := supervise(t, spec).ready()
	if reply, _, _ := r.ask(wire.Request{Op: wire.OpExec, Argv: []string{"/bin/true"}, TTY: &wire.WinSize{Rows: 24, Cols: 80}}); !strings.Contains(reply.Error, "are all taken") {
		t.Errorf("%+v", reply)
	}
}

// A command whose start the agent's end cuts off is told that, not what became of a context.
func TestACommandThatTheEndCutsOffIsToldSo(t *testing.T) {
	spec := agentOf(t)
	spec.Bwrap = filepath.Join(spec.Policy.Home, "bwrap")
	up := filepath.Join(spec.Policy.Home, "up")
	if err := unix.Mkfifo(up, 0o600); err != nil {
		t.Fatal(err)
	}
	script := `#!/bin/sh
case "$*" in *held-up*) echo >'` + up + `'; exec sleep 600 ;; *) exec /usr/bin/bwrap "$@" ;; esac
`
	if err := os.WriteFile(spec.Bwrap, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, req := range map[string]wire.Request{
		"pipes":      {Op: wire.OpExec, Argv: []string{"held-up"}},
		"a terminal": {Op: wire.OpExec, Argv: []string{"held-up"}, TTY: &wire.WinSize{Rows: 24, Cols: 80}},
	} {
		t.Run(name, func(t *testing.T) {
			r := supervise(t, spec).ready()
			read, write, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer read.Close()
			defer write.Close()
			var fds []int
			if req.TTY == nil {
				fds = []int{int(read.Fd()), int(write.Fd()), int(write.Fd())}
			}
			go func() {
				_, _ = os.ReadFile(up) // it is being started
				_ = r.cmd.Process.Signal(syscall.SIGTERM)
			}()
			if reply, _, _ := r.ask(req, fds...); reply.OK || !strings.Contains(reply.Error, "agent "+spec.Agent+" is ending") {
				t.Errorf("%+v", reply)
			}
		})
	}
}

func TestExecPassesStreamsAndCode(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	out, stderr, code := r.exec("from outside", "/bin/sh", "-c", "cat; echo oops >&2; pwd; exit 42")
	if out != "from outside"+r.spec.Dir+"\n" || stderr != "oops\n" || code != 42 {
		t.Errorf("%q %q %d", out, stderr, code)
	}
	if _, _, code := r.exec("", "/bin/sh", "-c", "kill -9 $$"); code != 137 {
		t.Errorf("killed: %d", code)
	}
}

// A command that cannot be started is told from one that fails, as in a shell.
func TestExecOfWhatIsNoCommandEndsLikeAShell(t *testing.T) {
	for _, sandboxed := range []bool{true, false} {
		spec := agentOf(t)
		if spec.Sandboxed = sandboxed; !sandboxed {
			spec.Argv = []string{spec.Policy.Guest, "selftest"}
		}
		r := supervise(t, spec).ready()
		script := filepath.Join(r.spec.Dir, "bare")
		if err := os.WriteFile(script, []byte("echo bare $1; exit 5\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			argv []string
			code int
			word string
		}{
			{[]string{"no-such-command"}, 127, "no-such-command: not found"},
			{[]string{"/no/such/command"}, 127, "/no/such/command: not found"},
			{[]string{"--bind"}, 127, "--bind: not found"},
			{[]string{"/etc/passwd"}, 126, "/etc/passwd: permission denied"},
			{[]string{"/usr"}, 126, "/usr: is a directory"},
			{[]string{"sh", "-c", "exit 1"}, 1, ""},
			{[]string{script, "words"}, 5, "bare words"},
		} {
			out, stderr, code := r.exec("", c.argv...)
			if code != c.code || !strings.Contains(out+stderr, c.word) {
				t.Errorf("sandboxed %t, %q: %d, want %d: %q %q", sandboxed, c.argv, code, c.code, out, stderr)
			}
		}
	}
}

func TestExecTakesPipesAndNothingElse(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	dir, err := os.Open(r.spec.Policy.Home)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	file, err := os.Create(filepath.Join(r.spec.Policy.Home, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	_, w, _ := os.Pipe()
	defer w.Close()
	for name, fd := range map[string]int{"a directory": int(dir.Fd()), "a file": int(file.Fd())} {
		if reply, _, _ := r.ask(wire.Request{Op: wire.OpExec, Argv: []string{"/bin/true"}}, fd, int(w.Fd()), int(w.Fd())); reply.OK || !strings.Contains(reply.Error, "pipes") {
			t.Errorf("%s as stdin: %+v", name, reply)
		}
	}
	for name, req := range map[string]wire.Request{
		"no command":          {Op: wire.OpExec},
		"NUL":                 {Op: wire.OpExec, Argv: []string{"a\x00b"}},
		"environment":         {Op: wire.OpExec, Argv: []string{"x"}, Env: []string{"=x"}},
		"outside of the view": {Op: wire.OpExec, Argv: []string{"/bin/true"}, Dir: "/root"},
		"no pipes":            {Op: wire.OpExec, Argv: []string{"/bin/true"}},
		"unknown":             {Op: "format"},
		"older":               {Op: wire.OpStatus, Version: wire.Version + 1},
	} {
		if reply, _, _ := r.ask(req); reply.OK || reply.Error == "" {
			t.Errorf("%s: %+v", name, reply)
		}
	}
}

func TestExecEndsWithItsClient(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	in, _, _ := os.Pipe()
	outR, out, _ := os.Pipe()
	reply, c, _ := r.ask(wire.Request{Op: wire.OpExec, Argv: []string{"/bin/sh", "-c", "echo up; trap '' HUP TERM; while :; do sleep 0.1; done"}}, int(in.Fd()), int(out.Fd()), int(out.Fd()))
	out.Close()
	if !reply.OK {
		t.Fatal(reply.Error)
	}
	if _, err := io.ReadFull(outR, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := io.ReadAll(outR); err != nil { // its end closes the pipe
		t.Fatal(err)
	}
}

func TestTerminalInsideIsItsOwn(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	c := r.dial()
	line, err := json.Marshal(wire.Request{Version: wire.Version, Op: wire.OpExec, Argv: []string{"/bin/sh", "-c", "tty; stty size; echo done; exit 7"}, TTY: &wire.WinSize{Rows: 33, Cols: 77}})
	if err != nil {
		t.Fatal(err)
	}
	c.Write(append(line, '\n'))
	buf, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	n, on, _, _, err := c.ReadMsgUnix(buf, oob)
	if err != nil {
		t.Fatal(err)
	}
	msgs, _ := unix.ParseSocketControlMessage(oob[:on])
	if len(msgs) != 1 {
		t.Fatalf("no terminal came: %s", buf[:n])
	}
	fds, _ := unix.ParseUnixRights(&msgs[0])
	master := os.NewFile(uintptr(fds[0]), "master")
	defer master.Close()
	out, _ := io.ReadAll(master) // EIO at the end
	if s := string(out); !strings.Contains(s, "/dev/pts/") || !strings.Contains(s, "33 77") || !strings.Contains(s, "done") {
		t.Errorf("%q", s)
	}
	rest, err := bufio.NewReader(c).ReadBytes('\n')
	var end wire.ExecEnd
	if err != nil || json.Unmarshal(rest, &end) != nil || end.Code != 7 {
		t.Errorf("%v %q", err, rest)
	}
}

func TestExecOnlySupervisorStartsNoRuntimeAndEnds(t *testing.T) {
	spec := agentOf(t)
	spec.ExecOnly, spec.Argv = true, nil
	r := supervise(t, spec).ready()
	if reply, _, _ := r.ask(wire.Request{Op: wire.OpAttach}); reply.OK {
		t.Error("attached to no runtime")
	}
	if out, _, code := r.exec("", "/bin/echo", "hi"); out != "hi\n" || code != 0 {
		t.Errorf("%q %d", out, code)
	}
	if code, _ := r.end(); code != 0 {
		t.Errorf("exit %d", code)
	}
}

func TestSecretsOfTheSpecAreNowhereToBeSeen(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	c := r.attach()
	c.session(r.spec.Dir)
	for _, name := range []string{"cmdline", "environ"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", r.cmd.Process.Pid, name))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(b, []byte("s3cret")) {
			t.Errorf("the secret is in the supervisor's %s", name)
		}
	}
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", r.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(limits)) {
		if f := strings.Fields(line); strings.HasPrefix(line, "Max core file size") && f[4] != "0" && f[4] != "1" {
			t.Errorf("a crash would dump the spec: %s", line)
		}
	}
	r.cmd.Process.Signal(syscall.SIGTERM)
	r.end()
	if strings.Contains(r.stderr.String(), "s3cret") {
		t.Error("the secret is in the log")
	}
}

func TestStopInTheMiddleOfAStartRunsNothing(t *testing.T) {
	for range 20 {
		spec := agentOf(t)
		mark := filepath.Join(spec.Dir, "ran")
		spec.Argv = []string{"/bin/sh", "-c", "echo x >> " + mark + "; exec cat"}
		r := supervise(t, spec)
		r.cmd.Process.Signal(syscall.SIGTERM)
		if code, _ := r.end(); code != 0 && code != -1 {
			t.Fatalf("exit %d", code)
		}
		if b, err := os.ReadFile(mark); err == nil && string(b) != "x\n" {
			t.Errorf("it ran %q", b)
		}
	}
}

func TestClientThatSaysNothingHarmsNobody(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	r.dial() // its time ends with the supervisor's, at the latest
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code, last := r.end(); code != 0 || last != "stopped" {
		t.Errorf("exit %d, last words %q", code, last)
	}
}

func TestStatusIsSaidAgainOnTheSameConnection(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	_, conn, answers := r.ask(wire.Request{Op: wire.OpStatus})
	c := r.attach()
	c.session(r.spec.Dir)
	ask := func(line string) (reply wire.Reply) {
		t.Helper()
		if _, err := conn.Write([]byte(line)); err != nil {
			t.Fatal(err)
		}
		answer, err := answers.ReadBytes('\n')
		if err == nil {
			err = json.Unmarshal(answer, &reply)
		}
		if err != nil {
			t.Fatal(err)
		}
		return reply
	}
	status := fmt.Sprintf(`{"v":%d,"op":"status"}`+"\n", wire.Version)
	for range 3 {
		if st := ask(status).Status; st == nil || st.Clients != 1 || st.Sessions != 1 {
			t.Errorf("status %+v", st)
		}
	}
	// One that waits for the next question keeps nothing from ending.
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code, last := r.end(); code != 0 || last != "stopped" {
		t.Errorf("exit %d, last words %q", code, last)
	}
}

// One that asks and never reads is not waited for when the agent ends.
func TestClientThatDoesNotReadHoldsNoEndUp(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	conn := r.dial()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	// unread waits until the supervisor has taken what was sent; false: it no longer does.
	unread := func() bool {
		for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) { //nolint:forbidigo // looked for with a deadline
			left := -1
			if err := raw.Control(func(fd uintptr) { left, _ = unix.IoctlGetInt(int(fd), unix.TIOCOUTQ) }); err != nil {
				t.Fatal(err)
			}
			if left == 0 {
				return true
			}
		}
		return false
	}
	line := fmt.Sprintf(`{"v":%d,"op":"status"}`+"\n", wire.Version)
	for n := 0; ; n++ {
		if _, err := conn.Write([]byte(line)); err != nil {
			t.Fatal(err)
		}
		if !unread() {
			break
		}
		if n == 100_000 {
			t.Fatal("it answers without end to somebody who does not read")
		}
	}
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code, last := r.end(); code != 0 || last != "stopped" {
		t.Errorf("exit %d, last words %q", code, last)
	}
}

func TestRequestsThatAreNone(t *testing.T) {
	r := supervise(t, agentOf(t)).ready()
	for _, bad := range []string{"\n", "{}\n", "[]\n", "{\"v\":1,\"op\":\"status\",\"extra\":1}\n", strings.Repeat("x", 300<<10) + "\n", "{\"v\":1,\"op\":\"status\"}\n{\"more\":1}\n"} {
		c := r.dial()
		c.Write([]byte(bad))
		c.CloseWrite()
		answer, _ := io.ReadAll(c)
		var reply wire.Reply
		if len(answer) > 0 && (json.Unmarshal(answer, &reply) != nil || reply.OK) {
			t.Errorf("%.40q: %s", bad, answer)
		}
	}
	if reply, _, _ := r.ask(wire.Request{Op: wire.OpStatus}); !reply.OK {
		t.Errorf("after that: %+v", reply)
	}
}
