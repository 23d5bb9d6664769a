// What a TLS client says before it encrypts: the name of the server that it wants.

package egress

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
)

// Bounds, in bytes.
const (
	maxHello  = 64 << 10      // one ClientHello
	maxRecord = 16<<10 + 2048 // one record, as TLS 1.2 has it at most
)

// Types of TLS records, and of the one handshake message that matters.
const (
	recordChangeCipherSpec = 20
	recordAlert            = 21
	recordHandshake        = 22
	recordData             = 23
	recordHeartbeat        = 24
	clientHello            = 1
)

// Extensions that matter.
const (
	extServerName = 0
	extEarlyData  = 42
	extECH        = 0xfe0d
	extESNI       = 0xffce // what became of ECH; nobody should send it any more
)

// hello is what a ClientHello tells.
type hello struct {
	name      string // as ASCIIName; empty: it names none
	encrypted bool   // it has an encrypted one inside (ECH): name is that of a front
	early     bool   // data may follow before the server's answer
}

var (
	errShort    = errors.New("more is needed")
	errBadHello = errors.New("not a valid TLS ClientHello")
)

// looksLikeTLS judges by the first bytes. Like it are also those in front of a ClientHello
// that servers pass over (alerts that only warn), records whose version they ignore, and what
// SSL 2 has there: none of it is a ClientHello to helloParser, which refuses it.
func looksLikeTLS(b []byte) likeness {
	switch {
	case len(b) > 2 && b[0]&0x80 != 0 && b[2] == clientHello && (len(b) == 3 || b[3] <= 3):
		return alike
	case len(b) > 0 && b[0]&0x80 != 0 && len(b) < 3:
		return unsure
	case len(b) > 0 && (b[0] < recordChangeCipherSpec || b[0] > recordHeartbeat), len(b) > 1 && b[1] > maxMajor:
		return unlike
	case len(b) < 2:
		return unsure
	case b[1] == 3:
		return alike
	case len(b) < 6:
		return unsure
	}
	// Other protocols have such a version where TLS has its own; so more must fit.
	size := int(binary.BigEndian.Uint16(b[3:]))
	if b[0] == recordHandshake && b[5] == clientHello && size <= maxRecord || b[0] == recordAlert && size == 2 || size == 0 {
		return alike
	}
	return unlike
}

// maxMajor is the highest major version of a record that Go's servers go on with; TLS 1.3
// has the field ignored.
const maxMajor = 15

// parseRecord returns the first record of b and its length with the header; errShort when
// it is not all there.
func parseRecord(b []byte) (kind byte, body []byte, n int, err error) {
	if len(b) < 5 {
		return 0, nil, 0, errShort
	}
	size := int(binary.BigEndian.Uint16(b[3:]))
	if b[1] != 3 || size == 0 || size > maxRecord {
		return 0, nil, 0, errBadHello
	}
	if len(b) < 5+size {
		return b[0], nil, 0, errShort
	}
	return b[0], b[5 : 5+size], 5 + size, nil
}

// helloParser reads a ClientHello from the records that bytes begin with, however it is
// split. It goes on where it stopped, so that many small pieces cost no more than one.
type helloParser struct {
	n   int    // bytes that were read
	msg []byte // what is there of the message
}

// parse is called with the same bytes and more behind them, until the error is not errShort.
// n is how many the ClientHello takes. It must be all that is in its last record, as no
// client puts anything behind it.
func (p *helloParser) parse(b []byte) (h hello, n int, err error) {
	for {
		kind, body, size, err := parseRecord(b[p.n:])
		switch {
		case err != nil:
			return h, 0, err
		case kind != recordHandshake:
			return h, 0, errBadHello
		}
		p.msg = append(p.msg, body...)
		p.n += size
		if p.msg[0] != clientHello {
			return h, 0, errBadHello
		}
		if len(p.msg) < 4 {
			continue
		}
		want := 4 + int(p.msg[1])<<16 + int(p.msg[2])<<8 + int(p.msg[3])
		switch {
		case want > maxHello || len(p.msg) > want:
			return h, 0, errBadHello
		case len(p.msg) == want:
			h, err := parseHelloBody(p.msg[4:])
			return h, p.n, err
		}
	}
}

// fields reads length-prefixed fields; after the first that is not there it is broken.
type fields struct {
	b      []byte
	broken bool
}

func (f *fields) take(n int) []byte {
	if f.broken || n > len(f.b) {
		f.broken = true
		return nil
	}
	out := f.b[:n]
	f.b = f.b[n:]
	return out
}

func (f *fields) number(size int) int {
	n := 0
	for _, c := range f.take(size) {
		n = n<<8 | int(c)
	}
	return n
}

// field reads a field whose length comes first, in size bytes.
func (f *fields) field(size int) []byte { return f.take(f.number(size)) }

func parseHelloBody(b []byte) (h hello, err error) {
	f := fields{b: b}
	f.take(2 + 32) // version, random
	f.field(1)     // session id
	f.field(2)     // cipher suites
	f.field(1)     // compression methods
	if f.broken {
		return h, errBadHello
	}
	if len(f.b) == 0 {
		return h, nil // no extensions: an old client
	}
	ext := fields{b: f.field(2)}
	if f.broken || len(f.b) > 0 {
		return h, errBadHello
	}
	seen := map[int]bool{}
	for len(ext.b) > 0 {
		kind, body := ext.number(2), ext.field(2)
		if ext.broken || seen[kind] {
			return h, errBadHello // of two names a server might take the other
		}
		seen[kind] = true
		switch kind {
		case extServerName:
			if h.name, err = parseServerName(body); err != nil {
				return h, err
			}
		case extECH, extESNI:
			h.encrypted = true
		case extEarlyData:
			h.early = true
		}
	}
	return h, nil
}

func parseServerName(b []byte) (string, error) {
	f := fields{b: b}
	list := fields{b: f.field(2)}
	kind, raw := list.number(1), list.field(2)
	if f.broken || list.broken || len(f.b) > 0 || len(list.b) > 0 || kind != 0 {
		return "", errBadHello
	}
	name, ok := rules.ASCIIName(string(raw))
	if _, err := netip.ParseAddr(name); !ok || err == nil {
		return "", errBadHello // RFC 6066 has no addresses there
	}
	return name, nil
}

// TLS alerts, fatal each.
const (
	alertAccessDenied     = 49
	alertUnrecognizedName = 112
)

// tlsAlert is the record that refuses.
func tlsAlert(code byte) []byte { return []byte{recordAlert, 3, 3, 0, 2, 2, code} }
