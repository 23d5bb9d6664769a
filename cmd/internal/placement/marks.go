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
	ids, err := d.ids()
	if err != nil {
		return nil, err
	}
	out := map[string]Mark{}
	for _, id := range ids {
		m, err := d.Read(id)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%w; it says that a control plane placed agent %s here: if the agent is yours, remove the file; if not, its directory", err, id)
		}
		out[id] = m
	}
	return out, nil
}

// ids are those of the agents' directories.
func (d DirMarks) ids() (ids []string, err error) {
	entries, err := os.ReadDir(d.Agents)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if agent.ValidateID(e.Name()) == nil {
			ids = append(ids, e.Name())
		}
	}
	return ids, err
}

// Read reads one mark; fs.ErrNotExist where there is none.
func (d DirMarks) Read(id string) (Mark, error) {
	return readMark(filepath.Join(d.Agents, id, MarkName))
}

func readMark(path string) (Mark, error) {
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

// Leave removes a mark and notes in the directory, if there is one, whose it was.
func (d DirMarks) Leave(id string, m Mark) error {
	dir := filepath.Join(d.Agents, id)
	if _, err := os.Lstat(dir); err == nil {
		if err := writeMark(filepath.Join(dir, agent.LeftName), m); err != nil {
			return err
		}
	}
	return d.Remove(id)
}

// Left returns the ids of the directories that wait for their agents, by agent. What cannot be read
// waits for none.
func (d DirMarks) Left() (map[string]string, error) {
	ids, err := d.ids()
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, id := range ids {
		if m := d.left(id); m.AgentID != "" {
			out[m.AgentID] = id
		}
	}
	return out, nil
}

// Waits reports whether a directory waits for this agent: it left it, and nobody used it since.
func (d DirMarks) Waits(id, agentID string) bool { return d.left(id).AgentID == agentID }

func (d DirMarks) left(id string) Mark {
	dir := filepath.Join(d.Agents, id)
	for _, used := range []string{MarkName, "agent.json"} {
		if _, err := os.Lstat(filepath.Join(dir, used)); !errors.Is(err, fs.ErrNotExist) {
			return Mark{}
		}
	}
	m, err := readMark(filepath.Join(dir, agent.LeftName))
	if err != nil {
		return Mark{}
	}
	return m
}

// Write writes one mark, 0600, and syncs it.
func (d DirMarks) Write(id string, m Mark) error {
	dir := filepath.Join(d.Agents, id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := writeMark(filepath.Join(dir, MarkName), m); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(dir, agent.LeftName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func writeMark(path string, m Mark) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return atomicfile.Write(path, append(data, '\n'), 0o600)
}

// Remove removes a mark; one that is not there is no error.
func (d DirMarks) Remove(id string) error {
	err := os.Remove(filepath.Join(d.Agents, id, MarkName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
