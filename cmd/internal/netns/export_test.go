//go:build linux

package netns

import "errors"

// SetupWithoutNAT is Setup on a kernel that cannot lead connections.
func SetupWithoutNAT(ports []uint16) (*Passed, error) {
	return setup(ports, func(bool) error { return errors.New("no nft in this test") })
}
