// agentconnect-launch is the last program of ours before bubblewrap. The supervisor
// clones it into a new user, mount and network namespace; it brings the network up,
// builds the agent's view, waits for the gate, and becomes bubblewrap by exec. It
// decides nothing: the plan it carries out comes sealed on a descriptor.
package main

import (
	"os"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

func main() {
	if err := launch(); err != nil {
		gate := os.NewFile(wire.GateFD, "gate")
		// Where nobody listens any more there is nobody to tell either.
		if _, werr := gate.Write(err.Encode()); werr != nil {
			_, _ = os.Stderr.WriteString("agentconnect-launch: " + err.Error() + "\n")
		}
		os.Exit(1)
	}
}
