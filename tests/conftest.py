"""A shell starts background jobs with Ctrl-C ignored, and programs inherit that: the tests want it as it is by default."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
