"""Tiers in which bytes are stored, and their movement: homes, one weight cache, one gradient store."""
