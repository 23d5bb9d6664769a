// Links that an agent puts where the next start looks.

package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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

// swapArg makes this program swap what lies in its working directory with links, the pairs
// NAME and NAME.link of its arguments, until its stdin ends, and say how often it did.
const swapArg = "e2e-swap"

// swapped reports whether this process was started to swap links, and has.
func swapped() bool {
	if len(os.Args) < 3 || os.Args[1] != swapArg {
		return false
	}
	over := make(chan struct{})
	go func() {
		io.Copy(io.Discard, os.Stdin)
		close(over)
	}()
	n := 0
	for {
		for _, name := range os.Args[2:] {
			if err := unix.Renameat2(unix.AT_FDCWD, name, unix.AT_FDCWD, name+".link", unix.RENAME_EXCHANGE); err == nil {
				n++
			}
		}
		if n > 0 && n <= len(os.Args)-2 {
			fmt.Println("swapping")
		}
		select {
		case <-over:
			fmt.Println(n)
			return true
		default:
		}
	}
}

// swapper is a hostile process inside an agent.
type swapper struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (s *site) swap(id string, argv ...string) *swapper {
	s.t.Helper()
	w := &swapper{cmd: s.agentconnect(context.Background(), append([]string{"agent", "exec", id, "--"}, argv...)...)}
	var err error
	if w.in, err = w.cmd.StdinPipe(); err != nil {
		s.t.Fatal(err)
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	w.out, w.cmd.Stderr = bufio.NewReader(out), s.out
	if err := w.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { w.cmd.Process.Kill(); w.cmd.Wait() })
	if line, err := w.out.ReadString('\n'); err != nil || line != "swapping\n" {
		s.t.Fatalf("%q %v", line, err)
	}
	return w
}

// end stops it and says how often it swapped.
func (w *swapper) end() (n int, err error) {
	w.in.Close()
	line, err := w.out.ReadString('\n')
	if err == nil {
		n, err = strconv.Atoi(strings.TrimSpace(line))
	}
	return n, err
}

// tree is all that lies below a folder, with its content.
func (s *site) tree(dir string) string {
	s.t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fmt.Fprintln(&b, path, d.Type())
		if d.Type().IsRegular() {
			fmt.Fprintln(&b, s.read(path))
		}
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return b.String()
}

// A process inside swaps the control files of its repositories, their folders and all that a
// start looks at with links to folders of the host that it does not see, while commands and
// agents start beside it.
func TestLinksThatAreSwappedWhileAgentsStartLeadNoMountElsewhere(t *testing.T) {
	const swaps = 10_000
	s := newSite(t)
	// What must not be seen, nor touched.
	const canary = "CANARY-SWAPPED"
	repo := s.mkdir("private/repo")
	for _, name := range []string{"repo/.git/config", "repo/.git/hooks/pre-commit", "repo/.git/info/attributes", "repo/.git/HEAD", "bare/.git/config", "bare/.git/HEAD", "settings/settings.json"} {
		s.write(filepath.Join("private", name), "[core]\n\tx = "+canary+"\n")
	}
	for _, name := range []string{"repo", "bare"} {
		s.mkdir("private/" + name + "/.git/objects")
		s.mkdir("private/" + name + "/.git/refs")
	}
	l, err := net.Listen("unix", s.path("private/sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	before := s.tree(s.path("private"))

	shared := s.mkdir("shared")
	self, err := os.ReadFile(testExecutable(t))
	if err != nil {
		t.Fatal(err)
	}
	program := s.write("tools/swap", string(self))
	s.executable(program)
	s.add("alice", "--workspace", shared, "--grant", s.path("tools")+":ro")
	s.add("bob", "--grant", shared+":rw")
	s.start()
	s.ok("agent", "start", "alice")

	// Made by the program that swaps them, whose own view was made before there was any of it.
	made := s.write("tools/make", `set -e
repository() { mkdir -p $1/objects $1/refs $1/info; echo 'ref: refs/heads/main' >$1/HEAD; echo '[core]' >$1/config; : >$1/info/attributes; }
for r in a b c d e; do repository $r/.git; done
mkdir a/.git/hooks b/.git/hooks c/.git/hooks e/.git/hooks .vscode; echo >.vscode/settings.json; mkdir f; echo 'gitdir: ../a/.git' >f/.git
ln -s `+repo+` a.link; ln -s `+repo+`/.git b/.git.link; ln -s `+repo+`/.git/config c/.git/config.link; ln -s `+repo+`/.git/hooks c/.git/hooks.link; ln -s `+s.path("private/bare")+`/.git d/.git.link
ln -s `+repo+`/.git/info e/.git/info.link; ln -s `+repo+`/.git f/.git.link; ln -s `+s.path("private/settings")+` .vscode.link
mkdir g; : >g/sock; ln -s `+s.path("private/sock")+` g/sock.link
exec "$@"`)
	names := []string{"a", "b/.git", "c/.git/config", "c/.git/hooks", "d/.git", "e/.git/info", "f/.git", ".vscode", "g/sock"}
	w := s.swap("alice", append([]string{"/bin/sh", made, program, swapArg}, names...)...)

	// The control: whoever goes by path there is led elsewhere.
	for _, name := range names[:3] {
		s.until(name+" leads elsewhere and does not", func() bool {
			led := map[bool]bool{}
			for range 1000 {
				b, err := os.ReadFile(filepath.Join(shared, name, map[string]string{"a": ".git/config", "b/.git": "config"}[name]))
				if err == nil {
					led[strings.Contains(string(b), canary)] = true
				}
			}
			return len(led) == 2
		})
	}

	// Nothing that is mounted comes from there, and nothing that can be read.
	look := `grep '/private' /proc/self/mountinfo; grep -rs ` + canary + ` .; for f in a/.git/config b/.git/config c/.git/config c/.git/hooks/pre-commit .vscode/settings.json; do cat $f 2>/dev/null | grep ` + canary + `; done; true`
	n, slowest := rounds(100, 8), time.Duration(0)
	see := func(id, what string) result {
		at := time.Now()
		r := s.sh(id, "cd "+shared+"; "+look)
		slowest = max(slowest, time.Since(at))
		if r.out != "" {
			t.Errorf("%s shows what lies elsewhere: %s", what, r.out)
		}
		return r
	}
	for i := range n {
		if r := see("alice", "a command"); r.code != 0 {
			t.Errorf("command %d of %d is lost: exit %d: %s%s", i, n, r.code, r.out, r.err)
		}
	}
	t.Logf("%d commands beside it, the slowest in %v", n, slowest)
	// Another agent, which shares the folder, cannot halt this one: it may be refused, in words,
	// or ended when what is sealed in it moves.
	for range rounds(10, 1) {
		if r := see("bob", "an agent that shares the folder"); r.code != 0 && !strings.Contains(r.err, "kept changing") && r.code != 137 {
			t.Errorf("the other agent: exit %d: %s%s", r.code, r.out, r.err)
		}
	}
	swapped, err := w.end()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d swaps", swapped)
	if swapped < swaps {
		t.Errorf("%d swaps, wanted %d", swapped, swaps)
	}
	// Whatever it leaves behind, the next start is none the worse.
	for i := range rounds(50, 4) {
		for j, name := range names {
			if (i*7+j)%3 == 0 {
				path := filepath.Join(shared, name)
				if err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, path+".link", unix.RENAME_EXCHANGE); err != nil && !errors.Is(err, unix.ENOENT) {
					t.Fatal(err)
				}
			}
		}
		s.ok("agent", "restart", "alice")
		for _, id := range []string{"alice", "bob"} {
			if r := see(id, "a start on what was left"); r.code != 0 {
				t.Errorf("%s on what was left: exit %d: %s%s", id, r.code, r.out, r.err)
			}
		}
		s.ok("agent", "stop", "alice")
	}
	if after := s.tree(s.path("private")); after != before {
		t.Errorf("what lies elsewhere was changed:\n%s\nbefore:\n%s", after, before)
	}
}

func testExecutable(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return self
}
