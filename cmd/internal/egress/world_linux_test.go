// The world that the tests of this package run in: three network namespaces, made by an
// ordinary user. In the one of the process itself, "the host", the gateway dials; servers
// with public addresses lie in "the internet"; in "the agent's" every address is local, as
// behind the boundary, and what connects there is handed to the gateway.

package egress

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/tcp"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

const (
	inWorld    = "EGRESS_TEST_WORLD"
	justLookUp = "EGRESS_TEST_LOOKUP" // by Go's resolver or, with GODEBUG=netdns=cgo, by libc's
)

func TestMain(m *testing.M) {
	if name := os.Getenv(justLookUp); name != "" {
		all, err := net.DefaultResolver.LookupHost(context.Background(), name)
		fmt.Println(all, err)
		if err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(inWorld) != "" {
		os.Exit(m.Run())
	}
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), inWorld+"=yes")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	runtime.LockOSThread() // the death signal is the thread's
	if err := cmd.Start(); err != nil {
		noWorld = fmt.Sprintf("user and network namespaces are missing: %v", err)
		os.Exit(m.Run())
	}
	if err := cmd.Wait(); err != nil {
		if code := cmd.ProcessState.ExitCode(); code > 0 {
			os.Exit(code)
		}
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

var noWorld string

// Addresses of the internet.
const (
	webA  = "93.184.216.34"
	webB  = "151.101.1.140"
	web6  = "2606:2800:220::34"
	dead  = "93.184.216.99" // nothing answers there
	hostA = "10.77.0.1"     // the host's own
	upDNS = "10.77.0.2"
)

// space is a network namespace with a thread that makes sockets in it.
type space struct {
	tid  int
	work chan func()
}

func newSpace() (*space, error) {
	s := &space{work: make(chan func())}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the process
		err := unix.Unshare(unix.CLONE_NEWNET)
		s.tid = unix.Gettid()
		made <- err
		for f := range s.work {
			f()
		}
	}()
	return s, <-made
}

// in runs f where sockets and programs belong to the namespace.
func (s *space) in(f func()) {
	done := make(chan struct{})
	s.work <- func() { defer close(done); f() }
	<-done
}

type world struct {
	internet, agent *space

	mu   sync.Mutex
	zone map[string][]string // name → records in presentation form; "!": does not answer
	seen []string            // questions to the upstream server
}

var makeWorld = sync.OnceValues(func() (*world, error) {
	w := &world{zone: map[string][]string{}}
	var err error
	if w.internet, err = newSpace(); err != nil {
		return nil, err
	}
	if w.agent, err = newSpace(); err != nil {
		return nil, err
	}
	sh := func(s *space, script string) {
		if err != nil {
			return
		}
		run := func() {
			out, e := exec.Command("sh", "-ec", script).CombinedOutput()
			if e != nil {
				err = fmt.Errorf("%w: %s", e, out)
			}
		}
		if s == nil {
			run()
		} else {
			s.in(run)
		}
	}
	dir, err := os.MkdirTemp("", "egress")
	if err != nil {
		return nil, err
	}
	resolv := filepath.Join(dir, "resolv.conf")
	if err := os.WriteFile(resolv, []byte("nameserver "+upDNS+"\n"), 0o644); err != nil {
		return nil, err
	}
	sh(nil, fmt.Sprintf(`mount --make-rprivate /
		mount --bind %s /etc/resolv.conf
		ip link set lo up
		ip link add h0 type veth peer name i0 netns %d
		ip addr add %s/24 dev h0; ip addr add fd77::1/64 dev h0 nodad
		ip link set h0 up`, resolv, w.internet.tid, hostA))
	sh(w.internet, fmt.Sprintf(`ip link set lo up; ip link set i0 up
		ip addr add %s/24 dev i0; ip addr add fd77::2/64 dev i0 nodad
		for a in %s %s; do ip addr add $a/32 dev i0; done
		ip addr add %s/128 dev i0 nodad
		ip route add blackhole %s/32
		ip route add default via %s; ip -6 route add default via fd77::1`, upDNS, webA, webB, web6, dead, hostA))
	sh(nil, `ip route add default via 10.77.0.2; ip -6 route add default via fd77::2`)
	sh(w.agent, `ip link set lo up; ip route add local 0.0.0.0/0 dev lo; ip -6 route add local ::/0 dev lo`)
	if err != nil {
		return nil, err
	}
	return w, w.serveDNS()
})

func theWorld(t testing.TB) *world {
	t.Helper()
	if noWorld != "" {
		t.Skip(noWorld)
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("ip (iproute2) is missing")
	}
	w, err := makeWorld()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// serveDNS is the host's name server: a real one, over UDP and TCP.
func (w *world) serveDNS() error {
	h := dns.HandlerFunc(func(rw dns.ResponseWriter, q *dns.Msg) {
		name := strings.ToLower(strings.TrimSuffix(q.Question[0].Name, "."))
		w.mu.Lock()
		w.seen = append(w.seen, name)
		records, ok := w.zone[name]
		w.mu.Unlock()
		m := new(dns.Msg)
		m.SetReply(q)
		if !ok {
			m.Rcode = dns.RcodeNameError
		}
		for _, r := range records {
			if r == "!" {
				return
			}
			rr, err := dns.NewRR(q.Question[0].Name + " 60 IN " + r)
			if err != nil {
				panic(err)
			}
			if rr.Header().Rrtype == q.Question[0].Qtype || rr.Header().Rrtype == dns.TypeCNAME {
				m.Answer = append(m.Answer, rr)
				if c, ok := rr.(*dns.CNAME); ok {
					w.mu.Lock()
					for _, r := range w.zone[strings.TrimSuffix(c.Target, ".")] {
						if rr, err := dns.NewRR(c.Target + " 60 IN " + r); err == nil && rr.Header().Rrtype == q.Question[0].Qtype {
							m.Answer = append(m.Answer, rr)
						}
					}
					w.mu.Unlock()
				}
			}
		}
		if _, udp := rw.RemoteAddr().(*net.UDPAddr); udp {
			size := dns.MinMsgSize
			if o := q.IsEdns0(); o != nil {
				size = int(o.UDPSize())
			}
			m.Truncate(size)
		}
		_ = rw.WriteMsg(m)
	})
	var err error
	w.internet.in(func() {
		var p net.PacketConn
		var l net.Listener
		if p, err = net.ListenPacket("udp4", upDNS+":53"); err != nil {
			return
		}
		if l, err = net.Listen("tcp4", upDNS+":53"); err != nil {
			return
		}
		go func() { _ = (&dns.Server{PacketConn: p, Handler: h}).ActivateAndServe() }()
		go func() { _ = (&dns.Server{Listener: l, Handler: h}).ActivateAndServe() }()
	})
	return err
}

// name gives name its records for the test.
func (w *world) name(t testing.TB, name string, records ...string) {
	w.mu.Lock()
	w.zone[name] = records
	w.mu.Unlock()
	t.Cleanup(func() {
		w.mu.Lock()
		delete(w.zone, name)
		w.mu.Unlock()
	})
}

// asked reports whether the host's name server was ever asked for something that ends so.
func (w *world) asked(suffix string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.seen {
		if strings.HasSuffix(n, suffix) {
			return true
		}
	}
	return false
}

// server is a server of the internet, or of the host where space is nil.
func (w *world) server(t testing.TB, s *space, addr string, serve func(net.Conn)) net.Listener {
	t.Helper()
	var l net.Listener
	var err error
	listen := func() { l, err = net.Listen("tcp", addr) }
	if s == nil {
		listen()
	} else {
		s.in(listen)
	}
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { defer c.Close(); serve(c) })
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l
}

// caged is an agent behind a gateway.
type caged struct {
	t       testing.TB
	w       *world
	g       *Gateway
	records string
	changed chan struct{}
}

// cage starts a gateway; the listed ports of every address lead to it.
func (w *world) cage(t testing.TB, p rules.Policy, more ...func(*Config)) *caged {
	t.Helper()
	a := &caged{t: t, w: w, records: filepath.Join(t.TempDir(), "egress.jsonl"), changed: make(chan struct{}, 1)}
	c := Config{Agent: "alice", Egress: wire.Egress{Policy: p, Records: a.records}, Changed: func() {
		select {
		case a.changed <- struct{}{}:
		default:
		}
	}}
	for _, m := range more {
		m(&c)
	}
	g, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	a.g = g
	g.times.inspect, g.times.refusal, g.times.connect = 2*time.Second, time.Second, 5*time.Second
	var wg sync.WaitGroup
	var listeners []*tcp.Listener
	var udp []*net.UDPConn
	var tcpDNS []net.Listener
	w.agent.in(func() {
		lc := net.ListenConfig{}
		lc.SetMultipathTCP(false)
		for _, port := range []int{22, 80, 443, 5432, 8080} {
			for _, family := range []string{"tcp4", "tcp6"} {
				l, err := lc.Listen(context.Background(), family, fmt.Sprintf(":%d", port))
				if err != nil {
					t.Error(err)
					return
				}
				stream, err := tcp.Listen(l.(*net.TCPListener))
				if err != nil {
					t.Error(err)
					return
				}
				listeners = append(listeners, stream)
			}
		}
		for _, family := range []string{"4", "6"} {
			c, err := net.ListenUDP("udp"+family, &net.UDPAddr{Port: 53})
			if err != nil {
				t.Error(err)
				return
			}
			raw, _ := c.SyscallConn()
			_ = raw.Control(func(fd uintptr) {
				if family == "4" {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
				} else {
					err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
					_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1)
				}
			})
			if err != nil {
				t.Error(err)
			}
			udp = append(udp, c)
			l, err := lc.Listen(context.Background(), "tcp"+family, ":53")
			if err != nil {
				t.Error(err)
				return
			}
			tcpDNS = append(tcpDNS, l)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	ctx, cancel := context.WithCancel(context.Background())
	for _, l := range listeners {
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() { g.HandleTCP(ctx, c, c.LocalAddr().(*net.TCPAddr).AddrPort()) })
			}
		})
	}
	wg.Go(func() {
		if err := g.ServeDNS(ctx, udp, tcpDNS); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		for _, l := range listeners {
			l.Close()
		}
		wg.Wait()
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// dial connects as a program inside does. The connection itself always succeeds.
func (a *caged) dial(addr string) *net.TCPConn {
	a.t.Helper()
	c, err := a.try(addr)
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// try is dial for what may be reset before the program looks.
func (a *caged) try(addr string) (*net.TCPConn, error) {
	var c net.Conn
	var err error
	a.w.agent.in(func() { c, err = net.DialTimeout("tcp", addr, 5*time.Second) })
	if err != nil {
		return nil, err
	}
	a.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c.(*net.TCPConn), nil
}

// ask sends one DNS query from inside.
func (a *caged) ask(name string, kind uint16, more ...func(*dns.Msg)) *dns.Msg {
	a.t.Helper()
	return a.askOver("udp", "9.9.9.9:53", name, kind, more...)
}

func (a *caged) askOver(network, server, name string, kind uint16, more ...func(*dns.Msg)) *dns.Msg {
	a.t.Helper()
	var c net.Conn
	var err error
	a.w.agent.in(func() { c, err = net.Dial(network, server) })
	if err != nil {
		a.t.Fatal(err)
	}
	defer c.Close()
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), kind)
	m.SetEdns0(1232, false)
	for _, f := range more {
		f(m)
	}
	client := dns.Client{Net: network, Timeout: 20 * time.Second}
	r, _, err := client.ExchangeWithConn(m, &dns.Conn{Conn: c, UDPSize: 1232})
	if err != nil {
		a.t.Fatalf("%s %s: %v", name, dns.TypeToString[kind], err)
	}
	return r
}

// addrs are the addresses that name has inside.
func (a *caged) addrs(name string) []string {
	a.t.Helper()
	var all []string
	for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA} {
		for _, rr := range a.ask(name, kind).Answer {
			switch rr := rr.(type) {
			case *dns.A:
				all = append(all, rr.A.String())
			case *dns.AAAA:
				all = append(all, rr.AAAA.String())
			}
		}
	}
	return all
}

// connect looks name up and connects to its first address.
func (a *caged) connect(name string, port int) *net.TCPConn {
	a.t.Helper()
	addrs := a.addrs(name)
	if len(addrs) == 0 {
		a.t.Fatalf("%s has no address inside", name)
	}
	return a.dial(net.JoinHostPort(addrs[0], fmt.Sprint(port)))
}

// program runs one inside, with other files at the named places, and gives what it prints.
func (w *world) program(t testing.TB, files map[string]string, env []string, argv ...string) (string, error) {
	t.Helper()
	dir, script, n := t.TempDir(), "set -e\n", 0
	for at, text := range files {
		n++
		from := filepath.Join(dir, fmt.Sprint(n))
		if err := os.WriteFile(from, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		script += fmt.Sprintf("mount --bind %s %s\n", from, at)
	}
	cmd := exec.Command("unshare", append([]string{"-m", "sh", "-c", script + `exec "$@"`, "sh"}, argv...)...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "LANG=C.UTF-8"}, env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	var err error
	w.agent.in(func() { err = cmd.Start() }) // the program is the namespace's, as its thread is
	if err == nil {
		err = cmd.Wait()
	}
	return out.String(), err
}

// record waits for a record that fits.
func (a *caged) record(what string, fits func(Record) bool) Record {
	a.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		all := a.all()
		for _, r := range all {
			if fits(r) {
				return r
			}
		}
		if time.Now().After(deadline) {
			a.t.Fatalf("no record of %s in %+v", what, all)
		}
		// The recorder writes behind the back of what it records; the file says when.
		time.Sleep(5 * time.Millisecond) //nolint:forbidigo // looked for with a deadline
	}
}

// all are the records so far.
func (a *caged) all() (all []Record) {
	if err := audit.Read(a.records, func(line []byte) error {
		var r Record
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		all = append(all, r)
		return nil
	}); err != nil {
		a.t.Fatal(err)
	}
	return all
}

// echo sends back what it gets, and ends when the client does.
func echo(c net.Conn) {
	b := make([]byte, 4<<10) // and not io.Copy, which would hold a pipe
	for {
		n, err := c.Read(b)
		if err != nil {
			break
		}
		if _, err := c.Write(b[:n]); err != nil {
			return
		}
	}
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.CloseWrite()
	}
}

func parseAddr(s string) netip.Addr { return netip.MustParseAddr(s) }

func policy(allow ...string) rules.Policy { return rules.Policy{Allow: allow} }
