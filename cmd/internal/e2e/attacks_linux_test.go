package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

// listener counts who connects, and greets them.
type listener struct {
	address string
	came    atomic.Int64
}

// listen serves until the test ends.
func (s *site) listen(network, address string) *listener {
	s.t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		s.t.Fatal(err)
	}
	counter := &listener{address: l.Addr().String()}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			counter.came.Add(1)
			io.WriteString(c, "hello\n")
			c.Close()
		}
	}()
	s.t.Cleanup(func() { l.Close(); <-done })
	return counter
}

// answerUDP answers every datagram until the test ends.
func (s *site) answerUDP() string {
	s.t.Helper()
	c, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1500)
		for {
			_, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			c.WriteTo([]byte("hello"), from)
		}
	}()
	s.t.Cleanup(func() { c.Close(); <-done })
	return c.LocalAddr().String()
}

// bystander is a process of the same user that has a secret, the file open, and no part in
// anything.
func (s *site) bystander(secret, file string) int {
	s.t.Helper()
	open, err := os.Open(file)
	if err != nil {
		s.t.Fatal(err)
	}
	defer open.Close()
	cmd := exec.Command("/bin/sleep", "600")
	cmd.Env, cmd.Dir, cmd.Stdin = []string{"SOME_TOKEN=" + secret}, filepath.Dir(file), open
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return cmd.Process.Pid
}

// canary puts a token outside base, where a user has files of their own.
func (s *site) canary(path, token string) string {
	s.t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { os.Remove(path) })
	_, err = io.WriteString(f, token+"\n")
	f.Close()
	if err != nil {
		s.t.Fatal(err)
	}
	return path
}

// targets sets up a host with everything to attack, for the agent id.
func (s *site) targets(id string) selftest.Targets {
	s.t.Helper()
	const secret = "s3cret-of-the-daemon"
	token := "token-" + s.tag
	sockets := map[string]string{}
	for _, name := range []string{"bus", "systemd-private", "system-bus", "ssh-agent", "gpg-agent", "docker", "wayland"} {
		sockets[name] = s.listen("unix", s.path(filepath.Join("s", name))).address
	}
	canary := s.canary(filepath.Join(s.home, ".agentconnect-"+s.tag), token)
	s.link(canary, filepath.Join(s.workspace(id), "link"))
	git := filepath.Join(s.workspace(id), "planted")
	if err := selftest.PlantGit(git); err != nil {
		s.t.Fatal(err)
	}
	key, remove, err := selftest.PlantIPC()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { remove() })
	return selftest.Targets{
		Token:           token,
		HomeCanary:      canary,
		Root:            s.root,
		RootCanary:      s.write(filepath.Join(s.root, "canary"), token),
		OtherAgent:      s.write(filepath.Join(s.workspace("bob"), "canary"), token),
		TmpCanary:       s.canary(filepath.Join("/tmp", "agentconnect-"+s.tag), token),
		Sockets:         sockets,
		ExposedSocket:   s.path("shown/s"),
		WorkspaceSocket: filepath.Join(s.workspace(id), "s"),
		AbstractSocket:  strings.TrimPrefix(s.listen("unix", "@agentconnect-"+s.tag).address, "@"),
		HostTCP:         s.listen("tcp", "127.0.0.1:0").address,
		PublicTCP:       s.listen("tcp", "127.0.0.2:0").address, // stands for it: no test asks for a network
		HostUDP:         s.answerUDP(),
		HostPID:         s.bystander(secret, canary),
		HostSecret:      secret,
		Sibling:         s.write(s.workspace(id)+"-beside/canary", token),
		ShmCanary:       s.canary(filepath.Join("/dev/shm", "agentconnect-"+s.tag), token),
		IPCKey:          key,
		AgentJSON:       filepath.Join(s.agentDir(id), "agent.json"),
		Link:            filepath.Join(s.workspace(id), "link"),
		Pinned:          []string{s.path("pinned")},
		Covers:          []string{s.path("shown/s"), filepath.Join(s.workspace(id), "s")},
		Git:             git,
		Secrets:         []string{secret},
		Workspace:       s.workspace(id),
		Home:            s.home,
		Memory:          filepath.Join(s.agentDir(id), "memory"),
		UID:             os.Getuid(),
		Network:         "none",
	}
}

func TestEveryAttackFailsInARealTurnAndItsControlWorksOutside(t *testing.T) {
	for _, nesting := range []string{"off", "on"} {
		t.Run("nesting "+nesting, func(t *testing.T) {
			s := newSite(t)
			s.env = append(s.env, "AWS_SECRET_ACCESS_KEY=s3cret-of-the-daemon", "GITHUB_TOKEN=s3cret-of-the-daemon",
				"SSH_AUTH_SOCK="+s.path("s/ssh-agent"), "DBUS_SESSION_BUS_ADDRESS=unix:path="+s.path("s/bus"), "DOCKER_HOST=unix://"+s.path("s/docker"))
			s.mkdir("s")
			s.mkdir("shown")
			s.mkdir("pinned/given")
			s.add("bob")
			s.add("alice", "--nesting", nesting, "--grant", s.path("shown")+":ro", "--grant", s.path("pinned/given")+":rw")
			s.listen("unix", s.path("shown/s"))
			s.listen("unix", filepath.Join(s.workspace("alice"), "s"))
			aim := s.targets("alice")
			aim.Nesting = nesting == "on"
			s.start()

			inside := s.attack("alice", aim)
			var skipped []string
			for _, r := range inside.Results {
				if !r.OK {
					t.Errorf("inside: %s", r.Line())
				}
				if r.ID == "git-kept-descriptor" && aim.Nesting && !strings.Contains(r.Detail, "moved back") {
					t.Errorf("inside: the attack did not come to its end, so it proves nothing: %s", r.Detail)
				}
				if r.Seen == selftest.Skipped {
					skipped = append(skipped, r.ID)
				}
			}
			want := []string(nil)
			if aim.Nesting {
				// The policy opens just this.
				want = []string{"user-namespace", "root-namespace", "kept-descriptor", "openat2", "clone3-namespace", "unshare-high"}
			}
			if d := cmp.Diff(want, skipped); d != "" {
				t.Errorf("skipped: %s", d)
			}
			if got, all := len(inside.Results), len(selftest.Attacks()); got != all {
				t.Errorf("%d attacks of %d were tried", got, all)
			}
			if nesting == "on" {
				return // outside there is no difference
			}
			aim.MetadataTCP = "" // a real address
			for _, r := range s.attackOutside("alice", aim).Results {
				if r.Control && r.Seen != selftest.Worked {
					t.Errorf("outside: %s", r.Line())
				}
			}
		})
	}
}

// attack lets the agent run the table in a turn.
func (s *site) attack(id string, aim selftest.Targets) *selftest.Report {
	s.t.Helper()
	aim.MetadataTCP = "169.254.169.254:80"
	words, err := json.Marshal(aim)
	if err != nil {
		s.t.Fatal(err)
	}
	answer := s.ok("prompt", id, "attack "+string(words))
	_, rest, ok := strings.Cut(answer, "```json")
	var report selftest.Report
	if !ok || json.NewDecoder(strings.NewReader(rest)).Decode(&report) != nil {
		s.t.Fatalf("no report in the answer:\n%s", answer)
	}
	return &report
}

// attackOutside runs the table as the user, unconfined, where the agent's workspace is.
func (s *site) attackOutside(id string, aim selftest.Targets) *selftest.Report {
	s.t.Helper()
	words, err := json.Marshal(aim)
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := s.command(context.Background(), filepath.Join(s.bin, "agentconnect-guest"), "attack", "--targets", "-", "--json", "--control")
	cmd.Dir = s.workspace(id)
	cmd.Env = append(cmd.Env, "XDG_RUNTIME_DIR="+s.mkdir("xdg"))
	cmd.Stdin = bytes.NewReader(words)
	var report selftest.Report
	if r := s.finish(cmd); json.Unmarshal([]byte(r.out), &report) != nil {
		s.t.Fatalf("exit %d: %s%s", r.code, r.out, r.err)
	}
	return &report
}

// The programs that talk to the host's daemons find nobody, whatever the environment
// names: the same command line outside reaches the socket.
func TestSystemdRunBusctlMachinectlAndDockerFindNoSocket(t *testing.T) {
	s := newSite(t)
	s.mkdir("run/systemd")
	bus := s.listen("unix", s.path("run/bus"))
	private := s.listen("unix", s.path("run/systemd/private"))
	docker := s.listen("unix", s.path("run/docker.sock"))
	s.add("alice")
	s.start()
	reached := func() int64 { return bus.came.Load() + private.came.Load() + docker.came.Load() }
	booted := exists("/run/systemd/system") // else machinectl gives up before it looks for a bus
	for _, c := range []struct {
		program, script string
		control         bool
	}{
		{"systemd-run", "systemd-run --user --quiet --wait true", true},
		{"busctl", "busctl --user --no-pager list", true},
		{"machinectl", "machinectl --no-pager list", booted},
		{"docker", "docker version", true},
	} {
		t.Run(c.program, func(t *testing.T) {
			script := fmt.Sprintf("export XDG_RUNTIME_DIR=%[1]s DBUS_SESSION_BUS_ADDRESS=unix:path=%[1]s/bus DBUS_SYSTEM_BUS_ADDRESS=unix:path=%[1]s/bus DOCKER_HOST=unix://%[1]s/docker.sock; timeout 5 %[2]s", s.path("run"), c.script)
			before := reached()
			if r := s.sh("alice", script); r.code == 0 {
				t.Errorf("it worked inside: %s", r.out)
			}
			if n := reached() - before; n != 0 {
				t.Errorf("it reached a socket of the host %d times", n)
			}
			if _, err := exec.LookPath(c.program); err != nil || !c.control {
				t.Logf("no control: %s does not run on this host (%v)", c.program, err)
				return
			}
			// Our sockets speak none of the protocols, so the control is that they were reached.
			s.finish(s.command(context.Background(), "/bin/sh", "-c", script))
			if reached() == before {
				t.Errorf("outside it reaches nothing either, so it proves nothing")
			}
		})
	}
}

func TestSocketsInTheWorkspaceAndInARuntimesTreeCannotBeReached(t *testing.T) {
	s := newSite(t)
	s.script("alice", `exec "$guest" selftest`)
	var all []*listener
	for _, path := range []string{filepath.Join(s.workspace("alice"), "s"), s.path("runtimes/alice/s")} {
		all = append(all, s.listen("unix", path))
	}
	s.start()
	for _, l := range all {
		s.refused("alice", `test "$(socat -t2 - UNIX-CONNECT:`+l.address+` </dev/null)" = hello`)
		if n := l.came.Load(); n != 1 {
			t.Errorf("%s: reached %d times, want 1: the control", l.address, n)
		}
	}
	// A turn starts in the same view as a command.
	if got := s.ok("prompt", "alice", "echo here"); got != "here\n" {
		t.Errorf("%q", got)
	}
}

// What an agent plants in its home stays there: the host's programs never read it.
func TestPlantedCredentialsNeverReachTheHostsHome(t *testing.T) {
	s := newSite(t)
	s.add("alice")
	s.start()
	// Only what the real home does not have: should the test fail, nothing of the user's is lost.
	var names []string
	for _, n := range []string{".claude/.credentials.json", ".codex/auth.json", ".netrc", ".config/gh/hosts.yml", ".ssh/config", ".gitconfig", ".bash_aliases", ".config/systemd/user/x.service", "." + s.tag} {
		if host := filepath.Join(s.home, n); !exists(host) {
			names = append(names, n)
			t.Cleanup(func() { os.Remove(host) })
		}
	}
	for _, n := range names {
		s.works("alice", fmt.Sprintf("mkdir -p ~/%s && echo planted > ~/%s && cat ~/%[2]s", filepath.Dir(n), n))
	}
	for _, n := range names {
		if exists(filepath.Join(s.home, n)) {
			t.Errorf("%s reached the host's home", n)
		}
		// It is where the agent keeps its own, and there alone.
		if got := s.read(filepath.Join(s.agentDir("alice"), "home", n)); got != "planted\n" {
			t.Errorf("%s in the private home: %q", n, got)
		}
	}
	if got := s.ok("prompt", "alice", "echo fine"); got != "fine\n" {
		t.Errorf("%q", got)
	}
}
