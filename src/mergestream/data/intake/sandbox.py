"""Limits that a decoding process sets on itself, for good, before it sees the first byte of a client.

Everywhere: memory, processor time, no core files, nothing written to files, no further file descriptor (so no file and
no socket). On Linux (x86-64 and arm64) also a seccomp filter: the process may use the pipes that it has, take memory
and start threads; every other system call fails, among them those that open files or sockets, start programs and send
signals.
"""

import ctypes
import errno
import platform
import resource
import struct

# The allowed system calls, with their numbers on x86-64 and on arm64.
CALLS = """
read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, pread64 17 67, mmap 9 222, mprotect 10 226, munmap 11 215,
brk 12 214, mremap 25 216, madvise 28 233, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
sigaltstack 131 132, futex 202 98, sched_yield 24 124, sched_getaffinity 204 123, getpid 39 172, gettid 186 178,
exit 60 93, exit_group 231 94, clock_gettime 228 113, gettimeofday 96 169, getrusage 98 165, getrandom 318 278,
restart_syscall 219 128, set_robust_list 273 99, rseq 334 293, nanosleep 35 101, clock_nanosleep 230 115
"""
CLONE, CLONE3, CLONE_THREAD = (56, 220), 435, 0x10000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and the kernel's number
# Instructions of the filter, and its verdicts (linux/filter.h, linux/seccomp.h).
LOAD, IF_EQUAL, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
CALL_NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16  # offsets in what the filter sees
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


def enter(memory_bytes: int, cpu_seconds: int, descriptors: int) -> bool:
    """Set all limits; `descriptors` are open. Return whether system calls are filtered."""
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, descriptors),
    ):
        resource.setrlimit(limit, (value, value))
    return _filter_system_calls()


def _filter_system_calls() -> bool:
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return False
    program = b"".join(
        struct.pack("HBBI", *instruction) for instruction in _instructions(*MACHINES[platform.machine()])
    )
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    arguments = [PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0]
    # Without new privileges (set-user-id programs) any user may set a filter.
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and prctl(*arguments) == 0


def _instructions(column: int, machine: int) -> list[tuple[int, int, int, int]]:
    """The filter: (operation, instructions to skip if true, if false, value)."""
    program = [(LOAD, 0, 0, MACHINE), (IF_EQUAL, 1, 0, machine), (RETURN, 0, 0, KILL), (LOAD, 0, 0, CALL_NUMBER)]
    for call in CALLS.split(","):
        program += [(IF_EQUAL, 0, 1, int(call.split()[1 + column])), (RETURN, 0, 0, ALLOW)]
    # clone3 hides its flags in memory. If it is missing, the C library uses clone, which may start threads only.
    program += [(IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    program += [(IF_EQUAL, 0, 3, CLONE[column]), (LOAD, 0, 0, FIRST_ARGUMENT), (IF_ANY_BIT, 0, 1, CLONE_THREAD)]
    return [*program, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE | errno.EPERM)]
