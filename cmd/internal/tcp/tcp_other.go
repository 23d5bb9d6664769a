//go:build !linux

package tcp

import "net"

// Listener accepts connections.
type Listener struct{ l *net.TCPListener }

// Listen takes l over.
func Listen(l *net.TCPListener) (*Listener, error) { return &Listener{l}, nil }

// Accept waits for a connection.
func (l *Listener) Accept() (Conn, error) { return l.l.AcceptTCP() }

// Close ends Accept.
func (l *Listener) Close() error { return l.l.Close() }

// KeepAlive has the kernel find out when the peer of a silent connection is gone.
func KeepAlive(c Conn) error {
	if t, ok := c.(*net.TCPConn); ok {
		return t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepIdle, Interval: keepInterval, Count: keepCount})
	}
	return nil
}
