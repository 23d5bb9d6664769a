//go:build linux && !amd64

package selftest

func archCalls() []Attack { return nil }
