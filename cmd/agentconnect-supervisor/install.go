package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"agentconnect.md/sandbox/cmd/internal/install"
)

// installWord is the argument that asks for a runtime to be installed.
const installWord = "install"

// runInstall does what stands as JSON on stdin, tells of it on stderr and prints the result.
// It is done here for the same reason as the probe.
func runInstall() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	fail := func(err error) int {
		_ = json.NewEncoder(os.Stdout).Encode(install.Result{Error: err.Error()}) //nolint:errchkjson // or the exit code says it
		return 1
	}
	if os.Getuid() == 0 {
		return fail(errors.New("runtimes are not installed as root; run agentconnect as an ordinary user"))
	}
	var q install.Request
	dec := json.NewDecoder(os.Stdin)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&q); err != nil {
		return fail(fmt.Errorf("%w; run `agentconnect runtimes install` instead", err))
	}
	q.Installer.Say = func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	version, err := q.Installer.Install(ctx, q.Runtime, q.Version)
	if err != nil {
		return fail(err)
	}
	if err := json.NewEncoder(os.Stdout).Encode(install.Result{Version: version}); err != nil {
		return 1
	}
	return 0
}
