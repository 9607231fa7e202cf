"""Facts in, verdict out. Pure: no clock, no I/O, no logging."""

from hangguard.judge.assess import assess, next_ask, start, step
from hangguard.judge.hypotheses import HYPOTHESES, diagnose_memory
from hangguard.judge.memory import Memory
from hangguard.judge.policy import Budget, GiveUp, Keep, Move, Relaunch, next_move, permitted, why_none
from hangguard.judge.rules import Rules, rules_for

__all__ = [
    "HYPOTHESES",
    "Budget",
    "GiveUp",
    "Keep",
    "Memory",
    "Move",
    "Relaunch",
    "Rules",
    "assess",
    "diagnose_memory",
    "next_ask",
    "next_move",
    "permitted",
    "rules_for",
    "start",
    "step",
    "why_none",
]
