package placement

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/atomicfile"
	cp "agentconnect.md/sandbox/cmd/internal/controlplane"
	"agentconnect.md/sandbox/cmd/internal/strictjson"
)

// MarkName is the mark's file in an agent's directory, out of the agent's reach.
const MarkName = "placed.json"

// DirMarks keeps marks in the agents' directories below Agents.
type DirMarks struct{ Agents string }

// All reads every mark. One that cannot be read is an error: its agent would count as the
// operator's.
func (d DirMarks) All() (map[string]Mark, error) {
	out := map[string]Mark{}
	entries, err := os.ReadDir(d.Agents)
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if agent.ValidateID(e.Name()) != nil {
			continue
		}
		m, err := d.Read(e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%w; it says that a control plane placed agent %s here: if the agent is yours, remove the file; if not, its directory", err, e.Name())
		}
		out[e.Name()] = m
	}
	return out, nil
}

// Read reads one mark; fs.ErrNotExist where there is none.
func (d DirMarks) Read(id string) (Mark, error) {
	path := filepath.Join(d.Agents, id, MarkName)
	data, err := agent.ReadFile(path)
	if err != nil {
		return Mark{}, err
	}
	var m Mark
	if err := strictjson.Decode(data, agent.MaxSize, &m); err != nil {
		return Mark{}, &fs.PathError{Op: "read", Path: path, Err: err}
	}
	if !cp.ValidID(m.AgentID) {
		return Mark{}, &fs.PathError{Op: "read", Path: path, Err: errors.New("agentId is not a UUID")}
	}
	return m, nil
}

// Write writes one mark, 0600, and syncs it.
func (d DirMarks) Write(id string, m Mark) error {
	dir := filepath.Join(d.Agents, id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(dir, MarkName), append(data, '\n'), 0o600)
}

// Remove removes a mark; one that is not there is no error.
func (d DirMarks) Remove(id string) error {
	err := os.Remove(filepath.Join(d.Agents, id, MarkName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
