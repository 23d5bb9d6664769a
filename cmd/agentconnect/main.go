// agentconnect is the program people and editors call: the daemon, and the command line
// that configures agents, talks to the daemon and to running agents. It holds no
// boundary and no protocol of its own; it decides exit codes, and nobody else does.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"agentconnect.md/sandbox/cmd/internal/daemon"
)

func main() {
	os.Exit(run(system(), os.Args[1:]))
}

// system is the process as it is: its streams, environment and user. Without a PATH, programs are
// looked for where execvp(3) would, here and in what we start.
func system() *app {
	if os.Getenv("PATH") == "" {
		_ = os.Setenv("PATH", "/usr/local/bin:/usr/bin:/bin") //nolint:forbidigo // before anything is looked for; it cannot fail
	}
	return &app{in: os.Stdin, out: os.Stdout, err: os.Stderr, environ: os.Environ(), uid: os.Getuid()}
}

// run executes one command line and returns its exit code.
func run(a *app, args []string) int {
	ctx, stop := signals()
	defer stop()
	cmd := a.command()
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(ctx)
	if err != nil && !a.began {
		// Whatever cobra says before a command begins is about the words on the line. It reads
		// no further than the first that is wrong.
		words := args
		if i := slices.Index(words, "--"); i >= 0 {
			words = words[:i]
		}
		a.json = a.json || slices.Contains(words, "--json")
		err = &usageError{text: err.Error(), see: a.see}
	}
	return a.report(a.elsewhere(err))
}

// endings are the signals that end a command, with a word from us.
var endings = []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGQUIT}

// signals returns a context that ends with the first of endings, naming it as the cause. A
// second one ends the process at once.
func signals() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	c := make(chan os.Signal, 1)
	signal.Notify(c, endings...)
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case s := <-c:
			signal.Stop(c)
			cancel(daemon.SignalError{Signal: s})
		case <-done:
		}
	}()
	return ctx, func() {
		close(done)
		<-ended
		signal.Stop(c)
		cancel(nil)
	}
}

// usageError is a command line that is not one: exit code 2.
type usageError struct {
	text string
	see  string // the command whose --help says more
}

func (e *usageError) Error() string {
	s := e.text
	if e.see != "" {
		s += fmt.Sprintf("; see `%s --help`", e.see)
	}
	return s
}

// exitStatus passes the code of a command run inside on, without a word of ours.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// code maps an error to the documented exit codes.
func code(err error) int {
	var usage *usageError
	var status exitStatus
	var signalled daemon.SignalError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &status):
		return int(status)
	case errors.As(err, &usage):
		return 2
	case errors.As(err, &signalled):
		if s, ok := signalled.Signal.(syscall.Signal); ok {
			return 128 + int(s)
		}
	}
	return daemon.Code(err)
}

// report says what went wrong: a line on stderr, or with --json an object there, so that
// stdout holds the answer or nothing.
func (a *app) report(err error) int {
	n := code(err)
	var status exitStatus
	if n == 0 || errors.As(err, &status) {
		return n
	}
	text := oneLine(err.Error())
	if a.json && a.saidJSON(struct {
		Error string `json:"error"`
		Code  int    `json:"code"`
	}{text, n}) {
		return n
	}
	_, _ = io.WriteString(a.err, "agentconnect: "+text+"\n")
	return n
}
