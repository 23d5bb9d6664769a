package daemon

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// fakeEnv makes the test binary a supervisor that does what its spec's Argv says.
const fakeEnv = "DAEMON_TEST_FAKE_SUPERVISOR=1"

func TestMain(m *testing.M) {
	if os.Getenv("DAEMON_TEST_FAKE_SUPERVISOR") == "1" {
		fakeSupervisor()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// fakeSupervisor reads its sealed spec and carries out the words of Argv:
//
//	ready        READY=1
//	say:TEXT     STATUS=TEXT
//	err:TEXT     a line on stderr
//	listen       listens on the socket of the spec
//	serve        the same, and says its status to whoever asks, serve:once once on each
//	             connection; notes that in the files "connected" and "asked"
//	env:FILE     writes its environment
//	writespec    tries to change the sealed spec and says how it went on stderr
//	term:ignore  SIGTERM does nothing
//	wait         until SIGTERM or the end of the lifeline, then says "ended by ..."
//	exit:N       exits; N "kill": by SIGKILL
//
// While it runs it holds a lock in Dir; a second one at the same time is noted in
// the file "double".
func fakeSupervisor() {
	raw, err := io.ReadAll(os.NewFile(3, "spec"))
	var spec wire.Spec
	if err == nil {
		err = json.Unmarshal(raw, &spec)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "fake:", err)
		os.Exit(78)
	}
	lifeline := make(chan struct{})
	go func() {
		os.NewFile(4, "lifeline").Read(make([]byte, 1))
		close(lifeline)
	}()
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)

	lock, err := os.OpenFile(filepath.Join(spec.Dir, "one"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil || syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		os.WriteFile(filepath.Join(spec.Dir, "double"), []byte("two at once"), 0o600)
	}
	runs, _ := os.OpenFile(filepath.Join(spec.Dir, "runs"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	fmt.Fprintln(runs, os.Getpid())
	runs.Close()

	for _, word := range spec.Argv {
		verb, arg, _ := strings.Cut(word, ":")
		switch verb {
		case "ready":
			sendNotify("READY=1\n")
		case "say":
			sendNotify("STATUS=" + arg + "\n")
		case "err":
			fmt.Fprintln(os.Stderr, arg)
		case "listen":
			os.Remove(spec.Socket)
			l, err := net.Listen("unix", spec.Socket)
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			go func() {
				for {
					if _, err := l.Accept(); err != nil {
						return
					}
				}
			}()
		case "serve":
			os.Remove(spec.Socket)
			l, err := net.Listen("unix", spec.Socket)
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			go serveStatus(l, spec.Dir, arg == "once")
		case "env":
			os.WriteFile(arg, []byte(strings.Join(os.Environ(), "\n")), 0o600)
		case "writespec":
			_, err := os.NewFile(3, "spec").WriteAt([]byte("x"), 0)
			fmt.Fprintln(os.Stderr, "write to the spec:", err)
		case "term":
			signal.Ignore(syscall.SIGTERM)
			term = nil
		case "wait":
			select {
			case <-term:
				sendNotify("STOPPING=1\n")
				sendNotify("STATUS=ended by SIGTERM\n")
			case <-lifeline:
				os.WriteFile(filepath.Join(spec.Dir, "lifeline"), []byte("end of the lifeline"), 0o600)
			}
		case "exit":
			if arg == "kill" {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
			n, _ := strconv.Atoi(arg)
			os.Exit(n)
		}
	}
}

// serveStatus answers whoever asks.
func serveStatus(l net.Listener, dir string, once bool) {
	note := func(what string) {
		f, _ := os.OpenFile(filepath.Join(dir, what), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		fmt.Fprintln(f, what)
		f.Close()
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		note("connected")
		go func() {
			defer c.Close()
			var req wire.Request
			for dec := json.NewDecoder(c); dec.Decode(&req) == nil; {
				note("asked")
				_ = json.NewEncoder(c).Encode(wire.Reply{Version: wire.Version, OK: true, Status: &wire.Status{Build: "test", PID: os.Getpid(), Clients: 7, Line: "at work as " + strconv.Itoa(os.Getpid())}}) //nolint:errchkjson // a client that goes away has no answer
				if once {
					return
				}
			}
		}()
	}
}

func sendNotify(s string) {
	c, err := net.Dial("unixgram", os.Getenv("NOTIFY_SOCKET"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	defer c.Close()
	io.WriteString(c, s)
}
