// The machine: one user with the installed product.

package limitstest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/cgroup"
	"agentconnect.md/sandbox/cmd/internal/control"
)

// patience is how long anything may take that a test waits for. Reaching it is a failure. The
// machine is slow, and its host may be busy.
const patience = 4 * time.Minute

// dropIns is where a user's own changes to units are.
const dropIns = "/home/tester/.config/systemd/user"

type machine struct{ t *testing.T }

// realLimits gives the machine whose control groups have controllers; noControllers the one
// where they have none. Neither has agents.
func realLimits(t *testing.T) *machine    { return enter(t, true) }
func noControllers(t *testing.T) *machine { return enter(t, false) }

func enter(t *testing.T, controllers bool) *machine {
	t.Helper()
	if os.Getenv("AGENTCONNECT_TEST_MACHINE") == "" || os.Getuid() == 0 {
		t.Skip("missing: a test machine and its user tester; run packaging/dev/systemd/limits-test.sh")
	}
	own, err := cgroup.Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	have, _ := own.Value("cgroup.controllers")
	if strings.Contains(have, "memory") != controllers {
		t.Skipf("missing: a machine with (or, for some, without) the memory controller; here are: %q", have)
	}
	m := &machine{t}
	since := m.must("journalctl", "--user", "-n1", "--show-cursor", "-o", "cat")
	m.clear()
	t.Cleanup(func() {
		if t.Failed() {
			_, cursor, _ := strings.Cut(since, "-- cursor: ")
			t.Logf("the journal of this test:\n%s", m.must("journalctl", "--user", "-o", "short-monotonic", "--after-cursor", strings.TrimSpace(cursor)))
		}
		m.clear()
	})
	m.must("agentconnect", "up")
	return m
}

// clear takes everything of the product away but what is installed.
func (m *machine) clear() {
	m.t.Helper()
	for _, name := range []string{"agentconnect.service", "agentconnect.slice"} {
		m.run("systemctl", "--user", "thaw", "agentconnect-*.slice")
		m.run("systemctl", "--user", "stop", name)
	}
	for _, dir := range []string{"/home/tester/.agentconnect", dropIns} {
		if err := os.RemoveAll(dir); err != nil {
			m.t.Fatal(err)
		}
	}
	m.must("systemctl", "--user", "daemon-reload")
	m.run("systemctl", "--user", "reset-failed")
	if left := m.must("systemctl", "--user", "list-units", "--all", "--plain", "--no-legend", "agent@*", "agent-*.scope", "agentconnect-*.scope"); left != "" {
		m.t.Errorf("units left after everything was stopped:\n%s", left)
	}
}

// run runs a command and gives all that it said.
func (m *machine) run(argv ...string) (said string, code int) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		m.t.Fatalf("%q: %v", argv, err)
	}
	if ctx.Err() != nil {
		m.t.Fatalf("%q did not end in time; it said: %s", argv, &out)
	}
	return out.String(), cmd.ProcessState.ExitCode()
}

// must is run for what has to work.
func (m *machine) must(argv ...string) string {
	m.t.Helper()
	said, code := m.run(argv...)
	if code != 0 {
		m.t.Fatalf("%q: exit code %d: %s", argv, code, said)
	}
	return said
}

// start adds an agent and starts it.
func (m *machine) start(id string, flags ...string) {
	m.t.Helper()
	m.add(id, flags...)
	m.must("agentconnect", "agent", "start", id)
}

func (m *machine) add(id string, flags ...string) {
	m.t.Helper()
	if !strings.Contains(strings.Join(flags, " "), "--command") {
		flags = append(flags, "--runtime", "selftest")
	}
	m.must(append([]string{"agentconnect", "agent", "add", id}, flags...)...)
}

// perl is the flags of an agent whose runtime is a script. It goes on until its stdin ends.
func perl(script string) []string {
	return []string{"--command", "/usr/bin/perl", "--arg=-e", "--arg=" + script + "; 1 while <STDIN>;"}
}

func (m *machine) status() control.Status {
	m.t.Helper()
	said, _ := m.run("agentconnect", "status", "--json")
	var s control.Status
	if err := json.Unmarshal([]byte(said), &s); err != nil {
		m.t.Fatalf("status: %v: %s", err, said)
	}
	return s
}

func (m *machine) agent(id string) control.AgentStatus {
	m.t.Helper()
	for _, a := range m.status().Agents {
		if a.ID == id {
			return a
		}
	}
	m.t.Fatalf("status does not know agent %s", id)
	return control.AgentStatus{}
}

// used is agent for one that runs and is accounted for.
func (m *machine) used(id string) control.AgentStatus {
	m.t.Helper()
	a := m.agent(id)
	if a.Usage == nil {
		m.t.Fatalf("agent %s: no word about what it uses: %+v", id, a)
	}
	return a
}

func (m *machine) show(unit, property string) string {
	m.t.Helper()
	return strings.TrimSpace(m.must("systemctl", "--user", "show", "--value", "-p", property, unit))
}

// group is the control group of a unit that runs.
func (m *machine) group(unit string) cgroup.Group {
	m.t.Helper()
	name := m.show(unit, "ControlGroup")
	if name == "" {
		m.t.Fatalf("%s has no control group", unit)
	}
	return cgroup.Group{Path: filepath.Join("/sys/fs/cgroup", name), Name: name}
}

// runtime is the first process of an agent's scope: as long as it is the same, the agent was
// not started anew.
func (m *machine) runtime(id string) int {
	m.t.Helper()
	pids, err := m.group("agent-" + id + ".scope").Processes()
	if err != nil || len(pids) == 0 {
		m.t.Fatalf("agent %s: processes %v, %v", id, pids, err)
	}
	return pids[0]
}

// value reads a file of a control group, in which there must be just this.
func (m *machine) value(g cgroup.Group, file, want string) {
	m.t.Helper()
	if got, ok := g.Value(file); !ok || got != want {
		m.t.Errorf("%s of %s: %q, want %q", file, g.Unit(), got, want)
	}
}

// until waits for something that is sure to come.
func (m *machine) until(what string, ok func() bool) {
	m.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(20 * time.Millisecond) { //nolint:forbidigo // looked for with a deadline; other processes make it
		if time.Now().After(end) {
			m.t.Fatalf("waited in vain for: %s", what)
		}
	}
}

// dropIn writes an administrator's change to units and has it read.
func (m *machine) dropIn(unit, name, text string) (path string) {
	m.t.Helper()
	path = filepath.Join(dropIns, unit+".d", name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		m.t.Fatal(err)
	}
	m.must("systemctl", "--user", "daemon-reload")
	return path
}

// says checks that text holds each of the words.
func (m *machine) says(what, text string, words ...string) {
	m.t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			m.t.Errorf("%s does not say %q: %s", what, w, text)
		}
	}
}

// is checks a number that may be unknown.
func is(t *testing.T, what string, got *uint64, want uint64) {
	t.Helper()
	if got == nil || *got != want {
		said := "not known"
		if got != nil {
			said = strconv.FormatUint(*got, 10)
		}
		t.Errorf("%s: %s, want %d", what, said, want)
	}
}

const mib = 1 << 20
