//go:build !linux

package supervisor

import (
	"errors"
	"net"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

func (s *Supervisor) gitConfig(*net.UnixConn, wire.GitSetting) error {
	return errors.New("git-config: works on Linux alone")
}
