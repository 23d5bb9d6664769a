//go:build linux && !amd64

package selftest

// foreign is empty: the other architectures have no second entry for one program.
var foreign = map[string]func() error{}
