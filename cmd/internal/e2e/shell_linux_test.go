package e2e

import (
	"bufio"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

// operator is a person at a terminal that runs a program.
type operator struct {
	s             *site
	master, slave *os.File
	before        unix.Termios
	cmd           *exec.Cmd
	screen        *output
	ended         chan struct{}
}

// sit starts cmd on a terminal of its own, as the session that it controls.
func (s *site) sit(cmd *exec.Cmd) *operator {
	s.t.Helper()
	master, slave, err := selftest.OpenTerminal(33, 77)
	if err != nil {
		s.t.Fatal(err)
	}
	o := &operator{s: s, master: master, slave: slave, cmd: cmd, screen: &output{}, ended: make(chan struct{})}
	o.before = o.termios()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() { cmd.Wait(); close(o.ended) }()
	read := make(chan struct{})
	go func() {
		defer close(read)
		b := make([]byte, 4096)
		for {
			n, err := master.Read(b)
			o.screen.Write(b[:n])
			if err != nil {
				return
			}
		}
	}()
	s.t.Cleanup(func() {
		cmd.Process.Kill()
		<-o.ended
		slave.Close() // the last one: the reader gets its end
		<-read
		master.Close()
	})
	return o
}

func (o *operator) termios() unix.Termios {
	o.s.t.Helper()
	t, err := unix.IoctlGetTermios(int(o.slave.Fd()), unix.TCGETS)
	if err != nil {
		o.s.t.Fatal(err)
	}
	return *t
}

func (o *operator) types(text string) {
	o.s.t.Helper()
	if _, err := o.master.WriteString(text); err != nil {
		o.s.t.Fatal(err)
	}
}

func (o *operator) sees(text string) {
	o.s.t.Helper()
	end := time.NewTimer(patience)
	defer end.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !strings.Contains(o.screen.String(), text) {
		select {
		case <-tick.C:
		case <-end.C:
			o.s.t.Fatalf("%q never came on the screen, which shows:\n%s", text, o.screen)
		}
	}
}

// end waits for the program's end and gives its exit code. The terminal must be as it was.
func (o *operator) end() int {
	o.s.t.Helper()
	select {
	case <-o.ended:
	case <-time.After(patience):
		o.s.t.Fatalf("it does not end; the screen shows:\n%s", o.screen)
	}
	if d := cmp.Diff(o.before, o.termios()); d != "" {
		o.s.t.Errorf("the terminal is not as it was: %s", d)
	}
	return o.cmd.ProcessState.ExitCode()
}

// typed is how many bytes wait to be read on the terminal, as if somebody had typed them.
func (o *operator) typed() int {
	o.s.t.Helper()
	// Complete lines or not: without line discipline every byte counts.
	t := o.before
	t.Lflag &^= unix.ICANON
	if err := unix.IoctlSetTermios(int(o.slave.Fd()), unix.TCSETS, &t); err != nil {
		o.s.t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(o.slave.Fd()), unix.TIOCINQ)
	if err != nil {
		o.s.t.Fatal(err)
	}
	if err := unix.IoctlSetTermios(int(o.slave.Fd()), unix.TCSETS, &o.before); err != nil {
		o.s.t.Fatal(err)
	}
	return n
}

func (s *site) shell(flags ...string) *operator {
	s.t.Helper()
	cmd := s.agentconnect(context.Background(), append([]string{"agent", "shell", "alice"}, flags...)...)
	cmd.Env = append(cmd.Env, "TERM=dumb")
	return s.sit(cmd)
}

func TestShellHasATerminalOfItsOwnInside(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	o := s.shell()
	// What is typed is echoed, so what is waited for is never typed whole.
	o.types("echo size=$(stty size) term=$TERM tty=$(tty) where=$PWD\n")
	o.sees("size=33 77 term=dumb tty=/dev/pts/0 where=" + s.workspace("alice"))
	// The window changes: it arrives, and whoever is in front inside is told.
	o.types("sh -c 'trap \"echo told=\\$(stty size); exit\" WINCH; echo ready=$((1+1)); while :; do sleep 0.02; done'\n")
	o.sees("ready=2")
	if err := unix.IoctlSetWinsize(int(o.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: 100}); err != nil {
		t.Fatal(err)
	}
	o.sees("told=40 100")
	// Ctrl-C is for the job in front, not for us and not for the shell.
	o.types("sleep 600; echo code=$?\n")
	s.one("sleep")
	o.types("\x03")
	o.types("echo alive=$((2+3))\n")
	o.sees("alive=5")
	for _, p := range s.family() {
		if p.name() == "sleep" {
			t.Error("ctrl-C did not end the job")
		}
	}
	select {
	case <-o.ended:
		t.Fatalf("ctrl-C ended the shell: %s", o.screen)
	default:
	}
	o.types("exit 7\n")
	if code := o.end(); code != 7 {
		t.Errorf("exit %d, want 7: %s", code, o.screen)
	}
}

// One that is not there ends as in a shell, on pipes and on a terminal.
func TestCommandThatIsNotThereEndsWith127(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	s.fails(127, []string{"no-such-command: not found"}, "agent", "exec", "alice", "--", "no-such-command")
	s.fails(127, []string{`"": not found`}, "agent", "exec", "alice", "--", "")
	s.fails(126, []string{"/etc/passwd: permission denied"}, "agent", "exec", "alice", "--", "/etc/passwd")
	o := s.shell("--", "no-such-command")
	o.sees("no-such-command: not found")
	if code := o.end(); code != 127 {
		t.Errorf("exit %d, want 127: %s", code, o.screen)
	}
}

// typing tries to put a command into the terminal at hand.
const typing = `perl -e 'for (split //, "echo planted\n") { my $c = $_; ioctl(STDIN, 0x5412, $c) or exit 1 }'`

func TestNothingInsideTypesIntoTheOperatorsTerminal(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	o := s.shell()
	o.types(typing + "; echo typing=$?\n")
	o.sees("typing=1")
	// Nor by another name of it, nor by what the terminal itself would answer to a program.
	o.types("for t in /dev/tty /dev/console /dev/pts/*; do " + typing + " <$t && echo typed=in; done; echo tried=$((1+1))\n")
	o.sees("tried=2")
	if strings.Contains(o.screen.String(), "typed=in\r") {
		t.Errorf("it typed: %s", o.screen)
	}
	o.types("exit 0\n")
	if code := o.end(); code != 0 {
		t.Errorf("exit %d: %s", code, o.screen)
	}
	if n := o.typed(); n != 0 {
		t.Errorf("%d bytes wait on the operator's terminal", n)
	}
	// The control: without a boundary the same does it, where the kernel still lets anybody.
	if b, err := os.ReadFile("/proc/sys/dev/tty/legacy_tiocsti"); err == nil && strings.TrimSpace(string(b)) == "0" {
		t.Log("no control: this kernel lets nobody type into a terminal (dev.tty.legacy_tiocsti=0)")
		return
	}
	c := s.sit(exec.Command("/bin/sh", "-c", typing))
	if code := c.end(); code != 0 || c.typed() == 0 {
		t.Errorf("outside it fails too, so it proves nothing: exit %d, %d bytes: %s", code, c.typed(), c.screen)
	}
}

func TestTerminalIsRestoredHoweverTheShellEnds(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	for name, c := range map[string]struct {
		end  func(*operator)
		code int
	}{
		"exit":          {func(o *operator) { o.types("exit 0\n") }, 0},
		"SIGTERM to us": {func(o *operator) { o.cmd.Process.Signal(syscall.SIGTERM) }, 128 + 15},
		"SIGQUIT to us": {func(o *operator) { o.cmd.Process.Signal(syscall.SIGQUIT) }, 128 + 3},
		"SIGHUP to us":  {func(o *operator) { o.cmd.Process.Signal(syscall.SIGHUP) }, -1},
		"SIGTERM again": {func(o *operator) {
			o.types("trap '' HUP TERM; echo deaf=$((1+2))\n") // else the first ends it
			o.sees("deaf=3")
			for {
				o.cmd.Process.Signal(syscall.SIGTERM)
				select {
				case <-o.ended:
					return
				case <-time.After(20 * time.Millisecond): // two that wait are one
				}
			}
		}, -1},
		"SIGHUP inside":    {func(o *operator) { o.types("kill -HUP $$\n") }, 128 + 1},
		"agent is stopped": {func(o *operator) { s.ok("agent", "stop", "alice") }, -1},
	} {
		t.Run(name, func(t *testing.T) {
			s.ok("agent", "start", "alice")
			o := s.shell()
			o.types("echo up=$((1+1))\n")
			o.sees("up=2")
			if now := o.termios(); cmp.Equal(now, o.before) {
				t.Error("the control: the terminal was never changed")
			}
			c.end(o)
			if code := o.end(); code != c.code && c.code >= 0 {
				t.Errorf("exit %d, want %d: %s", code, c.code, o.screen)
			}
			s.until("nothing of it runs", func() bool {
				for _, p := range s.family() {
					if strings.Contains(p.cmdline(), "/bin/sh") {
						return false
					}
				}
				return true
			})
		})
	}
}

// Ctrl-\ ends a command as Ctrl-C does, and says nothing of our own.
func TestQuitEndsACommand(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	o := s.sit(s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "/bin/sh", "-c", "echo up=$((1+1)); sleep 600"))
	o.sees("up=2")
	o.types("\x1c")
	if code := o.end(); code != 128+3 || strings.Contains(o.screen.String(), "goroutine") {
		t.Errorf("exit %d, want %d: %s", code, 128+3, o.screen)
	}
}

// The socket of a command in an agent that does not run is no agent's, whatever agents are called.
func TestCommandBesideAnAgentThatIsCalledLikeIt(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.add("exec-alice-1")
	s.start()
	s.ok("agent", "start", "exec-alice-1")
	s.ok("agent", "exec", "alice", "--", "true")
}

func TestCommandThatIsTooLongIsRefused(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	argv := []string{"agent", "exec", "alice", "--", "true"}
	for range 3 {
		argv = append(argv, strings.Repeat("a", 100_000))
	}
	s.fails(1, []string{"300", "262143", "xargs"}, argv...)
	s.ok(argv[:len(argv)-1]...)
}

// A part of the input must not be taken for all of it.
func TestInputThatCannotBeReadIsSaid(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	agentconnect := filepath.Join(s.bin, "agentconnect") + " agent exec alice -- "
	for _, c := range []struct{ script, want string }{
		{agentconnect + "wc -c </ 2>&1; echo $?", "0\nagentconnect: the command got a part of its input, not all: read /dev/stdin: is a directory\n1\n"},
		{agentconnect + "sh -c 'cat; exit 3' </ 2>&1; echo $?", "agentconnect: warning: the command got a part of its input, not all: read /dev/stdin: is a directory\n3\n"},
		{agentconnect + "true <&- 2>&1; echo $?", "0\n"},
		{agentconnect + "cat 0>/dev/null 2>&1; echo $?", "0\n"},
		{"yes | head -c 1000000 | " + agentconnect + "head -c 2 2>&1; echo $?", "y\n0\n"},
	} {
		if got := s.outside(c.script); got != c.want {
			t.Errorf("%s\n%q, want %q", c.script, got, c.want)
		}
	}
}

// keeper is a program that takes its own standard output to another one inside, which goes on
// to write there when it has ended.
const keeper = `
import array, os, socket, sys
name = '\0keeper'
if sys.argv[1] == 'give':
    s = socket.socket(socket.AF_UNIX); s.connect(name)
    s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))])
    s.recv(1); os._exit(0)
l = socket.socket(socket.AF_UNIX); l.bind(name); l.listen()
print('ready', flush=True)
c, _ = l.accept()
fd = array.array('i', c.recvmsg(1, socket.CMSG_SPACE(4))[1][0][2])[0]
c.close(); l.close()
try:
    while True:
        os.write(fd, b'x' * 65536)
except OSError as e: print('over', e, flush=True)
`

// What a program inside keeps of a command's output does not keep the command from ending.
func TestACommandEndsThoughAnotherWritesOnItsOutput(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	s.ok("agent", "start", "alice")
	s.write(filepath.Join(s.workspace("alice"), "keeper.py"), keeper)
	for name, ends := range map[string]func(t *testing.T){
		"on a terminal": func(t *testing.T) {
			o := s.shell("--", "python3", "keeper.py", "give")
			late := time.After(20 * time.Second)
			for over := false; !over; {
				o.screen.mu.Lock() // a slow screen
				select {
				case <-o.ended:
					over = true
				case <-time.After(20 * time.Millisecond):
				case <-late:
					t.Error("the shell has ended inside, and not here")
					o.cmd.Process.Signal(syscall.SIGTERM)
				}
				o.screen.mu.Unlock()
			}
			o.end()
		},
		"with a slow reader": func(t *testing.T) {
			// Slow, and always about to take more.
			if got := s.outside("{ { timeout 20 " + filepath.Join(s.bin, "agentconnect") + " agent exec alice -- python3 keeper.py give; echo $? >&3; } | " +
				`while [ "$(head -c 4096 | wc -c)" = 4096 ]; do sleep 0.02; done; } 3>&1`); got != "0\n" {
				t.Errorf("exit %s", got)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			keeps := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "python3", "-u", "keeper.py", "keep")
			out, err := keeps.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := keeps.Start(); err != nil {
				t.Fatal(err)
			}
			said := bufio.NewReader(out)
			if line, err := said.ReadString('\n'); line != "ready\n" {
				t.Fatal(line, err)
			}
			began := time.Now()
			ends(t)
			t.Logf("after %v", time.Since(began))
			rest, _ := io.ReadAll(said)
			if !strings.HasPrefix(string(rest), "over") {
				t.Errorf("it said %q", rest)
			}
			keeps.Wait()
		})
	}
}

// A command of `agent exec` gets pipes: whoever reads its output decides, no terminal does.
func TestExecGivesNoTerminal(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	o := s.sit(s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "/bin/sh", "-c", "tty; "+typing+"; echo typing=$?; true </dev/tty || echo none=$((1+1))"))
	o.sees("not a tty")
	o.sees("typing=1")
	o.sees("none=2")
	if code := o.end(); code != 0 {
		t.Errorf("exit %d: %s", code, o.screen)
	}
	if n := o.typed(); n != 0 {
		t.Errorf("%d bytes wait on the operator's terminal", n)
	}
}

// What a command said last lies in a pipe when it has ended; whoever is slow to read gets it too.
func TestASlowReaderGetsAllThatACommandSaid(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	const most = "seq 1 20000" // more than one pipe holds, and less than two
	agentconnect := filepath.Join(s.bin, "agentconnect")
	for script, want := range map[string]string{
		agentconnect + " agent exec alice -- " + most + " | (sleep 4; wc -l)":                         "20000",
		agentconnect + " agent exec alice -- sh -c '" + most + " >&2' 2>&1 | (sleep 4; wc -l)":        "20000",
		"timeout -s INT 3 " + agentconnect + " agent exec alice -- " + most + " | (sleep 6; head -1)": "1",
		"timeout 60 " + agentconnect + " agent exec alice -- sh -c 'sleep 600 & echo left'":           "left",
	} {
		if got := strings.TrimSpace(s.outside(script)); got != want {
			t.Errorf("%s: %s, want %s", script, got, want)
		}
	}
}
