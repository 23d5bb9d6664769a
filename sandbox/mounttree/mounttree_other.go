//go:build !linux

// Package mounttree carries the mounts of a plan out; only Linux has the system calls.
package mounttree
