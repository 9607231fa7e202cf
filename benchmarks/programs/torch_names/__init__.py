"""Waits of torch's, in files and functions of the same names: a stack is all that a watcher sees of them."""
