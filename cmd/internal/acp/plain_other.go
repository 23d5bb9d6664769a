//go:build !amd64

package acp

func plain16([]byte) int { return 0 }
