// Variables of a sealed configuration that the supervisor changes for an agent.

package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestHarmlessVariablesOfASealedConfigurationAreSetForTheAgent(t *testing.T) {
	for _, nesting := range []string{"off", "on"} {
		t.Run("nesting "+nesting, func(t *testing.T) {
			s := newSite(t)
			ws := s.project("repo")
			s.in(ws, "git init -q --bare ../origin.git && git remote add origin ../origin.git && git push -q origin main && git fetch -q && chmod 640 .git/config")
			s.add("alice", "--workspace", ws, "--grant", s.path("origin.git")+":rw", "--git-config", "branch.*", "--nesting", nesting)
			s.start()
			s.ok("agent", "start", "alice")
			r := s.sh("alice", gitIdentity+`g=/run/agentconnect/guest
git checkout -q -b topic/1 && echo x > x && git add x && git commit -q -m x && git push -q -u origin topic/1
$g git-config branch.topic/1.remote origin && $g git-config branch.topic/1.merge refs/heads/topic/1 && git status -sb
git checkout -q --track -b t2 origin/main; cd .git && $g git-config --upstream origin/main && cd .. && git status -sb
$g git-config --unset branch.t2.merge`)
			if r.code != 0 || r.out != "## topic/1...origin/topic/1\n## t2...origin/main\n" {
				t.Fatalf("inside: %d %s%s", r.code, r.out, r.err)
			}
			if got := s.in(ws, "git config --get-regexp '^branch' && git status --porcelain && stat -c %a .git/config && ls .git/hooks"); got != "branch.topic/1.remote origin\nbranch.topic/1.merge refs/heads/topic/1\nbranch.t2.remote origin\n640\n" && !strings.Contains(got, ".sample") {
				t.Errorf("outside: %q", got)
			}
			n := 0
			for _, rec := range s.audited("alice") {
				if rec.Event == "config" && rec.Path == filepath.Join(ws, ".git") {
					n++
				}
			}
			if n != 5 {
				t.Errorf("%d changes are recorded, want 5", n)
			}
			if nesting == "off" {
				s.sealed("alice", ws, ".git/config")
			}
			if out := s.ok("agent", "show", "alice"); !strings.Contains(out, "git-config:branch.*") {
				t.Errorf("show: %s", out)
			}
		})
	}
}

// What docs/practice.md says of an agent that may change nothing: what git reports is no
// failure, the push is done, and without an upstream the work goes on by name.
func TestPushWithUpstreamIsDoneAndSaysThatTheConfigurationIsNotWritten(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.in(ws, "git init -q --bare ../origin.git && git remote add origin ../origin.git && git push -q origin main && git fetch -q")
	s.add("alice", "--workspace", ws, "--grant", s.path("origin.git")+":rw")
	s.start()
	const busy = "could not write config file .git/config: Device or resource busy"
	for _, c := range []struct{ script, says string }{
		{"git checkout -q -b topic && echo x > x && git add x && git commit -q -m x && git push -q -u origin topic && git ls-remote --exit-code origin topic", busy},
		{"git checkout -q --track -b t2 origin/main", busy},
		{"git branch -q -u origin/main", busy},
		{"git push -q origin HEAD && git pull -q origin main && git switch -q --no-track -c t3 origin/main", ""},
	} {
		if r := s.sh("alice", gitIdentity+c.script); r.code != 0 || !strings.Contains(r.err, c.says) {
			t.Errorf("%s\nexit %d: %s%s", c.script, r.code, r.out, r.err)
		}
	}
	r := s.sh("alice", "/run/agentconnect/guest git-config --upstream origin/topic")
	if r.code == 0 || !strings.Contains(r.err, "agentconnect agent edit alice --git-config 'branch.*'") {
		t.Errorf("%d %s", r.code, r.err)
	}
	if got := s.in(ws, "git config --get-regexp '^branch' || :"); got != "" {
		t.Errorf("set outside: %s", got)
	}
}

func TestNoOtherVariableAndNoOtherFileIsChangedForAnAgent(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	other := s.project("other")
	s.in(ws, "git remote add origin ../other")
	s.add("alice", "--workspace", ws, "--grant", other+":ro", "--git-config", "branch.*", "--nesting", "off")
	s.add("bob", "--workspace", other)
	s.start()
	s.ok("agent", "start", "alice")
	before := s.in(ws, "cat .git/config ../other/.git/config")
	ask := func(dir, key, value string) string {
		return fmt.Sprintf(`{"v":1,"op":"git-config","setting":{"dir":"%s","key":"%s","value":"%s"}}`, dir, key, value)
	}
	git := ws + "/.git"
	var script strings.Builder
	for i, line := range []string{
		ask(git, "core.fsmonitor", "touch x"), ask(git, "core.hooksPath", "/tmp"), ask(git, "include.path", "/tmp/x"), ask(git, "pull.ff", "only"), ask(git, "remote.origin.url", "ext::x"),
		ask(git, "branch.main.remote", "ext::sh"), ask(git, "branch.main.remote", "../evil"), ask(git, "branch.main.remote", "unknown"), ask(git, "branch.main.merge", `refs/heads/a\n[core]\n\tfsmonitor = x`),
		ask(git, `branch.x\"]\n[core]\n\tfsmonitor=x\n[y \"z.merge`, "refs/heads/a"), ask(git, "branch.main.merge", "refs/heads/x; y"),
		ask(other+"/.git", "branch.main.merge", "refs/heads/a"), ask("/tmp/evil.git", "branch.main.merge", "refs/heads/a"), ask(git+"/", "branch.main.merge", "refs/heads/a"), ask(git+"/../.git", "branch.main.merge", "refs/heads/a"), ask(ws+"/link", "branch.main.merge", "refs/heads/a"), ask(s.root, "branch.main.merge", "refs/heads/a"), ask("", "branch.main.merge", "refs/heads/a"),
	} {
		fmt.Fprintf(&script, "say %d <<'END'\n%s\nEND\n", i, line)
	}
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("missing: python3, which speaks to the socket")
	}
	r := s.sh("alice", `git init -q --bare /tmp/evil.git && ln -s .git link
say() { python3 -c '
import socket, sys
c = socket.socket(socket.AF_UNIX); c.connect("/run/agentconnect/channel/socket"); c.sendall(sys.stdin.buffer.read())
a = c.makefile().readline()
if "\"ok\":true" in a: print("worked:", sys.argv[1], a)
elif not a: print("no answer:", sys.argv[1])' "$1"; }
`+script.String()+"rm link; rm -rf /tmp/evil.git")
	if r.code != 0 || r.out != "" {
		t.Errorf("%d %s%s", r.code, r.out, r.err)
	}
	if r := s.sh("bob", "/run/agentconnect/guest git-config branch.main.merge refs/heads/a"); r.code == 0 || !strings.Contains(r.err, "not allowed for this agent") {
		t.Errorf("bob, who may not: %d %s", r.code, r.err)
	}
	if after := s.in(ws, "cat .git/config ../other/.git/config"); after != before {
		t.Errorf("changed: %s", after)
	}
	n := 0
	for _, rec := range s.audited("alice") {
		if rec.Event == "config-refused" {
			n++
		}
	}
	if n != 18 {
		t.Errorf("%d refusals are recorded, want 18", n)
	}
	s.fails(78, []string{"branch.*"}, "agent", "edit", "alice", "--git-config", "core.*")
	// The control: what it may.
	if r := s.sh("alice", "/run/agentconnect/guest git-config branch.main.remote origin"); r.code != 0 {
		t.Errorf("the control: %s", r.err)
	}
}

// The agent owns the folder that the configuration lies in: it plays with the lock and puts
// its own file wherever it can while the supervisor writes. (A symbolic link would end it.)
func TestAnAgentThatRacesTheChangeOfAConfigurationPutsNothingInIt(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.in(ws, "git remote add origin ../origin.git")
	s.add("alice", "--workspace", ws, "--git-config", "branch.*", "--nesting", "off")
	s.start()
	s.ok("agent", "start", "alice")
	mark := s.path("pwned")
	r := s.sh("alice", `cd .git; printf '[core]\n\tfsmonitor = touch `+mark+`; false\n' > /tmp/evil
touch go; ( while test -e go; do cp /tmp/evil evil && mv -f evil config.lock 2>/dev/null; cp /tmp/evil config 2>/dev/null; mv -f config.lock config 2>/dev/null; rm -f config.lock; cp /tmp/evil evil; ln evil config.lock 2>/dev/null; rm -f config.lock; done ) &
spin=$!; n=0; i=0
while test $i -lt 60 -a $n -lt 10; do i=$((i+1)); /run/agentconnect/guest git-config branch.main.merge refs/heads/n$i 2>/dev/null && n=$((n+1)); done
rm go; wait $spin; rm -f config.lock evil; echo $n`)
	if r.code != 0 {
		t.Fatalf("inside: %d %s%s", r.code, r.out, r.err)
	}
	t.Logf("changes that came through: %s", strings.TrimSpace(r.out))
	got := s.in(ws, "git status >/dev/null; cat .git/config; ls -A .git")
	if exists(mark) || strings.Contains(got, "fsmonitor") || strings.Contains(got, ".config.") {
		t.Errorf("the configuration: %s", got)
	}
	if !strings.Contains(got, `[remote "origin"]`) {
		t.Errorf("the operator's own is lost: %s", got)
	}
	if r := s.sh("alice", "/run/agentconnect/guest git-config branch.main.merge refs/heads/last"); r.code != 0 {
		t.Errorf("afterwards: %s", r.err)
	}
	if got := s.in(ws, "git config branch.main.merge"); got != "refs/heads/last\n" {
		t.Errorf("branch.main.merge: %q", got)
	}
}
