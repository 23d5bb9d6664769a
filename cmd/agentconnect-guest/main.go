// Command agentconnect-guest is the helper that runs inside an agent's boundary,
// where it lies read-only at /run/agentconnect/guest. It holds no rights and no
// secrets: whatever it does, any other program inside could do. It also runs
// outside, as the control of its own attack table.
//
//	agentconnect-guest selftest                          a tiny ACP agent on stdin and stdout
//	agentconnect-guest attack [--targets FILE|-] [--json] [--control]
//	agentconnect-guest check                             the probe's inside part: a CheckRequest on stdin, a CheckReport on stdout
//	agentconnect-guest checkout URL BRANCH -- CMD…       clones into the working directory once, and becomes CMD; else ends with 70
//	agentconnect-guest inner -- CMD…                     becomes CMD if an inner sandbox starts here, else ends with 69
//	agentconnect-guest pty [--rows N] [--cols N] FD -- CMD…
//	agentconnect-guest exec -- CMD…
//	agentconnect-guest start FD -- CMD…
//	agentconnect-guest git-credential get|store|erase
//	agentconnect-guest gh ARG…
//	agentconnect-guest git-config KEY VALUE | --unset KEY | --upstream REMOTE/BRANCH   a variable of a sealed configuration, if allowed
//	agentconnect-guest git-receive-pack                  what git starts to push from an agent's own clone
//	agentconnect-guest receive                           the other end, in a boundary of its own
//	agentconnect-guest mcp NAME                          an MCP server outside, on stdin and stdout
//	agentconnect-guest version
//
// attack ends with 0 if everything was as the boundary promises, else 1; with
// --control (outside the boundary) with 0 in any case. The words of the ACP agent
// are in package selftest.
//
// pty makes a terminal of the boundary's own devpts, sends its master over the
// socket FD (one zero byte with the descriptor) and becomes CMD in a new session
// that the slave controls. So the operator's terminal never comes inside, and
// nothing inside can type into it. The size comes from the flags, else from LINES and
// COLUMNS. exec becomes CMD. For both, CMD not found: 127; not executable: 126.
//
// git-credential is a helper of git's that asks the supervisor; gh becomes gh with the
// token of the repository that it works on. Both get an answer for assigned repositories.
//
// start becomes CMD with further environment, read from FD. bubblewrap's pid 1, whose
// environment is open to everything inside, does not have it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime/debug"

	"agentconnect.md/sandbox/cmd/internal/selftest"
)

// Exit codes, as all our programs have them.
const (
	exitFailed = 1
	exitUsage  = 2
)

// exitError ends the program with a code of its own; an err of nil says nothing.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }

func main() {
	err := dispatch(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	if err == nil {
		return
	}
	code := exitFailed
	var exit *exitError
	if errors.As(err, &exit) {
		code, err = exit.code, exit.err
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "agentconnect-guest:", err)
	}
	os.Exit(code)
}

func usage(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

func dispatch(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		return usage("which command? selftest, attack, check, checkout, inner, pty, exec, start, git-credential, gh, git-config, git-receive-pack, mcp or version")
	}
	name, args := args[0], args[1:]
	switch name {
	case "selftest":
		return selftest.Serve(ctx, stdin, stdout, stderr, version())
	case "attack":
		return attack(ctx, args, stdin, stdout, stderr)
	case "check":
		return check(ctx, stdin, stdout)
	case "inner":
		return inner(ctx, args)
	case "checkout":
		return checkout(ctx, args, stderr)
	case "pty":
		return pty(args, stderr)
	case "exec":
		return become(args)
	case "git-credential":
		return gitCredential(ctx, args, stdin, stdout, stderr)
	case "mcp":
		return mcpBridge(ctx, args, stdin, stdout)
	case "gh":
		return gh(ctx, args)
	case "git-config":
		return gitConfig(ctx, args)
	case "git-receive-pack":
		return push(ctx, stdin, stdout)
	case "receive":
		return receive()
	case "start":
		return start(args)
	case "version":
		_, err := fmt.Fprintln(stdout, version())
		return err
	}
	// Steps that the self-test gives to a process of its own.
	if len(args) != 1 {
		return usage("unknown command %q: there are selftest, attack, check, checkout, inner, pty, exec, start, git-credential, gh, git-config, git-receive-pack, mcp and version", name)
	}
	switch name {
	case "try":
		_, err := fmt.Fprintln(stdout, selftest.Try(args[0]))
		return err
	case "detach":
		pid, err := selftest.Detach(args[0])
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(stdout, pid)
		return err
	case "linger":
		selftest.Linger(ctx)
		return nil
	}
	return usage("unknown command %q: there are selftest, attack, check, checkout, inner, pty, exec, start, git-credential, gh, git-config, git-receive-pack, mcp and version", name)
}

func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}

func attack(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("attack", flag.ContinueOnError)
	fs.SetOutput(stderr)
	from := fs.String("targets", "", "`file` with the targets as JSON; - for stdin; none: the defaults")
	asJSON := fs.Bool("json", false, "print the report as JSON")
	control := fs.Bool("control", false, "run outside the boundary: attacks are expected to work")
	if err := fs.Parse(args); err != nil {
		return &exitError{exitUsage, nil} // flag has said it
	}
	if fs.NArg() > 0 {
		return usage("attack: unexpected argument %q", fs.Arg(0))
	}
	var targets selftest.Targets
	if *from != "" {
		in := stdin
		if *from != "-" {
			f, err := os.Open(*from)
			if err != nil {
				return fmt.Errorf("targets: %w", err)
			}
			defer f.Close()
			in = f
		}
		if err := strict(in, &targets); err != nil {
			return fmt.Errorf("targets: %s: %w", *from, err)
		}
	}
	report, err := selftest.Run(ctx, targets, nil)
	if err != nil {
		return err
	}
	if *asJSON {
		enc := json.NewEncoder(stdout)
		enc.SetIndent("", "  ")
		err = enc.Encode(report)
	} else {
		err = report.WriteTable(stdout)
	}
	if err != nil {
		return err
	}
	if report.Failed > 0 && !*control {
		return &exitError{exitFailed, nil}
	}
	return nil
}

// check reads strictly: a request whose words are not understood would check less
// than the probe thinks.
func check(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	var req selftest.CheckRequest
	if err := strict(stdin, &req); err != nil {
		return fmt.Errorf("check request: %w", err)
	}
	return json.NewEncoder(stdout).Encode(selftest.Check(ctx, req))
}

// strict reads one JSON value and refuses unknown names and anything behind it.
func strict(r io.Reader, into any) error {
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the JSON value")
	}
	return nil
}
