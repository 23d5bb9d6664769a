package egress

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// waits waits until exactly n things wait for the operator.
func (a *caged) waits(n int) []wire.EgressAsk {
	a.t.Helper()
	over := time.After(10 * time.Second)
	for {
		if p := a.g.Pending(); len(p) == n {
			return p
		}
		select {
		case <-a.changed:
		case <-over:
			a.t.Fatalf("got %+v, want %d", a.g.Pending(), n)
		}
	}
}

func asking(allow ...string) rules.Policy { return rules.Policy{Allow: allow, Ask: 30} }

func TestAnUnlistedNameWaitsForTheOperator(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", echo)
	w.name(t, "new.example", "A "+webA)
	a := w.cage(t, asking())
	got := make(chan []string)
	go func() { got <- a.addrs("new.example") }()
	p := a.waits(1)
	if p[0].Host != "new.example" || p[0].Port != 0 || p[0].Until.Sub(p[0].Since) != 30*time.Second {
		t.Errorf("got %+v", p)
	}
	if w.asked("new.example") {
		t.Error("the name was looked up before the operator's word")
	}
	a.record("the question", func(r Record) bool { return r.Verdict == Asking && r.Name == "new.example" })
	// Another name, and another port of it, are no answer.
	if err := a.g.Allow("other.example", wire.EgressRun); err != nil {
		t.Fatal(err)
	}
	a.waits(1)
	if err := a.g.Allow("new.example:8080", wire.EgressRun); err != nil {
		t.Fatal(err)
	}
	if addrs := <-got; len(addrs) != 1 {
		t.Fatalf("got %v", addrs)
	}
	a.waits(0)
	exchange(t, a.dial(webA+":8080"), "hi", "hi")
	// The other port of the same name waits by itself, and is refused.
	refused := make(chan error)
	go func() {
		c, err := a.try(webA + ":22")
		if err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		refused <- err
	}()
	if p := a.waits(1); p[0].Host != "new.example" || p[0].Port != 22 {
		t.Errorf("got %+v", p)
	}
	if err := a.g.Deny("new.example:22", wire.EgressOnce); err != nil {
		t.Fatal(err)
	}
	if err := <-refused; err == nil || errors.Is(err, io.EOF) {
		t.Errorf("got %v, want a reset", err)
	}
	a.record("the no", func(r Record) bool { return r.Verdict == Denied && r.Reason == "the operator said no" })
}

func TestOnceIsOneConnection(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", echo)
	w.name(t, "new.example", "A "+webA)
	a := w.cage(t, policy())
	if err := a.g.Allow("new.example", wire.EgressOnce); err != nil {
		t.Fatal(err)
	}
	c := a.connect("new.example", 8080)
	exchange(t, c, "hi", "hi")
	a.refused(webA + ":8080")
	exchange(t, c, "more", "more") // it goes on
	c.Close()
	a.record("the one", func(r Record) bool {
		return r.Verdict == Allowed && r.Rule == "new.example. (once)" || r.Rule == "new.example (once)"
	})
	if m := a.ask("new.example", dns.TypeA); m.Rcode != dns.RcodeNameError {
		t.Errorf("the name is still looked up: %v", m)
	}
}

func TestWhatNobodyAnswersIsRefused(t *testing.T) {
	w := theWorld(t)
	a := w.cage(t, rules.Policy{Ask: 1})
	began := time.Now()
	if m := a.ask("new.example", dns.TypeA); m.Rcode != dns.RcodeNameError || !blocked(m) {
		t.Errorf("got %v", m)
	}
	if d := time.Since(began); d < time.Second {
		t.Errorf("refused after %s", d)
	}
	a.waits(0)
	a.refused(webB + ":8080")
}

func TestThoseWhoWaitAreBounded(t *testing.T) {
	w := theWorld(t)
	a := w.cage(t, asking())
	done := make(chan struct{}, maxAsks+20)
	for i := range maxAsks + 20 {
		go func() {
			a.g.judgeName(t.Context(), fmt.Sprintf("n%d.example", i), true)
			done <- struct{}{}
		}()
	}
	for range 20 {
		<-done // refused at once
	}
	if n := len(a.g.Pending()); n != maxAsks {
		t.Errorf("%d wait, want %d", n, maxAsks)
	}
	if err := a.g.Deny("*.example", wire.EgressOnce); err != nil {
		t.Fatal(err)
	}
	for range maxAsks {
		<-done
	}
}

func TestDenyingCutsWhatIsConnected(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", echo)
	w.name(t, "example.com", "A "+webA)
	w.name(t, "other.example", "A "+webB)
	w.server(t, w.internet, webB+":8080", echo)
	for what, deny := range map[string]func(*Gateway) error{
		"a word":         func(g *Gateway) error { return g.Deny("example.com", wire.EgressRun) },
		"an address":     func(g *Gateway) error { return g.Deny(webA, wire.EgressRun) },
		"another policy": func(g *Gateway) error { return g.SetRules(policy("other.example")) },
	} {
		t.Run(what, func(t *testing.T) {
			a := w.cage(t, policy("example.com", "other.example"))
			c, other := a.connect("example.com", 8080), a.connect("other.example", 8080)
			exchange(t, c, "hi", "hi")
			exchange(t, other, "hi", "hi")
			if err := deny(a.g); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
				t.Errorf("got %v, want a reset", err)
			}
			exchange(t, other, "still here", "still here")
			r := a.record("the cut", func(r Record) bool { return r.Verdict == Cut })
			if r.Name != "example.com" || r.Sent != 2 || r.Reason == "" {
				t.Errorf("got %+v", r)
			}
			a.refused(webA + ":8080")
		})
	}
}

func TestWordsOfTheOperator(t *testing.T) {
	w := theWorld(t)
	a := w.cage(t, rules.Policy{Allow: []string{"example.com"}, Deny: []string{"*.evil.net"}})
	if err := a.g.Allow("www.evil.net", wire.EgressRun); err == nil || !strings.Contains(err.Error(), "deny beats allow") {
		t.Errorf("got %v", err)
	}
	for _, bad := range []string{"", "http://x/", "10.0.0.1/8"} {
		if err := a.g.Allow(bad, wire.EgressRun); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if err := a.g.Allow("x.example", "for ever"); err == nil {
		t.Error("a scope that is none is taken")
	}
	// The last word holds.
	for _, allow := range []bool{false, true, false, true} {
		say := a.g.Deny
		if allow {
			say = a.g.Allow
		}
		if err := say("x.example", wire.EgressRun); err != nil {
			t.Fatal(err)
		}
		if got := a.g.rules().Decide(rules.Query{Name: "x.example"}).Allowed; got != allow {
			t.Errorf("after allow %v: allowed %v", allow, got)
		}
	}
	if err := a.g.SetRules(rules.Policy{Allow: []string{"b.example"}}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"x.example": true, "b.example": true, "example.com": false} {
		if got := a.g.rules().Decide(rules.Query{Name: name}).Allowed; got != want {
			t.Errorf("%s after SetRules: allowed %v", name, got)
		}
	}
	if err := a.g.SetRules(rules.Policy{Allow: []string{"*"}}); err == nil {
		t.Error("a policy that cannot be read is taken")
	}
	if a.g.rules().Decide(rules.Query{Name: "b.example"}).Allowed == false {
		t.Error("the old policy does not stay in force")
	}
}

func TestCloseEndsEverything(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", echo)
	w.name(t, "example.com", "A "+webA)
	a := w.cage(t, asking("example.com"))
	c := a.connect("example.com", 8080)
	exchange(t, c, "hi", "hi")
	go a.g.judgeName(t.Context(), "new.example", true)
	a.waits(1)
	if err := a.g.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("got %v, want a reset", err)
	}
	if s := a.g.Stats(); s.Active != 0 {
		t.Errorf("got %+v", s)
	}
	a.record("its end", func(r Record) bool { return r.Verdict == Cut && r.Name == "example.com" })
}

// A no that comes after a connection was judged and before that is noted finds it all the same.
func TestANoThatComesWhileAConnectionIsLetOut(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":8080", echo)
	w.name(t, "new.example", "A "+webA)
	a := w.cage(t, asking("new.example:1"))
	a.addrs("new.example")
	c := a.dial(webA + ":8080")
	if _, err := c.Write([]byte("hi")); err != nil {
		t.Fatal(err)
	}
	a.waits(1)
	f := a.flow(func(*flow) bool { return true })
	f.mu.Lock() // so that nothing is noted
	if err := a.g.Allow("new.example:8080", wire.EgressRun); err != nil {
		t.Fatal(err)
	}
	a.waits(0) // it is judged
	a.g.mu.Lock()
	err := a.g.say(word{false, "new.example:8080"}, wire.EgressRun) // what is connected was looked at before
	a.g.mu.Unlock()
	f.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 2)
	if n, err := c.Read(b); n > 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %q, %v, want a reset", b[:n], err)
	}
}

// The same of what a client says.
func TestANoThatComesWhileARequestIsLetOut(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":80", webServer(t))
	w.name(t, "one.example", "A "+webA)
	w.name(t, "two.example", "A "+webA)
	for what, p := range map[string]rules.Policy{"allowlist": policy("one.example", "two.example"), "open": {Open: true}} {
		t.Run(what, func(t *testing.T) {
			a := w.cage(t, p)
			a.addrs("two.example")
			c := a.connect("one.example", 80)
			f := a.flow(func(f *flow) bool { return f.server != nil })
			f.mu.Lock() // so that nothing is noted
			if _, err := io.WriteString(c, get("two.example")); err != nil {
				t.Fatal(err)
			}
			stacks := make([]byte, 1<<20)
			for end := time.Now().Add(10 * time.Second); !strings.Contains(string(stacks[:runtime.Stack(stacks, true)]), "(*flow).says("); runtime.Gosched() {
				if time.Now().After(end) {
					t.Fatal("it is not judged")
				}
			}
			a.g.mu.Lock()
			err := a.g.say(word{false, "two.example"}, wire.EgressRun) // what is connected was looked at before
			a.g.mu.Unlock()
			f.mu.Unlock()
			if err != nil {
				t.Fatal(err)
			}
			if got := said(c, ""); strings.Contains(got, "GET two.example") || !strings.HasPrefix(got, "HTTP/1.1 403 ") {
				t.Errorf("got %q", got)
			}
		})
	}
}

// A word for one connection is used up by the one that asks for its name, also where another
// name led there; and that one may ask again.
func TestAWordForOneConnectionIsNotForAnotherToTheSameServer(t *testing.T) {
	w := theWorld(t)
	w.server(t, w.internet, webA+":80", webServer(t))
	w.name(t, "one.example", "A "+webA)
	w.name(t, "two.example", "A "+webA)
	a := w.cage(t, policy("one.example"))
	if err := a.g.Allow("two.example", wire.EgressOnce); err != nil {
		t.Fatal(err)
	}
	a.addrs("two.example")
	for i, want := range []int{200, 403} {
		c := a.connect("one.example", 80)
		in := bufio.NewReader(c)
		for range 2 {
			if status, body := asked(t, c, in, get("two.example")); status != want {
				t.Fatalf("connection %d: got %d %q", i, status, body)
			}
			if want != 200 {
				break
			}
			if status, body := asked(t, c, in, get("one.example")); status != 200 {
				t.Fatalf("connection %d, one.example: got %d %q", i, status, body)
			}
		}
	}
}

// flow waits for the only connection, until it is so far.
func (a *caged) flow(far func(*flow) bool) *flow {
	a.t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); runtime.Gosched() {
		a.g.mu.Lock()
		var f *flow
		for f = range a.g.flows { // there is one
		}
		a.g.mu.Unlock()
		if f == nil {
			continue
		}
		f.mu.Lock()
		is := far(f)
		f.mu.Unlock()
		if is {
			return f
		}
	}
	a.t.Fatal("no connection")
	return nil
}
