// The parts that only Linux has.
package dbusctl

import (
	"context"
	"io/fs"
	"net"
	"syscall"

	"github.com/godbus/dbus/v5"
)

// owner is the uid of a file.
func owner(info fs.FileInfo) (int, bool) {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(stat.Uid), true
}

// dial connects to the socket of a bus; the result can pass descriptors.
func dial(ctx context.Context, path string, options ...dbus.ConnOption) (*dbus.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return dbus.DialUnix(conn.(*net.UnixConn), options...)
}
