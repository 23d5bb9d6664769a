// Secrets: where an agent has them, and everywhere else, where they must not be.

package machinetest

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// canary is a secret of an agent's, by the way that it comes.
type canary struct {
	name, value string
	flags       []string // of `secret set`; nil: the environment in agent.json
	env         string   // the variable of the runtime that holds it
	file        bool     // there is a file inside
}

// in reports whether a text holds the value, as it is or as JSON writes bytes.
func (c canary) in(text string) bool {
	coded := base64.StdEncoding.EncodeToString([]byte(c.value))
	return strings.Contains(text, c.value) || strings.Contains(text, coded[:len(coded)-4])
}

func canaries(generation int) []canary {
	value := func(word string) string { return fmt.Sprintf("canary-%s-%d-of-0451", word, generation) }
	return []canary{
		{name: "TOKEN", value: value("agent-json"), env: "TOKEN"},
		{name: "KEY", value: value("api-key"), flags: []string{"--env", "ANTHROPIC_API_KEY"}, env: "ANTHROPIC_API_KEY"},
		{name: "FILE", value: value("file"), flags: []string{}, file: true},
		{name: "kube", value: value("path"), flags: []string{"--path-env", "KUBECONFIG"}, file: true},
		{name: "OUT", value: value("outside"), flags: []string{"--outside"}},
	}
}

// give sets the agent's secrets, their values by stdin.
func (m *machine) give(id string, list []canary) {
	m.t.Helper()
	for _, c := range list {
		if c.flags == nil {
			m.mustAC("agent", "edit", id, "--env", c.name+"="+c.value)
			continue
		}
		cmd := m.command(context.Background(), append([]string{"agentconnect", "secret", "set", id, c.name}, c.flags...)...)
		cmd.Stdin = strings.NewReader(c.value)
		if out, err := cmd.CombinedOutput(); err != nil {
			m.t.Fatalf("secret set %s: %v: %s", c.name, err, out)
		}
	}
}

// secrets looks for canaries.
type secrets struct {
	*machine
	id   string
	list []canary
}

// clean reports each canary in a text.
func (s *secrets) clean(where, text string, but ...string) {
	s.t.Helper()
	if text == "" {
		s.t.Errorf("%s: nothing to look at", where)
	}
	for _, c := range s.list {
		if c.in(text) && !slices.Contains(but, c.name) {
			s.t.Errorf("secret %s is in %s", c.name, where)
		}
	}
}

// nowhere looks wherever the user's programs, or anybody's, could read them, while a command
// runs beside the agent.
func (s *secrets) nowhere() {
	s.t.Helper()
	m := s.machine
	m.works(s.id) // so that its runtime has begun
	command := m.command(context.Background(), "agentconnect", "agent", "exec", s.id, "--", "sh", "-c", "read x")
	in, err := command.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		s.t.Fatal(err)
	}
	defer func() {
		in.Close()
		_ = command.Wait() // read fails at the end of its input
	}()
	shell := func(p process) bool { return p.comm == "sh" && strings.Contains(p.group, "agentconnect-exec-") }
	m.until("the command runs", func() bool { return slices.ContainsFunc(m.of(s.id), shell) })

	units := m.mustCTL("show", "--all", "*")
	for _, id := range []string{service(s.id), scope(s.id), "agentconnect-" + s.id + ".slice", "agentconnect.service", "agentconnect-probe.service", "agentconnect-exec-" + s.id + "-"} {
		if !strings.Contains(units, "\nId="+id) {
			s.t.Errorf("systemctl show says nothing of %s", id)
		}
	}
	s.clean("the properties of units", units)
	s.clean("the manager's properties", m.mustCTL("show", "--all"))
	s.clean("the manager's environment", m.mustCTL("show-environment"))
	s.clean("systemctl status", m.ctl("status", "--all", "--full", "--no-pager", "agent*", "agentconnect*").out)
	for _, format := range []string{"json", "export"} { // the one writes odd bytes as numbers
		s.clean("the journal as "+format, m.journal("-o", format))
	}
	s.clean("ps", m.must("ps", "axww", "-o", "pid,args"))
	for _, args := range [][]string{{"status", "--json"}, {"agent", "list", "--json"}, {"secret", "list", s.id}, {"audit", s.id}, {"explain", s.id}} {
		s.clean("agentconnect "+args[0], m.mustAC(args...))
	}
	s.processes()
	s.files()
}

// processes looks at every process that the user can look at.
func (s *secrets) processes() {
	s.t.Helper()
	looked, had := map[string]int{}, map[string]bool{}
	for _, p := range processes() {
		s.clean("the command line of "+p.String(), p.String())
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid))
		if err != nil {
			continue // somebody else's
		}
		looked[p.comm]++
		var but []string
		if inside := p.runtime() || strings.Contains(p.group, "agentconnect-exec-"); inside && p.comm != "bwrap" {
			// What the operator gave as the agent's environment is the runtime's, and a command's
			// too; a secret's variable is the runtime's alone.
			but = append(but, "TOKEN")
			if filepath.Base(p.group) == scope(s.id) {
				but = append(but, "KEY")
			}
		}
		s.clean("the environment of "+p.String(), "x"+string(b), but...)
		for _, c := range s.list {
			if slices.Contains(but, c.name) && strings.Contains(string(b), c.env+"="+c.value) {
				had[c.name] = true
			}
		}
	}
	for _, comm := range []string{"agentconnect", commSupervisor, "bwrap", commInside, "sh"} {
		if looked[comm] == 0 {
			s.t.Errorf("the environment of no %s was looked at", comm)
		}
	}
	for _, c := range s.list {
		if c.env != "" && !had[c.name] {
			s.t.Errorf("secret %s is not where it belongs either: in the runtime's environment", c.name)
		}
	}
}

// files looks at what lies on the disk and in memory. A file is where the agent reads it, and
// below ROOT, where only the user can read it; encrypted, where systemd does that for users.
func (s *secrets) files() {
	s.t.Helper()
	m := s.machine
	encrypted := m.version() >= 256
	found := map[string]string{} // the places of secrets' files
	for _, dir := range []string{"/run/user/1000", "/tmp", "/var/tmp", "/dev/shm", home} {
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil //nolint:nilerr // what this user cannot read is not the user's
			}
			b, err := os.ReadFile(path)
			if err != nil {
				return nil //nolint:nilerr // the same
			}
			for _, c := range s.list {
				if !c.in(string(b)) {
					continue
				}
				st, err := d.Info()
				mode := os.FileMode(0o777)
				if err == nil {
					mode = st.Mode().Perm()
				}
				switch {
				case c.file && strings.HasPrefix(path, "/run/user/1000/agentconnect/in-") && mode == 0o400:
					found[c.name] = path
				case c.flags == nil && path == root+"/agents/"+s.id+"/agent.json" && mode == 0o600:
				case c.flags != nil && strings.HasPrefix(path, root+"/secrets/"+s.id+"/") && mode == 0o600 && !encrypted:
				default:
					s.t.Errorf("secret %s is in %s, %v", c.name, path, mode)
				}
			}
			return nil
		})
		if err != nil {
			s.t.Error(err)
		}
	}
	for _, c := range s.list {
		if c.file && found[c.name] == "" {
			s.t.Errorf("secret %s has no file for the agent", c.name)
		}
		if c.file {
			if got := m.mustAC("agent", "exec", s.id, "--", "sh", "-c", "cat /run/agentconnect/secrets/"+c.name+"*"); got != c.value {
				s.t.Errorf("inside secret %s is %q", c.name, got)
			}
		}
	}
}

// version is the manager's.
func (m *machine) version() int {
	m.t.Helper()
	f := strings.Fields(m.mustCTL("--version"))
	n, err := strconv.Atoi(f[1])
	if err != nil {
		m.t.Fatal(err)
	}
	return n
}

// left lists what lies in the directories that supervisors show inside.
func left() []string {
	found, _ := filepath.Glob("/run/user/1000/agentconnect/in-*")
	return found
}

func TestSecretIsNowhere(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	s := &secrets{m, "alice", canaries(1)}
	m.give("alice", s.list)
	m.start("alice")
	s.nowhere()

	// kill -9 of the supervisor: the next one makes its own, the old ones are gone meanwhile.
	m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "agent@alice")
	m.until("what the killed one showed is gone before the next start", func() bool {
		return len(left()) == 0 || m.show(service("alice"), "NRestarts") == "1"
	})
	m.until("it came up anew", func() bool { return m.show(service("alice"), "NRestarts") == "1" })
	m.works("alice")
	s.nowhere()

	// Killed, and not started again: nothing stays behind.
	m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "agent@alice")
	m.until("systemd waits with the next start", func() bool { return m.show(service("alice"), "SubState") == "auto-restart" })
	m.until("the files are gone while nothing runs", func() bool { return len(left()) == 0 })
	m.mustAC("agent", "stop", "alice")
	m.gone("alice")
	if l := left(); len(l) > 0 {
		t.Errorf("left behind: %q", l)
	}

	// Killed while no daemon looks: the next daemon finds it. It starts what is wanted, and
	// nothing is any more.
	m.start("alice")
	m.mustCTL("stop", "agentconnect.service")
	m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "agent@alice")
	m.mustCTL("stop", "agent@alice")
	if len(left()) == 0 {
		t.Error("control: without a daemon nothing is left behind")
	}
	if err := os.Remove(root + "/state/wanted.json"); err != nil {
		t.Fatal(err)
	}
	m.up()
	m.until("the next daemon takes it away", func() bool { return len(left()) == 0 })
	m.gone("alice")

	// A command in an agent that does not run hangs on the daemon, and is killed with it.
	command := m.begin("agentconnect", "agent", "exec", "alice", "--", "sh", "-c", "cat /run/agentconnect/secrets/FILE; sleep 600")
	m.until("the command runs", func() bool {
		return slices.ContainsFunc(m.of("alice"), func(p process) bool { return p.cmdline == "sleep 600" })
	})
	if len(left()) == 0 {
		t.Error("control: the command has no secrets")
	}
	m.killDaemon()
	m.gone("alice")
	<-command.ended
	if l := left(); len(l) > 0 {
		t.Errorf("left behind by a command: %q", l)
	}

	// What is set anew is what the next start has, and the old is nowhere.
	s.list = canaries(2)
	m.give("alice", s.list)
	m.since = time.Now()
	m.start("alice")
	s.nowhere()
	(&secrets{m, "alice", canaries(1)}).gone()
}

// An agent outlives its daemon: what a person sets or takes away meanwhile counts all the same.
func TestSecretChangesInAnAgentWhoseDaemonIsGone(t *testing.T) {
	m := newMachine(t)
	m.up()
	m.add("alice")
	set := func(value string) { m.give("alice", []canary{{name: "FILE", value: value, flags: []string{}}}) }
	inside := func() string {
		var all []string
		for _, dir := range left() {
			b, err := os.ReadFile(dir + "/s/FILE")
			if err != nil {
				b = []byte("none")
			}
			all = append(all, string(b))
		}
		return strings.Join(all, " ")
	}
	set("first")
	m.give("alice", []canary{{name: "KEY", value: "in-the-runtime-0451", flags: []string{"--env", "KEY"}}})
	m.start("alice")
	m.works("alice")
	if got := inside(); got != "first" {
		t.Fatalf("control: the agent has %q", got)
	}
	// What systemd keeps for the next start is one spec, the last, however often there was one.
	crash := func(n string) {
		t.Helper()
		m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "agent@alice")
		m.until("it came up anew", func() bool {
			return m.show(service("alice"), "NRestarts") == n && m.show(service("alice"), "ActiveState") == "active"
		})
		if got := m.show(service("alice"), "NFileDescriptorStore"); got != "1" {
			t.Errorf("%s specs are kept", got)
		}
	}
	crash("1")
	m.mustCTL("stop", "agentconnect.service")
	set("second")
	if got := inside(); got != "second" {
		t.Errorf("set anew without a daemon: the agent has %q", got)
	}
	crash("2")
	if got := inside(); got != "second" {
		t.Errorf("after a crash without a daemon: the agent has %q", got)
	}
	m.mustAC("secret", "rm", "alice", "FILE")
	m.mustAC("secret", "rm", "alice", "KEY")
	if got := inside(); got != "none" {
		t.Errorf("taken away without a daemon: the agent has %q", got)
	}
	crash("3")
	if got := inside(); got != "none" {
		t.Errorf("taken away before a crash: the agent has %q", got)
	}
	(&secrets{m, "alice", []canary{{name: "KEY", value: "in-the-runtime-0451"}}}).gone()
	m.mustCTL("stop", "agent@alice")
	set("third") // nobody runs: it is only written down
	m.up()
	m.start("alice")
	m.works("alice")
	if got := inside(); got != "third" {
		t.Errorf("the next start has %q", got)
	}
}

// gone: values that were replaced are in no file and no process any more.
func (s *secrets) gone() {
	s.t.Helper()
	for _, p := range processes() {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.pid)); err == nil {
			s.clean("the environment of "+p.String(), "x"+string(b))
		}
	}
	for _, dir := range []string{root, "/run/user/1000/agentconnect"} {
		err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				if b, err := os.ReadFile(path); err == nil {
					s.clean(path, "x"+string(b))
				}
			}
			return nil
		})
		if err != nil {
			s.t.Error(err)
		}
	}
}

// From systemd 256 on a user's secrets are encrypted by systemd-creds, each for its own name;
// before, that they are not is said. Either way they come back after every restart.
func TestSecretIsEncryptedWhereSystemdDoesItForUsers(t *testing.T) {
	m := newMachine(t)
	encrypted := m.version() >= 256
	m.up()
	m.add("alice")
	token := canary{name: "TOKEN", value: "canary-on-the-disk-0451", flags: []string{}}
	other := canary{name: "OTHER", value: "canary-of-another-0451", flags: []string{}}
	m.give("alice", []canary{token, other})
	stored := func(name string) (sealed, text string) {
		t.Helper()
		b, err := os.ReadFile(root + "/secrets/alice/" + name + ".json")
		if err != nil {
			t.Fatal(err)
		}
		var d struct{ Sealed string }
		if err := json.Unmarshal(b, &d); err != nil {
			t.Fatal(err)
		}
		return d.Sealed, string(b)
	}
	sealed, text := stored("TOKEN")
	if want := map[bool]string{true: "systemd-creds"}[encrypted]; sealed != want || token.in(text) == encrypted {
		t.Errorf("systemd %d: sealed by %q, want %q: %s", m.version(), sealed, want, text)
	}
	if list := m.mustAC("secret", "list", "alice"); strings.Contains(list, "not encrypted") == encrypted {
		t.Errorf("systemd %d: %s", m.version(), list)
	}
	reads := func(after string) {
		t.Helper()
		if got := m.mustAC("agent", "exec", "alice", "--", "cat", "/run/agentconnect/secrets/TOKEN"); got != token.value {
			t.Errorf("after %s: %q", after, got)
		}
	}
	m.start("alice")
	reads("the start")
	m.mustCTL("kill", "-s", "KILL", "--kill-who=main", "agent@alice")
	m.until("it came up anew", func() bool { return m.show(service("alice"), "NRestarts") == "1" })
	m.works("alice")
	reads("a kill of the supervisor")
	m.mustAC("down")
	m.up()
	m.works("alice")
	reads("a restart of all")
	if !encrypted {
		return
	}
	// What is encrypted for one name opens under no other, and changed not at all.
	m.mustAC("agent", "stop", "alice")
	_, of := stored("OTHER")
	for what, swapped := range map[string]string{
		"another's":   strings.Replace(of, `"OTHER"`, `"TOKEN"`, 1),
		"one changed": flipped(t, text),
	} {
		m.file(root+"/secrets/alice/TOKEN.json", swapped, 0o600)
		r := m.ac("agent", "start", "alice")
		if r.code != 78 || !strings.Contains(r.err, "TOKEN") {
			t.Fatalf("%s: exit code %d: %s%s; inside: %s; %s", what, r.code, r.out, r.err, m.mustAC("agent", "exec", "alice", "--", "cat", "/run/agentconnect/secrets/TOKEN"), swapped)
		}
		m.gone("alice")
		if l := left(); len(l) > 0 {
			t.Errorf("%s: left behind: %q", what, l)
		}
	}
	m.file(root+"/secrets/alice/TOKEN.json", text, 0o600)
	m.start("alice")
	reads("the true one is back")
}

// flipped is the text of a stored secret with one character of what is encrypted another.
func flipped(t *testing.T, text string) string {
	t.Helper()
	var d map[string]any
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		t.Fatal(err)
	}
	value, _ := d["value"].(string)
	b, err := base64.StdEncoding.DecodeString(value)
	if err != nil || len(b) < 100 {
		t.Fatalf("%q: %v", value, err)
	}
	if at := len(b) - 40; b[at] == 'x' {
		b[at] = 'y'
	} else {
		b[at] = 'x'
	}
	d["value"] = base64.StdEncoding.EncodeToString(b)
	out, err := json.Marshal(d)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
