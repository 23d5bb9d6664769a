package supervisor

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

func TestGuestRequestsAreReadStrictly(t *testing.T) {
	good := `{"v":1,"op":"credential","credential":{"action":"get","protocol":"https","host":"h","path":"a/b"}}`
	for _, r := range []io.Reader{strings.NewReader(good + "\n"), iotest.OneByteReader(strings.NewReader(good + "\n")), iotest.DataErrReader(strings.NewReader(good + "\n"))} {
		if r, err := readGuestRequest(r); err != nil || r.Credential.Host != "h" {
			t.Fatalf("%+v %v", r, err)
		}
	}
	for _, text := range []string{
		"", "{}", "[]", `{"v":2,"op":"mcp","name":"x"}`, `{"v":1}`, `{"v":1,"op":"mcp"}`, `{"v":1,"op":"credential"}`, `{"v":1,"op":"mcp","name":"x","name":"y"}`,
		`{"v":1,"op":"mcp","name":"x","extra":1}`, `{"v":1,"op":"mcp","Name":"x"}`, `{"v":1,"op":"mcp","name":"x"} {}`, `{"v":1,"op":"mcp","name":"\xff"}`,
		good + "\nnext", `{"v":1,"op":"mcp","name":"x"}` + "\nstream",
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

// reads counts how often it is asked.
type reads struct {
	io.Reader
	n int
}

func (r *reads) Read(p []byte) (int, error) {
	r.n++
	return r.Reader.Read(p)
}

// An agent writes a request at once; to be read byte by byte it would cost us a thousand times what
// it costs the agent, on a processor that the agent's limits do not count.
func TestALongRequestIsReadInFewPieces(t *testing.T) {
	r := &reads{Reader: strings.NewReader(strings.Repeat("x", 2*wire.MaxGuestRequest))}
	if _, err := readGuestRequest(r); err == nil || r.n > 20 {
		t.Errorf("%d reads, %v", r.n, err)
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
