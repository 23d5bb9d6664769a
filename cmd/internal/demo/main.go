// Command demo is `make run`: it lets a real agent take one turn inside the boundary and
// shows what the agent could reach there and what it could not, beside the same attempts
// made by the same user outside.
//
//	demo [-bin DIR] [-attacks N]
//
// With -attacks it is `make test-attack`: the whole table with what each line stands for, and
// an error unless at least N attacks were refused inside whose control worked outside.
//
// Everything it needs it makes itself (a ROOT of its own, canaries, listeners, a process
// to aim at) and takes away again. It goes through the programs that people use, touches
// no other ROOT, and needs no network. It refuses to run as root, like the product.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

func main() {
	bin := flag.String("bin", "bin", "folder of the built programs")
	attacks := flag.Int("attacks", 0, "how many attacks must be proven")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *bin, *attacks, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// agents: demo is attacked from, neighbour has something to steal.
const (
	agent     = "demo"
	neighbour = "neighbour"
	nested    = "nested" // the same with nesting on
)

func run(ctx context.Context, bin string, attacks int, out io.Writer) (err error) {
	if os.Geteuid() == 0 {
		return errors.New("root runs no agents: start it as an ordinary user; `make run` does so")
	}
	bin, err = filepath.Abs(bin)
	if err != nil {
		return err
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return fmt.Errorf("home directory: %w", err)
	}
	// Below the home, where ROOT lies for everyone; the name is short, for sockets lie below.
	base, err := os.MkdirTemp(home, ".agentconnect-demo-")
	if err != nil {
		return fmt.Errorf("demo folder: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(base)) }()

	s := &stage{bin: bin, home: home, base: base, root: filepath.Join(base, "root")}
	defer func() { err = errors.Join(err, s.strike()) }()
	s.env = environment(os.Environ(), s.root)

	section(out, "the daemon, and the probe of this machine")
	if err := s.startDaemon(ctx); err != nil {
		return err
	}
	if text, err := s.agentconnect(ctx, "probe"); err != nil {
		return fmt.Errorf("%w\n%s", err, text)
	} else {
		fmt.Fprint(out, text)
	}

	if err := os.MkdirAll(s.sealed(), 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(s.shared(), 0o700); err != nil {
		return err
	}
	grants := []string{"--grant", s.shared() + ":ro", "--grant", filepath.Dir(filepath.Dir(s.sealed())) + ":rw", "--grant", s.sealed() + ":ro"}
	for id, more := range map[string][]string{neighbour: nil, agent: grants, nested: {"--nesting", "on"}} {
		if _, err := s.agentconnect(ctx, append([]string{"agent", "add", id, "--runtime", "selftest", "--network", "none"}, more...)...); err != nil {
			return err
		}
	}
	targets, err := s.set(ctx)
	if err != nil {
		return err
	}
	words, err := json.Marshal(targets)
	if err != nil {
		return err
	}
	// Real addresses are tried from inside alone: there a try that gets out is the finding.
	targets.MetadataTCP = "169.254.169.254:80"
	attack, err := json.Marshal(targets)
	if err != nil {
		return err
	}

	section(out, "one turn of a real agent: agentconnect prompt "+agent+" 'attack …'")
	inside, err := s.turn(ctx, agent, attack)
	if err != nil {
		return err
	}

	outside, err := s.outside(ctx, words)
	if err != nil {
		return err
	}
	rows := compare(inside, outside)
	if attacks == 0 {
		if err := writeRows(out, rows); err != nil {
			return err
		}
		return verdict(out, rows)
	}
	return s.suite(ctx, out, attacks, rows, targets, words)
}

// turn lets an agent run the table.
func (s *stage) turn(ctx context.Context, id string, targets []byte) (*selftest.Report, error) {
	answer, err := s.agentconnect(ctx, "prompt", id, "attack "+string(targets))
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, answer)
	}
	report, err := fencedReport(answer)
	if err != nil {
		return nil, fmt.Errorf("the agent's answer: %w\n%s", err, answer)
	}
	return report, nil
}

func section(out io.Writer, title string) { fmt.Fprintf(out, "\n== %s\n\n", title) }

// environment is the user's, pointed at the demo's ROOT and at nobody's runtime directory:
// the sockets of a daemon that the user really runs lie there.
func environment(env []string, root string) []string {
	var kept []string
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, "AGENTCONNECT_") && name != "XDG_RUNTIME_DIR" {
			kept = append(kept, kv)
		}
	}
	return append(kept, "AGENTCONNECT_ROOT="+root)
}

// agentconnect runs the command line and returns its stdout; an error has its stderr.
func (s *stage) agentconnect(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "agentconnect"), args...)
	cmd.Env = s.env
	cmd.Dir = s.home
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("agentconnect %s: %w: %s", strings.Join(args[:min(len(args), 3)], " "), err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

// outside runs the same table with the same targets, unconfined, where the agent's
// workspace is.
func (s *stage) outside(ctx context.Context, targets []byte) (*selftest.Report, error) {
	return s.control(exec.CommandContext(ctx, filepath.Join(s.bin, "agentconnect-guest"), controlArgs...), targets)
}

var controlArgs = []string{"attack", "--targets", "-", "--json", "--control"}

// control reads the report of a command that runs the table outside.
func (s *stage) control(cmd *exec.Cmd, targets []byte) (*selftest.Report, error) {
	cmd.Stdin = bytes.NewReader(targets)
	cmd.Dir = s.workspace(agent)
	cmd.Env = s.env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("the attack table outside the boundary: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return readReport(bytes.NewReader(out))
}

// fencedReport finds the report in the agent's answer: JSON in a fence of its own.
func fencedReport(answer string) (*selftest.Report, error) {
	_, rest, ok := strings.Cut(answer, "```json")
	if !ok {
		return nil, errors.New("no report in it")
	}
	// The decoder, not the closing fence, finds the end: a detail may quote a fence.
	return readReport(strings.NewReader(rest))
}

// readReport reads a report that must say something.
func readReport(r io.Reader) (*selftest.Report, error) {
	var report selftest.Report
	if err := json.NewDecoder(r).Decode(&report); err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	if len(report.Results) == 0 {
		return nil, errors.New("the report is empty")
	}
	return &report, nil
}
