// git control files: what an agent would have to plant for the host's git to run it, tried
// from inside with the real git, and the same outside as the control.

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/audit"
)

// gitConfig is the identity of every git here, inside and outside.
const gitIdentity = "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b; "

// in runs a script as the user in a folder, as a person in a terminal there would.
func (s *site) in(dir, script string) string {
	s.t.Helper()
	return s.outside("cd '" + dir + "' && " + gitIdentity + script)
}

// gitin runs a script inside the agent that must end well.
func (s *site) gitin(id, script string) string {
	s.t.Helper()
	return s.works(id, gitIdentity+script)
}

// project makes a repository with one commit.
func (s *site) project(path string) string {
	s.t.Helper()
	dir := s.mkdir(path)
	s.write(filepath.Join(path, "file"), "text\n")
	s.in(dir, "git init -q -b main && git add -A && git commit -q -m first")
	return dir
}

// Each is run in the folder of the thing $n, and must end badly there.
var (
	// A link that is made in a git directory would end the agent, which other tests are about.
	fileAttacks = []string{
		`echo x >> "$n"`, `echo x > x.new && mv x.new "$n"`, `rm -f "$n" && test ! -e "$n"`, `mv "$n" "$n.away"`, `ln -s /tmp/x /tmp/x.$$.l; mv -fT /tmp/x.$$.l "$n"`, `ln "$n" x.hard && echo x >> x.hard`,
	}
	dirAttacks = []string{
		`echo x > "$n/planted"`, `mv "$n" "$n.away"`, `rm -rf "$n" && test ! -e "$n"`, `mkdir x.new && mv x.new "$n/planted"`, `chmod 777 "$n"`,
	}
	// A pinned folder may be written, and must stay where it is.
	pinAttacks = []string{`mv "$n" "$n.away"`, `rmdir "$n"`, `mkdir x.new && rm -rf "$n"/x.none && mv -T x.new "$n"`}
)

// attackPaths runs attacks on each path, in one command inside the agent, and says which
// worked. As the control the same runs outside, each on a fresh copy.
func (s *site) attackPaths(id string, paths, attacks []string, control bool) {
	s.t.Helper()
	script := func(path, attack string) string {
		return fmt.Sprintf("(cd '%s' && n='%s' && %s) 2>/dev/null", filepath.Dir(path), filepath.Base(path), attack)
	}
	var inside strings.Builder
	for _, path := range paths {
		for i, a := range attacks {
			fmt.Fprintf(&inside, "%s && echo 'worked: %s: %d'\n", script(path, a), path, i)
			fmt.Fprintf(&inside, "rm -rf '%[1]s/x.new' '%[1]s/x.hard'\n", filepath.Dir(path))
		}
	}
	for line := range strings.Lines(s.works(id, inside.String()+"true")) {
		s.t.Errorf("inside: %s", line)
	}
	if !control {
		return
	}
	copied := s.path("control")
	for _, path := range paths {
		var outside strings.Builder
		for i, a := range attacks {
			at := filepath.Join(copied, filepath.Base(path))
			fmt.Fprintf(&outside, "rm -rf %[1]s && mkdir %[1]s && cp -a '%[2]s' %[1]s/ && %[3]s || echo 'failed: %[2]s: %[4]d'\n", copied, path, script(at, a), i)
		}
		for line := range strings.Lines(s.outside(outside.String() + "rm -rf " + copied)) {
			s.t.Errorf("outside it fails too, so it proves nothing: %s", line)
		}
	}
}

// sealed tries to change what lies at paths below dir, pinned to move folders away.
func (s *site) sealed(id, dir string, paths ...string) {
	s.t.Helper()
	var files, dirs []string
	for _, p := range paths {
		path := filepath.Join(dir, p)
		if st, err := os.Stat(path); err != nil {
			s.t.Errorf("it is not there: %v", err)
		} else if st.IsDir() {
			dirs = append(dirs, path)
		} else {
			files = append(files, path)
		}
	}
	s.attackPaths(id, files, fileAttacks, true)
	s.attackPaths(id, dirs, dirAttacks, true)
}

func (s *site) pinned(id, dir string, paths ...string) {
	s.t.Helper()
	for i, p := range paths {
		paths[i] = filepath.Join(dir, p)
	}
	s.attackPaths(id, paths, pinAttacks, false)
}

func TestHooksAndConfigOfEveryKindOfRepositoryAreSealed(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.project("repo/deep/er/nested")
	s.project("lib")
	s.in(ws, "git -c protocol.file.allow=always submodule --quiet add ../lib sub && git commit -q -m sub && git worktree add -q ../repo/linked -b linked && git worktree add -q ../elsewhere -b elsewhere && git init -q --bare bare.git && git config extensions.worktreeConfig true && git config --worktree user.name w")
	s.write("repo/.git/info/attributes", "")
	s.add("alice", "--workspace", ws)
	s.start()
	s.sealed("alice", ws, ".git/hooks", ".git/config", ".git/config.worktree", ".git/info/attributes",
		"deep/er/nested/.git/hooks", "deep/er/nested/.git/config",
		".git/modules/sub/hooks", ".git/modules/sub/config", "sub/.git",
		"linked/.git", ".git/worktrees/linked/commondir", ".git/worktrees/linked/gitdir",
		"bare.git/hooks", "bare.git/config", ".git/worktrees/elsewhere")
	s.pinned("alice", ws, ".git", "deep", "deep/er", "deep/er/nested", "deep/er/nested/.git", ".git/modules", ".git/modules/sub", ".git/worktrees", ".git/worktrees/linked", "bare.git", "linked", "sub")
	if got := s.gitin("alice", "git -C "+ws+" worktree prune -v; git -C "+ws+" worktree list"); strings.Contains(got, "Removing") {
		t.Errorf("pruned: %s", got)
	}
	if got := s.in(s.path("elsewhere"), "git status --porcelain && git log --oneline"); !strings.Contains(got, "first") {
		t.Errorf("the worktree elsewhere: %s", got)
	}
	if got := s.in(ws, "git status --porcelain"); strings.TrimSpace(got) != "?? bare.git/\n?? deep/\n?? linked/" {
		t.Errorf("git status outside: %q", got)
	}
}

// everydayGit is what people do all day, one line each; every one must work inside.
var everydayGit = []string{
	`echo a > a && git add a && git commit -q -m a`,
	`git switch -q -c side && echo b > b && git add b && git commit -q -m b && git switch -q main && echo c > c && git add c && git commit -q -m c`,
	`git merge -q -m merged side && git log --oneline | grep -q merged`,
	`git switch -q -c topic HEAD~1 && echo d > d && git add d && git commit -q -m d && git rebase -q main && git switch -q main && git merge -q topic`,
	`echo e >> a && git stash -q && git stash pop -q && git checkout -q a`,
	`echo f > f && git add f && git commit -q -m f && git format-patch -q -1 -o /tmp/patches && git reset -q --hard HEAD~1 && git am -q /tmp/patches/*.patch`,
	`git tag -a v1 -m v1 && git branch extra && git branch -D -q extra`,
	`git gc -q && git fsck --no-progress && git repack -adq && git pack-refs --all`,
	`git fetch -q origin && git push -q origin main`,
	`git bisect start -q HEAD HEAD~2 >/dev/null && git bisect good >/dev/null; git bisect reset >/dev/null 2>&1`,
	`git clone -q . made/clone && git -C made/clone log --oneline >/dev/null`,
	`git init -q made/new && cd made/new && echo x > x && git add x && git commit -q -m x && git config user.name changed`,
	`git worktree add -q made/tree -b tree && cd made/tree && echo y > y && git add y && git commit -q -m y && cd ../.. && git worktree remove made/tree`,
	`git notes add -m note && git cherry-pick --allow-empty side >/dev/null 2>&1 || git cherry-pick --skip`,
	`echo g > g && git add g && git commit -q -m g && git revert --no-edit HEAD >/dev/null && git reset -q --hard HEAD~1 && git reflog >/dev/null && git clean -fdq -e made`,
}

// refusedGit writes what is sealed.
var refusedGit = []string{
	`git config user.name x`, `git config core.fsmonitor x`, `git remote add x y`, `git branch -m topic renamed && git config branch.renamed.x y`, `git sparse-checkout set a`, `echo x > .git/hooks/pre-commit`,
}

func TestEverydayGitWorksInsideAndStatusOutsideIsAsBefore(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.in(ws, "git init -q --bare ../origin.git && git remote add origin ../origin.git && git push -q origin main && for i in 1 2 3; do echo $i > n && git add n && git commit -q -m $i; done")
	s.add("alice", "--workspace", ws, "--grant", s.path("origin.git")+":rw")
	s.start()
	for _, line := range everydayGit {
		if r := s.sh("alice", "set -e; "+gitIdentity+line); r.code != 0 {
			t.Errorf("%s\nexit %d: %s%s", line, r.code, r.out, r.err)
		}
	}
	for _, line := range refusedGit {
		r := s.sh("alice", gitIdentity+line)
		if r.code == 0 {
			t.Errorf("it worked: %s", line)
		} else if !strings.Contains(r.err, "busy") && !strings.Contains(r.err, "Read-only") {
			t.Errorf("%s: %s", line, r.err)
		}
		s.in(ws, "git status >/dev/null && git log >/dev/null && test ! -e .git/config.lock")
	}
	if got := s.in(ws, "git status --porcelain"); got != "?? made/\n" {
		t.Errorf("git status outside: %q", got)
	}
	if got := s.in(ws, "git config --list --local"); strings.Contains(got, "evil") || strings.Contains(got, "fsmonitor") {
		t.Errorf("config: %s", got)
	}
	s.in(ws, "git fsck --no-progress && git -C ../origin.git log main --oneline")
}

func TestLinkedWorktreeWhoseRepositoryLiesElsewhereWorksAndTheRestStaysHidden(t *testing.T) {
	for _, links := range []string{"absolute", "relative"} {
		t.Run(links, func(t *testing.T) {
			s := newSite(t)
			main := s.project("main")
			s.in(main, "git worktree add -q ../tree -b tree && git worktree add -q ../other -b other")
			ws := s.path("tree")
			if links == "relative" {
				s.write("tree/.git", "gitdir: ../main/.git/worktrees/tree\n")
				s.write("main/.git/worktrees/tree/gitdir", "../../../../tree/.git\n")
			}
			s.add("alice", "--workspace", ws)
			s.start()
			s.gitin("alice", "set -e; echo x > x; git add x; git commit -q -m inside; git stash list; git switch -q -c more; git switch -q tree; git log --oneline | grep -q inside; git fsck --no-progress")
			if got := s.in(main, "git log --oneline tree && git status --porcelain && git worktree list"); !strings.Contains(got, "inside") || !strings.Contains(got, "other") {
				t.Errorf("outside: %s", got)
			}
			s.sealed("alice", main, ".git/hooks", ".git/config", ".git/worktrees/other", ".git/worktrees/tree/commondir", ".git/worktrees/tree/gitdir", "../tree/.git")
			s.refused("alice", "cat "+main+"/file")
			s.gitin("alice", "git worktree prune -v")
			s.in(s.path("other"), "git status --porcelain && git log --oneline")
		})
	}
}

func TestDotGitThatNamesARepositoryOfTheHostOpensNothing(t *testing.T) {
	s := newSite(t)
	private := s.project("private")
	s.add("alice")
	s.start()
	for _, plant := range []string{"echo gitdir: " + private + "/.git > .git", "ln -s " + private + "/.git .git"} {
		s.works("alice", "rm -rf .git; "+plant)
		s.refused("alice", "cat "+private+"/.git/config")
		s.refused("alice", "test -e .git/HEAD || test -e $(sed 's/gitdir: //' .git)/HEAD")
		s.outside("rm -rf " + s.workspace("alice") + "/.git")
	}
}

func TestWhatTheConfigurationNamesInTheTreeIsSealed(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.in(ws, "mkdir -p .husky tools sub && echo 'exit 0' > .husky/pre-commit && echo 'cat' > tools/clean && : > inc && git config core.hooksPath .husky && git config include.path ../inc && git config filter.x.clean 'sh tools/clean' && mkdir nohooks && git init -q nohooks && rm -r nohooks/.git/hooks && ln -s .git nothing && mv .git realgit && ln -s realgit .git")
	s.add("alice", "--workspace", ws)
	s.start()
	s.sealed("alice", ws, ".husky", ".husky/pre-commit", "inc", "tools/clean", "realgit/config", "realgit/hooks", "nohooks/.git/config")
	s.sealed("alice", ws, "nohooks/.git/hooks") // made empty, so that it can be sealed
	s.attackPaths("alice", []string{filepath.Join(ws, ".git")}, fileAttacks[1:5], false)
	s.gitin("alice", "echo x > x && git add x && git commit -q -m inside")
	if got := s.in(ws, "git log --oneline"); !strings.Contains(got, "inside") {
		t.Errorf("outside: %s", got)
	}
}

// audited reads the agent's audit log.
func (s *site) audited(id string) []audit.Record {
	s.t.Helper()
	var out []audit.Record
	err := audit.Read(audit.Path(s.root, id), func(line []byte) error {
		var r audit.Record
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		out = append(out, r)
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// untilAudited waits for a record of a kind about a path.
func (s *site) untilAudited(id, event, path string) audit.Record {
	s.t.Helper()
	var found audit.Record
	s.until(event+" of "+path+" is in the audit log", func() bool {
		for _, r := range s.audited(id) {
			if r.Event == event && r.Path == path {
				found = r
				return true
			}
		}
		return false
	})
	return found
}

// spin starts a command inside that goes on until the test ends, and waits until it says so.
func (s *site) spin(id, script string) {
	s.t.Helper()
	cmd := s.agentconnect(context.Background(), "agent", "exec", id, "--", "/bin/sh", "-c", "echo spinning; "+script)
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "spinning\n" {
		s.t.Fatalf("%q %v", line, err)
	}
}

func TestHostRewritesASealedFileAndItIsSealedAgain(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.add("alice", "--workspace", ws)
	s.start()
	s.ok("agent", "start", "alice")
	hold := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "/bin/sh", "-c", "read x; echo evil >> .git/config; echo $?")
	in, _ := hold.StdinPipe()
	out, _ := hold.StdoutPipe()
	if err := hold.Start(); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(ws, ".git/config")
	s.one("sh")
	s.in(ws, "git config user.name changed")
	s.untilAudited("alice", "seal-restored", config)
	io.WriteString(in, "\n")
	if got, _ := io.ReadAll(out); string(got) == "0\n" {
		t.Errorf("the sandbox that ran while the host rewrote it can write it")
	}
	hold.Wait()
	if got := s.in(ws, "git config user.name"); got != "changed\n" {
		t.Errorf("the host's own change: %q", got)
	}
	s.sealed("alice", ws, ".git/config")
	s.in(ws, "rm -r .git/hooks")
	s.untilAudited("alice", "seal-restored", filepath.Join(ws, ".git/hooks"))
	s.sealed("alice", ws, ".git/hooks")
	// A new name that git would obey.
	s.works("alice", "mkdir -p evil && echo ../evil > .git/commondir; true")
	s.untilAudited("alice", "new-control-file", filepath.Join(ws, ".git/commondir"))
	if exists(filepath.Join(ws, ".git/commondir")) {
		t.Error("commondir is still there")
	}
	s.untilState("alice", "running")
}

// Whatever the host's git writes, what it runs included, is the host's word: an agent that stands
// by takes none of it back, also where git reads a second sealed file under the lock on the first.
func TestWhatTheHostConfiguresWhileAnAgentRunsStays(t *testing.T) {
	for name, before := range map[string]string{
		"one file":  ":",
		"two files": "git config extensions.worktreeConfig true && git config --worktree user.name w",
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			ws := s.project("repo")
			s.in(ws, before)
			s.add("alice", "--workspace", ws)
			s.start()
			s.ok("agent", "start", "alice")
			var want strings.Builder
			for i := range 20 {
				s.in(ws, fmt.Sprintf("git config alias.a%d '!x'", i))
				fmt.Fprintf(&want, "alias.a%d\n", i)
			}
			if got := s.in(ws, "git config --name-only --get-regexp ^alias"); got != want.String() {
				t.Errorf("left of 20:\n%s", got)
			}
			for _, r := range s.audited("alice") {
				if r.Event == "seal-tampered" {
					t.Errorf("%s", r.Text)
				}
			}
			s.sealed("alice", ws, ".git/config")
		})
	}
}

// In a repository that the host moves the agent goes on writing, and new names there are watched
// nowhere.
func TestAnAgentWhoseRepositoryTheHostMovesEndsAndStartsWithItSealed(t *testing.T) {
	for name, c := range map[string]struct{ move, sealed string }{
		"in the workspace":  {"mv nested moved", "moved/.git/config"},
		"out of it":         {"mv nested ../moved", ".git/config"},
		"the whole of it":   {"mkdir ../new && mv .git file ../new/", "nested/.git/config"},
		"the git directory": {"mv .git old", "old/config"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			ws := s.project("repo")
			s.project("repo/nested")
			s.add("alice", "--workspace", ws)
			s.start()
			s.ok("agent", "start", "alice")
			pid := s.agent("alice").PID
			s.in(ws, c.move)
			s.until("the agent is stopped", func() bool {
				for _, r := range s.audited("alice") {
					if r.Event == "stopped" {
						return true
					}
				}
				return false
			})
			s.until("it runs anew", func() bool { a := s.agent("alice"); return a.State == "running" && a.PID != pid })
			s.sealed("alice", ws, c.sealed)
		})
	}
}

// rounds is how often a race is run: fewer times in CI.
func rounds(many, few int) int {
	if os.Getenv("AGENTCONNECT_TEST_RACES") != "" {
		return many
	}
	return few
}

func TestNothingThatASpinningAgentWritesWhileTheHostRewritesItsConfigurationEverRuns(t *testing.T) {
	for name, file := range map[string]string{"the file": "config", "git's lock on it": "config.lock", "what a link leads to": "real"} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			ws := s.project("repo")
			if file == "real" {
				s.in(ws, "mv .git/config .git/real && ln -s real .git/config")
			}
			s.add("alice", "--workspace", ws)
			s.start()
			mark := s.path("pwned")
			s.spin("alice", `while :; do test -e .git/`+file+` && echo '[core] fsmonitor = "touch `+mark+`; false"' >> .git/`+file+`; done 2>/dev/null`)
			n, failed := rounds(1000, 50), 0
			for i := range n {
				r := s.finish(s.command(context.Background(), "/bin/sh", "-c", fmt.Sprintf("cd %s && git config user.name n%d; c=$?; git status >/dev/null; exit $c", ws, i)))
				if r.code != 0 {
					failed++
				}
				if exists(mark) {
					t.Fatalf("the agent's program ran in round %d of %d; the configuration:\n%s", i, n, s.read(filepath.Join(ws, ".git/config")))
				}
			}
			events := map[string]int{}
			for _, r := range s.audited("alice") {
				if events[r.Event]++; r.Event == "stopped" {
					t.Errorf("from then on nothing was put to the test: %s", r.Text)
				}
			}
			t.Logf("%d rounds, of which %d commands failed: %v", n, failed, events)
			if failed == n || events["seal-restored"]+events["seal-tampered"]+events["lock-tampered"] == 0 {
				t.Errorf("nothing was put to the test")
			}
		})
	}
}

// A sandbox runs for a moment before anybody knows its processes. The host's commands wait for
// that, too.
func TestNothingThatACommandWritesWhichStartsWhileTheHostRewritesItsConfigurationEverRuns(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.add("alice", "--workspace", ws)
	s.start()
	s.ok("agent", "start", "alice")
	mark, over := s.path("pwned"), make(chan struct{})
	host := make(chan int)
	go func() {
		n := 0
		for ; ; n++ {
			select {
			case <-over:
				host <- n
				return
			default:
				cmd := s.command(context.Background(), "/bin/sh", "-c", fmt.Sprintf("cd %s && git config user.name n%d; git status", ws, n))
				_ = cmd.Run() // fails where the agent wrote into its lock
			}
		}
	}()
	n := rounds(200, 12)
	for i := range n {
		r := s.sh("alice", `i=0; while test $i -lt 3000; do i=$((i+1)); echo '[core] fsmonitor = "touch `+mark+`; false"' >>.git/config; done 2>/dev/null; true`)
		if r.code != 0 || exists(mark) {
			t.Errorf("start %d of %d: exit %d %s; the agent's program ran: %v", i, n, r.code, r.err, exists(mark))
			break
		}
	}
	close(over)
	changes, sealed := <-host, 0
	for _, r := range s.audited("alice") {
		switch r.Event {
		case "seal-restored":
			sealed++
		case "stopped":
			t.Error(r.Text)
		}
	}
	t.Logf("%d starts, %d changes on the host, sealed again %d times", n, changes, sealed)
	if sealed == 0 {
		t.Error("nothing was put to the test")
	}
}

// memoryOf gives what a process keeps in memory, in KiB.
func memoryOf(t *testing.T, p process) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no VmRSS in %s", b)
	return 0
}

// The kernel drops what its queue does not hold. So that it does, the supervisor stands still
// while the agent fills it from inside; the planted name comes last, and no event tells of it.
func TestFloodOfNamesHidesNoPlantedFile(t *testing.T) {
	limit, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	if err != nil {
		t.Skip("missing: ", err)
	}
	queue, err := strconv.Atoi(strings.TrimSpace(string(limit)))
	if err != nil || queue > 200_000 {
		t.Skipf("missing: a queue that can be filled (%d, %v)", queue, err)
	}
	s := newSite(t)
	ws := s.project("repo")
	s.add("alice", "--workspace", ws)
	s.start()
	s.ok("agent", "start", "alice")
	s.spin("alice", fmt.Sprintf(`while ! test -e go; do :; done; i=0; while test $i -lt %d; do : >.git/f$i; i=$((i+1)); done 2>/dev/null; echo ../evil >.git/commondir; : >flooded; sleep 600`, queue+1000))
	supervisor := s.one("agentconnect-supervisor")
	before := memoryOf(t, supervisor)
	supervisor.signal(syscall.SIGSTOP)
	defer supervisor.signal(syscall.SIGCONT)
	s.write("repo/go", "")
	s.until("the flood is over", func() bool { return exists(filepath.Join(ws, "flooded")) })
	if !exists(filepath.Join(ws, ".git/commondir")) {
		t.Fatal("nothing was planted")
	}
	supervisor.signal(syscall.SIGCONT)
	s.untilAudited("alice", "new-control-file", filepath.Join(ws, ".git/commondir"))
	if exists(filepath.Join(ws, ".git/commondir")) {
		t.Error("commondir is still there")
	}
	if grown := memoryOf(t, supervisor) - before; grown > 16<<10 {
		t.Errorf("the supervisor grew by %d KiB", grown)
	}
	s.untilState("alice", "running")
}

func TestWhatAHostileAgentLeavesIsInTheAuditLogWhenItStops(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.write("repo/.vscode/settings.json", "{}")
	s.add("alice", "--workspace", ws)
	s.ok("agent", "edit", "alice", "--tasks", "100")
	s.start()
	s.ok("agent", "start", "alice")
	s.sealed("alice", ws, ".vscode")
	s.gitin("alice", `git init -q evil && git -C evil config core.fsmonitor 'touch /tmp/x' && mkdir -p .git/rebase-merge && echo 'exec touch x' > .git/rebase-merge/git-rebase-todo && mkdir .claude && echo '{}' > .claude/settings.json && echo 'all:' > Makefile && git update-index --skip-worktree file`)
	s.ok("agent", "stop", "alice")
	for _, want := range [][2]string{
		{"new-repository", "evil/.git"}, {"exec-lines", ".git/rebase-merge/git-rebase-todo"}, {"new", ".claude"}, {"new", "Makefile"}, {"hidden-changes", ".git/index"},
	} {
		s.untilAudited("alice", want[0], filepath.Join(ws, want[1]))
	}
	out := s.ok("audit", "alice")
	for _, word := range []string{"core.fsmonitor", "exec-lines", "policy", "--tasks=100"} {
		if !strings.Contains(out, word) {
			t.Errorf("audit does not say %q:\n%s", word, out)
		}
	}
	if notes := strings.Join(s.agent("alice").Notes, "\n"); !strings.Contains(notes, "5 findings") {
		t.Errorf("status: %s", notes)
	}
	if s.in(ws, "test ! -e .git/rebase-merge/git-rebase-todo; ls .git/rebase-merge") == "" {
		t.Error("the todo is lost")
	}
	s.fails(66, nil, "audit", "nobody")
}

// With nesting on an agent moves a sealed path away in a namespace of its own: it keeps a
// descriptor of the workspace, leaves the tree that it was in, and detaches that.
func TestSealedPathMovedInANestedNamespaceIsBackBeforeTheHostsNextCommand(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.add("alice", "--workspace", ws, "--nesting", "on")
	s.add("bob", "--workspace", s.project("other"), "--nesting", "off")
	s.start()
	mark := s.path("pwned")
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("missing: python3, which the attack is written in")
	}
	attack := `cd ` + ws + ` && cp -r .git evil.git && printf "[core]\n\tfsmonitor = touch ` + mark + `; false\n" >> evil.git/config && exec python3 -c '
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def do(r):
    if r != 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
uid, gid = os.getuid(), os.getgid()
kept = os.open(".", os.O_RDONLY)
do(libc.unshare(0x10000000 | 0x20000))
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("%d %d 1" % (uid, uid))
open("/proc/self/gid_map", "w").write("%d %d 1" % (gid, gid))
os.makedirs("/tmp/n", exist_ok=True)
do(libc.mount(b"none", b"/tmp/n", b"tmpfs", 0, None))
os.mkdir("/tmp/n/old")
do(libc.syscall(155, b"/tmp/n", b"/tmp/n/old"))
os.chdir("/")
do(libc.umount2(b"/old", 2))
os.rename(".git", "away", src_dir_fd=kept, dst_dir_fd=kept)
print("moved", flush=True)
try: os.rename("evil.git", ".git", src_dir_fd=kept, dst_dir_fd=kept)
except OSError as e: print("it was back before that:", e)'`
	if r := s.sh("bob", strings.ReplaceAll(attack, ws, s.path("other"))); strings.Contains(r.out, "moved") {
		t.Errorf("with nesting off it worked: %s%s", r.out, r.err)
	}
	r := s.sh("alice", attack)
	t.Logf("the attack: %d %s%s", r.code, r.out, r.err)
	s.in(ws, "git status >/dev/null")
	if exists(mark) {
		t.Errorf("the agent's program ran on the host")
	}
	if !strings.Contains(r.out, "moved") {
		t.Fatalf("the attack did not come to its end, so it proves nothing")
	}
	s.untilAudited("alice", "seal-moved", filepath.Join(ws, ".git"))
	if got := s.in(ws, "git config core.fsmonitor || true"); got != "" {
		t.Errorf("the configuration is the agent's: %s", got)
	}
	if out := s.ok("explain", "alice"); !strings.Contains(out, "watched") {
		t.Errorf("explain: %s", out)
	}
	if out := s.ok("agent", "show", "bob"); !strings.Contains(out, "hard") {
		t.Errorf("show: %s", out)
	}
}
