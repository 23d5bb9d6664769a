package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"agentconnect.md/sandbox/cmd/internal/prober"
)

// A probe that gives no result is an error that says so, never a good result.
func TestProbeWithoutAnAnswerIsAnError(t *testing.T) {
	for script, want := range map[string]string{
		"exit 0":                  "the probe's result",
		"echo '{'":                "the probe's result",
		"echo broken >&2; exit 1": "broken",
		"kill -9 $$":              "the probe did not run",
	} {
		path := filepath.Join(t.TempDir(), "supervisor")
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		if r, err := probeBy(t.Context(), path, prober.Prober{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v", script, r, err)
		}
	}
	if _, err := probeBy(t.Context(), "/nonexistent/supervisor", prober.Prober{}); err == nil {
		t.Error("no error without a supervisor")
	}
}
