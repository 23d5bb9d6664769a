package strictjson

import (
	"encoding/json"
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type sample struct {
	Name string            `json:"name"`
	On   *bool             `json:"on"`
	Tags []string          `json:"tags"`
	Env  map[string]string `json:"env"`
	Sub  struct {
		Mode string `json:"mode"`
	} `json:"sub"`
	Raw json.RawMessage `json:"raw"`
}

func TestDecodeRefuses(t *testing.T) {
	tests := []struct{ name, in, want string }{
		{"empty", " \n", "empty"},
		{"not an object", `[1]`, "expected a JSON object"},
		{"cut in the middle", "{\n \"name\": \"x", "line 2, column 12: ends in the middle"},
		{"cut after a comma", `{"name": "x",`, "ends in the middle"},
		{"trailing text", `{"name": "x"} {}`, "text after the end"},
		{"trailing garbage", `{} x`, "text after the end"},
		{"unknown key", `{"nmae": "x"}`, `unknown key "nmae": did you mean "name"?`},
		{"key in another case", `{"NAME": "x"}`, `did you mean "name"?`},
		{"unknown nested key", `{"sub": {"moed": "x"}}`, `unknown key "sub.moed": did you mean "sub.mode"?`},
		{"unknown key like nothing", `{"zzzzzz": 1}`, `unknown key "zzzzzz"`},
		{"key twice", `{"name": "a", "name": "b"}`, `key "name" stands there twice`},
		{"key twice by escape", `{"name": "a", "n\u0061me": "b"}`, "twice"},
		{"key twice in a map", `{"env": {"A": "1", "A": "2"}}`, `"env.A" stands there twice`},
		{"key twice in raw", `{"raw": [{"a": 1, "a": 2}]}`, "twice"},
		{"null in a list", `{"tags": ["a", null]}`, "tags[1] must not be null"},
		{"null in a map", `{"env": {"A": null}}`, "env.A must not be null"},
		{"wrong type", `{"name": 1}`, "name must be a string, not number"},
		{"wrong type for a bool", `{"on": "false"}`, "on must be true or false, not string"},
		{"invalid UTF-8", "{\"name\": \"\xff\"}", "line 1, column 11: not valid UTF-8"},
		{"byte order mark", "\xef\xbb\xbf{}", "byte order mark"},
		{"comment", "{\n// x\n}", "line 2"},
		{"too deep", `{"raw": ` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + "}", "nested deeper than"},
		{"too deep, objects", `{"raw": ` + strings.Repeat(`{"a":`, 100) + "1" + strings.Repeat("}", 100) + "}", "nested deeper than"},
		{"too large", `{"name": "` + strings.Repeat("x", 1000) + `"}`, "more than the 1000 allowed"},
		{"mismatched brackets", `{"tags": ["a"}`, "line 1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var v sample
			err := Decode([]byte(tt.in), 1000, &v)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %+v, %v; want an error with %q", v, err, tt.want)
			}
		})
	}
}

func TestDecodeAccepts(t *testing.T) {
	var v sample
	in := `{"name": null, "tags": ["a"], "env": {"A": "1"}, "sub": {"mode": "m"}, "raw": {"x": [null]}, "extra": {"y": 1}}` + "\n"
	if err := Decode([]byte(in), 1000, &v, "extra"); err != nil {
		t.Fatal(err)
	}
	want := sample{Tags: []string{"a"}, Env: map[string]string{"A": "1"}, Raw: json.RawMessage(`{"x": [null]}`)}
	want.Sub.Mode = "m"
	if diff := cmp.Diff(want, v); diff != "" {
		t.Error(diff)
	}
}

func TestEncodeKeepsOrderAndSpelling(t *testing.T) {
	in := `{"b":1.50,"a":{"z":1e2,"y":"\u00e9"},"<":[]}`
	ms, err := Object([]byte(in), 1000)
	if err != nil {
		t.Fatal(err)
	}
	out, err := Encode(ms)
	if err != nil {
		t.Fatal(err)
	}
	want := "{\n  \"b\": 1.50,\n  \"a\": {\n    \"z\": 1e2,\n    \"y\": \"\\u00e9\"\n  },\n  \"\\u003c\": []\n}\n"
	if diff := cmp.Diff(want, string(out)); diff != "" {
		t.Error(diff)
	}
}

func TestNearest(t *testing.T) {
	known := []string{"requireSandbox", "allowUnsandboxedFallback", "url"}
	for in, want := range map[string]string{
		"requireSandbx": "requireSandbox", "require_sandbox": "requireSandbox", "reqiureSandbox": "requireSandbox",
		"ulr": "url", "banana": "", strings.Repeat("x", 1<<16): "",
	} {
		if got := Nearest(in, known); got != want {
			t.Errorf("%.20q: %q, want %q", in, got, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"name": "x", "tags": ["a"], "env": {"A": "1"}, "sub": {"mode": "m"}, "raw": [1, {"a": null}]}`))
	f.Add([]byte(`{"name": "a", "name": "b"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var v sample
		if Decode(data, 1<<16, &v) != nil {
			return
		}
		if !json.Valid(data) {
			t.Fatalf("%q was accepted and is not JSON", data)
		}
		ms, err := Object(data, 1<<16)
		if err != nil {
			t.Fatal(err)
		}
		out, err := Encode(ms)
		if err != nil {
			t.Fatal(err)
		}
		var again sample
		if err := Decode(out, 1<<24, &again); err != nil {
			t.Fatalf("%q written as %q: %v", data, out, err)
		}
		again.Raw, v.Raw = nil, nil // its white space differs
		if diff := cmp.Diff(v, again); diff != "" {
			t.Errorf("%q written as %q:\n%s", data, out, diff)
		}
		var syntax *SyntaxError
		if err := Check(append(data, '}'), 1<<16); !errors.As(err, &syntax) && len(data) < 1<<16 {
			t.Errorf("a brace too many: %v", err)
		}
	})
}

// What a value costs does not go by the length of the keys above it: an agent writes files that are
// read here, and a long key over many values took hours.
func TestALongKeyCostsOnce(t *testing.T) {
	key := strings.Repeat("k", 64<<10)
	for name, in := range map[string]string{
		"elements": `{"raw":{"` + key + `":[` + strings.Repeat("1,", 10_000) + `1]}}`,
		"members":  `{"raw":{"` + key + `":[` + strings.Repeat(`{"a":1},`, 10_000) + `{}]}}`,
		"nested":   `{"raw":` + strings.Repeat(`{"`+key[:1<<10]+`":`, 50) + `[` + strings.Repeat("1,", 10_000) + `1]` + strings.Repeat("}", 50) + `}`,
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := Check([]byte(in), len(in))
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; err != nil || got > 100*uint64(len(in)) {
			t.Errorf("%s: %d bytes took %d of memory, %v", name, len(in), got, err)
		}
	}
	// Nor is all of it said.
	err := Decode([]byte(`{"sub":{"`+key+`":1}}`), 1<<20, new(sample))
	if err == nil || len(err.Error()) > 1000 || !strings.Contains(err.Error(), `"sub.kkk`) {
		t.Errorf("%.100v", err)
	}
}
