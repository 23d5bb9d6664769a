// Package lazyregexp compiles a pattern when it is first used. A package's variables are made in
// every program that links it, at each start: the patterns of this module's took a millisecond of it.
package lazyregexp

import (
	"regexp"
	"sync"
)

// New is regexp.MustCompile of later: it panics then.
func New(pattern string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
}
