package vfork

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/vfork/early"
)

// told is what a child says of itself.
type told struct {
	Args, Env []string
	Dir       string
	PID, SID  int
	Death     int
	Files     early.Limit // as it was started
	Open      []string    // descriptors from 3 on
	Status    map[string]string
	UIDs      string // uid_map
	SetGroups string
}

const childWord = "child of a test"

func TestMain(m *testing.M) {
	if os.Args[0] == childWord {
		tell()
		return
	}
	os.Exit(m.Run())
}

func tell() {
	// Before the child opens anything.
	var open []string
	for fd := 3; fd < 16; fd++ {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			var st unix.Stat_t
			if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO {
				open = append(open, string(rune('0'+fd)))
			}
		}
	}
	var death int32
	if err := unix.Prctl(unix.PR_GET_PDEATHSIG, uintptr(unsafe.Pointer(&death)), 0, 0, 0); err != nil {
		panic(err)
	}
	t := told{Args: os.Args, Env: os.Environ(), PID: os.Getpid(), Death: int(death), Files: early.Files, Open: open, Status: map[string]string{}}
	t.Dir, _ = os.Getwd()
	t.SID, _ = unix.Getsid(0)
	f, err := os.Open("/proc/self/status")
	if err != nil {
		panic(err)
	}
	for s := bufio.NewScanner(f); s.Scan(); {
		name, value, _ := strings.Cut(s.Text(), ":")
		t.Status[name] = strings.TrimSpace(value)
	}
	for file, text := range map[string]*string{"/proc/self/uid_map": &t.UIDs, "/proc/self/setgroups": &t.SetGroups} {
		b, err := os.ReadFile(file)
		if err != nil {
			panic(err)
		}
		*text = strings.Join(strings.Fields(string(b)), " ")
	}
	if err := json.NewEncoder(os.Stdout).Encode(t); err != nil {
		panic(err)
	}
}

func self(t testing.TB) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func pipe(t testing.TB) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// ask starts the child and gives what it says.
func ask(t testing.TB, s Start) told {
	t.Helper()
	r, w := pipe(t)
	s.Path, s.Args = self(t), append([]string{childWord}, s.Args...)
	s.Files = slices.Concat([]*os.File{os.Stdin, w, os.Stderr}, s.Files)
	p, err := s.Run()
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	var said told
	derr := json.NewDecoder(r).Decode(&said)
	if st, err := p.Wait(); err != nil || st != 0 || derr != nil {
		t.Fatalf("the child: %v, %v; what it said: %v", st, err, derr)
	}
	return said
}

func dumpable(t testing.TB) int {
	t.Helper()
	n, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// What a child gets is what it was meant to get, and what package os gives it where no user
// namespace is new, which serves as the measure.
func TestChildGetsWhatItIsMeantTo(t *testing.T) {
	if os.Getuid() == 0 {
		t.Skip("missing: an ordinary user (this test does not run as root)")
	}
	if early.Files.Soft >= early.Files.Hard {
		// Nothing to raise: in a process with a lower soft limit there is.
		out, err := exec.CommandContext(t.Context(), "/bin/sh", "-c", `ulimit -Sn 64 && exec "$0" -test.run "^$1\$" -test.v`, self(t), t.Name()).CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
			t.Errorf("with a lower soft limit: %v\n%s", err, out)
		}
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := dumpable(t)
	r, w := pipe(t)
	s := Start{Args: []string{"one", ""}, Env: []string{"A=1", "B="}, Files: []*os.File{r, nil, w}, Death: syscall.SIGUSR1}
	plain := ask(t, s)
	s.Namespaces = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID
	s.Capabilities = []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN}
	own := ask(t, s)

	if got, want := strings.Join(own.Args[1:], "|"), "one|"; got != want {
		t.Errorf("arguments %q, want %q", got, want)
	}
	if own.PID != 1 || own.SID != 1 {
		t.Errorf("process %d of session %d, want 1 of 1", own.PID, own.SID)
	}
	if got, want := own.Status["CapPrm"]+" "+own.Status["CapAmb"], "0000000000201000 0000000000201000"; got != want {
		t.Errorf("capabilities, permitted and ambient: %s, want %s", got, want)
	}
	if got, want := own.UIDs, fmt.Sprint(os.Getuid(), os.Getuid(), 1); got != want {
		t.Errorf("users %q, want %q", got, want)
	}
	if own.SetGroups != "deny" {
		t.Errorf("setgroups is %q, want deny", own.SetGroups)
	}
	for _, name := range []string{"Uid", "Gid", "SigBlk", "SigIgn"} {
		if own.Status[name] != plain.Status[name] {
			t.Errorf("%s is %q, want %q", name, own.Status[name], plain.Status[name])
		}
	}
	if !slices.Equal(own.Env, plain.Env) || own.Dir != "/" || plain.Dir != "/" || own.Death != int(syscall.SIGUSR1) || own.Death != plain.Death {
		t.Errorf("environment %q, directory %q, death signal %d; want %q, \"/\" (%q), %d (%d)", own.Env, own.Dir, own.Death, plain.Env, plain.Dir, syscall.SIGUSR1, plain.Death)
	}
	if !slices.Equal(own.Open, []string{"3", "5"}) || !slices.Equal(plain.Open, own.Open) {
		t.Errorf("open descriptors %q and %q, want 3 and 5", own.Open, plain.Open)
	}
	if own.Files != plain.Files || own.Files != early.Files {
		t.Errorf("limit of open files %+v, want %+v", own.Files, plain.Files)
	}
	// The child's memory was ours while it changed its rights.
	if now := dumpable(t); now != before {
		t.Errorf("dumpable is %d now, and was %d", now, before)
	}
}

func TestFailureSaysTheStepAndLeavesNothing(t *testing.T) {
	for _, c := range []struct {
		what string
		s    Start
		step string
		err  error
	}{
		{"no such program", Start{Path: "/nowhere", Namespaces: syscall.CLONE_NEWUSER}, "execute", syscall.ENOENT},
		{"no program", Start{Path: "/etc/passwd", Namespaces: syscall.CLONE_NEWUSER}, "execute", syscall.EACCES},
		{"no such capability", Start{Path: self(t), Namespaces: syscall.CLONE_NEWUSER, Capabilities: []uintptr{63}}, "keep capabilities", syscall.EINVAL},
		{"namespaces that do not go together", Start{Path: self(t), Namespaces: syscall.CLONE_NEWUSER | syscall.CLONE_FS}, "clone", syscall.EINVAL},
	} {
		c.s.Args, c.s.Files = []string{"x"}, []*os.File{os.Stdin, os.Stdout, os.Stderr}
		p, err := c.s.Run()
		var e *Error
		if p != nil || !errors.As(err, &e) || e.Step != c.step || !errors.Is(err, c.err) {
			t.Errorf("%s: %v, want %v at %q", c.what, err, c.err, c.step)
		}
	}
	if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); err != unix.ECHILD {
		t.Errorf("a child is left: %d, %v", pid, err)
	}
}

// The parent goes on allocating, collecting and starting while children live in its memory.
func TestManyAtOnce(t *testing.T) {
	stop := make(chan struct{})
	var garbage sync.WaitGroup
	for range 2 {
		garbage.Go(func() {
			var keep [][]byte
			for {
				select {
				case <-stop:
					return
				default:
				}
				if keep = append(keep, make([]byte, 1<<16)); len(keep) > 64 {
					keep = nil
					runtime.GC()
				}
			}
		})
	}
	var starts sync.WaitGroup
	for range 4 {
		starts.Go(func() {
			for range 25 {
				r, w, err := os.Pipe()
				if err != nil {
					t.Error(err)
					return
				}
				s := Start{Path: "/bin/echo", Args: []string{"echo", "said"}, Files: []*os.File{os.Stdin, w, os.Stderr}, Namespaces: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET}
				p, err := s.Run()
				w.Close()
				if err != nil {
					t.Error(err)
					r.Close()
					return
				}
				said, err := io.ReadAll(r)
				r.Close()
				if st, werr := p.Wait(); err != nil || werr != nil || st != 0 || string(said) != "said\n" {
					t.Errorf("the child: %v, %v; it said %q, %v", st, werr, said, err)
				}
			}
		})
	}
	starts.Wait()
	close(stop)
	garbage.Wait()
}

// BenchmarkStart is the start and end of /bin/true in a user namespace, with 12 MB in the parent's
// memory, as a supervisor has, of which it writes to each page afterwards; beside package os.
func BenchmarkStart(b *testing.B) {
	memory := make([]byte, 12<<20)
	for _, c := range []struct {
		name string
		run  func(*Start) (*Process, error)
	}{{"vfork", (*Start).Run}, {"os", (*Start).plain}} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				p, err := c.run(&Start{Path: "/bin/true", Args: []string{"true"}, Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Namespaces: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS})
				if err != nil {
					b.Fatal(err)
				}
				for i := 0; i < len(memory); i += 4096 {
					memory[i]++
				}
				if _, err := p.Wait(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
