// Package rules holds the words by which an operator says what an agent reaches, and the
// one function that decides by them. It is pure: no name is looked up, nothing is dialled.
package rules

// HostName is the host part of a rule for a port of the host's loopback: "host:5432".
const HostName = "host"

// Policy is what the operator wrote. Its rules have no order; deny beats allow.
type Policy struct {
	// Open: what no rule names is reached, if it is public. Otherwise (an allow-list) it is
	// not; an empty allow-list lets nothing out.
	Open  bool     `json:"open,omitempty"`
	Allow []string `json:"allow,omitempty"`
	Deny  []string `json:"deny,omitempty"`
	// Ask is for how many seconds what no rule names waits for the operator's word, in an
	// allow-list; 0: it is refused at once.
	Ask int `json:"ask,omitempty"`
}
