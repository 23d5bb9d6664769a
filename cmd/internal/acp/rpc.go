// The JSON-RPC messages that this package writes itself.

package acp

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// JSON-RPC and ACP error codes.
const (
	CodeParse          = -32700
	CodeInvalidRequest = -32600
	CodeMethodNotFound = -32601
	CodeInvalidParams  = -32602
	CodeInternal       = -32603
	CodeAuthRequired   = -32000
	CodeNotFound       = -32002
)

// RPCError is a JSON-RPC error answer.
type RPCError struct {
	Code    int             `json:"code"`
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data,omitempty"`
}

func (e *RPCError) Error() string {
	return fmt.Sprintf("%s (code %d)", oneLine(e.Message, 2000), e.Code)
}

var nullID = []byte("null")

// quote appends s as a JSON string.
func quote(dst []byte, s string) []byte {
	b, err := json.Marshal(s) // cannot fail: bytes that are not UTF-8 are replaced
	if err != nil {
		return append(dst, `""`...)
	}
	return append(dst, b...)
}

// errorFrame is an error answer to the request id (JSON text), with its newline.
func errorFrame(id []byte, code int, message string) []byte {
	b := append([]byte(`{"jsonrpc":"2.0","id":`), id...)
	b = append(b, `,"error":{"code":`...)
	b = strconv.AppendInt(b, int64(code), 10)
	b = append(b, `,"message":`...)
	b = quote(b, message)
	return append(b, "}}\n"...)
}

// resultFrame is an answer to the request id, with its newline.
func resultFrame(id, result []byte) []byte {
	b := append([]byte(`{"jsonrpc":"2.0","id":`), id...)
	b = append(b, `,"result":`...)
	b = append(b, result...)
	return append(b, "}\n"...)
}

// endedData marks the errors that tell of the runtime's end, for a bridge to know that
// its connection is over.
const endedData = `{"agentconnect":"ended"}`

// endedFrame is the error answer to a request that the runtime's end left open.
func endedFrame(id []byte, msg string) []byte {
	b := append([]byte(`{"code":`), strconv.Itoa(CodeInternal)...)
	b = quote(append(b, `,"message":`...), msg)
	b = append(append(b, `,"data":`...), endedData...)
	return errorAnswer(id, append(b, '}'))
}

// saysEnded reports whether f is an endedFrame.
func saysEnded(f *Frame) bool {
	if f.Error.Empty() {
		return false
	}
	object := f.Bytes(f.Error)
	data, ok := member(object, "data")
	return ok && string(object[data.Start:data.End]) == endedData
}

// errorAnswer is an error answer with the error object given.
func errorAnswer(id, object []byte) []byte {
	b := append([]byte(`{"jsonrpc":"2.0","id":`), id...)
	b = append(b, `,"error":`...)
	b = append(b, object...)
	return append(b, "}\n"...)
}

// sessionFrame is a call about one session: a notification when id is nil.
func sessionFrame(id []byte, method, session string) []byte {
	b := []byte(`{"jsonrpc":"2.0",`)
	if id != nil {
		b = append(append(append(b, `"id":`...), id...), ',')
	}
	b = append(b, `"method":`...)
	b = quote(b, method)
	b = append(b, `,"params":{"sessionId":`...)
	b = quote(b, session)
	return append(b, "}}\n"...)
}

// frameErrorCode is the JSON-RPC code for a line that ParseFrame refused.
func frameErrorCode(err error) int {
	if errors.Is(err, ErrSyntax) || errors.Is(err, ErrUTF8) {
		return CodeParse
	}
	return CodeInvalidRequest
}

// sample shows the start of unknown bytes, safe for a log and a terminal.
func sample(b []byte) string {
	const most = 120
	more := ""
	if len(b) > most {
		more = fmt.Sprintf(" … (%d bytes)", len(b))
		b = b[:most]
	}
	return strconv.QuoteToASCII(strings.TrimRight(string(b), "\r\n")) + more
}

// CleanText removes what could drive a terminal from text an agent wrote: control
// characters other than newline and tab, and marks that reorder text.
func CleanText(s string) string {
	return strings.Map(func(r rune) rune {
		if drives(r) {
			return -1
		}
		return r
	}, s)
}

// drives reports whether CleanText removes r.
func drives(r rune) bool {
	return r != '\n' && r != '\t' && (r == utf8.RuneError || unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r))
}

// oneLine is CleanText on one line of at most n runes. What it costs goes by n: a runtime's text may
// be as long as a frame.
func oneLine(s string, n int) string {
	var out strings.Builder
	count, gap := 0, false
	put := func(r rune) bool {
		if count++; count > n {
			out.WriteRune('…')
			return false
		}
		out.WriteRune(r)
		return true
	}
	for _, r := range s {
		switch {
		case drives(r):
		case unicode.IsSpace(r):
			gap = count > 0
		default:
			if gap && !put(' ') || !put(r) {
				return out.String()
			}
			gap = false
		}
	}
	return out.String()
}
