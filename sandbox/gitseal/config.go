// git's configuration files, read without git: running git in a folder that an agent wrote
// is what all of this is there to make safe.

package gitseal

import (
	"errors"
	"strings"
)

// Entry is one variable: "section.subsection.name", the section and the name in lower case.
type Entry struct {
	Section, Subsection, Name string
	Value                     string
	// Sub: there is a subsection, an empty one perhaps. Bare: written without "=", which
	// means true.
	Sub, Bare bool
}

// Key is the full name of the variable.
func (e Entry) Key() string {
	switch {
	case e.Sub:
		return e.Section + "." + e.Subsection + "." + e.Name
	case e.Section == "":
		return e.Name
	}
	return e.Section + "." + e.Name
}

// errConfig: git would refuse the file, too.
var errConfig = errors.New("not a git configuration")

// ParseConfig reads a configuration file by git's rules. With an error it returns what
// stands before the fault, as git has acted on it by then.
func ParseConfig(text string) ([]Entry, error) {
	p := &parser{text: strings.TrimPrefix(text, "\ufeff")}
	var out []Entry
	var in Entry // section and subsection
	for {
		c, ok := p.next()
		switch {
		case !ok:
			return out, nil
		case c == '\n' || isSpace(c):
		case c == '#' || c == ';':
			p.comment()
		case c == '[':
			var err error
			if in, err = p.section(); err != nil {
				return out, err
			}
		case isLetter(c):
			p.back()
			e := in
			if err := p.entry(&e); err != nil {
				return out, err
			}
			out = append(out, e)
		default:
			return out, errConfig
		}
	}
}

type parser struct {
	text string
	at   int
}

// next gives one byte; a carriage return in front of a newline is none.
func (p *parser) next() (byte, bool) {
	if p.at >= len(p.text) {
		return 0, false
	}
	c := p.text[p.at]
	p.at++
	if c == '\r' && p.at < len(p.text) && p.text[p.at] == '\n' {
		p.at++
		return '\n', true
	}
	return c, true
}

// back takes one byte that was no newline back.
func (p *parser) back() { p.at-- }

func (p *parser) comment() {
	if i := strings.IndexByte(p.text[p.at:], '\n'); i >= 0 {
		p.at += i + 1
	} else {
		p.at = len(p.text)
	}
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\v' || c == '\f' }
func isLetter(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}
func isKey(c byte) bool { return isLetter(c) || '0' <= c && c <= '9' || c == '-' }

// section reads what follows "[".
func (p *parser) section() (e Entry, err error) {
	var b strings.Builder
	for {
		c, ok := p.next()
		switch {
		case !ok || c == '\n':
			return e, errConfig
		case c == ']':
			// The old form: [section.subsection], all in lower case.
			e.Section, e.Subsection, e.Sub = strings.Cut(strings.ToLower(b.String()), ".")
			return e, nil
		case isSpace(c):
			e.Section, e.Sub = strings.ToLower(b.String()), true
			e.Subsection, err = p.subsection()
			return e, err
		case isKey(c) || c == '.':
			b.WriteByte(c)
		default:
			return e, errConfig
		}
	}
}

// subsection reads `"name"]`.
func (p *parser) subsection() (string, error) {
	var b strings.Builder
	c, ok := p.next()
	for ok && isSpace(c) {
		c, ok = p.next()
	}
	if !ok || c != '"' {
		return "", errConfig
	}
	for {
		c, ok := p.next()
		if ok && c == '\\' {
			c, ok = p.next()
			if ok && c != '\n' {
				b.WriteByte(c)
				continue
			}
		}
		switch {
		case !ok || c == '\n':
			return "", errConfig
		case c == '"':
			if c, ok := p.next(); !ok || c != ']' {
				return "", errConfig
			}
			return b.String(), nil
		}
		b.WriteByte(c)
	}
}

// entry reads "name = value" to the end of its line.
func (p *parser) entry(e *Entry) (err error) {
	start := p.at
	for p.at < len(p.text) && isKey(p.text[p.at]) {
		p.at++
	}
	e.Name = strings.ToLower(p.text[start:p.at])
	c, ok := p.next()
	for ok && isSpace(c) {
		c, ok = p.next()
	}
	switch {
	case !ok || c == '\n':
		e.Bare = true
		return nil
	case c != '=':
		return errConfig
	}
	e.Value, err = p.value()
	return err
}

// value reads what follows "=": quotes, escapes, comments, lines that go on.
func (p *parser) value() (string, error) {
	var b strings.Builder
	quoted, comment := false, false
	keep := 0 // how much of b stays when the value ends here: spaces at the end do not
	for {
		c, ok := p.next()
		if !ok || c == '\n' {
			if quoted {
				return "", errConfig
			}
			return b.String()[:keep], nil
		}
		switch {
		case comment:
		case isSpace(c) && !quoted:
			if b.Len() > 0 {
				b.WriteByte(c)
			}
		case !quoted && (c == ';' || c == '#'):
			comment = true
		case c == '\\':
			keep = b.Len()
			c, ok = p.next()
			if !ok {
				c = '\n'
			}
			switch c {
			case '\n':
				continue
			case 't':
				c = '\t'
			case 'b':
				c = '\b'
			case 'n':
				c = '\n'
			case '\\', '"':
			default:
				return "", errConfig
			}
			b.WriteByte(c)
			keep = b.Len()
		case c == '"':
			quoted = !quoted
			keep = b.Len()
		default:
			b.WriteByte(c)
			keep = b.Len()
		}
	}
}
