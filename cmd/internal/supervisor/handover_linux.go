// How a supervisor comes by its sealed spec: from whoever started it, from the file
// descriptor store of its service, or from the daemon.

package supervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/peer"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// storedName is the spec's name in the file descriptor store.
const storedName = "spec"

// maxSpec bounds a spec, in bytes.
const maxSpec = 16 << 20

// specTime is how long the daemon may take to answer.
const specTime = 60 * time.Second

// stopPatience is how long that is when the agent is told to stop meanwhile.
const stopPatience = 2 * time.Second

// SpecError is the daemon's answer that the agent must not start as things are.
type SpecError struct {
	Code int
	Text string
}

func (e *SpecError) Error() string { return e.Text }

// ReadSpec reads a spec from its sealed file.
func ReadSpec(f *os.File) (*wire.Spec, error) {
	if err := checkSealed(f); err != nil {
		return nil, err
	}
	// Not by the offset: a stored descriptor is read again after each restart.
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxSpec))
	if err != nil {
		return nil, err
	}
	var spec wire.Spec
	if err := json.Unmarshal(b, &spec); err != nil {
		return nil, err
	}
	return &spec, nil
}

// checkSealed refuses a spec that somebody could still change.
func checkSealed(f *os.File) error {
	const want = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("it is no memfd: %w", err)
	}
	if seals&want != want {
		return errors.New("it is not sealed")
	}
	return nil
}

// StoredSpec takes the spec out of what the service manager kept over a restart
// (sd_listen_fds(3)); nil if it kept none. Other descriptors are closed.
func StoredSpec(environ []string) *os.File {
	env := map[string]string{}
	for _, e := range environ {
		if k, v, ok := strings.Cut(e, "="); ok {
			env[k] = v
		}
	}
	n, err := strconv.Atoi(env["LISTEN_FDS"])
	if err != nil || n < 1 || n > 1024 || env["LISTEN_PID"] != strconv.Itoa(os.Getpid()) {
		return nil
	}
	names := strings.Split(env["LISTEN_FDNAMES"], ":")
	var spec *os.File
	for i := range n {
		fd := 3 + i
		unix.CloseOnExec(fd)
		if i < len(names) && names[i] == storedName && spec == nil {
			spec = os.NewFile(uintptr(fd), storedName)
			continue
		}
		unix.Close(fd)
	}
	return spec
}

// StoreSpec asks the service manager to keep the spec for the next start after a
// failure, in place of one that it keeps already. A stop drops it.
func StoreSpec(notifySocket string, f *os.File) error {
	if notifySocket == "" {
		return errors.New("no service manager")
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// A leading @ means an abstract name, here as there.
	to := &unix.SockaddrUnix{Name: notifySocket}
	// They would add up, to as many as the manager keeps: then an old one would be the last.
	if err := unix.Sendmsg(fd, []byte("FDSTOREREMOVE=1\nFDNAME="+storedName), nil, to, unix.MSG_NOSIGNAL); err != nil {
		return err
	}
	return unix.Sendmsg(fd, []byte("FDSTORE=1\nFDNAME="+storedName), unix.UnixRights(int(f.Fd())), to, unix.MSG_NOSIGNAL)
}

// AskSpec asks the daemon for the spec of an agent. An error is a *SpecError, or means
// that no daemon answers.
func AskSpec(ctx context.Context, socket, agent string) (*os.File, error) {
	var reply wire.SpecReply
	files, err := ask(ctx, socket, wire.SpecRequest{Version: wire.Version, Op: wire.OpSpec, Agent: agent}, &reply)
	switch {
	case err != nil:
	case !reply.OK:
		err = &SpecError{Code: reply.Code, Text: reply.Error}
	case len(files) != 1:
		err = errors.New("the daemon's answer has no spec with it")
	default:
		return files[0], nil
	}
	closeAll(files)
	return nil, err
}

// SayStopped tells the daemon that an agent is being stopped, and reports whether one is
// there that sees by whom.
func SayStopped(ctx context.Context, socket, agent string) bool {
	var reply wire.SpecReply
	files, err := ask(ctx, socket, wire.SpecRequest{Version: wire.Version, Op: wire.OpStopped, Agent: agent}, &reply)
	closeAll(files)
	return err == nil && reply.OK
}

// askCredential asks the daemon for what the control plane gives for a repository, or tells
// it that a host refused that.
func askCredential(ctx context.Context, socket, agent string, q wire.CredentialQuery) (wire.Reply, error) {
	var reply wire.Reply
	files, err := ask(ctx, socket, wire.Request{Version: wire.Version, Op: wire.OpCredential, Agent: agent, Credential: &q}, &reply)
	closeAll(files)
	return reply, err
}

// ask sends one request to the daemon and reads its answer; it gives the files that are in that,
// also with an error.
func ask(ctx context.Context, socket string, request, reply any) (files []*os.File, err error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	conn := c.(*net.UnixConn) //nolint:forcetypeassert // what "unix" gives
	defer conn.Close()
	if err := peer.Check(conn); err != nil {
		return nil, err
	}
	end := time.Now().Add(specTime)
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end = d
	}
	if err := conn.SetDeadline(end); err != nil {
		return nil, err
	}
	// A daemon that hangs does not hold up a stop. One that is well answers first, and then takes
	// the stop for the later word.
	defer context.AfterFunc(ctx, func() {
		if soon := time.Now().Add(stopPatience); soon.Before(end) {
			_ = conn.SetDeadline(soon)
		}
	})()
	line, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(append(line, '\n')); err != nil {
		return nil, err
	}
	var answer []byte
	buf, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*4))
	for !bytes.HasSuffix(answer, []byte("\n")) {
		n, on, _, _, err := conn.ReadMsgUnix(buf, oob)
		if on > 0 {
			more, perr := launch.Passed(oob[:on])
			files = append(files, more...)
			err = errors.Join(err, perr)
		}
		answer = append(answer, buf[:max(n, 0)]...) // -1 with an error
		if err == nil && (n == 0 || len(answer) > wire.MaxRequest) {
			err = errors.New("the daemon's answer does not end")
		}
		if err != nil {
			return files, err
		}
	}
	return files, json.Unmarshal(answer, reply)
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
