package agent

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"agentconnect.md/sandbox/sandbox"
)

func TestIDRule(t *testing.T) {
	for _, id := range []string{"a", "0", "alice", "a-b", "a_b", "9lives", "a--", strings.Repeat("a", 63)} {
		if err := ValidateID(id); err != nil {
			t.Errorf("%q: %v", id, err)
		}
	}
	for _, id := range []string{
		"", "../x", "a@b", "x.service", ".", "..", "a.b", "Alice", "alicE", "ä", "а", "-a", "_a", "a b", "a/b", "a\n", "a\x00",
		strings.Repeat("a", 64), strings.Repeat("a", 1<<16),
	} {
		err := ValidateID(id)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "1 to 63 characters") || len(err.Error()) > 600 {
			t.Errorf("%.20q: %v, want an error that tells the rule", id, err)
		}
	}
}

func TestMemorySizes(t *testing.T) {
	for in, want := range map[string]uint64{
		"16M": 16 << 20, "2G": 2 << 30, "1.5G": 3 << 29, "1T": 1 << 40, "33554432": 32 << 20, "20480K": 20 << 20,
	} {
		if got, err := ParseMemory(in); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", in, got, err, want)
		}
	}
	for in, want := range map[string]string{
		"": "is not a memory size", "2": "is a unit missing", "2g": `write "2G"`, "2GB": `write "2G"`, "2GiB": `write "2G"`, "-1G": "is not", "50%": "is not", "infinity": "is not",
		"9999999T": "more memory than there can be", "99999999999999999999": "is not", "1e9": "is not", " 2G": "is not", "２G": "is not",
	} {
		if got, err := ParseMemory(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %d, %v; want %q", in, got, err, want)
		}
	}
}

func TestCPULimits(t *testing.T) {
	for in, want := range map[string]int{"1%": 1, "200%": 200, "6400%": 6400} {
		if got, err := ParseCPU(in); err != nil || got != want {
			t.Errorf("%q: %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "0%", "200", "-1%", "2.5%", "99999999%", "%", "200 %"} {
		if got, err := ParseCPU(in); err == nil {
			t.Errorf("%q: %d, want an error", in, got)
		}
	}
}

func valid() *Agent { return &Agent{ID: "alice", Runtime: "gemini"} }

func TestValidateTellsEverythingThatIsWrong(t *testing.T) {
	if err := valid().Validate(); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, want string
		change     func(*Agent)
	}{
		{"neither runtime nor command", "neither runtime nor command", func(a *Agent) { a.Runtime = "" }},
		{"both", "both runtime and command", func(a *Agent) { a.Command = "x" }},
		{"runtime like a path", "not a runtime's name", func(a *Agent) { a.Runtime = "../x" }},
		{"args without command", "args without command", func(a *Agent) { a.Args = []string{"x"} }},
		{"relative command", "absolute path", func(a *Agent) { a.Runtime, a.Command = "", "./x" }},
		{"command with NUL", "NUL", func(a *Agent) { a.Runtime, a.Command = "", "/x\x00y" }},
		{"command that is not UTF-8", "not UTF-8", func(a *Agent) { a.Runtime, a.Command = "", "/x\xff" }},
		{"argument with NUL", "args[0]", func(a *Agent) { a.Runtime, a.Command, a.Args = "", "x", []string{"\x00"} }},
		{"workspace above", "stays inside", func(a *Agent) { a.Workspace = "../x" }},
		{"workspace through the middle", "stays inside", func(a *Agent) { a.Workspace = "a/../../x" }},
		{"the agent directory as workspace", "stays inside", func(a *Agent) { a.Workspace = "." }},
		{"workspace with a tilde", "not expanded", func(a *Agent) { a.Workspace = "~/src" }},
		{"unclean workspace", "clean path", func(a *Agent) { a.Workspace = "/a/../b" }},
		{"root as workspace", "clean path", func(a *Agent) { a.Workspace = "/" }},
		{"relative grant", "grants[0].path", func(a *Agent) { a.Grants = []sandbox.Grant{{Path: "x", Access: "ro"}} }},
		{"unclean grant", `write it as "/x"`, func(a *Agent) { a.Grants = []sandbox.Grant{{Path: "/x/", Access: "ro"}} }},
		{"grant without access", "grants[0].access", func(a *Agent) { a.Grants = []sandbox.Grant{{Path: "/x"}} }},
		{"grant twice", "granted twice", func(a *Agent) { a.Grants = []sandbox.Grant{{Path: "/x", Access: "ro"}, {Path: "/x", Access: "rw"}} }},
		{"read", "write system or host", func(a *Agent) { a.Read = "all" }},
		{"nesting", "write on or off", func(a *Agent) { a.Nesting = "yes" }},
		{"network", "write none or allowlist or open or host", func(a *Agent) { a.Network.Mode = "full" }},
		{"deny", "network.deny[0]", func(a *Agent) { a.Network.Deny = []string{"*"} }},
		{"ask", "network.ask", func(a *Agent) { a.Network.Ask = "30" }},
		{"ask too long", "network.ask", func(a *Agent) { a.Network.Ask = "1h" }},
		{"allow", "network.allow[1]", func(a *Agent) { a.Network.Allow = []string{"example.com", "http://x"} }},
		{"memory", "limits.memory", func(a *Agent) { a.Limits.Memory = "2" }},
		{"cpu", "limits.cpu", func(a *Agent) { a.Limits.CPU = "2" }},
		{"tasks", "limits.tasks", func(a *Agent) { a.Limits.Tasks = -1 }},
		{"env name", `env "A B"`, func(a *Agent) { a.Env = map[string]string{"A B": "x"} }},
		{"env name with =", `env "A=B"`, func(a *Agent) { a.Env = map[string]string{"A=B": "x"} }},
		{"empty env name", `env ""`, func(a *Agent) { a.Env = map[string]string{"": "x"} }},
		{"env value with NUL", "env A: the value has a NUL byte", func(a *Agent) { a.Env = map[string]string{"A": "x\x00"} }},
		{"linker variables", "LD_PRELOAD", func(a *Agent) { a.Env = map[string]string{"LD_PRELOAD": "/tmp/x.so"} }},
		{"linker variables by runtimeOverrides", "LD_PRELOAD", func(a *Agent) {
			a.RuntimeOverrides = json.RawMessage(`{"env": [{"name": "LD_PRELOAD", "value": "x"}]}`)
		}},
		{"runtimeOverrides", "runtimeOverrides", func(a *Agent) { a.RuntimeOverrides = json.RawMessage(`[]`) }},
		{"mcpServers", "mcpServers", func(a *Agent) { a.MCPServers = json.RawMessage(`"x"`) }},
		{"memory kind", "write managed or native or none", func(a *Agent) { a.Memory = "2G" }},
		{"client files", "acp.clientFiles", func(a *Agent) { a.ACP.ClientFiles = "all" }},
		{"name with an escape sequence", "control characters", func(a *Agent) { a.Name = "\x1b[2J" }},
		{"long name", "longer than", func(a *Agent) { a.Name = strings.Repeat("x", 257) }},
		{"id", "1 to 63 characters", func(a *Agent) { a.ID = "../x" }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := valid()
			tt.change(a)
			err := a.Validate()
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v; want %q", err, tt.want)
			}
		})
	}
	a := valid()
	a.Read, a.Nesting = "x", "y"
	if err := a.Validate(); !strings.Contains(err.Error(), "read ") || !strings.Contains(err.Error(), "nesting ") {
		t.Errorf("only one of two faults: %v", err)
	}
	a = valid()
	a.Env = map[string]string{"TOKEN": "s3cret\x00"}
	if err := a.Validate(); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("an error shows a secret: %v", err)
	}
}

func TestParseRefusesWhatAPersonMayMistype(t *testing.T) {
	for in, want := range map[string]string{
		`{"id": "a", "runInSandbx": false}`:                      `did you mean "runInSandbox"?`,
		`{"id": "a", "RunInSandbox": false}`:                     `did you mean "runInSandbox"?`,
		`{"id": "a", "network": {"moed": "none"}}`:               `did you mean "network.mode"?`,
		`{"id": "a", "grants": [{"path": "/x", "acces": "ro"}]}`: `did you mean "grants[0].access"?`,
		`{"id": "a", "id": "b"}`:                                 "twice",
		`{"id": "a"} trailing`:                                   "text after",
		`{"id": "a", "runInSandbox": "false"}`:                   "must be true or false",
		`{"id": "a", "workspace": 1}`:                            "workspace must be a string",
		`{"id": "a", "workspace": {"path": 1}}`:                  "workspace.path must be a string",
		`{"id": "a", "args": [null]}`:                            "must not be null",
		`{"id": "a`:                                              "ends in the middle",
		``:                                                       "empty",
		"{\"id\": \"\xff\"}":                                     "not valid UTF-8",
		`{"name": "` + strings.Repeat("x", MaxSize) + `"}`:       "more than the 1048576 allowed",
	} {
		a, err := Parse([]byte(in))
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %+v, %v; want %q", in, a, err, want)
		}
	}
}

// foreign is an agent.json as AgentConnect writes it.
const foreign = `{
  "id": "a0000000-0000-4000-8000-000000000001", "name": "demo", "status": "active", "pause": false,
  "runtime": "claude-acp", "description": "it's <b>", "permissionMode": "default",
  "runtimeOverrides": {"model": "opus", "env": [{"name": "MODE", "value": "demo"}], "secrets": [{"name": "TOKEN", "value": "t"}]},
  "mcpServers": ["search"], "skills": [], "callPolicy": "all", "runInSandbox": true,
  "memory": {"provider": "managed", "autoDistill": true},
  "workspace": {"mode": "from-scratch", "isolation": "shared", "path": "workspace", "gitBranch": "main"},
  "integrations": [{"id": "i", "platform": "slack"}], "crons": [],
  "output": {"mode": "low"}, "permissions": {"policy": "ask", "autoApprove": []}
}`

func TestAgentConnectsOwnFileIsAcceptedAndKept(t *testing.T) {
	a, err := Parse([]byte(foreign))
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Validate(); err != nil {
		t.Fatal(err)
	}
	if a.Workspace != "workspace" || a.Memory != "managed" || !a.Sandboxed() {
		t.Errorf("workspace %q, memory %q, sandboxed %v", a.Workspace, a.Memory, a.Sandboxed())
	}
	env, err := a.ExtraEnv()
	if err != nil || !cmp.Equal(env, map[string]string{"MODE": "demo", "TOKEN": "t"}) {
		t.Errorf("environment %v, %v", env, err)
	}
	if diff := cmp.Diff([]string{"callPolicy", "crons", "description", "integrations", "output", "pause", "permissions", "skills", "status"}, a.Unused()); diff != "" {
		t.Error(diff)
	}
	a.Workspace, a.Name = "/srv/app", "other"
	out, err := a.Encode()
	if err != nil {
		t.Fatal(err)
	}
	var want, got map[string]any
	if err := json.Unmarshal([]byte(foreign), &want); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatal(err)
	}
	want["name"] = "other"
	want["workspace"].(map[string]any)["path"] = "/srv/app"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rewritten (-want +got):\n%s", diff)
	}
}

func TestExternalMemoryIsNoneHereAndKept(t *testing.T) {
	a, err := Parse([]byte(`{"id": "a", "runtime": "x", "memory": {"provider": "external", "connectionId": "c"}}`))
	if err != nil || a.Memory != "none" || a.Validate() != nil {
		t.Fatalf("%+v, %v", a, err)
	}
	out, err := a.Encode()
	if err != nil || !strings.Contains(string(out), `"provider": "external"`) {
		t.Errorf("%s, %v", out, err)
	}
}

func TestSandboxIsOnWithoutAWordAndWrittenAlways(t *testing.T) {
	off := false
	for in, want := range map[string]bool{`{"id": "a"}`: true, `{"id": "a", "runInSandbox": null}`: true, `{"id": "a", "runInSandbox": false}`: false} {
		a, err := Parse([]byte(in))
		if err != nil || a.Sandboxed() != want {
			t.Errorf("%s: %v, %v", in, a.Sandboxed(), err)
		}
	}
	for _, a := range []*Agent{{ID: "a"}, {ID: "a", RunInSandbox: &off}} {
		out, err := a.Encode()
		if err != nil || !strings.Contains(string(out), `"runInSandbox"`) {
			t.Errorf("%s, %v", out, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(foreign))
	f.Add([]byte(`{"id": "alice", "command": "/x", "args": ["a"], "grants": [{"path": "/x", "access": "rw"}], "limits": {"memory": "2G", "cpu": "200%", "tasks": 5}, "network": {"mode": "allowlist", "allow": ["*.example.com:443"]}, "env": {"A": "b"}, "acp": {"clientFiles": "workspace"}}`))
	f.Add([]byte(`{"id": "a", "command": "x", "grants": []}`))
	none := cmpopts.EquateEmpty() // an empty list and none are written alike
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := Parse(data)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Errorf("%v is not ErrInvalid", err)
			}
			return
		}
		if a.Validate() != nil {
			return
		}
		out, err := a.Encode()
		if err != nil {
			t.Fatalf("%q is valid and cannot be written: %v", data, err)
		}
		b, err := Parse(out)
		if err != nil {
			t.Fatalf("%q written as %q: %v", data, out, err)
		}
		if b.Validate() != nil || a.Sandboxed() != b.Sandboxed() || a.Workspace != b.Workspace || a.Command != b.Command ||
			!cmp.Equal(a.Grants, b.Grants, none) || !cmp.Equal(a.Env, b.Env, none) || !cmp.Equal(a.Unused(), b.Unused(), none) {
			t.Errorf("%q read again as %+v, was %+v", data, b, a)
		}
	})
}
