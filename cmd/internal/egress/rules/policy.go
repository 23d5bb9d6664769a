// Package rules holds the words by which an operator says what an agent reaches, and the
// one function that decides by them. It is pure: no name is looked up, nothing is dialled.
package rules

import "agentconnect.md/sandbox/cmd/internal/wire"

// HostName is the host part of a rule for a port of the host's loopback: "host:5432".
const HostName = "host"

// Policy is what the operator wrote.
type Policy = wire.EgressPolicy
