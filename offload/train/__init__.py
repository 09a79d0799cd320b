"""The program ``offload train``: a byte-level GPT trained on text with a model state larger than its memory budget."""
