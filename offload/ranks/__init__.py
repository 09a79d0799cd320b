"""Ranks of one training: who they are, what they exchange, what one machine gives each."""
