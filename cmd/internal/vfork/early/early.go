// Package early has what Go's own packages change before a program's first line, and the one
// system call that Go cannot make: vfork(2), whose child goes on in the memory of its parent. It
// imports nothing, so that it is initialised before package syscall is, and serves package vfork.
package early
