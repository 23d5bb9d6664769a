/* Lets User-Mode Linux 6.1 run on a processor with AMX; limits.sh preloads it.
 *
 * UML writes the processor state of its processes back with PTRACE_SETREGSET as long as it knows
 * the state to be: 2696 bytes, AVX-512 included. The host wants the state whole, and with AMX that
 * is 11008 bytes: the call fails with EFAULT, and UML takes it for the death of its init. Here the
 * rest is filled up with what is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

static long (*host)(enum __ptrace_request, ...);
static char whole[64 << 10]; /* not on the stack: UML's kernel stacks are small */

__attribute__((constructor)) static void find(void)
{
	host = (long (*)(enum __ptrace_request, ...))dlsym(RTLD_NEXT, "ptrace");
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list args;
	va_start(args, request);
	pid_t pid = va_arg(args, pid_t);
	void *address = va_arg(args, void *);
	void *data = va_arg(args, void *);
	va_end(args);

	long result = host(request, pid, address, data);
	if (result == 0 || request != PTRACE_SETREGSET || errno != EFAULT || (uintptr_t)address != NT_X86_XSTATE)
		return result;
	const struct iovec *given = data;
	struct iovec all = {whole, sizeof(whole)};
	if (host(PTRACE_GETREGSET, pid, address, &all) != 0)
		return -1;
	if (all.iov_len <= given->iov_len) {
		errno = EFAULT;
		return -1;
	}
	memcpy(whole, given->iov_base, given->iov_len);
	return host(PTRACE_SETREGSET, pid, address, &all);
}
