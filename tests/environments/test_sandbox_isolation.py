"""What a sandboxed program cannot reach, on this kernel and on lesser ones. Real processes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from sandboxes import answer, answers, left_over, own_temporary_directory  # noqa: F401

from rl_tpu.environments.tools import scratch, watch

CONFINED = Path(watch.__file__).parent / "confined"
sys.path.append(str(CONFINED))  # as the confined process finds them

import program  # noqa: E402
import seccomp  # noqa: E402
import syscall_numbers  # noqa: E402

STDLIB = sysconfig.get_path("stdlib")
REFUSED = "PermissionError"


def refusals(*statements: str, **options) -> list[str]:
    """The error of each statement; each is run in a sandbox of its own after `import os`."""
    found = answers(*(f"import os, socket\n{statement}" for statement in statements), **options)
    assert all(got.failed for got in found), list(zip(statements, found, strict=True))
    return [got.text.splitlines()[-1].partition(":")[0].partition(" (")[0] for got in found]


def test_files_of_the_host_cannot_be_read(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    secret.chmod(0o666)
    files = [
        "/etc/passwd",
        "/etc/hostname",
        "/proc/self/environ",
        f"/proc/{os.getpid()}/environ",
        f"/proc/{os.getpid()}/maps",
        "/proc/1/cmdline",
        "/proc/meminfo",
        str(secret),
        __file__,
        watch.__file__,
        sys.executable,
    ]
    assert set(refusals(*(f"open({file!r}, 'rb').read(1)" for file in files))) == {REFUSED}
    directories = ["/", "/etc", "/proc", str(Path.home()), str(tmp_path), "/dev/shm", ".."]
    assert set(refusals(*(f"os.listdir({directory!r})" for directory in directories))) == {REFUSED}
    links = [f"/proc/{os.getpid()}/cwd", f"/proc/{os.getpid()}/exe", f"/proc/{os.getpid()}/fd/0"]
    assert set(refusals(*(f"os.readlink({link!r})" for link in links))) == {REFUSED}


def test_a_link_in_the_scratch_directory_does_not_help():
    assert refusals("os.symlink('/etc/passwd', 'a'); open('a').read()", "os.link('/etc/passwd', 'a')") == [REFUSED] * 2


def test_nothing_can_be_written_outside(tmp_path):
    """Not a new file, and of files that are there neither content nor name, modes, owner, times nor attributes."""
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    before = kept.stat()
    name, inside = str(kept), os.path.join(STDLIB, "this.py")
    assert set(
        refusals(
            f"open({str(tmp_path / 'new')!r}, 'w')",
            "open('/tmp/new', 'w')",
            "open('/dev/shm/new', 'w')",
            f"open({os.path.join(STDLIB, 'new.py')!r}, 'w')",
            f"open({inside!r}, 'r+')",
            f"os.open({inside!r}, os.O_RDONLY | os.O_TRUNC)",
            f"os.open({inside!r}, 3)",
            f"os.open({inside!r}, 3 | os.O_TRUNC)",
            f"os.truncate({inside!r}, 0)",
            f"os.truncate({name!r}, 0)",
            f"open({name!r}, 'a')",
            f"os.unlink({name!r})",
            f"os.rename({name!r}, 'a')",
            f"os.mkdir({str(tmp_path / 'new')!r})",
            f"os.symlink('a', {str(tmp_path / 'new')!r})",
            f"os.chmod({name!r}, 0)",
            f"os.chmod({inside!r}, 0)",
            f"os.fchmod(os.open({inside!r}, 0), 0)",
            f"os.chown({name!r}, 1, 1)",
            f"os.utime({name!r}, (0, 0))",
            f"os.setxattr({name!r}, 'user.a', b'1')",
            f"os.mkfifo({str(tmp_path / 'new')!r})",
        )
    ) <= {REFUSED, "OSError"}
    after = kept.stat()
    assert kept.read_text() == "kept"
    assert (before.st_mode, before.st_uid, before.st_mtime_ns) == (after.st_mode, after.st_uid, after.st_mtime_ns)
    assert not (tmp_path / "new").exists()
    assert not Path("/tmp/new").exists()
    assert Path(inside).stat().st_size > 0


def test_no_socket_of_any_kind(tmp_path):
    """The servers are there: only the sandbox stands between."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix:
        path = str(tmp_path / "s")
        unix.bind(path)
        assert set(
            refusals(
                f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}))",
                "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'1', ('127.0.0.1', 9))",
                f"socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'1', {path!r})",
                f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'1', {path!r})",
                f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendmsg([b'1'], [], 0, {path!r})",
                f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect({path!r})",
                "socket.socket(socket.AF_UNIX).bind('s')",
                "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
                "socket.socket(socket.AF_INET, socket.SOCK_RAW)",
                "socket.socketpair(socket.AF_INET)",
            )
        ) == {REFUSED}
        unix.setblocking(False)
        with pytest.raises(BlockingIOError):
            unix.recv(1)


def test_no_other_process_can_be_touched():
    victim = subprocess.Popen(["sleep", "60"])
    try:
        ctypes = "import ctypes; c = ctypes.CDLL(None, use_errno=True);"
        raised = "raise OSError(ctypes.get_errno(), 'refused')"
        assert set(
            refusals(
                f"os.kill({victim.pid}, 9)",
                f"os.kill({os.getpid()}, 9)",
                "os.kill(-1, 9)",
                "os.kill(0, 9)",
                f"os.killpg({os.getpgid(0)}, 9)",
                f"import resource; resource.prlimit({victim.pid}, resource.RLIMIT_CPU, (0, 0))",
                f"import fcntl; fcntl.fcntl(0, 8, {victim.pid})",  # F_SETOWN
                f"{ctypes} c.ptrace(16, {victim.pid}, 0, 0) == 0 or (_ for _ in ()).throw(PermissionError)",
                "os.setsid()",
                "os.setuid(0)",
                f"os.sched_setaffinity({victim.pid}, {{0}})",
                f"os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19)",
                f"{ctypes}\nif c.prctl(1, 0, 0, 0, 0): {raised}",  # PR_SET_PDEATHSIG
                f"{ctypes}\nif c.unshare(0x10000000): {raised}",
                f"{ctypes}\nif c.mount(None, b'/', None, 0, None): {raised}",
                f"{ctypes}\nif c.shmget(1, 4096, 0o1600) == -1: {raised}",
                "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))",
            )
        ) <= {REFUSED, "ValueError"}
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_it_ends_with_whoever_started_it_and_its_directory_is_removed_by_the_next(tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", "import asyncio; from sandboxes import ask; from rl_tpu.environments.tools.python import *"
         "\nasync def f():\n    t = Python(timeout_s=60); await t.open(); await ask(t, 'while True: open(\"a\", \"w\")')"
         "\nasyncio.run(f())"],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(f"{scratch.PREFIX}*/*/a")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    while any(name.startswith("process") for name in left_over()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (left,) = left_over()
    os.utime(tmp_path / left, (0, 0))  # as if it had been a while
    assert answer("1").text == "1"  # which also looks for what is left


def test_a_directory_that_is_in_use_is_left_alone(tmp_path):
    used = scratch.ScratchDirectories()
    os.utime(used.path, (0, 0))
    scratch.ScratchDirectories().remove()
    assert used.path.exists()
    used.remove()
    assert not used.path.exists()


@pytest.mark.parametrize(
    "statements",
    [
        "for n in range(1500): os.mkdir('d'); os.chdir('d')",
        "os.mkdir('a', 0); os.mkdir('b'); open('b/c', 'w'); os.umask(0o777); os.mkdir('b/d')",
        "os.symlink('/', 'a'); os.symlink('nowhere', 'b')",
    ],
)
def test_whatever_it_makes_is_removed(statements, tmp_path):
    answer(f"import os\n{statements}")
    assert list(tmp_path.iterdir()) == []
    assert Path("/etc").exists()


@pytest.mark.parametrize(
    ("lacks", "message"),
    [("landlock", "Landlock: the kernel has none, or it is off (Linux 5.13"), ("seccomp", "seccomp: Invalid argument")],
)
def test_a_kernel_that_cannot_isolate_is_refused_unless_told_otherwise(lacks, message):
    """The kernel itself refuses what an older one does not have."""
    required = lesser_kernel(lacks, "required", "1")
    assert required.startswith("UserError: tool 'python' cannot isolate programs on this machine: " + message), required
    assert "isolation=best_effort" in required
    assert "\n" not in required
    # What remains still binds it.
    reads_file = lesser_kernel(lacks, "best_effort", "len(open('/etc/passwd').read()) > 0")
    opens_socket = lesser_kernel(lacks, "best_effort", "import socket; socket.socket().fileno() > 0")
    assert ("True" in reads_file, "True" in opens_socket) == ((True, False) if lacks == "landlock" else (False, True))
    assert "MemoryError" in lesser_kernel(lacks, "best_effort", "bytearray(10 ** 10)")


def lesser_kernel(lacks: str, isolation: str, program: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name("lesser_kernel.py")), lacks, isolation, program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.mark.parametrize("abi", [1, 2, 3, 4, 5, 6])
def test_every_version_of_landlock_guards_files(abi, tmp_path):
    """As far as this kernel's knows the older ones: they are asked for what that version can do."""
    allowed, kept = tmp_path / "allowed", tmp_path / "kept"
    allowed.mkdir()
    kept.write_text("kept")
    code = (
        f"import sys, ctypes; sys.path.append({str(CONFINED)!r}); import landlock\n"
        f"assert landlock.abi() >= {abi}; landlock.abi = lambda: {abi}; ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)\n"
        f"landlock.restrict([{STDLIB!r}], [{str(allowed)!r}, '/nowhere'])\n"
        f"open({str(allowed / 'a')!r}, 'w').write('1'); open({os.path.join(STDLIB, 'this.py')!r}).read()\n"
        f"for path, mode in (({str(kept)!r}, 'r'), ({str(kept)!r}, 'a'), ({str(tmp_path / 'new')!r}, 'w')):\n"
        "    try: open(path, mode)\n"
        "    except PermissionError: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("refused\n" * 3, "")


def decide(machine: str, arch: int, number: int, *arguments: int) -> int:
    """What the filter of process 77 returns, by an interpreter of its instructions of our own."""
    words = [number, arch, 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32]
    instructions = seccomp.program(machine, 77)
    register = at = 0
    while True:
        operation, if_true, if_false, operand = instructions[at]
        at += 1
        match operation:
            case 0x20:  # BPF_LD | BPF_W | BPF_ABS
                register = words[operand // 4]
            case 0x54:  # BPF_ALU | BPF_AND | BPF_K
                register &= operand
            case 0x15 | 0x35 | 0x45:  # BPF_JMP | BPF_JEQ, JGE, JSET | BPF_K
                true = {0x15: register == operand, 0x35: register >= operand, 0x45: bool(register & operand)}[operation]
                at += if_true if true else if_false
            case 0x06:  # BPF_RET
                return operand


ALLOWED, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


@pytest.mark.parametrize(
    ("machine", "arch", "numbers"),
    [
        ("x86_64", 0xC000003E, {"read": 0, "mmap": 9, "openat": 257, "clone": 56, "kill": 62, "sendto": 44}),
        ("aarch64", 0xC00000B7, {"read": 63, "mmap": 222, "openat": 56, "clone": 220, "kill": 129, "sendto": 206}),
    ],
)
def test_the_filter_decides_alike_on_both_machines(machine, arch, numbers):
    """Also on the one that this is not. Of all numbers, those and no others pass that the list names."""
    checked = syscall_numbers.CHECKED[machine]
    listed = {*syscall_numbers.ALLOWED[machine].values(), *checked.values()}
    passing = {number for number in range(600) if decide(machine, arch, number) == ALLOWED}
    not_with_zeros = {checked[name] for name in ("clone", "kill", "tgkill", "socketpair", "ioctl")}
    assert passing == listed - not_with_zeros
    assert {decide(machine, arch, number) for number in range(424, 600)} == {ENOSYS}
    assert {decide(machine, arch, number) for number in set(range(424)) - passing} == {EPERM}
    assert {decide(machine, arch ^ 0x80000000, number) for number in range(600)} == {EPERM}
    assert {decide(machine, arch, 0x40000000 + number) for number in range(600)} == {EPERM}

    def says(name: str, *arguments: int) -> bool:
        return decide(machine, arch, numbers[name], *arguments) == ALLOWED

    assert says("clone", 0x00010000 | 0x100)
    assert not says("clone", 17)
    assert says("kill", 77, 9)
    assert not any(says("kill", pid, 9) for pid in (0, 1, 76, 2**32 - 1, 2**32 - 77))
    assert says("sendto", 3, 1, 1, 0, 0, 0)
    assert not says("sendto", 3, 1, 1, 0, 1, 16)
    assert not says("sendto", 3, 1, 1, 0, 1 << 32, 16)
    allowed_flags = [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, os.O_RDWR | os.O_TRUNC]
    assert all(says("openat", 3, 1, flags) for flags in allowed_flags)
    assert not any(says("openat", 3, 1, flags) for flags in (os.O_TRUNC, 3, 3 | os.O_TRUNC, os.O_CREAT | os.O_TRUNC))
    assert set(numbers.values()) <= listed


def test_both_sides_of_the_process_say_the_same():
    assert (program.READY.encode(), program.SAID_WHY) == (watch.READY, watch.SAID_WHY)
