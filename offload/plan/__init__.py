"""The placement: a pure function from units, budgets and bandwidths to a tier for every byte."""
