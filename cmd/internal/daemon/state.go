package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/atomicfile"
	"agentconnect.md/sandbox/cmd/internal/control"
)

// logLines is how much of the daemon's log status shows.
const logLines = 20

// DaemonLog is the path of the daemon's own log below root.
func DaemonLog(root string) string { return filepath.Join(root, "logs", "daemon.log") }

func recordPath(root string) string { return filepath.Join(root, "state", "daemon.json") }
func wantedPath(root string) string { return filepath.Join(root, "state", "wanted.json") }

// maxState bounds a state file, bytes.
const maxState = 4 << 20

// Record returns what the daemon of root left behind: how it ended or why it refused
// to start. One that was killed left "running" behind; that is put right here.
func Record(root string) (*control.Status, error) {
	s := &control.Status{State: control.StateStopped, Root: root, Agents: []control.AgentStatus{}}
	path := recordPath(root)
	raw, err := readState(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		s.Reason = "never started here"
	case err != nil:
		return nil, err
	default:
		if err := json.Unmarshal(raw, s); err != nil {
			s = &control.Status{State: control.StateStopped, Root: root, Agents: []control.AgentStatus{},
				Reason: fmt.Sprintf("its last record %s cannot be read: %v; the next start writes a new one", path, err)}
		}
	}
	if s.State == control.StateRunning {
		s.State = control.StateStopped
		s.Reason = fmt.Sprintf("it ended without a word (pid %d): killed, or the machine went down", s.PID)
		for i := range s.Agents {
			s.Agents[i].State, s.Agents[i].PID, s.Agents[i].Socket = control.StateStopped, 0, ""
		}
	}
	s.PID = 0
	s.Log, _ = Tail(DaemonLog(root), logLines)
	return s, nil
}

func writeRecord(root string, s *control.Status) error {
	c := *s
	c.Log = nil // its file is there
	return writeState(recordPath(root), &c)
}

func writeState(path string, v any) error {
	raw, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Write(path, append(raw, '\n'), 0o600)
}

func readState(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxState+1))
	if err == nil && len(raw) > maxState {
		err = fmt.Errorf("%s: above %d bytes", path, maxState)
	}
	return raw, err
}

// wanted remembers which agents are to run, over ends of the daemon. Its caller locks.
type wanted struct {
	path  string
	known bool // there was a list
	ids   map[string]bool
	// unsaved: the list has words that could not be written down yet.
	unsaved bool
}

type wantedFile struct {
	Agents []string `json:"agents"`
}

// readWanted reads the list. One that cannot be read is set aside and reported: no
// agent starts by itself then, and nothing is lost.
func readWanted(path string) (*wanted, error) {
	w := &wanted{path: path, ids: map[string]bool{}}
	raw, err := readState(path)
	if errors.Is(err, fs.ErrNotExist) {
		return w, nil
	}
	var ids []string
	if err == nil {
		ids, err = parseWanted(raw)
	}
	if err != nil { // the next change would write over it
		aside := path + ".broken-" + time.Now().UTC().Format("20060102T150405")
		if rerr := os.Rename(path, aside); rerr != nil {
			return w, cannotWrite(path, rerr)
		}
		return w, fmt.Errorf("%s: %w; kept as %s; start the agents that should run with `agentconnect agent start ID`", path, err, filepath.Base(aside))
	}
	w.known = true
	for _, id := range ids {
		w.ids[id] = true
	}
	return w, nil
}

func parseWanted(raw []byte) ([]string, error) {
	var f wantedFile
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, err
	}
	for _, id := range f.Agents {
		if err := agent.ValidateID(id); err != nil {
			return nil, err
		}
	}
	return f.Agents, nil
}

func (w *wanted) list() []string {
	ids := make([]string, 0, len(w.ids))
	for id := range w.ids {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// set changes the wish for id and writes it down; on an error nothing is changed.
func (w *wanted) set(id string, on bool) error {
	if w.ids[id] == on && !w.unsaved {
		return nil
	}
	old, unsaved := w.ids[id], w.unsaved
	w.put(id, on)
	err := w.save()
	if err != nil {
		w.put(id, old)
		w.unsaved = unsaved
	}
	return err
}

// heard is set for what a person did already: it is so, and written down later where it cannot be
// now.
func (w *wanted) heard(id string, on bool) error {
	if w.ids[id] == on && !w.unsaved {
		return nil
	}
	w.put(id, on)
	return w.save()
}

func (w *wanted) save() error {
	err := writeState(w.path, wantedFile{Agents: w.list()})
	w.unsaved = err != nil
	return err
}

func (w *wanted) put(id string, on bool) {
	if on {
		w.ids[id] = true
	} else {
		delete(w.ids, id)
	}
}

// Unwant takes a removed agent out of the list of those to start, while no daemon of
// root runs: a new agent of the same id must not start by itself.
func Unwant(root, id string) error {
	w, err := readWanted(wantedPath(root))
	if err != nil {
		return err
	}
	return w.set(id, false)
}

// ProbeFile is where the probe's unit leaves its result.
func ProbeFile(root string) string { return filepath.Join(root, "state", "probe.json") }

// WriteProbe writes the result of the probe's unit.
func WriteProbe(root string, p *control.Probe) error {
	if err := privateDir(filepath.Join(root, "state")); err != nil {
		return err
	}
	b, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	return atomicfile.Write(ProbeFile(root), append(b, '\n'), 0o600)
}

// ReadProbe reads the last result of the probe's unit.
func ReadProbe(root string) (*control.Probe, error) {
	b, err := readState(ProbeFile(root))
	if err != nil {
		return nil, err
	}
	var p control.Probe
	if err := json.Unmarshal(b, &p); err != nil {
		return nil, fmt.Errorf("%s: %w", ProbeFile(root), err)
	}
	return &p, nil
}
