"""Tiers in which bytes rest, and their movement: homes, one weight cache, one gradient store."""
