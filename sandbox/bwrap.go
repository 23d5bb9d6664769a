// What versions of bubblewrap can do.

package sandbox

import (
	"fmt"
	"strings"
)

// BwrapVersion is a version of bubblewrap.
type BwrapVersion [3]int

// BwrapOldest is the oldest that the boundary is tested with (Ubuntu 22.04).
var BwrapOldest = BwrapVersion{0, 6, 0}

// bwrapDisableUserns is the first with --disable-userns.
var bwrapDisableUserns = BwrapVersion{0, 8, 0}

// ParseBwrapVersion reads the first line of `bwrap --version`. Only the number at its end
// counts: the words in front may change.
func ParseBwrapVersion(line string) (v BwrapVersion, ok bool) {
	fields := strings.Fields(line)
	if len(fields) == 0 {
		return v, false
	}
	n, err := fmt.Sscanf(fields[len(fields)-1], "%d.%d.%d", &v[0], &v[1], &v[2])
	return v, err == nil && n == 3
}

// Before reports whether v is older than w.
func (v BwrapVersion) Before(w BwrapVersion) bool {
	for i := range v {
		if v[i] != w[i] {
			return v[i] < w[i]
		}
	}
	return false
}

// DisablesUserns reports whether it can forbid user namespaces inside. Where it cannot,
// the system call filter alone does.
func (v BwrapVersion) DisablesUserns() bool { return !v.Before(bwrapDisableUserns) }
