package accounting

import (
	"strconv"
	"strings"
)

// Bytes writes a size with a binary unit.
func Bytes(n uint64) string {
	for _, u := range []struct {
		size uint64
		name string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.size {
			return strings.TrimSuffix(strconv.FormatFloat(float64(n)/float64(u.size), 'f', 1, 64), ".0") + " " + u.name
		}
	}
	return strconv.FormatUint(n, 10) + " bytes"
}

// Percent writes µs of processor time per second as percent of one processor.
func Percent(n uint64) string { return strconv.FormatUint(n/10_000, 10) + "%" }
