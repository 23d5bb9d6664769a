// Plain HTTP/1: each request of a connection names a host, and each is judged. What a
// server could read in another way than this file does is refused.

package egress

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"agentconnect.md/sandbox/cmd/internal/egress/rules"
)

// Bounds, in bytes.
const (
	maxHead      = 48 << 10 // a request's line and headers
	maxChunkLine = 4 << 10
	// maxLooked bounds how much of a line is looked at again with each piece of it that comes.
	maxLooked = 4 << 20
)

var (
	errBadHTTP = errors.New("not a request that every server reads in the same way")
	errBadBody = errors.New("one that not every server reads in the same way")
	errNoHost  = errors.New("names no host")
)

// likeness of the first bytes to a protocol.
type likeness int

const (
	unlike likeness = iota - 1
	unsure          // more is needed
	alike
)

// looksLikeHTTP judges by the first line: alike is whatever some server takes as a request,
// also without a version, with another protocol's (Node's takes RTSP and ICE), or with words
// that no rule of HTTP has. What could still become one is unsure: servers differ in how long
// a method may be, and in what ends a word.
func looksLikeHTTP(b []byte) likeness {
	for len(b) > 0 && blank(b[0]) { // servers pass over empty lines, and some over blanks
		b = b[1:]
	}
	i := 0
	for i < len(b) && tokenByte(b[i]) {
		i++
	}
	switch {
	case i == len(b):
		return unsure
	case i == 0, !blank(b[i]):
		return unlike
	}
	end := bytes.IndexByte(b, '\n')
	if end >= 0 {
		return likeRequest(b[:end])
	}
	// For some a CR alone ends the line.
	if cr := bytes.LastIndexByte(b, '\r'); cr >= 0 && likeRequest(b[:cr]) == alike {
		return alike
	}
	return unsure
}

// looksLikeBalancer judges by the first bytes, which a balancer puts in front of what it passes
// on (the PROXY protocol). Servers behind one may take them from anybody.
func looksLikeBalancer(b []byte) likeness {
	for _, header := range []string{"PROXY ", "\r\n\r\n\x00\r\nQUIT\n"} {
		switch n := min(len(b), len(header)); {
		case string(b[:n]) != header[:n]:
		case n == len(header):
			return alike
		default:
			return unsure
		}
	}
	return unlike
}

// likeRequest judges a whole line.
func likeRequest(line []byte) likeness {
	var words [2][]byte // the first: the method and the target
	n := 0
	for len(line) > 0 {
		size := 0
		for size < len(line) && !blank(line[size]) {
			size++
		}
		w := line[:size]
		line = line[min(size+1, len(line)):]
		if size == 0 {
			continue
		}
		if n < len(words) {
			words[n] = w
		}
		if n++; n > 1 && namesProtocol(w) {
			return alike
		}
	}
	// HTTP/0.9 has no version, and some servers take headers all the same. Methods are upper
	// case; a text protocol of another kind may well have a path as the second word of its first
	// line, in lower case. The object behind CONNECT is NATS's.
	method, target := string(words[0]), words[1]
	switch {
	case n < 2:
	case strings.ToUpper(method) == method && (bytes.HasPrefix(target, []byte("/")) || bytes.Contains(target, []byte("://"))),
		n == 2 && slices.Contains(methods, method) && (method != "CONNECT" || !bytes.HasPrefix(target, []byte("{"))):
		return alike
	}
	return unlike
}

func namesProtocol(word []byte) bool {
	for _, p := range []string{"HTTP/", "RTSP/", "ICE/"} {
		if len(word) >= len(p) && word[len(p)-1] == '/' && strings.EqualFold(string(word[:len(p)]), p) {
			return true
		}
	}
	return false
}

// methods are those that servers know without asking what runs on them: Node's, the most.
var methods = strings.Fields(`ACL ANNOUNCE BIND CHECKOUT CONNECT COPY DELETE DESCRIBE GET GET_PARAMETER HEAD LINK LOCK M-SEARCH MERGE
	MKACTIVITY MKCALENDAR MKCOL MOVE NOTIFY OPTIONS PATCH PAUSE PLAY POST PROPFIND PROPPATCH PURGE PUT QUERY REBIND RECORD REDIRECT
	REPORT SEARCH SET_PARAMETER SETUP SOURCE SUBSCRIBE TEARDOWN TRACE UNBIND UNLINK UNLOCK UNSUBSCRIBE`)

// blank is what ends a word for some server. Python's splits at all that is white in Latin-1.
func blank(c byte) bool {
	return c == ' ' || '\t' <= c && c <= '\r' || 0x1c <= c && c <= 0x1f || c == 0x85 || c == 0xa0
}

func tokenByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

// request is the head of one request.
type request struct {
	size   int // of the head in bytes
	method string
	// host and port are what it is for: of the target, where that names one, else of Host.
	// Both are the same, or the request is refused. port 0: not said.
	host string
	port uint16
	// through: the server is asked to reach host itself, as a proxy.
	through bool
	length  int64 // of the body; -1: in chunks
	upgrade string
	// drop are lines of the head that are not passed on, as [from, to).
	drop [][2]int
}

// headEnd finds the end of a head in b, of which the first from bytes were looked at; 0: it
// is not there yet.
func headEnd(b []byte, from int) int {
	for i := max(0, from-3); i < len(b); i++ {
		if b[i] != '\n' {
			continue
		}
		rest := b[i+1:]
		switch {
		case len(rest) > 0 && rest[0] == '\n':
			return i + 2
		case len(rest) > 1 && rest[0] == '\r' && rest[1] == '\n':
			return i + 3
		}
	}
	return 0
}

// parseRequest reads a head that ends at its last byte, without empty lines in front.
func parseRequest(head []byte) (*request, error) {
	r := &request{size: len(head)}
	line, rest, err := cutLine(head)
	if err != nil {
		return nil, err
	}
	words := strings.Split(line, " ")
	if len(words) != 3 || !token(words[0]) || words[1] == "" {
		return nil, errBadHTTP
	}
	r.method = words[0]
	old := false
	switch words[2] {
	case "HTTP/1.1":
	case "HTTP/1.0":
		old = true
	default:
		return nil, errBadHTTP
	}
	var hosts, lengths, codings []string
	connection, hidden := [][2]int{}, false
	for {
		from := len(head) - len(rest)
		if line, rest, err = cutLine(rest); err != nil {
			return nil, err
		}
		if line == "" {
			break
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok || !token(name) { // also a line that continues the one before
			return nil, errBadHTTP
		}
		value = strings.Trim(value, " \t")
		at := [2]int{from, len(head) - len(rest)}
		switch strings.ToLower(name) {
		case "host":
			hosts = append(hosts, value)
		case "content-length":
			lengths = append(lengths, value)
		case "transfer-encoding":
			codings = append(codings, value)
		case "connection":
			connection = append(connection, at)
		case "http2-settings":
			r.drop = append(r.drop, at)
		case "upgrade":
			for _, v := range strings.Split(value, ",") {
				v, _, _ := strings.Cut(strings.TrimSpace(v), "/")
				hidden = hidden || strings.EqualFold(v, "h2c") || strings.EqualFold(v, "TLS")
			}
			if r.upgrade = value; hidden {
				r.drop = append(r.drop, at)
			}
		}
	}
	if len(rest) > 0 {
		return nil, errBadHTTP
	}
	if hidden {
		// The server would go on in HTTP/2 or TLS, where a request hides its host from here.
		// Without the offer it answers in HTTP/1.
		r.upgrade = ""
		r.drop = append(r.drop, connection...)
	}
	if r.length, err = bodyLength(lengths, codings, old); err != nil {
		return nil, err
	}
	return r, r.target(words[1], hosts)
}

// target sets where the request goes.
func (r *request) target(target string, hosts []string) error {
	authority, defaultPort := "", uint16(0)
	switch {
	case r.method == "CONNECT":
		if r.length != 0 {
			return errBadHTTP // a proxy that passes over it takes the body as what goes through
		}
		authority, r.through = target, true
	case target == "*" && r.method == "OPTIONS":
	case strings.HasPrefix(target, "/"):
	default:
		scheme, rest, ok := strings.Cut(target, "://")
		if !ok || !strings.EqualFold(scheme, "http") && !strings.EqualFold(scheme, "https") {
			return errBadHTTP
		}
		if defaultPort = 80; strings.EqualFold(scheme, "https") {
			defaultPort = 443
		}
		authority, _, _ = strings.Cut(rest, "/")
		authority, _, _ = strings.Cut(authority, "?")
		r.through = true
	}
	if len(hosts) > 1 {
		return errBadHTTP
	}
	if len(hosts) == 1 {
		host, port, err := hostPort(hosts[0])
		if err != nil {
			return err
		}
		r.host, r.port = host, port
	}
	if r.through {
		host, port, err := hostPort(authority)
		if err != nil {
			return err
		}
		// A CONNECT's Host is often without the port, or the proxy's own name.
		if r.host != "" && r.host != host && r.method != "CONNECT" {
			return errBadHTTP
		}
		if port == 0 {
			if port = defaultPort; port == 0 {
				return errBadHTTP // a CONNECT without
			}
		}
		r.host, r.port = host, port
	}
	if r.host == "" {
		return errNoHost
	}
	return nil
}

// hostPort reads an authority as it stands in a request: a name or an address.
func hostPort(s string) (host string, port uint16, err error) {
	host = s
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !strings.HasSuffix(s, "]") {
		n, err := strconv.ParseUint(s[i+1:], 10, 16)
		if err != nil || n == 0 || s[i+1] == '+' {
			return "", 0, errBadHTTP
		}
		host, port = s[:i], uint16(n)
	}
	if inner, ok := strings.CutPrefix(host, "["); ok {
		a, err := netip.ParseAddr(strings.TrimSuffix(inner, "]"))
		if err != nil || !strings.HasSuffix(inner, "]") || a.Zone() != "" {
			return "", 0, errBadHTTP
		}
		return a.Unmap().String(), port, nil
	}
	if a, err := netip.ParseAddr(host); err == nil && a.Is4() {
		return a.String(), port, nil
	}
	name, ok := rules.ASCIIName(host)
	if !ok {
		return "", 0, errBadHTTP
	}
	return strings.Clone(name), port, nil // it is kept longer than the line
}

// bodyLength is the length of a request's body in bytes; -1: it comes in chunks.
func bodyLength(lengths, codings []string, old bool) (int64, error) {
	switch {
	case len(codings) > 0:
		if len(codings) > 1 || len(lengths) > 0 || old || !strings.EqualFold(codings[0], "chunked") {
			return 0, errBadHTTP
		}
		return -1, nil
	case len(lengths) > 1:
		return 0, errBadHTTP
	case len(lengths) == 1:
		n, err := strconv.ParseUint(lengths[0], 10, 63)
		if err != nil || lengths[0][0] == '+' {
			return 0, errBadHTTP
		}
		return int64(n), nil
	}
	return 0, nil
}

// cutLine takes a line off. It ends in CR LF: servers differ in whether LF alone ends one. In
// it is no byte that some servers end a line or a text at.
func cutLine(b []byte) (line string, rest []byte, err error) {
	i := bytes.IndexByte(b, '\n')
	if i < 0 {
		return "", nil, errBadHTTP
	}
	raw, ok := bytes.CutSuffix(b[:i], []byte{'\r'})
	if !ok {
		return "", nil, errBadHTTP
	}
	for _, c := range raw {
		if c < ' ' && c != '\t' || c == 0x7f {
			return "", nil, errBadHTTP
		}
	}
	return string(raw), b[i+1:], nil
}

func token(s string) bool {
	for i := range len(s) {
		if !tokenByte(s[i]) {
			return false
		}
	}
	return s != ""
}

// passOn is the head as the server gets it.
func (r *request) passOn(head []byte) []byte {
	if len(r.drop) == 0 {
		return head
	}
	out := make([]byte, 0, len(head))
	for i := 0; i < len(head); {
		end := i + bytes.IndexByte(head[i:], '\n') + 1
		drop := false
		for _, d := range r.drop {
			drop = drop || d[0] == i
		}
		if !drop {
			out = append(out, head[i:end]...)
		}
		i = end
	}
	return out
}

// chunkSize reads the line in front of a chunk: the size of what follows in bytes. A blank
// could make a request of it for a server that knows no chunks.
func chunkSize(line string) (int64, error) {
	digits, _, _ := strings.Cut(line, ";")
	if len(digits) == 0 || len(digits) > 15 || strings.ContainsAny(line, " \t") {
		return 0, errBadHTTP
	}
	for i := range len(digits) {
		c := digits[i]
		if !('0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F') {
			return 0, errBadHTTP
		}
	}
	n, err := strconv.ParseInt(digits, 16, 64)
	return n, err
}

// responseStatus reads the status of a response's head.
func responseStatus(head []byte) (int, error) {
	line, _, err := cutLine(head)
	if err != nil || len(line) < 12 || line[:7] != "HTTP/1." || line[8] != ' ' {
		return 0, errBadHTTP
	}
	n, err := strconv.Atoi(line[9:12])
	if err != nil || n < 100 || len(line) > 12 && line[12] != ' ' {
		return 0, errBadHTTP
	}
	return n, nil
}
