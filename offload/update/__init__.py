"""The optimizer step over tiles: the pipeline, early updates, the verdict, which side updates."""
