package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"agentconnect.md/sandbox/cmd/internal/figures"
)

// section is a part of the report: the figures whose keys lie below one of its names.
type section struct {
	title, text string
	names       []string
	bars, lines []plot
}

// plot is one picture. Bars are ours and the peers' of some figures; lines are figures by size.
type plot struct {
	file, title string
	keys        []string
	log         bool
}

var sections = []section{
	{title: "Start", names: []string{"start", "mounts", "systemd/start", "exec", "probe"},
		text: "From the call to the first instruction of the program inside. Directly: the launcher and bubblewrap, beside bubblewrap given the same mounts.\n" +
			"Under systemd: from `StartTransientUnit` for `agent@ID.service`, with the supervisor, its scope and the start gate, beside `systemd-run --user --scope bwrap` with the same mounts. Each begins when the kernel is at rest: who puts a process into a control group waits for a grace period of its, 4 to 10 ms, but not soon after another one did.",
		bars: []plot{{file: "start", title: "start, ms (median)", keys: []string{"start/default", "systemd/start/none", "start/sandbox-runtime"}, log: true}}},
	{title: "Start by the size of the workspace", names: []string{"trees"},
		text: "The look for git repositories that each start takes, and the whole start from the supervisor's fork to the runtime's first word with all found sealed, beside `rg --files` on the same tree."},
	{title: "Memory", names: []string{"memory"},
		text: "Proportional set size: pages that processes share are counted once.",
		bars: []plot{{file: "memory", title: "memory of an agent without its runtime, MB", keys: []string{"memory/sandbox-runtime"}}}},
	{title: "ACP relay", names: []string{"relay"}, text: "From the runtime's pipe to a client's socket, each frame parsed and judged, beside a pipe that nobody reads in between."},
	{title: "Network", names: []string{"network"},
		text: "One client of one server, behind the boundary with an allowlist, without one, and behind sandbox-runtime's proxy. Server, gateway and client share this machine's processors; direct has them for two.",
		bars: []plot{{file: "network", title: "download, MB/s", keys: []string{"network/streams/1", "network/streams/64"}},
			{file: "connections", title: "short connections per second", keys: []string{"network/connections/short"}}}},
	{title: "Many agents under systemd", names: []string{"systemd/scale"},
		text: "Agents that are wanted come up with the daemon, as at a login. The exponent k is that of time or memory growing as agents^k. Adoption: the daemon is restarted while they run.\n" +
			"Idle: what the daemon's threads did in a minute in which nobody asked for anything.",
		lines: []plot{{file: "scale", title: "seconds, by the number of agents", keys: []string{"systemd/scale/up", "systemd/scale/adopted"}, log: true}}},
	{title: "Size", names: []string{"size"}, text: "Of the programs as `make build` leaves them, beside sandbox-runtime's files and the Node that runs them."},
}

// report writes dir/bench.md and dir/bench/*.svg from the lines in the files.
func report(ctx context.Context, dir string, files []string) error {
	if len(files) == 0 {
		return errors.New("-report: name the files that hold the figures")
	}
	var all []figures.Figure
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		some, err := figures.Read(f)
		f.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if len(some) == 0 {
			return fmt.Errorf("%s holds no figures", name)
		}
		all = append(all, some...)
	}
	if err := os.MkdirAll(filepath.Join(dir, "bench"), 0o755); err != nil {
		return err
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "# Measurements\n\nWritten by `make bench` on %s: %s. Do not edit.\n\n"+
		"Ours and the peers' values are medians of one run in turns, since a machine's noise hits both: compare within a line. A ratio is ours by the first peer's.\n", time.Now().UTC().Format(time.DateOnly), machine())
	shown := 0
	for _, s := range sections {
		var some []figures.Figure
		for _, f := range all {
			if slices.ContainsFunc(s.names, func(name string) bool { return figures.Below(f.Key, name) }) {
				some = append(some, f)
			}
		}
		if len(some) == 0 {
			continue
		}
		shown += len(some)
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n", s.title, s.text)
		if err := figures.Markdown(&b, some); err != nil {
			return err
		}
		for _, p := range s.bars {
			if err := picture(ctx, &b, dir, p, some, bars); err != nil {
				return err
			}
		}
		for _, p := range s.lines {
			if err := picture(ctx, &b, dir, p, some, bySize); err != nil {
				return err
			}
		}
	}
	if shown != len(all) {
		return fmt.Errorf("%d figures are in no section", len(all)-shown)
	}
	return os.WriteFile(filepath.Join(dir, "bench.md"), b.Bytes(), 0o644)
}

// machine says what was measured on.
func machine() string {
	words := []string{strconv.Itoa(runtime.NumCPU()) + " processors"}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				words[0] += " of an " + strings.TrimSpace(value)
				break
			}
		}
	}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		version, _, _ := strings.Cut(strings.TrimSpace(string(b)), "-")
		words = append(words, "Linux "+version)
	}
	return strings.Join(append(words, runtime.Version()), ", ")
}

// picture has gnuplot draw one, if there is something to draw.
func picture(ctx context.Context, doc *bytes.Buffer, dir string, p plot, all []figures.Figure, draw func(plot, []figures.Figure) string) error {
	script := draw(p, all)
	if script == "" {
		return nil
	}
	to := path.Join("bench", p.file+".svg")
	cmd := exec.CommandContext(ctx, "gnuplot")
	cmd.Dir = dir
	head := "set terminal svg size 720,360 font 'sans-serif,12' background '#ffffff'\nset output " + quote(to) + "\nset title " + quote(p.title) + "\n"
	if p.log {
		head += "set logscale y\n"
	}
	cmd.Stdin = strings.NewReader(head + "set grid y\n" + script)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("gnuplot (apt-get install gnuplot-nox): %w: %s", err, out)
	}
	fmt.Fprintf(doc, "\n![%s](%s)\n", p.title, to)
	return nil
}

// quote is a string of gnuplot's: in single quotes nothing is special but they.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// bars draws ours and each peer's value side by side, a group for each key.
func bars(p plot, all []figures.Figure) string {
	var data strings.Builder
	n, highest := 0, 0.0
	for _, key := range p.keys {
		for _, f := range all {
			if f.Key != key {
				continue
			}
			what := strings.ReplaceAll(f.What, "`", "")
			bar := func(name string, colour int, value float64) {
				fmt.Fprintf(&data, "%s %d %g %s\n", strconv.Quote(name), colour, value, strconv.Quote(figures.Value(value, "")))
				n, highest = n+1, max(highest, value)
			}
			bar("ours: "+what, 1, f.Ours)
			for _, peer := range f.Peers {
				bar(peer.Name, 2, peer.Value)
			}
		}
	}
	if n == 0 {
		return ""
	}
	lowest, above := 0.0, 1.15
	if p.log {
		lowest, above = 1, 3
	}
	return "$data << EOD\n" + data.String() + "EOD\nset style fill solid\nset boxwidth 0.7\nset xtics rotate by -20 font ',10' noenhanced\nset nokey\nset rmargin 16\n" +
		fmt.Sprintf("set yrange [%g:%g]\n", lowest, highest*above) +
		"plot [-0.6:" + strconv.Itoa(n) + "] $data using 0:3:($2==1 ? 0x2a6f97 : 0x9aa5ad):xtic(1) with boxes lc rgb variable, '' using 0:3:4 with labels offset 0,0.6 notitle\n"
}

// bySize draws each key's figures over their last element.
func bySize(p plot, all []figures.Figure) string {
	lines := map[string]string{}
	names := map[string]string{}
	for _, f := range all {
		key, last := path.Split(f.Key)
		key = strings.TrimSuffix(key, "/")
		if _, err := strconv.Atoi(last); err != nil || !slices.Contains(p.keys, key) {
			continue
		}
		lines[key] += fmt.Sprintf("%s %g\n", last, f.Ours)
		names[key] = strings.TrimSpace(strings.TrimPrefix(f.What, last))
	}
	if len(lines) == 0 {
		return ""
	}
	var script strings.Builder
	var plots []string
	for i, key := range slices.Sorted(maps.Keys(lines)) {
		fmt.Fprintf(&script, "$d%d << EOD\n%sEOD\n", i, lines[key])
		plots = append(plots, fmt.Sprintf("$d%d using 1:2 with linespoints pt 7 lw 2 title %s", i, quote(names[key])))
	}
	return script.String() + "set logscale x\nset xlabel 'agents'\nset key left top noenhanced\nplot " + strings.Join(plots, ", ") + "\n"
}
