// Hosts with public addresses, in a network namespace of the test's: the product is told to
// reach them by name, on the ports that such servers have.

package e2e

import (
	"bufio"
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
)

// hostArg makes this program serve HTTP and HTTPS at an address: hostArg ADDRESS CERT KEY.
const hostArg = "e2e-host"

// hosted reports whether this process was started to serve, and has.
func hosted() bool {
	if len(os.Args) != 5 || os.Args[1] != hostArg {
		return false
	}
	page := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// As a host does that would rather be asked by HTTP/3.
		w.Header().Set("Alt-Svc", `h3=":443"; ma=3600`)
		fmt.Fprintf(w, "page of %s by %s\n", r.Host, r.Proto)
	})
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	plain, err := net.Listen("tcp", net.JoinHostPort(os.Args[2], "80"))
	if err != nil {
		fail(err)
	}
	secure, err := net.Listen("tcp", net.JoinHostPort(os.Args[2], "443"))
	if err != nil {
		fail(err)
	}
	fmt.Println("up")
	go func() { fail((&http.Server{Handler: page}).Serve(plain)) }()
	fail((&http.Server{Handler: page}).ServeTLS(secure, os.Args[3], os.Args[4]))
	return true
}

// internet is the namespace of the hosts.
type internet struct {
	s     *site
	enter []string // how a command gets there
}

// newInternet puts the site into a network of its own, with the internet behind it. Each name
// is that of a host with an address of its own.
func newInternet(s *site, names ...string) (*internet, map[string]string) {
	t := s.t
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		if _, err := os.Stat("/usr/sbin/ip"); err != nil {
			t.Skip("missing: ip (iproute2)")
		}
	}
	ns := s.write("internet", "") // a file that holds the namespace
	addrs, hosts, add := map[string]string{}, "127.0.0.1 localhost\n", ""
	for i, name := range names {
		addrs[name] = fmt.Sprintf("93.184.216.%d", 34+i)
		hosts += addrs[name] + " " + name + "\n"
		add += fmt.Sprintf("ip addr add %s/32 dev i0; ", addrs[name])
	}
	do := s.namespace("true", "--net")
	for _, line := range []string{
		"unshare --net=" + ns + " true",
		"mount --bind " + s.write("hosts", hosts) + " /etc/hosts",
		"mount --bind " + s.write("resolv.conf", "nameserver 10.77.0.1\n") + " /etc/resolv.conf", // where nobody answers, which is said at once
		"ip link set lo up && ip link add h0 type veth peer name i0 && ip link set i0 netns " + ns,
		"ip addr add 10.77.0.1/24 dev h0 && ip link set h0 up && ip route add default via 10.77.0.2",
		"nsenter --net=" + ns + ` sh -ec "ip link set lo up; ip addr add 10.77.0.2/24 dev i0; ip link set i0 up; ip route add default via 10.77.0.1; ` + add +
			// Servers there are no root's, and have the ports of servers.
			`echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start"`,
	} {
		do(line)
	}
	in := &internet{s, slices.Clone(s.within)}
	in.enter[slices.Index(in.enter, "--net")] = "--net=" + s.view + ns
	return in, addrs
}

// command is a program on a host of the internet.
func (in *internet) command(argv ...string) *exec.Cmd {
	argv = slices.Concat(in.enter, argv)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env, cmd.Dir = in.s.env, in.s.base
	return cmd
}

// serve runs a server until the test ends. It is up when it has said ready, on either stream.
func (in *internet) serve(ready string, argv ...string) {
	t := in.s.t
	t.Helper()
	cmd := in.command(argv...)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	var said bytes.Buffer
	up, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		once := sync.OnceFunc(func() { close(up) })
		for lines := bufio.NewScanner(r); lines.Scan(); {
			fmt.Fprintln(&said, lines.Text())
			if strings.Contains(lines.Text(), ready) {
				once()
			}
		}
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		r.Close()
		<-ended
		if t.Failed() {
			t.Logf("%q said: %s", argv, said.Bytes())
		}
	})
	select {
	case <-up:
	case <-ended:
		t.Fatalf("%q ended before it was up", argv)
	}
}

// web serves pages on the hosts; the authority signs for all of them.
func (in *internet) web(addrs map[string]string) (ca string) {
	s := in.s
	ca, cert := authority(s.t, slices.Collect(maps.Keys(addrs))...)
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		s.t.Fatal(err)
	}
	certFile, keyFile := s.write("web/cert.pem", ca), s.write("web/key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})))
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		s.t.Fatal(err)
	}
	program := s.write("web/host", string(self))
	s.executable(program)
	for _, addr := range addrs {
		in.serve("up", program, hostArg, addr, certFile, keyFile)
	}
	return ca
}

// datagrams counts those that ever arrived on the hosts, wanted or not.
func (in *internet) datagrams() (n int) {
	out, err := in.command("cat", "/proc/net/snmp").Output()
	if err != nil {
		in.s.t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		var received, nobody int
		if _, err := fmt.Sscanf(line, "Udp: %d %d", &received, &nobody); err == nil {
			return received + nobody
		}
	}
	in.s.t.Fatalf("no Udp in %s", out)
	return 0
}
