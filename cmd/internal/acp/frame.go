// The scanner over one JSON-RPC frame: it checks the whole text and finds the few
// members a relay needs, without building values.

package acp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"unicode/utf8"
)

// Bounds of one frame.
const (
	// MaxFrame is the longest frame that passes, in bytes, its newline not counted.
	MaxFrame = 64 << 20
	maxDepth = 512
	// maxName bounds ids, methods and session ids, which are kept in tables.
	maxName = 4 << 10
)

// What makes a line not a frame. A *FrameError wraps one of them.
var (
	ErrSyntax    = errors.New("not JSON")
	ErrUTF8      = errors.New("not UTF-8")
	ErrBatch     = errors.New("a JSON-RPC batch, which ACP does not have")
	ErrShape     = errors.New("not a JSON-RPC 2.0 message")
	ErrAmbiguous = errors.New("a member is given twice or in a second spelling, so that two readers could disagree")
	ErrDepth     = errors.New("nested too deeply")
)

// FrameError says what is wrong with a line, and at which byte.
type FrameError struct {
	Offset int
	Err    error
}

func (e *FrameError) Error() string { return fmt.Sprintf("%v (at byte %d)", e.Err, e.Offset) }
func (e *FrameError) Unwrap() error { return e.Err }

// Span is a part of a frame's Raw. An absent member has an empty span.
type Span struct{ Start, End int }

// Empty reports whether the member is absent.
func (s Span) Empty() bool { return s.Start == s.End }

// Frame is one JSON-RPC message. Its slices alias the line it was read from, but for
// names that were written with escapes.
type Frame struct {
	Raw []byte // the message without white space around it
	// Spans of the top-level members' values.
	ID, Params, Result, Error Span
	// Method is decoded; nil in a response.
	Method []byte
	// Session is the decoded params.sessionId or result.sessionId; nil when there is none.
	Session []byte
	// RequestID is the span of params.requestId.
	RequestID Span
}

// IsRequest reports a call that wants an answer (an id of null counts).
func (f *Frame) IsRequest() bool { return f.Method != nil && !f.ID.Empty() }

// IsResponse reports an answer.
func (f *Frame) IsResponse() bool { return f.Method == nil }

// Bytes returns the text of a span.
func (f *Frame) Bytes(s Span) []byte { return f.Raw[s.Start:s.End] }

// Splice cuts the frame around a span: before + replacement + after is the frame with
// that member's value replaced, the rest verbatim.
func (f *Frame) Splice(s Span) (before, after []byte) { return f.Raw[:s.Start], f.Raw[s.End:] }

// The kinds of object whose members a scan looks at.
type level uint8

const (
	levelPlain level = iota
	levelTop
	levelParams
	levelResult
)

const (
	keyNone = iota
	keyVersion
	keyID
	keyMethod
	keyParams
	keyResult
	keyError
	keySession
	keyRequest
)

type keyName struct {
	name string
	key  int
}

var levelKeys = [...][]keyName{
	levelPlain:  nil,
	levelTop:    {{"jsonrpc", keyVersion}, {"id", keyID}, {"method", keyMethod}, {"params", keyParams}, {"result", keyResult}, {"error", keyError}},
	levelParams: {{"sessionId", keySession}, {"requestId", keyRequest}},
	levelResult: {{"sessionId", keySession}},
}

// ParseFrame reads one line (with or without its newline) into f. It accepts a subset
// of what encoding/json accepts: a member that routing depends on must be there
// once, in its exact spelling, since clients differ in which of two they take and some
// compare names without case.
func ParseFrame(line []byte, f *Frame) error {
	raw := bytes.Trim(line, " \t\r\n")
	*f = Frame{Raw: raw}
	s := scanner{b: raw, f: f}
	if len(raw) == 0 {
		return s.fail(ErrSyntax)
	}
	switch raw[0] {
	case '{':
	case '[':
		return s.fail(ErrBatch)
	default:
		return s.fail(ErrSyntax)
	}
	if err := s.object(levelTop, 0); err != nil {
		return err
	}
	if s.i != len(raw) {
		return s.fail(ErrSyntax)
	}
	if s.seen&(1<<keyVersion) == 0 {
		return s.fail(ErrShape)
	}
	answers := 0
	if !f.Result.Empty() {
		answers++
	}
	if !f.Error.Empty() {
		answers++
	}
	if f.Method != nil {
		if answers != 0 {
			return s.fail(ErrShape)
		}
		return nil
	}
	if f.ID.Empty() || answers != 1 || !f.Params.Empty() {
		return s.fail(ErrShape)
	}
	return nil
}

type scanner struct {
	b    []byte
	i    int
	f    *Frame
	seen uint16 // keys met, over all levels: params and result exclude each other
}

func (s *scanner) fail(err error) error { return &FrameError{Offset: s.i, Err: err} }

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\r', '\n':
			s.i++
		default:
			return
		}
	}
}

// object reads one object; s.i is at its brace.
func (s *scanner) object(lv level, depth int) error {
	if depth >= maxDepth {
		return s.fail(ErrDepth)
	}
	s.i++
	s.space()
	if s.i < len(s.b) && s.b[s.i] == '}' {
		s.i++
		return nil
	}
	for {
		s.space()
		if s.i >= len(s.b) || s.b[s.i] != '"' {
			return s.fail(ErrSyntax)
		}
		name, odd, err := s.str()
		if err != nil {
			return err
		}
		key := keyNone
		if lv != levelPlain {
			if key, err = s.key(lv, name, odd); err != nil {
				return err
			}
		}
		s.space()
		if s.i >= len(s.b) || s.b[s.i] != ':' {
			return s.fail(ErrSyntax)
		}
		s.i++
		s.space()
		start := s.i
		switch {
		case key == keyParams && s.at('{'):
			err = s.object(levelParams, depth+1)
		case key == keyResult && s.at('{'):
			err = s.object(levelResult, depth+1)
		default:
			err = s.value(depth + 1)
		}
		if err != nil {
			return err
		}
		if key != keyNone {
			if err := s.take(key, Span{start, s.i}); err != nil {
				return err
			}
		}
		s.space()
		if s.i >= len(s.b) {
			return s.fail(ErrSyntax)
		}
		switch s.b[s.i] {
		case ',':
			s.i++
		case '}':
			s.i++
			return nil
		default:
			return s.fail(ErrSyntax)
		}
	}
}

func (s *scanner) at(c byte) bool { return s.i < len(s.b) && s.b[s.i] == c }

// key finds which routing member a name is. A name that differs from one only by
// case (also by Unicode's simple folding, as Go's decoder has it) is refused.
func (s *scanner) key(lv level, name []byte, odd bool) (int, error) {
	if odd {
		plain, ok := unquote(name)
		if !ok {
			return 0, s.fail(ErrAmbiguous)
		}
		name = plain
	}
	for _, k := range levelKeys[lv] {
		if string(name) == k.name {
			if s.seen&(1<<k.key) != 0 {
				return 0, s.fail(ErrAmbiguous)
			}
			s.seen |= 1 << k.key
			return k.key, nil
		}
		if bytes.EqualFold(name, []byte(k.name)) {
			return 0, s.fail(ErrAmbiguous)
		}
	}
	return keyNone, nil
}

// take notes a routing member's value.
func (s *scanner) take(key int, sp Span) error {
	f, v := s.f, s.b[sp.Start:sp.End]
	switch key {
	case keyVersion:
		if string(v) != `"2.0"` {
			return s.fail(ErrShape)
		}
	case keyID:
		if !isID(v) {
			return s.fail(ErrShape)
		}
		f.ID = sp
	case keyMethod:
		m, ok := stringValue(v)
		if !ok || len(m) > maxName {
			return s.fail(ErrShape)
		}
		f.Method = m
	case keyParams:
		if v[0] != '{' && v[0] != '[' && v[0] != 'n' {
			return s.fail(ErrShape)
		}
		f.Params = sp
	case keyResult:
		f.Result = sp
	case keyError:
		if v[0] != '{' {
			return s.fail(ErrShape)
		}
		f.Error = sp
	case keySession:
		if v[0] != '"' {
			return nil // not a session id; the receiver judges it
		}
		id, ok := stringValue(v)
		if !ok || len(id) > maxName {
			return s.fail(ErrShape)
		}
		f.Session = id
	case keyRequest:
		f.RequestID = sp
	}
	return nil
}

// isID reports whether v can be a JSON-RPC id: a string, a number or null. A string
// with half a surrogate pair has no one decoded form, so it cannot be an id.
func isID(v []byte) bool {
	if len(v) > maxName {
		return false
	}
	switch v[0] {
	case '"':
		_, ok := stringValue(v)
		return ok
	case '{', '[', 't', 'f':
		return false
	}
	return true
}

// idKey is an id in the form that tables use: equal ids have equal keys, and a number
// never equals a string.
func idKey(v []byte) string {
	if v[0] == '"' {
		if s, ok := stringValue(v); ok {
			return "s" + string(s)
		}
	}
	return string(v)
}

func (s *scanner) value(depth int) error {
	if s.i >= len(s.b) {
		return s.fail(ErrSyntax)
	}
	switch c := s.b[s.i]; c {
	case '"':
		_, _, err := s.str()
		return err
	case '{':
		return s.object(levelPlain, depth)
	case '[':
		return s.array(depth)
	case 't':
		return s.literal("true")
	case 'f':
		return s.literal("false")
	case 'n':
		return s.literal("null")
	default:
		return s.number()
	}
}

func (s *scanner) array(depth int) error {
	if depth >= maxDepth {
		return s.fail(ErrDepth)
	}
	s.i++
	s.space()
	if s.at(']') {
		s.i++
		return nil
	}
	for {
		s.space()
		if err := s.value(depth + 1); err != nil {
			return err
		}
		s.space()
		if s.i >= len(s.b) {
			return s.fail(ErrSyntax)
		}
		switch s.b[s.i] {
		case ',':
			s.i++
		case ']':
			s.i++
			return nil
		default:
			return s.fail(ErrSyntax)
		}
	}
}

func (s *scanner) literal(w string) error {
	if len(s.b)-s.i < len(w) || string(s.b[s.i:s.i+len(w)]) != w {
		return s.fail(ErrSyntax)
	}
	s.i += len(w)
	return nil
}

func (s *scanner) digits() bool {
	from := s.i
	for s.i < len(s.b) && s.b[s.i] >= '0' && s.b[s.i] <= '9' {
		s.i++
	}
	return s.i > from
}

func (s *scanner) number() error {
	if s.at('-') {
		s.i++
	}
	if s.at('0') {
		s.i++
	} else if !s.digits() {
		return s.fail(ErrSyntax)
	}
	if s.at('.') {
		s.i++
		if !s.digits() {
			return s.fail(ErrSyntax)
		}
	}
	if s.at('e') || s.at('E') {
		s.i++
		if s.at('+') || s.at('-') {
			s.i++
		}
		if !s.digits() {
			return s.fail(ErrSyntax)
		}
	}
	return nil
}

const (
	each = 0x0101010101010101
	high = 0x8080808080808080
)

// special has a byte's high bit set where x holds a quote, a backslash or a control
// character. Only the lowest one set is sure, which is the one used.
func special(x uint64) uint64 {
	// Less 0x21 a quote wraps around like the control characters once its bit 0x02 is turned;
	// those bits and a backslash's leave the high bit alone, which says that it is none of them.
	q := (x ^ each*0x02) - each*0x21
	e := (x ^ each*'\\') - each
	return (q | e) &^ x
}

// str reads a string, s.i at its opening quote, and returns what is between the
// quotes. odd says that it holds an escape or a byte beyond ASCII.
func (s *scanner) str() (content []byte, odd bool, err error) {
	b := s.b
	i := s.i + 1
	start := i
	// Most strings are names, too short for the call to pay.
	if len(b)-i > 64 && bytes.IndexByte(b[i:i+16], '"') < 0 {
		i += plain16(b[i:])
	}
	escaped := false
	var wide uint64
	for {
		for len(b)-i >= 32 {
			w := b[i : i+32 : i+32]
			x0, x1 := binary.LittleEndian.Uint64(w), binary.LittleEndian.Uint64(w[8:])
			x2, x3 := binary.LittleEndian.Uint64(w[16:]), binary.LittleEndian.Uint64(w[24:])
			if (special(x0)|special(x1)|special(x2)|special(x3))&high != 0 {
				break
			}
			wide |= (x0 | x1 | x2 | x3) & high
			i += 32
		}
		for len(b)-i >= 8 {
			x := binary.LittleEndian.Uint64(b[i:])
			wide |= x & high
			if m := special(x) & high; m != 0 {
				i += bits.TrailingZeros64(m) >> 3
				goto found
			}
			i += 8
		}
		for ; i < len(b); i++ {
			c := b[i]
			if c == '"' || c == '\\' || c < 0x20 {
				goto found
			}
			wide |= uint64(c & 0x80)
		}
		s.i = i
		return nil, false, s.fail(ErrSyntax)
	found:
		switch b[i] {
		case '"':
			if wide != 0 && !utf8.Valid(b[start:i]) {
				s.i = i
				return nil, false, s.fail(ErrUTF8)
			}
			s.i = i + 1
			return b[start:i], escaped || wide != 0, nil
		case '\\':
			escaped = true
			n := escapeLen(b[i:])
			if n == 0 {
				s.i = i
				return nil, false, s.fail(ErrSyntax)
			}
			i += n
		default: // a control character
			s.i = i
			return nil, false, s.fail(ErrSyntax)
		}
	}
}

// escapeLen is the length of the escape at the start of b, 0 if it is none.
func escapeLen(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2
	case 'u':
		if _, ok := hex4(b); ok {
			return 6
		}
	}
	return 0
}

// hex4 reads \uXXXX.
func hex4(b []byte) (rune, bool) {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	var r rune
	for _, c := range b[2:6] {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c >= 'a' && c <= 'f':
			c -= 'a' - 10
		case c >= 'A' && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// stringValue decodes a JSON string that a scan has accepted. Not ok: v is no string,
// or holds half a surrogate pair.
func stringValue(v []byte) ([]byte, bool) {
	if len(v) < 2 || v[0] != '"' {
		return nil, false
	}
	return unquote(v[1 : len(v)-1])
}

var plainEscapes = [256]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

func unquote(b []byte) ([]byte, bool) {
	if bytes.IndexByte(b, '\\') < 0 {
		return b, true
	}
	out := make([]byte, 0, len(b))
	for len(b) > 0 {
		if b[0] != '\\' {
			n := bytes.IndexByte(b, '\\')
			if n < 0 {
				n = len(b)
			}
			out = append(out, b[:n]...)
			b = b[n:]
			continue
		}
		if b[1] != 'u' {
			out = append(out, plainEscapes[b[1]])
			b = b[2:]
			continue
		}
		r, _ := hex4(b)
		b = b[6:]
		switch {
		case r >= 0xd800 && r < 0xdc00:
			low, ok := hex4(b)
			if !ok || low < 0xdc00 || low > 0xdfff {
				return nil, false
			}
			r = (r-0xd800)<<10 | (low - 0xdc00) + 0x10000
			b = b[6:]
		case r >= 0xdc00 && r <= 0xdfff:
			return nil, false
		}
		out = utf8.AppendRune(out, r)
	}
	return out, true
}

// members calls each for every member of an object that a scan has accepted, in
// order, with the decoded name and the value's span in obj. It returns false when obj
// is no object, or a name has no one decoded form.
func members(obj []byte, each func(name []byte, value Span)) bool {
	if len(obj) == 0 || obj[0] != '{' {
		return false
	}
	s := scanner{b: obj, i: 1}
	for {
		s.space()
		if s.at('}') {
			return true
		}
		if s.at(',') {
			s.i++
			continue
		}
		name, odd, err := s.str()
		if err != nil {
			return false
		}
		if odd {
			plain, ok := unquote(name)
			if !ok {
				return false
			}
			name = plain
		}
		s.space()
		s.i++ // the colon
		s.space()
		start := s.i
		if s.value(0) != nil {
			return false
		}
		each(name, Span{start, s.i})
	}
}

// elements is members for an array.
func elements(arr []byte, each func(value []byte)) bool {
	if len(arr) == 0 || arr[0] != '[' {
		return false
	}
	s := scanner{b: arr, i: 1}
	for {
		s.space()
		if s.at(']') {
			return true
		}
		if s.at(',') {
			s.i++
			continue
		}
		start := s.i
		if s.value(0) != nil {
			return false
		}
		each(arr[start:s.i])
	}
}

// member finds one member of an object, by exact name. ok is false when the object
// holds it twice or in a second spelling; an absent member is an empty span.
func member(obj []byte, name string) (value Span, ok bool) {
	ok = true
	if !members(obj, func(n []byte, v Span) {
		switch {
		case string(n) == name:
			ok = ok && value.Empty()
			value = v
		case bytes.EqualFold(n, []byte(name)):
			ok = false
		}
	}) {
		return Span{}, false
	}
	return value, ok
}
