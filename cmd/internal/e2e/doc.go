// Package e2e holds the tests that drive the built programs as people, editors and
// attackers do: a daemon of their own on a ROOT of their own, the command line, and
// attacks from inside a running agent, each with the same attack outside as its control.
// It holds no code that a program uses, and does not test a package's inside.
package e2e
