//go:build !linux

// Package pathfd is the one place where a path becomes a descriptor; on systems
// without openat2 there is no boundary that would need it.
package pathfd
