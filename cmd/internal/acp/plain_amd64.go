package acp

// plain16 is how many bytes at the start of b are sure to be ASCII without control characters,
// quotes and backslashes: all of them up to the last whole 16 before the first other one.
//
//go:noescape
func plain16(b []byte) int
