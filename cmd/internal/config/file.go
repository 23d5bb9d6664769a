// One config.json: reading it, and changing a key of it.

package config

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/atomicfile"
	"agentconnect.md/sandbox/cmd/internal/runtimes"
	"agentconnect.md/sandbox/cmd/internal/strictjson"
)

// layer is what one file says.
type layer struct {
	path       string
	values     map[string]any // by key of settings
	policy     *Policy
	runtimes   map[string]runtimes.Def
	mcpServers map[string]json.RawMessage
	warnings   []string
	secret     bool // it holds a key or the like
}

// readLayer reads a file that may be missing (then nil).
func readLayer(path, home string) (*layer, error) {
	data, mode, err := readTrusted(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	l, err := parseLayer(path, data, home)
	if err != nil {
		return nil, err
	}
	if l.secret && mode&0o077 != 0 {
		l.warnings = append(l.warnings, fmt.Sprintf("%s holds a key and others may read it (mode %04o): chmod 600 %s", path, mode, path))
	}
	return l, nil
}

// readTrusted reads a configuration file that nobody else may have written.
func readTrusted(path string) ([]byte, fs.FileMode, error) {
	// O_NONBLOCK: a FIFO in its place must not hang the daemon's start.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if _, lerr := os.Lstat(path); lerr == nil {
			return nil, 0, bad(path, "", "is a link to a file that is not there; remove the link, or make the file")
		}
		return nil, 0, err
	}
	if err != nil {
		return nil, 0, bad(path, "", "%w; make it readable for uid %d", errors.Unwrap(err), os.Geteuid())
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, 0, bad(path, "", "%w", err)
	}
	mode := fi.Mode().Perm()
	if !fi.Mode().IsRegular() {
		return nil, 0, bad(path, "", "is not a regular file; put the configuration's JSON there")
	}
	if uid, ok := owner(fi); ok && uid != 0 && uid != os.Geteuid() {
		return nil, 0, bad(path, "", "belongs to uid %d, neither to you nor to root; chown it, or remove it", uid)
	}
	if mode&0o022 != 0 {
		return nil, 0, bad(path, "", "others may write to it (mode %04o); look at it, then: chmod go-w %s", mode, path)
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err != nil {
		return nil, 0, bad(path, "", "%w", err)
	}
	return data, mode, nil
}

// parseLayer reads the text of a config.json.
func parseLayer(path string, data []byte, home string) (*layer, error) {
	members, err := strictjson.Object(data, MaxSize)
	if err != nil {
		return nil, &Error{File: path, Err: err}
	}
	l := &layer{path: path, values: map[string]any{}}
	var idle []string
	for _, m := range members {
		switch section := m.Key; {
		case string(m.Value) == "null":
			if !slices.Contains(topLevel(), section) {
				if err := l.unknown(section); err != nil {
					return nil, err
				}
			}
		case section == "policy":
			if l.policy, err = parsePolicy(path, m.Value, home); err != nil {
				return nil, err
			}
		case section == "runtimes":
			err = l.readRuntimes(m.Value)
		case section == "mcpServers":
			err = l.readServers(m.Value)
		case isSection(section):
			var i []string
			i, err = l.readSection(section, m.Value)
			idle = append(idle, i...)
		case strings.Contains(section, "."): // would be taken for a key of a section
			err = l.unknown(section)
		default:
			if s, ok := find(settings, section); ok {
				err = l.set(s, m.Value)
			} else if warn, ok := withoutEffect[section]; ok {
				if warn {
					idle = append(idle, section)
				}
			} else {
				err = l.unknown(section)
			}
		}
		if err != nil {
			return nil, err
		}
	}
	if len(idle) > 0 {
		l.warnings = append(l.warnings, fmt.Sprintf("%s: no effect here, kept as it is: %s", path, strings.Join(idle, ", ")))
	}
	return l, nil
}

func (l *layer) set(s setting, raw json.RawMessage) error {
	v, err := s.fromJSON(raw)
	if err != nil {
		return &Error{File: l.path, Key: s.key, Err: err}
	}
	l.values[s.key] = v
	if s.secret && v != "" {
		l.secret = true
	}
	return nil
}

// readSection reads an object of settings and gives its keys without effect.
func (l *layer) readSection(section string, raw json.RawMessage) (idle []string, err error) {
	members, err := strictjson.Members(raw)
	if err != nil {
		return nil, bad(l.path, section, "must be an object, not %s", brief(raw))
	}
	for _, m := range members {
		key := section + "." + m.Key
		s, ok := find(settings, key)
		warn, foreign := withoutEffect[key]
		switch {
		case ok && string(m.Value) != "null":
			err = l.set(s, m.Value)
		case ok:
		case foreign:
			if warn {
				idle = append(idle, key)
			}
		default:
			err = l.unknown(key)
		}
		if err != nil {
			return nil, err
		}
	}
	return idle, nil
}

// unknown is an error where protection hangs on the key, or where it is a known key in
// another spelling; elsewhere a warning.
func (l *layer) unknown(key string) error {
	section, _, dotted := strings.Cut(key, ".")
	known := topLevel()
	if dotted {
		known = slices.Concat(known, allKeys())
	}
	e := &strictjson.UnknownKeyError{Path: key, Nearest: strictjson.Nearest(key, known)}
	strict := strings.EqualFold(key, e.Nearest)
	for _, s := range strictSections {
		near, _, _ := strings.Cut(e.Nearest, ".")
		if strings.EqualFold(section, s) || near == s {
			strict = true
			if e.Nearest == "" || e.Nearest == s {
				e.Nearest = cmp.Or(strictjson.Nearest(key, keysBelow(s)), e.Nearest, keysBelow(s)[0])
			}
		}
	}
	switch {
	case !strict:
		l.warnings = append(l.warnings, fmt.Sprintf("%s: %v: it has no effect", l.path, e))
		return nil
	case e.Nearest == key: // a key with a dot in it
		return bad(l.path, "", "unknown key %q: write it as an object: {%q: {%q: …}}", key, section, strings.TrimPrefix(key, section+"."))
	}
	return &Error{File: l.path, Err: fmt.Errorf("%w correct or remove it", e)}
}

func allKeys() []string {
	var keys []string
	for _, k := range topLevel() {
		keys = append(keys, keysBelow(k)...)
	}
	return keys
}

func isSection(name string) bool { return len(keysBelow(name)) > 0 }

// keysBelow gives the full keys of a section.
func keysBelow(section string) []string {
	var keys []string
	for _, s := range settings {
		if strings.HasPrefix(s.key, section+".") {
			keys = append(keys, s.key)
		}
	}
	for k := range withoutEffect {
		if strings.HasPrefix(k, section+".") {
			keys = append(keys, k)
		}
	}
	if section == "policy" {
		for _, s := range policySettings {
			keys = append(keys, "policy."+s.key)
		}
	}
	slices.Sort(keys)
	return keys
}

func topLevel() []string {
	keys := append([]string{"policy"}, maps...)
	for _, s := range settings {
		k, _, _ := strings.Cut(s.key, ".")
		keys = append(keys, k)
	}
	for k := range withoutEffect {
		k, _, _ = strings.Cut(k, ".")
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

func (l *layer) readRuntimes(raw json.RawMessage) error {
	members, err := strictjson.Members(raw)
	if err != nil {
		return bad(l.path, "runtimes", "must be an object, not %s", brief(raw))
	}
	l.runtimes = map[string]runtimes.Def{}
	for _, m := range members {
		key := "runtimes." + m.Key
		if string(m.Value) == "null" {
			continue
		}
		var d runtimes.Def
		err := strictjson.Decode(m.Value, MaxSize, &d)
		var unknown *strictjson.UnknownKeyError
		if errors.As(err, &unknown) {
			l.warnings = append(l.warnings, fmt.Sprintf("%s: %s: %v: it has no effect", l.path, key, err))
			err = json.Unmarshal(m.Value, &d)
		}
		if err != nil {
			return bad(l.path, key, "%s; write {\"command\": \"…\", \"args\": […], \"env\": {…}}", strings.TrimPrefix(err.Error(), "json: "))
		}
		if err := checkDef(m.Key, d); err != nil {
			return &Error{File: l.path, Key: key, Err: err}
		}
		l.runtimes[m.Key] = d
		l.secret = l.secret || len(d.Env) > 0
	}
	return nil
}

func checkDef(name string, d runtimes.Def) error {
	probe := agent.Agent{ID: "x", Runtime: name, Env: d.Env}
	if err := probe.Validate(); err != nil {
		return errors.New(strings.TrimPrefix(err.Error(), agent.ErrInvalid.Error()+": "))
	}
	for _, s := range append([]string{d.Command}, d.Args...) {
		if strings.ContainsRune(s, 0) {
			return errors.New("command or args have a NUL byte")
		}
	}
	if strings.ContainsRune(d.Command, '/') && !filepath.IsAbs(d.Command) {
		return fmt.Errorf("command %q: write the program's name or its absolute path", d.Command)
	}
	for _, r := range d.ReadRoots {
		if !filepath.IsAbs(r) || filepath.Clean(r) != r || strings.ContainsRune(r, 0) {
			return fmt.Errorf("readRoots %q: write absolute, clean paths", r)
		}
	}
	return nil
}

func (l *layer) readServers(raw json.RawMessage) error {
	members, err := strictjson.Members(raw)
	if err != nil {
		return bad(l.path, "mcpServers", "must be an object, not %s", brief(raw))
	}
	l.mcpServers = map[string]json.RawMessage{}
	for _, m := range members {
		fields, err := strictjson.Members(m.Value)
		if err != nil {
			return bad(l.path, "mcpServers."+m.Key, "must be an object, not %s", brief(m.Value))
		}
		for _, f := range fields {
			if f.Key == "env" || f.Key == "headers" {
				l.secret = l.secret || len(f.Value) > len("{}")
			}
		}
		l.mcpServers[m.Key] = m.Value
	}
	return nil
}

// Set changes one key of ROOT/config.json and keeps everything else as it was written.
// A nil value takes the key out. The result must be readable, or nothing is written.
func Set(root, key string, value any) error {
	s, ok := find(settings, key)
	if !ok {
		known := make([]string, len(settings))
		for i, s := range settings {
			known[i] = s.key
		}
		return &Error{Err: &strictjson.UnknownKeyError{Path: key, Nearest: strictjson.Nearest(key, known)}}
	}
	lockPath := filepath.Join(root, ".config.lock")
	lock, err := os.OpenFile(lockPath, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return atomicfile.Explain("lock", lockPath, err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return atomicfile.Explain("lock", lockPath, err)
	}
	path := filepath.Join(root, "config.json")
	// A config.json that is a link (to a checkout of dotfiles) stays one.
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	data, _, err := readTrusted(path)
	if errors.Is(err, fs.ErrNotExist) {
		data, err = []byte("{}"), nil
	}
	if err != nil {
		return err
	}
	members, err := strictjson.Object(data, MaxSize)
	if err != nil {
		return &Error{File: path, Err: err}
	}
	section, name, dotted := strings.Cut(key, ".")
	if dotted {
		inner := []strictjson.Member(nil)
		if i := index(members, section); i >= 0 && string(members[i].Value) != "null" {
			if inner, err = strictjson.Members(members[i].Value); err != nil {
				return bad(path, section, "must be an object")
			}
		}
		if inner, err = put(inner, name, value); err != nil {
			return err
		}
		raw, err := strictjson.Encode(inner)
		if err != nil {
			return err
		}
		members, err = put(members, section, json.RawMessage(raw))
		if err != nil {
			return err
		}
	} else if members, err = put(members, s.key, value); err != nil {
		return err
	}
	out, err := strictjson.Encode(members)
	if err != nil {
		return err
	}
	if _, err := parseLayer(path, out, "/"); err != nil {
		return err
	}
	return atomicfile.Write(path, out, 0o600)
}

func index(ms []strictjson.Member, key string) int {
	return slices.IndexFunc(ms, func(m strictjson.Member) bool { return m.Key == key })
}

func put(ms []strictjson.Member, key string, value any) ([]strictjson.Member, error) {
	i := index(ms, key)
	if value == nil {
		if i >= 0 {
			ms = slices.Delete(ms, i, i+1)
		}
		return ms, nil
	}
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	if i < 0 {
		return append(ms, strictjson.Member{Key: key, Value: raw}), nil
	}
	ms[i].Value = raw
	return ms, nil
}
