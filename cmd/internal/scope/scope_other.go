//go:build !linux

// Package scope puts processes into scopes of systemd; only Linux has it.
package scope
