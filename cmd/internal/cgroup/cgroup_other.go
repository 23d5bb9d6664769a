//go:build !linux

// Package cgroup reads control groups; only Linux has them.
package cgroup
