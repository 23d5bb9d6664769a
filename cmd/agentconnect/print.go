// How answers look: aligned text for people, colour on a terminal only, JSON on request.

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"golang.org/x/term"

	"agentconnect.md/sandbox/cmd/internal/control"
)

// oneLine makes text safe and short to print: what an agent or a file says must not
// drive the terminal or forge a second line of ours.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case !unicode.IsPrint(r):
			return '\uFFFD'
		}
		return r
	}, strings.TrimRight(s, "\n"))
}

// printJSON writes v, indented, as the whole answer.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// table aligns cells. Cells must not be coloured: escapes have a width to the aligner.
type table struct{ w *tabwriter.Writer }

func newTable(out io.Writer, head ...string) *table {
	t := &table{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
	if len(head) > 0 {
		t.row(head...)
	}
	return t
}

func (t *table) row(cells ...string) {
	for i := range cells {
		cells[i] = oneLine(cells[i])
	}
	fmt.Fprintln(t.w, strings.TrimRight(strings.Join(cells, "\t"), "\t"))
}

func (t *table) end() error { return t.w.Flush() }

// terminal reports whether stream is one.
func terminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// tint colours a word of state on a terminal.
func (a *app) tint(word string) string {
	if t := a.getenv("TERM"); !terminal(a.out) || a.getenv("NO_COLOR") != "" || t == "" || t == "dumb" {
		return word
	}
	colour := ""
	switch word {
	case control.StateRunning, "ok":
		colour = "32"
	case control.StateStarting, control.StateStopping, control.StateBackoff, "warning":
		colour = "33"
	case control.StateFailed, control.StateRefused:
		colour = "31"
	}
	if colour == "" {
		return word
	}
	return "\x1b[" + colour + "m" + word + "\x1b[0m"
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

func when(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format("2006-01-02 15:04:05")
}

// printLine writes v on one line, for answers that come piece by piece.
func (a *app) printLine(v any) error {
	enc := json.NewEncoder(a.out)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}
