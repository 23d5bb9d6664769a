// agentconnect-supervisor holds one running agent. It is started by the daemon or by the
// user's service manager with a sealed spec on descriptor 3, and ends with the agent.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/coreos/go-systemd/v22/daemon"

	"agentconnect.md/sandbox/cmd/internal/supervisor"

	"agentconnect.md/sandbox/cmd/internal/version"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// Descriptors that whoever starts us passes.
const (
	specFD     = 3 // the sealed spec
	lifelineFD = 4 // a pipe whose end of file says that the daemon is gone (direct mode)
)

// maxSpec bounds the spec, in bytes.
const maxSpec = 16 << 20

func main() { os.Exit(run()) }

func run() int {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey && len(groups) == 0 {
			return slog.Attr{} // whoever reads our stderr stamps the lines
		}
		return a
	}}))
	fail := func(code int, err error) int {
		notify("STATUS=" + err.Error())
		log.Error(err.Error())
		return code
	}
	if os.Getuid() == 0 {
		return fail(1, errors.New("agents do not run as root; start agentconnect as an ordinary user"))
	}
	if err := supervisor.Harden(); err != nil {
		return fail(1, err)
	}
	// It mostly waits: a small heap matters more than few collections.
	debug.SetGCPercent(40)
	spec, err := readSpec()
	if err != nil {
		return fail(78, fmt.Errorf("sealed spec: %w; agentconnect-supervisor is started by the daemon, not by hand", err))
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ctx = lifeline(ctx)
	s, err := supervisor.New(*spec, supervisor.Options{Log: log, Notify: notify, Build: version.Version})
	if err != nil {
		return fail(78, err)
	}
	if err := s.Run(ctx); err != nil {
		return fail(supervisor.ExitCode(err), err)
	}
	return 0
}

// notify tells the service manager, or the daemon in its place; without one nobody.
func notify(state string) { _, _ = daemon.SdNotify(false, state) }

func readSpec() (*wire.Spec, error) {
	f := os.NewFile(specFD, "spec")
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSpec))
	if err != nil {
		return nil, err
	}
	var spec wire.Spec
	if err := json.Unmarshal(b, &spec); err != nil {
		return nil, err
	}
	return &spec, nil
}

// lifeline ends the context with the daemon that holds the other end of descriptor 4.
func lifeline(ctx context.Context) context.Context {
	var st syscall.Stat_t
	if err := syscall.Fstat(lifelineFD, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFIFO {
		return ctx
	}
	syscall.CloseOnExec(lifelineFD)
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		var b [1]byte
		f := os.NewFile(lifelineFD, "lifeline")
		for {
			if n, err := f.Read(b[:]); n == 0 || err != nil {
				cancel(errors.New("the daemon is gone"))
				return
			}
		}
	}()
	return ctx
}
