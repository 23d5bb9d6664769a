// The binary form of what goes between the supervisor and the launcher. JSON cannot carry
// a path that is no UTF-8, and the launcher, which lives for milliseconds, starts faster
// without it. Both sides are of one build; the version in front says when they are not.

package wire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"agentconnect.md/sandbox/sandbox"
)

// errForm: the bytes are not what an encoder of this version makes.
var errForm = errors.New("malformed message of our own")

// codec writes a value to buf, or reads it from there: one description serves both. What is read
// shares the memory of all: a launcher that makes hundreds of small strings pays for each new page.
type codec struct {
	buf    []byte
	all    string // what buf is the rest of
	decode bool
	err    error
}

func decoder(b []byte) codec { return codec{buf: b, all: string(b), decode: true} }

func (c *codec) num(v *uint64) {
	if !c.decode {
		c.buf = binary.AppendUvarint(c.buf, *v)
		return
	}
	n, size := binary.Uvarint(c.buf)
	if size <= 0 {
		c.err, c.buf = errForm, nil
		return
	}
	*v, c.buf = n, c.buf[size:]
}

func (c *codec) count(n int) int {
	v := uint64(n)
	c.num(&v)
	if c.decode && v > uint64(len(c.buf)) { // every element takes a byte at least
		c.err, c.buf = errForm, nil
		return 0
	}
	return int(v)
}

func (c *codec) bytes(v *[]byte) {
	n := c.count(len(*v))
	if !c.decode {
		c.buf = append(c.buf, *v...)
		return
	}
	*v, c.buf = c.buf[:n:n], c.buf[n:]
}

func text[S ~string](c *codec, v *S) {
	n := c.count(len(*v))
	if !c.decode {
		c.buf = append(c.buf, *v...)
		return
	}
	at := len(c.all) - len(c.buf)
	*v, c.buf = S(c.all[at:at+n]), c.buf[n:]
}

func (c *codec) texts(v *[]string) {
	n := c.count(len(*v))
	if c.decode {
		*v = make([]string, n)
	}
	for i := range *v {
		text(c, &(*v)[i])
	}
}

func (c *codec) flag(v *bool) {
	var n uint64
	if *v {
		n = 1
	}
	c.num(&n)
	*v = n == 1
	if n > 1 {
		c.err = errForm
	}
}

func integer[I ~int | ~int64 | ~uint32 | ~uint16](c *codec, v *I) {
	n := uint64(*v)
	c.num(&n)
	*v = I(n)
}

func (l *Launch) code(c *codec) {
	integer(c, &l.Version)
	if c.decode && l.Version != Version {
		return // the rest has a form that we do not know
	}
	planned := l.Plan != nil
	c.flag(&planned)
	if planned {
		if c.decode {
			l.Plan = &sandbox.Plan{}
		}
		codePlan(c, l.Plan)
	}
	c.texts(&l.Argv)
	c.texts(&l.Env)
	text(c, &l.Dir)
	text(c, &l.Bwrap)
	c.bytes(&l.Seccomp)
	c.flag(&l.PassFD)
	n := c.count(len(l.Ports))
	if c.decode {
		l.Ports = make([]uint16, n)
	}
	for i := range l.Ports {
		integer(c, &l.Ports[i])
	}
	c.flag(&l.Join)
	c.flag(&l.Dial)
	c.flag(&l.PassEnv)
}

func codePlan(c *codec, p *sandbox.Plan) {
	text(c, &p.Agent)
	text(c, &p.Network)
	c.flag(&p.Nesting)
	c.flag(&p.DieWithParent)
	c.flag(&p.OwnCgroup)
	c.flag(&p.OldBwrap)
	c.texts(&p.Notes)
	n := c.count(len(p.Mounts))
	if c.decode {
		p.Mounts = make([]sandbox.Mount, n)
	}
	for i := range p.Mounts {
		m := &p.Mounts[i]
		text(c, &m.Op)
		text(c, &m.Target)
		text(c, &m.Source)
		text(c, &m.Access)
		text(c, &m.Kind)
		c.flag(&m.Create)
		c.flag(&m.Pinned)
		c.flag(&m.Sealed)
		c.flag(&m.Grant)
		text(c, &m.Content)
		integer(c, &m.Mode)
		integer(c, &m.Size)
		text(c, &m.Why)
	}
}

// Encode gives the binary form.
func (l *Launch) Encode() []byte {
	c := codec{}
	l.code(&c)
	return c.buf
}

// DecodeLaunch reads the binary form. Another version is an error that says what to do.
func DecodeLaunch(b []byte) (*Launch, error) {
	c := decoder(b)
	l := &Launch{}
	l.code(&c)
	switch {
	case c.err != nil:
		return nil, c.err
	case l.Version != Version:
		return nil, fmt.Errorf("the supervisor speaks version %d, this launcher %d: start the agent again after the upgrade", l.Version, Version)
	case len(c.buf) != 0:
		return nil, errForm
	}
	return l, nil
}

func (e *LaunchError) code(c *codec) {
	text(c, &e.Step)
	text(c, &e.Path)
	text(c, &e.Err)
	c.flag(&e.Retry)
}

// Encode gives the binary form.
func (e *LaunchError) Encode() []byte {
	c := codec{}
	e.code(&c)
	return c.buf
}

// DecodeLaunchError reads the binary form.
func DecodeLaunchError(b []byte) (*LaunchError, error) {
	c := decoder(b)
	e := &LaunchError{}
	e.code(&c)
	if c.err != nil || len(c.buf) != 0 {
		return nil, errForm
	}
	return e, nil
}
