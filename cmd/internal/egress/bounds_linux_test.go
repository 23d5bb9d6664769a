// What an agent can make its gateway hold, and what must survive when it holds too much.

package egress

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// noisy tells of each accept that failed.
type noisy struct {
	net.Listener
	failed chan error
}

func (n noisy) Accept() (net.Conn, error) {
	c, err := n.Listener.Accept()
	if err != nil {
		select {
		case n.failed <- err:
		default:
		}
	}
	return c, err
}

func TestNamesAreServedAgainWhenDescriptorsComeFree(t *testing.T) {
	theWorld(t) // with a loopback
	g, err := New(Config{Agent: "alice", Egress: wire.Egress{Policy: rules.Policy{Allow: []string{"host:1"}}}})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- g.ServeDNS(ctx, nil, []net.Listener{noisy{l, failed}}) }()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()

	// The connection is made in the kernel; there is no descriptor to accept it with.
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	client := os.NewFile(uintptr(fd), "client")
	defer client.Close()
	next, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	lowest := next.Fd()
	next.Close()
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	restore := func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: uint64(lowest), Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	to := syscall.SockaddrInet4{Port: l.Addr().(*net.TCPAddr).Port, Addr: [4]byte{127, 0, 0, 1}}
	if err := syscall.Connect(fd, &to); err != nil {
		restore()
		t.Fatal(err)
	}
	select {
	case err = <-failed:
	case <-time.After(20 * time.Second):
	}
	restore()
	if !errors.Is(err, syscall.EMFILE) {
		t.Fatalf("accepting: %v, want no descriptor", err)
	}
	c, err := net.FileConn(client)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	m := new(dns.Msg)
	m.SetQuestion("host.", dns.TypeA)
	d := &dns.Conn{Conn: c}
	if err := d.WriteMsg(m); err != nil {
		t.Fatal(err)
	}
	r, err := d.ReadMsg()
	if err != nil || len(r.Answer) != 1 {
		t.Errorf("after descriptors came free: %v, %v", r, err)
	}
}

// bomb is a query behind whose question stands one record with as many names as fit, each of them
// two bytes in the packet and a thousand in memory.
func bomb(t *testing.T, size int) []byte {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion("evil.net.", dns.TypeA)
	raw, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	binary.BigEndian.PutUint16(raw[10:], 1) // additional records
	at := len(raw)
	for _, n := range []int{63, 63, 63, 61} {
		raw = append(raw, byte(n))
		raw = append(raw, strings.Repeat("\x01", n)...)
	}
	raw = append(raw, 0)
	raw = binary.BigEndian.AppendUint16(raw, dns.TypeHIP)
	raw = binary.BigEndian.AppendUint16(raw, dns.ClassINET)
	raw = binary.BigEndian.AppendUint32(raw, 0)
	names := (size - len(raw) - 6) / 2
	raw = binary.BigEndian.AppendUint16(raw, uint16(4+2*names))
	raw = append(raw, 0, 0, 0, 0)
	for range names {
		raw = binary.BigEndian.AppendUint16(raw, uint16(0xc000|at))
	}
	return raw
}

func TestAQueryCostsNoMoreThanItsQuestion(t *testing.T) {
	g, err := New(Config{Agent: "alice"})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	many := bomb(t, dns.MaxMsgSize)
	questions := append([]byte(nil), many...)
	binary.BigEndian.PutUint16(questions[4:], 1000)
	for name, c := range map[string]struct {
		raw   []byte
		rcode int
	}{"a record of names": {many, dns.RcodeNameError}, "a thousand questions": {questions, dns.RcodeFormatError}} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		out := g.reply(t.Context(), c.raw, true)
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 1<<20 {
			t.Errorf("%s: a query of %d bytes took %d of memory", name, len(c.raw), got)
		}
		var m dns.Msg
		if err := m.Unpack(out); err != nil || m.Rcode != c.rcode {
			t.Errorf("%s: got %v, %v", name, &m, err)
		}
	}
}

func TestANameOfManyDeadAddressesIsTriedByFewAtOnce(t *testing.T) {
	w := theWorld(t)
	var records []string
	for i := range 60 {
		records = append(records, fmt.Sprintf("A 93.184.217.%d", i)) // nobody has them
	}
	w.name(t, "dead.example", records...)
	a := w.cage(t, policy("dead.example"))
	a.g.times.connect, a.g.times.stagger = 2*time.Second, time.Millisecond
	addrs := a.addrs("dead.example")
	if len(addrs) == 0 {
		t.Fatal("no address")
	}
	c := a.dial(net.JoinHostPort(addrs[0], "443"))
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, _ = io.Copy(io.Discard, c) // until it is reset
	}()
	most, looks := 0, 0
	for {
		select {
		case <-over:
			if looks == 0 || most == 0 {
				t.Fatalf("nobody was seen connecting in %d looks", looks)
			}
			if most > 2*mostTries { // the list is not of one moment
				t.Errorf("%d attempts at once for one connection, want %d at most", most, mostTries)
			}
			if r := a.record("the connection", func(r Record) bool { return r.Verdict == Failed }); r.Name != "dead.example" {
				t.Errorf("recorded as %+v", r)
			}
			return
		default:
		}
		data, err := os.ReadFile("/proc/thread-self/net/tcp")
		if err != nil {
			t.Fatal(err)
		}
		now := 0
		for line := range strings.Lines(string(data)) {
			if f := strings.Fields(line); len(f) > 3 && f[3] == "02" { // SYN_SENT
				now++
			}
		}
		most, looks = max(most, now), looks+1
		runtime.Gosched()
	}
}

func TestANameHasFewRecords(t *testing.T) {
	w := theWorld(t)
	var records []string
	for i := range 1000 {
		records = append(records, fmt.Sprintf("A 93.185.%d.%d", i/250, i%250), fmt.Sprintf("AAAA 2606:2800:221::%x", i), fmt.Sprintf(`TXT "%d"`, i))
	}
	w.name(t, "many.example", records...)
	a := w.cage(t, policy("many.example"))
	for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT} {
		if m := a.askOver("tcp", "9.9.9.9:53", "many.example", kind); len(m.Answer) != maxAnswers {
			t.Errorf("%s: %d answers, want %d", dns.TypeToString[kind], len(m.Answer), maxAnswers)
		}
	}
}

// A line that does not end could still become a request with each byte that comes.
func TestALineInManyPiecesIsNotLookedAtForEver(t *testing.T) {
	words := bytes.Repeat([]byte("a "), maxHead/2-2000)
	if n := testing.AllocsPerRun(10, func() { looksLikeHTTP(append(words, '\r')) }); n > 2 {
		t.Errorf("a look takes %v pieces of memory", n)
	}
	w := theWorld(t)
	got := make(chan int, 1<<16)
	w.server(t, w.internet, webA+":8080", func(c net.Conn) {
		b := make([]byte, 64<<10)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			got <- n
		}
	})
	w.name(t, "x.example", "A "+webA)
	a := w.cage(t, policy("x.example"))
	for what, head := range map[string]string{"first words": "", "a body": "POST / HTTP/1.1\r\nHost: x.example\r\nContent-Length: 100000\r\n\r\n"} {
		c := a.connect("x.example", 8080)
		if _, err := c.Write(append([]byte(head), words...)); err != nil {
			t.Fatal(err)
		}
		passed := func(want int) bool {
			for want > 0 {
				select {
				case n := <-got:
					want -= n
				case <-time.After(2 * time.Second):
					return false
				}
			}
			return true
		}
		if !passed(len(head) + len(words)) {
			t.Fatalf("%s: they do not arrive", what)
		}
		pieces := 0
		for ; pieces < 1000; pieces++ {
			if _, err := c.Write([]byte("a")); err != nil || !passed(1) {
				break
			}
		}
		if most := maxLooked/len(words) + 1; pieces > most {
			t.Errorf("%s: looked at %d times, want %d at most", what, pieces, most)
		}
	}
}
