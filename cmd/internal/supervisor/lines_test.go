package supervisor

import (
	"fmt"
	"strings"
	"testing"
)

// A runtime that prints without end costs its supervisor, and the journal, a bounded number of lines.
func TestLinesWithoutEndAreCountedAndNotLogged(t *testing.T) {
	const lines = 100_000
	logged, left := 0, 0
	forEachLine(strings.NewReader("first\n"+strings.Repeat("a\n", lines)+"the end"), func(line string) {
		if n := 0; strings.HasSuffix(line, "are left out") {
			if _, err := fmt.Sscanf(line, "%d more lines", &n); err != nil {
				t.Error(err)
			}
			left += n
			return
		}
		if logged++; logged == 1 && line != "first" {
			t.Errorf("the first is %q", line)
		}
	})
	if logged < lineBurst || logged > 2*lineBurst || logged+left != lines+2 {
		t.Errorf("of %d lines %d were logged and %d counted", lines+2, logged, left)
	}
	// Who prints little is heard to the last word.
	var got []string
	forEachLine(strings.NewReader("one\n\ntwo \x1b[2J\n"+strings.Repeat("x", 5000)+"\nend"), func(line string) { got = append(got, line) })
	if len(got) != 4 || got[1] != `two \x1b[2J` || !strings.HasSuffix(got[2], "x …") || got[3] != "end" {
		t.Errorf("%.80q", got)
	}
}
