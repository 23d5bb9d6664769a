// What the live tests need of the processor: a call by the 32-bit entry, and a call
// made by another process under ptrace.

package seccomp

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// int80 calls getpid by the 32-bit entry, from machine code written into a page.
func int80() string {
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err.Error()
	}
	code := []byte{0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xa3} // mov eax, 20; int 0x80; mov [answer], eax
	answer := &page[2048]
	code = binary.LittleEndian.AppendUint64(code, uint64(uintptr(unsafe.Pointer(answer))))
	code = append(code, 0xc3) // ret
	copy(page, code)
	entry := &page[0]
	fn := &entry // a func value is a pointer to a word that holds the code's address
	(*(*func())(unsafe.Pointer(&fn)))()
	if got := int32(binary.LittleEndian.Uint32(page[2048:])); got < 0 {
		return fmt.Sprint("errno ", -got)
	}
	return "pid"
}

// ptracePid1 makes the boundary's pid 1 call keyctl, and says what pid 1 was answered.
func ptracePid1() string {
	runtime.LockOSThread() // a tracer is a thread
	if err := unix.PtraceAttach(1); err != nil {
		return "attach: " + err.Error()
	}
	var ws unix.WaitStatus
	if _, err := unix.Wait4(1, &ws, unix.WALL, nil); err != nil || !ws.Stopped() {
		return fmt.Sprint("stop: ", err, ws)
	}
	var old unix.PtraceRegs
	if err := unix.PtraceGetRegs(1, &old); err != nil {
		return "registers: " + err.Error()
	}
	regs := old
	regs.Rip -= 2 // pid 1 waits for its child: it stands behind a syscall instruction
	regs.Rax, regs.Orig_rax = uint64(abis["amd64"].calls["keyctl"]), ^uint64(0)
	// KEYCTL_JOIN_SESSION_KEYRING, no name; it works for whoever may call it.
	regs.Rdi, regs.Rsi, regs.Rdx = 1, 0, 0
	if err := unix.PtraceSetRegs(1, &regs); err != nil {
		return "set registers: " + err.Error()
	}
	if err := unix.PtraceSingleStep(1); err != nil {
		return "step: " + err.Error()
	}
	if _, err := unix.Wait4(1, &ws, unix.WALL, nil); err != nil || !ws.Stopped() {
		return fmt.Sprint("stop: ", err, ws)
	}
	if err := unix.PtraceGetRegs(1, &regs); err != nil {
		return "registers: " + err.Error()
	}
	errno := 0
	if v := int64(regs.Rax); v < 0 {
		errno = int(-v)
	}
	if err := unix.PtraceSetRegs(1, &old); err != nil {
		return "restore: " + err.Error()
	}
	if err := unix.PtraceDetach(1); err != nil {
		return "detach: " + err.Error()
	}
	return fmt.Sprint("errno ", errno)
}
