//go:build !linux

package daemon

import "errors"

func (d *Daemon) serveSpecs(string) (stop func(), err error) {
	return nil, errors.New("supervision by systemd needs Linux")
}
