package launch

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// waking counts in a file, and has the kernel send it SIGCONT: by a timer (once only, since Linux
// 6.13: what follows is ignored), when a name comes into the folder, when its parent is killed by
// such a name, or when its terminal goes, whose master lies in a socket that nobody has.
const waking = `
import ctypes, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
libc = ctypes.CDLL(None, use_errno=True)
how = sys.argv[1]
SIGCONT = 18
f = os.open("count-" + how, os.O_RDWR | os.O_CREAT, 0o600)
def do(r):
    if r == -1: print("%s: %s" % (how, os.strerror(ctypes.get_errno())), flush=True)
if how == "timer":
    event = (ctypes.c_int * 16)(0, 0, SIGCONT, 0)
    timer = ctypes.c_void_p()
    do(libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)))
    libc.timer_settime(timer, 0, ctypes.byref((ctypes.c_long * 4)(0, 300000000, 0, 300000000)), None)
elif how == "names":
    d = os.open(".", os.O_RDONLY)
    do(libc.fcntl(d, 10, SIGCONT))
    do(libc.fcntl(d, 1026, ctypes.c_int(0x80000004 - (1 << 32))))
elif how == "parent" and os.fork():
    while True: signal.pause()
elif how == "parent":
    go, going = os.pipe()
    if os.fork():
        d = os.open(".", os.O_RDONLY)
        do(libc.fcntl(d, 10, int(signal.SIGKILL)))
        do(libc.fcntl(d, 1026, ctypes.c_int(0x80000004 - (1 << 32))))
        os.write(going, b".")
        while True: signal.pause()
    do(libc.prctl(1, SIGCONT))
    os.read(go, 1)
elif how == "terminal":
    import array, fcntl, socket, termios
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.getsid(0) != os.getpid(): os.setsid()
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    to, by = socket.socketpair()
    by.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [to.fileno(), master]))])
    os.close(master)
    by.close()
    os.close(to.detach())
n = 0
while True:
    n += 1
    os.pwrite(f, b"%d" % n, 0)
`

// counting waits until the count in the file is another than n, and gives it; or, at rest,
// what it is after some names came into its folder.
func counting(t *testing.T, dir, how, n string) string {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) { //nolint:forbidigo // looked for with a deadline; another process makes it
		if b, err := os.ReadFile(filepath.Join(dir, "count-"+how)); err == nil && len(b) > 0 && string(b) != n {
			return string(b)
		}
	}
	t.Fatalf("%s: it does not count", how)
	return ""
}

func afterNames(t *testing.T, dir, how string) string {
	t.Helper()
	for i := range 20 {
		write(t, filepath.Join(dir, fmt.Sprintf("name-%d", i)), "")
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // time to wake up in: that nothing runs has no event
		os.Remove(filepath.Join(dir, fmt.Sprintf("name-%d", i)))
		if pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0); err == nil {
			syscall.Close(pair[0]) // has the kernel look for sockets that nobody has
			syscall.Close(pair[1])
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, "count-"+how))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Where there is no control group a sandbox is halted by SIGSTOP. What the kernel sends of
// itself must not wake it.
func TestHaltedSandboxDoesNotWakeItself(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("missing: python3, which the attack is written in")
	}
	for _, how := range []string{"nothing", "timer", "names", "parent", "terminal"} {
		t.Run(how, func(t *testing.T) {
			b := newBox(t)
			dir := b.policy.Workspace
			// The same program outside, stopped: it goes on, where it has a way.
			outside := mkdir(t, filepath.Join(b.home, "outside"))
			cmd := exec.Command("python3", "-c", waking, how)
			cmd.Dir = outside
			cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); cmd.Wait() }()
			counting(t, outside, how, "")
			if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			before := afterNames(t, outside, how)
			if went := afterNames(t, outside, how) != before; went != (how != "nothing") {
				t.Errorf("control: outside it goes on: %v", went)
			}

			p, err := b.start("python3", "-c", waking, how).Run(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			defer p.Kill()
			counting(t, dir, how, "")
			if err := p.Halt(); err != nil {
				t.Fatal(err)
			}
			n := afterNames(t, dir, how)
			if now := afterNames(t, dir, how); now != n {
				t.Errorf("halted it counts on, from %s to %s", n, now)
			}
			if err := p.Resume(); err != nil {
				t.Fatal(err)
			}
			counting(t, dir, how, n)
		})
	}
}

// sleeping counts in a file between calls that no signal ends, next to a child that stands
// still: by its first thread, or by another one while the first waits for a child of vfork.
const sleeping = `
import ctypes, os, platform, signal, sys, threading
libc = ctypes.CDLL(None)
how = sys.argv[1]
f = os.open("count-" + how, os.O_RDWR | os.O_CREAT, 0o600)
membarrier = {"x86_64": 324, "aarch64": 283}[platform.machine()]
def count():
    pid = os.fork()
    if not pid:
        while True: signal.pause()
    os.kill(pid, signal.SIGSTOP)
    n = 0
    while True:
        n += 1
        os.pwrite(f, b"%d" % n, 0)
        libc.syscall(membarrier, 1, 0, 0) # MEMBARRIER_CMD_GLOBAL
if how == "thread":
    threading.Thread(target=count).start()
    # CLONE_VFORK, without the memory: the child stands still before it ends.
    if libc.syscall({"x86_64": 56, "aarch64": 220}[platform.machine()], 0x4000 | 17, 0, 0, 0, 0) == 0:
        libc.kill(libc.getpid(), 19)
        libc._exit(0)
else:
    count()
`

// A thread that sleeps where no signal reaches it stands still only for a child of vfork.
func TestHaltedSandboxDoesNotSleepThroughIt(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("missing: python3, which the attack is written in")
	}
	for _, how := range []string{"alone", "thread"} {
		t.Run(how, func(t *testing.T) {
			b := newBox(t)
			dir := b.policy.Workspace
			p, err := b.start("python3", "-c", sleeping, how).Run(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			defer p.Kill()
			counting(t, dir, how, counting(t, dir, how, ""))
			if err := p.Halt(); err != nil {
				t.Fatal(err)
			}
			n := afterNames(t, dir, how)
			if now := afterNames(t, dir, how); now != n {
				t.Errorf("halted it counts on, from %s to %s", n, now)
			}
			if err := p.Resume(); err != nil {
				t.Fatal(err)
			}
			counting(t, dir, how, n)
		})
	}
}

// A halted sandbox can be ended, and so can one that dies halted.
func TestHaltedSandboxIsEnded(t *testing.T) {
	for what, end := range map[string]func(*Process){
		"killed": (*Process).Kill,
		"stopped": func(p *Process) {
			p.Stop(context.Background(), time.Millisecond, time.Millisecond)
		},
		"its first process dies": func(p *Process) {
			signalChild(p.Init(context.Background()), syscall.SIGKILL)
			if err := p.Resume(); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			b := newBox(t)
			p, err := b.start("/bin/sh", "-c", "sleep 1000 & sleep 1000 & echo > up; wait").Run(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			defer p.Kill()
			for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) { //nolint:forbidigo // looked for with a deadline; another process makes it
				if _, err := os.Stat(filepath.Join(b.policy.Workspace, "up")); err == nil {
					break
				} else if time.Now().After(end) {
					t.Fatal(err)
				}
			}
			if err := p.Halt(); err != nil {
				t.Fatal(err)
			}
			end(p)
			select {
			case <-p.Done():
			case <-time.After(10 * time.Second):
				t.Fatal("it goes on")
			}
		})
	}
}
