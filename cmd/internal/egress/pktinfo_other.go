//go:build !linux

package egress

// answerFrom is for Linux, the only system with a boundary.
func answerFrom([]byte) []byte { return nil }
