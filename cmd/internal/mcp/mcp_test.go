package mcp

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDefinitionsAreRead(t *testing.T) {
	for text, want := range map[string]Server{
		`{"command":"npx","args":["-y","x"],"env":[{"name":"A","value":"b"},{"name":"T","secret":"TOK"}]}`:          {Name: "s", Transport: Stdio, Command: "npx", Args: []string{"-y", "x"}, Env: Vars{{"A", "b", ""}, {"T", "", "TOK"}}},
		`{"command":"/usr/bin/x","host":true,"sandbox":true,"network":"none","env":{"A":"b","T":{"secret":"TOK"}}}`: {Name: "s", Transport: Stdio, Command: "/usr/bin/x", Host: true, Sandbox: true, Network: "none", Env: Vars{{"A", "b", ""}, {"T", "", "TOK"}}},
		`{"transport":"http","url":"https://h/mcp","headers":[{"name":"Authorization","secret":"TOK"}]}`:            {Name: "s", Transport: HTTP, URL: "https://h/mcp", Headers: Vars{{"Authorization", "", "TOK"}}},
		`{"type":"sse","url":"http://h/"}`: {Name: "s", Transport: SSE, URL: "http://h/"},
	} {
		got, err := Parse("s", json.RawMessage(text))
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if diff := cmp.Diff(want, *got); diff != "" {
			t.Errorf("%s: %s", text, diff)
		}
	}
	for text, why := range map[string]string{
		`{}`: "needs a command", `{"command":"x","hots":true}`: "host", `{"command":"./x"}`: "absolute", `{"command":"x","sandbox":true}`: "goes with host",
		`{"transport":"http"}`: "http://", `{"transport":"http","url":"https://u:p@h/"}`: "password", `{"transport":"http","url":"https://h/","host":true}`: "outside already",
		`{"transport":"ws","url":"https://h/"}`: "stdio, http or sse", `{"command":"x","env":{"A":{"secret":"T","value":"v"}}}`: "one of them", `{"command":"x","env":{"A":{}}}`: "one of them",
		`{"command":"x","env":[{"value":"v"}]}`: "name", `{"command":"x","env":{"LD_PRELOAD":"v"}}`: "boundary", `{"command":"x","env":[{"name":"A","value":"1"},{"name":"A","value":"2"}]}`: "twice",
		`{"transport":"http","url":"https://h/","headers":{"A":"x\r\nB: y"}}`: "line break", `{"command":"x","name":"other"}`: "names itself", `{"command":"x","network":"host"}`: "goes with sandbox",
		`{"command":"x","host":true,"sandbox":true,"allow":["a"]}`: "go with network", `{"command":"x","host":true,"sandbox":true,"network":"host","deny":["a"]}`: "go with network",
		`{"transport":"http","url":"https://h/","allow":["a"]}`: "go with the transport stdio",
	} {
		if got, err := Parse("s", json.RawMessage(text)); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %+v, %v; want %q", text, got, err, why)
		}
	}
}

func TestAnAgentsList(t *testing.T) {
	for text, want := range map[string]string{
		`["a","b"]`: "a b", `[{"name":"a","command":"x"},"b"]`: "a b", `{"a":{"command":"x"}}`: "a", `[]`: "", `null`: "",
	} {
		got, err := Refs(json.RawMessage(text))
		var names []string
		for _, r := range got {
			names = append(names, r.Name)
		}
		if err != nil || strings.Join(names, " ") != want {
			t.Errorf("%s: %v %v", text, names, err)
		}
	}
	for _, text := range []string{`"a"`, `[1]`, `[{}]`, `["a","A"]`, `["agentconnect"]`, `["AgentConnect-x"]`, `["a b"]`, `["../a"]`, `{"a":{},"a":{}}`} {
		if got, err := Refs(json.RawMessage(text)); err == nil {
			t.Errorf("%s was taken: %v", text, got)
		}
	}
}

func FuzzRefs(f *testing.F) {
	f.Add([]byte(`["a",{"name":"b","command":"x","env":{"T":{"secret":"S"}}}]`))
	f.Add([]byte(`{"a":{"transport":"http","url":"https://h/","headers":[{"name":"A","value":"b"}]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		refs, err := Refs(b)
		if err != nil {
			return
		}
		for _, r := range refs {
			if Reserved(r.Name) {
				t.Errorf("%q gives a reserved name", b)
			}
			if s, err := Parse(r.Name, r.Raw); err == nil && (s.Name != r.Name || s.Transport == Stdio && s.Command == "") {
				t.Errorf("%q gives %+v", b, s)
			}
		}
	})
}

func TestRedactedDefinitionsShowNoValue(t *testing.T) {
	const text = `["a",{"name":"b","command":"x","args":["--key","hush"],"url":"https://h/?key=hush","env":{"secret":"hush","name":"hush","T":{"secret":"REF"},"V":{"value":"hush"}},"headers":[{"name":"N","value":"hush"},"hush",["hush"]]},{"env":"hush"}]`
	got := string(Redact(json.RawMessage(text), "(set)"))
	if strings.Contains(got, "hush") || !strings.Contains(got, "REF") || !strings.Contains(got, `"N"`) || !strings.Contains(got, `"command":"x"`) {
		t.Error(got)
	}
}
