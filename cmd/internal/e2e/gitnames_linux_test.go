// New names in a git directory that no mount can forbid: links where git on the host writes, and
// files that it would obey.

package e2e

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/sandbox/gitseal"
)

// Each link has the host's git write what the agent chose to a file of the host, or remove it, in
// the host's everyday command. That it does is the control.
func TestALinkWhereGitOnTheHostWritesIsTakenAway(t *testing.T) {
	s := newSite(t)
	const precious, branch = "precious\n", `'x;touch${IFS}pwned;'`
	for name, c := range map[string]struct{ link, plant, host, to string }{
		"commit":   {"COMMIT_EDITMSG", `echo 'touch pwned' > .git/SQUASH_MSG; rm .git/COMMIT_EDITMSG`, `echo y > file; GIT_EDITOR=true git commit -q -a`, "/file"},
		"checkout": {"logs/HEAD", `git branch ` + branch + `; rm .git/logs/HEAD`, `git checkout -q ` + branch, "/file"},
		"fetch":    {"FETCH_HEAD", `git branch ` + branch, `git fetch -q . 'refs/heads/x*:refs/heads/y*'`, "/file"},
		"merge":    {"MERGE_MSG", `git checkout -q -b ` + branch + `; echo b > file; git commit -q -a -m b; git checkout -q main; echo c > file; git commit -q -a -m c`, `git merge -q ` + branch + ` >/dev/null || :`, "/file"},
		"branch":   {"logs/refs/heads/new", `rm -r .git/logs; mkdir -p .git/logs/refs/heads`, `git branch new`, "/file"},
		"gc":       {"objects/info/commit-graph", `:`, `git gc -q`, "/file"},
		"prune":    {"worktrees/x", `mkdir -p .git/worktrees`, `git gc -q`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			ws, victim := s.project(name), s.write(name+"-victim/file", precious)
			plant := c.plant + "; ln -s " + filepath.Dir(victim) + c.to + " .git/" + c.link
			host := c.host + "; cat " + victim + " || :"
			if got := s.in(s.mkdir(name+"-control"), "cp -a "+ws+"/. . && "+plant+"; "+host); got == precious {
				t.Fatal("outside it leads nowhere, so it proves nothing")
			}
			s.outside("rm -f " + victim) // git leaves what nobody may write
			s.write(name+"-victim/file", precious)
			s.add(name, "--workspace", ws)
			if s.daemon == nil {
				s.start()
			}
			s.ok("agent", "start", name)
			s.gitin(name, plant)
			s.untilAudited(name, "link-removed", filepath.Join(ws, ".git", c.link))
			if got := s.in(ws, host); got != precious {
				t.Errorf("git wrote there: %q", got)
			}
			s.untilState(name, "running")
		})
	}
}

// Of a repository elsewhere the agent writes the reflogs, too, and git on the host notes there what
// a commit is called.
func TestALinkInTheReflogsOfARepositoryElsewhereIsTakenAway(t *testing.T) {
	s := newSite(t)
	const precious = "precious\n"
	victim := s.write("victim", precious)
	commit := func(repo string) string {
		log := filepath.Join(repo, ".git/logs/refs/heads/main")
		return "echo w > w && git add w && git commit -q -m 'x; touch pwned' && rm " + log + " && ln -s " + victim + " " + log
	}
	source, control := s.project("source"), s.project("control")
	if s.in(control, "git checkout -q -b w && "+commit(control)+" && git checkout -q main && git cherry-pick w"); s.read("victim") == precious {
		t.Fatal("outside it leads nowhere, so it proves nothing")
	}
	s.write("victim", precious)
	s.add("wendy", "--git-worktree", source)
	s.start()
	s.ok("agent", "start", "wendy")
	s.gitin("wendy", commit(source)+"; echo /x > "+source+"/.git/objects/info/alternates")
	s.untilAudited("wendy", "link-removed", filepath.Join(source, ".git/logs/refs/heads/main"))
	s.in(source, "git cherry-pick agentconnect/wendy")
	if got := s.read("victim"); got != precious {
		t.Errorf("git wrote there: %q", got)
	}
	s.untilState("wendy", "running")
	s.ok("agent", "stop", "wendy")
	s.untilAudited("wendy", "changed", filepath.Join(source, ".git/objects/info/alternates"))
}

// At the next start its control files cannot be looked at, and with it open again they would be
// the agent's.
func TestARepositoryThatTheAgentShutIsSealedAtTheNextStart(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	const shut, evil = "chmod 0 .git", "chmod 700 .git && git config core.fsmonitor evil"
	s.in(s.mkdir("control"), "cp -a ../repo/. . && "+shut+" && "+evil)
	s.add("alice", "--workspace", ws)
	s.start()
	s.ok("agent", "start", "alice")
	s.gitin("alice", shut)
	s.ok("agent", "restart", "alice")
	s.untilState("alice", "running")
	if r := s.sh("alice", evil); r.code == 0 {
		t.Errorf("inside: %s", r.out)
	}
	if got := s.in(ws, "chmod 700 .git && git config core.fsmonitor || :"); got != "" {
		t.Errorf("git on the host runs %q", got)
	}
}

// Again and again is once too often: between a name and the guard's answer lie milliseconds, and
// one that goes on would be met in them.
func TestAnAgentThatGoesOnPlantingIsStopped(t *testing.T) {
	for name, plant := range map[string]string{
		"commondir": `mkdir -p evil; while :; do echo ../evil >.git/commondir; done`,
		"links":     `while :; do ln -s /etc/passwd .git/FETCH_HEAD; done`,
		"head":      `while :; do echo 'ref: refs/heads/main' >HEAD; done`,
		"rr-cache":  `while :; do mkdir -p .git/rr-cache; done`,
		"folders":   `cd .git/logs; seq 9000 | xargs mkdir`,
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			ws := s.project("repo")
			s.add("alice", "--workspace", ws)
			s.start()
			s.ok("agent", "start", "alice")
			s.spin("alice", "("+plant+") 2>/dev/null")
			s.until("the agent is stopped", func() bool {
				for _, r := range s.audited("alice") {
					if r.Event == "stopped" {
						return true
					}
				}
				return false
			})
			s.ok("agent", "stop", "alice")
			if got := s.in(ws, "ls -A .git . && git status --porcelain --untracked-files=no"); strings.Contains(got, "commondir\n") || strings.Contains(got, "rr-cache\n") || strings.Contains(got, "FETCH_HEAD\n") || strings.Contains(got, "\nHEAD\nHEAD\n") {
				t.Errorf("left:\n%s", got)
			}
		})
	}
}

// runsOutside is the control: in a copy of the project repo without a boundary, what an agent plants
// has what the host does make the file mark.
func (s *site) runsOutside(mark, plant, host string) {
	s.t.Helper()
	if s.in(s.mkdir("control"), "cp -a ../repo/. . && "+plant+"; "+host); !exists(mark) {
		s.t.Fatal("outside it runs nothing, so it proves nothing")
	}
	s.in(s.base, "rm "+mark)
}

// With no remote of that name in its configuration git takes the address from a file, and pushes to
// a repository of the agent's, whose hooks run.
func TestARemoteThatTheAgentNamesIsSetAside(t *testing.T) {
	for _, before := range []string{"rm -rf .git/branches", "mkdir -p .git/branches"} {
		t.Run(before, func(t *testing.T) {
			s := newSite(t)
			ws, mark := s.project("repo"), s.path("mark")
			s.in(ws, before)
			plant := `git init -q --bare evil.git && printf '#!/bin/sh\n: > ` + mark + `\n' > evil.git/hooks/pre-receive && chmod +x evil.git/hooks/pre-receive && mkdir -p .git/new && echo evil.git > .git/new/origin && if [ -e .git/branches ]; then mv .git/new/origin .git/branches/; else mv .git/new .git/branches; fi`
			const host = "git -c push.autoSetupRemote=true push -q 2>&1 || :"
			s.runsOutside(mark, plant, host)
			s.add("alice", "--workspace", ws)
			s.start()
			s.ok("agent", "start", "alice")
			s.gitin("alice", plant)
			file := filepath.Join(ws, ".git/branches")
			if before[0] == 'm' {
				file += "/origin"
			}
			s.untilAudited("alice", "new-control-file", file)
			if got := s.in(ws, host); exists(mark) {
				t.Errorf("git on the host pushed there: %s", got)
			}
			s.untilState("alice", "running")
		})
	}
}

// `git sparse-checkout` on the host has git read a file that it did not read before, and makes it.
func TestConfigurationOfAWorktreeIsTheHostsAlsoWhereItWasNotReadBefore(t *testing.T) {
	s := newSite(t)
	ws, mark := s.project("repo"), s.path("mark")
	s.write("repo/sub/file", "x\n")
	s.in(ws, "git add sub && git commit -q -m sub")
	plant := `printf '[core]\n\tfsmonitor = "touch ` + mark + `; false"\n' > .git/config.worktree`
	const host = "git sparse-checkout set sub && git status --porcelain >/dev/null 2>&1 && git config core.sparseCheckout && ls"
	s.runsOutside(mark, plant, host)
	s.add("alice", "--workspace", ws)
	s.start()
	s.ok("agent", "start", "alice")
	s.gitin("alice", plant)
	config := filepath.Join(ws, ".git/config.worktree")
	s.untilAudited("alice", "new-control-file", config)
	// What the host makes there stays, and is sealed.
	if got := s.in(ws, host); got != "true\nfile\nsub\n" {
		t.Errorf("outside: %q", got)
	}
	s.untilAudited("alice", "seal-restored", config)
	if exists(mark) {
		t.Error("git on the host ran it")
	}
	s.sealed("alice", ws, ".git/config.worktree")
	s.untilState("alice", "running")
}

// What git remembers of conflicts: with a folder for it and a list of files, git commit copies
// what the list names, a key of the home for instance, to where the agent reads it.
func TestGitOnTheHostCopiesNothingOfTheHostsIntoARepository(t *testing.T) {
	const merge = "git config rerere.enabled true; git checkout -q -b other; echo o >file; git commit -q -a -m o; git checkout -q main; echo m >file; git commit -q -a -m m; git merge -q other >/dev/null || :"
	for name, c := range map[string]struct{ before, after, aside string }{
		"rerere off":                 {"", "", "rr-cache"},
		"rerere on":                  {"git config rerere.enabled true && mkdir .git/rr-cache", "", gitseal.ConflictsFile},
		"in a merge":                 {merge, "", gitseal.ConflictsFile},
		"in a merge, through a link": {merge, "ln -sf $KEY file; git add file", gitseal.ConflictsFile},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			ws, key := s.project("repo"), s.write("key", "KEY-OF-THE-HOST\n")
			s.in(ws, c.before)
			// All comes whole: what is empty is taken away without a word.
			plant := fmt.Sprintf(`h=$(printf '%%040d' 1); r=.git/rr-cache; [ -e $r ] || r=.git/rr; mkdir -p $r/$h; : >$r/$h/preimage; [ $r != .git/rr ] || mv .git/rr .git/rr-cache; printf '%%s\t%%s\0' $h %s >.git/list; mv .git/list .git/%s; [ -z "$(git ls-files -u)" ] || git add file`, key, gitseal.ConflictsFile)
			if c.after != "" {
				plant = strings.ReplaceAll(c.after, "$KEY", key)
			}
			const host = `[ -L file ] || echo y >> file; git commit -q -a -m y; grep -rsl KEY-OF-THE-HOST .git || :`
			if got := s.in(s.mkdir("control"), "cp -a ../repo/. . && "+plant+"; "+host); !strings.Contains(got, "rr-cache") {
				t.Fatalf("outside nothing is copied, so it proves nothing: %q", got)
			}
			s.add("alice", "--workspace", ws)
			s.start()
			s.ok("agent", "start", "alice")
			s.gitin("alice", "("+plant+"); true") // what is taken away meanwhile ends it early
			s.untilAudited("alice", "new-control-file", filepath.Join(ws, ".git", c.aside))
			if got := s.in(ws, host); got != "" {
				t.Errorf("copied: %s", got)
			}
		})
	}
}

// A runtime's own sandbox makes folders to mount on where nothing stands (Claude Code's twice for
// each session): git finds nothing to obey in them, they are gone at once, and the agent lives.
func TestEmptyFoldersByNamesThatGitObeysAreTakenAwayAndHarmNobody(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.add("alice", "--workspace", ws)
	s.start()
	s.ok("agent", "start", "alice")
	pid := s.agent("alice").PID
	remotes := filepath.Join(ws, ".git/remotes")
	for range 8 {
		s.gitin("alice", "mkdir .git/remotes")
		s.until("the folder is gone", func() bool { return !exists(remotes) })
	}
	if left, _ := filepath.Glob(remotes + "*"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	s.untilState("alice", "running")
	if now := s.agent("alice").PID; now != pid {
		t.Errorf("it was ended and started again: pid %d, before %d", now, pid)
	}
	// With something in it it is what git obeys.
	s.gitin("alice", "mkdir .git/new && echo 'URL: ../evil' >.git/new/origin && mv .git/new .git/remotes")
	s.untilAudited("alice", "new-control-file", remotes)
	// An empty file says nothing to git either.
	s.gitin("alice", ": >.git/objects/info/alternates; echo x >.git/info/attributes")
	s.ok("agent", "stop", "alice")
	s.untilAudited("alice", "changed", filepath.Join(ws, ".git/info/attributes"))
	if said := s.ok("audit", "alice"); strings.Contains(said, "alternates") {
		t.Errorf("an empty file is a finding:\n%s", said)
	}
}

// git on the host looks for hooks and configuration where nothing is yet, or no folder even: what
// comes there while the agent runs it does not find. The agent goes about it in each way that leaves
// no trace in the folder where the name would come.
func TestWhatTheConfigurationNamesDoesNotComeWhileAnAgentRuns(t *testing.T) {
	for name, c := range map[string]struct{ before, after, plant, aside string }{
		"a folder in a folder": {"git config core.hooksPath tools/hooks", "", "mkdir tools; mv .new tools/hooks", "tools/hooks"},
		"another folder in its place": {
			"git config core.hooksPath .husky/_; mkdir .husky; echo x > .husky/x; git add .husky; git commit -q -m h", "",
			"mv .husky old; sleep 1; mkdir n; mv .new n/_; mv n .husky", ".husky/_",
		},
		"a link": {"git config core.hooksPath tools/hooks", "", "mkdir n; mv .new n/hooks; ln -s n tools", "tools"},
		"gone with a branch": {
			"git config core.hooksPath tools/hooks; git branch old; mkdir -p tools/hooks; echo x > tools/hooks/x; git add tools; git commit -q -m h", "git checkout -q old",
			"mkdir tools; mv .new tools/hooks", "tools/hooks",
		},
		"behind a link": {"git config include.path $PWD/../dots/local", "", "mkdir dots; printf '[core]\n\thooksPath = .new\n' >dots/local", "dots/local"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			ws, mark := s.project("repo"), s.path("mark")
			s.in(ws, c.before)
			plant := "mkdir .new; printf '#!/bin/sh\ntouch " + mark + "\n' >.new/pre-commit; chmod +x .new/pre-commit; " + c.plant
			const host = "git commit -q --allow-empty -m y"
			s.in(s.base, "ln -s control/dots dots")
			s.runsOutside(mark, "(:; "+c.after+"); "+plant, host)
			s.in(s.base, "ln -sfn repo/dots dots")
			s.add("alice", "--workspace", ws)
			s.start()
			s.ok("agent", "start", "alice")
			s.in(ws, c.after)
			s.spin("alice", "sleep 1; "+plant) // when a command starts all names are looked at
			s.untilAudited("alice", "new-control-file", filepath.Join(ws, c.aside))
			s.in(ws, host)
			if exists(mark) {
				t.Error("git on the host ran it")
			}
			s.untilState("alice", "running")
		})
	}
}

// Where git remembers resolutions of conflicts it writes a list of them, empty mostly, with every
// commit: an agent may commit as often as it likes, and its host, too.
func TestGitThatRemembersConflictsWorksBesideAnAgent(t *testing.T) {
	s := newSite(t)
	ws := s.project("repo")
	s.in(ws, "git checkout -q -b other; echo o >file; git commit -q -a -m o; git checkout -q main; echo m >file; git commit -q -a -m m")
	s.add("alice", "--workspace", ws, "--git-config", "rerere.*")
	s.start()
	s.ok("agent", "start", "alice")
	pid := s.agent("alice").PID
	s.gitin("alice", "/run/agentconnect/guest git-config rerere.enabled true; set -e; for i in $(seq 25); do git commit -q --allow-empty -m $i; done")
	const conflict = "git merge -q other >/dev/null && exit 1; echo r >file; git add file; git commit -q -m merged; git reset -q --hard HEAD~1"
	s.gitin("alice", "set -e; "+conflict)
	s.in(ws, "set -e; "+conflict+"; "+conflict)
	s.untilState("alice", "running")
	if now := s.agent("alice").PID; now != pid {
		t.Errorf("it was ended and started again: pid %d, before %d", now, pid)
	}
	if left, _ := filepath.Glob(filepath.Join(ws, ".git/rr-cache.*")); len(left) > 0 {
		t.Errorf("set aside: %q", left)
	}
}

// The watches of all programs of a user are counted together, those of an agent's, too: it can take
// all that are left, so that a folder which comes then is watched by nobody.
func TestAnAgentThatTakesAllWatchesIsWatchedAllTheSame(t *testing.T) {
	s := newSite(t)
	s.namespace("echo 400 >/proc/sys/user/max_inotify_watches")
	ws := s.project("repo")
	s.add("alice", "--workspace", ws)
	s.start()
	s.ok("agent", "start", "alice")
	s.spin("alice", `cd /tmp && exec python3 -c '
import ctypes, time
libc = ctypes.CDLL(None)
fd = libc.inotify_init1(0)
for i in range(500):
    open(str(i), "w").close()
    libc.inotify_add_watch(fd, str(i).encode(), 2)
time.sleep(600)'`)
	link := "logs/refs/heads/"
	s.until("no watch is left for a folder that comes", func() bool {
		link += "a/"
		s.gitin("alice", "mkdir .git/"+link)
		return slices.ContainsFunc(s.audited("alice"), func(r audit.Record) bool { return r.Event == "watch-limit" })
	})
	link += "b"
	s.gitin("alice", "ln -s /etc/passwd .git/"+link)
	s.untilAudited("alice", "link-removed", filepath.Join(ws, ".git", link))
	s.gitin("alice", "mkdir -p .git/new && echo 'URL: ../evil' >.git/new/origin && mv .git/new .git/remotes")
	s.untilAudited("alice", "new-control-file", filepath.Join(ws, ".git/remotes"))
	s.untilState("alice", "running")
}

// What the host makes while an agent runs is sealed from the next start on, and until then the agent
// gives files names of its own, by which no mount would keep it from writing them.
func TestFilesThatAnAgentGaveOtherNamesAreSealedAllTheSame(t *testing.T) {
	s := newSite(t)
	ws, mark := s.project("repo"), s.path("mark")
	const link = "ln made/.git/hooks/pre-commit hook; ln made/.git/config config; ln made/.husky/_/h h"
	plant := "echo 'touch " + mark + "' >>hook; echo 'touch " + mark + "' >>h; printf '[core]\\n\\tfsmonitor = touch " + mark + "\\n' >>config"
	const host = "cd made; git status --porcelain >/dev/null; git commit -q --allow-empty -m y"
	made := "git clone -q . made; mkdir -p made/.husky/_; for f in .git/hooks/pre-commit .husky/_/h; do printf '#!/bin/sh\\n' >made/$f; chmod 755 made/$f; done; git -C made config core.hooksPath .git/hooks; git -C made config --add include.path ../.husky/_/h2"
	s.runsOutside(mark, made+"; "+link+"; "+plant, host)
	s.add("alice", "--workspace", ws)
	s.start()
	s.ok("agent", "start", "alice")
	s.spin("alice", "while [ ! -e go ]; do sleep .1; done; "+link+"; touch linked")
	s.in(ws, made+"; git -C made config core.hooksPath .husky/_; touch go")
	s.until("the agent has names of its own", func() bool { return exists(filepath.Join(ws, "linked")) })
	s.ok("agent", "restart", "alice")
	s.untilState("alice", "running")
	s.gitin("alice", plant)
	s.in(ws, host+"; git -c core.hooksPath=.git/hooks commit -q --allow-empty -m z; sh .husky/_/h")
	if exists(mark) {
		t.Error("the host ran what the agent wrote")
	}
	if st := s.in(ws, "stat -c '%a %h' made/.git/hooks/pre-commit made/.husky/_/h made/.git/config"); st != "755 1\n755 1\n644 1\n" {
		t.Errorf("modes and names: %q", st)
	}
}
