// The bridge to an MCP server that runs outside.

package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// mcpBridge copies between stdin and stdout and a server outside, until either side ends.
func mcpBridge(ctx context.Context, args []string, stdin io.Reader, stdout io.Writer) error {
	if len(args) != 1 {
		return usage("mcp: usage: mcp NAME")
	}
	bridged, err := bridge(ctx, wire.GuestRequest{Op: wire.OpMCP, Name: args[0]}, stdin, stdout)
	switch {
	case err != nil:
		return fmt.Errorf("mcp: %w", err)
	case !bridged:
		return fmt.Errorf("mcp: the server %s has ended", args[0])
	}
	return nil
}

// bridge asks the supervisor for a stream and copies between it and stdin and stdout until
// either side ends; asked tells whether stdin did first.
func bridge(ctx context.Context, req wire.GuestRequest, stdin io.Reader, stdout io.Writer) (asked bool, err error) {
	conn, err := dialSupervisor(ctx)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	if _, err := ask(conn, req); err != nil {
		return false, err
	}
	over := make(chan error, 1)
	go func() {
		_, err := io.Copy(stdout, conn)
		over <- err
	}()
	said := make(chan error, 1)
	go func() {
		_, err := io.Copy(conn, stdin)
		said <- errors.Join(err, conn.CloseWrite())
	}()
	// The other side ends when its stdin does; what it says until then still goes through.
	select {
	case _ = <-said: // what it says counts
		return true, <-over
	case err := <-over:
		return false, err
	}
}

// push connects git to what receives the agent's commits outside. git itself reads from the
// stream whether they were taken.
func push(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	if _, err := bridge(ctx, wire.GuestRequest{Op: wire.OpPush}, stdin, stdout); err != nil {
		return fmt.Errorf("git-receive-pack: %w", err)
	}
	return nil
}
