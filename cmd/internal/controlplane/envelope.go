// Package controlplane is the daemon's connection to an AgentConnect control plane: one
// WebSocket on which both sides ask and tell. It keeps the connection, the order and the
// promises of the wire (correlation, repetition, fencing, bounded size); what the frames
// do to agents is a Handler's. It starts no agent and reads no configuration.
package controlplane

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
)

// Subprotocol that both sides must speak.
const Subprotocol = "agentconnect.v1"

// MaxMessage is the largest message either side takes, in bytes; MaxReply leaves room for
// the envelope.
const (
	MaxMessage = 256 << 10
	MaxReply   = MaxMessage - 4<<10
)

// Envelope is one message. Optional fields are absent, never null.
type Envelope struct {
	V       int             `json:"v"`
	ID      string          `json:"id"`
	TS      string          `json:"ts"`
	Type    string          `json:"type"`
	Corr    string          `json:"corr,omitempty"`
	OrgID   string          `json:"orgId,omitempty"`
	Epoch   *int64          `json:"epoch,omitempty"`
	AgentID string          `json:"agentId,omitempty"`
	Payload json.RawMessage `json:"payload"`
}

// Code of an error frame.
type Code string

const (
	CodeUnknownFrame  Code = "UNKNOWN_FRAME"
	CodeFrameTooLarge Code = "FRAME_TOO_LARGE"
	CodeBadPayload    Code = "BAD_PAYLOAD"
	CodeProtocolState Code = "PROTOCOL_STATE"
	CodeStaleEpoch    Code = "STALE_EPOCH"
	CodeNoSession     Code = "NO_SESSION"
	CodeScopeDenied   Code = "SCOPE_DENIED"
	CodeLeaseDenied   Code = "LEASE_DENIED"
	CodeRateLimited   Code = "RATE_LIMITED"
	CodeConflict      Code = "CONFLICT"
	CodeInternal      Code = "INTERNAL"
)

// FrameError is the payload of an error frame, either way.
type FrameError struct {
	Code      Code            `json:"code"`
	Message   string          `json:"message"`
	Retryable bool            `json:"retryable"`
	Details   json.RawMessage `json:"details,omitempty"`
}

func (e *FrameError) Error() string { return fmt.Sprintf("%s: %s", e.Code, e.Message) }

// badPayload is the answer to a payload that cannot be read.
func badPayload(format string, args ...any) *FrameError {
	// What was sent may be in it, as long as it is.
	return &FrameError{Code: CodeBadPayload, Message: cut(fmt.Sprintf(format, args...), mostSaid)}
}

// Reply is what a request is answered with.
type Reply struct {
	Type    string
	Payload any
}

// Ack is the plain answer to a request.
type Ack struct {
	OK     bool   `json:"ok"`
	Reason string `json:"reason,omitempty"`
}

// AckReply answers {ok: true}, or {ok: false} with a reason.
func AckReply(reason string) Reply {
	return Reply{Type: "ack", Payload: Ack{OK: reason == "", Reason: reason}}
}

// NewID returns a random UUID (version 4), the only kind of id that the wire takes.
func NewID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// nilID stands for an id that could not be read.
const nilID = "00000000-0000-0000-0000-000000000000"

var uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)

// ValidID reports whether s is a UUID with real version and variant bits.
func ValidID(s string) bool { return uuidForm.MatchString(strings.ToLower(s)) }

// Stamp is a time as the wire wants it: RFC 3339, UTC, ending in Z.
func Stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }

// encode makes a message. A payload that the wire would refuse for its size is an error.
func encode(e Envelope, payload any) ([]byte, error) {
	raw, err := marshal(payload)
	if err != nil {
		return nil, fmt.Errorf("frame %s: %w", e.Type, err)
	}
	e.V, e.Payload = 1, raw
	if e.ID == "" {
		e.ID = NewID()
	}
	if e.TS == "" {
		e.TS = Stamp(time.Now())
	}
	data, err := marshal(e)
	if err != nil {
		return nil, fmt.Errorf("frame %s: %w", e.Type, err)
	}
	if len(data) > MaxMessage {
		return nil, &FrameError{Code: CodeFrameTooLarge, Message: fmt.Sprintf("frame %s: %d bytes, at most %d", e.Type, len(data), MaxMessage)}
	}
	return data, nil
}

// marshal is json.Marshal without the escapes meant for HTML, which make text longer.
func marshal(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// decode reads a message tolerantly: unknown keys are passed over. The returned id is that
// of the frame when it could be read, for the answer, even with an error.
func decode(data []byte) (Envelope, string, error) {
	var e Envelope
	if err := json.Unmarshal(data, &e); err != nil {
		var part struct {
			ID string `json:"id"`
		}
		id := nilID
		if json.Unmarshal(data, &part) == nil && ValidID(part.ID) {
			id = part.ID
		}
		return Envelope{}, id, badPayload("the envelope cannot be read: %v", err)
	}
	if !ValidID(e.ID) {
		return Envelope{}, nilID, badPayload("id must be a UUID")
	}
	switch {
	case e.V != 1:
		return Envelope{}, e.ID, badPayload("v must be 1, not %d", e.V)
	case e.Type == "":
		return Envelope{}, e.ID, badPayload("type is missing")
	case len(e.Payload) == 0:
		return Envelope{}, e.ID, badPayload("payload is missing")
	case e.Corr != "" && !ValidID(e.Corr) && e.Corr != nilID:
		return Envelope{}, e.ID, badPayload("corr must be a UUID")
	}
	return e, e.ID, nil
}

// Decode reads a payload into v, whose checks follow: a value with a method check() error
// is asked. Errors are *FrameError with BAD_PAYLOAD.
func Decode(payload json.RawMessage, v any) *FrameError {
	if err := json.Unmarshal(payload, v); err != nil {
		var te *json.UnmarshalTypeError
		if errors.As(err, &te) && te.Field != "" {
			return badPayload("%s: %s cannot be read as %s", te.Field, te.Value, te.Type)
		}
		return badPayload("%v", err)
	}
	if c, ok := v.(interface{ check() error }); ok {
		if err := c.check(); err != nil {
			return badPayload("%v", err)
		}
	}
	return nil
}
