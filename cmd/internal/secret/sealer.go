// Encryption by systemd-creds: the key is the machine's (and its TPM's), bound to the user.

package secret

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

const sealerName = "systemd-creds"

// Sealer encrypts and decrypts. An *UnavailableError of Seal says that there is none here.
type Sealer interface {
	Seal(ctx context.Context, name string, value []byte) ([]byte, error)
	Open(ctx context.Context, name string, sealed []byte) ([]byte, error)
}

// UnavailableError says why nothing can be encrypted here.
type UnavailableError struct{ Why string }

func (e *UnavailableError) Error() string { return "not encrypted: " + e.Why }

// SystemdCreds is where systemd-creds is installed.
const SystemdCreds = "/usr/bin/systemd-creds"

// Systemd is systemd-creds in its user scope, which systemd has from version 256 on.
type Systemd struct {
	Program string // "/usr/bin/systemd-creds"
}

// minVersion is the first systemd whose credentials an ordinary user can encrypt.
const minVersion = 256

// sealTime bounds one call: a TPM may be slow, a service that hangs must not hang us.
const sealTime = 20 * time.Second

// Seal implements Sealer.
func (s Systemd) Seal(ctx context.Context, name string, value []byte) ([]byte, error) {
	if _, err := os.Stat(s.Program); err != nil {
		return nil, &UnavailableError{Why: s.Program + " is not installed"}
	}
	out, err := s.run(ctx, nil, "--version")
	if err != nil {
		return nil, &UnavailableError{Why: err.Error()}
	}
	n, err := version(out)
	switch {
	case err != nil:
		return nil, &UnavailableError{Why: err.Error()}
	case n < minVersion:
		return nil, &UnavailableError{Why: fmt.Sprintf("systemd %d encrypts credentials for root alone; users can from %d on", n, minVersion)}
	}
	sealed, err := s.run(ctx, value, "encrypt", "--user", "--name="+name, "-", "-")
	if err != nil {
		return nil, &UnavailableError{Why: err.Error()}
	}
	// What cannot be read back is no place for a secret.
	back, err := s.Open(ctx, name, sealed)
	if err != nil {
		return nil, &UnavailableError{Why: "what it encrypted cannot be decrypted: " + err.Error()}
	}
	if !bytes.Equal(back, value) {
		return nil, &UnavailableError{Why: "what it encrypted comes back changed"}
	}
	return sealed, nil
}

// Open implements Sealer.
func (s Systemd) Open(ctx context.Context, name string, sealed []byte) ([]byte, error) {
	return s.run(ctx, sealed, "decrypt", "--user", "--name="+name, "--newline=no", "-", "-")
}

// version reads "systemd 257 (257.9-1)".
func version(out []byte) (int, error) {
	fields := strings.Fields(string(out))
	if len(fields) < 2 || fields[0] != "systemd" {
		return 0, errors.New("systemd-creds does not say its version")
	}
	digits := strings.TrimRightFunc(fields[1], func(r rune) bool { return r < '0' || r > '9' })
	if i := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		digits = digits[:i]
	}
	n, err := strconv.Atoi(digits)
	if err != nil {
		return 0, fmt.Errorf("systemd-creds says version %q", fields[1])
	}
	return n, nil
}

// run starts systemd-creds; what it works on goes by pipes.
func (s Systemd) run(ctx context.Context, in []byte, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, sealTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.Program, args...)
	cmd.Env = []string{"PATH=/usr/bin:/bin", "LC_ALL=C.UTF-8", "SYSTEMD_PAGER=", "XDG_RUNTIME_DIR=" + os.Getenv("XDG_RUNTIME_DIR")}
	cmd.Stdin = bytes.NewReader(in)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &limited{&out, 4 * MaxValue}, &limited{&errs, 4 << 10}
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		if text := strings.TrimSpace(errs.String()); text != "" {
			err = errors.New(strings.ReplaceAll(text, "\n", "; "))
		}
		return nil, fmt.Errorf("systemd-creds %s: %w", args[0], err)
	}
	return out.Bytes(), nil
}

// limited refuses to grow without bound.
type limited struct {
	w    io.Writer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	if len(p) > l.left {
		return 0, errors.New("it says too much")
	}
	l.left -= len(p)
	return l.w.Write(p)
}
