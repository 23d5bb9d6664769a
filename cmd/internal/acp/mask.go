// What a sandboxed runtime is not told of its client, and its client not of the
// runtime: each capability and each login method by which the runtime could have
// something run, or a file touched, outside the boundary.

package acp

import (
	"bytes"
	"strings"
	"unicode"
)

// fsOffer is what a client offers of fs/*.
type fsOffer struct{ read, write bool }

// plainName is a member name without case and punctuation: terminal-auth,
// terminal_auth and terminalAuth are one.
func plainName(name []byte) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsLetter(r) {
			return -1
		}
		return unicode.ToLower(r)
	}, string(name))
}

// Words in the name of a _meta entry that say a client will run something. Meta keys
// are nobody's standard (Zed: terminal-auth, terminal_output), so the kind is matched.
var runWords = []string{"terminal", "shell", "exec", "spawn", "process", "pty", "runcommand"}

func saysRun(plain string, words []string) bool {
	for _, w := range words {
		if strings.Contains(plain, w) {
			return true
		}
	}
	return false
}

// maxMask is how many objects deep is looked. Each level is read once more than the one around
// it, and a runtime could nest what it says for minutes of our time; no client reads deeper, so
// what lies there is left out.
const maxMask = 16

var empty = []byte("{}")

// rewrite copies an object member by member. each returns what to write for a value,
// nil to leave the member out. When nothing changes obj itself is returned.
func rewrite(obj []byte, each func(name, value []byte) []byte) []byte {
	out := []byte{'{'}
	changed := false
	if !members(obj, func(name []byte, v Span) {
		old := obj[v.Start:v.End]
		now := each(name, old)
		if now == nil {
			changed = true
			return
		}
		if !bytes.Equal(old, now) {
			changed = true
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(quote(out, string(name)), ':'), now...)
	}) {
		// Not an object, or one that nobody reads for certain.
		if len(obj) > 0 && obj[0] == '{' {
			return empty
		}
		return obj
	}
	if !changed {
		return obj
	}
	return append(out, '}')
}

// maskInitialize takes out of initialize's params what the runtime must not be
// offered. It reads version 1 (clientCapabilities) and the version 2 draft (capabilities).
func maskInitialize(params []byte, files bool) []byte {
	return rewrite(params, func(name, v []byte) []byte {
		switch plainName(name) {
		case "clientcapabilities", "capabilities":
			return maskCapabilities(v, files)
		case "meta":
			return maskMeta(v, maxMask)
		}
		return v
	})
}

func maskCapabilities(caps []byte, files bool) []byte {
	return rewrite(caps, func(name, v []byte) []byte {
		switch plain := plainName(name); {
		case plain == "fs":
			return maskFS(v, files)
		case plain == "terminal":
			return []byte("false")
		case plain == "meta":
			return maskMeta(v, maxMask)
		case strings.Contains(plain, "terminal"):
			return nil
		}
		return maskNested(v, maxMask)
	})
}

// maskNested is for what lies deeper: auth.terminal lets the runtime name a command
// line and an environment for the client to run as a login.
func maskNested(v []byte, deep int) []byte {
	if v[0] != '{' {
		return v
	}
	if deep == 0 {
		return empty
	}
	return rewrite(v, func(name, v []byte) []byte {
		switch plain := plainName(name); {
		case plain == "meta":
			return maskMeta(v, deep-1)
		case strings.Contains(plain, "terminal"):
			return nil
		}
		return maskNested(v, deep-1)
	})
}

func maskMeta(v []byte, deep int) []byte {
	if v[0] != '{' {
		return v
	}
	if deep == 0 {
		return empty
	}
	return rewrite(v, func(name, v []byte) []byte {
		if saysRun(plainName(name), runWords) {
			return nil
		}
		return maskMeta(v, deep-1)
	})
}

func maskFS(v []byte, files bool) []byte {
	if !files || v[0] != '{' {
		return []byte(`{"readTextFile":false,"writeTextFile":false}`)
	}
	return maskMeta(v, maxMask)
}

// offerOf reads which of fs/* a client offers in its initialize.
func offerOf(params []byte) (o fsOffer) {
	caps, ok := member(params, "clientCapabilities")
	if !ok || caps.Empty() {
		return o
	}
	obj := params[caps.Start:caps.End]
	fs, ok := member(obj, "fs")
	if !ok || fs.Empty() {
		return o
	}
	obj = obj[fs.Start:fs.End]
	is := func(name string) bool {
		v, ok := member(obj, name)
		return ok && string(obj[v.Start:v.End]) == "true"
	}
	return fsOffer{read: is("readTextFile"), write: is("writeTextFile")}
}

// maskAnswer takes out of initialize's result, or out of an error, the login methods
// that a client would carry out as a command: the runtime could name any command
// there, whether the client offered to run one or not.
func maskAnswer(v []byte) []byte { return maskAnswerTo(v, maxMask) }

func maskAnswerTo(v []byte, deep int) []byte {
	if len(v) == 0 || v[0] != '{' {
		return v
	}
	if deep == 0 {
		return empty
	}
	return rewrite(v, func(name, v []byte) []byte {
		switch plain := plainName(name); {
		case plain == "authmethods":
			return maskMethods(v)
		case strings.Contains(plain, "terminalauth"):
			return nil
		}
		return maskAnswerTo(v, deep-1)
	})
}

func maskMethods(list []byte) []byte {
	out := []byte{'['}
	changed := false
	if !elements(list, func(m []byte) {
		now := maskMethod(m)
		if now == nil {
			changed = true
			return
		}
		changed = changed || !bytes.Equal(m, now)
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(out, now...)
	}) {
		return []byte("[]")
	}
	if !changed {
		return list
	}
	return append(out, ']')
}

func maskMethod(m []byte) []byte {
	terminal := false
	members(m, func(name []byte, v Span) {
		if plainName(name) != "type" {
			return
		}
		kind, _ := stringValue(m[v.Start:v.End])
		terminal = terminal || strings.Contains(plainName(kind), "terminal")
	})
	if terminal {
		return nil
	}
	return rewrite(m, func(name, v []byte) []byte {
		switch plainName(name) {
		case "args", "env", "command", "cmd":
			return nil
		case "meta":
			return maskMethodMeta(v)
		}
		return v
	})
}

// maskMethodMeta also drops an entry that holds a command line under whatever name.
func maskMethodMeta(v []byte) []byte {
	return rewrite(maskMeta(v, maxMask), func(_, v []byte) []byte {
		command := false
		members(v, func(name []byte, _ Span) {
			switch plainName(name) {
			case "args", "argv", "command", "cmd", "program":
				command = true
			}
		})
		if command {
			return nil
		}
		return v
	})
}

// canClose reads from initialize's result whether the runtime knows session/close.
func canClose(result []byte) bool {
	in := func(obj []byte, name string) []byte {
		v, ok := member(obj, name)
		if !ok {
			return nil
		}
		return obj[v.Start:v.End]
	}
	if c := in(in(in(result, "agentCapabilities"), "sessionCapabilities"), "close"); len(c) > 0 {
		return c[0] == '{'
	}
	s := in(in(result, "capabilities"), "session") // version 2: part of every session capability
	return len(s) > 0 && s[0] == '{'
}
