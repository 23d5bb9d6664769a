// What repositories and files in the workspace add to a start, beside ripgrep listing the same tree.

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/figures"
	"agentconnect.md/sandbox/sandbox/gitseal"
)

// tree is what a workspace holds. The files lie in the repositories.
type tree struct{ repositories, files int }

// trees begin with the one that the growth is of.
var trees = []tree{{1, 10}, {1, 1_000}, {50, 1_000}, {400, 1_000}, {1, 100_000}, {50, 100_000}, {400, 100_000}}

func (t tree) String() string {
	return fmt.Sprintf("%d repositories, %d files", t.repositories, t.files)
}

// plant makes the tree in an empty folder.
func (t tree) plant(ctx context.Context, at string) error {
	for i := range t.repositories {
		dir := filepath.Join(at, fmt.Sprint("g", i%20), fmt.Sprint("r", i))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if out, err := exec.CommandContext(ctx, "git", "init", "-q", dir).CombinedOutput(); err != nil {
			return fmt.Errorf("git init: %w: %s", err, out)
		}
		for n := i; n < t.files; n += t.repositories {
			sub := filepath.Join(dir, "src", strconv.Itoa(n/t.repositories/50))
			if err := os.MkdirAll(sub, 0o700); err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(sub, strconv.Itoa(n)), nil, 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// startsInTrees measures in each tree the look for repositories and the whole start, in turn with
// ripgrep, and how each grows.
func startsInTrees(ctx context.Context, pairs int) ([]figures.Figure, error) {
	var looks, starts []figures.Figure
	first := map[string]float64{}
	for _, t := range trees {
		took, err := t.measure(ctx, max(pairs/10, 3))
		if err != nil {
			return nil, err
		}
		grown := func(what string) float64 {
			now := median(took[what])
			if first[what] == 0 {
				first[what] = now
			}
			return now / first[what]
		}
		theirs := grown("rg")
		figure := func(key, what, wanted string) figures.Figure {
			f := figures.Figure{Key: fmt.Sprintf("trees/%s/%d-%d", key, t.repositories, t.files), What: what + ", " + t.String(), Unit: "ms", Ours: median(took[what]), Wanted: wanted,
				Note: fmt.Sprintf("grown by %.1f, rg by %.1f", grown(what), theirs)}
			return f.Beside(figures.Peer{Name: "rg --files", Value: median(took["rg"])})
		}
		looks = append(looks, figure("look", "look", "≤ 1.5"))
		starts = append(starts, figure("start", "whole start", ""))
	}
	return append(looks, starts...), nil
}

// measure gives the milliseconds of each kind.
func (t tree) measure(ctx context.Context, pairs int) (map[string][]float64, error) {
	b, err := newBed()
	if err != nil {
		return nil, err
	}
	defer b.close()
	if err := t.plant(ctx, b.policy.Workspace); err != nil {
		return nil, err
	}
	took := map[string][]float64{}
	for range pairs {
		for what, do := range map[string]func(context.Context, *bed) (time.Duration, error){"look": t.look, "whole start": wholeStart, "rg": listed} {
			d, err := do(ctx, b)
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", what, t, err)
			}
			took[what] = append(took[what], float64(d.Microseconds())/1e3)
		}
	}
	return took, nil
}

func listed(ctx context.Context, b *bed) (time.Duration, error) {
	began := time.Now()
	err := exec.CommandContext(ctx, "rg", "--files", "--hidden", "--no-ignore", b.policy.Workspace).Run()
	return time.Since(began), err
}

// look is the look for repositories alone.
func (t tree) look(_ context.Context, b *bed) (time.Duration, error) {
	began := time.Now()
	found := gitseal.Find(gitseal.Options{Roots: []string{b.policy.Workspace}, Home: b.policy.Home})
	took := time.Since(began)
	if len(found.Repositories) != t.repositories {
		return 0, fmt.Errorf("%d repositories were found", len(found.Repositories))
	}
	return took, nil
}

// wholeStart is from the fork of the supervisor to the first word of the runtime, with everything
// sealed.
func wholeStart(ctx context.Context, b *bed) (time.Duration, error) {
	path := filepath.Join(b.policy.MemoryDir, "word")
	if err := unix.Mkfifo(path, 0o600); err != nil && !errors.Is(err, unix.EEXIST) {
		return 0, err
	}
	word, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer word.Close()
	if err := word.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		return 0, err
	}
	began := time.Now()
	cmd, err := b.supervise(ctx, b.spec("/bin/sh", "-c", "echo x >"+path+"; exec sleep 600"))
	if err != nil {
		return 0, err
	}
	defer stopped(cmd)
	if _, err := word.Read(make([]byte, 16)); err != nil {
		return 0, fmt.Errorf("the runtime said nothing: %w", err)
	}
	return time.Since(began), nil
}
