package daemon

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// maxWord bounds a line that comes from a runtime or a supervisor, bytes.
const maxWord = 4 << 10

// printable returns one line of text that is safe on a terminal: what an agent says
// must not move the operator's cursor, set the title or answer for the keyboard.
// Control and unassigned characters and broken UTF-8 come out as Go escapes.
func printable(s string) string {
	if len(s) > maxWord {
		s = s[:maxWord] + "…"
	}
	var b strings.Builder
	for i, r := range s {
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(s[i:], "\uFFFD"):
			b.WriteString(`\x` + strconv.FormatUint(uint64(s[i])|0x100, 16)[1:])
		case r == '\t' || unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		}
	}
	return b.String()
}
