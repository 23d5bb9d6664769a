//go:build !linux

package supervisor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

func scopesAbstractSockets() bool { return false }

// Harden has nothing to do on this system.
func Harden() error { return nil }

func (s *Supervisor) endOrphans() {}

func (s *Supervisor) exec(_ context.Context, conn *net.UnixConn, _ *wire.Request, _ []*os.File) error {
	return writeLine(conn, wire.Reply{Version: wire.Version, Error: "commands inside a boundary need Linux"})
}

func readRequest(conn *net.UnixConn) (*wire.Request, []*os.File, error) {
	line, err := bufio.NewReader(io.LimitReader(conn, wire.MaxRequest)).ReadBytes('\n')
	if len(line) == 0 && errors.Is(err, io.EOF) {
		return nil, nil, errNoRequest
	}
	if err != nil {
		return nil, nil, errors.New("request: cut short or too long")
	}
	var req wire.Request
	if err := json.Unmarshal(line, &req); err != nil {
		return nil, nil, err
	}
	return &req, nil, nil
}
