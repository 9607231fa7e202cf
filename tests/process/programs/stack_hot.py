"""Programs whose stack never stands: calls, generators, methods, exceptions. The argument is which."""

import sys


def gen(n):
    yield from range(n)


def deleg(n):
    yield from gen(n)


class Many:
    def __iter__(self):
        return iter(deleg(3))

    def method(self, n):
        return n and self.method(n - 1)


def call(n):
    return n and call(n - 1)


def fail(n):
    try:
        if n:
            fail(n - 1)
        else:
            raise ValueError
    finally:
        n += 1


def calls():
    while True:
        call(3)


def generators():
    while True:
        sum(deleg(3))


def methods():
    while True:
        list(map(Many().method, Many()))


def exceptions():
    while True:
        try:
            fail(3)
        except ValueError:
            continue


print("hot", flush=True)
globals()[sys.argv[1]]()
