package supervisor

import (
	"bytes"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

func TestGuestRequestsAreReadStrictly(t *testing.T) {
	good := `{"v":1,"op":"credential","credential":{"action":"get","protocol":"https","host":"h","path":"a/b"}}`
	if r, err := readGuestRequest(strings.NewReader(good + "\nnext")); err != nil || r.Credential.Host != "h" {
		t.Fatalf("%+v %v", r, err)
	}
	rest := strings.NewReader(`{"v":1,"op":"mcp","name":"x"}` + "\nstream")
	if _, err := readGuestRequest(rest); err != nil || rest.Len() != len("stream") {
		t.Errorf("what follows the line was read too: %d bytes left, %v", rest.Len(), err)
	}
	for _, text := range []string{
		"", "{}", "[]", `{"v":2,"op":"mcp","name":"x"}`, `{"v":1}`, `{"v":1,"op":"mcp"}`, `{"v":1,"op":"credential"}`, `{"v":1,"op":"mcp","name":"x","name":"y"}`,
		`{"v":1,"op":"mcp","name":"x","extra":1}`, `{"v":1,"op":"mcp","Name":"x"}`, `{"v":1,"op":"mcp","name":"x"} {}`, `{"v":1,"op":"mcp","name":"\xff"}`,
		`{"v":1,"op":"credential","name":"x","credential":{"action":"get"}}`, `{"v":1,"op":"mcp","name":"` + strings.Repeat("x", wire.MaxGuestRequest) + `"}`,
	} {
		if r, err := readGuestRequest(strings.NewReader(text + "\n")); err == nil && (r.Op == wire.OpMCP || r.Op == wire.OpCredential) {
			t.Errorf("%.60s was taken: %+v", text, r)
		}
	}
	if _, err := readGuestRequest(strings.NewReader(good)); err == nil {
		t.Error("a line without its end was taken")
	}
}

func FuzzGuestRequest(f *testing.F) {
	f.Add([]byte(`{"v":1,"op":"credential","credential":{"action":"get","protocol":"https","host":"h","path":"a/b"}}`))
	f.Add([]byte(`{"v":1,"op":"mcp","name":"x"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := readGuestRequest(bytes.NewReader(append(b, '\n')))
		if err == nil && (r.Version != wire.GuestVersion || (r.Op == wire.OpCredential) != (r.Credential != nil) || (r.Op == wire.OpMCP) != (r.Name != "")) {
			t.Errorf("%q gives %+v", b, r)
		}
	})
}
