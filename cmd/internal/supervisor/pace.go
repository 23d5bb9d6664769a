package supervisor

import (
	"context"
	"sync"
	"time"
)

// What an agent has started outside is beyond its own limits: so many programs at once, and so
// many a second. Who asks for more waits.
const (
	paceBurst = 100
	paceRate  = 2
)

// pace is how often something may be done; its zero value has not been used.
type pace struct {
	mu   sync.Mutex
	done float64 // of the burst
	at   time.Time
}

// take is how long the next one has to wait.
func (p *pace) take(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done = max(0, p.done-now.Sub(p.at).Seconds()*paceRate) + 1
	p.at = now
	return max(0, time.Duration((p.done-paceBurst)/paceRate*float64(time.Second)))
}

// wait waits for the next one's turn.
func (p *pace) wait(ctx context.Context) error {
	turn := time.NewTimer(p.take(time.Now()))
	defer turn.Stop()
	select {
	case <-turn.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
