//go:build !linux

package main

import "os"

// held is how many bytes lie in a pipe, at most.
func held(*os.File) int { return inPipe }
