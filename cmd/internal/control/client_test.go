package control

import (
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// served gives a client of a server that answers everything with status and body.
func served(t *testing.T, status int, body string) (*Client, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "c") // t.TempDir's name can be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		w.Write([]byte(body))
	})}
	done := make(chan struct{})
	go func() { defer close(done); srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-done; os.RemoveAll(dir) })
	return NewClient(path), path
}

func TestAnswersOfTheDaemon(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		status     int
		code       int    // of an *Error; 0: another error
		want       string // part of the error
	}{
		{"refusal", `{"error":"no such agent: x","code":66}`, 404, 66, "no such agent: x"},
		{"refusal without a code", `{"error":"x"}`, 500, 1, "x"},
		{"not of the protocol", `<html>`, 502, 0, "same version"},
		{"cut", `{"id":"a"`, 200, 0, "answer of"},
		{"endless", strings.Repeat(" ", maxAnswer+1), 200, 0, "above"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, _ := served(t, tt.status, tt.body)
			_, err := c.Start(t.Context(), "x")
			var e *Error
			if err == nil || !strings.Contains(err.Error(), tt.want) || errors.As(err, &e) != (tt.code != 0) {
				t.Fatalf("%v", err)
			}
			if e != nil && e.Code != tt.code {
				t.Errorf("code %d, want %d", e.Code, tt.code)
			}
		})
	}
}

func TestNobodyListens(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if _, err := NewClient(path).Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("no socket: %v", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if _, err := NewClient(path).Status(t.Context()); !errors.Is(err, ErrNotRunning) {
		t.Errorf("a socket left over: %v", err)
	}
}

func TestAnotherUsersSocketGetsNoRequest(t *testing.T) {
	_, path := served(t, 200, `{}`)
	c, err := dial(t.Context(), path, os.Getuid()+1)
	if err == nil || !strings.Contains(err.Error(), "listens there") {
		t.Errorf("%v, %v", c, err)
	}
	if c, err = dial(t.Context(), path, os.Getuid()); err != nil {
		t.Fatal(err)
	}
	c.Close()
}
