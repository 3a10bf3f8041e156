"""The system calls that a confined program may make, with their numbers. Whatever is not here is refused.

Python and its standard library need these, as `strace` shows. Not here, for example: new processes and programs (fork,
execve), sockets, other processes (ptrace, process_vm_readv, pidfd_open), modes, owners and times of files, which Landlock
does not guard (chmod, chown, utimensat, setxattr), truncation by name, shared memory outside the process, io_uring, and
whatever sets limits, credentials, namespaces or filters.

Numbers: Linux's arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (which aarch64 uses).
"""

from __future__ import annotations

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What `platform.machine()` says: the AUDIT_ARCH number that the kernel gives a filter."""

_ALLOWED = """
# Files that are open.
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70 close:3:57
lseek:8:62 dup:32:23 dup2:33:- dup3:292:24 fstat:5:80 fstatfs:138:44 getdents:78:- getdents64:217:61 ftruncate:77:46
fallocate:285:47 fsync:74:82 fdatasync:75:83 flock:73:32 fadvise64:221:223 sendfile:40:71 copy_file_range:326:285
# Files by name: Landlock says which.
stat:4:- lstat:6:- newfstatat:262:79 statx:332:291 statfs:137:43 access:21:- faccessat:269:48 readlink:89:-
readlinkat:267:78 getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:-
unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276 symlink:88:- symlinkat:266:36 umask:95:166
# Memory.
brk:12:214 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 msync:26:227
# Threads and waiting.
futex:202:98 set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 set_tid_address:218:96 sched_yield:24:124
sched_getaffinity:204:123 restart_syscall:219:128 exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
# Signals that the process gets.
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
rt_sigsuspend:130:133 sigaltstack:131:132 pause:34:- alarm:37:- setitimer:38:103 getitimer:36:102
# Who and where it is.
getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
getgroups:115:158 getresuid:118:148 getresgid:120:150 getpgid:121:155 getpgrp:111:- getsid:124:156 getrlimit:97:163
setrlimit:160:164 getrusage:98:165 times:100:153 uname:63:160 sysinfo:99:179
# Time and chance.
time:201:- gettimeofday:96:169 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115 nanosleep:35:101
getrandom:318:278
# Pipes within the process, which event loops use.
pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20
epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 eventfd:284:- eventfd2:290:19 recvfrom:45:207 shutdown:48:210
getsockname:51:204 getpeername:52:205 getsockopt:55:209
"""
_CHECKED = """
open:2:- openat:257:56 clone:56:220 kill:62:129 tgkill:234:131 prlimit64:302:261 fcntl:72:25 ioctl:16:29
socketpair:53:199 sendto:44:206
"""


def _parse(table: str) -> dict[str, dict[str, int]]:
    """``name:x86_64:aarch64`` entries as numbers by name, per machine; ``-`` where a machine has no such call."""
    lines = [line for line in table.splitlines() if not line.startswith("#")]
    entries = [entry.split(":") for entry in " ".join(lines).split()]
    return {
        machine: {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}
        for column, machine in enumerate(MACHINES, start=1)
    }


ALLOWED = _parse(_ALLOWED)
"""Machine: name: number, of the calls that may be made with any arguments."""
CHECKED = _parse(_CHECKED)
"""Machine: name: number, of the calls whose arguments `seccomp` looks at."""
FIRST_RECENT = 424
"""From here on all machines count alike. What is refused here is said not to exist, so that the C library falls back on an
older call, for example from clone3 to clone."""
