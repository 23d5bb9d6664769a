package acp

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// relayRig is a broker on real pipes and a Unix socket, as a supervisor has them.
func relayRig(b *testing.B) (rt io.Writer, rtIn *bufio.Reader, client net.Conn, cr *bufio.Reader) {
	inR, inW := osPipe(b)
	outR, outW := osPipe(b)
	br := NewBroker(Options{RuntimeIn: inW, RuntimeOut: outR, Sandboxed: true, Paths: anyPath{[]string{"/"}}})
	ctx, cancel := context.WithCancel(context.Background())
	run := make(chan error, 1)
	go func() { run <- br.Run(ctx) }()
	near, far := socketPair(b)
	go br.Attach(ctx, far, "bench")
	rtIn, cr = bufio.NewReaderSize(inR, 1<<16), bufio.NewReaderSize(near, 1<<16)
	step := func(w io.Writer, r *bufio.Reader, line string) {
		io.WriteString(w, line+"\n")
		if _, err := r.ReadString('\n'); err != nil {
			b.Fatal(err)
		}
	}
	step(near, rtIn, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":1}}`)
	step(outW, cr, `{"jsonrpc":"2.0","id":1,"result":{}}`)
	step(near, rtIn, `{"jsonrpc":"2.0","id":2,"method":"session/new","params":{"cwd":"/ws"}}`)
	step(outW, cr, `{"jsonrpc":"2.0","id":2,"result":{"sessionId":"s"}}`)
	b.Cleanup(func() {
		cancel()
		<-run
		br.Fail("over")
	})
	return outW, rtIn, near, cr
}

func socketPair(b *testing.B) (near, far net.Conn) {
	ln, err := net.Listen("unix", filepath.Join(b.TempDir(), "s"))
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	if near, err = net.Dial("unix", ln.Addr().String()); err != nil {
		b.Fatal(err)
	}
	if far, err = ln.Accept(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

func updateOf(size int) []byte {
	head := `{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"`
	return []byte(head + strings.Repeat("x", max(0, size-len(head)-6)) + "\"}}}}\n")
}

func BenchmarkRelay(b *testing.B) {
	for _, size := range []int{256, 4 << 10, 1 << 20} {
		line := updateOf(size)
		stream := func(b *testing.B, w io.Writer, r *bufio.Reader) {
			b.SetBytes(int64(len(line)))
			b.ReportAllocs()
			done := make(chan error, 1)
			n := b.N
			b.ResetTimer()
			go func() { _, err := io.CopyN(io.Discard, r, int64(n)*int64(len(line))); done <- err }()
			for range n {
				if _, err := w.Write(line); err != nil {
					b.Fatal(err)
				}
			}
			if err := <-done; err != nil {
				b.Fatal(err)
			}
		}
		b.Run(fmt.Sprintf("broker/%d", size), func(b *testing.B) {
			w, _, _, r := relayRig(b)
			stream(b, w, r)
		})
		b.Run(fmt.Sprintf("pipe/%d", size), func(b *testing.B) {
			r, w := osPipe(b)
			stream(b, w, bufio.NewReaderSize(r, 1<<16))
		})
		b.Run(fmt.Sprintf("io.Pipe/%d", size), func(b *testing.B) {
			r, w := io.Pipe()
			defer w.Close()
			stream(b, w, bufio.NewReaderSize(r, 1<<16))
		})
	}
}

// BenchmarkLatency sends one 4 KB message at a time and waits until it is there.
func BenchmarkLatency(b *testing.B) {
	line := updateOf(4 << 10)
	measure := func(b *testing.B, w io.Writer, r *bufio.Reader) {
		took := make([]time.Duration, 0, b.N)
		buf := make([]byte, len(line))
		for b.Loop() {
			began := time.Now()
			if _, err := w.Write(line); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(r, buf); err != nil {
				b.Fatal(err)
			}
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-µs")
		b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-µs")
	}
	b.Run("broker", func(b *testing.B) {
		w, _, _, r := relayRig(b)
		measure(b, w, r)
	})
	b.Run("pipe", func(b *testing.B) {
		r, w := osPipe(b)
		measure(b, w, bufio.NewReaderSize(r, 1<<16))
	})
}
