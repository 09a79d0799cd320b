"""What a case has come to, from its outcomes in the three places."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from misuses.case import Case, Expected
from misuses.running import Outcome


class Result(Enum):
    """The last four are findings, whatever the case expects."""

    AS_IN_TORCH = "as in PyTorch"
    OUR_ERROR = "our error"
    SAID = "said"
    DIFFERS = "differs, as documented"
    SILENT = "SILENT"
    BARE = "BARE"
    DIED = "CRASH OR HANG"
    BROKEN = "the case itself is broken"


_MET = {
    Expected.AS_IN_TORCH: {Result.AS_IN_TORCH, Result.SAID},
    Expected.OUR_ERROR: {Result.OUR_ERROR},
    Expected.SAID: {Result.SAID},
    Expected.EITHER: {Result.AS_IN_TORCH, Result.OUR_ERROR, Result.SAID},
    Expected.DIFFERS: {Result.DIFFERS},
}


@dataclass(frozen=True)
class Verdict:
    """``fault`` is empty if the case came out as it must."""

    case: Case
    result: Result
    reason: str
    """What differs, or what the engine says."""
    fault: str
    in_torch: str
    trace: str
    seconds: float


def judge(case: Case, outcomes: dict[str, Outcome]) -> Verdict:
    """Compare the engine with PyTorch, and the engine on NVMe with itself in RAM."""
    torch_outcome, ram = outcomes["torch"], outcomes["ram"]
    nvme = outcomes.get("nvme", ram)
    results = [_compared(case, torch_outcome, ram, ""), _compared(case, torch_outcome, nvme, " [on NVMe]")]
    severity = list(Result).index
    result, reason, trace = max(results, key=lambda found: severity(found[0]))  # the first of equals: RAM
    if not any(found[0] in _FINDINGS for found in results):
        one_raises = (results[0][0] is Result.OUR_ERROR) is not (results[1][0] is Result.OUR_ERROR)
        if one_raises and case.expected is not Expected.EITHER:
            result, reason = Result.SILENT, f"in RAM {results[0][0].value}, on NVMe {results[1][0].value}"
        else:
            difference = _difference(ram.value, nvme.value, 0.0, 0.0)
            if difference and not one_raises and result is not Result.OUR_ERROR:
                result, reason = Result.SILENT, f"on NVMe other bits than in RAM: {difference}"
    return Verdict(
        case,
        result,
        reason,
        _fault(case, result, reason),
        f"raises `{torch_outcome.error}`" if torch_outcome.error else _told(torch_outcome.value),
        trace,
        sum(outcome.seconds for outcome in outcomes.values()),
    )


_FINDINGS = {Result.SILENT, Result.BARE, Result.DIED, Result.BROKEN}


def _fault(case: Case, result: Result, reason: str) -> str:
    if result not in _MET[case.expected]:
        return f"expected: {case.expected.value}"
    if result in (Result.OUR_ERROR, Result.SAID) and not re.search(case.way, reason, re.DOTALL | re.IGNORECASE):
        return f"the message does not name the way: /{case.way}/"
    return ""


def _compared(case: Case, expected: Outcome, found: Outcome, where: str) -> tuple[Result, str, str]:
    """What came of it in the engine, the reason, and a trace."""
    if expected.died:
        return Result.BROKEN, f"plain PyTorch: {expected.died}", expected.trace
    if expected.error == "AssertionError":
        return Result.BROKEN, f"plain PyTorch: {expected.message}", expected.trace
    if found.died:
        return Result.DIED, found.died + where, found.trace
    message = f"{found.error}: {found.message}"
    if found.error and found.error in case.also:
        return Result.OUR_ERROR, message, found.trace
    if found.error and expected.error in found.kinds and not (found.is_ours and case.expected is Expected.OUR_ERROR):
        return Result.AS_IN_TORCH, message, found.trace
    if found.error and not found.is_ours:
        also = f" (PyTorch raises {expected.error})" if expected.error else ""
        return Result.BARE, message + also + where, found.trace
    if found.error:
        return Result.OUR_ERROR, message, found.trace
    if expected.error:
        if case.expected in (Expected.OUR_ERROR, Expected.SAID) and found.said:
            return Result.SAID, "; ".join(found.said), ""
        return (
            Result.SILENT,
            f"PyTorch raises {expected.error}: {_short(expected.message)}; the engine goes on{where}",
            expected.trace,
        )
    difference = _difference(expected.value, found.value, case.rtol, case.atol)
    if difference and case.expected is Expected.DIFFERS:
        return Result.DIFFERS, case.way, ""
    if found.said and (not difference or case.expected in (Expected.SAID, Expected.EITHER)):
        return Result.SAID, "; ".join(found.said), ""
    if difference:
        said = f" (said: {'; '.join(found.said)})" if found.said else ""
        return Result.SILENT, f"{difference}{where}{said}", ""
    return Result.AS_IN_TORCH, "", ""


def _difference(one: Any, other: Any, rtol: float, atol: float, path: str = "") -> str:
    """The first difference, or nothing."""
    at = f"at {path}: " if path else ""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{at}{one.dtype} {tuple(one.shape)} against {other.dtype} {tuple(other.shape)}"
        left, right = (t.double() if t.is_floating_point() else t.long() for t in (one, other))
        if rtol == 0:
            same = one.is_floating_point() and torch.equal(left.nan_to_num(0.5), right.nan_to_num(0.5))
            if same or torch.equal(left, right):
                return ""
        elif torch.allclose(left.double(), right.double(), rtol, atol, equal_nan=True):
            return ""
        return f"{at}differs by {(left - right).abs().max().item():.3g} of {left.abs().max().item():.3g}"
    if isinstance(one, float) and isinstance(other, float):
        if math.isnan(one) and math.isnan(other):
            return ""
        same = one == other if rtol == 0 else math.isclose(one, other, rel_tol=rtol, abs_tol=atol)
        return "" if same else f"{at}{one!r} against {other!r}"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{at}keys {sorted(one.keys() ^ other.keys())[:4]} are not in both"
        pairs = [(key, one[key], other[key]) for key in one]
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{at}{len(one)} items against {len(other)}"
        pairs = [(str(index), a, b) for index, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return "" if type(one) is type(other) and one == other else f"{at}{_short(one)} against {_short(other)}"
    for key, a, b in pairs:
        difference = _difference(a, b, rtol, atol, f"{path}.{key}" if path else key)
        if difference:
            return difference
    return ""


def _told(value: Any) -> str:
    """What plain PyTorch does, if nothing is raised out of the case: it may have caught something."""
    for item in value if isinstance(value, list) else [value]:
        for text in item if isinstance(item, list) else [item]:
            if isinstance(text, str) and text.startswith("raises "):
                return f"raises `{text.removeprefix('raises ')}`"
    return "works"


def _short(item: Any) -> str:
    text = " ".join(str(item).split())
    return text if len(text) <= 100 else text[:97] + "..."
