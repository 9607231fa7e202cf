"""A stop says of every single thing whose it was, why, and what was done with it."""

from faces import little, plain

from hangguard import CleanupReport, Limits, supervise


def test_a_stop_lists_everybody_whom_it_ended_and_how(tmp_path):
    with supervise(little(tp=2), run_dir=tmp_path / "runs") as server:
        root = server.pid
        sample = server.sample()
        report = server.stop().cleanup
    assert isinstance(report, CleanupReport)
    assert (report.answer, report.left_behind, report.dry_run) == ("released", (), False)
    processes = {item.pid: item for item in report.items if item.what == "process"}
    assert {process.pid for process in sample.tree.members} <= set(processes)
    assert processes[root].proof == "the run launched it"
    assert processes[root].done == "ended by SIGTERM"
    assert "hangguard.testing.server" in processes[root].name
    for item in processes.values():
        assert (item.whose, item.answer) == ("ours", "gone")
        assert item.done.startswith("ended by ")
        assert item.proof
        assert 0 <= item.seconds <= report.seconds + 30
    assert {item.what for item in report.items} >= {"process", "port", "gpu-memory"}


def test_who_ignores_sigterm_is_said_to_be_killed_and_a_stranger_is_not_in_it(tmp_path):
    command = ["/bin/sh", "-c", "trap '' TERM; exec python3 -m http.server {port} --bind 127.0.0.1"]
    with plain(tmp_path, command, limits=Limits(stop_grace=0.2)) as server:
        root = server.pid
        report = server.stop().cleanup
    (killed,) = [item for item in report.items if item.what == "process"]
    assert (killed.pid, killed.done) == (root, "ended by SIGKILL")
    assert "http.server" in killed.name
