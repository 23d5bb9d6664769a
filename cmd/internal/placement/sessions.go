// The sessions that were worked here, kept on disk for whoever may read them.

package placement

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"

	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
)

// Bounds of what is kept.
const (
	MaxText     = 64 << 10 // bytes of one message's text
	MaxBody     = 32 << 10 // bytes of a tool call's body
	MaxMessages = 20_000   // of one session; what comes after is not kept, and that is said
)

var (
	bucketSessions = []byte("sessions") // id → stored
	bucketMessages = []byte("messages") // id → bucket: seq (8 bytes) → Message
	bucketBodies   = []byte("bodies")   // id → bucket: toolCallId → JSON
)

// Sessions is the store: a bbolt file, since it is one file that survives a crash in the
// middle of a write, needs no server, and is read in order of its keys. SQLite could be
// asked more, and nobody asks more.
type Sessions struct {
	db     *bbolt.DB
	now    func() time.Time
	broken atomic.Pointer[error] // nothing can be written any more
}

// stored is one session.
type stored struct {
	Record     cp.Session    `json:"record"`
	Visibility cp.Visibility `json:"visibility,omitzero"`
	Last       time.Time     `json:"last"`
	// Untold is the end of its run, while the control plane has not said that it has the session's.
	Untold *cp.CronReport `json:"untold,omitempty"`
}

// OpenSessions opens the store at path (0600), making it when missing.
func OpenSessions(path string) (s *Sessions, err error) {
	// A file that was cut would end the daemon: bbolt takes the pages of its mapping for whole.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			s, err = nil, fmt.Errorf("%s: it is damaged (%v)", path, p)
		}
	}()
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		if fi, err := os.Stat(path); err != nil || fi.Size() < tx.Size() {
			return cmp.Or(err, fmt.Errorf("it was cut: it has pages up to %d bytes", tx.Size()))
		}
		for _, b := range [][]byte{bucketSessions, bucketMessages, bucketBodies} {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		_ = db.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return &Sessions{db: db, now: time.Now}, nil
}

// view reads. What is damaged on the disk is an error: bbolt panics over it, which would end the
// daemon each time that somebody reads there.
func (s *Sessions) view(f func(*bbolt.Tx) error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%s: it is damaged (%v); stop the daemon and remove it", s.db.Path(), p)
		}
	}()
	return s.db.View(f)
}

// update writes, as view reads. After a panic bbolt may hold its lock for good, so nothing more is
// written.
func (s *Sessions) update(f func(*bbolt.Tx) error) (err error) {
	if broken := s.broken.Load(); broken != nil {
		return *broken
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%s: it is damaged (%v); stop the daemon and remove it", s.db.Path(), p)
			s.broken.Store(&err)
		}
	}()
	return s.db.Update(f)
}

// Close closes the store.
func (s *Sessions) Close() error { return s.db.Close() }

// Put writes a session's record.
func (s *Sessions) Put(r cp.Session) error { return s.End(r, nil) }

// End writes a session's record and the report of its run, which wait to be told.
func (s *Sessions) End(r cp.Session, untold *cp.CronReport) error {
	return s.update(func(tx *bbolt.Tx) error {
		st, err := get(tx, r.SessionID)
		if err != nil && !errors.Is(err, errNoSession) {
			return err
		}
		if err == nil && st.Record.AgentID != r.AgentID {
			return fmt.Errorf("session %s is another agent's", r.SessionID)
		}
		st.Record, st.Last, st.Untold = r, s.now(), untold
		return put(tx, st)
	})
}

// Told notes that the control plane has the end of a session.
func (s *Sessions) Told(id string) error {
	return s.update(func(tx *bbolt.Tx) error {
		st, err := get(tx, id)
		if errors.Is(err, errNoSession) {
			return nil
		}
		if err != nil {
			return err
		}
		st.Untold = nil
		return put(tx, st)
	})
}

var errNoSession = errors.New("no such session here")

func get(tx *bbolt.Tx, id string) (stored, error) {
	var st stored
	raw := tx.Bucket(bucketSessions).Get([]byte(id))
	if raw == nil {
		return st, errNoSession
	}
	return st, json.Unmarshal(raw, &st)
}

func put(tx *bbolt.Tx, st stored) error {
	raw, err := json.Marshal(st)
	if err != nil {
		return err
	}
	return tx.Bucket(bucketSessions).Put([]byte(st.Record.SessionID), raw)
}

func seqKey(seq int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(seq)) }

// Write writes a session's messages; a message whose Seq is there already is replaced. The
// bodies of tool calls go by their id.
func (s *Sessions) Write(sessionID string, messages []cp.Message, bodies map[string]json.RawMessage) error {
	return s.update(func(tx *bbolt.Tx) error {
		b, err := tx.Bucket(bucketMessages).CreateBucketIfNotExists([]byte(sessionID))
		if err != nil {
			return err
		}
		for _, m := range messages {
			if m.Seq > MaxMessages {
				continue
			}
			raw, err := json.Marshal(m)
			if err != nil {
				return err
			}
			if err := b.Put(seqKey(m.Seq), raw); err != nil {
				return err
			}
		}
		if len(bodies) == 0 {
			return nil
		}
		t, err := tx.Bucket(bucketBodies).CreateBucketIfNotExists([]byte(sessionID))
		if err != nil {
			return err
		}
		for id, body := range bodies {
			if len(id) > 0 && len(id) <= bbolt.MaxKeySize {
				if err := t.Put([]byte(id), body); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// Ended is a session and the report of its run.
type Ended struct {
	Session cp.Session
	Report  cp.CronReport
}

// mostUntold bounds what is told of earlier daemons at once; the next one tells the rest.
const mostUntold = 5000

// Untold ends the sessions whose turns ended with an earlier daemon, and gives them with those whose
// end an earlier daemon could not tell.
func (s *Sessions) Untold() (list []Ended, err error) {
	var found []stored
	broken := false
	err = s.view(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketSessions).ForEach(func(_, raw []byte) error {
			var st stored
			readable := json.Unmarshal(raw, &st) == nil && st.Record.SessionID != ""
			if !readable || st.Record.Phase == "end" && (st.Untold == nil || len(found) >= mostUntold) {
				return nil
			}
			if r := &st.Record; r.Phase != "end" {
				broken = true
				r.Phase, r.Status, r.Summary = "end", "failed", "the daemon ended before the turn did"
				id, byCron := strings.CutPrefix(r.TriggeredBy, "cron:")
				if !byCron {
					id = ""
				}
				st.Untold = &cp.CronReport{CronID: id, AgentID: r.AgentID, FiredAt: r.TS, Status: "failed", SessionID: r.SessionID, Reason: r.Summary}
			}
			found = append(found, st)
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	if broken { // mostly nothing is written
		err = s.update(func(tx *bbolt.Tx) error {
			for _, st := range found {
				if err := put(tx, st); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for _, st := range found {
		list = append(list, Ended{st.Record, *st.Untold})
	}
	return list, err
}

// Purge removes the sessions that ended before t, and names them by agent.
func (s *Sessions) Purge(t time.Time) (map[string][]string, error) {
	gone := map[string][]string{}
	err := s.update(func(tx *bbolt.Tx) error {
		clear(gone)
		err := tx.Bucket(bucketSessions).ForEach(func(id, raw []byte) error {
			var st stored
			if json.Unmarshal(raw, &st) != nil || st.Last.Before(t) && st.Record.Phase == "end" {
				gone[st.Record.AgentID] = append(gone[st.Record.AgentID], string(id))
			}
			return nil
		})
		if err != nil {
			return err
		}
		for _, ids := range gone {
			for _, id := range ids {
				if err := remove(tx, id); err != nil {
					return err
				}
			}
		}
		return nil
	})
	delete(gone, "")
	return gone, err
}

func remove(tx *bbolt.Tx, id string) error {
	if err := tx.Bucket(bucketSessions).Delete([]byte(id)); err != nil {
		return err
	}
	for _, name := range [][]byte{bucketMessages, bucketBodies} {
		if b := tx.Bucket(name); b.Bucket([]byte(id)) != nil {
			if err := b.DeleteBucket([]byte(id)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Remove removes a session.
func (s *Sessions) Remove(id string) error {
	return s.update(func(tx *bbolt.Tx) error { return remove(tx, id) })
}

// RemoveOf removes the sessions of an agent.
func (s *Sessions) RemoveOf(agent string) error {
	return s.update(func(tx *bbolt.Tx) error {
		var ids []string
		err := tx.Bucket(bucketSessions).ForEach(func(id, raw []byte) error {
			var st stored
			if json.Unmarshal(raw, &st) == nil && st.Record.AgentID == agent {
				ids = append(ids, string(id))
			}
			return nil
		})
		for _, id := range ids {
			err = errors.Join(err, remove(tx, id))
		}
		return err
	})
}

// answer serves what the control plane reads: of agents that are placed here, and what is
// asked of one agent from that agent's sessions alone. A question names no person, so what
// is private is not listed: whoever may see it knows its id.
func (s *Sessions) answer(e cp.Envelope, placed func(agent string) bool) (cp.Reply, *cp.FrameError) {
	switch e.Type {
	case "session/history":
		var h cp.HistoryRequest
		if fe := cp.Decode(e.Payload, &h); fe != nil {
			return cp.Reply{}, fe
		}
		if !placed(h.AgentID) {
			return reply("session/history/page", cp.HistoryPage{SessionID: h.SessionID, Messages: []cp.Message{}}, nil)
		}
		page, err := s.History(h)
		return reply("session/history/page", page, err)
	case "session/tool-body":
		var t cp.ToolBodyRequest
		if fe := cp.Decode(e.Payload, &t); fe != nil {
			return cp.Reply{}, fe
		}
		if !placed(t.AgentID) {
			return reply("", nil, errNoSession)
		}
		return s.toolBody(t)
	case "session/list":
		var l cp.ListRequest
		if fe := cp.Decode(e.Payload, &l); fe != nil {
			return cp.Reply{}, fe
		}
		list, err := s.List(l.AgentID, placed)
		return reply("session/list/page", map[string]any{"sessions": list}, err)
	case "session/visibility":
		var v cp.Visibility
		if fe := cp.Decode(e.Payload, &v); fe != nil {
			return cp.Reply{}, fe
		}
		ok, err := s.SetVisibility(v)
		if err != nil {
			return reply("", nil, err)
		}
		return reply("session/visibility/ok", ok[0], nil)
	case "session/visibility/snapshot":
		var v cp.VisibilitySnapshot
		if fe := cp.Decode(e.Payload, &v); fe != nil {
			return cp.Reply{}, fe
		}
		if _, err := s.SetVisibility(v.Entries...); err != nil {
			return reply("", nil, err)
		}
		return cp.AckReply(""), nil
	}
	return cp.Reply{}, &cp.FrameError{Code: cp.CodeUnknownFrame, Message: e.Type}
}

func reply(typ string, payload any, err error) (cp.Reply, *cp.FrameError) {
	switch {
	case errors.Is(err, errNoSession):
		return cp.Reply{}, &cp.FrameError{Code: cp.CodeNoSession, Message: err.Error()}
	case errors.Is(err, errBadCursor):
		return cp.Reply{}, &cp.FrameError{Code: cp.CodeBadPayload, Message: err.Error()}
	case err != nil:
		return cp.Reply{}, &cp.FrameError{Code: cp.CodeInternal, Message: err.Error(), Retryable: true}
	}
	return cp.Reply{Type: typ, Payload: payload}, nil
}

var errBadCursor = errors.New("cursor and after are digits, as a page gave them")

// History returns a page, old to new. An unknown session, and one of another agent, has an
// empty one.
func (s *Sessions) History(h cp.HistoryRequest) (cp.HistoryPage, error) {
	page := cp.HistoryPage{SessionID: h.SessionID, Messages: []cp.Message{}}
	before, after := int64(-1), int64(-1)
	for text, n := range map[string]*int64{h.Cursor: &before, h.After: &after} {
		if text == "" {
			continue
		}
		v, err := strconv.ParseInt(text, 10, 64)
		if err != nil || v < 0 {
			return page, errBadCursor
		}
		*n = v
	}
	err := s.view(func(tx *bbolt.Tx) error {
		st, err := get(tx, h.SessionID)
		if errors.Is(err, errNoSession) || err == nil && st.Record.AgentID != h.AgentID {
			return nil
		}
		if err != nil {
			return err
		}
		b := tx.Bucket(bucketMessages).Bucket([]byte(h.SessionID))
		if b == nil {
			return nil
		}
		if after >= 0 {
			return forward(&page, b.Cursor(), after, h.Limit)
		}
		return backward(&page, b.Cursor(), before, h.Limit)
	})
	return page, err
}

// forward fills the page with what comes after a message.
func forward(p *cp.HistoryPage, c *bbolt.Cursor, after int64, limit int) error {
	size := 0
	last := after
	for k, v := c.Seek(seqKey(after + 1)); k != nil; k, v = c.Next() {
		if len(p.Messages) == limit || len(p.Messages) > 0 && size+len(v) > maxPage {
			p.LiveMore = true
			break
		}
		m, err := message(v)
		if err != nil {
			return err
		}
		size += len(v)
		p.Messages, last = append(p.Messages, m), m.Seq
	}
	p.LiveCursor = strconv.FormatInt(last, 10)
	return nil
}

// backward fills the page with the newest, or with what comes before a message.
func backward(p *cp.HistoryPage, c *bbolt.Cursor, before int64, limit int) error {
	k, v := c.Last()
	if k != nil {
		p.LiveCursor = strconv.FormatInt(int64(binary.BigEndian.Uint64(k)), 10)
	} else {
		p.LiveCursor = "0"
	}
	if before >= 0 {
		p.LiveCursor = ""
		if at, _ := c.Seek(seqKey(before)); at != nil {
			k, v = c.Prev()
		} else {
			k, v = c.Last() // all of it comes before
		}
	}
	size := 0
	for ; k != nil; k, v = c.Prev() {
		if len(p.Messages) == limit || len(p.Messages) > 0 && size+len(v) > maxPage {
			p.NextCursor = strconv.FormatInt(p.Messages[len(p.Messages)-1].Seq, 10)
			break
		}
		m, err := message(v)
		if err != nil {
			return err
		}
		size += len(v)
		p.Messages = append(p.Messages, m)
	}
	for i, j := 0, len(p.Messages)-1; i < j; i, j = i+1, j-1 {
		p.Messages[i], p.Messages[j] = p.Messages[j], p.Messages[i]
	}
	return nil
}

// maxPage bounds the messages of a page in bytes, as they lie in the store.
const maxPage = cp.MaxReply - 16<<10

func message(raw []byte) (cp.Message, error) {
	var m cp.Message
	err := json.Unmarshal(raw, &m)
	return m, err
}

// List returns the sessions of an agent, or of all for "", that are not private. It is
// bounded by size.
func (s *Sessions) List(agent string, placed func(agent string) bool) ([]cp.Session, error) {
	list := []cp.Session{}
	size := 0
	err := s.view(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bucketSessions).Cursor()
		for k, v := c.Last(); k != nil && size < maxPage; k, v = c.Prev() {
			var st stored
			if json.Unmarshal(v, &st) != nil || agent != "" && st.Record.AgentID != agent || st.Visibility.Visibility == "private" || !placed(st.Record.AgentID) {
				continue
			}
			list, size = append(list, st.Record), size+len(v)
		}
		return nil
	})
	return list, err
}

// SetVisibility keeps who may see sessions; an older revision than the one held changes nothing. All
// are one write to the disk: a snapshot has thousands, and whoever asks for a status waits for it.
func (s *Sessions) SetVisibility(list ...cp.Visibility) (done []cp.VisibilityOK, err error) {
	err = s.update(func(tx *bbolt.Tx) error {
		for _, v := range list {
			ok, err := setVisibility(tx, v)
			if err != nil {
				return err
			}
			done = append(done, ok)
		}
		return nil
	})
	return done, err
}

func setVisibility(tx *bbolt.Tx, v cp.Visibility) (cp.VisibilityOK, error) {
	ok := cp.VisibilityOK{SessionID: v.SessionID, Rev: v.Rev, Status: "applied"}
	st, err := get(tx, v.SessionID)
	switch {
	case errors.Is(err, errNoSession):
		return ok, nil // nothing of it is here to be seen
	case err != nil:
		return ok, err
	case v.AgentID != "" && v.AgentID != st.Record.AgentID:
		return ok, nil // another agent's session of that id is not here
	case st.Visibility.SessionID != "" && st.Visibility.Rev > v.Rev:
		ok.Rev, ok.Status = st.Visibility.Rev, "superseded"
		return ok, nil
	}
	st.Visibility = v
	return ok, put(tx, st)
}

func (s *Sessions) toolBody(t cp.ToolBodyRequest) (cp.Reply, *cp.FrameError) {
	var body []byte
	err := s.view(func(tx *bbolt.Tx) error {
		st, err := get(tx, t.SessionID)
		if err != nil {
			return err
		}
		b := tx.Bucket(bucketBodies).Bucket([]byte(t.SessionID))
		if st.Record.AgentID != t.AgentID || b == nil {
			return errNoSession
		}
		raw := b.Get([]byte(t.ToolCallID))
		if raw == nil {
			return errNoSession
		}
		body = append(body, raw...)
		return nil
	})
	at := min(t.Offset, int64(len(body)))
	chunk := map[string]any{"sessionId": t.SessionID, "toolCallId": t.ToolCallID, "data": string(body[at:]), "totalBytes": len(body)}
	return reply("session/tool-body/chunk", chunk, err)
}
