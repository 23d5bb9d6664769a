package rules

import (
	"slices"
	"testing"
)

func TestPortsAreThoseThatRulesOpen(t *testing.T) {
	for _, c := range []struct {
		p    Policy
		want []uint16
	}{
		{Policy{}, nil},
		{Policy{Open: true}, []uint16{22, 80, 443}},
		{Policy{Allow: []string{"*.example.com:8443", "host:5432", "10.0.0.0/8:6379"}, Deny: []string{"example.com:99"}}, []uint16{5432, 6379, 8443}},
		{Policy{Allow: []string{"example.com"}}, []uint16{22, 80, 443}},
	} {
		s, err := Compile(c.p)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Ports(); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.p, got, c.want)
		}
	}
}
