package acp

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestFrameFields(t *testing.T) {
	type fields struct{ ID, Method, Params, Result, Error, Session, RequestID string }
	for _, c := range []struct {
		in   string
		want fields
	}{
		{`{"jsonrpc":"2.0","id":1,"method":"session/prompt","params":{"sessionId":"s","prompt":[{"sessionId":"no"}]}}`,
			fields{ID: "1", Method: "session/prompt", Params: `{"sessionId":"s","prompt":[{"sessionId":"no"}]}`, Session: "s"}},
		{" {\"params\" : { \"a\":{\"sessionId\":1} , \"sessionId\" : \"\\u0041\\ud83d\\ude00\\n\" } ,\"method\":\"a\\/b\",\"jsonrpc\":\"2.0\"}\r\n",
			fields{Method: "a/b", Params: `{ "a":{"sessionId":1} , "sessionId" : "\u0041\ud83d\ude00\n" }`, Session: "A😀\n"}},
		{`{"jsonrpc":"2.0","id":"x","result":{"sessionId":"r","x":null}}`, fields{ID: `"x"`, Result: `{"sessionId":"r","x":null}`, Session: "r"}},
		{`{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"m"}}`, fields{ID: "null", Error: `{"code":1,"message":"m"}`}},
		{`{"jsonrpc":"2.0","id":-1.5e+3,"result":null}`, fields{ID: "-1.5e+3", Result: "null"}},
		{`{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":"9"}}`, fields{Method: "$/cancel_request", Params: `{"requestId":"9"}`, RequestID: `"9"`}},
		{`{"jsonrpc":"2.0","method":"m","params":{"session\u0049d":"esc"}}`, fields{Method: "m", Params: `{"session\u0049d":"esc"}`, Session: "esc"}},
		{`{"jsonrpc":"2.0","method":"m","params":{"sessionId":5},"extra":[1,2,{}]}`, fields{Method: "m", Params: `{"sessionId":5}`}},
	} {
		var f Frame
		if err := ParseFrame([]byte(c.in), &f); err != nil {
			t.Errorf("%s: %v", c.in, err)
			continue
		}
		got := fields{string(f.Bytes(f.ID)), string(f.Method), string(f.Bytes(f.Params)), string(f.Bytes(f.Result)), string(f.Bytes(f.Error)), string(f.Session), string(f.Bytes(f.RequestID))}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s: %s", c.in, d)
		}
	}
}

func TestFrameRefused(t *testing.T) {
	for _, c := range []struct {
		name, in string
		want     error
	}{
		{"nothing", "", ErrSyntax},
		{"a banner", "Welcome!", ErrSyntax},
		{"an escape sequence", "\x1b[2J{}", ErrSyntax},
		{"half a line", `{"jsonrpc":"2.0","id":1,"resu`, ErrSyntax},
		{"two values", `{"jsonrpc":"2.0","method":"m"} {}`, ErrSyntax},
		{"trailing comma", `{"jsonrpc":"2.0","method":"m",}`, ErrSyntax},
		{"leading zero", `{"jsonrpc":"2.0","id":01,"method":"m"}`, ErrSyntax},
		{"raw control character", "{\"jsonrpc\":\"2.0\",\"method\":\"a\tb\"}", ErrSyntax},
		{"bad escape", `{"jsonrpc":"2.0","method":"\x41"}`, ErrSyntax},
		{"batch", `[{"jsonrpc":"2.0","method":"m"}]`, ErrBatch},
		{"not UTF-8", "{\"jsonrpc\":\"2.0\",\"method\":\"m\",\"params\":{\"a\":\"\xff\"}}", ErrUTF8},
		{"not UTF-8 in a name", "{\"jsonrpc\":\"2.0\",\"method\":\"m\",\"\xc3\":1}", ErrUTF8},
		{"surrogate in bytes", "{\"jsonrpc\":\"2.0\",\"method\":\"m\",\"params\":[\"\xed\xa0\x80\"]}", ErrUTF8},
		{"two ids", `{"jsonrpc":"2.0","id":1,"id":2,"method":"m"}`, ErrAmbiguous},
		{"two methods, one escaped", `{"jsonrpc":"2.0","id":1,"method":"m","m\u0065thod":"n"}`, ErrAmbiguous},
		{"method in another case", `{"jsonrpc":"2.0","id":1,"method":"m","Method":"terminal/create"}`, ErrAmbiguous},
		{"params with a long s", `{"jsonrpc":"2.0","method":"m","paramſ":{}}`, ErrAmbiguous},
		{"two session ids", `{"jsonrpc":"2.0","method":"m","params":{"sessionId":"a","sessionId":"b"}}`, ErrAmbiguous},
		{"session id in another case", `{"jsonrpc":"2.0","method":"m","params":{"SESSIONID":"a"}}`, ErrAmbiguous},
		{"two session ids in a result", `{"jsonrpc":"2.0","id":1,"result":{"sessionId":"a","sessionId":"a"}}`, ErrAmbiguous},
		{"half a surrogate pair in a name", `{"jsonrpc":"2.0","method":"m","\ud800":1}`, ErrAmbiguous},
		{"half a surrogate pair in a session id", `{"jsonrpc":"2.0","method":"m","params":{"sessionId":"\ud800"}}`, ErrShape},
		{"no version", `{"method":"m"}`, ErrShape},
		{"version 1", `{"jsonrpc":"1.0","method":"m"}`, ErrShape},
		{"a log line", `{"level":"info","msg":"hello"}`, ErrShape},
		{"an object as id", `{"jsonrpc":"2.0","id":{},"method":"m"}`, ErrShape},
		{"true as id", `{"jsonrpc":"2.0","id":true,"method":"m"}`, ErrShape},
		{"a number as method", `{"jsonrpc":"2.0","id":1,"method":1}`, ErrShape},
		{"a string as params", `{"jsonrpc":"2.0","id":1,"method":"m","params":"p"}`, ErrShape},
		{"result and error", `{"jsonrpc":"2.0","id":1,"result":1,"error":{}}`, ErrShape},
		{"neither", `{"jsonrpc":"2.0","id":1}`, ErrShape},
		{"call and answer", `{"jsonrpc":"2.0","id":1,"method":"m","result":1}`, ErrShape},
		{"an endless id", `{"jsonrpc":"2.0","id":"` + strings.Repeat("x", maxName) + `","method":"m"}`, ErrShape},
		{"depth of arrays", `{"jsonrpc":"2.0","method":"m","params":` + strings.Repeat("[", 100000), ErrDepth},
		{"depth of objects", `{"jsonrpc":"2.0","method":"m","params":` + strings.Repeat(`{"a":`, 100000), ErrDepth},
	} {
		var f Frame
		err := ParseFrame([]byte(c.in), &f)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
		var fe *FrameError
		if !errors.As(err, &fe) {
			t.Errorf("%s: %T is not a *FrameError", c.name, err)
		}
	}
}

// Every position of a special byte relative to the eight-byte steps.
func TestFrameStringScanAtEachOffset(t *testing.T) {
	for pad := range 40 {
		for _, tail := range []string{``, `\"`, `\\`, `é`, `\u00e9`, "😀"} {
			s := strings.Repeat("x", pad) + tail
			line := `{"jsonrpc":"2.0","method":"m","params":{"sessionId":"` + s + `"}}`
			var f Frame
			if err := ParseFrame([]byte(line), &f); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			var want string
			if err := json.Unmarshal([]byte(`"`+s+`"`), &want); err != nil {
				t.Fatal(err)
			}
			if string(f.Session) != want {
				t.Errorf("%s: got %q", line, f.Session)
			}
			for _, bad := range []string{"\x00", "\x1f", "\n", "\xff", "\xc3"} {
				line := `{"jsonrpc":"2.0","method":"m","params":{"sessionId":"` + strings.Repeat("x", pad) + bad + `yyyyyyyyyyyy"}}`
				if ParseFrame([]byte(line), &f) == nil {
					t.Errorf("%q accepted", line)
				}
			}
		}
	}
}

func TestFrameSpliceKeepsTheRestVerbatim(t *testing.T) {
	in := `{ "x":1e2 ,"id" : "a\u0062" , "jsonrpc":"2.0","method":"m" }`
	var f Frame
	if err := ParseFrame([]byte(in+"\n"), &f); err != nil {
		t.Fatal(err)
	}
	before, after := f.Splice(f.ID)
	if got, want := string(before)+"77"+string(after), strings.Replace(in, `"a\u0062"`, "77", 1); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestFrameNeedsNoAllocation(t *testing.T) {
	line := []byte(`{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"hé"}}}}`)
	var f Frame
	if n := testing.AllocsPerRun(100, func() {
		if ParseFrame(line, &f) != nil {
			t.Error("refused")
		}
	}); n > 1 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzFrame(f *testing.F) {
	for _, s := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"session/prompt","params":{"sessionId":"s"}}`,
		`{"jsonrpc":"2.0","id":"\u00e9","result":{"sessionId":"s\n","a":[1,2.5e-3,true,null]}}`,
		`{"jsonrpc":"2.0","id":null,"error":{"code":-1,"message":"x"}}`,
		`{"jsonrpc":"2.0","method":"$/cancel_request","params":{"requestId":3}}`,
		`[{}]`, `{"jsonrpc":"2.0","method":"\ud83d\ude00"}`, "{\"\xff\":1}",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var fr Frame
		if ParseFrame(in, &fr) != nil {
			return
		}
		if !json.Valid(in) || !utf8.Valid(in) {
			t.Fatalf("accepted %q", in)
		}
		// Go's decoder takes the last of two names and folds their case: that it agrees
		// shows that there is one reading only.
		var want struct {
			JSONRPC string          `json:"jsonrpc"`
			ID      json.RawMessage `json:"id"`
			Method  *string         `json:"method"`
			Params  json.RawMessage `json:"params"`
			Result  json.RawMessage `json:"result"`
			Error   json.RawMessage `json:"error"`
		}
		if err := json.Unmarshal(in, &want); err != nil {
			t.Fatalf("%q: %v", in, err)
		}
		same := func(what string, got []byte, want []byte) {
			if !bytes.Equal(got, want) {
				t.Fatalf("%q: %s is %q, want %q", in, what, got, want)
			}
		}
		same("id", fr.Bytes(fr.ID), want.ID)
		same("params", fr.Bytes(fr.Params), want.Params)
		same("result", fr.Bytes(fr.Result), want.Result)
		same("error", fr.Bytes(fr.Error), want.Error)
		if (fr.Method != nil) != (want.Method != nil) || want.Method != nil && *want.Method != string(fr.Method) {
			t.Fatalf("%q: method is %q", in, fr.Method)
		}
		body := want.Params
		if fr.IsResponse() {
			body = want.Result
		}
		var inner struct {
			Session any `json:"sessionId"`
		}
		if len(body) > 0 && body[0] == '{' {
			if err := json.Unmarshal(body, &inner); err != nil {
				t.Fatalf("%q: %v", body, err)
			}
		}
		id, _ := inner.Session.(string)
		same("session", fr.Session, []byte(id))
		if !fr.ID.Empty() {
			before, after := fr.Splice(fr.ID)
			if !json.Valid(bytes.Join([][]byte{before, []byte("7"), after}, nil)) {
				t.Fatalf("%q: splice broke it", in)
			}
		}
		for _, obj := range [][]byte{fr.Raw, fr.Bytes(fr.Params), fr.Bytes(fr.Result)} {
			members(obj, func(_ []byte, v Span) {
				if !json.Valid(obj[v.Start:v.End]) {
					t.Fatalf("%q: member %q", obj, obj[v.Start:v.End])
				}
			})
		}
		for _, out := range [][]byte{maskInitialize(fr.Raw, true), maskAnswer(fr.Raw)} {
			if !json.Valid(out) {
				t.Fatalf("%q: masked: %q", in, out)
			}
		}
	})
}

func TestLines(t *testing.T) {
	read := func(r io.Reader, most int) (lines []string, err error) {
		l := NewLineReader(r)
		l.max = most
		for {
			b, err := l.Next()
			if len(b) > 0 {
				lines = append(lines, string(b))
			}
			if err != nil {
				return lines, err
			}
		}
	}
	in := "a\n\nbb\r\n" + strings.Repeat("x", 100_000) + "\nrest"
	want := strings.SplitAfter(in, "\n")
	for name, r := range map[string]io.Reader{
		"whole": strings.NewReader(in), "one byte a read": iotest.OneByteReader(strings.NewReader(in)),
		"half reads": iotest.HalfReader(strings.NewReader(in)), "error with data": iotest.DataErrReader(strings.NewReader(in)),
	} {
		got, err := read(r, 100_000)
		if d := cmp.Diff(want, got); d != "" || !errors.Is(err, io.EOF) {
			t.Errorf("%s: %v %s", name, err, d)
		}
	}
	if got, err := read(strings.NewReader(in), 99_999); !errors.Is(err, ErrFrameTooLarge) || len(got) != 3 {
		t.Errorf("one byte too long: %d lines, %v", len(got), err)
	}
	if _, err := read(iotest.OneByteReader(strings.NewReader(strings.Repeat("y", 5000))), 4096); !errors.Is(err, ErrFrameTooLarge) {
		t.Errorf("no newline: %v", err)
	}
}

type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	n := min(len(p), 999)
	for i := range n {
		p[i] = 'z'
	}
	e.read += n
	return n, nil
}

func TestLinesWithoutNewlineEndAt64MiB(t *testing.T) {
	src := &endless{}
	l := NewLineReader(src)
	_, err := l.Next()
	if !errors.Is(err, ErrFrameTooLarge) || src.read > MaxFrame+1000 || len(l.buf) > MaxFrame+2 {
		t.Errorf("%v after %d bytes, buffer %d", err, src.read, len(l.buf))
	}
	line := append(bytes.Repeat([]byte("f"), MaxFrame), '\n')
	l = NewLineReader(iotest.DataErrReader(bytes.NewReader(append(line, "next\n"...))))
	got, err := l.Next()
	if err != nil || len(got) != MaxFrame+1 {
		t.Fatalf("a frame of 64 MiB: %d bytes, %v", len(got), err)
	}
	if got, err := l.Next(); string(got) != "next\n" || err != nil && !errors.Is(err, io.EOF) {
		t.Errorf("after it: %q %v", got, err)
	}
	l.Next()
	if len(l.buf) > lineKeep {
		t.Errorf("idle reader keeps %d bytes", len(l.buf))
	}
}

func BenchmarkParseFrame(b *testing.B) {
	for name, text := range map[string]string{"ascii": strings.Repeat("plain text ", 6000), "wide": strings.Repeat("größer 世界 ", 4000), "escapes": strings.Repeat(`line of code\n`, 5000)} {
		line := []byte(`{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":{"content":{"text":"` + text + `"}}}}`)
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(line)))
			b.ReportAllocs()
			var f Frame
			for b.Loop() {
				if err := ParseFrame(line, &f); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func TestPlainStopsBeforeEveryByteThatMatters(t *testing.T) {
	for length := range 100 {
		text := bytes.Repeat([]byte{'x'}, length)
		if n := plain16(text); n > length || n != 0 && n != length/16*16 {
			t.Fatalf("of %d plain bytes %d are plain", length, n)
		}
		for at := range length {
			for c := range 256 {
				text[at] = byte(c)
				special := c < 0x20 || c == '"' || c == '\\' || c >= 0x80
				if n := plain16(text); special && n > at/16*16 || !special && n != plain16(bytes.Repeat([]byte{'x'}, length)) {
					t.Fatalf("byte %#x at %d of %d: %d are plain", c, at, length, n)
				}
			}
			text[at] = 'x'
		}
	}
}
