//go:build !linux

package main

import (
	"context"

	"agentconnect.md/sandbox/cmd/internal/config"
	"agentconnect.md/sandbox/cmd/internal/daemon"
	"agentconnect.md/sandbox/cmd/internal/programs"
)

// manager is a connection to a service manager; there is none on this system.
type manager struct{}

func (manager) Close() {}

func (a *app) managed(_ context.Context, cfg *config.Config) (*manager, string, error) {
	if cfg.Supervisor == "systemd" {
		return nil, "", &daemon.Refusal{Code: 78, Text: "supervisor systemd: there is no systemd on this system; use --supervisor direct"}
	}
	return nil, directNote, nil
}

func manage(*manager, programs.Set) func(daemon.ManagerDeps) (daemon.Supervision, error) { return nil }

func unitProber(*manager, string) daemon.Prober { return nil }

func (a *app) up(context.Context) error { return errNoManager }

func (a *app) linger(context.Context) error { return errNoManager }

func (a *app) downUnit(context.Context, string) (bool, error) { return false, nil }

func (a *app) restartUnit(context.Context) error { return errNoManager }

func (a *app) dropIns(context.Context, string) []string { return nil }

func (a *app) journal(context.Context, *site, string, int, bool) (bool, error) { return false, nil }
