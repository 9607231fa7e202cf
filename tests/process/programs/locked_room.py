"""Runs a command where little is allowed, and says what it left. Argument: JSON, see ``lockdown.py``. Needs root.

The command becomes a plain user in a root folder, a mount namespace and a pid namespace of its own; this program is
pid 1 there, has a bystander of the same user beside it, and ends with everything in the namespace. Whatever cannot be
set up is an error: a lock that does not hold proves nothing.
"""

import ctypes
import errno
import fcntl
import glob
import json
import os
import platform
import shutil
import signal
import struct
import sys
import time
from pathlib import Path

ASKED = json.loads(sys.argv[1])
LOCKS, ROOT, UID = set(ASKED["locks"]), ASKED["root"], ASKED["uid"]
LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER, ALLOW, FAIL = 2, 0x7FFF0000, 0x00050000
AUDIT_ARCH, PTRACE, PROCESS_VM_READV, FCNTL = {
    "x86_64": (0xC000003E, 101, 310, 72),
    "aarch64": (0xC00000B7, 117, 270, 25),
}[platform.machine()]
PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434
"""On every architecture: include/uapi/asm-generic/unistd.h."""

BYSTANDER = """
import mmap, os, sys, time
shm = "/dev/shm"
if os.access(shm, os.W_OK):
    held = open(shm + "/psm_bystander_held", "w+b")
    held.truncate(4096)
    memory = mmap.mmap(held.fileno(), 4096)
    number = 0
    while number < 200:  # and files at rest, made while the launch runs
        with open(f"{shm}/psm_bystander_{number}", "w") as file:
            file.write("a bystander's")
        number += 1
        time.sleep(0.5)
time.sleep(600)
"""


def checked(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(source, target, kind=None, flags=0, options=None):
    words = [None if word is None else str(word).encode() for word in (source, target, kind)]
    result = LIBC.mount(*words, ctypes.c_ulong(flags), None if options is None else options.encode())
    checked(result, f"mount {source} on {target}")


# --------------------------------------------------------------------------------------------- the room


def build_room():
    """A root folder as a container has it: the system and this Python to read, devices that are none, no driver."""
    mount("room", ROOT, "tmpfs", MS_NOSUID, "mode=755,size=64m")
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/sys", *ASKED["visible"]):
        show(path)
    for name in ("null", "zero", "full", "random", "urandom"):
        show(f"/dev/{name}")
    for place in ("lib", "lib64", "lib/*-linux-gnu"):  # where a container toolkit puts it
        for library in glob.glob(f"{ROOT}/usr/{place}/libnvidia-ml.so*"):
            mount("/dev/null", os.path.realpath(library), flags=MS_BIND)
    folder("/tmp", 0o1777)
    folder("/home", 0o755)
    folder("/home/user", 0o700, owner=UID)
    folder("/dev/shm", 0o755)
    mount("shm", f"{ROOT}/dev/shm", "tmpfs", MS_NOSUID, f"mode=1777,size={'64m' if 'small-shm' in LOCKS else '256m'}")
    (Path(ROOT) / "dev/shm/psm_bystander_before").write_text("a bystander's")
    os.chown(f"{ROOT}/dev/shm/psm_bystander_before", UID, UID)
    folder("/opt/unreadable", 0o755)
    program = f"{ROOT}/opt/unreadable/python3"
    shutil.copyfile(ASKED["python"], program)
    os.chmod(program, 0o711)
    folder("/proc", 0o755)
    mount("proc", f"{ROOT}/proc", "proc", MS_NOSUID, "hidepid=2" if "hidden-pids" in LOCKS else None)
    if "read-only-shm" in LOCKS:
        mount(None, f"{ROOT}/dev/shm", flags=MS_REMOUNT | MS_RDONLY | MS_NOSUID)
    if "read-only-root" in LOCKS:
        mount(None, ROOT, flags=MS_REMOUNT | MS_RDONLY | MS_NOSUID)


def folder(path, mode, owner=0):
    os.makedirs(ROOT + path, exist_ok=True)
    os.chmod(ROOT + path, mode)
    os.chown(ROOT + path, owner, owner)


def show(path):
    """Let something be there at the same place, to be read."""
    shown = ROOT + path
    if not os.path.lexists(path) or os.path.lexists(shown):
        return
    os.makedirs(os.path.dirname(shown), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), shown)
        return
    if os.path.isdir(path):
        os.mkdir(shown)
    else:
        Path(shown).touch()
    mount(path, shown, flags=MS_BIND | MS_REC)
    if not path.startswith("/dev"):
        mount(None, shown, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)


# ------------------------------------------------------------------------------------------ the plain user


def become_nobody():
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)


def refuse_calls():
    """A seccomp filter, inherited by all below: each call that is refused gives an error number, as in a sandbox."""
    refused = [(PTRACE, errno.EPERM), (PROCESS_VM_READV, errno.EPERM)] if "no-ptrace" in LOCKS else []
    if "no-pidfd" in LOCKS:
        refused += [(PIDFD_OPEN, errno.ENOSYS), (PIDFD_SEND_SIGNAL, errno.ENOSYS)]
    load, jump_equal, give = 0x20, 0x15, 0x06
    code = [(load, 0, 0, 4), (jump_equal, 1, 0, AUDIT_ARCH), (give, 0, 0, ALLOW), (load, 0, 0, 0)]
    for call, number in refused:
        code += [(jump_equal, 0, 1, call), (give, 0, 0, FAIL | number)]
    if "no-leases" in LOCKS:  # the second argument is the command; EINVAL is what file systems without leases say
        code += [(jump_equal, 0, 3, FCNTL), (load, 0, 0, 24), (jump_equal, 0, 1, fcntl.F_SETLEASE)]
        code += [(give, 0, 0, FAIL | errno.EINVAL)]
    code.append((give, 0, 0, ALLOW))
    instructions = b"".join(struct.pack("=HBBI", *one) for one in code)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(buffer)))
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    checked(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")


def start(command, env, output, *, locked):
    pid = os.fork()
    if pid == 0:
        try:
            become_nobody()
            if locked:
                refuse_calls()
            os.setsid()
            os.chdir(env.get("HOME", "/tmp"))
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            for number, file in zip((1, 2), output, strict=True):
                os.dup2(file, number)
            os.execve(command[0], command, env)
        except BaseException as problem:
            os.write(2, f"{problem!r}\n".encode())
        finally:
            os._exit(125)
    return pid


# --------------------------------------------------------------------------------------------------- pid 1


def others(*known):
    """Everybody else here, with the command line, but for those that wait to be reaped."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in {1, *known}:
            try:
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found[name] = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            except OSError:
                continue
    return found


def reap_until(pid):
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def live():
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")
    output = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for path in ASKED["output"]]
    made = os.open(ASKED["told"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    build_room()
    os.chroot(ROOT)
    os.chdir("/")
    env = ASKED["env"] if "no-home" in LOCKS else {**ASKED["env"], "HOME": "/home/user"}
    python = ASKED["command"][0]
    bystander = start([python, "-I", "-S", "-c", BYSTANDER], {}, output, locked=False)
    program = start(ASKED["command"], env, output, locked=True)
    code = reap_until(program)
    ends = time.monotonic() + 5.0  # what is promised after the death of the program
    while others(bystander) and time.monotonic() < ends:
        reap()
        time.sleep(0.02)
    reap()
    left = others(bystander)
    is_alive = os.waitpid(bystander, os.WNOHANG) == (0, 0)
    os.kill(bystander, signal.SIGKILL)
    os.waitpid(bystander, 0)
    shm = sorted(os.listdir("/dev/shm"))
    numbers = sorted(int(name.rpartition("_")[2]) for name in shm if name[14:].isdigit() and "bystander" in name)
    told = {
        "code": code,
        "left": left,
        "bystander_lives": is_alive,
        "bystander_files": [name for name in shm if "bystander" in name],
        "bystander_files_gone": sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers)),
        "shm": [name for name in shm if "bystander" not in name],
        "tmp": sorted(os.listdir("/tmp")),
        "home": sorted(str(path) for path in Path("/home/user").rglob("*")),
    }
    os.write(made, json.dumps(told).encode())


def main():
    checked(LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")  # and with it all in the room
    checked(LIBC.unshare(CLONE_NEWNS | CLONE_NEWPID), "unshare")
    mount(None, "/", flags=MS_REC | MS_PRIVATE)
    child = os.fork()
    if child == 0:
        try:
            live()
        except BaseException as problem:
            os.write(2, f"{problem!r}\n".encode())
            os._exit(1)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


main()
