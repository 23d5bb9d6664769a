package supervisor

import (
	"bytes"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzRequest feeds the first bytes of a connection: a request is read whole or refused.
func FuzzRequest(f *testing.F) {
	f.Add([]byte(`{"v":1,"op":"exec","argv":["x"],"tty":{"rows":1,"cols":2}}` + "\n"))
	f.Add([]byte("{}\n{}\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, in []byte) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Skip("missing: descriptors")
		}
		conns := make([]*net.UnixConn, 2)
		for i, fd := range fds {
			file := os.NewFile(uintptr(fd), "")
			c, err := net.FileConn(file)
			file.Close()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			conns[i] = c.(*net.UnixConn)
		}
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			conns[0].Write(in)
			conns[0].CloseWrite()
		}()
		req, files, err := readRequest(conns[1])
		if len(files) != 0 {
			t.Errorf("%d descriptors out of nothing", len(files))
		}
		if err == nil && (req == nil || bytes.Count(in, []byte("\n")) == 0) {
			t.Errorf("%q was taken", in)
		}
		conns[1].Close()
		<-sent
	})
}
