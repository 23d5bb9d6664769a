package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/controlplane/cptest"
)

// placedSpec is an agent as a control plane describes one.
func placedSpec(uuid, name, revision string, more map[string]any) map[string]any {
	s := map[string]any{
		"agentId": uuid, "orgId": "org_example", "name": name, "runtime": "selftest", "configRevision": revision, "runInSandbox": true,
		"env": map[string]string{"FROM_CP": "yes"}, "secrets": map[string]string{"CP_TOKEN": "canary-cp-secret"}, "mcpServers": []string{},
	}
	for k, v := range more {
		s[k] = v
	}
	return map[string]any{"agentId": uuid, "spec": s}
}

func tell(t *testing.T, ctx context.Context, c *cptest.Conn, typ string, payload any) cp.Ack {
	t.Helper()
	e, err := c.Ask(ctx, typ, payload)
	if err != nil {
		t.Fatal(err)
	}
	var a cp.Ack
	if e.Type != "ack" || json.Unmarshal(e.Payload, &a) != nil {
		t.Fatalf("%s was answered with %s %s", typ, e.Type, e.Payload)
	}
	return a
}

func noCPFaults(t *testing.T, s *cptest.Server) {
	t.Helper()
	if f := s.Faults(); len(f) > 0 {
		t.Errorf("a real control plane would have refused: %s", strings.Join(f, "; "))
	}
}

// runCron gives an agent a schedule whose trigger is "env", has it run now, and returns the
// report of its end.
func runCron(t *testing.T, ctx context.Context, server *cptest.Server, c *cptest.Conn, cron, agent, schedule string) (last cp.CronReport) {
	t.Helper()
	tell(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": agent, "schedule": schedule, "timezone": "UTC", "trigger": "env", "enabled": true})
	if a := tell(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); !a.OK {
		t.Fatalf("run: %s", a.Reason)
	}
	server.Until(ctx, "the end of the run", func() bool {
		for _, e := range server.Frames("cron/report") {
			if json.Unmarshal(e.Payload, &last) == nil && last.Status != "" {
				return true
			}
		}
		return false
	})
	return last
}

// A turn of an agent that a control plane placed here, from the cron to the history that
// it reads, behind the boundary.
func TestControlPlanePlacesAnAgentAndReadsItsTurn(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	// What an agent of the operator's left under that name is not for one that comes from elsewhere.
	s.add("demo")
	s.secret("canary-left", "demo", "LEFT")
	s.ok("agent", "rm", "demo")
	if err := os.RemoveAll(s.agentDir("demo")); err != nil {
		t.Fatal(err)
	}
	s.start("--api-url", server.URL(), "--api-key", cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := server.Ready(ctx)
	reg := string(server.Wait(ctx, "register", 1).Payload)
	if !strings.Contains(reg, `"sandbox"`) || strings.Contains(reg, "sandbox-required") {
		t.Errorf("registered with %s", reg)
	}
	uuid, cron := cp.NewID(), cp.NewID()
	if a := tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "Demo", "0", nil)); !a.OK {
		t.Fatalf("upsert: %s", a.Reason)
	}
	last := runCron(t, ctx, server, c, cron, uuid, "0 3 * * *")
	if last.Status != "success" || last.SessionID == "" {
		t.Fatalf("reported %+v", last)
	}
	e, err := c.Ask(ctx, "session/history", map[string]any{"agentId": uuid, "sessionId": last.SessionID})
	if err != nil {
		t.Fatal(err)
	}
	if e.Type != "session/history/page" || !strings.Contains(string(e.Payload), "FROM_CP=yes") {
		t.Errorf("history: %s %s", e.Type, e.Payload)
	}
	if got := s.works("demo", "echo $FROM_CP"); got != "yes\n" {
		t.Errorf("a command inside sees %q", got)
	}
	if got := s.works("demo", "ls -A /run/agentconnect/secrets 2>&1; true"); strings.Contains(got, "LEFT") {
		t.Errorf("it has a secret of the operator's: %q", got)
	}
	s.fails(78, []string{"control plane"}, "agent", "edit", "demo", "--no-sandbox")
	set := s.agentconnect(t.Context(), "secret", "set", "demo", "TOKEN")
	set.Stdin = strings.NewReader("x\n")
	if r := s.finish(set); r.code != 78 || !strings.Contains(r.err, "set them there") {
		t.Errorf("secret set: %d %s", r.code, r.err)
	}
	s.fails(78, []string{"set them there"}, "secret", "list", "demo")
	out := s.ok("status")
	for _, w := range []string{"control plane", "ready", "demo", "placed here"} {
		if !strings.Contains(out, w) {
			t.Errorf("status does not say %q:\n%s", w, out)
		}
	}
	// What was said in confidence rests nowhere, but where the agent itself put it.
	filepath.WalkDir(s.root, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() && !strings.Contains(path, "selftest.json") && !strings.HasSuffix(path, "sessions.db") {
			if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), "canary-cp-secret") {
				t.Errorf("%s holds the agent's secret", path)
			}
		}
		return nil
	})
	for _, p := range mentioning(s.base) {
		if line := fmt.Sprint(p.cmdline()); strings.Contains(line, cptest.Key) {
			t.Errorf("the key stands on the command line of %d: %s", p.pid, line)
		}
	}
	// The connection is lost and comes back; the agent goes on and is not told anew.
	pid := s.agent("demo").PID
	raw, err := json.Marshal(placedSpec(uuid, "Demo", "0", nil)["spec"])
	if err != nil {
		t.Fatal(err)
	}
	server.Hold(cp.RegisterOK{Agents: []json.RawMessage{raw}})
	server.Drop()
	server.Wait(ctx, "register", 2)
	server.Ready(ctx)
	if now := s.agent("demo"); now.PID != pid {
		t.Errorf("the agent was %d and is %d: %s", pid, now.PID, now.Reason)
	}
	noCPFaults(t, server)
}

// What the control plane asks for never goes beyond the operator's own policy.
func TestRequiredModeSandboxesWhateverTheControlPlaneSays(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	s.start("--require-sandbox", "--api-url", server.URL(), "--api-key", cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := server.Ready(ctx)
	if reg := string(server.Wait(ctx, "register", 1).Payload); !strings.Contains(reg, "sandbox-required") {
		t.Errorf("registered with %s", reg)
	}
	uuid := cp.NewID()
	if a := tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "bare", "0", map[string]any{"runInSandbox": false})); !a.OK {
		t.Fatalf("upsert: %s", a.Reason)
	}
	if st, err := s.client().Status(ctx); err != nil || len(st.Agents) != 1 || !st.Agents[0].Sandboxed {
		t.Errorf("status %+v, %v", st, err)
	}
	if got := s.works("bare", "cat /proc/self/status"); !strings.Contains(got, "NoNewPrivs:\t1") {
		t.Errorf("it does not run behind the boundary:\n%s", got)
	}
}

func TestAgentThatAsksForTheSandboxWhereThereIsNoneIsRefusedInWords(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	s.namespace(noBoundary)
	s.start("--api-url", server.URL(), "--api-key", cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := server.Ready(ctx)
	if reg := string(server.Wait(ctx, "register", 1).Payload); strings.Contains(reg, `"sandbox"`) {
		t.Errorf("registered with %s", reg)
	}
	uuid, cron := cp.NewID(), cp.NewID()
	if a := tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "boxed", "0", nil)); a.OK || !strings.Contains(a.Reason, "sandbox cannot start") {
		t.Errorf("upsert: %+v", a)
	}
	tell(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "@daily", "timezone": "UTC", "trigger": "echo hi", "enabled": true})
	if a := tell(t, ctx, c, "cron/run", map[string]any{"cronId": cron}); a.OK || !strings.Contains(a.Reason, "sandbox cannot start") {
		t.Errorf("run: %+v", a)
	}
}

func TestRefusedKeyIsSaidInStatusAndNotTriedAgain(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	s.start("--api-url", server.URL(), "--api-key", "another-key")
	s.until("status says so", func() bool {
		out := s.ok("status")
		return strings.Contains(out, "refused") && strings.Contains(out, "agentconnect login") && strings.Contains(out, "(flag --api-key)")
	})
	if server.Conns() != 1 {
		t.Errorf("%d connections", server.Conns())
	}
	// A new key counts without a restart.
	login := s.agentconnect(t.Context(), "login", "--api-url", server.URL())
	login.Stdin = strings.NewReader(cptest.Key + "\n")
	if r := s.finish(login); r.code != 0 {
		t.Fatalf("login: %s%s", r.out, r.err)
	}
	info, err := os.Stat(filepath.Join(s.root, "config.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("config.json: %v %v", info, err)
	}
}

// login gives the daemon a key.
func (s *site) login(server *cptest.Server, key string) {
	s.t.Helper()
	cmd := s.agentconnect(s.t.Context(), "login", "--api-url", server.URL())
	cmd.Stdin = strings.NewReader(key + "\n")
	if r := s.finish(cmd); r.code != 0 {
		s.t.Fatalf("login: %s%s", r.out, r.err)
	}
}

// What the refusal of a key asks for works: a new one, also that of a daemon made anew there, whose
// id is another; or the same again, once it is good. What had to be told meanwhile is told.
func TestLoginAfterARefusalConnectsAndTellsWhatWaited(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	s.start()
	s.login(server, cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := server.Ready(ctx)
	uuid, cron := cp.NewID(), cp.NewID()
	placed := placedSpec(uuid, "demo", "0", nil)
	tell(t, ctx, c, "agent/upsert", placed)
	tell(t, ctx, c, "cron/upsert", map[string]any{"cronId": cron, "agentId": uuid, "schedule": "0 3 * * *", "timezone": "UTC", "trigger": "sleep 1000", "enabled": true})
	tell(t, ctx, c, "cron/run", map[string]any{"cronId": cron})
	s.untilState("demo", "running")
	raw, err := json.Marshal(placed["spec"])
	if err != nil {
		t.Fatal(err)
	}
	server.Hold(cp.RegisterOK{Agents: []json.RawMessage{raw}})
	refuse := func(key string) {
		t.Helper()
		server.Revoke(key)
		server.Drop()
		s.until("the key is refused", func() bool { return strings.Contains(s.ok("status"), "refused by the control plane") })
	}
	refuse(cptest.Key)
	s.ok("agent", "stop", "demo") // ends the turn
	s.until("there is something to tell", func() bool { return strings.Contains(s.ok("status"), "reports wait") })
	server.Give("key-of-a-new-daemon", cp.NewID())
	s.login(server, "key-of-a-new-daemon")
	server.Until(ctx, "the end of the session", func() bool {
		var got cp.Session
		for _, e := range server.Frames("event/session-sync") {
			if json.Unmarshal(e.Payload, &got) == nil && got.AgentID == uuid && got.Phase == "end" {
				return true
			}
		}
		return false
	})
	refuse("key-of-a-new-daemon")
	conns := server.Conns()
	server.Give("key-of-a-new-daemon", cp.NewID())
	s.login(server, "key-of-a-new-daemon") // as it was kept already
	server.Until(ctx, "a connection", func() bool { return server.Conns() > conns })
	noCPFaults(t, server)
}

// Whoever logs in elsewhere, or as another daemon, keeps what the agents placed here had: a control
// plane has everything removed that it does not know.
func TestWorkspacesOutliveALoginElsewhere(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	s.start()
	s.login(server, cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := server.Ready(ctx)
	uuid := cp.NewID()
	tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "demo", "0", nil))
	s.works("demo", "echo work >notes")
	moving := cp.NewID()
	tell(t, ctx, c, "agent/upsert", placedSpec(moving, "mover", "0", nil))
	s.works("mover", "echo work >notes")
	tell(t, ctx, c, "agent/detach", map[string]any{"agentId": moving, "moveId": cp.NewID()})
	elsewhere := cptest.New(t)
	elsewhere.HoldWhat(func() (ok cp.RegisterOK) {
		var r cp.Register
		if f := elsewhere.Frames("register"); len(f) > 0 && json.Unmarshal(f[len(f)-1].Payload, &r) == nil {
			for _, a := range r.LocalState.Agents {
				ok.Drop.Agents = append(ok.Drop.Agents, cp.DropAgent{AgentID: a.AgentID, Action: "remove"})
			}
		}
		return ok
	})
	s.login(elsewhere, cptest.Key)
	elsewhere.Ready(ctx)
	s.until("it is no longer placed here", func() bool { return !strings.Contains(s.ok("status"), "placed here") })
	s.until("it was looked after", func() bool {
		return strings.Contains(s.read(filepath.Join(s.root, "logs/daemon.log")), "agent removed")
	})
	for _, id := range []string{"demo", "mover"} {
		if got := s.read(filepath.Join(s.workspace(id), "notes")); got != "work\n" {
			t.Errorf("the workspace of %s holds %q", id, got)
		}
	}
	// One that is known there as this daemon's is told of as before.
	c = elsewhere.Ready(ctx)
	tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "demo", "0", nil))
	elsewhere.HoldWhat(nil)
	elsewhere.Drop()
	if reg := string(elsewhere.Wait(ctx, "register", 2).Payload); !strings.Contains(reg, uuid) || strings.Contains(reg, moving) {
		t.Errorf("registered with %s", reg)
	}
	noCPFaults(t, elsewhere)
}

// An agent that moves away and back finds what it had; one of the operator's that came by the name
// meanwhile, or another of the control plane's, does not hand on what it did there.
func TestAgentThatComesBackHasWhatItLeft(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	s.start("--api-url", server.URL(), "--api-key", cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	uuid := cp.NewID()
	place := func(uuid string) {
		t.Helper()
		if a := tell(t, ctx, server.Ready(ctx), "agent/upsert", placedSpec(uuid, "demo", "0", nil)); !a.OK {
			t.Fatalf("upsert: %s", a.Reason)
		}
	}
	registered := 1
	away := func() {
		t.Helper()
		server.Drop() // it holds nothing for this daemon now
		registered++
		server.Wait(ctx, "register", registered)
		s.until("it is no longer placed here", func() bool { return !strings.Contains(s.ok("status"), "placed here") })
	}
	place(uuid)
	s.works("demo", "echo work >notes")
	away()
	s.killDaemon()
	s.start("--api-url", server.URL(), "--api-key", cptest.Key)
	registered++
	server.Wait(ctx, "register", registered)
	place(cp.NewID()) // has the name, and not the directory
	if got := s.works("demo-2", "ls"); got != "" {
		t.Errorf("another agent finds %q", got)
	}
	away()
	place(uuid)
	if got := s.works("demo", "cat notes"); got != "work\n" {
		t.Errorf("it finds %q", got)
	}
	away()
	s.add("demo")
	s.works("demo", "echo mine >secret")
	s.ok("agent", "rm", "demo")
	place(uuid)
	s.until("it is placed", func() bool { return strings.Contains(s.ok("status"), "placed here") })
	if got := s.ok("agent", "list"); strings.Contains(got, "demo ") {
		t.Errorf("it got what the operator's agent left:\n%s", got)
	}
	noCPFaults(t, server)
}

// An agent that a person stops is not started again by what the control plane changes meanwhile.
func TestAgentThatIsBeingStoppedStaysSoWhenTheControlPlaneChangesIt(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	s.start("--api-url", server.URL(), "--api-key", cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := server.Ready(ctx)
	uuid := cp.NewID()
	tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "demo", "0", nil))
	s.ok("agent", "start", "demo")
	runtime := s.runtime()
	runtime.signal(syscall.SIGSTOP) // its end takes a while
	stopped := make(chan result, 1)
	go func() { stopped <- s.run("agent", "stop", "demo") }()
	s.untilState("demo", "stopping")
	tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "demo", "1", map[string]any{"env": map[string]string{"FROM_CP": "changed"}}))
	if r := <-stopped; r.code != 0 || !strings.Contains(r.out, "stopped") {
		t.Errorf("stop: %d %s%s", r.code, r.out, r.err)
	}
	// What was wished of it before has been done when this is.
	tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "demo", "2", map[string]any{"env": map[string]string{"FROM_CP": "changed again"}}))
	s.ok("agent", "stop", "demo")
	if log := s.read(filepath.Join(s.root, "logs/daemon.log")); strings.Count(log, "agent ended") != 1 {
		t.Errorf("it was started again:\n%s", log)
	}
}

func TestAddressWithoutTLSElsewhereIsRefused(t *testing.T) {
	s := newSite(t)
	s.start("--api-url", "ws://cp.example.invalid", "--api-key", "k")
	s.until("status says so", func() bool { return strings.Contains(s.ok("status"), "without TLS") })
	login := s.agentconnect(t.Context(), "login", "--api-url", "ws://cp.example.invalid")
	login.Stdin = strings.NewReader("k\n")
	if r := s.finish(login); r.code == 0 || !strings.Contains(r.err, "--allow-insecure") {
		t.Errorf("login took it: %d %s", r.code, r.err)
	}
}

// What the control plane gives for a repository goes to who asks for it inside, by way of
// the supervisor and the daemon, and rests nowhere.
func TestControlPlaneGivesCredentialsForWhatItAssigned(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	const token = "ghs-canary-90210"
	var asked atomic.Int32
	server.OnRequest(func(e cp.Envelope) (string, any, bool) {
		if e.Type != "gitcred/request" {
			return "ack", cp.Ack{OK: true}, true
		}
		asked.Add(1)
		return "gitcred/grant", map[string]any{"username": "x-access-token", "token": token, "ttlSec": 3600, "repoFullName": "acme/app", "access": "write"}, true
	})
	s.start("--api-url", server.URL(), "--api-key", cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := server.Ready(ctx)
	uuid := cp.NewID()
	work := map[string]any{"mode": "scratch", "isolation": "shared", "additionalRepos": []any{map[string]any{"repoFullName": "acme/app", "repoId": "42"}}}
	if a := tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "pam", "0", map[string]any{"workspace": work})); !a.OK {
		t.Fatalf("upsert: %s", a.Reason)
	}
	s.ok("agent", "start", "pam")
	ask := func(id, action, path string) result {
		return s.sh(id, fmt.Sprintf("printf 'protocol=https\\nhost=github.com\\npath=%s\\n\\n' | /run/agentconnect/guest git-credential %s", path, action))
	}
	if r := ask("pam", "get", "acme/app.git"); r.out != "username=x-access-token\npassword="+token+"\n" {
		t.Fatalf("assigned: %d %q %s", r.code, r.out, r.err)
	}
	if r := s.sh("pam", "git config --get-all credential.helper"); !strings.Contains(r.out, "git-credential") {
		t.Errorf("git inside does not know whom to ask: %q %s", r.out, r.err)
	}
	if r := ask("pam", "get", "acme/other"); r.out != "" || !strings.Contains(r.err, "not assigned") {
		t.Errorf("another repository: %d %q %s", r.code, r.out, r.err)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("the control plane was asked %d times", n)
	}
	// Whoever is not the agent's supervisor gets nothing of the daemon, be it the same user.
	sockets, err := filepath.Glob(filepath.Join(s.root, "run", "spec.sock"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("the daemon's socket: %v %v", sockets, err)
	}
	conn, err := net.Dial("unix", sockets[0])
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, `{"v":1,"op":"credential","agent":"pam","credential":{"action":"get","protocol":"https","host":"github.com","path":"acme/app"}}`+"\n")
	if answer, err := io.ReadAll(conn); err != nil || strings.Contains(string(answer), token) || !strings.Contains(string(answer), "error") {
		t.Errorf("a stranger was answered %s, %v", answer, err)
	}
	// From inside, the socket is not there.
	if r := s.sh("pam", "ls "+filepath.Dir(sockets[0])+"; test -e "+sockets[0]); r.code == 0 {
		t.Errorf("the daemon's socket is seen inside: %s", r.out)
	}
	// A command in an agent that does not run has a supervisor of its own.
	s.ok("agent", "stop", "pam")
	if r := ask("pam", "get", "acme/app"); !strings.Contains(r.out, token) {
		t.Errorf("in a command of its own: %d %q %s", r.code, r.out, r.err)
	}
	// Without the control plane nobody is kept waiting.
	if r := ask("pam", "erase", "acme/app"); r.code != 0 {
		t.Errorf("erase: %s", r.err)
	}
	server.OnAuth(func(*cptest.Conn) bool { return false })
	server.Drop()
	if r := ask("pam", "get", "acme/other"); r.out != "" {
		t.Errorf("another repository: %s", r.out)
	}
	log := s.read(filepath.Join(s.root, "logs/agents/pam.audit.jsonl"))
	for _, want := range []string{`"event":"given"`, "https://github.com/acme/app", `"event":"refused"`, `"event":"rejected"`} {
		if !strings.Contains(log, want) {
			t.Errorf("the audit log lacks %s:\n%s", want, log)
		}
	}
	filepath.WalkDir(s.root, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), token) {
				t.Errorf("%s holds the token", path)
			}
		}
		return nil
	})
	if r := s.sh("pam", "grep -rs "+token+" $HOME /tmp . /run; env"); strings.Contains(r.out, token) {
		t.Errorf("it rests inside: %s", r.out)
	}
	noCPFaults(t, server)
}

// A workspace that the control plane names is a clone, made inside by the agent's own git
// with the control plane's credentials; it is there before the runtime, and once.
func TestWorkspaceFromARepositoryIsClonedInside(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	const token = "ghs-canary-52801"
	forge, _ := s.forge(token, "acme/app", "acme/gone")
	s.outside(fmt.Sprintf(`git init -q -b trunk seed && cd seed && git config user.name x && git config user.email x@x && echo first > file && git add file && git commit -qm one && git -c http.sslVerify=false push -q %s/acme/app trunk`,
		strings.Replace(forge, "https://", "https://x:"+token+"@", 1)))
	server.OnRequest(func(e cp.Envelope) (string, any, bool) {
		if e.Type != "gitcred/request" {
			return "ack", cp.Ack{OK: true}, true
		}
		var q cp.CredentialRequest
		if err := json.Unmarshal(e.Payload, &q); err != nil || q.RepoFullName != "acme/app" {
			return "error", cp.FrameError{Code: cp.CodeScopeDenied, Message: "not yours"}, true
		}
		return "gitcred/grant", map[string]any{"username": "x-access-token", "token": token, "ttlSec": 3600, "repoFullName": "acme/app", "access": "write"}, true
	})
	s.write(filepath.Join(s.root, "config.json"), `{"network": {"mode": "host"}}`)
	s.start("--api-url", server.URL(), "--api-key", cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := server.Ready(ctx)
	place := func(uuid, name, repo, branch string) cp.Ack {
		return tell(t, ctx, c, "agent/upsert", placedSpec(uuid, name, "0", map[string]any{
			"env":       map[string]string{"GIT_SSL_NO_VERIFY": "1"},
			"workspace": map[string]any{"mode": "github", "isolation": "shared", "gitRepo": forge + "/" + repo, "branch": branch, "gitCredential": "github-app"},
		}))
	}
	uuid, cron := cp.NewID(), cp.NewID()
	if a := place(uuid, "cloner", "acme/app.git", "trunk"); !a.OK {
		t.Fatalf("upsert: %s", a.Reason)
	}
	last := runCron(t, ctx, server, c, cron, uuid, "@daily")
	if last.Status != "success" {
		t.Fatalf("reported %+v\n%s", last, s.run("logs", "cloner").out)
	}
	if got := s.works("cloner", "cat file; git status --porcelain; git rev-parse --abbrev-ref HEAD"); got != "first\ntrunk\n" {
		t.Errorf("the workspace is %q", got)
	}
	if got := s.sh("cloner", "git commit -q --allow-empty -m two && git push -q origin trunk 2>&1; git ls-remote origin trunk | cut -c1-7; git rev-parse --short=7 HEAD; cat .git/config; ls -A"); got.code != 0 || strings.Contains(got.out, token) {
		t.Errorf("push: %d %s%s", got.code, got.out, got.err)
	}
	// What the agent did there stays over a restart.
	s.works("cloner", "echo mine > file")
	s.ok("agent", "restart", "cloner")
	if got := s.works("cloner", "cat file"); got != "mine\n" {
		t.Errorf("after a restart the workspace has %q", got)
	}
	// One that cannot be cloned does not start in an empty folder.
	if a := place(cp.NewID(), "stray", "acme/gone", ""); !a.OK {
		t.Fatalf("upsert: %s", a.Reason)
	}
	s.run("agent", "start", "stray")
	s.until("it says why", func() bool { return strings.Contains(s.ok("status"), "could not be made from") })
	if a := tell(t, ctx, c, "agent/upsert", placedSpec(cp.NewID(), "open", "0", map[string]any{"runInSandbox": false, "workspace": map[string]any{"mode": "github", "gitRepo": forge + "/acme/app"}})); a.OK || !strings.Contains(a.Reason, "sandbox") {
		t.Errorf("without the sandbox: %+v", a)
	}
	filepath.WalkDir(s.root, func(path string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), token) {
				t.Errorf("%s holds the token", path)
			}
		}
		return nil
	})
	noCPFaults(t, server)
}

// The operator's word counts for what was placed before it, and the control plane hears.
func TestTightenedPolicyReachesPlacedAgents(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	s.start("--api-url", server.URL(), "--api-key", cptest.Key)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := server.Ready(ctx)
	var facts cp.Facts
	if err := json.Unmarshal(server.Wait(ctx, "facts/daemon-runtimes", 1).Payload, &facts); err != nil {
		t.Fatal(err)
	}
	for _, r := range facts.Runtimes {
		if r.Version == "" || r.Version == "installed" || r.Runtime == "selftest" && r.Version == "unknown" {
			t.Errorf("runtime %s has version %q", r.Runtime, r.Version)
		}
	}
	uuid := cp.NewID()
	if a := tell(t, ctx, c, "agent/upsert", placedSpec(uuid, "bare", "0", map[string]any{"runInSandbox": false, "skills": []any{map[string]any{"name": "x"}}})); !a.OK {
		t.Fatalf("upsert: %s", a.Reason)
	}
	s.ok("agent", "start", "bare")
	sandboxed := func() bool {
		st, err := s.client().Agent(ctx, "bare")
		return err == nil && st.Sandboxed
	}
	if sandboxed() {
		t.Fatal("it has the sandbox before it is required")
	}
	s.write(filepath.Join(s.root, "config.json"), `{"security": {"requireSandbox": true}}`)
	s.until("the agent runs behind the boundary", func() bool {
		return sandboxed() && strings.Contains(s.sh("bare", "cat /proc/self/status").out, "NoNewPrivs:\t1")
	})
	if e := server.Wait(ctx, "capabilities/update", 1); !strings.Contains(string(e.Payload), "sandbox-required") {
		t.Errorf("announced %s", e.Payload)
	}
	noCPFaults(t, server)
}

func TestStatusTellsHowTheConnectionIs(t *testing.T) {
	s := newSite(t)
	server := cptest.New(t)
	s.env = append(s.env, "AGENTCONNECT_API_KEY="+cptest.Key)
	s.start("--api-url", server.URL())
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	server.Ready(ctx)
	s.until("it is ready", func() bool {
		out := s.ok("status")
		return strings.Contains(out, "ready "+server.URL()) && strings.Contains(out, "since ")
	})
	// The control plane goes away for good: why, and when it is tried again.
	server.Stop()
	s.until("status says what is wrong and when it goes on", func() bool {
		out := s.ok("status")
		return strings.Contains(out, "waiting "+server.URL()) && strings.Contains(out, "next try") && strings.Contains(out, "refused")
	})
	if log := s.read(filepath.Join(s.root, "logs/daemon.log")); strings.Contains(log, cptest.Key) {
		t.Error("the log has the key")
	}
}
