package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// dialArg makes this program fetch a page and print it.
const dialArg = "e2e-dial"

// dialed reports whether this process was started to fetch a page, and has.
func dialed() bool {
	if len(os.Args) != 3 || os.Args[1] != dialArg {
		return false
	}
	r, err := http.Get(os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	io.Copy(os.Stdout, r.Body)
	return true
}

// hostServer serves HTTP on the host's loopback; its answer names the port.
func hostServer(t *testing.T, network, addr string) (port string) {
	t.Helper()
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Skip("missing: ", err)
	}
	_, port, _ = net.SplitHostPort(l.Addr().String())
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/big" {
			w.Header().Set("Content-Length", strconv.Itoa(64<<20))
			io.CopyN(w, zeros{}, 64<<20)
			return
		}
		fmt.Fprintf(w, "served %s", port)
	})}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
	return port
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestEveryKindOfProgramObeysTheSameRules(t *testing.T) {
	s := newSite(t)
	allowed, denied := hostServer(t, "tcp4", "127.0.0.1:0"), hostServer(t, "tcp4", "127.0.0.1:0")
	s.start()
	s.add("alice", "--network", "allowlist", "--allow", "host:"+allowed)
	work := s.workspace("alice")
	s.write(filepath.Join(work, "dial.js"), `require('http').get('http://host:'+process.argv[2]+'/', r => r.on('data', d => process.stdout.write(d))).on('error', e => { console.error(e.code); process.exit(1) })`)
	s.write(filepath.Join(work, "fetch.js"), `fetch('http://host:'+process.argv[2]+'/').then(r => r.text()).then(t => process.stdout.write(t), e => { console.error(e); process.exit(1) })`)
	s.write(filepath.Join(work, "dial.py"), `import urllib.request, sys; sys.stdout.write(urllib.request.urlopen('http://host:'+sys.argv[1]+'/', timeout=20).read().decode())`)
	s.write(filepath.Join(work, "Dial.java"), `import java.net.*; public class Dial { public static void main(String[] a) throws Exception { System.out.print(new String(new URI("http://host:"+a[0]+"/").toURL().openStream().readAllBytes())); } }`)
	programs := map[string]string{
		"curl":         "curl -fsS --max-time 20 http://host:$PORT/",
		"node http":    "node dial.js $PORT",
		"node fetch":   "node fetch.js $PORT",
		"python":       "python3 dial.py $PORT",
		"bash sockets": `exec 3<>/dev/tcp/host/$PORT && printf 'GET / HTTP/1.0\r\nHost: host:%s\r\n\r\n' $PORT >&3 && grep served <&3`,
	}
	// Compiled outside: that is what takes its time.
	if out, err := exec.Command("javac", "-d", work, filepath.Join(work, "Dial.java")).CombinedOutput(); err == nil {
		programs["java"] = "java -XX:TieredStopAtLevel=1 -cp . Dial $PORT"
	} else {
		t.Logf("without Java: %v %s", err, out)
	}
	// This program itself, by either of Go's resolvers (see TestMain).
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	s.executable(s.write(filepath.Join(work, "dialgo"), string(self)))
	programs["go"] = "GODEBUG=netdns=go ./dialgo " + dialArg + " http://host:$PORT/"
	programs["go by libc"] = "GODEBUG=netdns=cgo ./dialgo " + dialArg + " http://host:$PORT/"
	for name, command := range programs {
		t.Run(name, func(t *testing.T) {
			in := func(port string) result {
				return s.run("agent", "exec", "alice", "--", "/bin/bash", "-c", "PORT="+port+"; cd "+work+"; "+command)
			}
			if r := in(allowed); r.code != 0 || !strings.Contains(r.out, "served "+allowed) {
				t.Errorf("what is allowed: exit %d: %s%s", r.code, r.out, r.err)
			}
			if r := in(denied); r.code == 0 || strings.Contains(r.out, "served") {
				t.Errorf("what is not: exit %d: %s%s", r.code, r.out, r.err)
			}
			// The control: outside both are reached, by the address that stands for "host".
			for _, port := range []string{allowed, denied} {
				r, err := http.Get("http://127.0.0.1:" + port + "/")
				if err != nil {
					t.Fatal(err)
				}
				r.Body.Close()
			}
		})
	}
	if st := s.agent("alice"); st.State != control.StateRunning && st.State != control.StateStopped {
		t.Errorf("%+v", st)
	}
}

func TestModeNoneAndAnEmptyAllowListLetNothingOut(t *testing.T) {
	s := newSite(t)
	port := hostServer(t, "tcp4", "127.0.0.1:0")
	s.start()
	s.add("none", "--network", "none")
	s.add("empty", "--network", "allowlist")
	s.add("host", "--network", "host")
	for id, reaches := range map[string]bool{"none": false, "empty": false, "host": true} {
		r := s.sh(id, "curl -sS --max-time 20 http://127.0.0.1:"+port+"/ || curl -sS --max-time 20 http://host:"+port+"/ || curl -sS --max-time 20 http://198.19.255.2:"+port)
		if got := strings.Contains(r.out, "served "+port); got != reaches {
			t.Errorf("%s: reaches %v: %s%s", id, got, r.out, r.err)
		}
	}
}

func TestCommandsShareTheLoopbackAndTheRulesOfTheRunningAgent(t *testing.T) {
	s := newSite(t)
	port := hostServer(t, "tcp4", "127.0.0.1:0")
	s.start()
	s.add("alice", "--network", "allowlist", "--allow", "host:"+port)
	s.ok("agent", "start", "alice")
	server := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "python3", "-u", "-m", "http.server", "--bind", "127.0.0.1", "8765")
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	server.Stderr = server.Stdout
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	defer server.Wait()
	defer server.Process.Signal(os.Interrupt)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.Contains(line, "8765") {
		t.Fatal(line, err)
	}
	s.write(filepath.Join(s.workspace("alice"), "page"), "from inside")
	if got := s.works("alice", "curl -fsS --max-time 20 http://127.0.0.1:8765/page && curl -fsS --max-time 20 http://host:"+port+"/"); got != "from insideserved "+port {
		t.Errorf("another command: %q", got)
	}
	// The same port of the host's loopback is nobody's.
	if c, err := net.DialTimeout("tcp", "127.0.0.1:8765", time.Second); err == nil {
		c.Close()
		t.Error("the server inside listens outside")
	}
	// And a person reaches it by a forward.
	hostPort, end := s.forward("alice", "0:8765")
	r, err := http.Get("http://127.0.0.1:" + hostPort + "/page")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(r.Body)
	r.Body.Close()
	if string(body) != "from inside" {
		t.Errorf("by a forward: %q", body)
	}
	if code, said := end(); code != 0 {
		t.Errorf("Ctrl-C: exit %d: %s", code, said)
	}
}

// forward starts a forward and gives the port of the host; end interrupts it.
func (s *site) forward(id, ports string) (hostPort string, end func() (int, string)) {
	s.t.Helper()
	cmd := s.agentconnect(context.Background(), "forward", id, ports)
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	addr, _, _ := strings.Cut(line, " ")
	_, hostPort, err = net.SplitHostPort(addr)
	ended := false
	end = func() (int, string) {
		if !ended {
			ended = true
			cmd.Process.Signal(os.Interrupt)
			cmd.Wait()
		}
		return cmd.ProcessState.ExitCode(), errs.String()
	}
	s.t.Cleanup(func() { end() })
	if err != nil {
		cmd.Process.Signal(os.Interrupt)
		s.t.Fatalf("%q: %v: %s", line, err, errs.String())
	}
	return hostPort, end
}
