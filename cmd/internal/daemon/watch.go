package daemon

import (
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/placement"
)

// settle is how long the files must be quiet before a change counts: an editor and
// `agent add` make several events of one change.
const settle = 100 * time.Millisecond

// watch reports changes of configuration files in a set of directories. Its goroutine
// ends with Close.
type watch struct {
	fs      *fsnotify.Watcher
	changes chan struct{}
	ended   chan struct{}
	log     *slog.Logger
}

func newWatch(dirs []string, log *slog.Logger) (*watch, error) {
	fs, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	w := &watch{fs: fs, changes: make(chan struct{}, 1), ended: make(chan struct{}), log: log}
	w.Set(dirs)
	go w.run()
	return w, nil
}

// Changes delivers after a change. A nil watch never does.
func (w *watch) Changes() <-chan struct{} {
	if w == nil {
		return nil
	}
	return w.changes
}

// Set replaces the directories.
func (w *watch) Set(dirs []string) {
	old := w.fs.WatchList()
	for _, dir := range old {
		if !slices.Contains(dirs, dir) {
			_ = w.fs.Remove(dir)
		}
	}
	for _, dir := range dirs {
		if slices.Contains(old, dir) {
			continue
		}
		if err := w.fs.Add(dir); err != nil {
			w.log.Warn("directory is not watched", "dir", dir, "error", err)
		}
	}
}

func (w *watch) Close() {
	_ = w.fs.Close()
	<-w.ended
}

// run passes changes on. The timer is armed by an event only: no event, no wake-up.
func (w *watch) run() {
	defer close(w.ended)
	var quiet <-chan time.Time
	for {
		select {
		case e, ok := <-w.fs.Events:
			if !ok {
				return
			}
			if matters(e) {
				quiet = time.After(settle)
			}
		case err, ok := <-w.fs.Errors:
			if !ok {
				return
			}
			// An overflow lost events: look at everything.
			w.log.Warn("watching files", "error", err)
			quiet = time.After(settle)
		case <-quiet:
			quiet = nil
			select {
			case w.changes <- struct{}{}:
			default:
			}
		}
	}
}

// matters reports whether an event can change the configuration: config.json,
// agent.json, a file of agents.d, an agent's directory come or gone.
func matters(e fsnotify.Event) bool {
	if e.Op == fsnotify.Chmod {
		return false
	}
	name := filepath.Base(e.Name)
	if strings.HasPrefix(name, ".") || name == placement.MarkName || name == agent.LeftName {
		return false // the temporary file of an atomic write; what we write ourselves
	}
	return strings.HasSuffix(name, ".json") || filepath.Base(filepath.Dir(e.Name)) == "agents"
}
