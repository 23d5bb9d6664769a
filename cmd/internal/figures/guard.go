package figures

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
)

// Accepted holds the ratios that were last accepted, by key, and how far from them is noise.
type Accepted struct {
	// Slack is the factor by which a ratio may be worse.
	Slack  float64            `json:"slack"`
	Ratios map[string]float64 `json:"ratios"`
	// Rising names the keys whose ratio is better when it is higher; of the others it is worse.
	Rising []string `json:"rising,omitempty"`
	// Kinds are machines where some ratios are others.
	Kinds []Kind `json:"kinds,omitempty"`
}

// Kind is a kind of machine, told by what the peers need on it alone: no change of ours makes one
// of another.
type Kind struct {
	Name string `json:"name"`
	// Of are the keys of two figures. The first peer of the one takes less than Below times what the
	// first peer of the other does.
	Of     [2]string          `json:"of"`
	Below  float64            `json:"below"`
	Ratios map[string]float64 `json:"ratios"` // in place of the usual ones
}

// ReadAccepted reads such a file.
func ReadAccepted(path string) (*Accepted, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var a Accepted
	if err := json.Unmarshal(b, &a); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if a.Slack <= 1 || len(a.Ratios) == 0 {
		return nil, fmt.Errorf("%s: slack must be over 1, and there must be ratios", path)
	}
	for _, key := range a.Rising {
		if _, ok := a.Ratios[key]; !ok {
			return nil, fmt.Errorf("%s: rising: no ratio of %q", path, key)
		}
	}
	for _, k := range a.Kinds {
		for _, key := range append(slices.Collect(maps.Keys(k.Ratios)), k.Of[:]...) {
			if _, ok := a.Ratios[key]; !ok {
				return nil, fmt.Errorf("%s: kinds: %s: no ratio of %q", path, k.Name, key)
			}
		}
	}
	return &a, nil
}

// On gives what is accepted on the machine that these figures are from, and the name of its kind.
func (a *Accepted) On(measured []Figure) (*Accepted, string) {
	peer := map[string]float64{}
	for _, f := range measured {
		if len(f.Peers) > 0 {
			peer[f.Key] = f.Peers[0].Value
		}
	}
	for _, k := range a.Kinds {
		one, other := peer[k.Of[0]], peer[k.Of[1]]
		if one == 0 || other == 0 || one/other >= k.Below {
			continue
		}
		on := &Accepted{Slack: a.Slack, Rising: a.Rising, Ratios: maps.Clone(a.Ratios)}
		maps.Copy(on.Ratios, k.Ratios)
		return on, k.Name
	}
	return a, ""
}

// Among gives what is accepted of these keys alone.
func (a *Accepted) Among(keys []string) *Accepted {
	some := &Accepted{Slack: a.Slack, Rising: a.Rising, Ratios: map[string]float64{}}
	for _, key := range keys {
		some.Ratios[key] = a.Ratios[key]
	}
	return some
}

// Worse lists what stepped back, a line each; keys are the same, in order. What is accepted and was
// not measured counts: a guard that looks at nothing would be content.
func (a *Accepted) Worse(measured []Figure) (lines, keys []string) {
	got := map[string]float64{}
	for _, f := range measured {
		got[f.Key] = f.Ratio
	}
	for _, key := range slices.Sorted(maps.Keys(a.Ratios)) {
		accepted, ratio := a.Ratios[key], got[key]
		limit, sign := accepted*a.Slack, "≤"
		bad := ratio > limit
		if slices.Contains(a.Rising, key) {
			limit, sign = accepted/a.Slack, "≥"
			bad = ratio < limit
		}
		switch {
		case ratio == 0 || math.IsNaN(ratio):
			lines = append(lines, key+": not measured")
		case bad:
			lines = append(lines, fmt.Sprintf("%s: ratio %s; accepted was %s, so %s %s is asked", key, Value(ratio, ""), Value(accepted, ""), sign, Value(limit, "")))
		default:
			continue
		}
		keys = append(keys, key)
	}
	return lines, keys
}

// Below says whether a key lies at or below a name.
func Below(key, name string) bool { return key == name || strings.HasPrefix(key, name+"/") }

// Growth is the exponent k with which values grow with sizes, as size^k, by least squares on the
// logarithms. It needs two sizes or more.
func Growth(sizes, values []float64) float64 {
	n := float64(len(sizes))
	var sx, sy, sxx, sxy float64
	for i := range sizes {
		x, y := math.Log(sizes[i]), math.Log(values[i])
		sx, sy, sxx, sxy = sx+x, sy+y, sxx+x*x, sxy+x*y
	}
	return (n*sxy - sx*sy) / (n*sxx - sx*sx)
}
