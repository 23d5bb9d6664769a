//go:build linux

package netns

import "errors"

// SetupWithoutNFT is Setup on a kernel that cannot lead connections.
func SetupWithoutNFT(ports []uint16) (*Passed, error) {
	return setup(ports, none, none)
}

// SetupWithoutAssigning is Setup on a kernel that can rewrite where connections go, and no more.
func SetupWithoutAssigning(ports []uint16) (*Passed, error) { return setup(ports, none, redirect) }

func none(bool) error { return errors.New("no nft in this test") }
