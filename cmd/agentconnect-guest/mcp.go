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
	conn, err := dialSupervisor(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := ask(conn, wire.GuestRequest{Op: wire.OpMCP, Name: args[0]}); err != nil {
		return fmt.Errorf("mcp: %w", err)
	}
	over := make(chan error, 1)
	go func() {
		_, err := io.Copy(stdout, conn)
		over <- err
	}()
	asked := make(chan error, 1)
	go func() {
		_, err := io.Copy(conn, stdin)
		asked <- errors.Join(err, conn.CloseWrite())
	}()
	// The server ends when its stdin does; what it says until then still goes through.
	select {
	case _ = <-asked: // what the server says counts
		return <-over
	case err := <-over:
		return errors.Join(err, fmt.Errorf("mcp: the server %s has ended", args[0]))
	}
}
