package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/vfork"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// Dialer connects to ports of a sandbox's loopback, by a process that was let into its
// network namespace and lives as long as the dialer.
type Dialer struct {
	mu      sync.Mutex
	gate    *os.File
	process *vfork.Process
	once    sync.Once
}

// ErrDialer: the process that connects is gone.
var ErrDialer = errors.New("nobody connects inside any more")

// NewDialer lets a process in.
func NewDialer(ctx context.Context, launcher string, in *Inside) (*Dialer, error) {
	spec := wire.Launch{Version: wire.Version, Join: true, Dial: true}
	sealed, err := sealBytes("launch", spec.Encode())
	if err != nil {
		return nil, err
	}
	defer sealed.Close()
	theirs, gate, err := gatePair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		gate.Close()
		return nil, err
	}
	defer null.Close()
	start := vfork.Start{
		Path: launcher, Args: []string{"agentconnect-launch"}, Env: []string{},
		Files: []*os.File{null, null, null, sealed, theirs, nil, nil, in.User, in.Net},
	}
	child, err := start.Run()
	if err != nil {
		gate.Close()
		return nil, err
	}
	theirs.Close()
	stop := context.AfterFunc(ctx, func() { gate.SetDeadline(time.Unix(1, 0)) })
	process, err := joined(child, gate, false)
	if stop(); err != nil {
		gate.Close()
		return nil, err
	}
	return &Dialer{gate: gate, process: process}, nil
}

// gatePair makes the two ends of a gate: the launcher's and ours.
func gatePair() (theirs, ours *os.File, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(pair[0], true); err != nil {
		unix.Close(pair[0])
		unix.Close(pair[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(pair[1]), "gate"), os.NewFile(uintptr(pair[0]), "gate"), nil
}

// Dial connects to a port of the loopback inside, IPv4 first. The caller closes the socket.
func (d *Dialer) Dial(port uint16) (*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, err := d.gate.Write([]byte{byte(port >> 8), byte(port)}); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDialer, err)
	}
	var line []byte
	var files []*os.File
	for !bytes.HasSuffix(line, []byte("\n")) {
		n, more, err := receive(d.gate, &line)
		files = append(files, more...)
		if err != nil || n == 0 || len(line) > 4096 {
			closeAll(files)
			return nil, errors.Join(ErrDialer, err)
		}
	}
	if len(files) != 1 {
		closeAll(files)
		return nil, errors.New(string(bytes.TrimSuffix(line, []byte("\n"))))
	}
	return files[0], nil
}

// Close ends the process. Connections live on.
func (d *Dialer) Close() {
	d.once.Do(func() {
		d.gate.Close()
		signalChild(d.process.Pid, syscall.SIGKILL)
		_, _ = d.process.Wait() // it has nothing to say
	})
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// receive appends what comes to line, and gives the descriptors that come with it.
func receive(from *os.File, line *[]byte) (n int, files []*os.File, err error) {
	raw, err := from.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	buf, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*maxPassed))
	on, opErr := 0, error(nil)
	if err := raw.Read(func(fd uintptr) bool {
		n, on, _, _, opErr = unix.Recvmsg(int(fd), buf, oob, unix.MSG_CMSG_CLOEXEC)
		return !errors.Is(opErr, unix.EAGAIN)
	}); err != nil {
		return 0, nil, err
	}
	if opErr != nil {
		return 0, nil, opErr
	}
	files, err = Passed(oob[:on])
	*line = append(*line, buf[:n]...)
	return n, files, err
}
