package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Where people's tools put programs. Each runtime needs what its installation brings, and
// each start ends in the self-test, so that it is a real agent.
func TestRuntimesStartWhereverTheyLiveAndTheRestOfTheHomeStaysHidden(t *testing.T) {
	const run = `exec /run/agentconnect/guest selftest`
	for _, c := range []struct {
		name string
		make func(s *site, home string) string // the command
		// shown is a file that the runtime needs, hidden are neighbours of it.
		shown  string
		hidden []string
	}{
		{
			name: "nvm",
			make: func(s *site, home string) string {
				v := filepath.Join(home, ".nvm/versions/node/v22.1.0")
				// A node that looks for its script's package, as a real one does.
				s.executable(s.write(filepath.Join(v, "bin/node"), "#!/bin/sh\nd=$(dirname \"$(readlink -f \"$1\")\")\ncat $d/package.json $d/../dep/index.js >/dev/null && "+run+"\n"))
				s.executable(s.write(filepath.Join(v, "lib/node_modules/agent/cli.js"), "#!/usr/bin/env node\n"))
				s.write(filepath.Join(v, "lib/node_modules/agent/package.json"), `{"name":"agent"}`)
				s.write(filepath.Join(v, "lib/node_modules/dep/index.js"), "dep")
				s.write(filepath.Join(home, ".nvm/versions/node/v18.0.0/bin/node"), "old")
				s.write(filepath.Join(home, ".nvm/secret"), "SECRET")
				return s.link("../lib/node_modules/agent/cli.js", filepath.Join(v, "bin/agent"))
			},
			shown:  ".nvm/versions/node/v22.1.0/lib/node_modules/dep/index.js",
			hidden: []string{".nvm/versions/node/v18.0.0/bin/node", ".nvm/secret"},
		},
		{
			name: "link in .local/bin into .local/share",
			make: func(s *site, home string) string {
				v := filepath.Join(home, ".local/share/agent/versions/2.0")
				s.executable(s.write(filepath.Join(v, "agent"), "#!/bin/sh\ncat \"$(dirname \"$(readlink -f \"$0\")\")/data\" >/dev/null && "+run+"\n"))
				s.write(filepath.Join(v, "data"), "data")
				s.write(filepath.Join(home, ".local/share/keyrings/login"), "SECRET")
				s.write(filepath.Join(home, ".local/bin/other"), "SECRET")
				return s.link(filepath.Join(v, "agent"), filepath.Join(home, ".local/bin/agent"))
			},
			shown:  ".local/share/agent/versions/2.0/data",
			hidden: []string{".local/share/keyrings/login", ".local/bin/other"},
		},
		{
			name: "pnpm store",
			make: func(s *site, home string) string {
				g := filepath.Join(home, ".local/share/pnpm/global/5")
				store := filepath.Join(g, ".pnpm/agent@1.0.0/node_modules")
				s.executable(s.write(filepath.Join(store, "agent/cli.sh"), "#!/bin/sh\ncat \"$(dirname \"$(readlink -f \"$0\")\")/../dep/index.js\" >/dev/null && "+run+"\n"))
				s.write(filepath.Join(store, "agent/package.json"), `{"name":"agent"}`)
				s.write(filepath.Join(g, ".pnpm/dep@1.0.0/node_modules/dep/index.js"), "dep")
				s.link("../../dep@1.0.0/node_modules/dep", filepath.Join(store, "dep"))
				s.link("../.pnpm/agent@1.0.0/node_modules/agent", filepath.Join(g, "node_modules/agent"))
				s.write(filepath.Join(home, ".local/share/other"), "SECRET")
				shim := "#!/bin/sh\nbasedir=$(dirname \"$(echo \"$0\" | sed -e 's,\\\\,/,g')\")\nexec \"$basedir/global/5/node_modules/agent/cli.sh\" \"$@\"\n"
				path := s.write(filepath.Join(home, ".local/share/pnpm/agent"), shim)
				s.executable(path)
				return path
			},
			shown:  ".local/share/pnpm/global/5/.pnpm/dep@1.0.0/node_modules/dep/index.js",
			hidden: []string{".local/share/other"},
		},
		{
			name: "Python venv",
			make: func(s *site, home string) string {
				venv := filepath.Join(home, "venvs/agent")
				s.outside("/usr/bin/python3 -m venv --without-pip " + venv)
				site := strings.TrimSpace(s.outside(venv + "/bin/python -c 'import site; print(site.getsitepackages()[0])'"))
				s.write(filepath.Join(site, "agentmodule.py"), "import os\ndef main(): os.execv('/run/agentconnect/guest', ['guest', 'selftest'])\n")
				s.write(filepath.Join(home, "venvs/other/secret"), "SECRET")
				path := s.write(filepath.Join(venv, "bin/agent"), "#!"+venv+"/bin/python\nimport agentmodule\nagentmodule.main()\n")
				s.executable(path)
				return path
			},
			shown:  "venvs/agent/pyvenv.cfg",
			hidden: []string{"venvs/other/secret"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSite(t)
			home := s.mkdir("h")
			s.write("h/diary", "SECRET")
			s.ok("agent", "add", "alice", "--command", c.make(s, home))
			s.start()
			if got := s.ok("prompt", "alice", "echo it starts"); got != "it starts\n" {
				t.Errorf("%q", got)
			}
			shown := filepath.Join(home, c.shown)
			s.works("alice", "cat "+shown)
			s.refused("alice", "touch "+shown)
			for _, h := range append(c.hidden, "diary") {
				s.refused("alice", "cat "+filepath.Join(home, h))
			}
			s.refused("alice", "ls "+filepath.Join(s.home, ".profile")+" || ls "+s.root+"/config.json || grep -r SECRET "+home)
		})
	}
}

// A start looks through the workspace for git repositories: it may take longer by what
// ripgrep takes to list the same tree, and no more.
func TestHugeWorkspaceWithALinkCycleDelaysAStartLessThanRipgrepTakesToListIt(t *testing.T) {
	s := newSite(t)
	const files = 200_000
	huge := s.mkdir("huge")
	s.mkdir("empty")
	s.link("..", "huge/d0/up")
	s.link("../../huge", "huge/d1/again")
	for d := range files / 1000 {
		dir := s.mkdir(fmt.Sprintf("huge/d%d", d))
		first := filepath.Join(dir, "0")
		if err := os.WriteFile(first, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		for f := 1; f < 1000; f++ {
			// Names are what a scan would count; more inodes would only take longer to make.
			if err := os.Link(first, filepath.Join(dir, fmt.Sprint(f))); err != nil {
				t.Fatal(err)
			}
		}
	}
	s.add("huge", "--workspace", huge)
	s.add("empty", "--workspace", s.path("empty"))
	s.start()
	least := map[string]time.Duration{"huge": time.Hour, "empty": time.Hour, "rg": time.Hour}
	for range 12 {
		for id, best := range least {
			began := time.Now()
			if id == "rg" {
				s.outside("rg --files --hidden --no-ignore " + huge + " >/dev/null")
			} else {
				s.ok("agent", "exec", id, "--", "true")
			}
			least[id] = min(best, time.Since(began))
		}
	}
	t.Logf("least of 12: %v", least)
	if got := s.ok("prompt", "huge", "echo quick"); got != "quick\n" {
		t.Errorf("%q", got)
	}
	// Where the host has sockets whose place is not known, workspaces are searched for them:
	// up to a bound, and status says that it was reached.
	if more := least["huge"] - least["empty"]; more > least["rg"] {
		notes := strings.Join(s.agent("huge").Notes, "\n")
		if !strings.Contains(notes, "too large") || more > time.Second {
			t.Errorf("a start takes %v longer than in an empty workspace: %v; notes: %s", more, least, notes)
		}
	}
}

// oddNames trip up whoever pastes names into a command line or a list.
var oddNames = []string{"with space", "new\nline", `quo"te'`, `back\slash`, "-rf", "--bind", "ünï", "tab\there", "$(touch x)", "a=b", "#!", "%s", "~", "..."}

func TestOddNamesOfWorkspaceFileAndAgentCommand(t *testing.T) {
	s := newSite(t)
	for i, name := range oddNames {
		id := fmt.Sprintf("a%d", i)
		ws := s.mkdir(filepath.Join("w", name))
		command := s.write(filepath.Join("c", name, name), "#!/bin/sh\n[ \"$1\" = '-- \"x\ny' ] || exit 9\nexec /run/agentconnect/guest selftest\n")
		s.executable(command)
		s.ok("agent", "add", id, "--command="+command, "--arg=-- \"x\ny", "--workspace="+ws)
	}
	s.start()
	for i, name := range oddNames {
		t.Run(fmt.Sprintf("%q", name), func(t *testing.T) {
			id := fmt.Sprintf("a%d", i)
			ws := s.path(filepath.Join("w", name))
			if got := s.ok("prompt", id, "write "+strings.ReplaceAll(name, " ", "")+" text"); !strings.Contains(got, "wrote 4 bytes") {
				t.Errorf("a turn: %q", got)
			}
			r := s.run("agent", "exec", id, "--", "/bin/sh", "-c", `pwd; echo "$0" > "./$0"`, name)
			if r.code != 0 || r.out != ws+"\n" {
				t.Errorf("exit %d: %q %s", r.code, r.out, r.err)
			}
			if got := s.read(filepath.Join(ws, name)); got != name+"\n" {
				t.Errorf("the file holds %q", got)
			}
			if got := s.ok("explain", id, filepath.Join(ws, name)); !strings.Contains(got, "rw") {
				t.Errorf("explain: %s", got)
			}
		})
	}
	// Commands for `agent exec` that look like options are commands.
	if r := s.run("agent", "exec", "a0", "--", "--bind", "/", "/"); r.code != 127 {
		t.Errorf("exit %d: %s%s", r.code, r.out, r.err)
	}
	if exists(s.path("x")) || exists(filepath.Join(s.path("w"), "x")) {
		t.Error("a name was executed")
	}
}

// JSON holds no other bytes than UTF-8: what cannot be written down truly is refused, and
// nothing takes its place.
func TestNamesThatAreNotUTF8AreAClearError(t *testing.T) {
	s := newSite(t)
	bad := s.mkdir("bad\xffname")
	s.mkdir("bad\uFFFDname") // what a careless encoder would make of it
	s.executable(s.write("bad\xffname/runtime", "#!/bin/sh\n"))
	for _, args := range [][]string{
		{"--runtime", "selftest", "--workspace", bad},
		{"--runtime", "selftest", "--grant", bad + ":rw"},
		{"--command", filepath.Join(bad, "runtime")},
		{"--command", "/bin/sh", "--arg", "\xff"},
		{"--runtime", "selftest", "--env", "K=\xff"},
	} {
		r := s.run(append([]string{"agent", "add", "alice"}, args...)...)
		if r.code != 78 && r.code != 2 || !strings.Contains(r.err, "UTF-8") {
			t.Errorf("%q: exit %d: %s", args, r.code, r.err)
			s.run("agent", "rm", "alice", "--purge")
		}
	}
	if st := s.status(); len(st.Agents) != 0 {
		t.Errorf("agents were written: %+v", st.Agents)
	}
	// Inside a workspace such names are as good as any.
	s.add("bob")
	s.start()
	s.works("bob", "printf x > \"$(printf 'f\\377')\" && ls")
	if got := s.read(filepath.Join(s.workspace("bob"), "f\xff")); got != "x" {
		t.Errorf("%q", got)
	}
	// As an argument it would be another one.
	careless := filepath.Join(s.workspace("bob"), "f\uFFFD")
	s.write(careless, "y")
	if r := s.run("agent", "exec", "bob", "--", "rm", "f\xff"); r.code != 2 || !strings.Contains(r.err, "UTF-8") || s.read(careless) != "y" {
		t.Errorf("exit %d: %s", r.code, r.err)
	}
}

func TestRefusedGrantsSayWhyAtTheCommandLineAndAtTheStart(t *testing.T) {
	s := newSite(t)
	s.add("bob")
	s.add("alice")
	s.link(s.root, "to-root")
	s.link("/etc", "to-etc")
	s.mkdir("fine")
	s.start()
	file := filepath.Join(s.agentDir("alice"), "agent.json")
	before := s.read(file)
	type refusal struct{ path, why string }
	table := []refusal{
		{"/", "whole file system"},
		{"/etc", "belongs to the system"},
		{"/etc/ssh", "belongs to the system"},
		{"/usr/share", "belongs to the system"},
		{"/proc/self", "belongs to the system"},
		{"/run", "belongs to the system"},
		{"/tmp", "cannot be opened to an agent"},
		{"/home", "cannot be opened to an agent"},
		{s.home, "the whole home"},
		{s.root, "it lies in"},
		{s.base, "it holds"},
		{s.agentDir("bob"), "it lies in"},
		{s.workspace("bob"), "it lies in"},
		{s.agentDir("alice"), "it lies in"},
		{s.path("to-root"), "it lies in"},
		{s.path("to-etc"), "belongs to the system"},
		{s.path("missing"), "does not exist"},
	}
	for _, key := range []string{".ssh", ".gnupg", ".docker", ".aws", ".bash_history"} {
		why := "does not exist"
		if exists(filepath.Join(s.home, key)) {
			why = "cannot be opened to an agent"
		}
		table = append(table, refusal{filepath.Join(s.home, key), why})
	}
	// What is no secret, but runs on the host or decides what runs there, may be read.
	harmful := []string{}
	for _, key := range []string{".bashrc", ".profile", ".gitconfig", ".local/bin", ".config/systemd", ".npmrc", ".vimrc"} {
		if path := filepath.Join(s.home, key); exists(path) {
			harmful = append(harmful, path)
		}
	}
	for _, c := range table {
		for _, access := range []string{"ro", "rw"} {
			s.fails(78, []string{c.why}, "agent", "edit", "alice", "--grant", c.path+":"+access)
		}
		if c.path != s.path("missing") {
			s.fails(78, nil, "agent", "edit", "alice", "--workspace", c.path)
		}
	}
	for _, path := range harmful {
		s.fails(78, []string{"cannot be opened to an agent"}, "agent", "edit", "alice", "--grant", path+":rw")
		table = append(table, refusal{path, "cannot be opened to an agent"}) // at the start it is tried for writing
	}
	s.fails(78, []string{"it lies in"}, "agent", "edit", "alice", "--grant", s.path("fine")+"/../r:rw")
	if d := cmp.Diff(before, s.read(file)); d != "" {
		t.Errorf("a refused grant was written: %s", d)
	}
	// Written by hand, past the command line, it is refused at the start, which starts nothing.
	for _, c := range table {
		raw, err := json.Marshal(c.path)
		if err != nil {
			t.Fatal(err)
		}
		s.write(file, strings.Replace(before, `"id"`, `"grants": [{"path": `+string(raw)+`, "access": "rw"}], "id"`, 1))
		if r := s.run("agent", "start", "alice"); r.code != 78 || !strings.Contains(r.err, c.why) {
			t.Errorf("%s: exit %d: %s", c.path, r.code, r.err)
		}
	}
	s.write(file, before)
	// The refused starts are remembered as wishes: it may be up by now, without the grant.
	s.ok("agent", "stop", "alice")
	// The control: a folder of the user's is granted, and works.
	s.ok("agent", "edit", "alice", "--grant", s.path("fine")+":rw")
	s.works("alice", "touch "+s.path("fine")+"/x")
}

func TestSessionsOpenOnlyInTheWorkspaceOrAGrant(t *testing.T) {
	s := newSite(t)
	given, seen := s.mkdir("given"), s.mkdir("seen")
	s.add("bob")
	s.add("alice", "--grant", given+":rw", "--grant", seen+":ro")
	ws := s.workspace("alice")
	s.link("/etc", filepath.Join(ws, "to-etc"))
	s.link(given, filepath.Join(ws, "to-given"))
	s.mkdir(filepath.Join(ws, "sub"))
	s.write(filepath.Join(ws, "file"), "")
	s.start()
	e := s.attach("alice")
	e.must("initialize", hello)
	for _, method := range []string{"session/new", "session/load"} {
		for _, cwd := range []string{"/", "/etc", s.home, s.base, s.root, s.agentDir("alice"), s.agentDir("alice") + "/home", s.workspace("bob"),
			ws + "/to-etc", ws + "/..", ws + "/../../bob/workspace", ws + "/file", ws + "/missing", "sub", "", "/proc/self/cwd", "/tmp", given + "/../seen/.."} {
			if r, err := e.call(method, object{"sessionId": "x", "cwd": cwd, "mcpServers": []any{}}); err == nil {
				t.Errorf("%s in %q: %s", method, cwd, r)
			} else if len(err.Error()) < 20 {
				t.Errorf("%s in %q: no reason: %v", method, cwd, err)
			}
			if r, err := e.call(method, object{"sessionId": "x", "cwd": ws, "additionalDirectories": []string{cwd}, "mcpServers": []any{}}); err == nil {
				t.Errorf("%s with %q besides: %s", method, cwd, r)
			}
		}
	}
	for _, cwd := range []string{ws, ws + "/", ws + "/sub", given, seen, ws + "/to-given"} {
		e.open(cwd)
	}
	// Refused ones opened nothing: the agent still answers, in the right place.
	if got := e.prompt(e.open(ws+"/sub"), "write f text"); !strings.Contains(got, ws+"/sub/f") {
		t.Errorf("%q", got)
	}
}

// The runtime asks its client, which would do it outside the boundary.
func TestRuntimeCannotReachOutThroughItsClient(t *testing.T) {
	for _, files := range []string{"", "workspace"} {
		t.Run("clientFiles "+files, func(t *testing.T) {
			s := newSite(t)
			if files != "" {
				s.write(filepath.Join(s.root, "config.json"), `{"acp":{"clientFiles":"workspace"}}`)
			}
			s.add("alice")
			ws := s.workspace("alice")
			out := s.mkdir("out")
			s.write("out/secret", "SECRET")
			s.link(out, filepath.Join(ws, "link-to-outside"))
			s.write(filepath.Join(ws, "notes"), "my notes")
			s.mkdir(filepath.Join(ws, ".git/hooks"))
			s.start()
			e := s.attach("alice")
			asked := make(chan frame, 100)
			e.answer = func(f frame) string {
				asked <- f
				return `{"content":"from the client","terminalId":"t","exitCode":0,"output":"ran","truncated":false}`
			}
			id := e.session(ws)
			for _, word := range []string{
				"client-write /etc/x text", "client-write " + ws + "/link-to-outside/x text", "client-write " + ws + "/../x text", "client-write " + ws + "/.git/hooks/post-checkout text",
				"client-write " + s.root + "/agents/alice/agent.json {}", "client-read /etc/passwd", "client-read " + ws + "/link-to-outside/secret", "client-read " + ws + "/../agent.json",
				"client-read notes", "client-terminal touch " + out + "/x",
			} {
				if got := e.prompt(id, word); !strings.Contains(got, ": error ") {
					t.Errorf("%s: %q", word, got)
				}
			}
			if n := len(asked); n != 0 {
				t.Errorf("the client was asked %d times, first for %+v", n, <-asked)
			}
			got := e.prompt(id, "client-read "+ws+"/notes")
			if allowed := strings.Contains(got, "ok: from the client"); allowed != (files != "") {
				t.Errorf("in the workspace: %q", got)
			}
		})
	}
}

// tree is every name below dir with its kind.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fmt.Fprintln(&b, path, d.Type())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestNoResidueInAGitRepositoryBeforeDuringAndAfterEverythingIsKilled(t *testing.T) {
	s := newSite(t)
	ws := s.mkdir("repo")
	git := func(args ...string) string {
		t.Helper()
		cmd := s.command(context.Background(), append([]string{"git", "-c", "user.name=a", "-c", "user.email=a@b"}, args...)...)
		cmd.Dir = ws
		r := s.finish(cmd)
		if r.code != 0 {
			t.Fatalf("git %q: %s%s", args, r.out, r.err)
		}
		return r.out
	}
	s.write("repo/file", "text")
	git("init", "-q")
	git("add", "-A")
	git("commit", "-q", "-m", "first")
	s.mkdir("given/inner")
	s.add("alice", "--workspace", ws, "--grant", s.path("given/inner")+":ro", "--grant", s.path("given")+":rw")
	before := tree(t, s.base)
	same := func(when string) {
		t.Helper()
		if out := git("status", "--porcelain", "--ignored"); out != "" {
			t.Errorf("%s: git status: %s", when, out)
		}
		if d := cmp.Diff(tree(t, ws), treeOf(before, ws)); d != "" {
			t.Errorf("%s: %s", when, d)
		}
		if d := cmp.Diff(tree(t, s.path("given")), treeOf(before, s.path("given"))); d != "" {
			t.Errorf("%s: %s", when, d)
		}
	}
	same("before")
	for round := range 2 {
		s.start()
		e := s.attach("alice")
		id := e.session(ws)
		e.prompt(id, "fork "+s.base+"/tag")
		busy := e.begin("session/prompt", say(id, "sleep 100"))
		hold := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "sleep", "600")
		if err := hold.Start(); err != nil {
			t.Fatal(err)
		}
		s.one("sleep")
		same("during")
		family := s.family()
		if len(family) < 6 {
			t.Errorf("only %d processes: %+v", len(family), family)
		}
		if round == 0 {
			for _, p := range family {
				p.kill()
			}
		}
		s.killDaemon()
		// The daemon's end alone leaves the supervisor time to say "cancelled".
		if r, err := busy.end(); err == nil && (round == 0 || !strings.Contains(string(r), "cancelled")) {
			t.Errorf("the turn ended well: %s", r)
		}
		hold.Wait()
		s.gone(family)
		if left := mentioning(s.base + "/tag"); len(left) > 0 {
			t.Errorf("left running: %v", left)
		}
		same("after")
		git("add", "-A")
		same("after add -A")
		if code := e.close(); code != 0 {
			t.Logf("agentconnect acp: exit %d: %s", code, e.errs)
		}
	}
	// Other places where placeholders have been left by tools of this kind.
	for _, name := range []string{".bashrc", ".claude", ".gitconfig"} {
		if st, err := os.Lstat(filepath.Join(s.base, name)); err == nil {
			t.Errorf("%s: %v", name, st.Mode())
		}
	}
}

// treeOf picks the part below dir.
func treeOf(all, dir string) string {
	var b bytes.Buffer
	for line := range strings.Lines(all) {
		if strings.HasPrefix(line, dir+" ") || strings.HasPrefix(line, dir+"/") {
			b.WriteString(line)
		}
	}
	return b.String()
}

func TestReadOnlyROOTIsAClearErrorAndStatusStillWorks(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	s.ok("prompt", "alice", "echo hello")
	s.ok("down")
	s.wait()
	s.namespace(fmt.Sprintf("mount --bind %[1]s %[1]s && mount -o remount,bind,ro %[1]s", s.root))
	for _, args := range [][]string{{"agent", "add", "bob", "--runtime", "selftest"}, {"agent", "edit", "alice", "--read", "host"}, {"agent", "rm", "alice", "--purge"}, {"run"}} {
		s.fails(73, []string{"read-only file system"}, args...)
	}
	if st := s.status(); st.State != "stopped" || len(st.Agents) != 1 || st.Agents[0].ID != "alice" {
		t.Errorf("status: %+v", st)
	}
	s.ok("agent", "list")
	s.ok("agent", "show", "alice")
	s.ok("explain", "alice")
	s.ok("config")
	s.fails(75, nil, "agent", "start", "alice")
}

func TestFullDiskIsAClearErrorAndTheOldStateIsKept(t *testing.T) {
	s := newSite(t)
	s.mkdir(s.root)
	do := s.namespace(fmt.Sprintf("mount -t tmpfs -o size=4m,mode=700 none %s", s.root))
	s.add("alice", "--env", "K=before")
	s.start()
	s.ok("prompt", "alice", "echo hello")
	fill := s.path("r/fill")
	s.outsideFails("cat /dev/zero > " + fill)
	for _, args := range [][]string{{"agent", "edit", "alice", "--memory", "1G"}, {"agent", "add", "bob", "--runtime", "selftest"}} {
		s.fails(73, []string{"no space left on device"}, args...)
	}
	// A wish that cannot be written down is an error, too, and the daemon goes on.
	if r := s.run("agent", "stop", "alice"); r.code == 0 {
		t.Errorf("stop: %s", r.out)
	} else if !strings.Contains(r.err, "no space left on device") {
		t.Errorf("stop: exit %d: %s", r.code, r.err)
	}
	if st := s.status(); st.State != "running" {
		t.Errorf("status: %+v", st)
	}
	do("rm " + fill)
	if got := s.ok("agent", "show", "alice"); strings.Contains(got, "memory 1G") || !strings.Contains(got, "K (set)") {
		t.Errorf("after that: %s", got)
	}
	s.ok("agent", "edit", "alice", "--memory", "1G")
	s.ok("agent", "add", "bob", "--runtime", "selftest")
	if got := s.ok("prompt", "alice", "echo again"); got != "again\n" {
		t.Errorf("%q", got)
	}
	// Killed with its disk full, the next one starts from what is there.
	s.outsideFails("cat /dev/zero > " + fill)
	family := s.family()
	s.killDaemon()
	s.gone(family)
	s.launch()
	if code := s.wait(); code != 73 && code != 0 {
		t.Errorf("start on a full disk: exit %d: %s", code, s.out)
	}
	do("rm " + fill)
	s.start()
	s.untilState("alice", "running")
}

// outsideFails runs a script that cannot end well: it fills a disk.
func (s *site) outsideFails(script string) {
	s.t.Helper()
	if r := s.finish(s.command(context.Background(), "/bin/sh", "-c", script)); r.code == 0 {
		s.t.Fatalf("it worked: %s", script)
	}
}

func TestStateFilesCutInTheMiddleLoseNothingElse(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.add("bob")
	s.write(filepath.Join(s.root, "config.json"), `{"security":{"requireSandbox":true},"limits":{"maxAgents":7}}`)
	s.start()
	s.ok("prompt", "alice", "echo hello")
	s.ok("prompt", "bob", "echo hello")
	s.ok("down")
	s.wait()
	cut := func(path string) (whole string) {
		whole = s.read(path)
		s.write(path, whole[:len(whole)/2])
		return whole
	}
	// An agent: it alone does not start, and its file stays as it is.
	alice := filepath.Join(s.agentDir("alice"), "agent.json")
	whole := cut(alice)
	s.start()
	s.untilState("bob", "running")
	if st := s.agent("alice"); st.State != "refused" || !strings.Contains(st.Reason, "agent.json") {
		t.Errorf("alice: %s: %s", st.State, st.Reason)
	}
	s.fails(78, []string{"agent.json"}, "agent", "start", "alice")
	if got := s.read(alice); got != whole[:len(whole)/2] {
		t.Errorf("the broken file was changed: %q", got)
	}
	s.write(alice, whole)
	s.until("alice starts when her file is whole again", func() bool { return s.agent("alice").State == "running" })
	s.ok("down")
	s.wait()
	// The list of wanted agents: set aside, said, and nobody starts by guess.
	wanted := filepath.Join(s.root, "state/wanted.json")
	whole = cut(wanted)
	s.start()
	aside, err := filepath.Glob(wanted + ".broken-*")
	if err != nil || len(aside) != 1 || s.read(aside[0]) != whole[:len(whole)/2] {
		t.Errorf("set aside: %v %v", aside, err)
	}
	if st := s.status(); !strings.Contains(strings.Join(st.Warnings, "\n"), "wanted.json") {
		t.Errorf("warnings: %q", st.Warnings)
	}
	s.ok("prompt", "bob", "echo hello")
	s.ok("down")
	s.wait()
	// What the last daemon left behind: said, and written anew.
	cut(filepath.Join(s.root, "state/daemon.json"))
	if st := s.status(); st.State != "stopped" || !strings.Contains(st.Reason, "daemon.json") {
		t.Errorf("status: %s: %s", st.State, st.Reason)
	}
	s.start()
	s.untilState("bob", "running")
	s.ok("down")
	s.wait()
	// The configuration: no start, for half of it may be the half that protects.
	cut(filepath.Join(s.root, "config.json"))
	s.fails(78, []string{"config.json"}, "run")
	if st := s.status(); !strings.Contains(st.ConfigError, "config.json") {
		t.Errorf("status: %+v", st)
	}
}

// A FUSE mount of the user lets nobody else in, not even root: what starts an agent there
// must be the user all the way.
func TestWorkspaceOnAFUSEMountOfTheUserWorksOrIsAClearError(t *testing.T) {
	if f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0); err != nil {
		t.Skipf("missing: /dev/fuse for an ordinary user (%v)", err)
	} else {
		f.Close()
	}
	for _, program := range []string{"fusermount3", "bindfs"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("missing: %s (apt-get install fuse3 bindfs)", program)
		}
	}
	s := newSite(t)
	s.mkdir("behind")
	ws := s.mkdir("fuse")
	s.outside("bindfs --no-allow-other " + s.path("behind") + " " + ws)
	defer s.outside("fusermount3 -u -z " + ws)
	s.add("alice", "--workspace", ws)
	s.start()
	if r := s.run("agent", "start", "alice"); r.code != 0 {
		if !strings.Contains(r.err, ws) {
			t.Errorf("neither a start nor a clear error: %s", r.err)
		}
		t.Logf("it does not start there: %s", r.err)
		return
	}
	if got := s.ok("prompt", "alice", "write f text"); !strings.Contains(got, "wrote 4 bytes") {
		t.Errorf("%q", got)
	}
	if got := s.read("behind/f"); got != "text" {
		t.Errorf("behind the mount: %q", got)
	}
	s.ok("agent", "stop", "alice")
}
