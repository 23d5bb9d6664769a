// Links that an agent puts where the next start looks.

package e2e

import (
	"path/filepath"
	"strings"
	"testing"
)

// A control file that is a link shows nothing that the agent does not see anyway: not what it
// leads to, nor whether there is anything.
func TestControlFileThatIsALinkOpensNothingOfTheHost(t *testing.T) {
	s := newSite(t)
	const canary = "[core]\n\tcanary = CANARY-LINKED\n"
	secret, dir := s.write("private/secret", canary), s.mkdir("private/dir")
	s.write("private/dir/pre-commit", canary)
	s.add("alice")
	s.start()
	ws := s.workspace("alice")
	s.works("alice", `for r in x y v; do mkdir -p $r/.git/objects $r/.git/refs $r/.git/info; echo 'ref: refs/heads/main' > $r/.git/HEAD; done; mkdir z w u v/.git/hooks
		for n in config config.worktree info/attributes commondir; do ln -s `+secret+` x/.git/$n; done; ln -s `+dir+` x/.git/hooks
		printf '[include]\n\tpath = ../../inc\n[core]\n\tattributesFile = `+ws+`/attr\n\thooksPath = ../hooks\n' > y/.git/config
		ln -s `+secret+` inc; ln -s `+secret+` attr; ln -s `+secret+` v/.git/hooks/pre-commit; ln -s `+secret+` z/.git; ln -s `+dir+` w/.git; ln -s `+s.path("private/none")+` u/.git; ln -s `+dir+` .vscode`)
	links := []string{"x/.git/config", "x/.git/config.worktree", "x/.git/info/attributes", "x/.git/hooks/pre-commit", "inc", "attr", "v/.git/hooks/pre-commit", "z/.git", "w/.git/pre-commit", ".vscode/pre-commit"}
	for _, l := range links {
		if got := s.read(filepath.Join(ws, l)); got != canary {
			t.Fatalf("outside %s holds %q: nothing is put to the test", l, got)
		}
	}
	// Each anew: the start finds them, and so does the next command.
	s.ok("agent", "start", "alice")
	r := s.sh("alice", `for f in `+strings.Join(links, " ")+` $(find . ! -type d); do grep -s CANARY $f && echo "$f"; done; for f in u w; do cat $f/.git; done`)
	if strings.Contains(r.out, "CANARY") {
		t.Errorf("read inside: %s%s", r.out, r.err)
	}
	// Whether there is something is not told, either.
	if want := "gitdir: " + s.path("private/none") + "\ngitdir: " + dir + "\n"; r.out != want {
		t.Errorf("the .git links inside: %q, want %q", r.out, want)
	}
	for _, l := range links {
		if got := s.read(filepath.Join(ws, l)); got != canary {
			t.Errorf("outside %s holds %q now", l, got)
		}
	}
}
