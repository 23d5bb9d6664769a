package acp

import (
	"strings"
	"testing"
)

const threeModes = `{"sessionId":"s1","modes":{"currentModeId":"default","availableModes":[{"id":"default","name":"D"},{"id":"plan","name":"P"},{"id":"bypassPermissions","name":"B"}]},"x":1}`

func modeRig(t *testing.T, mode string) (*rig, *end) {
	r := newRig(t, func(o *Options) { o.Mode = mode })
	return r, r.ready("zed")
}

func TestSessionIsInTheOperatorsModeBeforeItsClientHearsOfIt(t *testing.T) {
	for _, method := range []string{"session/new", "session/load"} {
		t.Run(method, func(t *testing.T) {
			r, c := modeRig(t, "plan")
			params := `{"cwd":"/ws","mcpServers":[]}`
			if method == "session/load" {
				params = `{"sessionId":"s1","cwd":"/ws","mcpServers":[]}`
			}
			c.call("7", method, params)
			m := r.rt.want(method)
			r.rt.result(string(m.ID), threeModes)
			m = r.rt.want("session/set_mode")
			if got := string(m.Params); got != `{"sessionId":"s1","modeId":"plan"}` {
				t.Errorf("params %s", got)
			}
			r.rt.result(string(m.ID), `{}`)
			c.wantRaw(`{"jsonrpc":"2.0","id":7,"result":` + strings.Replace(threeModes, `"currentModeId":"default"`, `"currentModeId":"plan"`, 1) + `}`)
			// The session is the client's own: it may choose another one.
			c.call("8", "session/set_mode", `{"sessionId":"s1","modeId":"default"}`)
			m = r.rt.want("session/set_mode")
			r.rt.result(string(m.ID), `{}`)
			c.wantRaw(`{"jsonrpc":"2.0","id":8,"result":{}}`)
		})
	}
}

func TestSessionInTheOperatorsModeAlreadyIsNotAsked(t *testing.T) {
	r, c := modeRig(t, "default")
	c.call("7", "session/new", `{"cwd":"/ws"}`)
	m := r.rt.want("session/new")
	r.rt.result(string(m.ID), threeModes)
	c.wantRaw(`{"jsonrpc":"2.0","id":7,"result":` + threeModes + `}`)
}

func TestNoSessionInAnotherModeThanTheOperators(t *testing.T) {
	t.Run("unknown", func(t *testing.T) {
		r, c := modeRig(t, "planning")
		c.call("7", "session/new", `{"cwd":"/ws"}`)
		m := r.rt.want("session/new")
		r.rt.result(string(m.ID), threeModes)
		r.rt.want("session/close")
		c.wantError("7", CodeInternal, `"planning"`, "default, plan, bypassPermissions", "--permission-mode")
		c.call("8", "session/prompt", `{"sessionId":"s1","prompt":[]}`)
		c.wantError("8", CodeInvalidRequest, "not open")
	})
	t.Run("refused", func(t *testing.T) {
		r, c := modeRig(t, "plan")
		c.call("7", "session/new", `{"cwd":"/ws"}`)
		m := r.rt.want("session/new")
		r.rt.result(string(m.ID), `{"sessionId":"s1"}`)
		m = r.rt.want("session/set_mode")
		r.rt.send(`{"jsonrpc":"2.0","id":` + string(m.ID) + `,"error":{"code":-32601,"message":"method not found"}}`)
		r.rt.want("session/close")
		c.wantError("7", CodeInternal, "the runtime refused: method not found")
	})
	t.Run("the runtime ends meanwhile", func(t *testing.T) {
		r, c := modeRig(t, "plan")
		c.call("7", "session/new", `{"cwd":"/ws"}`)
		m := r.rt.want("session/new")
		r.rt.result(string(m.ID), threeModes)
		r.rt.want("session/set_mode")
		go r.b.Fail("it ended")
		c.wantError("7", CodeInternal, "it ended")
	})
}

func TestWhatComesWhileASessionIsPutIntoItsModeComesBehindItsAnswer(t *testing.T) {
	r, c := modeRig(t, "plan")
	c.call("7", "session/new", `{"cwd":"/ws"}`)
	m := r.rt.want("session/new")
	r.rt.result(string(m.ID), `{"sessionId":"s1"}`)
	early := r.update("s1", "the commands that there are")
	m = r.rt.want("session/set_mode")
	r.rt.result(string(m.ID), `{}`)
	c.wantRaw(`{"jsonrpc":"2.0","id":7,"result":{"sessionId":"s1"}}`)
	c.wantRaw(early)
	c.wantRaw(r.update("s1", "later"))
}
