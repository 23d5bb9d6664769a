// A gated network seen from both sides: what a program inside connects to, and where the
// sockets outside say that it wanted to go.

package launch

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/tcp"
	"agentconnect.md/sandbox/sandbox"
)

// outside serves a sandbox's connections: each is told where it wanted to go.
type outside struct {
	mu   sync.Mutex
	seen []string
}

func (o *outside) handle(_ context.Context, conn tcp.Conn, dst netip.AddrPort) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	o.mu.Lock()
	o.seen = append(o.seen, dst.String())
	o.mu.Unlock()
	fmt.Fprintf(conn, "you asked for %s\n", dst)
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil {
		io.WriteString(conn, "you said "+line)
	}
}

func (o *outside) all() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.Join(o.seen, " ")
}

// gated runs a program in a gated network until it ends.
func (b *box) gated(o *outside, ports []uint16, argv ...string) (string, int) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	r, w, err := os.Pipe()
	if err != nil {
		b.t.Fatal(err)
	}
	defer r.Close()
	s := b.start(argv...)
	s.Stdout, s.Stderr, s.Ports = w, w, ports
	p, err := s.Run(ctx)
	w.Close()
	if err != nil {
		b.t.Fatal(err)
	}
	defer p.Kill()
	if p.Network == nil {
		b.t.Fatal("no sockets came out")
	}
	var wg sync.WaitGroup
	wg.Go(func() { p.Network.Accept(ctx, o.handle) })
	for _, u := range p.Network.UDP {
		wg.Go(func() { echoNames(u) })
	}
	out, err := io.ReadAll(r)
	<-p.Done()
	p.Network.Close()
	wg.Wait()
	if err != nil {
		b.t.Error(err)
	}
	return string(out), p.End().Code
}

// echoNames answers each datagram from the address that it was sent to.
func echoNames(u *net.UDPConn) {
	buf, oob := make([]byte, 512), make([]byte, 256)
	for {
		n, on, _, from, err := u.ReadMsgUDP(buf, oob)
		if err != nil {
			return
		}
		u.WriteMsgUDP(append([]byte("answer to "), buf[:n]...), oob[:on], from)
	}
}

const dialPython = `
import socket, sys
def tcp(host, port, n=1):
    try:
        s = socket.create_connection((host, port), timeout=15)
        f = s.makefile('rw'); head = f.readline().strip(); f.write('hello\n'); f.flush(); tail = f.readline().strip()
        return head + ' / ' + tail + ' / from ' + s.getsockname()[0]
    except OSError as e:
        return type(e).__name__
`

// lines gives the part behind "NAME -> " of each line that a script printed.
func lines(out string) map[string]string {
	m := map[string]string{}
	for l := range strings.Lines(out) {
		if k, v, ok := strings.Cut(strings.TrimSpace(l), " -> "); ok {
			m[k] = v
		}
	}
	return m
}

func TestEveryConnectionArrivesOutsideWithTheAddressItWanted(t *testing.T) {
	b := newBox(t)
	b.policy.Network = sandbox.NetworkOpen
	o := &outside{}
	out, code := b.gated(o, nil, "python3", "-c", dialPython+`
for a in (('93.184.216.34', 443), ('10.1.2.3', 22), ('169.254.169.254', 80), ('2606:2800::1', 8443), ('::ffff:192.0.2.7', 5432), ('198.19.255.2', 5432), ('fd00::1', 1), ('0.1.2.3', 65535)):
    print(a[0], '->', tcp(*a))
`)
	if code != 0 {
		t.Fatal(out)
	}
	got := lines(out)
	for host, want := range map[string]string{
		"93.184.216.34": "93.184.216.34:443", "10.1.2.3": "10.1.2.3:22", "169.254.169.254": "169.254.169.254:80", "2606:2800::1": "[2606:2800::1]:8443",
		"::ffff:192.0.2.7": "192.0.2.7:5432", "198.19.255.2": "198.19.255.2:5432", "fd00::1": "[fd00::1]:1", "0.1.2.3": "0.1.2.3:65535",
	} {
		if !strings.HasPrefix(got[host], "you asked for "+want+" / you said hello / from ") {
			t.Errorf("%s: %q", host, got[host])
		}
	}
	if from := got["93.184.216.34"]; !strings.HasSuffix(from, sandbox.OwnIPv4) {
		t.Errorf("it came from %q", from)
	}
}

// attacksOnTheNetwork tries every way that must lead nowhere. Each line is what it saw.
const attacksOnTheNetwork = dialPython + `
import os, subprocess, threading, struct
def attempt(name, f):
    try: r = f()
    except OSError as e: r = 'error ' + (os.strerror(e.errno) if e.errno else str(e))
    print(name, '->', r, flush=True)
S = socket
def udp(addr, family=S.AF_INET):
    s = S.socket(family, S.SOCK_DGRAM); s.settimeout(3); s.connect(addr); s.send(b'x'); return s.recv(100)
attempt('udp', lambda: udp(('93.184.216.34', 443)))
attempt('udp6', lambda: udp(('2606:2800::1', 443), S.AF_INET6))
attempt('raw', lambda: S.socket(S.AF_INET, S.SOCK_RAW, S.IPPROTO_ICMP))
attempt('raw tcp', lambda: S.socket(S.AF_INET, S.SOCK_RAW, S.IPPROTO_RAW))
attempt('ping', lambda: S.socket(S.AF_INET, S.SOCK_DGRAM, S.IPPROTO_ICMP))
attempt('packet', lambda: S.socket(S.AF_PACKET, S.SOCK_RAW, 0))
attempt('sctp', lambda: S.socket(S.AF_INET, S.SOCK_SEQPACKET, 132))
attempt('vsock', lambda: S.socket(40, S.SOCK_STREAM, 0))
def bind_device():
    s = S.socket(); s.setsockopt(S.SOL_SOCKET, S.SO_BINDTODEVICE, b'eth0'); s.connect(('93.184.216.34', 443)); return 'connected'
attempt('device', bind_device)
def low():
    s = S.socket(); s.bind(('127.0.0.1', 80)); return 'bound'
attempt('low port', low)
def transparent():
    s = S.socket(); s.setsockopt(S.SOL_IP, 19, 1); return 'set'
attempt('transparent', transparent)
def mark():
    s = S.socket(); s.setsockopt(S.SOL_SOCKET, 36, 1); return 'set'
attempt('mark', mark)
def netlink(proto, typ, body):
    s = S.socket(S.AF_NETLINK, S.SOCK_RAW, proto); s.settimeout(3)
    s.send(struct.pack('=IHHII', 16 + len(body), typ, 5 | 0x400, 1, 0) + body)
    e = struct.unpack('=i', s.recv(4096)[16:20])[0]
    return 'done' if e == 0 else 'error ' + os.strerror(-e)
# delete the route for everything, and the address of the gateway
attempt('route', lambda: netlink(0, 25, struct.pack('=BBBBBBBBI', 2, 0, 0, 0, 255, 4, 254, 2, 0)))
attempt('address', lambda: netlink(0, 21, struct.pack('=BBBBI', 2, 32, 0, 0, 1) + struct.pack('=HH', 8, 2) + bytes([198, 19, 255, 2])))
attempt('new link', lambda: netlink(0, 16, struct.pack('=BxHiII', 0, 0, 0, 0, 0) + struct.pack('=HH', 20, 18 | 0x8000) + struct.pack('=HH', 10, 1) + b'dummy\0\0\0'))
# delete the table of nft
begin = struct.pack('=IHHII', 20, 16, 1, 0, 0) + struct.pack('=BBH', 0, 0, 0x0a00)
def nft():
    s = S.socket(S.AF_NETLINK, S.SOCK_RAW, 12); s.settimeout(3)
    name = struct.pack('=HH', 17, 1) + b'agentconnect\0\0\0\0'
    msg = struct.pack('=IHHII', 20 + len(name), (10 << 8) | 2, 5, 1, 0) + struct.pack('=BBH', 1, 0, 0) + name
    s.send(begin + msg + struct.pack('=IHHII', 20, 17, 1, 2, 0) + struct.pack('=BBH', 0, 0, 0x0a00))
    e = struct.unpack('=i', s.recv(4096)[16:20])[0]
    return 'done' if e == 0 else 'error ' + os.strerror(-e)
attempt('nft', nft)
def sysctl():
    open('/proc/sys/net/ipv4/ip_unprivileged_port_start', 'w').write('0'); return 'written'
attempt('sysctl', sysctl)
def setns():
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open('/proc/1/ns/net', os.O_RDONLY), 0): raise OSError(ctypes.get_errno(), '')
    return 'entered'
attempt('setns', setns)
# The listener itself, its port, its name server, spoken to directly.
attempt('listener', lambda: tcp('198.19.255.2', 1))
attempt('listener6', lambda: tcp('2001:2:0:ffff::2', 1))
attempt('steal', lambda: (lambda s: (s.setsockopt(S.SOL_SOCKET, S.SO_REUSEADDR, 1), s.setsockopt(S.SOL_SOCKET, S.SO_REUSEPORT, 1), s.bind(('198.19.255.2', 1)), s.listen(), 'bound')[-1])(S.socket()))
attempt('steal dns', lambda: (lambda s: (s.setsockopt(S.SOL_SOCKET, S.SO_REUSEPORT, 1), s.bind(('127.0.0.53', 53)), 'bound')[-1])(S.socket(S.AF_INET, S.SOCK_DGRAM)))
# From an address that is not its own, so that the answer to somebody else would be its.
def spoof():
    s = S.socket(); s.bind(('8.8.8.8', 0)); s.settimeout(10); s.connect(('93.184.216.34', 443)); return s.makefile().readline().strip()
attempt('spoof', spoof)
# A server of its own on somebody else's address: connections do not reach it.
def squat():
    l = S.socket(); l.bind(('93.184.216.34', 8443)); l.listen()
    return tcp('93.184.216.34', 8443)
attempt('squat', squat)
def mptcp():
    s = S.socket(S.AF_INET, S.SOCK_STREAM, 262); s.settimeout(10); s.connect(('93.184.216.34', 444)); return s.makefile().readline().strip()
attempt('mptcp', mptcp)
def fastopen():
    s = S.socket(); s.sendto(b'hello\n', 0x20000000, ('93.184.216.34', 445)); return s.makefile().readline().strip()
attempt('fastopen', fastopen)
# One port for several connections, one after the other and at once: the kernel must not take
# one for another when it is asked where each wanted to go.
def from_one_port(keep):
    kept, wrong = [], []
    for i in range(40):
        s = S.socket(); s.setsockopt(S.SOL_SOCKET, S.SO_REUSEADDR, 1); s.settimeout(10)
        to = ('93.184.216.%d' % (i + 1), 443 + i % 3)
        try: s.bind(('198.19.255.1', 40001 if keep else 40002)); s.connect(to)
        except OSError as e: wrong.append('%s %s' % (to, e)); continue
        got = s.makefile().readline().split()[-1]
        if got != '%s:%d' % to: wrong.append('%s became %s' % (to, got))
        if keep: kept.append(s)
        else: s.setsockopt(S.SOL_SOCKET, S.SO_LINGER, struct.pack('ii', 1, 0)); s.close()
    return 'each its own' if not wrong else str(wrong)
attempt('one port at once', lambda: from_one_port(True))
attempt('one port in turn', lambda: from_one_port(False))
def link_local():
    s = S.socket(S.AF_INET6); s.settimeout(10); s.connect(('fe80::1', 5432, 0, S.if_nametoindex('lo'))); return s.makefile().readline().strip()
attempt('link local', link_local)
def lite():
    s = S.socket(S.AF_INET, S.SOCK_DGRAM, 136); s.settimeout(3); s.connect(('93.184.216.34', 443)); s.send(b'x'); return s.recv(100)
attempt('udplite', lite)
for name, family, kind, proto in (('dccp', S.AF_INET, 6, 33), ('gre', S.AF_INET, S.SOCK_RAW, 47), ('icmp6', S.AF_INET6, S.SOCK_DGRAM, 58),
        ('bluetooth', 31, S.SOCK_RAW, 1), ('tipc', 30, S.SOCK_SEQPACKET, 0), ('xdp', 44, S.SOCK_RAW, 0), ('rds', 21, S.SOCK_SEQPACKET, 0), ('pppox', 24, S.SOCK_STREAM, 0), ('can', 29, S.SOCK_RAW, 1), ('smc', 43, S.SOCK_STREAM, 0)):
    attempt(name, lambda: S.socket(family, kind, proto))
def loop(host, family=S.AF_INET):
    l = S.socket(family); l.bind((host, 0)); l.listen()
    threading.Thread(target=lambda: l.accept()[0].send(b'mine\n'), daemon=True).start()
    s = S.create_connection(l.getsockname()[:2], timeout=10); return s.makefile().readline().strip()
attempt('own v4', lambda: loop('127.0.0.1'))
attempt('own v6', lambda: loop('::1', S.AF_INET6))
attempt('own address', lambda: loop('198.19.255.1'))
attempt('own address6', lambda: loop('2001:2:0:ffff::1', S.AF_INET6))
attempt('loopback', lambda: tcp('127.0.0.1', 5432))
attempt('zero', lambda: tcp('0.0.0.0', 5432))
attempt('mapped', lambda: tcp('::ffff:127.0.0.1', 5432))
attempt('multicast', lambda: tcp('224.0.0.1', 5432))
attempt('broadcast', lambda: tcp('255.255.255.255', 5432))
def dns(host, family=S.AF_INET):
    s = S.socket(family, S.SOCK_DGRAM); s.settimeout(5); s.sendto(b'q', (host, 53)); d, a = s.recvfrom(100)
    return d.decode() + ' from ' + a[0]
attempt('dns', lambda: dns('8.8.8.8'))
attempt('dns6', lambda: dns('2001:4860:4860::8888', S.AF_INET6))
attempt('dns local', lambda: dns('127.0.0.53'))
`

func TestNoOtherWayOutOfAGatedNetwork(t *testing.T) {
	for _, nesting := range []bool{false, true} {
		t.Run(fmt.Sprintf("nesting %v", nesting), func(t *testing.T) {
			b := newBox(t)
			b.policy.Network, b.policy.Nesting = sandbox.NetworkAllowlist, nesting
			o := &outside{}
			script := write(t, b.policy.Workspace+"/attacks.py", attacksOnTheNetwork)
			out, code := b.gated(o, nil, "python3", script)
			if code != 0 {
				t.Fatal(out)
			}
			got := lines(out)
			for name, want := range map[string]string{
				"udp": "error Connection refused", "udp6": "error Connection refused",
				"raw": "error ", "raw tcp": "error ", "ping": "error ", "packet": "error ", "sctp": "error ", "vsock": "error ",
				"device": "error ", "low port": "error Permission denied", "transparent": "error Operation not permitted", "mark": "error Operation not permitted",
				"route": "error Operation not permitted", "address": "error Operation not permitted", "new link": "error Operation not permitted", "nft": "error Protocol not supported",
				"sysctl": "error Permission denied", "setns": "error Operation not permitted",
				"listener": "you asked for 198.19.255.2:1 ", "listener6": "you asked for [2001:2:0:ffff::2]:1 ", "steal": "error ", "steal dns": "error ",
				"spoof": "you asked for 93.184.216.34:443", "squat": "you asked for 93.184.216.34:8443 ",
				"mptcp": "you asked for 93.184.216.34:444", "fastopen": "you asked for 93.184.216.34:445",
				"one port at once": "each its own", "one port in turn": "each its own", "link local": "you asked for [fe80::1]:5432",
				"udplite": "error Connection refused", "dccp": "error ", "gre": "error ", "icmp6": "error ", "bluetooth": "error ", "tipc": "error ", "xdp": "error ",
				"rds": "error ", "pppox": "error ", "can": "error ", "smc": "error ",
				"own v4": "mine", "own v6": "mine", "own address": "mine", "own address6": "mine",
				"loopback": "ConnectionRefusedError", "zero": "ConnectionRefusedError", "mapped": "ConnectionRefusedError",
				"multicast": "OSError", "broadcast": "OSError",
				"dns": "answer to q from 8.8.8.8", "dns6": "answer to q from 2001:4860:4860::8888", "dns local": "answer to q from 127.0.0.53",
			} {
				if v, ok := got[name]; !ok || !strings.HasPrefix(v, want) {
					t.Errorf("%s: %q, want %q", name, v, want)
				}
			}
			if seen := o.all(); strings.Contains(seen, "127.0.0.1") || strings.Contains(seen, "[::1]") {
				t.Errorf("the loopback arrived outside: %s", seen)
			}
		})
	}
}

// serverPython serves on the loopback inside, on one family each.
const serverPython = `
import socket, threading, time, sys
def serve(host, port, family):
    l = socket.socket(family); l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6: l.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    l.bind((host, port)); l.listen()
    def loop():
        while True:
            c, _ = l.accept(); c.sendall(('served by %s %d' % (host, port)).encode()); c.close()
    threading.Thread(target=loop, daemon=True).start()
serve('127.0.0.1', 8004, socket.AF_INET); serve('::1', 8006, socket.AF_INET6)
print('serving', flush=True)
sys.stdin.read()
`

func TestOthersAreLetIntoASandboxesNetwork(t *testing.T) {
	for _, mode := range []sandbox.NetworkMode{sandbox.NetworkNone, sandbox.NetworkOpen} {
		t.Run(string(mode), func(t *testing.T) {
			b := newBox(t)
			b.policy.Network = mode
			in, stdin, _ := os.Pipe()
			stdout, out, _ := os.Pipe()
			defer stdin.Close()
			defer stdout.Close()
			s := b.start("python3", "-c", serverPython)
			s.Stdin, s.Stdout, s.Stderr = in, out, out
			first, err := s.Run(t.Context())
			in.Close()
			out.Close()
			if err != nil {
				t.Fatal(err)
			}
			defer first.Kill()
			if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "serving\n" {
				t.Fatal(line, err)
			}
			d, err := NewDialer(t.Context(), s.Launcher, first.Inside)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			for port, want := range map[uint16]string{8004: "served by 127.0.0.1 8004", 8006: "served by ::1 8006", 8005: "connection refused"} {
				f, err := d.Dial(port)
				var got string
				if err != nil {
					got = err.Error()
				} else {
					c, err := net.FileConn(f)
					f.Close()
					if err != nil {
						t.Fatal(err)
					}
					said, _ := io.ReadAll(c)
					c.Close()
					got = string(said)
				}
				if got != want {
					t.Errorf("port %d: %q, want %q", port, got, want)
				}
			}
			// A second sandbox beside it: the same loopback, nothing else in common.
			r, w, _ := os.Pipe()
			defer r.Close()
			beside := b.start("/bin/sh", "-c", `python3 -c "
import socket
for a in (('127.0.0.1', 8004), ('::1', 8006)): print(socket.create_connection(a, timeout=10).makefile().read())"
grep -c . /proc/net/dev; ls /proc | grep -c '^[0-9]'; cat /proc/self/status | grep CapEff; unshare -n true 2>/dev/null && echo caps; ip route del local default 2>&1 || kill -0 1`)
			beside.Stdout, beside.Stderr, beside.Join = w, w, first.Inside
			p, err := beside.Run(t.Context())
			w.Close()
			if err != nil {
				t.Fatal(err)
			}
			defer p.Kill()
			said, _ := io.ReadAll(r)
			<-p.Done()
			if text := string(said); !strings.Contains(text, "served by 127.0.0.1 8004\nserved by ::1 8006\n") || !strings.Contains(text, "CapEff:\t0000000000000000") || strings.Contains(text, "caps\n") {
				t.Errorf("beside it: %s (%+v)", text, p.End())
			}
			if p.PID == first.PID || p.Init(t.Context()) == first.Init(t.Context()) {
				t.Error("it is no sandbox of its own")
			}
			first.Kill()
			if _, err := d.Dial(8004); err == nil {
				t.Error("after the end something still answers")
			}
			late := b.start("/bin/true")
			late.Join = first.Inside
			if _, err := late.Run(t.Context()); err == nil {
				t.Error("somebody was let into a sandbox that has ended")
			}
		})
	}
}

// BenchmarkStart is a whole start and end of /bin/true: what a network costs beside none.
func BenchmarkStart(b *testing.B) {
	for _, mode := range []string{"none", "open", "beside"} {
		b.Run(mode, func(b *testing.B) {
			box := newBox(b)
			var in *Inside
			if mode == "beside" {
				box.policy.Network = sandbox.NetworkOpen
				first, err := box.start("/bin/sleep", "1000").Run(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				defer first.Network.Close()
				defer first.Kill()
				in = first.Inside
			} else {
				box.policy.Network = sandbox.NetworkMode(mode)
			}
			for b.Loop() {
				s := box.start("/bin/true")
				s.Join = in
				p, err := s.Run(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				<-p.Done()
				if p.Network != nil {
					p.Network.Close()
				}
			}
		})
	}
}
