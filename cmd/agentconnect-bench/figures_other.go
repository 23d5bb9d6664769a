//go:build !linux

package main

import (
	"errors"
	"net"
)

func measurements(int) []measurement { return nil }

func unpaced(net.Conn) error { return errors.ErrUnsupported }
