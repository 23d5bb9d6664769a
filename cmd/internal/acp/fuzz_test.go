package acp

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// lineCheck is the other end of a stream that must carry one JSON object a line.
func lineCheck(t *testing.T, who string, r io.Reader) {
	l := NewLineReader(r)
	for {
		line, err := l.Next()
		if len(line) > 0 && (!json.Valid(line) || line[len(line)-1] != '\n') {
			t.Errorf("%s got %q", who, line)
		}
		if err != nil {
			return
		}
	}
}

// FuzzBroker feeds a broker what a runtime and two clients could send: whatever it is,
// the broker ends when it is told to, and every line it writes is one message.
func FuzzBroker(f *testing.F) {
	seed := func(rt, a, b string) { f.Add([]byte(rt), []byte(a), []byte(b)) }
	seed(`{"jsonrpc":"2.0","id":1,"result":{"protocolVersion":1,"agentCapabilities":{"sessionCapabilities":{"close":{}}},"authMethods":[{"type":"terminal"}]}}
{"jsonrpc":"2.0","id":2,"result":{"sessionId":"s"}}
{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s"}}
{"jsonrpc":"2.0","id":"p","method":"session/request_permission","params":{"sessionId":"s"}}
{"jsonrpc":"2.0","id":9,"method":"fs/read_text_file","params":{"sessionId":"s","path":"/ws/a"}}
{"jsonrpc":"2.0","id":3,"method":"elicitation/create","params":{"requestId":3}}
{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":"p"}}
`, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"clientCapabilities":{"fs":{"readTextFile":true},"terminal":true,"_meta":{"terminal-auth":true}}}}
{"jsonrpc":"2.0","id":1,"method":"session/new","params":{"cwd":"/ws","additionalDirectories":["/ws"]}}
{"jsonrpc":"2.0","id":"x","method":"session/prompt","params":{"sessionId":"s"}}
{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":"x"}}
`, `{"jsonrpc":"2.0","id":1,"method":"session/load","params":{"sessionId":"s","cwd":"/ws"}}
[]
junk
{"jsonrpc":"2.0","method":"session/cancel","params":{"sessionId":"s"}}
`)
	seed("banner\n\x1b[2J{\n", "{}\n", "")
	f.Fuzz(func(t *testing.T, rt, a, b []byte) {
		brokerIn, rtIn := net.Pipe()
		rtOut, brokerOut := net.Pipe()
		br := NewBroker(Options{RuntimeIn: brokerIn, RuntimeOut: brokerOut, Sandboxed: true, ClientFiles: "workspace", Paths: anyPath{[]string{"/ws"}}})
		var wg sync.WaitGroup
		wg.Go(func() { br.Run(context.Background()) })
		wg.Go(func() { lineCheck(t, "runtime", rtIn) })
		feeds := [][]byte{a, b}
		conns := make([]net.Conn, len(feeds))
		for i := range feeds {
			mine, its := net.Pipe()
			conns[i] = mine
			wg.Go(func() { br.Attach(context.Background(), its, "c") })
			wg.Go(func() { lineCheck(t, "client", mine) })
		}
		// Line by line in turn, so that the inputs meet.
		parts := [][][]byte{bytes.SplitAfter(a, newline), bytes.SplitAfter(b, newline), bytes.SplitAfter(rt, newline)}
		outs := []net.Conn{conns[0], conns[1], rtOut}
		var feed sync.WaitGroup
		feed.Go(func() {
			for i := 0; ; i++ {
				more := false
				for j, p := range parts {
					if i < len(p) && len(p[i]) > 0 {
						more = true
						outs[j].SetWriteDeadline(time.Now().Add(10 * time.Second))
						outs[j].Write(p[i])
					}
				}
				if !more {
					return
				}
			}
		})
		feed.Wait()
		conns[0].Close()
		rtOut.Close()
		rtIn.SetReadDeadline(time.Now().Add(10 * time.Second))
		over := make(chan struct{})
		go func() { br.Fail("over"); wg.Wait(); close(over) }()
		select {
		case <-over:
		case <-time.After(10 * time.Second):
			t.Fatal("does not end")
		}
	})
}
