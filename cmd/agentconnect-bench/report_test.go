package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/figures"
)

func printed(t *testing.T, all ...figures.Figure) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "lines"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, one := range all {
		if err := figures.Print(f, one); err != nil {
			t.Fatal(err)
		}
	}
	return f.Name()
}

func TestReportHoldsEveryFigureOrRefuses(t *testing.T) {
	dir := t.TempDir()
	size := figures.Figure{Key: "size/all", What: "all programs", Unit: "MB", Ours: 28}
	relay := figures.Figure{Key: "relay/throughput", What: "frames", Unit: "MB/s", Ours: 5, Wanted: "≥ 0.5"}.Beside(figures.Peer{Name: "pipe", Value: 20})
	if err := report(t.Context(), dir, []string{printed(t, size), printed(t, relay)}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "bench.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, words := range []string{"## Size", "| all programs | 28.0 MB |", "## ACP relay", "| frames | 5.00 MB/s | pipe 20.0 MB/s | 0.25 | ≥ 0.5 | missed |"} {
		if !strings.Contains(string(b), words) {
			t.Errorf("no %q in %s", words, b)
		}
	}
	if strings.Contains(string(b), "## Network") {
		t.Error("a section without figures is there")
	}
	if err := report(t.Context(), dir, []string{printed(t, size, figures.Figure{Key: "weather/today", What: "rain"})}); err == nil || !strings.Contains(err.Error(), "no section") {
		t.Errorf("a figure that no section shows: %v", err)
	}
	if err := report(t.Context(), dir, []string{printed(t)}); err == nil {
		t.Error("a file without figures was taken")
	}
}

func TestPicturesShowOursAndThePeersBySize(t *testing.T) {
	all := []figures.Figure{
		{Key: "a/10", What: "10 agents, up", Ours: 1}, {Key: "a/100", What: "100 agents, up", Ours: 9, Peers: []figures.Peer{{Name: "it's \"other\"", Value: 4.5}}},
		{Key: "b/10", What: "10 others", Ours: 1},
	}
	if got := bars(plot{keys: []string{"a/100"}}, all); !strings.Contains(got, `"ours: 100 agents, up" 1 9 "9.00"`) || !strings.Contains(got, `"it's \"other\"" 2 4.5 "4.50"`) {
		t.Errorf("bars: %s", got)
	}
	if got := bySize(plot{keys: []string{"a"}}, all); !strings.Contains(got, "10 1\n100 9\n") || strings.Contains(got, "others") {
		t.Errorf("lines: %s", got)
	}
	if bars(plot{keys: []string{"c"}}, all)+bySize(plot{keys: []string{"c"}}, all) != "" {
		t.Error("a picture of nothing")
	}
}
