//go:build !linux

package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"

	"agentconnect.md/sandbox/cmd/internal/wire"
)

// SpecError is the daemon's answer that the agent must not start as things are.
type SpecError struct {
	Code int
	Text string
}

func (e *SpecError) Error() string { return e.Text }

// ReadSpec reads a spec from its file.
func ReadSpec(f *os.File) (*wire.Spec, error) {
	b, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	var spec wire.Spec
	return &spec, json.Unmarshal(b, &spec)
}

// StoredSpec: there is no systemd here.
func StoredSpec([]string) *os.File { return nil }

// StoreSpec: there is no systemd here.
func StoreSpec(string, *os.File) error { return errors.New("no service manager") }

// AskSpec: there is no systemd here.
func AskSpec(context.Context, string, string) (*os.File, error) {
	return nil, errors.New("systemd is needed for this")
}

// SayStopped: there is no systemd here.
func SayStopped(context.Context, string, string) bool { return false }

// askCredential: the daemon answers none here.
func askCredential(context.Context, string, string, wire.CredentialQuery) (wire.Reply, error) {
	return wire.Reply{}, errors.New("the daemon gives no credentials on this system")
}
