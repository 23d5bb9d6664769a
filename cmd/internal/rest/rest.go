// Package rest has a process that mostly waits hold little memory while it does, and wake up
// for nothing.
package rest

import (
	"math"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"
)

const (
	// After is how long a process did next to nothing before it rests.
	After = 10 * time.Second
	// nothing is how much processor time that is.
	nothing = 20 * time.Millisecond
	// room is how much one at rest may allocate before it collects, in bytes.
	room = 8 << 20
)

// Keeper watches over one process.
type Keeper struct {
	// Percent is by how much the heap grows between collections while something is done (GOGC).
	Percent int

	mu      sync.Mutex
	armed   bool // a timer runs
	resting bool
	rests   int           // so far
	used    time.Duration // processor time when the timer began

	// For tests: how long after the last thing it rests, and what is told of the rest (false:
	// a collection ended it).
	after   time.Duration
	changed chan bool
}

// Stir says that something happens. The first call ends the time in which a process starts.
// Some time after the last thing that happened, also without a word, the process rests:
//
//   - What it holds no more goes back to the kernel, if anything was ever collected. Else a
//     collection now would be the first of those that the runtime makes every two minutes.
//   - Those two-minute collections stop; after room there is one, which ends the rest.
//   - The pages of the program's file leave the process. They stay in the kernel's cache, where
//     whatever else needs memory takes them first, and come back one by one when they are used.
//     Most were needed for the start alone, or came along with their neighbours.
func (k *Keeper) Stir() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stir()
}

func (k *Keeper) stir() {
	if k.armed {
		return
	}
	k.resting = false
	debug.SetMemoryLimit(math.MaxInt64)
	debug.SetGCPercent(k.Percent)
	k.arm()
}

func (k *Keeper) arm() {
	k.armed, k.used = true, processorTime()
	after := After
	if k.after != 0 {
		after = k.after
	}
	time.AfterFunc(after, k.look)
}

// look rests, or looks again later.
func (k *Keeper) look() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.armed = false; processorTime()-k.used > nothing {
		k.arm()
		return
	}
	k.resting = true
	k.rests++
	var stats debug.GCStats
	if debug.ReadGCStats(&stats); stats.NumGC > 0 {
		debug.FreeOSMemory()
	}
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(held() + room)
	// It is garbage, so the next collection finds it.
	runtime.AddCleanup(&struct{ self *Keeper }{k}, k.collected, k.rests)
	shed()
	k.tell(true)
}

func (k *Keeper) tell(resting bool) {
	if k.changed != nil {
		k.changed <- resting
	}
}

// collected: since that rest began, memory was used, and much of it. Of an earlier one this is
// heard late, by the collection with which the next begins.
func (k *Keeper) collected(rest int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.resting || rest != k.rests {
		return
	}
	k.stir()
	k.tell(false)
}

// held is what counts for the runtime's memory limit.
func held() int64 {
	s := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(s)
	return int64(s[0].Value.Uint64() - s[1].Value.Uint64())
}
