package supervisor

import (
	"testing"
	"time"
)

func TestWhatAnAgentHasStartedOutsideIsPaced(t *testing.T) {
	var p pace
	now := time.Now()
	for i := range paceBurst {
		if d := p.take(now); d != 0 {
			t.Fatalf("the %d. waits %v", i+1, d)
		}
	}
	for i := range 4 {
		if d, want := p.take(now), time.Duration(i+1)*time.Second/paceRate; d.Round(time.Millisecond) != want {
			t.Errorf("the %d. above the burst waits %v, want %v", i+1, d, want)
		}
	}
	if d := p.take(now.Add(10 * time.Second)); d != 0 {
		t.Errorf("after a rest the next one waits %v", d)
	}
	if d := p.take(now.Add(time.Hour)); d != 0 {
		t.Errorf("after a long rest the next one waits %v", d)
	}
	for i := range paceBurst - 1 {
		if d := p.take(now.Add(time.Hour)); d != 0 {
			t.Errorf("the %d. after that waits %v", i+2, d)
		}
	}
}
