// Package strictjson reads JSON that people and programs wrote for us where a
// misread key could switch a protection off: no duplicate key, no key that differs
// from a known one by its case alone, no trailing text, no invalid UTF-8, bounded in
// size and depth. It knows no key of its own; encoding/json does the decoding.
package strictjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxDepth bounds nesting: no file of ours needs more, and recursion is by depth.
const MaxDepth = 64

// SyntaxError is text that is not the JSON we accept, with its place.
type SyntaxError struct {
	Line, Column int // from 1; column in bytes
	Msg          string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("line %d, column %d: %s", e.Line, e.Column, e.Msg)
}

// UnknownKeyError is a key that the schema does not have.
type UnknownKeyError struct {
	Path    string // where it stands: "network.moed"
	Nearest string // the known key it resembles, full path; empty if none does
}

func (e *UnknownKeyError) Error() string {
	s := fmt.Sprintf("unknown key %q", e.Path)
	if e.Nearest != "" {
		s += fmt.Sprintf(": did you mean %q?", e.Nearest)
	}
	return s
}

// Member is one key of an object with its value as it was written.
type Member struct {
	Key   string
	Value json.RawMessage
}

// Check reports whether data is one JSON object under the rules of the package.
// Size is in bytes.
func Check(data []byte, size int) error {
	return walk(data, size, nil)
}

// Decode checks data and stores it in the struct that v points to. A key that the
// struct (or one nested in it) does not have is an *UnknownKeyError; keys match
// exactly, by case too. json.RawMessage and any take whatever stands there. null
// means absent for a field, and is refused as an element of a list or a map. The
// top-level keys in also are accepted and left to the caller (see Members).
func Decode(data []byte, size int, v any, also ...string) error {
	if err := walk(data, size, reflect.TypeOf(v).Elem(), also...); err != nil {
		return err
	}
	err := json.Unmarshal(data, v)
	var te *json.UnmarshalTypeError
	if errors.As(err, &te) {
		return at(data, int(te.Offset), fmt.Sprintf("%s must be %s, not %s", cmpOr(te.Field, "the value"), kindName(te.Type), te.Value))
	}
	return err
}

// Object returns the members of a JSON object in their order, after Check.
func Object(data []byte, size int) ([]Member, error) {
	if err := Check(data, size); err != nil {
		return nil, err
	}
	return Members(data)
}

// Members returns the members of an object that was checked before.
func Members(data []byte) ([]Member, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	if t, err := dec.Token(); err != nil {
		return nil, err
	} else if t != json.Delim('{') {
		return nil, errors.New("not a JSON object")
	}
	var ms []Member
	for dec.More() {
		k, err := dec.Token()
		if err != nil {
			return nil, err
		}
		var raw json.RawMessage
		if err := dec.Decode(&raw); err != nil {
			return nil, err
		}
		ms = append(ms, Member{k.(string), raw})
	}
	return ms, nil
}

// Encode writes members as one object, indented by two spaces, with a newline at
// the end. Values keep their own order and spelling.
func Encode(ms []Member) ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range ms {
		if i > 0 {
			b.WriteByte(',')
		}
		k, err := json.Marshal(m.Key)
		if err != nil {
			return nil, err
		}
		b.Write(k)
		b.WriteByte(':')
		b.Write(m.Value)
	}
	b.WriteByte('}')
	var out bytes.Buffer
	if err := json.Indent(&out, b.Bytes(), "", "  "); err != nil {
		return nil, err
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

// Nearest returns the known word that key most likely stands for, or "" when none
// is close: at most a third of its letters apart, case ignored.
func Nearest(key string, known []string) string {
	best, dist := "", 1<<30
	for _, k := range known {
		if d := distance(strings.ToLower(key), strings.ToLower(k)); d < dist {
			best, dist = k, d
		}
	}
	if dist > max(1, len(best)/3) {
		return ""
	}
	return best
}

// distance counts inserted, deleted, replaced and swapped bytes.
func distance(a, b string) int {
	if len(a) > 128 { // a key that long is no typo, and the table is a*b
		return len(a)
	}
	prev2, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], prev2[j-2]+1)
			}
		}
		prev2, prev, cur = prev, cur, prev2
	}
	return prev[len(b)]
}

type walker struct {
	data []byte
	dec  *json.Decoder
}

func walk(data []byte, size int, t reflect.Type, also ...string) error {
	if len(data) > size {
		return fmt.Errorf("%d bytes, more than the %d allowed", len(data), size)
	}
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		return at(data, 0, "starts with a byte order mark: save it as UTF-8 without one")
	}
	if !utf8.Valid(data) {
		off := 0
		for off < len(data) {
			r, n := utf8.DecodeRune(data[off:])
			if r == utf8.RuneError && n == 1 {
				break
			}
			off += n
		}
		return at(data, off, "not valid UTF-8")
	}
	if len(bytes.TrimSpace(data)) == 0 {
		return at(data, 0, "empty: expected a JSON object")
	}
	// The decoder's tokens below tell places roughly; this pass tells them exactly.
	var raw json.RawMessage
	var se *json.SyntaxError
	if err := json.Unmarshal(data, &raw); errors.As(err, &se) {
		switch msg := se.Error(); {
		case strings.Contains(msg, "unexpected end"):
			return at(data, len(data), "ends in the middle")
		case strings.Contains(msg, "after top-level value"):
			return at(data, int(se.Offset)-1, "text after the end of the object")
		default:
			return at(data, int(se.Offset)-1, msg)
		}
	} else if err != nil {
		return at(data, 0, err.Error())
	}
	w := &walker{data: data, dec: json.NewDecoder(bytes.NewReader(data))}
	w.dec.UseNumber()
	tok, err := w.token()
	if err != nil {
		return err
	}
	if tok != json.Delim('{') {
		return at(data, 0, "expected a JSON object")
	}
	return w.object(nil, t, 1, also...)
}

// place is where a value stands. It is written out for an error alone: to do so for each value takes
// as long as the keys above it are, which somebody else may have chosen.
type place struct {
	in    *place // nil for the whole
	key   string
	index int // of an element; its key is empty
}

// mostKey bounds what is shown of one key, in bytes.
const mostKey = 200

func (p *place) String() string {
	var parts []string
	for ; p != nil; p = p.in {
		switch {
		case p.index >= 0:
			parts = append(parts, "["+strconv.Itoa(p.index)+"]")
		case p.in == nil:
			parts = append(parts, shown(p.key))
		default:
			parts = append(parts, "."+shown(p.key))
		}
	}
	slices.Reverse(parts)
	return strings.Join(parts, "")
}

func shown(key string) string {
	if len(key) > mostKey {
		return strings.ToValidUTF8(key[:mostKey], "") + "…"
	}
	return key
}

func (w *walker) token() (json.Token, error) {
	tok, err := w.dec.Token()
	if err == nil {
		return tok, nil
	}
	return nil, at(w.data, int(w.dec.InputOffset()), err.Error())
}

func (w *walker) here() int { return int(w.dec.InputOffset()) }

// object reads the rest of an object whose brace was read.
func (w *walker) object(path *place, t reflect.Type, depth int, also ...string) error {
	if depth > MaxDepth {
		return at(w.data, w.here(), fmt.Sprintf("nested deeper than %d levels", MaxDepth))
	}
	fields, isStruct := structFields(t)
	isMap := t != nil && t.Kind() == reflect.Map
	seen := map[string]bool{}
	for w.dec.More() {
		tok, err := w.token()
		if err != nil {
			return err
		}
		key, ok := tok.(string)
		if !ok {
			return at(w.data, w.here(), "expected a key")
		}
		here := &place{in: path, key: key, index: -1}
		if seen[key] {
			return at(w.data, w.here(), fmt.Sprintf("key %q stands there twice", here.String()))
		}
		seen[key] = true
		var ft reflect.Type
		switch {
		case isStruct:
			if ft, ok = fields[key]; !ok && !slices.Contains(also, key) {
				known := slices.Clone(also)
				for k := range fields {
					known = append(known, k)
				}
				slices.Sort(known)
				e := &UnknownKeyError{Path: here.String()}
				if n := Nearest(key, known); n != "" {
					e.Nearest = (&place{in: path, key: n, index: -1}).String()
				}
				return e
			}
		case isMap:
			ft = t.Elem()
		}
		if err := w.value(here, ft, depth, isMap && !opaque(ft)); err != nil {
			return err
		}
	}
	_, err := w.token() // the closing brace
	return err
}

func (w *walker) value(path *place, t reflect.Type, depth int, noNull bool) error {
	tok, err := w.token()
	if err != nil {
		return err
	}
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if opaque(t) {
		t = nil
	}
	switch tok {
	case nil:
		if noNull {
			return at(w.data, w.here(), fmt.Sprintf("%s must not be null", path))
		}
	case json.Delim('{'):
		return w.object(path, t, depth+1)
	case json.Delim('['):
		if depth+1 > MaxDepth {
			return at(w.data, w.here(), fmt.Sprintf("nested deeper than %d levels", MaxDepth))
		}
		var et reflect.Type
		if t != nil && (t.Kind() == reflect.Slice || t.Kind() == reflect.Array) {
			et = t.Elem()
		}
		for i := 0; w.dec.More(); i++ {
			if err := w.value(&place{in: path, index: i}, et, depth+1, et != nil && !opaque(et)); err != nil {
				return err
			}
		}
		_, err := w.token()
		return err
	}
	return nil
}

// opaque types keep what stands there, or read it by themselves.
func opaque(t reflect.Type) bool {
	if t == nil || t.Kind() == reflect.Interface || t == reflect.TypeFor[json.RawMessage]() {
		return true
	}
	return reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]())
}

func structFields(t reflect.Type) (map[string]reflect.Type, bool) {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil || t.Kind() != reflect.Struct {
		return nil, false
	}
	m := map[string]reflect.Type{}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name != "" && name != "-" && f.IsExported() {
			m[name] = f.Type
		}
	}
	return m, true
}

func at(data []byte, off int, msg string) error {
	off = min(max(off, 0), len(data))
	before := data[:off]
	return &SyntaxError{
		Line:   1 + bytes.Count(before, []byte("\n")),
		Column: off - bytes.LastIndexByte(before, '\n'),
		Msg:    strings.TrimPrefix(msg, "json: "),
	}
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "a string"
	case reflect.Int, reflect.Int64, reflect.Uint64:
		return "a whole number"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "an object"
	}
	return "a " + t.String()
}
