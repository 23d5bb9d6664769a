package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"agentconnect.md/sandbox/cmd/internal/prober"
)

// probeWord is the argument that asks for a probe instead of an agent.
const probeWord = "probe"

// runProbe probes with what stands as JSON on stdin and prints the result. It is done here
// because what an AppArmor profile allows is allowed to this program: the one that makes
// the namespaces of agents makes those of the proof.
func runProbe() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	var p prober.Prober
	dec := json.NewDecoder(os.Stdin)
	dec.DisallowUnknownFields()
	err := dec.Decode(&p)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(p.Run(ctx))
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "agentconnect-supervisor: probe: %v; run `agentconnect probe` instead\n", err)
		return 1
	}
	return 0
}
