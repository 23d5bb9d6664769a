package supervisor

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"agentconnect.md/sandbox/cmd/internal/launch"
	"agentconnect.md/sandbox/cmd/internal/wire"
)

// maxPassed bounds the descriptors of one request.
const maxPassed = 3

// readRequest reads the first line and the descriptors that came with it. The caller
// closes the files, also when there is an error.
func readRequest(conn *net.UnixConn) (*wire.Request, []*os.File, error) {
	var line []byte
	var files []*os.File
	buf := make([]byte, 4<<10) // kept while a connection waits for its next request
	oob := make([]byte, unix.CmsgSpace(16*4))
	for {
		n, on, flags, _, err := conn.ReadMsgUnix(buf, oob)
		if on > 0 {
			more, perr := launch.Passed(oob[:on])
			files = append(files, more...)
			if perr != nil {
				return nil, files, perr
			}
		}
		if flags&unix.MSG_CTRUNC != 0 || len(files) > maxPassed {
			return nil, files, errors.New("request: too many descriptors")
		}
		line = append(line, buf[:max(n, 0)]...) // -1 with an error
		if i := bytes.IndexByte(line, '\n'); i >= 0 {
			if i != len(line)-1 {
				return nil, files, errors.New("request: more than one line before the reply")
			}
			break
		}
		if len(line) > wire.MaxRequest {
			return nil, files, fmt.Errorf("request: longer than %d bytes", wire.MaxRequest)
		}
		if err != nil {
			return nil, files, fmt.Errorf("request: %w", err)
		}
		if n == 0 {
			return nil, files, errNoRequest
		}
	}
	var req wire.Request
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&req); err != nil {
		return nil, files, fmt.Errorf("request: %w", err)
	}
	return &req, files, nil
}
