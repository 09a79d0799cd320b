"""What a step did: the meter that counts, the trace for a timeline, and the report."""
