"""The life of a run: what a checkpoint holds, and how it is committed, saved, loaded and exported."""
