"""A simulated device, for tests of the schedule."""
