// Package figures is the form of what a measurement says: a figure of ours, what peers reached in
// the same run, and what was wanted. Measurements print them a line each, between whatever else
// they print; reports and the guard against steps back read them again.
package figures

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Figure is one measured thing. The machine's noise hits ours and the peers' alike, so the ratio
// holds where the values do not.
type Figure struct {
	Key    string  `json:"key"` // stable: "start/default"; a last element that is a number is a size
	What   string  `json:"what"`
	Unit   string  `json:"unit,omitempty"` // of ours and the peers'
	Ours   float64 `json:"ours"`
	Peers  []Peer  `json:"peers,omitempty"`
	Ratio  float64 `json:"ratio,omitempty"`  // ours to the first peer's; 0: none
	Wanted string  `json:"wanted,omitempty"` // "≤ 1.3", of the ratio; with a unit, or without a ratio, of ours
	Note   string  `json:"note,omitempty"`
}

// Peer is what another program reached in the same run.
type Peer struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// Beside is a figure with the ratio to its first peer.
func (f Figure) Beside(peers ...Peer) Figure {
	f.Peers = peers
	if len(peers) > 0 && peers[0].Value != 0 {
		f.Ratio = f.Ours / peers[0].Value
	}
	return f
}

// Met says whether what was wanted was reached; known is false where nothing was wanted.
func (f Figure) Met() (met, known bool) {
	sign, bound, ok := f.wanted()
	if !ok {
		return false, false
	}
	value := f.Ratio
	if value == 0 || strings.Count(strings.TrimSpace(f.Wanted), " ") > 1 {
		value = f.Ours
	}
	if sign == "≤" {
		return value <= bound, true
	}
	return value >= bound, true
}

func (f Figure) wanted() (sign string, bound float64, ok bool) {
	words := strings.Fields(f.Wanted)
	if len(words) < 2 || words[0] != "≤" && words[0] != "≥" {
		return "", 0, false
	}
	bound, err := strconv.ParseFloat(words[1], 64)
	return words[0], bound, err == nil
}

// lead begins a line with a figure, wherever on the line it stands.
const lead = "figure {"

// Print writes the figure as one line.
func Print(w io.Writer, f Figure) error {
	b, err := json.Marshal(f)
	if err != nil {
		return fmt.Errorf("%s: %w", f.Key, err)
	}
	_, err = fmt.Fprintf(w, "figure %s\n", b)
	return err
}

// Read gives the figures among the lines. A line that begins one and is none is an error.
func Read(r io.Reader) ([]Figure, error) {
	var all []Figure
	for lines := bufio.NewScanner(r); ; {
		if !lines.Scan() {
			return all, lines.Err()
		}
		_, text, ok := bytes.Cut(lines.Bytes(), []byte(lead))
		if !ok {
			continue
		}
		var f Figure
		if err := json.Unmarshal(append([]byte("{"), text...), &f); err != nil || f.Key == "" {
			return nil, fmt.Errorf("%q is no figure: %w", lines.Text(), err)
		}
		all = append(all, f)
	}
}

// Table writes the figures for a terminal.
func Table(w io.Writer, all []Figure) error {
	tab := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(tab, "FIGURE\tOURS\tPEERS, SAME RUN\tRATIO\tWANTED\t")
	for _, f := range all {
		fmt.Fprintf(tab, "%s\t%s\t%s\t%s\t%s\t%s\n", f.What, Value(f.Ours, f.Unit), f.peers(), f.ratio(), f.Wanted, f.verdict())
		if f.Note != "" {
			fmt.Fprintf(tab, "  %s\t\t\t\t\t\n", f.Note)
		}
	}
	return tab.Flush()
}

// Markdown writes them as a table of a document.
func Markdown(w io.Writer, all []Figure) error {
	var b bytes.Buffer
	b.WriteString("| figure | ours | peers, same run | ratio | wanted | |\n|---|---:|---|---:|---|---|\n")
	for _, f := range all {
		what := f.What
		if f.Note != "" {
			what += "<br>" + f.Note
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", cell(what), cell(Value(f.Ours, f.Unit)), cell(f.peers()), f.ratio(), cell(f.Wanted), f.verdict())
	}
	_, err := w.Write(b.Bytes())
	return err
}

func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

func (f Figure) peers() string {
	said := make([]string, len(f.Peers))
	for i, p := range f.Peers {
		said[i] = p.Name + " " + Value(p.Value, f.Unit)
	}
	return strings.Join(said, ", ")
}

func (f Figure) ratio() string {
	if f.Ratio == 0 {
		return ""
	}
	return Value(f.Ratio, "")
}

func (f Figure) verdict() string {
	switch met, known := f.Met(); {
	case !known:
		return ""
	case met:
		return "met"
	}
	return "missed"
}

// Value is a number with three digits that count.
func Value(v float64, unit string) string {
	var s string
	switch abs := max(v, -v); {
	case abs == 0 || abs >= 100:
		s = strconv.FormatFloat(v, 'f', 0, 64)
	case abs >= 10:
		s = strconv.FormatFloat(v, 'f', 1, 64)
	case abs >= 0.1:
		s = strconv.FormatFloat(v, 'f', 2, 64)
	default:
		s = strconv.FormatFloat(v, 'g', 2, 64)
	}
	if unit == "" {
		return s
	}
	return s + " " + unit
}
