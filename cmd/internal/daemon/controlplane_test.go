package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/controlplane/cptest"
)

func TestTheKeyIsFoundWhereItIsKept(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	key, empty := file("key", "from-file\n"), file("empty", "\n")
	credential := file("credentials/"+CredentialName, "from-credential")
	given := []string{"CREDENTIALS_DIRECTORY=" + filepath.Dir(credential)}
	for _, c := range []struct {
		conf config.ControlPlane
		env  []string
		want string // the key, or a word of the error
		bad  bool
	}{
		{config.ControlPlane{Key: "from-config", KeyFile: key}, given, "from-config", false},
		{config.ControlPlane{KeyFile: key}, given, "from-file", false},
		{config.ControlPlane{}, given, "from-credential", false},
		{config.ControlPlane{}, nil, "agentconnect login", true},
		{config.ControlPlane{KeyFile: empty}, nil, "empty", true},
		{config.ControlPlane{KeyFile: filepath.Join(dir, "none")}, nil, "none", true},
	} {
		r := &remote{d: &Daemon{cfg: &config.Config{ControlPlane: c.conf}, o: Options{Environ: c.env}}}
		got, err := r.key()
		if (err != nil) != c.bad || !c.bad && got != c.want || c.bad && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %q, %v", c.conf, got, err)
		}
	}
	// It is read for each handshake: a new one counts without a restart.
	r := &remote{d: &Daemon{cfg: &config.Config{ControlPlane: config.ControlPlane{KeyFile: key}}}}
	file("key", "renewed")
	if got, err := r.key(); got != "renewed" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// What cannot be made of a placed agent's new configuration ends the old one, too.
func TestPlacedAgentWhoseConfigurationCannotBeUsedEnds(t *testing.T) {
	server := cptest.New(t)
	s := newSite(t, fmt.Sprintf(`{"controlPlane":{"url":%q,"key":%q},"runtimes":{"fake":{"command":"/usr/bin/env","args":["ready","wait"]}}}`, server.URL(), cptest.Key))
	c, _ := s.start()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	conn := server.Ready(ctx)
	uuid := cp.NewID()
	place := func(revision, mode string) (a cp.Ack) {
		t.Helper()
		e, err := conn.Ask(ctx, "agent/upsert", map[string]any{"agentId": uuid, "spec": map[string]any{
			"agentId": uuid, "orgId": "org_example", "name": "placed", "runtime": "fake", "configRevision": revision, "runInSandbox": true,
			"env": map[string]string{}, "secrets": map[string]string{}, "mcpServers": []string{}, "workspace": map[string]any{"mode": mode},
		}})
		if err != nil || json.Unmarshal(e.Payload, &a) != nil {
			t.Fatalf("%s %s, %v", e.Type, e.Payload, err)
		}
		return a
	}
	if a := place("1", "scratch"); !a.OK {
		t.Fatal(a.Reason)
	}
	st, err := c.Start(ctx, "placed")
	if err != nil || st.State != control.StateRunning {
		t.Fatalf("%+v, %v", st, err)
	}
	if a := place("2", "floppy"); a.OK || !strings.Contains(a.Reason, "floppy") {
		t.Fatalf("%+v", a)
	}
	for end := time.Now().Add(20 * time.Second); alive(st.PID); time.Sleep(5 * time.Millisecond) { //nolint:forbidigo // asked with a deadline
		if time.Now().After(end) {
			t.Fatal("it goes on as it was")
		}
	}
	if a := place("3", "scratch"); !a.OK {
		t.Fatal(a.Reason)
	}
	s.until(c, "placed", control.StateRunning)
}

// A control plane names programs. Where a program lies decides what is shown with it: of a script
// its folder, which is the user's own.
func TestAControlPlaneOpensNoFolderByTheNameOfAProgram(t *testing.T) {
	server := cptest.New(t)
	s := newSite(t, fmt.Sprintf(`{"controlPlane":{"url":%q,"key":%q},"runtimes":{"fake":{"command":"/usr/bin/env","args":["ready","wait"]}}}`, server.URL(), cptest.Key))
	project := filepath.Join(s.options.Config.Home, "work", "project")
	if err := os.MkdirAll(project, 0o700); err != nil {
		t.Fatal(err)
	}
	s.write(filepath.Join(project, "tool"), "#!/usr/bin/perl\n", 0o700)
	s.write(filepath.Join(project, "plans.txt"), "nobody's business", 0o600)
	c, _ := s.start()
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	conn := server.Ready(ctx)
	conn.Tell("mcpserver/upsert", map[string]any{"name": "spy", "transport": "stdio", "command": filepath.Join(project, "tool"), "args": []string{}, "env": []any{}, "headers": []any{}})
	conn.Tell("mcpserver/upsert", map[string]any{"name": "plain", "transport": "stdio", "command": "env", "args": []string{}, "env": []any{}, "headers": []any{}})
	uuid := cp.NewID()
	e, err := conn.Ask(ctx, "agent/upsert", map[string]any{"agentId": uuid, "spec": map[string]any{
		"agentId": uuid, "orgId": "org_example", "name": "placed", "runtime": "fake", "configRevision": "1", "runInSandbox": true,
		"env": map[string]string{}, "secrets": map[string]string{}, "mcpServers": []string{"spy", "plain"},
	}})
	if err != nil || e.Type != "ack" {
		t.Fatalf("%s %s, %v", e.Type, e.Payload, err)
	}
	raw, err := c.Placed(ctx, "placed")
	if err != nil {
		t.Fatal(err)
	}
	a, err := agent.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(s.store.Dirs("placed").Workspace, 0o700); err != nil { // as its start does
		t.Fatal(err)
	}
	b := &Builder{Config: s.options.Config, Store: s.store, Programs: s.options.Programs, Host: s.options.Host, Environ: s.options.Environ}
	p, err := b.Policy(a)
	if err != nil {
		t.Fatal(err)
	}
	for _, shown := range p.Expose {
		if strings.HasPrefix(shown, s.options.Config.Home) {
			t.Errorf("the control plane opened %s", shown)
		}
	}
	if !strings.Contains(string(raw), "plain") {
		t.Errorf("a server that it named by its program is gone: %s", raw)
	}
	st, err := c.Status(ctx)
	if err != nil || len(st.Agents) != 1 || !strings.Contains(strings.Join(st.Agents[0].Notes, "\n"), "names the path") {
		t.Errorf("status does not say that it is skipped: %+v, %v", st, err)
	}
}
