"""The reader of Python stacks tells what py-spy tells, of every Python, and never something that is not there."""

import contextlib
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import anyio
import pytest
from pythons import PYTHONS
from seen import until_sync
from test_guardian import serve  # noqa: F401 - a fixture
from test_stacks import DEADLOCK, member, running, stand_in, stat

from hangguard.act import _aside
from hangguard.facts import Unseen
from hangguard.observe.memory_stacks import read_directly, understand
from hangguard.observe.stacks import find_py_spy, take_stacks
from hangguard.pystacks import layouts, lines, read_threads, start_time
from hangguard.pystacks.memory import Memory, Torn

MANY = Path(__file__).parent / "programs" / "stack_many.py"
EVERY_PYTHON = pytest.mark.parametrize("python", [python for _, python in PYTHONS], ids=[name for name, _ in PYTHONS])
HOT = Path(__file__).parent / "programs" / "stack_hot.py"


def read(pid, within=5.0):
    return read_threads(pid, start_time(pid), within=within)


def frames_by_thread(found):
    return {thread["id"]: [tuple(frame) for frame in thread["frames"]] for thread in found["threads"]}


def as_py_spy_says(pid):
    """Name, file, line of every frame of every thread, in the form of the reader; classes are told by py-spy alone."""
    argv = [find_py_spy(), "dump", "--nonblocking", "--json", "--pid", str(pid)]
    threads = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    return {
        thread["os_thread_id"] or thread["thread_id"]: [
            (frame["name"].rpartition(".")[2], frame["filename"], frame["line"]) for frame in thread["frames"]
        ]
        for thread in threads
    }


def all_asleep(pid, threads):
    def condition():
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return len(tasks) == threads and all("futex" in (task / "wchan").read_text() for task in tasks)

    until_sync(condition, within=20)


# ----------------------------------------------------------------------------- the same as py-spy


@EVERY_PYTHON
def test_fifty_threads_stand_where_py_spy_says(python):
    with running(python, str(MANY), "50", "100", lines=1) as process:
        all_asleep(process.pid, 51)
        found = read(process.pid)
        assert frames_by_thread(found) == as_py_spy_says(process.pid)
        main, *others = found["threads"]
        assert main["is_main"]
        assert not any(thread["is_main"] for thread in others)
        assert main["frames"][0][0] == "tiefer"
        if found["python"] != "3.10":  # which does not keep the kernel's numbers
            assert main["id"] == process.pid


@EVERY_PYTHON
def test_of_a_deep_recursion_both_ends_are_told(python):
    with running(python, str(MANY), "0", "900", lines=1) as process:
        all_asleep(process.pid, 1)
        (frames,) = frames_by_thread(read(process.pid)).values()
        (whole,) = as_py_spy_says(process.pid).values()
        assert len(whole) > 900
        assert frames == whole[:192] + whole[-64:]


@EVERY_PYTHON
def test_a_forked_child_is_read_with_numbers_of_its_own(python):
    code = (
        "import os, threading\n"
        "def go():\n"
        "    if os.fork() == 0:\n"
        "        threading.Thread(target=threading.Event().wait).start()\n"
        "        print(os.getpid(), flush=True)\n"
        "        threading.Event().wait(60)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "t = threading.Thread(target=go); t.start(); t.join()\n"
    )
    argv = (python, "-W", "ignore", "-c", code)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            all_asleep(child, 2)
            found = read(child)
            assert frames_by_thread(found) == as_py_spy_says(child)
            assert [thread["is_main"] for thread in found["threads"]] == [True, False]
            if found["python"] != "3.10":
                assert {thread["id"] for thread in found["threads"]} == set(map(int, os.listdir(f"/proc/{child}/task")))
        finally:
            os.kill(child, signal.SIGKILL)
            process.kill()


@EVERY_PYTHON
def test_a_stopped_program_is_read_and_stays_stopped(python):
    with running(python, str(DEADLOCK), lines=2) as process:
        all_asleep(process.pid, 2)
        before = read(process.pid)
        process.send_signal(signal.SIGSTOP)
        until_sync(lambda: stat(process.pid)[0] == "T")
        assert read(process.pid) == before
        assert stat(process.pid)[0] == "T"


def test_nothing_is_changed_by_a_look():
    with running(sys.executable, str(DEADLOCK), lines=2) as process:
        all_asleep(process.pid, 2)

        def state():
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            return [line for line in status if line.startswith(("State", "TracerPid", "voluntary", "nonvoluntary"))]

        before = state()
        for _ in range(20):
            assert "threads" in read(process.pid)
        assert state() == before


# ------------------------------------------------------------------------------- what moves, what ends


@pytest.mark.parametrize(
    ("kind", "above"),
    [
        ("calls", [["call"] * n for n in range(5)]),
        ("generators", [[], ["deleg"], ["gen", "deleg"]]),
        (
            "methods",
            [*(["method"] * n for n in range(5)), ["__iter__"], ["deleg", "__iter__"], ["deleg"], ["gen", "deleg"]],
        ),
        ("exceptions", [["fail"] * n for n in range(5)]),
    ],
)
@EVERY_PYTHON
def test_of_a_program_that_runs_only_stacks_are_told_that_it_can_have(python, kind, above):
    with running(python, str(HOT), kind, lines=1) as process:
        told = 0
        for _ in range(60):
            found = read(process.pid)
            if "unseen" in found:
                assert "it ran on while it was read" in found["unseen"]
                continue
            told += 1
            (frames,) = frames_by_thread(found).values()
            functions = [function for function, _, _ in frames]
            begins = functions == ["<module>"]
            assert begins or functions[-2:] == [kind, "<module>"]
            assert functions[:-2] in above
        assert told


def test_a_process_that_ends_meanwhile_is_said_to_have_ended_and_never_read_in_part():
    for delay in (0.0, 0.001, 0.003, 0.006, 0.01):
        with running(sys.executable, str(MANY), "50", "100", lines=1) as process:
            all_asleep(process.pid, 51)
            started = start_time(process.pid)
            killer = threading.Timer(delay, process.kill)
            killer.start()
            seen = []
            until_sync(lambda: seen.append(read_threads(process.pid, started, within=5)) or "unseen" in seen[-1])  # noqa: B023
            killer.join()
        assert all(len(found["threads"]) == 51 for found in seen[:-1])
        assert seen[-1]["is_python"]


def test_a_pid_that_is_another_process_now_is_not_read():
    with running(sys.executable, str(DEADLOCK), lines=2) as process:
        found = read_threads(process.pid, start_time(process.pid) - 1, within=5)
    assert found == {"unseen": "the process has ended", "is_python": True}
    assert read_threads(process.pid, 1, within=5) == {"unseen": "the process has ended", "is_python": True}


def test_a_program_without_python_is_known_as_such():
    with running("sleep", "60") as process:
        until_sync(lambda: os.readlink(f"/proc/{process.pid}/exe").endswith("sleep"))
        assert read(process.pid) == {"unseen": "not a Python program", "is_python": False}


def test_a_program_that_calls_itself_python_is_none(tmp_path):
    program = tmp_path / "python3.12"
    shutil.copy("/bin/sleep", program)
    with running(str(program), "60") as process:
        until_sync(lambda: os.readlink(f"/proc/{process.pid}/exe") == str(program))
        assert read(process.pid) == {"unseen": "not a Python program", "is_python": False}


def test_a_program_that_embeds_python_is_read_whatever_its_name(tmp_path):
    program = tmp_path / "engine"
    shutil.copy(os.path.realpath(sys.executable), program)
    env = {**os.environ, "PYTHONHOME": sys.base_prefix}
    with running(str(program), str(DEADLOCK), lines=2, env=env) as process:
        all_asleep(process.pid, 2)
        assert read(process.pid)["threads"][0]["frames"][0][0] == "wait_for_the_lock"
        program.unlink()
        assert read(process.pid)["threads"][0]["frames"][0][0] == "wait_for_the_lock"


def test_a_look_without_time_says_so_and_a_look_at_many_keeps_its_deadline():
    with running(sys.executable, str(MANY), "50", "100", lines=1) as process:
        assert read(process.pid, within=0.0) == {"unseen": "its memory could not be read in time", "is_python": True}


def test_another_users_process_is_refused_by_the_kernel_and_that_is_said():
    """As somebody without rights: where the tests are not root, process 1 is another user's already."""
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from hangguard.pystacks import read_threads, start_time\n"
        "pid = int(sys.argv[2])\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print(read_threads(pid, start_time(pid), within=5)['unseen'])\n"
    )
    source = Path(layouts.__file__).parents[2]
    with running(sys.executable, str(DEADLOCK), lines=2) as process:
        target = process.pid if os.getuid() == 0 else 1
        argv = [sys.executable, "-c", code, str(source), str(target)]
        said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert said == "its memory may not be read: another user's, or ptrace is restricted here\n"


# ------------------------------------------------------------------------------------ nothing invented


class Written:
    """A made-up memory, for versions that are not installed here."""

    pid = 1
    mappings = ()

    def __init__(self, parts):
        self._parts = parts

    def read(self, address, size):
        return self._parts[address][:size].ljust(size, b"\0")

    def word(self, address):
        return struct.unpack("<Q", self.read(address, 8))[0]


@pytest.mark.parametrize(
    ("number", "runtime", "reason"),
    [
        (0x030E00F0, b"", "the stacks of Python 3.14 cannot be read from here"),
        (0x030900F0, b"", "the stacks of Python 3.9 cannot be read from here"),
        (0x030D00B2, b"", "unfinished Python"),
        (0x030D01F0, b"nothing", "does not tell where it keeps its stacks"),
        (0x030D01F0, struct.pack("<8sQQ", b"xdebugpy", 0x030D01F0, 1), "free-threaded"),
        (0x030D01F0, struct.pack("<8s20Q", b"xdebugpy", 0x030D01F0, 0, *[1 << 40] * 18), "offsets that cannot be"),
    ],
)
def test_a_version_that_is_not_known_is_said_and_not_tried(number, runtime, reason):
    memory = Written({1: struct.pack("<Q", number), 2: runtime})
    with pytest.raises(Exception, match=reason):
        layouts.layout_of(memory, {"Py_Version": 1, "_PyRuntime": 2})


@EVERY_PYTHON
def test_the_offsets_are_those_of_the_headers(python, tmp_path):
    """Only what this Python's own headers say; 3.13 tells its offsets itself, and is asked in the other tests."""
    about = json.loads(
        subprocess.run(
            [python, "-c", "import sysconfig, json; print(json.dumps(sysconfig.get_paths()))"],
            capture_output=True, check=True, text=True,
        ).stdout
    )  # fmt: skip
    version = Path(about["include"]).name.removeprefix("python")
    headers = Path(about["include"], "internal")
    if version not in layouts._KNOWN or not headers.exists() or not shutil.which("cc"):
        return  # a system's Python may come without its internal headers
    program = tmp_path / "offsets.c"
    program.write_text(OFFSETS)
    include = [f"-I{about['include']}", f"-I{headers}"]
    subprocess.run(["cc", "-w", *include, str(program), "-o", str(tmp_path / "offsets")], check=True)
    said = subprocess.run([str(tmp_path / "offsets")], capture_output=True, check=True, text=True).stdout
    told = dict(line.split("=") for line in said.split())
    assert {name: layouts._KNOWN[version][name] for name in told} == {name: int(value) for name, value in told.items()}


OFFSETS = """
#define Py_BUILD_CORE 1
#include "Python.h"
#include "internal/pycore_runtime.h"
#include "internal/pycore_interp.h"
#if PY_VERSION_HEX >= 0x030b0000
#include "internal/pycore_frame.h"
#else
#include "frameobject.h"
#endif
#include <stddef.h>
#define O(name, type, field) printf(#name "=%zu\\n", offsetof(type, field))
int main(void) {
    O(interpreters, _PyRuntimeState, interpreters.head);
    O(main_thread, _PyRuntimeState, main_thread);
    O(next_interpreter, PyInterpreterState, next);
    O(next_thread, PyThreadState, next);
    O(thread_interpreter, PyThreadState, interp);
    O(thread_id, PyThreadState, thread_id);
#if PY_VERSION_HEX >= 0x030b0000
    O(threads, PyInterpreterState, threads.head);
    O(native_id, PyThreadState, native_thread_id);
    O(thread_frame, PyThreadState, cframe);
    O(cframe_frame, _PyCFrame, current_frame);
    O(frame_code, _PyInterpreterFrame, f_code);
    O(frame_previous, _PyInterpreterFrame, previous);
    O(frame_instruction, _PyInterpreterFrame, prev_instr);
    O(frame_owner, _PyInterpreterFrame, owner);
    O(code_instructions, PyCodeObject, co_code_adaptive);
#else
    O(threads, PyInterpreterState, tstate_head);
    O(thread_frame, PyThreadState, frame);
    O(frame_code, PyFrameObject, f_code);
    O(frame_previous, PyFrameObject, f_back);
    O(frame_instruction, PyFrameObject, f_lasti);
    O(frame_line, PyFrameObject, f_lineno);
    printf("frame_size=%zu\\n", offsetof(PyFrameObject, f_state) + 4);
#endif
    O(code_file, PyCodeObject, co_filename);
    O(code_name, PyCodeObject, co_name);
    O(code_lines, PyCodeObject, co_linetable);
    O(code_first_line, PyCodeObject, co_firstlineno);
    printf("text_data=%zu\\n", sizeof(PyASCIIObject));
    return 0;
}
"""


def test_an_address_that_is_no_memory_is_refused_before_it_is_read():
    """Devices too: through ``/proc/PID/mem`` a read of their mapping would reach the driver."""
    with mmap.mmap(-1, 4096) as ours, Memory(os.getpid(), ends_at=time.monotonic() + 5) as memory:
        del ours
        vvar = [m for m in map(str.split, Path("/proc/self/maps").read_text().splitlines()) if "[vvar" in m[-1]]
        for address in (0, 8, 1 << 47, (1 << 64) - 8, *(int(m[0].split("-")[0], 16) for m in vvar)):
            with pytest.raises(Torn):
                memory.word(address)


@pytest.mark.parametrize(
    ("path", "ordinary"),
    [
        ("", True), ("[heap]", True), ("[stack]", True), ("/usr/lib/libpython3.12.so.1.0", True),
        ("/opt/python (deleted)", True), ("[anon:malloc]", True), ("/dev/nvidia0", False), ("/dev/nvidia-uvm", False),
        ("/dev/dri/renderD128", False), ("/dev/infiniband/uverbs0", False), ("[vvar]", False), ("[vsyscall]", False),
        ("anon_inode:[perf_event]", False), ("socket:[1]", False),
        ("/sys/devices/pci0000:00/0000:01:00.0/resource0", False), ("/srv/jail/gpu0", False),
        ("/home/somebody/fuse/file", False), ("/dev/libpython3.12.so", False),
    ],
)  # fmt: skip
def test_the_memory_of_devices_is_never_read(path, ordinary):
    from hangguard.pystacks.memory import _is_ordinary

    assert _is_ordinary(path, "/opt/python (deleted)") is ordinary


def test_lines_are_those_that_python_itself_gives():
    for function in (read, as_py_spy_says, take_stacks, contextlib.contextmanager, tempfile.mkstemp, shutil.copytree):
        code = function.__code__
        given = {}
        for start, end, line in code.co_lines():
            for instruction in range(start, end, 2):
                given[instruction] = line if line is not None else code.co_firstlineno
        version = f"3.{sys.version_info.minor}"
        told = {i: lines.line_of(code.co_linetable, code.co_firstlineno, i, version=version) for i in given}
        assert told == given


def test_a_table_of_lines_that_is_none_gives_some_line_and_no_error():
    for table in (b"", b"\xff" * 40, b"\x70" * 3, bytes(range(256))):
        for version in ("3.10", "3.12"):
            assert isinstance(lines.line_of(table, 7, 10, version=version), int)


# ---------------------------------------------------------------------------- by whom, and for whom


def refused(folder):
    """Py-spy as somebody without rights, so that the kernel really refuses it; without root it is played."""
    if os.getuid() != 0:
        return stand_in(folder, "#!/bin/sh\necho 'Permission Denied: Try running again' >&2\nexit 1\n")
    copy = folder / "py-spy-of-nobody"
    shutil.copy(find_py_spy(), copy)
    folder.chmod(0o755)
    become_nobody = (
        f"#!{sys.executable}\nimport os, sys\nos.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
        f"os.execv({str(copy)!r}, sys.argv)\n"
    )
    return stand_in(folder, become_nobody)


@pytest.fixture
def public():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.anyio
async def test_where_py_spy_is_refused_the_guardian_reads_its_members(serve, public):  # noqa: F811
    async with serve(argv=[sys.executable, str(DEADLOCK)]) as server:
        all_asleep(server.pid, 2)
        identity = (server.pid, server.started)
        took = member(server.pid)
        (stack,) = await take_stacks((took,), within=5, folders=refused(public), reader=server.read_stacks)
        (spied,) = await take_stacks((took,), within=5)
        assert (stack.seen_by, spied.seen_by) == ("the guardian", "py-spy")
        assert [(t.thread_id, t.frames, t.wait_channel) for t in stack.threads] == [
            (t.thread_id, t.frames, t.wait_channel) for t in spied.threads
        ]
        assert stack.threads[0].name == "MainThread"
        if sys.version_info >= (3, 11):
            assert stack.system_call == stack.threads[0].system_call == "futex"
        assert server.guardian_alive
        assert (await server.read_stacks(identity, within=5)).by == "the guardian"


@pytest.mark.anyio
async def test_without_py_spy_and_without_guardian_this_program_reads(serve, tmp_path):  # noqa: F811
    async with serve(argv=[sys.executable, str(DEADLOCK)]) as server:
        all_asleep(server.pid, 2)
        os.kill(server.guardian_pid, signal.SIGKILL)
        with anyio.fail_after(10):
            while server.guardian_alive:
                await anyio.sleep(0.01)
        reader = {"reader": server.read_stacks, "folders": (str(tmp_path),), "path": ""}
        (stack,) = await take_stacks((member(server.pid),), within=5, **reader)
        assert stack.seen_by == "this program"
        assert stack.threads[0].frames[0].function == "wait_for_the_lock"


@pytest.mark.anyio
async def test_the_guardian_reads_nobody_who_is_no_member(serve, tmp_path):  # noqa: F811
    with running(sys.executable, str(DEADLOCK), lines=2) as stranger:
        async with serve(argv=[sys.executable, str(DEADLOCK)]) as server:
            answer = await server.read_stacks((stranger.pid, start_time(stranger.pid)), within=5)
            assert answer.threads == Unseen("it is no member of this launch")
        assert stranger.poll() is None


@pytest.mark.anyio
async def test_a_guardian_that_is_stopped_while_it_is_asked_costs_its_time_and_no_more(serve):  # noqa: F811
    async with serve(argv=[sys.executable, str(DEADLOCK)]) as server:
        all_asleep(server.pid, 2)
        os.kill(server.guardian_pid, signal.SIGSTOP)
        answer = await server.read_stacks((server.pid, server.started), within=2)
        os.kill(server.guardian_pid, signal.SIGCONT)
        assert answer.by == "this program"
        assert not isinstance(answer.threads, Unseen)
        # The late answer is nobody's, and the next question has its own.
        assert (await server.read_stacks((server.pid, server.started), within=5)).by == "the guardian"


@pytest.mark.anyio
async def test_what_the_reader_cannot_see_either_says_both_reasons(tmp_path):
    async def reader(identity, *, within):
        return understand({"unseen": "nor can I", "is_python": True}, by="the guardian")

    folders = stand_in(tmp_path, "#!/bin/sh\necho 'Permission Denied: Try running again' >&2\nexit 1\n")
    with running(sys.executable, str(DEADLOCK), lines=2) as process:
        (stack,) = await take_stacks((member(process.pid),), within=5, folders=folders, reader=reader)
    assert stack.is_python
    assert stack.seen_by == ""
    assert stack.threads.reason.endswith("ptrace is restricted here; the guardian: nor can I")
    assert isinstance(stack.wait_channel, str)


@pytest.mark.anyio
async def test_a_py_spy_that_hangs_leaves_the_reader_its_time(tmp_path):
    folders = stand_in(tmp_path, "#!/bin/sh\nwhile :; do read x < /dev/zero; done\n")
    with running(sys.executable, str(DEADLOCK), lines=2) as process:
        all_asleep(process.pid, 2)
        (stack,) = await take_stacks((member(process.pid),), within=3, folders=folders, reader=read_directly)
    assert stack.seen_by == "this program"
    assert stack.threads[0].frames[0].function == "wait_for_the_lock"


@pytest.mark.anyio
async def test_ten_members_are_seen_within_the_deadline_and_one_that_is_late_costs_only_itself(tmp_path, serve):  # noqa: F811
    slow = '#!/bin/sh\ncase "$*" in *"--pid {}"*) while :; do read x < /dev/zero; done;; esac\nexec {} "$@"\n'
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(running(sys.executable, str(MANY), "20", "10", lines=1)) for _ in range(10)]
        folders = stand_in(tmp_path, slow.format(processes[3].pid, find_py_spy()))
        members = tuple(member(process.pid) for process in processes)
        for reader, late in ((None, "unseen"), (read_directly, "this program")):
            looks = [await take_stacks(members, within=3, folders=folders, reader=reader) for _ in range(2)]
            for look in looks:
                by = [found.seen_by or "unseen" for found in look]
                assert by == ["py-spy"] * 3 + [late] + ["py-spy"] * 6


@pytest.mark.anyio
async def test_two_readers_at_once_do_not_hinder_each_other():
    answers = []
    with running(sys.executable, str(MANY), "20", "10", lines=1) as process:
        all_asleep(process.pid, 21)

        async def look():
            answers.append(await read_directly((process.pid, start_time(process.pid)), within=5))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(look)
    assert len({answer.threads for answer in answers}) == 1
    assert not isinstance(answers[0].threads, Unseen)


# -------------------------------------------------------------------------------------- beside the loop


def test_a_task_that_never_comes_back_is_left_behind_and_the_next_are_done():
    rings, over, begun = [], threading.Event(), threading.Event()
    aside = _aside.Aside(lambda: rings.append(1))
    aside.do(lambda: begun.set() or (over.wait(60) and {}), within=-2.0, label={"id": 1})  # late at once
    assert begun.wait(10)
    for number in (2, 3):
        aside.do(lambda: {"done": True}, within=5.0, label={"id": number})
        got = until_sync(aside.answers)
        assert got == [{"done": True, "id": number}]
    over.set()
    assert until_sync(aside.answers) == [{"id": 1}]
    assert len(rings) == 3


def test_when_too_many_never_came_back_that_is_the_answer():
    over, begun = threading.Event(), []
    aside = _aside.Aside(lambda: None)
    for number in range(_aside.MOST_LEFT_BEHIND):
        aside.do(lambda: begun.append(1) or (over.wait(60) and {}), within=-2.0, label={"id": number})
        until_sync(lambda: len(begun) == number + 1)  # noqa: B023
    aside.do(dict, within=5.0, label={"id": 9})
    assert aside.answers() == [{"id": 9, "unseen": "earlier looks have not come back", "is_python": True}]
    over.set()


def test_a_task_that_fails_says_so():
    aside = _aside.Aside(lambda: None)
    aside.do(lambda: 1 / 0, within=5.0, label={"id": 1})
    (answer,) = until_sync(aside.answers)
    assert answer["unseen"] == "ZeroDivisionError: division by zero"
