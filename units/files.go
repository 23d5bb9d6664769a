// The unit files that ship. packaging/systemd/user/ holds them as text, written by this
// package's golden test.
package units

import "strings"

// File is a unit file.
type File struct {
	Name string
	Text string
}

// Files are the shipped unit files, for a program at that path (the package's is
// /usr/bin/agentconnect). The path must be absolute and free of spaces and of what systemd
// expands: % and $.
func Files(program string) []File {
	expand := strings.NewReplacer("@PROGRAM@", program).Replace
	return []File{
		{Daemon, expand(daemonFile)},
		{Probe, expand(probeFile)},
		{Root, sliceFile},
	}
}

const daemonFile = `[Unit]
Description=AgentConnect daemon
Documentation=man:agentconnect(1)
# A user manager that was up before the bus was installed has none.
Requires=dbus.socket
After=dbus.socket dbus.service
StartLimitIntervalSec=60s
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart=@PROGRAM@ run
Restart=on-failure
RestartSec=2s
# Another start would end the same: the sandbox is unavailable, bad configuration.
RestartPreventExitStatus=69 78
TimeoutStartSec=90s
TimeoutStopSec=30s
# Agents are units of their own and go on.
KillMode=mixed
# Only where agents are plain children do they live in here: the end of one is not the daemon's.
OOMPolicy=continue

[Install]
WantedBy=default.target
`

const probeFile = `[Unit]
Description=AgentConnect sandbox probe
Documentation=man:agentconnect(1)
Wants=dbus.socket
After=dbus.socket
# Each sandboxed agent requires this unit: to stop or restart it would stop or restart them all.
# To probe again is to reload it.
RefuseManualStop=yes
# Refused starts of agents must not use up the starts of the probe.
StartLimitIntervalSec=0

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=@PROGRAM@ probe --unit
ExecReload=@PROGRAM@ probe --unit
TimeoutStartSec=120s
`

const sliceFile = `[Unit]
Description=AgentConnect agents, all together
Documentation=man:agentconnect(1)

[Slice]
CPUAccounting=yes
MemoryAccounting=yes
TasksAccounting=yes
`
