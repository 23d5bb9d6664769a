package acp

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
)

// stream notes what is written to it, by whichever way.
type stream struct {
	mu    sync.Mutex
	bytes bytes.Buffer
	busy  bool
	clash bool
}

func (s *stream) write(p []byte) (int, error) {
	s.mu.Lock()
	s.clash = s.clash || s.busy
	s.busy = true
	s.bytes.Write(p)
	s.mu.Unlock()
	s.mu.Lock()
	s.busy = false
	s.mu.Unlock()
	return len(p), nil
}

func (s *stream) Write(p []byte) (int, error) { return s.write(p) }

// Frames go out by two ways: at once, as far as the stream takes them, and by the goroutine
// that waits for it. Whatever the stream takes, each arrives once and in order.
func TestQueueKeepsTheOrderOverBothWaysOut(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		var out stream
		q := newQueue()
		q.now = func(p []byte) (int, error) {
			// Some of it, all of it, or none.
			return out.write(p[:min(len(p), random.IntN(2*len(p)))])
		}
		done := make(chan error, 1)
		go func() { done <- q.run(&out) }()
		var want bytes.Buffer
		for i := range 300 {
			frame := []byte(fmt.Sprintf("%d:%s\n", i, bytes.Repeat([]byte{'x'}, random.IntN(2*chunkSize/(1+random.IntN(50))))))
			want.Write(frame)
			var ok bool
			switch random.IntN(4) {
			case 0:
				ok = q.push(0, frame)
			case 1:
				ok = q.pushWait(chunkSize, nil, frame[:2], frame[2:])
			default:
				ok, _ = q.hold(0, chunkSize, frame)
			}
			if !ok {
				t.Fatalf("seed %d: frame %d was not taken", seed, i)
			}
			if random.IntN(3) == 0 {
				q.flush()
			}
		}
		q.flush()
		q.finish()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if out.clash {
			t.Fatalf("seed %d: two writes at once", seed)
		}
		if !bytes.Equal(out.bytes.Bytes(), want.Bytes()) {
			t.Fatalf("seed %d: %d bytes came, %d were sent; they differ from byte %d on", seed, out.bytes.Len(), want.Len(), firstDifference(out.bytes.Bytes(), want.Bytes()))
		}
	}
}

func firstDifference(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}
