// The user's service manager: whether it keeps the agents, and the daemon as its unit.

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/control"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/programs"
	"agentconnect.md/sandbox/cmd/internal/systemd"
	"agentconnect.md/sandbox/dbusctl"
	"agentconnect.md/sandbox/units"
)

// place is where this user's manager is expected.
func (a *app) place() dbusctl.Place {
	return dbusctl.Here(a.getenv("XDG_RUNTIME_DIR"), userName(a.uid))
}

// connect connects to the user's manager.
func (a *app) connect(ctx context.Context) (*dbusctl.Conn, error) {
	return dbusctl.Connect(ctx, a.place(), nil)
}

// managed connects to the user's manager if it is to keep the agents, and says in a note
// what is the case: auto takes the manager where it answers and our units are installed.
func (a *app) managed(ctx context.Context, cfg *config.Config) (conn *dbusctl.Conn, note string, err error) {
	if cfg.Supervisor == "direct" {
		return nil, directNote, nil
	}
	conn, err = a.connect(ctx)
	if err == nil {
		err = installed(ctx, conn)
		if err != nil {
			conn.Close()
		}
	}
	if err == nil {
		note := "agents are units of the user manager (systemd " + fmt.Sprint(int(conn.Version())) + ")"
		if lerr := a.place().Lingering(); lerr != nil {
			note += "; " + lerr.Error()
		}
		return conn, note, nil
	}
	if cfg.Supervisor == "systemd" {
		return nil, "", &daemon.Refusal{Code: 78, Text: fmt.Sprintf("supervisor systemd: %v (or use --supervisor direct)", err)}
	}
	return nil, directNote + " (" + err.Error() + ")", nil
}

// installed checks that the units which agents hang on are there.
func installed(ctx context.Context, conn *dbusctl.Conn) error {
	for _, unit := range []string{units.Probe, units.Root} {
		f, err := conn.UnitFile(ctx, unit)
		if err != nil {
			return err
		}
		if f.Load != "loaded" {
			return fmt.Errorf("%s is %s: the units are not installed; install the package agentconnect-sandbox", unit, f.Load)
		}
	}
	return nil
}

// manage is daemon.Options.Manage over a connection.
func manage(conn *dbusctl.Conn, set programs.Set) func(daemon.ManagerDeps) (daemon.Supervision, error) {
	return func(deps daemon.ManagerDeps) (daemon.Supervision, error) {
		return systemd.New(systemd.Options{
			Conn: conn, Supervisor: set.Supervisor, Socket: deps.Socket, SpecSocket: deps.SpecSocket,
			Direct: deps.Direct, Stopped: deps.Stopped, Log: deps.Log,
		}), nil
	}
}

// unitProber probes by the probe's unit, whose state decides over the agents' starts. The
// file that it leaves is the result.
func unitProber(conn *dbusctl.Conn, root string) daemon.Prober {
	return func(ctx context.Context, _ string) control.Probe {
		failed := func(err error) control.Probe {
			return control.Probe{Code: "boundary-leak", Checks: []control.Check{{
				Code: "boundary-leak", Title: "the probe runs", Result: "failed", Detail: err.Error(),
				Remedy: "see: `systemctl --user status " + units.Probe + "`",
			}}}
		}
		p, err := conn.Properties(ctx, units.Probe)
		if err != nil && !errors.Is(err, dbusctl.ErrNoSuchUnit) { // not loaded: it has not run yet
			return failed(err)
		}
		// To stop or restart the unit would do the same to every agent: it is reloaded.
		if active, _ := p.String("ActiveState"); active == "active" {
			err = conn.Reload(ctx, units.Probe, dbusctl.Replace)
		} else {
			if rerr := conn.ResetFailed(ctx, units.Probe); rerr != nil && !errors.Is(rerr, dbusctl.ErrNoSuchUnit) {
				return failed(rerr)
			}
			err = conn.Start(ctx, units.Probe, dbusctl.Replace)
		}
		var job *dbusctl.JobError
		if err != nil && !errors.As(err, &job) {
			return failed(err)
		}
		b, rerr := os.ReadFile(daemon.ProbeFile(root))
		if rerr != nil {
			return failed(errors.Join(err, rerr))
		}
		var result control.Probe
		if jerr := json.Unmarshal(b, &result); jerr != nil {
			return failed(errors.Join(err, jerr))
		}
		if result.OK && err != nil {
			return failed(err)
		}
		return result
	}
}

// shadowed reports a unit file of the daemon's name in the user's own folder: an older
// program wrote it, and it would run instead of ours.
func shadowed(ctx context.Context, conn *dbusctl.Conn) error {
	f, err := conn.UnitFile(ctx, units.Daemon)
	if err != nil {
		return err
	}
	switch {
	case f.Load == "not-found":
		return fmt.Errorf("%s is not installed: install the package agentconnect-sandbox, or run `agentconnect run` in a terminal or under your init", units.Daemon)
	case strings.HasPrefix(f.Fragment, "/usr/"), strings.HasPrefix(f.Fragment, "/etc/"):
		return nil
	}
	return &daemon.Refusal{Code: 1, Text: fmt.Sprintf("%s is another program's unit file and would run in our place; to move over: systemctl --user disable --now %s; rm %s; systemctl --user daemon-reload; agentconnect up", f.Fragment, units.Daemon, f.Fragment)}
}

// up enables and starts the daemon's unit.
func (a *app) up(ctx context.Context) error {
	conn, err := a.connect(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoManager, err)
	}
	defer conn.Close()
	if err := shadowed(ctx, conn); err != nil {
		return err
	}
	if err := conn.Enable(ctx, units.Daemon); err != nil {
		return err
	}
	if err := a.startUnit(ctx, conn, conn.Start); err != nil {
		return err
	}
	if err := a.say(map[string]any{"state": control.StateRunning}, "the daemon runs (%s); it starts with your session", units.Daemon); err != nil {
		return err
	}
	if err := a.place().Lingering(); err != nil {
		a.warn("%v", err)
	}
	return nil
}

// startUnit starts or restarts the daemon's unit and says why it did not come up, in the
// daemon's own words and with its exit code.
func (a *app) startUnit(ctx context.Context, conn *dbusctl.Conn, start func(context.Context, string, dbusctl.Mode) error) error {
	if err := conn.ResetFailed(ctx, units.Daemon); err != nil && !errors.Is(err, dbusctl.ErrNoSuchUnit) {
		return err
	}
	err := start(ctx, units.Daemon, dbusctl.Replace)
	if err == nil {
		return nil
	}
	p, perr := conn.Properties(ctx, units.Daemon)
	if perr != nil {
		return err
	}
	code, _ := p.Int32("ExecMainStatus")
	st, serr := a.status(ctx)
	if serr == nil && st.State == control.StateRefused && code == int32(st.ExitCode) { //nolint:gosec // an exit code
		return &daemon.Refusal{Code: st.ExitCode, Text: st.Reason}
	}
	return fmt.Errorf("%w; see `journalctl --user -u %s`", err, units.Daemon)
}

// downUnit stops the daemon and all agents, where the manager keeps them. It reports
// false where the daemon is not the manager's.
func (a *app) downUnit(ctx context.Context) (bool, error) {
	conn, err := a.connect(ctx)
	if err != nil {
		return false, nil //nolint:nilerr // without a manager the daemon is asked itself
	}
	defer conn.Close()
	p, err := conn.Properties(ctx, units.Daemon)
	if err != nil {
		return false, nil //nolint:nilerr // it is not loaded
	}
	if active, _ := p.String("ActiveState"); active != "active" && active != "activating" && active != "reloading" {
		return false, nil
	}
	// The daemon first: it must not take the agents' end for a person's wish.
	if err := conn.Stop(ctx, units.Daemon, dbusctl.Replace); err != nil {
		return true, err
	}
	if err := conn.Stop(ctx, units.Root, dbusctl.Replace); err != nil && !errors.Is(err, dbusctl.ErrNoSuchUnit) {
		return true, err
	}
	return true, nil
}

// restartUnit restarts the daemon's unit; agents go on.
func (a *app) restartUnit(ctx context.Context) error {
	conn, err := a.connect(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", errNoManager, err)
	}
	defer conn.Close()
	if err := shadowed(ctx, conn); err != nil {
		return err
	}
	if err := a.startUnit(ctx, conn, conn.Restart); err != nil {
		return err
	}
	return a.say(map[string]any{"state": control.StateRunning}, "the daemon was restarted; the agents went on")
}
