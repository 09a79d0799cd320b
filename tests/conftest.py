"""What the tests want of their surroundings.

Shells start background jobs with Ctrl-C ignored, and programs inherit that: the tests want the default. The tests'
directories may be in memory: programs that the tests start do not warn of it.
"""

import os
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("PYTHONWARNINGS", "ignore:nvme_path")
