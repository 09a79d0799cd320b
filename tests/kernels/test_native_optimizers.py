"""The entries of ``NATIVE_OPTIMIZERS``, against the kernels and torch's classes that they are of."""

from __future__ import annotations

import inspect
from itertools import product
from pathlib import Path

import pytest
import torch

from offload.kernels import _kernels
from offload.native_optimizers import NATIVE_OPTIMIZERS, SQUARES, NativeOptimizer

RULES = (Path(__file__).parents[2] / "offload" / "kernels" / "src" / "rules.h").read_text()
BY_NAME = pytest.mark.parametrize("native", NATIVE_OPTIMIZERS.values(), ids=NATIVE_OPTIMIZERS)
CHOICES = {"amsgrad": (False, True), "momentum": (0.0, 0.9), "nesterov": (False, True)}


def kernels_of(native: NativeOptimizer) -> dict[str, tuple[str, ...]]:
    """The kernels that the options of an optimizer lead to, and their states."""
    found = {}
    own = [[(name, value) for value in CHOICES[name]] for name in CHOICES if name in native.defaults]
    for options in product(*own):
        asked = dict(options)
        if not asked.get("nesterov") or asked["momentum"]:
            coef = native.coefficients({**native.defaults, **asked})
            found[coef.kernel] = coef.states
    return found


def test_every_kernel_of_the_list_is_reached_and_no_other():
    listed = [line.split("(")[1].split(",")[0] for line in RULES.splitlines() if line.startswith("  RULE(")]
    reached = {kernel for native in NATIVE_OPTIMIZERS.values() for kernel in kernels_of(native)}
    assert len(listed) == 9 and reached == set(listed)
    assert all(callable(getattr(_kernels, name)) for name in listed)


@BY_NAME
def test_options_for_the_states_of_a_kernel_lead_to_these_states(native: NativeOptimizer):
    for states in kernels_of(native).values():
        assert native.coefficients(native.options_for(states)).states == states
    assert native.coefficients(native.options_for(["of another optimizer"])).states == native.states


@BY_NAME
def test_the_signs_of_codes_are_those_of_the_rule(native: NativeOptimizer):
    """A rule says of each state whether its codes have a sign, and Python encodes and decodes by the state's name."""
    kernel, states = max(kernels_of(native).items(), key=lambda found: len(found[1]))
    struct = RULES.split(f"RULE({kernel}, ")[1].split(")")[0].split("<")[0]
    signs = RULES.split(f"struct {struct} {{")[1].split("state_signed[] = {")[1].split("}")[0].split(", ")
    assert [name not in SQUARES for name in states] == [sign == "true" for sign in signs[: len(states)]]


@BY_NAME
def test_options_and_their_defaults_are_those_of_torch(native: NativeOptimizer):
    if native.torch_class:
        of_torch = inspect.signature(getattr(torch.optim, native.torch_class)).parameters
        assert {name: of_torch[name].default for name in native.defaults} == dict(native.defaults)
