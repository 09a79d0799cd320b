"""Activations over the tiers: what autograd keeps for a backward, in host memory set aside for it and on NVMe."""
