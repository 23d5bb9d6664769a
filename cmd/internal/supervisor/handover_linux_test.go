package supervisor

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

func TestUnsealedSpecIsRefused(t *testing.T) {
	fd, err := unix.MemfdCreate("spec", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	open := os.NewFile(uintptr(fd), "spec")
	defer open.Close()
	open.WriteString(`{"version":1}`)
	file, err := os.CreateTemp(t.TempDir(), "spec")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for name, f := range map[string]*os.File{"a memfd that is not sealed": open, "a file": file} {
		if _, err := ReadSpec(f); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
	sealed, err := launch.Sealed("spec", wire.Spec{Version: 1, Agent: "a"})
	if err != nil {
		t.Fatal(err)
	}
	defer sealed.Close()
	for range 2 { // a stored one is read again
		if s, err := ReadSpec(sealed); err != nil || s.Agent != "a" {
			t.Errorf("%+v %v", s, err)
		}
	}
}

func TestStoredSpecIsForThisProcessAlone(t *testing.T) {
	for _, env := range [][]string{
		nil,
		{"LISTEN_FDS=1", "LISTEN_FDNAMES=spec", "LISTEN_PID=1"},
		{"LISTEN_FDS=x", "LISTEN_FDNAMES=spec", "LISTEN_PID=1"},
	} {
		if f := StoredSpec(env); f != nil {
			t.Errorf("%v gave descriptor %d", env, f.Fd())
		}
	}
}

func TestDaemonAnswersWithTheSpecOrWhyNot(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	sealed, err := launch.Sealed("spec", wire.Spec{Version: 1, Agent: "a"})
	if err != nil {
		t.Fatal(err)
	}
	defer sealed.Close()
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			req, _, err := readRequest(c)
			switch {
			case err != nil || req.Op != wire.OpSpec:
				writeLine(c, wire.Reply{Error: "what?"})
			case req.Agent == "a":
				c.WriteMsgUnix([]byte(`{"v":1,"ok":true}`+"\n"), unix.UnixRights(int(sealed.Fd())), nil)
			case req.Agent == "none":
				writeLine(c, wire.Reply{Version: 1, OK: true})
			default:
				writeLine(c, wire.Reply{Version: 1, Error: "the sandbox is unavailable", Code: 69})
			}
			c.Close()
		}
	}()
	f, err := AskSpec(context.Background(), path, "a")
	if err != nil {
		t.Fatal(err)
	}
	if s, err := ReadSpec(f); err != nil || s.Agent != "a" {
		t.Errorf("%+v %v", s, err)
	}
	f.Close()
	var refused *SpecError
	if _, err := AskSpec(context.Background(), path, "b"); !errors.As(err, &refused) || refused.Code != 69 {
		t.Errorf("%v", err)
	}
	if _, err := AskSpec(context.Background(), path, "none"); err == nil || !strings.Contains(err.Error(), "no spec") {
		t.Errorf("%v", err)
	}
	l.Close()
	<-served
	if _, err := AskSpec(context.Background(), path, "a"); err == nil || errors.As(err, &refused) {
		t.Errorf("without a daemon: %v", err)
	}
}

// A daemon that hangs: whoever stops the agent does not wait for it.
func TestAQuestionToTheDaemonEndsWithTheStop(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	asked := make(chan error, 1)
	go func() {
		_, err := AskSpec(ctx, path, "a")
		asked <- err
	}()
	c, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, _, err := readRequest(c); err != nil {
		t.Fatal(err)
	}
	stop()
	select {
	case err := <-asked:
		if err == nil {
			t.Error("it has an answer")
		}
	case <-time.After(specTime / 2):
		t.Error("it still waits for the answer")
	}
}
