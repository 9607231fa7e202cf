"""A blocking caller hears signals while it waits, whichever thread the kernel gives them to."""

import os
import signal
import threading
from concurrent.futures import Future

import pytest

from hangguard.supervision.interrupts import result_of


class Heard(Exception):
    pass


@pytest.fixture
def elsewhere():
    """SIGUSR1 raises, and the kernel gives it to another thread: so nothing wakes the one that waits."""
    over = threading.Event()

    def hear(_number, _frame):
        raise Heard

    other = threading.Thread(target=over.wait)
    before = signal.signal(signal.SIGUSR1, hear)
    other.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    yield
    over.set()
    other.join()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.timeout(20)
def test_an_exception_of_a_handler_ends_the_wait_for_what_another_thread_comes_to(elsewhere):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    with pytest.raises(Heard):
        result_of(Future())
    timer.join()


def test_what_it_came_to_is_returned_or_raised():
    done, failed = Future(), Future()
    threading.Timer(0.05, done.set_result, ("it",)).start()
    threading.Timer(0.05, failed.set_exception, (TimeoutError("of its own"),)).start()
    assert result_of(done) == "it"
    with pytest.raises(TimeoutError, match="of its own"):
        result_of(failed)
