package e2e

import (
	"context"
	"encoding/base64"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// carriers are the ways by which a secret comes to an agent, each with a canary of its own.
type carriers map[string]string

// forms are how a canary may be written.
func forms(canary string) []string {
	b := base64.StdEncoding.EncodeToString([]byte(canary))
	return []string{canary, b[:len(b)-4]}
}

// found names the carriers whose canary text holds in any form.
func (c carriers) found(text string) []string {
	var out []string
	for name, canary := range c {
		for _, f := range forms(canary) {
			if strings.Contains(text, f) {
				out = append(out, name)
				break
			}
		}
	}
	return out
}

func (c carriers) only(text string, allowed ...string) []string {
	var out []string
	for _, name := range c.found(text) {
		if !strings.Contains(" "+strings.Join(allowed, " ")+" ", " "+name+" ") {
			out = append(out, name)
		}
	}
	return out
}

// Every place that could carry a secret is looked at while an agent has secrets of every
// kind and uses them: processes, files, logs, descriptors, and what a crash leaves.
func TestNoSecretIsWhereItDoesNotBelong(t *testing.T) {
	s := newSite(t)
	c := carriers{"given": "cnry-given-83a1f0", "env": "cnry-env-77c2d4", "file": "cnry-file-19e8b6", "git": "cnry-git-5d0c92", "server": "cnry-server-e41a77", "rotated": "cnry-rotated-2b9d31", "plane": "cnry-plane-6f3e58"}
	server := s.write("servers/holds", "#!/bin/sh\nexec sleep 600\n")
	s.executable(server)
	do := s.deputy("quin", "--env", "GIVEN=x")
	file := filepath.Join(s.agentDir("quin"), "agent.json")
	s.write(file, strings.Replace(s.read(file), `"x"`, `"`+c["given"]+`"`, 1))
	s.secret(c["env"], "quin", "E", "--env", "SECRET_ENV")
	s.secret(c["file"], "quin", "F")
	s.secret(c["git"], "quin", "G", "--outside")
	s.secret(c["server"], "quin", "S", "--outside")
	s.secret("before the rotation", "quin", "R")
	s.assign("quin", `[{"url": "https://git.example/a/b", "secret": "G"}]`)
	s.tools(`{"holds": {"command": "`+server+`", "host": true, "env": {"SERVER_TOKEN": {"secret": "S"}}}}`, "quin", `["holds"]`)
	s.env = append(s.env, "AGENTCONNECT_API_KEY="+c["plane"]) // the daemon's alone
	s.start()
	s.env = s.env[:len(s.env)-1]
	e := s.attach("quin")
	e.session(s.workspace("quin"))
	s.secret(c["rotated"], "quin", "R")
	if got := do("printf 'protocol=https\\nhost=git.example\\npath=a/b\\n\\n' | /run/agentconnect/guest git-credential get | wc -l; echo $SECRET_ENV $GIVEN; cat /run/agentconnect/secrets/F /run/agentconnect/secrets/R"); len(c.found(got)) != 4 || !strings.HasPrefix(got, "2\n") {
		t.Fatalf("the control: the agent does not have its secrets: %s", got)
	}
	do("(sleep 600 | /run/agentconnect/guest mcp holds) > /dev/null 2>&1 & echo started")
	hold := s.agentconnect(context.Background(), "agent", "exec", "quin", "--", "sleep", "599")
	if err := hold.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hold.Process.Kill(); hold.Wait() })
	var outside process
	s.until("the server and the command run", func() bool {
		outside = process{}
		command := false
		for _, p := range s.family() {
			line := p.cmdline()
			command = command || line == "sleep 599"
			if line == "sleep 600" && strings.Contains(p.environ(), "SERVER_TOKEN=") {
				outside = p
			}
		}
		return command && outside.pid != 0
	})

	// Processes. The runtime and what it started have the environment; pid 1 and bubblewrap,
	// the daemon, the supervisor, the bridges have none of it.
	seen := map[string]int{}
	for _, pid := range allPIDs() {
		p, ok := processOf(pid)
		if !ok || pid == os.Getpid() {
			continue
		}
		if bad := c.found(p.cmdline()); len(bad) > 0 {
			t.Errorf("%v in the arguments of %d %s", bad, pid, p.name())
		}
		var allowed []string
		switch name := p.name(); {
		case p == outside:
			allowed = []string{"server"}
		case pid == s.daemon.Process.Pid:
			allowed = []string{"plane"} // its own, as the person that started it gave it
		case name == "bwrap", strings.HasPrefix(name, "agentconnect"):
		default:
			allowed = []string{"given", "env"}
		}
		env := p.environ()
		if bad := c.only(env, allowed...); len(bad) > 0 {
			t.Errorf("%v in the environment of %d %s", bad, pid, p.name())
		}
		if len(c.found(env)) > 0 || strings.HasPrefix(p.name(), "agentconnect") || p.name() == "bwrap" {
			seen[p.name()]++
		}
	}
	for _, name := range []string{"agentconnect", "agentconnect-su", "bwrap", "guest", "sleep"} {
		if seen[name] == 0 {
			t.Errorf("no process %s was looked at: %v", name, seen)
		}
	}
	// Inside, from another command of the same agent: no more than its files.
	if bad := c.only(s.works("quin", "cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'"), "given"); len(bad) > 0 {
		t.Errorf("%v shown by the processes beside a command", bad)
	}
	// The sandboxes' descriptors: no memory file with an environment or a spec stays open.
	for _, p := range s.family() {
		if name := p.name(); name == "agentconnect-su" || name == "agentconnect" {
			continue
		}
		links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.pid))
		for _, l := range links {
			if to, _ := os.Readlink(l); strings.Contains(to, "memfd:") {
				t.Errorf("%d %s holds %s", p.pid, p.name(), to)
			}
		}
	}
	// Names that everybody can list.
	if b, err := os.ReadFile("/proc/net/unix"); err != nil {
		t.Error(err)
	} else {
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 7 && strings.HasPrefix(f[7], "@") && strings.Contains(f[7], "agentconnect") {
				t.Errorf("an abstract socket of ours: %s", line)
			}
		}
	}
	if b, err := os.ReadFile("/proc/keys"); err == nil && strings.Contains(string(b), "agentconnect") {
		t.Errorf("keys of ours in a kernel keyring: %s", b)
	}

	// What people are shown.
	for _, args := range [][]string{{"status"}, {"status", "--json"}, {"agent", "show", "quin"}, {"agent", "show", "quin", "--json"}, {"explain", "quin"}, {"explain", "quin", "--json"},
		{"config", "--json"}, {"agent", "logs", "quin"}, {"secret", "list", "quin", "--json"}} {
		r := s.run(args...)
		if bad := c.found(r.out + r.err); len(bad) > 0 {
			t.Errorf("agentconnect %q shows %v", args, bad)
		}
	}

	// A crash: the trace goes to the log, and no memory anywhere.
	supervisor := s.one("agentconnect-supervisor")
	supervisor.signal(syscall.SIGABRT)
	s.gone([]process{supervisor})
	s.until("the trace is in the log", func() bool {
		return strings.Contains(s.read(filepath.Join(s.root, "logs/agents/quin.log")), "SIGABRT")
	})
	s.ok("down")
	s.wait()

	// Files: each where it belongs, closed to others.
	err := filepath.WalkDir(s.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		own := strings.HasPrefix(path, filepath.Join(s.agentDir("quin"), "home")+"/") || strings.HasPrefix(path, s.workspace("quin")+"/")
		if !own && st.Mode()&fs.ModeSymlink == 0 && st.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s is open to others: %v", path, st.Mode())
		}
		if !st.Mode().IsRegular() {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var allowed []string
		switch {
		case path == file:
			allowed = []string{"given"}
		case filepath.Dir(path) == filepath.Join(s.root, "secrets", "quin"):
			allowed = []string{map[string]string{"E.json": "env", "F.json": "file", "G.json": "git", "S.json": "server", "R.json": "rotated"}[filepath.Base(path)]}
			if !strings.Contains(string(b), `"sealed"`) && len(c.found(string(b))) != 1 {
				t.Errorf("the control: %s does not hold its secret", path)
			}
		}
		if bad := c.only(string(b), allowed...); len(bad) > 0 {
			t.Errorf("%v in %s", bad, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if bad := c.found(s.out.String()); len(bad) > 0 {
		t.Errorf("the daemon said %v", bad)
	}
	if left := s.outside("find " + s.base + " -name 'core*' -size +0; find " + s.root + "/run -name 'in-*' -path '*/s/*' 2>/dev/null"); left != "" {
		t.Errorf("left behind: %s", left)
	}
}

func TestHostIPCIsOutOfReach(t *testing.T) {
	s := newSite(t)
	name := fmt.Sprintf("agentconnect-test-%d", os.Getpid())
	lib := `import ctypes,sys
c=ctypes.CDLL(None,use_errno=True)
`
	s.add("rob", "--network", "host")
	s.start()
	key := 0x41430000 + os.Getpid()&0xffff
	ws := s.workspace("rob")
	for what, script := range map[string][2]string{
		"System V shared memory": {
			lib + fmt.Sprintf("sys.exit(0 if c.shmget(%d,4096,0o1600)>=0 else 1)", key),
			lib + fmt.Sprintf("sys.exit(0 if c.shmget(%d,0,0)>=0 else 1)", key),
		},
		"a System V queue": {
			lib + fmt.Sprintf("sys.exit(0 if c.msgget(%d,0o1600)>=0 else 1)", key),
			lib + fmt.Sprintf("sys.exit(0 if c.msgget(%d,0)>=0 else 1)", key),
		},
		"a System V semaphore": {
			lib + fmt.Sprintf("sys.exit(0 if c.semget(%d,1,0o1600)>=0 else 1)", key),
			lib + fmt.Sprintf("sys.exit(0 if c.semget(%d,0,0)>=0 else 1)", key),
		},
		"a POSIX queue": {
			lib + fmt.Sprintf("sys.exit(0 if c.mq_open(b'/%s',0o102,0o600,None)>=0 else 1)", name),
			lib + fmt.Sprintf("sys.exit(0 if c.mq_open(b'/%s',2)>=0 else 1)", name),
		},
		"shared memory by name": {
			fmt.Sprintf("open('/dev/shm/%s','w').write('canary')", name),
			fmt.Sprintf("open('/dev/shm/%s').read()", name),
		},
	} {
		s.write(filepath.Join(ws, "make.py"), script[0])
		s.write(filepath.Join(ws, "try.py"), script[1])
		if r := s.finish(s.command(context.Background(), "python3", filepath.Join(ws, "make.py"))); r.code != 0 {
			t.Logf("%s cannot be made here, so nothing is proved: %s", what, r.err)
			continue
		}
		s.refused("rob", "cd "+ws+" && python3 try.py")
	}
	s.write("clean.py", lib+fmt.Sprintf(`import os
for f,a in (("shmctl",(c.shmget(%[1]d,0,0),0,None)),("msgctl",(c.msgget(%[1]d,0),0,None)),("semctl",(c.semget(%[1]d,0,0),0,0))):
  getattr(c,f)(*a)
c.mq_unlink(b"/%[2]s")
try: os.unlink("/dev/shm/%[2]s")
except OSError: pass`, key, name))
	s.outside("python3 " + filepath.Join(s.base, "clean.py"))
}
