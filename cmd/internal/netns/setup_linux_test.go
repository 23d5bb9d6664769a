package netns_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/listeners"
	"agentconnect.md/sandbox/cmd/internal/netns"
	"agentconnect.md/sandbox/cmd/internal/tcp"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// inside says that this process is the one in the new namespaces, and what it does there.
const inside = "NETNS_TEST_INSIDE"

func TestMain(m *testing.M) {
	if what := os.Getenv(inside); what != "" {
		runtime.LockOSThread()
		if err := beInside(what); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// beInside sets the network up, passes the sockets out, and dials what it reads.
func beInside(what string) error {
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("lo: %w: %s", err, out)
	}
	var p *netns.Passed
	var err error
	switch what {
	case "assigned":
		p, err = netns.Setup([]uint16{22, 8443})
	case "opaque":
		if err := refuseTransparent(); err != nil {
			return err
		}
		p, err = netns.Setup([]uint16{22, 8443})
	case "redirected":
		p, err = netns.SetupWithoutAssigning([]uint16{22, 8443})
	default:
		p, err = netns.SetupWithoutNFT([]uint16{22, 53, 8443})
	}
	if err != nil {
		return err
	}
	if err := unix.Sendmsg(3, wire.Ready(p.Kinds, p.Weaker), unix.UnixRights(p.FDs...), nil, 0); err != nil {
		return err
	}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		if in.Text() == "lo" {
			out, _ := exec.Command("ip", "-d", "link", "show", "lo").CombinedOutput()
			fmt.Println("lo ->", strings.Join(strings.Fields(string(out)), " "))
			continue
		}
		if set, ok := strings.CutPrefix(in.Text(), "set "); ok {
			name, value, _ := strings.Cut(set, "=")
			if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil {
				return err
			}
			continue
		}
		if in.Text() == "tracked" {
			fmt.Println("tracked ->", tracked())
			continue
		}
		if addr, ok := strings.CutPrefix(in.Text(), "listen "); ok {
			l, err := net.Listen("tcp", addr)
			if err != nil {
				fmt.Println(in.Text(), "->", err)
				continue
			}
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					io.WriteString(c, "from inside")
					c.Close()
				}
			}()
			continue
		}
		if addr, ok := strings.CutPrefix(in.Text(), "much "); ok {
			sum, err := exchangeMuch(addr)
			fmt.Println(in.Text(), "->", sum, err)
			continue
		}
		d, to := net.Dialer{Timeout: 10 * time.Second, Control: reusable}, in.Text()
		if from, rest, ok := strings.Cut(to, " to "); ok {
			d.LocalAddr, to = net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from)), rest
		}
		c, err := d.Dial("tcp", to)
		if err != nil {
			fmt.Println(in.Text(), "-> refused")
			continue
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second)) // nobody may be there but itself
		b, _ := io.ReadAll(c)
		if strings.HasSuffix(in.Text(), fmt.Sprint(":", congestionPort)) {
			b = append(append(b, " and "...), congestion(c)...)
		}
		c.Close()
		fmt.Println(in.Text(), "->", string(b))
	}
	return nil
}

// reusable lets a socket have the address of one that has just ended.
func reusable(_, _ string, c syscall.RawConn) (err error) {
	return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }), err)
}

// refuseTransparent has the kernel refuse this thread transparent sockets, as a container's
// filter may.
func refuseTransparent() error {
	const level, option, load, equal, ret = 24, 32, unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	filter := []unix.SockFilter{
		{Code: load}, {Code: equal, K: unix.SYS_SETSOCKOPT, Jf: 6},
		{Code: load, K: level}, {Code: equal, K: unix.IPPROTO_IP, Jt: 1}, {Code: equal, K: unix.IPPROTO_IPV6, Jf: 3},
		{Code: load, K: option}, {Code: equal, K: unix.IP_TRANSPARENT, Jt: 2}, {Code: equal, K: unix.IPV6_TRANSPARENT, Jt: 1},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW}, {Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})), 0, 0)
}

const (
	much     = 16 << 20
	muchPort = 9000
	// congestionPort is answered with the congestion control of the socket that accepted.
	congestionPort = 9001
)

// tracked is how many connections the kernel keeps track of in this namespace.
func tracked() string {
	b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}

func congestion(c net.Conn) string {
	raw, err := c.(tcp.Conn).SyscallConn()
	if err != nil {
		return err.Error()
	}
	var name string
	var gerr error
	if err := raw.Control(func(fd uintptr) { name, gerr = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION) }); errors.Join(err, gerr) != nil {
		return errors.Join(err, gerr).Error()
	}
	return name
}

// pattern is much, and its sum.
func pattern() ([]byte, string) {
	b := make([]byte, much)
	for i := range b {
		b[i] = byte(i>>16 ^ i*7)
	}
	return b, fmt.Sprintf("%x", sha256.Sum256(b))
}

// exchangeMuch sends much and, at the same time, gets much; it gives the sum of that.
func exchangeMuch(addr string) (string, error) {
	c, err := net.DialTimeout("tcp", addr, time.Minute)
	if err != nil {
		return "", err
	}
	defer c.Close()
	sent := make(chan error, 1)
	go func() {
		b, _ := pattern()
		_, err := c.Write(b)
		sent <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	sum := sha256.New()
	if _, err := io.Copy(sum, c); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", sum.Sum(nil)), <-sent
}

func dial(t *testing.T, what string, addrs ...string) (*listeners.Set, map[string]string) {
	t.Helper()
	if os.Getuid() == 0 {
		t.Skip("missing: an ordinary user (this test runs as root; `make test` makes one)")
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "theirs")
	defer theirs.Close()
	defer unix.Close(pair[0])
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), inside+"="+what)
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stdin = strings.NewReader(strings.Join(addrs, "\n") + "\n")
	var out, errOut strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errOut
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		AmbientCaps: []uintptr{unix.CAP_NET_ADMIN, unix.CAP_NET_BIND_SERVICE},
		UidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getuid(), HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: os.Getgid(), HostID: os.Getgid(), Size: 1}},
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	buf, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*100))
	n, on, _, _, err := unix.Recvmsg(pair[0], buf, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n == 0 {
		cmd.Wait()
		t.Fatalf("%v: %s", err, errOut.String())
	}
	kinds, weaker, ok := wire.ParseReady(buf[:n])
	files, err := launch.Passed(oob[:on])
	if !ok || err != nil {
		t.Fatalf("%q %v", buf[:n], err)
	}
	set, err := listeners.New(kinds, files, weaker)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		set.Accept(t.Context(), func(_ context.Context, c tcp.Conn, dst netip.AddrPort) {
			defer c.Close()
			if dst.Port() == congestionPort {
				io.WriteString(c, congestion(c))
				return
			}
			if dst.Port() != muchPort {
				fmt.Fprintf(c, "%s", dst)
				return
			}
			var up sync.WaitGroup
			up.Go(func() {
				sum := sha256.New()
				_, err := io.Copy(sum, c)
				if _, want := pattern(); err != nil || fmt.Sprintf("%x", sum.Sum(nil)) != want {
					t.Errorf("%s: what came out is not what was sent: %v", dst, err)
				}
			})
			b, _ := pattern()
			if _, err := c.Write(b); err != nil {
				t.Errorf("%s: %v", dst, err)
			}
			_ = c.CloseWrite()
			up.Wait()
		})
	})
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, errOut.String())
	}
	set.Close()
	wg.Wait()
	got := map[string]string{}
	for l := range strings.Lines(out.String()) {
		k, v, _ := strings.Cut(strings.TrimSpace(l), " -> ")
		got[k] = v
	}
	return set, got
}

func TestWithoutNATOnlyTheNamedPortsLeadOut(t *testing.T) {
	set, got := dial(t, "ports", "93.184.216.34:22", "[2606:2800::1]:8443", "10.0.0.1:8443", "93.184.216.34:443", "[2606:2800::1]:443", "198.19.255.2:22")
	if set.Redirected || set.Weaker != "no nft in this test" {
		t.Errorf("%v %q", set.Redirected, set.Weaker)
	}
	for addr, want := range map[string]string{
		"93.184.216.34:22": "93.184.216.34:22", "[2606:2800::1]:8443": "[2606:2800::1]:8443", "10.0.0.1:8443": "10.0.0.1:8443", "198.19.255.2:22": "198.19.255.2:22",
		"93.184.216.34:443": "refused", "[2606:2800::1]:443": "refused",
	} {
		if got[addr] != want {
			t.Errorf("%s: %q, want %q", addr, got[addr], want)
		}
	}
}

func TestLoopbackIsNowhereToGo(t *testing.T) {
	_, got := dial(t, "ports", "127.0.0.1:22", "[::1]:8443", "[::ffff:127.0.0.1]:8443")
	for addr, said := range got {
		if said != "refused" && said != "" { // reset while it connected, or after
			t.Errorf("%s led to %s", addr, said)
		}
	}
	if len(got) != 3 {
		t.Error(got)
	}
}

// ledBy runs a test for each way in which all connections are led to one listener.
func ledBy(t *testing.T, addrs []string, test func(t *testing.T, got map[string]string)) {
	for _, way := range []string{"assigned", "redirected"} {
		t.Run(way, func(t *testing.T) {
			set, got := dial(t, way, addrs...)
			if !set.Redirected {
				t.Skip("missing: nft address translation in this kernel: " + set.Weaker)
			}
			test(t, got)
		})
	}
}

func TestAddressesAreThoseOfThePlan(t *testing.T) {
	want := map[string]string{
		"93.184.216.34:443": "93.184.216.34:443", "[2606:2800::1]:22": "[2606:2800::1]:22", "93.184.216.34:1": "93.184.216.34:1",
		sandbox.GatewayIPv4 + ":7": sandbox.GatewayIPv4 + ":7", "[" + sandbox.GatewayIPv6 + "]:7": "[" + sandbox.GatewayIPv6 + "]:7",
		sandbox.GatewayIPv4 + ":1": sandbox.GatewayIPv4 + ":1", "[" + sandbox.GatewayIPv6 + "]:1": "[" + sandbox.GatewayIPv6 + "]:1",
		sandbox.OwnIPv4 + ":7": "refused", "[" + sandbox.OwnIPv6 + "]:7": "refused", "127.0.0.1:22": "refused", "[::1]:8443": "refused",
		sandbox.OwnIPv4 + ":1": "refused", "127.0.0.1:1": "refused", "[::1]:1": "refused",
	}
	ledBy(t, slices.Collect(maps.Keys(want)), func(t *testing.T, got map[string]string) {
		for addr, want := range want {
			if got[addr] != want {
				t.Errorf("%s: %q, want %q", addr, got[addr], want)
			}
		}
	})
}

// Where a connection comes from, and what had its addresses before, says nothing of where it goes.
func TestOnlyTheDestinationLeads(t *testing.T) {
	want := map[string]string{}
	var addrs []string
	for _, from := range []string{sandbox.OwnIPv4, sandbox.GatewayIPv4, "127.0.0.1", "127.0.0.9", "93.184.216.34", "8.8.8.8"} {
		// The gateway ends each first, so its side of each pair of addresses is kept (TIME-WAIT).
		for _, to := range []string{"8.8.8.8:4444", "93.184.216.34:443", "8.8.8.8:4444", sandbox.GatewayIPv4 + ":1", "127.0.0.1:4444"} {
			addr := from + ":4321 to " + to
			addrs = append(addrs, addr)
			if want[addr] = to; to == "127.0.0.1:4444" {
				want[addr] = "refused"
			}
		}
	}
	ledBy(t, addrs, func(t *testing.T, got map[string]string) {
		for addr, want := range want {
			if got[addr] != want {
				t.Errorf("%s: %q, want %q", addr, got[addr], want)
			}
		}
	})
}

// Of an address that the namespace's own device had, connections would come from it as well, and
// now and then from the port that they go to: a socket that connects to itself.
func TestNoConnectionToTheHostComesBackToItself(t *testing.T) {
	addr := sandbox.GatewayIPv4 + ":40000"
	ledBy(t, []string{"set ipv4/ip_local_port_range=40000 40000", addr}, func(t *testing.T, got map[string]string) {
		if got[addr] != addr {
			t.Errorf("%q", got[addr])
		}
	})
}

// A new namespace has most of the host's settings.
func TestWhatAHostMayHaveSetLosesNoDestination(t *testing.T) {
	for _, setting := range []string{"ipv4/tcp_syncookies=2", "ipv4/conf/all/rp_filter=1", "ipv4/conf/all/accept_source_route=1", "ipv4/ip_early_demux=0", "ipv4/tcp_timestamps=0"} {
		t.Run(setting, func(t *testing.T) {
			addrs := []string{"93.184.216.34:443", "[2606:2800::1]:22", sandbox.GatewayIPv4 + ":1"}
			ledBy(t, append([]string{"set " + setting}, addrs...), func(t *testing.T, got map[string]string) {
				for _, addr := range addrs {
					if got[addr] != addr {
						t.Errorf("%s: %q", addr, got[addr])
					}
				}
			})
		})
	}
}

// Whatever of the first way is refused, the second is taken.
func TestWithoutTransparentSocketsConnectionsAreRedirected(t *testing.T) {
	set, got := dial(t, "opaque", "93.184.216.34:443", "[2606:2800::1]:22", "127.0.0.1:22", "tracked")
	if !set.Redirected {
		t.Skip("missing: nft address translation in this kernel: " + set.Weaker)
	}
	for addr, want := range map[string]string{"93.184.216.34:443": "93.184.216.34:443", "[2606:2800::1]:22": "[2606:2800::1]:22", "127.0.0.1:22": "refused"} {
		if got[addr] != want {
			t.Errorf("%s: %q, want %q", addr, got[addr], want)
		}
	}
	if got["tracked"] == "0" {
		t.Error("nothing is tracked, so nothing was redirected and this shows nothing")
	}
}

// Who listens inside on the address of a server in the world gets none of its connections.
func TestNobodyInsideTakesWhatIsForTheWorld(t *testing.T) {
	ledBy(t, []string{"listen 93.184.216.34:443", "listen 0.0.0.0:80", "listen [::]:8443", "93.184.216.34:443", "93.184.216.34:80", "[2606:2800::1]:8443", "127.0.0.1:80"}, func(t *testing.T, got map[string]string) {
		for addr, want := range map[string]string{"93.184.216.34:443": "93.184.216.34:443", "93.184.216.34:80": "93.184.216.34:80", "[2606:2800::1]:8443": "[2606:2800::1]:8443", "127.0.0.1:80": "from inside"} {
			if got[addr] != want {
				t.Errorf("%s: %q, want %q", addr, got[addr], want)
			}
		}
	})
}

// The kernel keeps no record of each connection, which a table bounds that the whole machine shares.
func TestNoConnectionIsTracked(t *testing.T) {
	set, got := dial(t, "assigned", "93.184.216.34:443", "tracked")
	if !set.Redirected || got["93.184.216.34:443"] != "93.184.216.34:443" {
		t.Fatal(set.Weaker, got)
	}
	if got["tracked"] != "0" {
		t.Errorf("%s connections are tracked", got["tracked"])
	}
	if _, got := dial(t, "redirected", "93.184.216.34:443", "tracked"); got["tracked"] == "0" {
		t.Error("none is where they are redirected, so this shows nothing")
	}
}

// The host's own choice, which may pace, is not used between an agent and the gateway.
func TestNothingIsPacedOnTheWayToTheGateway(t *testing.T) {
	addrs := []string{"93.184.216.34:9001", "[2606:2800::1]:9001"}
	ledBy(t, addrs, func(t *testing.T, got map[string]string) {
		for _, addr := range addrs {
			if got[addr] != "reno and reno" {
				t.Errorf("%s: the gateway's and the agent's socket have %q", addr, got[addr])
			}
		}
	})
}

// Large packets, where the kernel can, and nothing is lost in them, in either family.
func TestMuchInLargePacketsArrivesWhole(t *testing.T) {
	ledBy(t, []string{"lo", "much 93.184.216.34:9000", "much [2606:2800::1]:9000"}, whole)
}

func whole(t *testing.T, got map[string]string) {
	_, want := pattern()
	for _, addr := range []string{"93.184.216.34:9000", "[2606:2800::1]:9000"} {
		if said := got["much "+addr]; said != want+" <nil>" {
			t.Errorf("%s: %s", addr, said)
		}
	}
	if !strings.Contains(got["lo"], "gso_max_size 524280") {
		var u unix.Utsname
		_ = unix.Uname(&u)
		t.Logf("without large packets on Linux %s: %s", unix.ByteSliceToString(u.Release[:]), got["lo"])
		var major, minor int
		if fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); major > 6 || major == 6 && minor >= 3 {
			t.Error("this kernel has them")
		}
	}
}
