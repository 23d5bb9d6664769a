package daemon

import (
	"bufio"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// heard tells of each record that is logged.
type heard chan string

func (heard) Enabled(context.Context, slog.Level) bool { return true }
func (h heard) WithAttrs([]slog.Attr) slog.Handler     { return h }
func (h heard) WithGroup(string) slog.Handler          { return h }
func (h heard) Handle(_ context.Context, r slog.Record) error {
	select {
	case h <- r.Message:
	default:
	}
	return nil
}

// A daemon that ran out of descriptors for a moment goes on answering supervisors.
func TestSupervisorsAreAnsweredAfterDescriptorsRanOut(t *testing.T) {
	const word = "AGENTCONNECT_TEST_DESCRIPTORS"
	if os.Getenv(word) == "" { // the limit is a process's
		cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), word+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	said := make(heard, 100)
	d := &Daemon{log: slog.New(said)}
	path := filepath.Join(t.TempDir(), "s")
	stop, err := d.serveSpecs(path)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	client := func() int {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	first, second := client(), client()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}); err != nil {
		t.Fatal(err)
	}
	var full []int
	for {
		fd, err := unix.Dup(first)
		if err != nil {
			break
		}
		full = append(full, fd)
	}
	if err := unix.Connect(first, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	select {
	case m := <-said:
		if !strings.Contains(m, "could not be accepted") {
			t.Errorf("the daemon said %q", m)
		}
	case <-time.After(10 * time.Second):
		t.Error("nobody hears that a connection was not accepted")
	}
	for _, fd := range full {
		unix.Close(fd)
	}
	if err := unix.Connect(second, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(second), "supervisor")
	defer f.Close()
	if err := unix.SetsockoptTimeval(second, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(`{"v":1,"op":"stopped","agent":"a"}` + "\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(f).ReadString('\n'); err != nil || !strings.Contains(line, `"v":1`) {
		t.Errorf("%q %v", line, err)
	}
	unix.Close(first)
}
