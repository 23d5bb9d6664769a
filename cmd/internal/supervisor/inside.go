// What the supervisor shows inside: a directory of its own with the guest's socket and the
// agent's secrets as files. Both are read-only there; the supervisor changes them from
// outside, by rename, and what runs sees the new value at once.

package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/atomicfile"
	"agentconnect.md/sandbox/cmd/internal/audit"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// makeInside makes the directory anew: what a killed supervisor left is not ours to show.
func (s *Supervisor) makeInside() error {
	if s.spec.Inside == "" {
		return nil
	}
	if err := os.RemoveAll(s.spec.Inside); err != nil {
		return fmt.Errorf("the agent's runtime directory: %w", err)
	}
	for _, dir := range []string{s.spec.Inside, s.spec.Policy.ChannelDir, s.spec.Policy.SecretsDir} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return fmt.Errorf("the agent's runtime directory: %w", err)
		}
	}
	for _, sec := range s.spec.Secrets {
		if err := s.writeSecret(sec); err != nil {
			return err
		}
		s.secrets[sec.Name] = sec
	}
	return nil
}

// removeInside takes it away with all that lies in it.
func (s *Supervisor) removeInside() {
	if s.spec.Inside == "" {
		return
	}
	if err := os.RemoveAll(s.spec.Inside); err != nil {
		s.opts.Log.Warn("the agent's runtime directory is left behind", "path", s.spec.Inside, "error", err)
	}
}

// secretFile is a secret's place on the host; "" when nothing inside gets it.
func (s *Supervisor) secretFile(sec wire.Secret) (string, error) {
	if sec.File == "" || s.spec.Inside == "" {
		return "", nil
	}
	if !filepath.IsLocal(sec.File) || strings.HasPrefix(filepath.Base(sec.File), ".") || strings.Count(sec.File, "/") > 1 {
		return "", fmt.Errorf("secret %s: %q is no place for its file", sec.Name, sec.File)
	}
	return filepath.Join(s.spec.Policy.SecretsDir, sec.File), nil
}

func (s *Supervisor) writeSecret(sec wire.Secret) error {
	path, err := s.secretFile(sec)
	if err != nil || path == "" {
		return err
	}
	if dir := filepath.Dir(path); dir != s.spec.Policy.SecretsDir {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("secret %s: %w", sec.Name, err)
		}
	}
	if err := atomicfile.Write(path, sec.Value, 0o400); err != nil {
		return fmt.Errorf("secret %s: %w", sec.Name, err)
	}
	return nil
}

// changeSecret carries out OpSecret: without a value the secret is taken away.
func (s *Supervisor) changeSecret(sec wire.Secret) error {
	if sec.Name == "" {
		return errors.New("no secret is named")
	}
	s.secretMu.Lock()
	defer s.secretMu.Unlock()
	old, had := s.secrets[sec.Name]
	oldPath, err := s.secretFile(old)
	if err != nil {
		return err
	}
	event := "changed"
	if len(sec.Value) == 0 {
		if !had {
			return nil
		}
		event = "removed"
		sec.File = ""
	}
	path, err := s.secretFile(sec)
	if err != nil {
		return err
	}
	remove := func() error {
		if oldPath == "" || oldPath == path {
			return nil
		}
		if err := os.RemoveAll(topBelow(s.spec.Policy.SecretsDir, oldPath, path)); err != nil {
			return fmt.Errorf("secret %s: %w", sec.Name, err)
		}
		return nil
	}
	write := func() error { return s.writeSecret(sec) }
	steps := []func() error{write, remove}
	if strings.HasPrefix(path, oldPath+"/") || path != "" && strings.HasPrefix(oldPath, path+"/") {
		// A file stands where the new one's directory is to be, or the other way round.
		steps = []func() error{remove, write}
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	if event == "removed" {
		delete(s.secrets, sec.Name)
	} else {
		s.secrets[sec.Name] = sec
	}
	s.keep(old, sec)
	s.audit.Add(audit.Record{Kind: audit.KindSecret, Event: event, Text: fmt.Sprintf("secret %s %s in the running agent", sec.Name, event), Detail: map[string]string{"name": sec.Name}})
	return nil
}

// keep has a crash without a daemon bring back the secrets of now, and not those of the start.
// secretMu is held.
func (s *Supervisor) keep(old, now wire.Secret) {
	if s.opts.Keep == nil {
		return
	}
	s.spec.Secrets = slices.SortedFunc(maps.Values(s.secrets), func(a, b wire.Secret) int { return strings.Compare(a.Name, b.Name) })
	s.spec.SecretEnv = wire.WithoutEnv(s.spec.SecretEnv, slices.Concat(old.Env, now.Env))
	for _, v := range now.Env {
		if len(now.Value) > 0 {
			s.spec.SecretEnv = append(s.spec.SecretEnv, v+"="+string(now.Value))
		}
	}
	spec := s.spec
	if err := s.opts.Keep(&spec); err != nil {
		s.opts.Log.Warn("a crash without a daemon brings the secrets of the last start back", "error", err)
	}
}

// topBelow is old, or the directory of its own that it lies in when keep does not.
func topBelow(dir, old, keep string) string {
	if top := filepath.Dir(old); top != dir && filepath.Dir(keep) != top {
		return top
	}
	return old
}

// secretValue gives a secret as it is now.
func (s *Supervisor) secretValue(name string) ([]byte, bool) {
	s.secretMu.Lock()
	defer s.secretMu.Unlock()
	sec, ok := s.secrets[name]
	return sec.Value, ok
}

// openAudit opens the agent's audit log. Without one the agent runs all the same; what must
// be recorded is then refused.
func (s *Supervisor) openAudit() {
	if s.spec.Policy.Root == "" {
		return
	}
	log, err := audit.New(s.spec.Policy.Root, s.spec.Agent, func(err error) { s.opts.Log.Error("the audit log cannot be written", "error", err) })
	if err != nil {
		s.opts.Log.Error("no audit log", "error", err)
		return
	}
	s.audit = log
}
