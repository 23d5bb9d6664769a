package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"agentconnect.md/sandbox/cmd/internal/figures"
	"agentconnect.md/sandbox/cmd/internal/programs"
)

var errNoPeer = errors.New("sandbox-runtime is not installed: packaging/dev/npm-peer.sh")

// srt is the command line of the sandbox-runtime package around a command; errNoPeer where it is
// not installed.
func (b *bed) srt(ctx context.Context, argv ...string) (*exec.Cmd, error) {
	srt := os.Getenv("AGENTCONNECT_BENCH_SRT")
	if srt == "" {
		return nil, errNoPeer
	}
	settings := filepath.Join(b.dir, "srt.json")
	if err := os.WriteFile(settings, []byte(`{"network":{"allowedDomains":["localhost","127.0.0.1"],"deniedDomains":[]},"filesystem":{"denyRead":[],"allowWrite":[],"denyWrite":[]}}`), 0o600); err != nil {
		return nil, err
	}
	return exec.CommandContext(ctx, srt, append([]string{"--settings", settings}, argv...)...), nil
}

// besidePeer is our start beside a whole start of sandbox-runtime.
func (b *bed) besidePeer(ctx context.Context, pairs int, ours float64) (figures.Figure, error) {
	f := figures.Figure{Key: "start/sandbox-runtime", What: "the same, beside sandbox-runtime", Unit: "ms", Ours: ours, Wanted: "≤ 0.1", Note: "its command line, with the proxies that it starts in any case"}
	var theirs []float64
	for range max(pairs/5, 3) {
		t, err := untilFirstByte(func(w *os.File) (func(), error) {
			cmd, err := b.srt(ctx, "/bin/echo", "x")
			if err != nil {
				return nil, err
			}
			cmd.Stdout, cmd.Stderr = w, os.Stderr
			return func() { _ = cmd.Wait() }, cmd.Start()
		})
		if errors.Is(err, errNoPeer) {
			f.Note, f.Wanted = err.Error(), ""
			return f, nil
		}
		if err != nil {
			return f, err
		}
		theirs = append(theirs, t)
	}
	return f.Beside(figures.Peer{Name: "sandbox-runtime", Value: median(theirs)}), nil
}

// probeTime is `agentconnect probe`, beside one start of bubblewrap.
func probeTime(ctx context.Context, pairs int) ([]figures.Figure, error) {
	b, err := newBed()
	if err != nil {
		return nil, err
	}
	defer b.close()
	cli := filepath.Join(filepath.Dir(b.programs.Guest), "agentconnect")
	f := figures.Figure{Key: "probe/whole", What: "`agentconnect probe`, whole", Note: "it starts the recipe, an inner sandbox and the network, and attacks them from inside"}
	return b.besideTrue(ctx, max(pairs/5, 3), f, func() *exec.Cmd {
		return exec.CommandContext(ctx, cli, "--root", filepath.Join(b.dir, "root"), "probe")
	})
}

// sizes are those of the programs that a package has, beside sandbox-runtime's files and the
// Node that they need.
func sizes(context.Context, int) ([]figures.Figure, error) {
	set, err := programs.Find()
	if err != nil {
		return nil, err
	}
	dir := filepath.Dir(set.Guest)
	var all []figures.Figure
	var sum float64
	for _, name := range []string{"agentconnect", "agentconnect-supervisor", "agentconnect-launch", "agentconnect-guest"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		size := float64(info.Size()) / 1e6
		sum += size
		all = append(all, figures.Figure{Key: "size/" + name, What: "size of `" + name + "`", Unit: "MB", Ours: size})
	}
	f := figures.Figure{Key: "size/all", What: "size of the programs together", Unit: "MB", Ours: sum}
	srt := os.Getenv("AGENTCONNECT_BENCH_SRT")
	if srt == "" {
		f.Note = errNoPeer.Error()
		return append(all, f), nil
	}
	theirs, err := below(filepath.Dir(filepath.Dir(srt)))
	if err != nil {
		return nil, err
	}
	node, err := exec.LookPath("node")
	if err != nil {
		return nil, fmt.Errorf("sandbox-runtime needs it: %w", err)
	}
	if node, err = filepath.EvalSymlinks(node); err != nil { //nolint:forbidigo // nobody acts on it: its size is looked at
		return nil, err
	}
	info, err := os.Stat(node)
	if err != nil {
		return nil, err
	}
	return append(all, f.Beside(figures.Peer{Name: "sandbox-runtime and node", Value: theirs + float64(info.Size())/1e6})), nil
}

// below is the size of the files in a folder, in MB.
func below(dir string) (float64, error) {
	var sum int64
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			sum += info.Size()
		}
		return err
	})
	return float64(sum) / 1e6, err
}
