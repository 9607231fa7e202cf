"""Two threads that wait for one lock that nobody gives back."""

import threading

LOCK = threading.Lock()


class Worker:
    def wait_for_the_lock(self):
        print("waiting", flush=True)
        with LOCK:
            pass


LOCK.acquire()
threading.Thread(target=Worker().wait_for_the_lock, name="loader").start()
Worker().wait_for_the_lock()
