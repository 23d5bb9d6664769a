// Package peer says who is at the other end of a Unix connection. It is apart from the
// control client so that small programs can use it without an HTTP stack.
package peer

import (
	"fmt"
	"net"
	"os"
)

// Check refuses a peer that runs as another user than we do. Root is another user, too:
// what root wants it can have in other ways, and it has no agents here.
func Check(c *net.UnixConn) error {
	uid, err := UID(c)
	if err != nil {
		return fmt.Errorf("who is connecting cannot be told: %w", err)
	}
	if uid != os.Getuid() {
		return fmt.Errorf("user %d is not allowed here; this socket is user %d's", uid, os.Getuid())
	}
	return nil
}
