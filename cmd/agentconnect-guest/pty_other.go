//go:build !linux

package main

import (
	"context"
	"errors"
	"io"
)

func become([]string) error {
	return errors.New("exec: not on this system: the sandbox needs Linux; agents run without it")
}

func pty([]string, io.Writer) error {
	return errors.New("pty: not on this system: the sandbox needs Linux; agents run without it and take their own terminal")
}

func inner(context.Context, []string) error {
	return errors.New("inner: not on this system: the sandbox needs Linux")
}

func start([]string) error {
	return errors.New("start: works on Linux alone")
}

func gh(context.Context, []string) error {
	return errors.New("gh: works on Linux alone")
}

func checkout(context.Context, []string, io.Writer) error {
	return errors.New("checkout: works on Linux alone")
}

func receive() error {
	return errors.New("receive: works on Linux alone")
}
