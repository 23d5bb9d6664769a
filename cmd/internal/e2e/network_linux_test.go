package e2e

import (
	"bufio"
	"context"
	"encoding/json"
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

// client waits for nobody for ever.
var client = &http.Client{Timeout: patience}

// dialArg makes this program fetch a page and print it.
const dialArg = "e2e-dial"

// dialed reports whether this process was started to fetch a page, and has.
func dialed() bool {
	if len(os.Args) != 3 || os.Args[1] != dialArg {
		return false
	}
	r, err := client.Get(os.Args[2])
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
	if _, err := exec.LookPath("javac"); err != nil {
		t.Run("java", func(t *testing.T) { t.Skip("missing: javac (default-jdk-headless)") })
	} else if out, err := exec.Command("javac", "-d", work, filepath.Join(work, "Dial.java")).CombinedOutput(); err != nil {
		t.Errorf("javac: %v: %s", err, out)
	} else {
		programs["java"] = "java -XX:TieredStopAtLevel=1 -cp . Dial $PORT"
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
			// By the bytes: Node's fetch now and then ends well when its connection is reset at once.
			if r := in(denied); strings.Contains(r.out, "served") {
				t.Errorf("what is not: exit %d: %s%s", r.code, r.out, r.err)
			}
			// The control: outside both are reached, by the address that stands for "host".
			for _, port := range []string{allowed, denied} {
				r, err := client.Get("http://127.0.0.1:" + port + "/")
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
	r, err := client.Get("http://127.0.0.1:" + hostPort + "/page")
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

func TestForwardsOfEveryKindAndTheirEnd(t *testing.T) {
	s := newSite(t)
	s.start()
	s.add("alice", "--network", "none") // a forward asks for no network
	s.fails(1, []string{"not running", "agent start alice"}, "forward", "alice", "8080")
	s.fails(2, []string{"HOSTPORT"}, "forward", "alice", "0")
	s.ok("agent", "start", "alice")
	s.write(filepath.Join(s.workspace("alice"), "serve.py"), `
import socket, threading
def serve(host, port, family):
    l = socket.socket(family)
    if family == socket.AF_INET6: l.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    l.bind((host, port)); l.listen(64)
    def one(c):
        n = 0
        while True:
            b = c.recv(65536)
            if not b: break
            n += len(b)
        c.sendall(('%s got %d' % (host, n)).encode()); c.close()
    def loop():
        while True: threading.Thread(target=one, args=(l.accept()[0],), daemon=True).start()
    threading.Thread(target=loop, daemon=True).start()
serve('127.0.0.1', 8004, socket.AF_INET); serve('::1', 8006, socket.AF_INET6)
print('serving', flush=True)
threading.Event().wait()
`)
	server := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "python3", "-u", "serve.py")
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	defer server.Wait()
	defer server.Process.Signal(os.Interrupt)
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "serving\n" {
		t.Fatal(line, err)
	}
	four, _ := s.forward("alice", "0:8004")
	six, end6 := s.forward("alice", "0:8006")
	nobody, _ := s.forward("alice", "0:8005")
	const size = 8 << 20
	send := func(network, port string, n int64) string {
		c, err := net.Dial(network, net.JoinHostPort(map[string]string{"tcp4": "127.0.0.1", "tcp6": "::1"}[network], port))
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		if _, err := io.CopyN(c, zeros{}, n); err != nil {
			return err.Error() // a reset is told once: a read would find a clean end
		}
		c.(*net.TCPConn).CloseWrite() // half closed: the answer still comes
		b, err := io.ReadAll(c)
		if err != nil {
			return err.Error()
		}
		return string(b)
	}
	answers := make(chan string, 20)
	for range 10 {
		go func() { answers <- send("tcp4", four, size) }()
		go func() { answers <- send("tcp4", six, size) }()
	}
	got := map[string]int{}
	for range 20 {
		got[<-answers]++
	}
	if want := fmt.Sprintf("127.0.0.1 got %d", size); got[want] != 10 || got[fmt.Sprintf("::1 got %d", size)] != 10 {
		t.Errorf("%v", got)
	}
	if b := send("tcp6", four, 3); b != "127.0.0.1 got 3" && !strings.Contains(b, "refused") {
		t.Errorf("by ::1 of the host: %q", b)
	}
	if b := send("tcp4", nobody, 1); strings.Contains(b, "got") || b == "" {
		t.Errorf("where nobody listens: %q", b)
	}
	if code, said := end6(); code != 0 {
		t.Errorf("an interrupted forward: exit %d: %s", code, said)
	}
	if b := send("tcp4", six, 1); !strings.Contains(b, "refused") {
		t.Errorf("after its end: %q", b)
	}
	s.fails(1, []string{"taken", "HOSTPORT"}, "forward", "alice", four+":8004")
	asked := s.agentconnect(context.Background(), "forward", "alice", "0:8005", "--json")
	asked.Stderr = &strings.Builder{}
	where, err := asked.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := asked.Start(); err != nil {
		t.Fatal(err)
	}
	var at struct{ Address string }
	if err := json.NewDecoder(where).Decode(&at); err != nil {
		t.Error(err)
	}
	_, port, _ := net.SplitHostPort(at.Address)
	send("tcp4", port, 1)
	asked.Process.Signal(os.Interrupt)
	asked.Wait()
	var warned struct{ Warning string }
	if said := fmt.Sprint(asked.Stderr); json.Unmarshal([]byte(said), &warned) != nil || !strings.Contains(warned.Warning, "refused") {
		t.Errorf("with --json it said %q", said)
	}
	if other, err := net.Listen("tcp6", "[::1]:0"); err == nil {
		_, port, _ := net.SplitHostPort(other.Addr().String())
		_, end := s.forward("alice", port+":8004")
		if code, said := end(); code != 0 || !strings.Contains(said, "[::1]:"+port+" is another program's") {
			t.Errorf("where ::1 is another's: exit %d: %s", code, said)
		}
		other.Close()
	}
	// With the agent the rest ends.
	forward := s.agentconnect(context.Background(), "forward", "alice", "0:8004")
	var errs strings.Builder
	forward.Stderr = &errs
	begun, _ := forward.StdoutPipe()
	if err := forward.Start(); err != nil {
		t.Fatal(err)
	}
	bufio.NewReader(begun).ReadString('\n')
	s.ok("agent", "stop", "alice")
	if err := forward.Wait(); err == nil || !strings.Contains(errs.String(), "has ended") {
		t.Errorf("the agent has ended, the forward: %v: %s", err, errs.String())
	}
}

// lineServer answers "echo X", counts what follows "count" up to its end, and floods.
func lineServer(t *testing.T) (port string) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				r := bufio.NewReader(c)
				for {
					line, err := r.ReadString('\n')
					if err != nil {
						return
					}
					switch word, rest, _ := strings.Cut(strings.TrimSpace(line), " "); word {
					case "echo":
						io.WriteString(c, rest+"\n")
					case "count":
						n, _ := io.Copy(io.Discard, r)
						fmt.Fprintf(c, "%d\n", n)
						return
					case "flood":
						c.SetWriteDeadline(time.Now().Add(5 * time.Second))
						io.Copy(c, zeros{})
						return
					}
				}
			}()
		}
	}()
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return port
}

func TestAThousandConnectionsAndOneThatNeverReads(t *testing.T) {
	s := newSite(t)
	port := lineServer(t)
	s.start()
	s.add("alice", "--network", "allowlist", "--allow", "host:"+port)
	s.ok("agent", "start", "alice")
	s.write(filepath.Join(s.workspace("alice"), "many.py"), `
import socket, sys, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
to = ('host', int(sys.argv[1]))
flood = socket.create_connection(to); flood.sendall(b'flood\n')  # and never read
many = [socket.create_connection(to) for _ in range(1000)]
for i, c in enumerate(many): c.sendall(b'echo %d\n' % i)
for i, c in enumerate(many):
    c.settimeout(60)
    assert c.recv(100) == b'%d\n' % i, i
print('all', len(many), flush=True)
sys.stdin.readline()
half = socket.create_connection(to); half.sendall(b'count\n')
block = bytes(1 << 20)
for _ in range(64): half.sendall(block)
half.shutdown(socket.SHUT_WR)
print('counted', half.makefile().readline().strip(), flush=True)
`)
	cmd := s.agentconnect(context.Background(), "agent", "exec", "alice", "--", "python3", "-u", "many.py", port)
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "all 1000" {
		in.Close()
		cmd.Wait()
		t.Fatalf("%q %s", lines.Text(), errs.String())
	}
	// Loose on purpose: what must not be is memory that grows with what is sent.
	const most = 160 << 10
	if kib := residentKiB(t, s.agent("alice").PID); kib > most {
		t.Errorf("the supervisor has %d KiB under 1,000 connections, at most %d", kib, most)
	} else {
		t.Logf("the supervisor has %d KiB under 1,000 connections", kib)
	}
	io.WriteString(in, "\n")
	if !lines.Scan() || lines.Text() != fmt.Sprintf("counted %d", 64<<20) {
		t.Errorf("half closed: %q", lines.Text())
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, errs.String())
	}
}

func residentKiB(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	t.Fatal("no VmRSS")
	return 0
}
