package egress

import (
	"bufio"
	"net"
	"os/exec"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
)

// CASES 31: a machine is reached by more addresses than its devices have. Behind a balancer of a
// cloud's it has a route of type local for those of the balancer.
func TestNoAddressThatLeadsToTheMachineItselfIsReached(t *testing.T) {
	w := theWorld(t)
	sh := func(script string) {
		t.Helper()
		if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	sh(`ip route add local 8.8.4.0/24 dev lo; ip -6 route add local 2600:1f18:77:1::/64 dev lo`)
	t.Cleanup(func() { sh(`ip route del local 8.8.4.0/24 dev lo; ip -6 route del local 2600:1f18:77:1::/64 dev lo`) })
	w.server(t, nil, "[::]:8080", webServer(t))
	w.server(t, w.internet, webA+":8080", webServer(t))
	talk := func(c net.Conn) string {
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Write([]byte(get("x.example"))); err != nil {
			return ""
		}
		line, _ := bufio.NewReader(c).ReadString('\n')
		return line
	}
	for _, addr := range []string{"[2600:1f18:77:1::5]:8080", "8.8.4.4:8080"} {
		direct, err := net.DialTimeout("tcp", addr, 5*time.Second)
		if err != nil {
			t.Fatalf("the control: %v", err)
		}
		if talk(direct) == "" {
			t.Errorf("the control: %s does not answer", addr)
		}
		direct.Close()
	}
	a := w.cage(t, rules.Policy{Open: true, Allow: []string{"8.8.4.5"}})
	for _, addr := range []string{"[2600:1f18:77:1::5]:8080", "8.8.4.4:8080"} {
		if c, err := a.try(addr); err == nil {
			if got := talk(c); got != "" {
				t.Errorf("%s reaches this machine: %q", addr, got)
			}
		}
		host, _, _ := net.SplitHostPort(addr)
		a.record(addr, func(r Record) bool { return r.Verdict == Denied && r.Address == host })
	}
	w.name(t, "sly.example", "AAAA 2600:1f18:77:1::5", "A 8.8.4.4")
	if got := a.addrs("sly.example"); len(got) > 0 {
		t.Errorf("a name that leads there has %v", got)
	}
	for _, addr := range []string{webA + ":8080", "8.8.4.5:8080"} { // elsewhere, and what a rule names
		if talk(a.dial(addr)) == "" {
			t.Errorf("%s is not reached", addr)
		}
	}
}
