"""Shells start background jobs with Ctrl-C ignored, and programs inherit that: the tests want the default."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
