package daemon

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// userHz is the unit of times in /proc: fixed by the kernel's interface.
const userHz = 100

// bornAfter reports whether the process pid began after t (by more than the clocks'
// coarseness), so that it cannot be the one that wrote its pid down at t: the number
// was given out again.
func bornAfter(pid int, t time.Time) bool {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// The program's name may hold spaces and parentheses; the last one ends it.
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	const startTime = 22 - 3 // field 22 of proc(5), counted from field 3
	if len(fields) <= startTime {
		return false
	}
	ticks, err := strconv.ParseInt(fields[startTime], 10, 64)
	if err != nil {
		return false
	}
	boot, ok := bootTime()
	if !ok {
		return false
	}
	born := boot.Add(time.Duration(ticks) * time.Second / userHz)
	return born.After(t.Add(2 * time.Second))
}

func bootTime() (time.Time, bool) {
	raw, err := os.ReadFile("/proc/stat")
	if err != nil {
		return time.Time{}, false
	}
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, "btime "); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(rest), 10, 64)
			return time.Unix(n, 0), err == nil
		}
	}
	return time.Time{}, false
}
