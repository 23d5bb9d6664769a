// An ACP client of an agent, as an editor has one.

package machinetest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
)

// editor is one `agentconnect acp ID` and what speaks through it.
type editor struct {
	m       *machine
	cmd     *exec.Cmd
	in      io.WriteCloser
	frames  chan frame
	next    int
	session string
}

type frame struct {
	ID     json.RawMessage `json:"id,omitempty"`
	Method string          `json:"method,omitempty"`
	Params struct {
		Update struct {
			Kind    string `json:"sessionUpdate"`
			Content struct {
				Text string `json:"text"`
			} `json:"content"`
		} `json:"update"`
	} `json:"params"`
	Result json.RawMessage `json:"result,omitempty"`
	Error  json.RawMessage `json:"error,omitempty"`
}

// attach attaches to the agent and opens a session.
func (m *machine) attach(id string) *editor {
	m.t.Helper()
	e := &editor{m: m, cmd: m.command(context.Background(), "agentconnect", "acp", id), frames: make(chan frame, 1<<16)}
	var err error
	if e.in, err = e.cmd.StdinPipe(); err != nil {
		m.t.Fatal(err)
	}
	out, err := e.cmd.StdoutPipe()
	if err != nil {
		m.t.Fatal(err)
	}
	if err := e.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer close(e.frames)
		r := bufio.NewReaderSize(out, 1<<16)
		for {
			line, err := r.ReadBytes('\n')
			var f frame
			if len(line) > 0 && json.Unmarshal(line, &f) == nil {
				e.frames <- f
			}
			if err != nil {
				return
			}
		}
	}()
	m.t.Cleanup(func() {
		e.in.Close()
		<-ended
		_ = e.cmd.Wait() // how it ended is no matter here
	})
	e.call("initialize", `{"protocolVersion":1,"clientCapabilities":{}}`)
	r, _ := e.call("session/new", fmt.Sprintf(`{"cwd":%q,"mcpServers":[]}`, root+"/agents/"+id+"/workspace"))
	var s struct {
		ID string `json:"sessionId"`
	}
	if err := json.Unmarshal(r, &s); err != nil || s.ID == "" {
		m.t.Fatalf("session/new: %s: %v", r, err)
	}
	e.session = s.ID
	return e
}

// begin sends a request.
func (e *editor) begin(method, params string) int {
	e.m.t.Helper()
	e.next++
	if _, err := fmt.Fprintf(e.in, `{"jsonrpc":"2.0","id":%d,"method":%q,"params":%s}`+"\n", e.next, method, params); err != nil {
		e.m.t.Fatalf("%s: the agent's pipe is closed: %v", method, err)
	}
	return e.next
}

// end waits for the answer; said is what the agent said meanwhile.
func (e *editor) end(id int) (result json.RawMessage, said string) {
	e.m.t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for {
		select {
		case f, ok := <-e.frames:
			switch {
			case !ok:
				e.m.t.Fatalf("the client was cut off in the middle of request %d, after %q", id, said)
			case f.Method != "":
				said += f.Params.Update.Content.Text
			case string(f.ID) == fmt.Sprint(id):
				if f.Error != nil {
					e.m.t.Fatalf("request %d: %s", id, f.Error)
				}
				return f.Result, said
			}
		case <-timer.C:
			e.m.t.Fatalf("no answer to request %d, after %q", id, said)
		}
	}
}

func (e *editor) call(method, params string) (json.RawMessage, string) {
	e.m.t.Helper()
	return e.end(e.begin(method, params))
}

// ask begins a turn.
func (e *editor) ask(text string) int {
	e.m.t.Helper()
	b, err := json.Marshal(map[string]any{"sessionId": e.session, "prompt": []any{map[string]string{"type": "text", "text": text}}})
	if err != nil {
		e.m.t.Fatal(err)
	}
	return e.begin("session/prompt", string(b))
}

// answer waits for the end of a turn and checks that nothing of it was lost.
func (e *editor) answer(id int, want string) {
	e.m.t.Helper()
	r, said := e.end(id)
	if !strings.Contains(string(r), "end_turn") || said != want {
		e.m.t.Errorf("the turn ended with %s and %d bytes, want %d", r, len(said), len(want))
	}
}
