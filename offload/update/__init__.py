"""The optimizer step over tiles: the pipeline, speculative updates, the verdict, which side updates."""
