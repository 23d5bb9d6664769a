// The guest's side of the supervisor's socket.

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"agentconnect.md/sandbox/cmd/internal/gitcred"
	"agentconnect.md/sandbox/cmd/internal/wire"
	"agentconnect.md/sandbox/sandbox"
)

// maxGuestReply bounds an answer, in bytes.
const maxGuestReply = 256 << 10

// askTime bounds a question: the operator's source of credentials may take its time.
const askTime = 60 * time.Second

// dialSupervisor connects to the supervisor.
func dialSupervisor(ctx context.Context) (*net.UnixConn, error) {
	path := os.Getenv(wire.ChannelEnv)
	if path == "" {
		path = sandbox.ChannelSocket
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("the supervisor does not answer: %w", err)
	}
	return c.(*net.UnixConn), nil //nolint:forcetypeassert // what "unix" gives
}

// ask sends a request and reads the reply; the connection stays open. What the supervisor
// sends behind the reply is still to be read from it.
func ask(conn *net.UnixConn, req wire.GuestRequest) (*wire.GuestReply, error) {
	req.Version = wire.GuestVersion
	line, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	if err := conn.SetDeadline(time.Now().Add(askTime)); err != nil {
		return nil, err
	}
	if _, err := conn.Write(append(line, '\n')); err != nil {
		return nil, fmt.Errorf("the supervisor does not listen: %w", err)
	}
	var answer []byte
	var b [1]byte
	for {
		n, err := conn.Read(b[:])
		if n == 1 && b[0] == '\n' {
			break
		}
		answer = append(answer, b[:n]...)
		if err == nil && len(answer) > maxGuestReply {
			err = errors.New("its answer does not end")
		}
		if err != nil {
			return nil, fmt.Errorf("the supervisor does not answer: %w", err)
		}
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	var reply wire.GuestReply
	if err := json.Unmarshal(answer, &reply); err != nil {
		return nil, fmt.Errorf("the supervisor's answer: %w", err)
	}
	if !reply.OK {
		return nil, errors.New(reply.Error)
	}
	return &reply, nil
}

// credential asks for a repository's credentials.
func credential(ctx context.Context, q wire.CredentialQuery) (*wire.GuestReply, error) {
	conn, err := dialSupervisor(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return ask(conn, wire.GuestRequest{Op: wire.OpCredential, Credential: &q})
}

// gitCredential is a helper as gitcredentials(7) describes it. For a repository that is
// not the agent's it says why on stderr and nothing on stdout.
func gitCredential(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	if len(args) != 1 {
		return usage("git-credential: usage: git-credential get|store|erase, with git's words on stdin")
	}
	switch args[0] {
	case "get", "store", "erase":
	default:
		return nil // a helper ignores what it does not know
	}
	b, err := io.ReadAll(io.LimitReader(stdin, gitcred.MaxInput+1))
	if err != nil {
		return err
	}
	v, err := gitcred.ReadValues(b)
	if err != nil {
		return fmt.Errorf("git-credential: %w", err)
	}
	reply, err := credential(ctx, wire.CredentialQuery{Action: args[0], Protocol: v.Protocol, Host: v.Host, Path: v.Path, Username: v.Username, Tool: "git"})
	if err != nil {
		fmt.Fprintln(stderr, "agentconnect-guest:", err)
		return nil
	}
	if args[0] != "get" {
		return nil
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "username=%s\npassword=%s\n", reply.Username, reply.Password)
	_, err = stdout.Write(out.Bytes())
	return err
}
