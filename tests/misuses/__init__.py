"""Misuses and unusual uses of the engine: each one must end as in PyTorch, or with an error that names the way.

``FAMILIES`` has them all, one file for each.
"""

from __future__ import annotations

from importlib import import_module

from misuses.case import Case, Family

_FILES = (
    "loops",
    "foreign_optimizers",
    "optimizer_programs",
    "schedulers",
    "mixed_precision",
    "clipping",
    "gradients",
    "objects",
    "random_objects",
    "methods",
    "reading_and_writing",
    "conversions",
    "surgery",
    "inside_forward",
    "strangers",
    "training_loops",
    "micro_batches",
    "handed_on",
    "saved_tensors",
    "activation_loops",
    "expert_models",
    "adapters",
    "odd_moments",
    "players",
    "decoding",
    "structures",
    "groups_and_rates",
    "looking_in",
    "calculus",
    "recipes",
    "wrappers",
    "turns",
    "lightning",
    "features",
    "processes",
    "threads",
    "lifetime",
    "libraries",
    "pasted_loops",
    "pasted_models",
    "pasted_steps",
    "second_runs",
    "odd_pairs",
    "states_by_hand",
    "sixteen_bits",
    "put_on_afterwards",
    "programs_of_control",
    "around_the_step",
    "rows_of_experts",
    "layers_of_today",
    "loops_of_today",
    "odd_hours",
    "patched",
    "other_learning",
    "own_steps",
    "composed",
    "between",
    "compiled",
    "quantised_weights",
)

FAMILIES: list[Family] = [import_module(f"misuses.{file}").family for file in _FILES]
CASES: list[Case] = [case for family in FAMILIES for case in family.cases]
if len({case.name for case in CASES}) < len(CASES):
    raise ValueError("two cases have one name")
