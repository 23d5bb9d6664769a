// The record of what was let out and what was not.

package egress

import (
	"sync"
	"time"

	"agentconnect.md/sandbox/cmd/internal/audit"
)

// Record is one line of an agent's record of connections. The words of Kind and Verdict are
// stable: scripts select by them.
type Record struct {
	Time  time.Time `json:"time"`
	Agent string    `json:"agent"`
	// Server is the agent's MCP server that it was, outside and in a boundary of its own.
	Server  string `json:"server,omitempty"`
	Kind    string `json:"kind"`    // tcp, dns
	Verdict string `json:"verdict"` // allowed, denied, failed, cut; asking and open before
	// Name is the one that it was judged by; empty for an address that no name was given.
	Name    string `json:"name,omitempty"`
	Address string `json:"address,omitempty"`
	Port    uint16 `json:"port,omitempty"`
	// Dialled is the address that was connected to, where it is not Address.
	Dialled string `json:"dialled,omitempty"`
	// Seen is the name that the program told the server (TLS server name, HTTP Host), where
	// it is not Name.
	Seen string `json:"seen,omitempty"`
	Rule string `json:"rule,omitempty"`
	// Reason says to a person why it was denied, failed or cut.
	Reason   string `json:"reason,omitempty"`
	Sent     uint64 `json:"sent,omitempty"`     // bytes, agent to outside
	Received uint64 `json:"received,omitempty"` // bytes, the other way
	Millis   int64  `json:"ms,omitempty"`       // how long a connection lasted
}

type record = Record

// Kinds and verdicts.
const (
	kindTCP = "tcp"
	kindDNS = "dns"

	Allowed = "allowed"
	Denied  = "denied"
	Failed  = "failed"
	Asking  = "asking" // it waits for the operator's word
	Open    = "open"   // let out, and goes on for longer; allowed or cut follows
	Cut     = "cut"
)

// maxWaiting is how many records wait for the disk before connections do.
const maxWaiting = 1024

// settle is how long a record waits for others, and atOnce how many are written together.
const (
	settle = time.Millisecond
	atOnce = 64
)

// recorder writes records behind the back of the connections.
type recorder struct {
	file   *audit.File
	failed func(error)
	server string // Server of each record
	lines  chan *Record
	done   chan struct{}

	mu     sync.Mutex
	said   map[string]time.Time // denials of names that were recorded just now
	closed bool
}

func newRecorder(path, server string, failed func(error)) (*recorder, error) {
	r := &recorder{failed: failed, server: server, lines: make(chan *Record, maxWaiting), done: make(chan struct{}), said: map[string]time.Time{}}
	if path != "" {
		f, err := audit.Open(path)
		if err != nil {
			return nil, err
		}
		r.file = f
	}
	go r.write()
	return r, nil
}

func (r *recorder) write() {
	defer close(r.done)
	var once sync.Once
	for first := range r.lines {
		if r.file == nil {
			continue
		}
		// The connections that go on come first: what ended with this one is written with it.
		time.Sleep(settle) //nolint:forbidigo // nothing waits for this, and what it waits for is more of the same
		some := []any{first}
		for len(r.lines) > 0 && len(some) < atOnce {
			some = append(some, <-r.lines)
		}
		if err := r.file.Append(some...); err != nil {
			once.Do(func() { r.failed(err) })
		}
	}
	if r.file != nil {
		_ = r.file.Close()
	}
}

// add records rec; after close it is dropped.
func (r *recorder) add(rec *Record) {
	rec.Time, rec.Server = time.Now().UTC(), r.server
	rec.Name, rec.Seen = audit.Printable(rec.Name), audit.Printable(rec.Seen)
	r.mu.Lock()
	defer r.mu.Unlock() // held while the disk is slow: so are those who would add more
	if !r.closed {
		r.lines <- rec
	}
}

// again is how long the same denial is not recorded anew: programs ask for both families,
// and several times.
const again = 10 * time.Second

// repeated reports whether this was recorded just now.
func (r *recorder) repeated(rec *Record) bool {
	key := rec.Kind + " " + rec.Name + " " + rec.Reason
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if now.Sub(r.said[key]) < again {
		return true
	}
	if len(r.said) >= 1024 {
		clear(r.said)
	}
	r.said[key] = now
	return false
}

// close writes what waits.
func (r *recorder) close() {
	r.mu.Lock()
	if !r.closed {
		r.closed = true
		close(r.lines)
	}
	r.mu.Unlock()
	<-r.done
}
