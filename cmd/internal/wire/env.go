// Environments as lists of "K=V".

package wire

import "strings"

// MergeEnv puts the entries of over in place of those of the same name in base.
func MergeEnv(base, over []string) []string {
	return append(WithoutEnv(base, over), over...)
}

// WithoutEnv gives the entries of base whose names are not in over.
func WithoutEnv(base, over []string) []string {
	name := func(e string) string { n, _, _ := strings.Cut(e, "="); return n }
	names := make(map[string]bool, len(over))
	for _, o := range over {
		names[name(o)] = true
	}
	out := make([]string, 0, len(base)+len(over))
	for _, e := range base {
		if !names[name(e)] {
			out = append(out, e)
		}
	}
	return out
}
