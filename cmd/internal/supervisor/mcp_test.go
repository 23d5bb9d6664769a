package supervisor

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// A session carries the secrets of its servers as JSON, and a header is one line. What cannot be said
// so is left out and said by its name: a runtime that refuses it would print the value into the log.
func TestServersHaveTheirSecretsAsTheyAreOrAreLeftOut(t *testing.T) {
	for _, c := range []struct{ value, names string }{
		{"tok-en", "web local"}, {"naïve", "web local"}, {"tok-en\nof two lines\n", "local"}, {"tok-en\r", "local"}, {"tok-en\xff", ""}, {"caf\xc3", ""}, {"a\x00tok-en", ""},
	} {
		var log bytes.Buffer
		s, err := New(wire.Spec{
			Version: wire.Version, Agent: "alice", Socket: "/x", Launcher: "/x", Argv: []string{"/x"},
			MCP: []wire.MCPServer{
				{Name: "web", Transport: "http", URL: "https://example.com", Headers: []wire.Var{{Name: "Authorization", Secret: "T"}}},
				{Name: "local", Transport: "stdio", Argv: []string{"/x"}, Env: []wire.Var{{Name: "TOKEN", Secret: "T"}}},
			},
		}, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		s.secrets["T"] = wire.Secret{Name: "T", Value: []byte(c.value)}
		var names []string
		for _, v := range s.servers() {
			names = append(names, v.Name)
		}
		if got := strings.Join(names, " "); got != c.names {
			t.Errorf("%q: servers %q, want %q", c.value, got, c.names)
		}
		if left := 2 - len(names); strings.Count(log.String(), "left out") != left || strings.Contains(log.String(), "tok-en") || strings.Contains(log.String(), "caf") {
			t.Errorf("%q: %d are left out; the log says %s", c.value, left, log.String())
		}
	}
}
