"""A real terminal for the tests of the command line, and what it would show."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
from contextlib import contextmanager

from commands import hangguard


class Screen:
    """What a terminal of this size would show: only what hangguard's live line needs of one."""

    def __init__(self, columns):
        self.columns = columns
        self.rows = [""]
        self.row = self.column = 0
        self.widest_live = 0

    def feed(self, text):
        for piece in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if piece == "\r":
                self.column = 0
            elif piece == "\n":
                self._down()
                self.column = 0
            elif piece.startswith("\x1b"):
                self._control(piece[2:-1], piece[-1])
            else:
                self._put(piece)

    def _down(self):
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    def _control(self, number, letter):
        if letter == "A":
            self.row = max(0, self.row - int(number or 1))
        elif letter == "K":
            self.rows[self.row] = "" if number == "2" else self.rows[self.row][: self.column]

    def _put(self, text):
        for character in text:
            if self.column == self.columns:  # the terminal wraps
                self._down()
                self.column = 0
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1

    @property
    def text(self):
        return "\n".join(row.rstrip() for row in self.rows)


@contextmanager
def on_a_terminal(folder, columns, *words, **how):
    """Run with a real terminal as stdout; gives the process, and a function that reads and returns all frames."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24", "PYTHONIOENCODING": "utf-8"}
    screen, frames = Screen(columns), []

    def read():
        while select.select([ours], [], [], 0.05)[0]:
            try:
                text = os.read(ours, 65536).decode(errors="replace")
            except OSError:  # EIO: the other side is closed
                break
            screen.feed(text)
            frames.append(screen.text)
        return frames

    try:
        with hangguard(folder, *words, stdout=theirs, stderr=theirs, env=env, **how) as running:
            os.close(theirs)
            running.type = lambda keys: os.write(ours, keys.encode())
            yield running, read, screen
    finally:
        os.close(ours)


def live_lines(frames):
    return {row for frame in frames for row in frame.splitlines() if re.match(r"[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] ", row)}


def check_live_lines(frames, columns):
    """There is one at most, shorter than the terminal is wide, and nothing is left of a longer one."""
    for frame in frames:
        assert len(live_lines([frame])) <= 1, frame
    lines = live_lines(frames)
    assert all(len(line) < columns for line in lines), lines
    return lines
