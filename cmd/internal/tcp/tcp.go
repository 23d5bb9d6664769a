// Package tcp has TCP connections for who relays many that are short. Package net sets five options
// of each connection and asks for both of its addresses, also where a listener's options are
// inherited and nobody wants to know an address: half of all system calls that a relayed connection
// takes.
package tcp

import (
	"net"
	"syscall"
	"time"
)

// Conn is a connection whose two directions end by themselves: one of New, or a *net.TCPConn.
type Conn interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
	// SetLinger has Close discard what was not sent, and tell the peer so, where seconds is 0.
	SetLinger(seconds int) error
}

// Reset closes c so that its peer is told that something went wrong.
func Reset(c Conn) {
	_ = c.SetLinger(0) // it is closed below whatever happens here
	_ = c.Close()
}

// What keeps a connection alive on which nothing is said, as package net does by default.
const (
	keepIdle     = 15 * time.Second
	keepInterval = 15 * time.Second
	keepCount    = 9
)
