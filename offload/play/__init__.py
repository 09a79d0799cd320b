"""A step, played: what waits for what, and how long each part of the machine is at it."""
