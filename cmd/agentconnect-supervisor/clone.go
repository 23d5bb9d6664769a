package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"agentconnect.md/sandbox/cmd/internal/gitclone"
)

// runClone makes the clone that is asked for as JSON on stdin. It is done here for the same
// reason as the probe.
func runClone() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := clone(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func clone(ctx context.Context) error {
	if os.Getuid() == 0 {
		return errors.New("agents do not run as root; run agentconnect as an ordinary user")
	}
	var q gitclone.Request
	dec := json.NewDecoder(os.Stdin)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&q); err != nil {
		return fmt.Errorf("%w; run `agentconnect agent add --git` instead", err)
	}
	return gitclone.Clone(ctx, q)
}
