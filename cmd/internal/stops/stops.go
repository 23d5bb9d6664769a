// Package stops remembers, below ROOT/state, which agents a person stopped while no daemon
// was there to see it: their supervisors write it down, and the next daemon takes it over.
// It does not judge who stopped an agent.
package stops

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"agentconnect.md/sandbox/cmd/internal/atomicfile"
	"agentconnect.md/sandbox/units"
)

// most bounds how many names are looked at.
const most = 10_000

func dir(root string) string { return filepath.Join(root, "state", "stopped") }

func path(root, id string) (string, error) {
	if !units.ValidID(id) {
		return "", fmt.Errorf("%q is no id of an agent", id)
	}
	return filepath.Join(dir(root), id), nil
}

// Add remembers that the agent was stopped. It makes no ROOT.
func Add(root, id string) error {
	p, err := path(root, id)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir(root), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return atomicfile.Write(p, nil, 0o600)
}

// Drop forgets a stop of the agent: it starts.
func Drop(root, id string) error {
	p, err := path(root, id)
	if err != nil {
		return err
	}
	if err := os.Remove(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// List names the agents whose stops are remembered, sorted.
func List(root string) ([]string, error) {
	d, err := os.Open(dir(root))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(most)
	if len(names) == 0 {
		return nil, nil // io.EOF
	}
	names = slices.DeleteFunc(names, func(name string) bool { return !units.ValidID(name) }) // a write that was cut short
	slices.Sort(names)
	return names, err
}
