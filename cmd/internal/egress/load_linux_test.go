package egress

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/tcp"
)

// noise gives size bytes that never repeat, and their sum.
func noise(size int64) (io.Reader, []byte) {
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i * i >> 3)
	}
	var parts []io.Reader
	sum := sha256.New()
	for n, left := byte(0), size; left > 0; n++ {
		b := append([]byte{n}, block...)
		b = b[:min(int64(len(b)), left)]
		sum.Write(b)
		parts = append(parts, bytes.NewReader(b))
		left -= int64(len(b))
	}
	return io.MultiReader(parts...), sum.Sum(nil)
}

// CASES 36.
func TestNothingIsLostBothWays(t *testing.T) {
	w := theWorld(t)
	const size = 64 << 20
	up := make(chan []byte, 1)
	w.server(t, w.internet, webA+":8080", func(c net.Conn) {
		sum := sha256.New()
		var both sync.WaitGroup
		both.Go(func() { _, _ = io.Copy(sum, c) })
		r, _ := noise(size)
		_, _ = io.Copy(c, r)
		_ = c.(*net.TCPConn).CloseWrite()
		both.Wait()
		up <- sum.Sum(nil)
	})
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	c := a.connect("example.com", 8080)
	_, want := noise(size)
	var both sync.WaitGroup
	both.Go(func() {
		r, _ := noise(size)
		_, _ = io.Copy(c, r)
		_ = c.CloseWrite()
	})
	sum := sha256.New()
	if _, err := io.Copy(sum, c); err != nil {
		t.Error(err)
	}
	both.Wait()
	if got := <-up; !bytes.Equal(got, want) || !bytes.Equal(sum.Sum(nil), want) {
		t.Error("what arrived is not what was sent")
	}
	r := a.record("it", func(r Record) bool { return r.Verdict == Allowed })
	if r.Sent != size || r.Received != size {
		t.Errorf("got %+v", r)
	}
}

func TestHalfClosedStreamsGoOn(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", func(c net.Conn) { // answers after the end of the question
		b, _ := io.ReadAll(c)
		fmt.Fprintf(c, "got %s", b)
	})
	heard := make(chan struct{})
	w.server(t, w.internet, webA+":5432", func(c net.Conn) { // says all and goes on listening
		defer close(heard)
		fmt.Fprint(c, "bye")
		_ = c.(*net.TCPConn).CloseWrite()
		if b, err := io.ReadAll(c); string(b) != "still here" {
			t.Errorf("after its own end the server got %q, %v", b, err)
		}
	})
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	c := a.connect("example.com", 8080)
	fmt.Fprint(c, "question\n")
	_ = c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "got question\n" {
		t.Errorf("got %q, %v", b, err)
	}
	c = a.connect("example.com", 5432)
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
		t.Errorf("got %q, %v", b, err)
	}
	fmt.Fprint(c, "still here")
	_ = c.Close()
	<-heard
}

func TestBreakingOffIsPassedOn(t *testing.T) {
	w := theWorld(t)
	broke := make(chan error, 1)
	w.server(t, w.internet, webA+":8080", func(c net.Conn) {
		b := make([]byte, 1)
		if _, err := c.Read(b); err != nil {
			return
		}
		if b[0] == 'r' { // the server breaks off
			tcp.Reset(c.(*net.TCPConn))
			return
		}
		_, err := c.Read(b)
		broke <- err
	})
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	c := a.connect("example.com", 8080)
	fmt.Fprint(c, "r")
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client got %v", err)
	}
	c = a.connect("example.com", 8080)
	fmt.Fprint(c, "c")
	time.Sleep(50 * time.Millisecond) //nolint:forbidigo // so that the byte is not thrown away with the connection
	tcp.Reset(c)
	if err := <-broke; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server got %v", err)
	}
	// Nobody there.
	a.refused(webA + ":22")
	r := a.record("the failure", func(r Record) bool { return r.Verdict == Failed })
	if !strings.Contains(r.Reason, "refused") {
		t.Errorf("got %+v", r)
	}
}

// CASES 33.
func TestAnotherFamilyWhereOneIsDead(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", echo)
	w.server(t, w.internet, "["+web6+"]:5432", echo)
	w.name(t, "six.example", "AAAA "+web6)
	w.name(t, "dual.example", "A "+webA, "AAAA 2606:2800:220::dead")
	w.name(t, "dead.example", "A "+webA, "A "+dead)
	a := w.cage(t, policy("*.example"))
	exchange(t, a.connect("six.example", 5432), "six", "six")
	a.addrs("dual.example")
	began := time.Now()
	exchange(t, a.dial("[2606:2800:220::dead]:8080"), "four", "four") // as a program that prefers IPv6
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("took %s", d)
	}
	a.addrs("dead.example")
	c := a.dial(dead + ":8080")
	exchange(t, c, "other", "other")
	c.Close()
	a.record("where it went", func(r Record) bool { return r.Address == dead && r.Dialled == webA && r.Verdict == Allowed })
}

// descriptors are those of this process.
func descriptors(t testing.TB) int {
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// CASES 36.
func TestAThousandConnectionsAndReadersThatNeverRead(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", func(c net.Conn) { // sends for ever
		b := make([]byte, 64<<10)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	})
	w.server(t, w.internet, webA+":5432", echo)
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	a.addrs("example.com")
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fds := descriptors(t)
	const n = 500
	var idle, stuck []net.Conn
	for range n {
		c := a.dial(webA + ":5432")
		exchange(t, c, "x\n", "x\n")
		idle = append(idle, c)
	}
	// Client, its other side, the gateway's two: four in this one process.
	if got := descriptors(t) - fds; got > 4*n+3*maxFreePipes {
		t.Errorf("%d idle connections have %d descriptors: pipes are held", n, got)
	}
	for range n {
		stuck = append(stuck, a.dial(webA+":8080"))
	}
	for range 20 { // the stuck ones keep nobody waiting
		exchange(t, a.dial(webA+":5432"), "y\n", "y\n")
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	// With the test's own servers and clients, which have a buffer of 64 KiB each.
	heap := int64(after.HeapInuse+after.StackInuse) - int64(before.HeapInuse+before.StackInuse)
	if most := int64(n)*(64<<10) + 64<<20; heap > most {
		t.Errorf("%d MiB more", heap>>20)
	}
	t.Logf("%d connections: %d KiB more, the servers' buffers of %d KiB included", 2*n, heap>>10, n*64)
	for _, c := range append(idle, stuck...) {
		c.Close()
	}
}

// CASES 36: a connection may begin with much that is no line yet; all of them together hold
// little of it.
func TestLongBeginningsAreHeldForFew(t *testing.T) {
	was := largeNow.Load()
	long := strings.Repeat("x", firstBytes+1)
	begin := func() (*intake, error) {
		in := newIntake(&heard{says: bytes.NewReader([]byte(long))})
		for len(in.held()) < len(long) {
			if err := in.more(); err != nil {
				return in, err
			}
		}
		return in, nil
	}
	var all []*intake
	for range maxLarge - was {
		in, err := begin()
		if err != nil {
			t.Fatalf("the %d. one: %v", len(all)+1, err)
		}
		all = append(all, in)
	}
	in, err := begin()
	if !errors.Is(err, errTooLong) {
		t.Errorf("one too many: got %v", err)
	}
	in.release()
	all[0].take(len(long))
	if in, err := begin(); err != nil {
		t.Errorf("after one is done: %v", err)
	} else {
		in.release()
	}
	for _, in := range all {
		in.release()
	}
	if n := largeNow.Load(); n != was {
		t.Errorf("%d are left", n-was)
	}
}

func TestWidePipesAreFewAndNoneIsKept(t *testing.T) {
	dropPipes()
	fds := descriptors(t)
	var taken []kernelPipe
	wide := 0
	for range maxWidePipes + 4 {
		p, err := takePipe(true)
		if err != nil {
			t.Fatal(err)
		}
		if taken = append(taken, p); p.most > plainPipe {
			wide++
		}
	}
	if wide > maxWidePipes {
		t.Errorf("%d wide pipes, at most %d", wide, maxWidePipes)
	} else if wide == 0 {
		t.Error("there is no wide pipe")
	}
	for i, p := range taken {
		givePipe(p, i%2 == 0)
	}
	if got := len(pipes.wide); got > maxFreeWidePipes {
		t.Errorf("%d wide pipes are kept", got)
	}
	dropPipes()
	if pipes.wides != 0 || descriptors(t) != fds {
		t.Errorf("%d wide pipes and %d descriptors are left", pipes.wides, descriptors(t)-fds)
	}
}

// What is full at first and then takes the connection, and what never answers.
func TestConnectingThatTakesLong(t *testing.T) {
	w := theWorld(t)
	var fd int
	var err error
	w.internet.in(func() {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return
		}
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) // what was there before lingers
		if err = unix.Bind(fd, &unix.SockaddrInet4{Port: 8080, Addr: parseAddr(webA).As4()}); err == nil {
			err = unix.Listen(fd, 0)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	first, err := net.Dial("tcp", webA+":8080") // fills the queue
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	a := w.cage(t, policy(webA, dead))
	a.g.times.connect = time.Hour
	waits := a.dial(webA + ":8080")
	_ = waits.SetDeadline(time.Now().Add(2 * time.Minute))
	never := a.dial(dead + ":8080")
	fmt.Fprint(waits, "x")
	for range 2 { // the first one, and the one that waited
		c, _, err := unix.Accept(fd)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(c)
		if _, err := unix.Write(c, []byte("hello")); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := io.ReadFull(waits, make([]byte, 5)); err != nil {
		t.Errorf("the one that waited: %v", err)
	}
	closed := make(chan error, 1)
	go func() { closed <- a.g.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the gateway waits for a server that never answers")
	}
	if _, err := never.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client got %v", err)
	}
}

func TestTooManyConnections(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":5432", echo)
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	a.g.maxFlows = 10
	a.addrs("example.com")
	for range 10 {
		exchange(t, a.dial(webA+":5432"), "x\n", "x\n")
	}
	a.refused(webA + ":5432")
	a.record("the eleventh", func(r Record) bool { return r.Verdict == Denied && strings.Contains(r.Reason, "10 connections") })
}

// A connection that stays is kept alive: a server that is gone is noticed. A short one costs nothing.
func TestWhatStaysIsKeptAlive(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":5432", echo)
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	kept := func() (on []int) {
		a.g.mu.Lock()
		defer a.g.mu.Unlock()
		for f := range a.g.flows {
			f.mu.Lock()
			server := f.server.(tcp.Conn)
			f.mu.Unlock()
			raw, err := server.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			v, verr := 0, error(nil)
			if err := raw.Control(func(fd uintptr) { v, verr = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE) }); err != nil || verr != nil {
				t.Fatal(err, verr)
			}
			on = append(on, v)
		}
		return on
	}
	c := a.connect("example.com", 5432)
	exchange(t, c, "x\n", "x\n")
	if got := kept(); !slices.Equal(got, []int{0}) {
		t.Errorf("SO_KEEPALIVE of the connections that just began: %v", got)
	}
	a.record("that it went on", func(r Record) bool { return r.Verdict == Open })
	if got := kept(); !slices.Equal(got, []int{1}) {
		t.Errorf("SO_KEEPALIVE of the connections that went on: %v", got)
	}
}

func TestWhatIdlesForLongIsCut(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":5432", echo)
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, policy("example.com"))
	a.g.times.idle = 200 * time.Millisecond
	c := a.connect("example.com", 5432)
	exchange(t, c, "x\n", "x\n")
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v", err)
	}
	a.record("that it went on", func(r Record) bool { return r.Verdict == Open })
	a.record("the cut", func(r Record) bool { return r.Verdict == Cut && strings.Contains(r.Reason, "no byte") })
}

// CASES 29: programs that know nothing of it, and no proxy variable is set.
func TestProgramsThatPeopleUse(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":80", webServer(t))
	w.server(t, w.internet, webB+":80", webServer(t))
	w.name(t, "example.com", "A "+webA)
	w.name(t, "evil.net", "A "+webB)
	w.cage(t, policy("example.com"))
	inside := func(argv ...string) (string, error) {
		return w.program(t, map[string]string{"/etc/resolv.conf": "nameserver 9.9.9.9\noptions timeout:5\n"}, nil, argv...)
	}
	for name, argv := range map[string][]string{
		"curl":    {"curl", "-sS", "--max-time", "20", "http://HOST/x"},
		"curl-h2": {"curl", "-sS", "--http2", "--max-time", "20", "http://HOST/x"},
		"python":  {"/usr/bin/python3", "-c", "import urllib.request as u; print(u.urlopen('http://HOST/x', timeout=20).read())"},
		"sockets": {"/usr/bin/python3", "-c", "import socket; s=socket.create_connection(('HOST',80),20); s.sendall(b'GET /x HTTP/1.1\\r\\nHost: HOST\\r\\n\\r\\n'); print(s.recv(1000))"},
		"node":    {"node", "-e", "fetch('http://HOST/x').then(async r => { console.log(r.status, await r.text()); if (!r.ok) process.exit(1) }, e => { console.error(String(e.cause||e)); process.exit(1) })"},
		"bash":    {"bash", "-c", "exec 3<>/dev/tcp/HOST/80 && printf 'GET /x HTTP/1.1\\r\\nHost: HOST\\r\\nConnection: close\\r\\n\\r\\n' >&3 && timeout 5 cat <&3 | head -c 500"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := exec.LookPath(argv[0]); err != nil {
				t.Skipf("%s is missing", argv[0])
			}
			with := func(host string) []string {
				out := make([]string, len(argv))
				for i, s := range argv {
					out[i] = strings.ReplaceAll(s, "HOST", host)
				}
				return out
			}
			out, err := inside(with("example.com")...)
			if err != nil || !strings.Contains(out, "GET example.com") {
				t.Errorf("allowed: %v, %s", err, out)
			}
			for _, host := range []string{"evil.net", webB} {
				if out, _ := inside(with(host)...); strings.Contains(out, "GET "+host) {
					t.Errorf("%s: %s", host, out)
				}
			}
		})
	}
}

// relayBench is a transfer with and without the gateway, in one run.
func BenchmarkThroughput(b *testing.B) {
	w := theWorld(b)
	w.server(b, w.internet, webA+":8080", func(c net.Conn) {
		buf := make([]byte, 256<<10)
		for {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	})
	a := w.cage(b, policy(webA, "example.com"))
	direct := func() net.Conn {
		c, err := net.Dial("tcp", webA+":8080")
		if err != nil {
			b.Fatal(err)
		}
		return c
	}
	for _, streams := range []int{1, 64} {
		for name, dial := range map[string]func() net.Conn{"direct": direct, "gateway": func() net.Conn { return a.dial(webA + ":8080") }} {
			b.Run(fmt.Sprintf("%s-%d", name, streams), func(b *testing.B) {
				var conns []net.Conn
				for range streams {
					conns = append(conns, dial())
				}
				const each = 256 << 20
				b.SetBytes(each)
				for b.Loop() {
					var all sync.WaitGroup
					for _, c := range conns {
						_ = c.SetDeadline(time.Now().Add(time.Minute))
						all.Go(func() {
							buf := make([]byte, 256<<10)
							for left := each / streams; left > 0; {
								n, err := c.Read(buf[:min(left, len(buf))])
								if err != nil {
									b.Error(err)
									return
								}
								left -= n
							}
						})
					}
					all.Wait()
				}
				for _, c := range conns {
					c.Close()
				}
			})
		}
	}
}

func BenchmarkConnection(b *testing.B) {
	w := theWorld(b)
	w.server(b, w.internet, webA+":8080", echo)
	w.name(b, "example.com", "A "+webA)
	a := w.cage(b, rules.Policy{Allow: []string{"example.com"}})
	a.addrs("example.com")
	once := func(dial func() (net.Conn, error)) {
		c, err := dial()
		if err != nil {
			b.Fatal(err)
		}
		if _, err := c.Write([]byte("ping\n")); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
	b.Run("direct", func(b *testing.B) {
		for b.Loop() {
			once(func() (net.Conn, error) { return net.Dial("tcp", webA+":8080") })
		}
	})
	b.Run("gateway", func(b *testing.B) {
		for b.Loop() {
			once(func() (c net.Conn, err error) {
				w.agent.in(func() { c, err = net.Dial("tcp", webA+":8080") })
				return c, err
			})
		}
	})
}
