"""Record of a step: the meter that counts, the trace for a timeline, and the report."""
