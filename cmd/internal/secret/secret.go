// Package secret keeps the secrets of agents below ROOT/secrets, one file each (0600, out
// of every agent's view), encrypted by systemd-creds where the user can have that. It
// hands out nothing: the daemon puts what it reads into the sealed spec.
package secret

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"agentconnect.md/sandbox/cmd/internal/agent"
	"agentconnect.md/sandbox/cmd/internal/atomicfile"
	"agentconnect.md/sandbox/cmd/internal/lazyregexp"
	"agentconnect.md/sandbox/cmd/internal/strictjson"
)

// MaxValue bounds a secret, in bytes; MaxCount those of one agent. Together they fit a
// sealed spec, and one fits a line on the agent's socket.
const (
	MaxValue = 128 << 10
	MaxCount = 64
)

// ErrNotFound is a name without a secret.
var ErrNotFound = errors.New("no such secret")

// Place is what a secret is for.
type Place struct {
	// Env are the variables that hold the value, in the environment of the runtime alone.
	Env []string `json:"env,omitempty"`
	// PathEnv are the variables that hold the path of the file.
	PathEnv []string `json:"pathEnv,omitempty"`
	// File shows it as a file below /run/agentconnect/secrets.
	File bool `json:"file,omitempty"`
}

// Outside reports whether nothing inside gets the value: it serves credential helpers and
// servers that run outside the boundary.
func (p Place) Outside() bool { return len(p.Env) == 0 && !p.File }

// dirVariables name directories; the file lies in one of its own, under the given name.
var dirVariables = map[string]string{"DOCKER_CONFIG": "config.json"}

// FileName is the secret's file, relative to the directory of secrets. Dir is what a
// variable that names a directory holds, "" where none does.
func (p Place) FileName(name string) (file, dir string) {
	for _, v := range p.PathEnv {
		if base, ok := dirVariables[v]; ok {
			return name + "/" + base, name
		}
	}
	return name, ""
}

// PathOf is what the variable holds, relative to the directory of secrets.
func (p Place) PathOf(name, variable string) string {
	file, dir := p.FileName(name)
	if _, ok := dirVariables[variable]; ok {
		return dir
	}
	return file
}

// Info is a secret without its value.
type Info struct {
	Name string `json:"name"`
	Place
	// Sealed names what encrypts it: "systemd-creds", or empty.
	Sealed string    `json:"sealed,omitempty"`
	At     time.Time `json:"at"`
}

// Secret is one with its value.
type Secret struct {
	Info
	Value []byte
}

// onDisk is the file.
type onDisk struct {
	Version int `json:"version"`
	Info
	Agent string `json:"agent"`
	Value []byte `json:"value"`
}

// Store is ROOT/secrets.
type Store struct {
	dir    string
	sealer Sealer
}

// NewStore gives the store below root. It touches nothing.
func NewStore(root string, sealer Sealer) *Store {
	return &Store{dir: filepath.Join(root, "secrets"), sealer: sealer}
}

var (
	nameRule = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)
	envRule  = lazyregexp.New(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
)

// CheckName judges a secret's name.
func CheckName(name string) error {
	if !nameRule().MatchString(name) {
		return fmt.Errorf("secret %q: a name is 1 to 64 letters, digits, _ . and -, the first a letter or a digit", name)
	}
	return nil
}

// Check judges a place.
func (p Place) Check(name string) error {
	if len(p.PathEnv) > 0 && !p.File {
		return fmt.Errorf("secret %s: %s cannot hold the path of a file that is not there: place it as a file", name, p.PathEnv[0])
	}
	var seen []string
	for _, v := range slices.Concat(p.Env, p.PathEnv) {
		switch {
		case !envRule().MatchString(v):
			return fmt.Errorf("secret %s: environment variable %q: a name is letters, digits and _, not a digit first", name, v)
		case strings.HasPrefix(v, "LD_") || v == "GLIBC_TUNABLES" || slices.Contains([]string{"PATH", "HOME", "USER", "LOGNAME", "XDG_RUNTIME_DIR"}, v):
			return fmt.Errorf("secret %s: environment variable %s is the boundary's; choose another", name, v)
		case slices.Contains(seen, v):
			return fmt.Errorf("secret %s: environment variable %s is named twice", name, v)
		}
		seen = append(seen, v)
	}
	return nil
}

func (s *Store) path(id, name string) (string, error) {
	if err := agent.ValidateID(id); err != nil {
		return "", err
	}
	if err := CheckName(name); err != nil {
		return "", err
	}
	return filepath.Join(s.dir, id, name+".json"), nil
}

// Set writes a secret. The Info returned says whether it is encrypted; when it is not,
// why says the reason.
func (s *Store) Set(ctx context.Context, id, name string, place Place, value []byte) (info Info, why string, err error) {
	path, err := s.path(id, name)
	if err != nil {
		return info, "", err
	}
	if err := place.Check(name); err != nil {
		return info, "", err
	}
	switch {
	case len(value) == 0:
		return info, "", fmt.Errorf("secret %s: the value is empty; give it on stdin", name)
	case len(value) > MaxValue:
		return info, "", fmt.Errorf("secret %s: longer than %d bytes", name, MaxValue)
	case len(place.Env) > 0 && slices.Contains(value, 0):
		return info, "", fmt.Errorf("secret %s: the value has a NUL byte, which no environment can hold; place it as a file", name)
	case len(place.Env) > 0 && !utf8.Valid(value):
		// It goes there as text, which would be another one.
		return info, "", fmt.Errorf("secret %s: the value is not UTF-8, as an environment variable must be here; place it as a file", name)
	}
	others, err := s.List(id)
	if err != nil {
		return info, "", err
	}
	others = slices.DeleteFunc(others, func(o Info) bool { return o.Name == name })
	if len(others) >= MaxCount {
		return info, "", fmt.Errorf("agent %s has %d secrets already; remove one", id, len(others))
	}
	for _, o := range others {
		for _, v := range slices.Concat(place.Env, place.PathEnv) {
			if slices.Contains(slices.Concat(o.Env, o.PathEnv), v) {
				return info, "", fmt.Errorf("secret %s: environment variable %s is secret %s's already", name, v, o.Name)
			}
		}
	}
	d := onDisk{Version: 1, Info: Info{Name: name, Place: place, At: time.Now().UTC().Truncate(time.Second)}, Agent: id, Value: value}
	sealed, err := s.sealer.Seal(ctx, credentialName(id, name), value)
	var none *UnavailableError
	switch {
	case err == nil:
		d.Sealed, d.Value = sealerName, sealed
	case errors.As(err, &none):
		why = none.Why
	default:
		return info, "", fmt.Errorf("secret %s: %w", name, err)
	}
	text, err := json.Marshal(d)
	if err != nil {
		return info, "", err
	}
	for _, dir := range []string{s.dir, filepath.Dir(path)} {
		if err := privateDir(dir); err != nil {
			return info, "", err
		}
	}
	return d.Info, why, atomicfile.Write(path, append(text, '\n'), 0o600)
}

func privateDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return atomicfile.Explain("make directory", dir, err)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !fi.IsDir() {
		return fmt.Errorf("%s: is not a directory; move it away", dir)
	}
	if fi.Mode().Perm()&0o077 != 0 {
		return os.Chmod(dir, 0o700)
	}
	return nil
}

// List gives an agent's secrets without their values, by name.
func (s *Store) List(id string) ([]Info, error) {
	all, err := s.read(id)
	if err != nil {
		return nil, err
	}
	out := make([]Info, len(all))
	for i, d := range all {
		out[i] = d.Info
	}
	return out, nil
}

func (s *Store) read(id string) ([]onDisk, error) {
	if err := agent.ValidateID(id); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(filepath.Join(s.dir, id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("secrets of %s: %w", id, err)
	}
	var out []onDisk
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || strings.HasPrefix(name, ".") {
			continue // what a write that was cut short left
		}
		path := filepath.Join(s.dir, id, e.Name())
		data, err := agent.ReadFile(path)
		if err != nil {
			return nil, err
		}
		d, err := parse(data)
		if err == nil && (d.Name != name || d.Agent != id) {
			err = fmt.Errorf("it is secret %q of agent %q", d.Name, d.Agent)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w; take it away with `agentconnect secret rm %s %s` and set it again", path, err, id, name)
		}
		out = append(out, *d)
	}
	if len(out) > MaxCount {
		return nil, fmt.Errorf("agent %s has more than %d secrets; remove some", id, MaxCount)
	}
	return out, nil
}

// parse reads one file strictly.
func parse(data []byte) (*onDisk, error) {
	var d onDisk
	if err := strictjson.Decode(data, agent.MaxSize, &d); err != nil {
		return nil, err
	}
	switch {
	case d.Version != 1:
		return nil, fmt.Errorf("version %d is not known here", d.Version)
	case d.Sealed != "" && d.Sealed != sealerName:
		return nil, fmt.Errorf("%q is not known here", d.Sealed)
	}
	return &d, cmp.Or(CheckName(d.Name), d.Place.Check(d.Name))
}

// Load gives an agent's secrets with their values, by name. One that cannot be decrypted
// is an error: an agent that starts without it would fail later and elsewhere.
func (s *Store) Load(ctx context.Context, id string) ([]Secret, error) {
	all, err := s.read(id)
	if err != nil {
		return nil, err
	}
	out := make([]Secret, len(all))
	for i, d := range all {
		if d.Sealed != "" {
			if d.Value, err = s.sealer.Open(ctx, credentialName(id, d.Name), d.Value); err != nil {
				return nil, fmt.Errorf("secret %s of agent %s cannot be decrypted: %w; set it again with `agentconnect secret set %s %s`", d.Name, id, err, id, d.Name)
			}
		}
		out[i] = Secret{Info: d.Info, Value: d.Value}
	}
	return out, nil
}

// Remove takes one secret away.
func (s *Store) Remove(id, name string) error {
	path, err := s.path(id, name)
	if err != nil {
		return err
	}
	err = os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s of agent %s: `agentconnect secret list %s` names those there are", ErrNotFound, name, id, id)
	}
	if err != nil {
		return atomicfile.Explain("remove", path, err)
	}
	return nil
}

// Purge takes all secrets of an agent away.
func (s *Store) Purge(id string) error {
	if err := agent.ValidateID(id); err != nil {
		return err
	}
	dir := filepath.Join(s.dir, id)
	if err := os.RemoveAll(dir); err != nil {
		return atomicfile.Explain("remove", dir, err)
	}
	return nil
}

// credentialName is bound into what is encrypted: a file put in another one's place does
// not open.
func credentialName(id, name string) string { return "agentconnect." + id + "." + name }
