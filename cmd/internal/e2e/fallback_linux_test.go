package e2e

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// nftArg makes this program become another one for which the kernel has no nft: nftArg PROGRAM
// ARGUMENT…
const nftArg = "e2e-without-nft"

// withoutNFT returns if this process was not started to do that.
func withoutNFT() bool {
	if len(os.Args) < 3 || os.Args[1] != nftArg {
		return false
	}
	const load, equal, end = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	// socket(AF_NETLINK, …, NETLINK_NETFILTER) is answered as by a kernel without it.
	filter := []unix.SockFilter{
		{Code: load, K: 0}, {Code: equal, K: unix.SYS_SOCKET, Jf: 5},
		{Code: load, K: 16}, {Code: equal, K: unix.AF_NETLINK, Jf: 3},
		{Code: load, K: 32}, {Code: equal, K: unix.NETLINK_NETFILTER, Jf: 1},
		{Code: end, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPROTONOSUPPORT)},
		{Code: end, K: unix.SECCOMP_RET_ALLOW},
	}
	runtime.LockOSThread()
	err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	if err == nil {
		program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
		err = unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
	}
	if err == nil {
		err = syscall.Exec(os.Args[2], os.Args[2:], os.Environ()) //nolint:forbidigo // what is tested gets this process's filter and number
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
	return true
}

// A kernel without nft address translation leads only the ports out that rules name, each by
// a listener of its own. The rules are the same, and probe and status say what is lost.
func TestWithoutNFTOnlyPortsOfRulesLeadOutAndItIsSaid(t *testing.T) {
	s := newSite(t)
	in, addrs := newInternet(s, "allowed.example", "named.example", "denied.example")
	in.web(addrs)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	host := s.within // the host itself has nft
	s.within = slices.Concat(host, []string{self, nftArg})
	s.start()
	const lost = "no nft address translation"
	if out := s.ok("probe"); !strings.Contains(out, lost) {
		t.Errorf("probe does not say it: %s", out)
	}
	s.add("alice", "--network", "allowlist", "--allow", "allowed.example:80", "--allow", "named.example:443")
	s.ok("agent", "start", "alice")
	if out := s.ok("status"); !strings.Contains(out, lost) || !strings.Contains(out, "ports 80, 443 alone") {
		t.Errorf("status does not say it: %s", out)
	}
	s.within = host
	page := "curl -sS --max-time 20 http://$HOST/"
	s.judged(t, "alice", "allowed.example", page, "page of allowed.example", true)
	s.judged(t, "alice", "denied.example", page, "page of denied.example", false)
	s.judged(t, "alice", addrs["denied.example"], page, "page of", false)
	// A port that has a listener, for another name's sake, and one that has none.
	s.judged(t, "alice", "named.example", page, "page of named.example", false)
	s.judged(t, "alice", "allowed.example", "curl -sSk --max-time 20 https://$HOST/", "page of allowed.example", false)
	in.serve("up", "/usr/bin/python3", "-u", "-c", "import socket; l = socket.create_server(('"+addrs["allowed.example"]+"', 8080)); print('up')\nwhile True: c, _ = l.accept(); c.sendall(b'hello from 8080'); c.close()")
	s.judged(t, "alice", "allowed.example", `/usr/bin/python3 -c "import socket; print(socket.create_connection(('$HOST', 8080), 20).recv(100).decode())"`, "hello from 8080", false)
}
