// What which version of systemd can do.
package units

import (
	"fmt"
	"strconv"
	"strings"
)

// Version is systemd's major version.
type Version int

// Oldest is the first version that is supported: Ubuntu 22.04's. Older ones work as far as
// nobody has checked.
const Oldest Version = 249

// ParseVersion reads the manager's Version property: "252.39-1~deb12u2", "257~rc2", "v249".
func ParseVersion(s string) (Version, error) {
	digits := strings.TrimPrefix(s, "v")
	if end := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		digits = digits[:end]
	}
	n, err := strconv.Atoi(digits)
	if err != nil || n < 1 || n > 1<<20 {
		return 0, fmt.Errorf("systemd's version %q: it does not begin with a number", s)
	}
	return Version(n), nil
}

// Loss is a property that the running systemd lacks: left out, because one unknown property
// fails the whole call, and said in status.
type Loss struct {
	Unit     string
	Property string
	Since    Version
	Why      string // what is lost, in words for the operator
}

// String says the loss in one line.
func (l Loss) String() string {
	return fmt.Sprintf("%s: %s needs systemd %d: %s", l.Unit, l.Property, l.Since, l.Why)
}

// gate is when a property came, and what its absence costs. An empty why: nothing that an
// operator has to know.
type gate struct {
	since Version
	why   string
}

// gates are the properties that came after Oldest.
var gates = map[string]gate{
	// Earlier versions drop what a service stored when it stops, which is what is asked for.
	"FileDescriptorStorePreserve": {254, ""},
	"RestartSteps":                {254, "the delay between restarts does not grow"},
	"RestartMaxDelayUSec":         {254, ""}, // said by RestartSteps
	"PIDFDs":                      {255, ""}, // Process gives the pid instead
}

// scopeGates are what scopes learned later than services did.
var scopeGates = map[string]gate{
	"OOMPolicy": {253, ""}, // before, the supervisor ends the others
}
