// Without it the runtime looks once a minute whether the processors that it may use have changed,
// and wakes other threads for that, in each supervisor that nobody uses.
//
//go:debug updatemaxprocs=0

// agentconnect-supervisor holds one running agent and ends with it.
//
//	agentconnect-supervisor                    started by the daemon: the sealed spec is descriptor 3
//	agentconnect-supervisor ID SPEC-SOCKET [NETWORK]
//	                                           started by the user's service manager: the spec comes from
//	                                           the daemon, or from the service's file descriptor store; it is
//	                                           expected to have a boundary and this network mode
//	agentconnect-supervisor probe              for "agentconnect probe": tries the boundary, starts no agent
//	agentconnect-supervisor install            for "agentconnect runtimes install": npm in a boundary of its own
//	agentconnect-supervisor clone              for "agentconnect agent add --git": the agent's clone, in its boundary
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"agentconnect.md/sandbox/cmd/internal/gitclone"
	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/rest"
	"agentconnect.md/sandbox/cmd/internal/stops"
	"agentconnect.md/sandbox/cmd/internal/supervisor"
	"agentconnect.md/sandbox/cmd/internal/version"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// Descriptors that the daemon passes under direct supervision.
const (
	specFD     = 3 // the sealed spec
	lifelineFD = 4 // a pipe whose end of file says that the daemon is gone
)

// Exit codes besides supervisor.ExitCode's.
const (
	exitUnavailable = 69
	exitNoDaemon    = 75
	exitBadSpec     = 78
)

func main() { os.Exit(run()) }

func run() int {
	if len(os.Args) == 2 && os.Args[1] == probeWord {
		return runProbe()
	}
	if len(os.Args) == 2 && os.Args[1] == installWord {
		return runInstall()
	}
	if len(os.Args) == 2 && os.Args[1] == gitclone.Word {
		return runClone()
	}
	agent := ""
	if len(os.Args) > 1 {
		agent = os.Args[1]
	}
	log := slog.New(newHandler(os.Stderr, agent))
	fail := func(code int, err error) int {
		notify("STATUS=" + strings.ReplaceAll(err.Error(), "\n", " "))
		log.Error(err.Error())
		if agent != "" && (code == exitUnavailable || code == exitNoDaemon || code == exitBadSpec) {
			forgive(agent)
		}
		return code
	}
	if os.Getuid() == 0 {
		return fail(1, errors.New("agents do not run as root; start agentconnect as an ordinary user"))
	}
	if err := supervisor.Harden(); err != nil {
		return fail(1, err)
	}
	// A start is short: garbage waits until it is done.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(startMemory)
	// When the daemon is gone so is the reader of our stderr: a word there must not end us
	// before the agent has ended. Nor must SIGHUP, which asks for a reload mostly: systemd takes an
	// end by it for a good one, and would start no other. Caught and not ignored, since a runtime
	// would inherit that.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE, syscall.SIGHUP)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	opts := supervisor.Options{Log: log, Notify: notify, Build: version.Version}
	var spec *wire.Spec
	var manager *link
	var err error
	switch len(os.Args) {
	case 1:
		ctx = lifeline(ctx)
		spec, err = supervisor.ReadSpec(os.NewFile(specFD, "spec"))
	case 3, 4:
		if len(os.Args) == 4 {
			// Without one the runtime's start makes another, or says why there is none.
			opts.Ahead, _ = supervisor.Begin(sandbox.NetworkMode(os.Args[3]))
			defer opts.Ahead.Drop()
		}
		manager = dial(ctx)
		spec, err = managedSpec(ctx, log, os.Args[1], os.Args[2])
		opts.Keep = keepSpec
	default:
		err = errors.New("wrong arguments")
	}
	if err == nil && spec.Managed {
		opts.Placer, err = placer(spec, manager)
	}
	var refused *supervisor.SpecError
	switch {
	case err == nil:
	case ctx.Err() != nil: // told to stop meanwhile
		notify("STATUS=" + supervisor.StoppedWord)
		return 0
	case errors.As(err, &refused):
		return fail(refused.Code, err)
	case errors.Is(err, errNoDaemon):
		return fail(exitNoDaemon, err)
	default:
		return fail(exitBadSpec, fmt.Errorf("sealed spec: %w; agentconnect-supervisor is started by the daemon or by systemd, not by hand", err))
	}
	// Not of a single command's, which the daemon started itself.
	if opts.Placer != nil && len(os.Args) > 1 {
		defer rememberStop(ctx, log, spec, os.Args[2])()
	}
	if err := probed(spec); err != nil {
		return fail(exitUnavailable, err)
	}
	s, err := supervisor.New(*spec, opts)
	if err != nil {
		return fail(exitBadSpec, err)
	}
	if err := s.Run(ctx); err != nil {
		return fail(supervisor.ExitCode(err), err)
	}
	return 0
}

// probed refuses a start against the probe's last result: its unit may have passed at boot
// and failed when it was asked again, which stops no agent but starts none either.
func probed(spec *wire.Spec) error {
	if !spec.Managed || !spec.Sandboxed || spec.ProbeFile == "" {
		return nil
	}
	var result struct {
		OK   bool   `json:"ok"`
		Code string `json:"code"`
	}
	b, err := os.ReadFile(spec.ProbeFile)
	if err == nil {
		err = json.Unmarshal(b, &result)
	}
	if err != nil {
		return fmt.Errorf("the sandbox is unavailable: the probe left no result (%w); run `agentconnect probe`", err)
	}
	if !result.OK {
		return fmt.Errorf("the sandbox is unavailable: the probe says %s; run `agentconnect probe` to see why and what to do", result.Code)
	}
	return nil
}

var errNoDaemon = errors.New("no daemon answers")

// managedSpec asks the daemon, whose word is the newest; without one the spec that the
// service kept over the restart serves. With neither nothing starts.
func managedSpec(ctx context.Context, log *slog.Logger, id, socket string) (*wire.Spec, error) {
	stored := supervisor.StoredSpec(os.Environ())
	// Package json gets to know the type while the daemon makes the spec.
	go func() { _ = json.Unmarshal([]byte("{}"), new(wire.Spec)) }()
	f, err := supervisor.AskSpec(ctx, socket, id)
	var refused *supervisor.SpecError
	switch {
	case err == nil:
		if stored != nil {
			stored.Close()
		}
		if serr := supervisor.StoreSpec(os.Getenv("NOTIFY_SOCKET"), f); serr != nil {
			log.Warn("the spec is not kept: a restart needs the daemon", "error", serr)
		}
	case errors.As(err, &refused) || stored == nil && ctx.Err() != nil:
		return nil, err
	case stored == nil:
		return nil, fmt.Errorf("agent %s: %w on %s and no spec was kept from before (%w); start the daemon with `agentconnect up`", id, errNoDaemon, socket, err)
	default:
		log.Warn("the daemon does not answer; started with the policy of the last start", "error", err)
		f = stored
	}
	defer f.Close()
	spec, err := supervisor.ReadSpec(f)
	if err != nil {
		return nil, err
	}
	if spec.Agent != id {
		return nil, fmt.Errorf("it is of agent %s, not %s", spec.Agent, id)
	}
	return spec, nil
}

// keepSpec gives the service manager another spec for the next start after a crash.
func keepSpec(spec *wire.Spec) error {
	f, err := launch.Sealed("spec", spec)
	if err != nil {
		return err
	}
	defer f.Close()
	return supervisor.StoreSpec(os.Getenv("NOTIFY_SOCKET"), f)
}

// stopTime bounds how long it is found out who stops the agent. It goes on beside the stop.
const stopTime = 500 * time.Millisecond

// rememberStop watches for the agent's stop. Where no daemon sees it, it is written down for
// the next one, unless the session ends: then what was wanted is to come back, and so it is
// where that is not known. The function it returns waits until that is done.
func rememberStop(ctx context.Context, log *slog.Logger, spec *wire.Spec, socket string) (wait func()) {
	root := spec.Policy.Root
	if err := stops.Drop(root, spec.Agent); err != nil {
		log.Warn("an old stop stays remembered", "error", err)
	}
	done := make(chan struct{})
	forget := context.AfterFunc(ctx, func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.Background(), stopTime)
		defer cancel()
		if supervisor.SayStopped(ctx, socket, spec.Agent) || sessionEnds(ctx) {
			return
		}
		if err := stops.Add(root, spec.Agent); err != nil {
			log.Warn("the stop is not remembered", "error", err)
		}
	})
	return func() {
		if !forget() {
			<-done
		}
	}
}

// startMemory is for how much memory garbage is collected during a start, in bytes.
const startMemory = 64 << 20

// keeper has the supervisor rest when its agent does. A small heap matters more here than few
// collections.
var keeper = rest.Keeper{Percent: 40}

// startTime is for how long after that garbage waits for the runtime's start.
const startTime = time.Second

// started: the runtime was. ready: its start is over.
var started, ready atomic.Bool

// notify tells the service manager, or the daemon in its place; without one nobody.
func notify(state string) {
	_, _ = daemon.SdNotify(false, state)
	if strings.HasPrefix(state, "READY=1") && started.CompareAndSwap(false, true) {
		// The runtime starts now, and a collection would take a processor from it.
		time.AfterFunc(startTime, func() {
			ready.Store(true)
			keeper.Stir()
		})
	}
	if ready.Load() {
		keeper.Stir()
	}
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
