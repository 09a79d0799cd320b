"""What ranks do with weights for others in the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks.jobs import train
from ranks.programs import Placement, Program, bits, raised


def save_models(rank: int, size: int, program: Program, placement: Placement, folder: Path) -> dict[str, Any]:
    """Weights in their own dtype, fp32 masters, and what is raised for a file in the place of the directory."""
    with program.placed(placement, folder) as engine:
        train(engine, range(program.steps), rank, size)
        engine.save_model(folder / "own")
        engine.save_model(folder / "fp32", dtype="fp32")
        (folder / "file").touch()
        errors = [raised(lambda: engine.save_model(folder / "file")), raised(lambda: engine.save_model(folder / "own"))]
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        states = engine.optimizer.state_dict()["state"]
        trained = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
        masters = {names[id(trained[index])]: bits(of["master"]) for index, of in states.items() if "master" in of}
        weights = {name: bits(value) for name, value in engine.module.state_dict().items()}
        return {"weights": weights, "masters": masters, "errors": errors}
