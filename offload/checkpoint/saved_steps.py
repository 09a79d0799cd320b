"""Steps of a run that are saved somewhere, and what is lost if its process ends now."""

from __future__ import annotations

from offload.config import OffloadConfig
from offload.progress import Progress


class SavedSteps:
    """Notes where the weights were last saved or loaded, by any call."""

    def __init__(self, config: OffloadConfig, progress: Progress) -> None:
        self._config = config
        self._progress = progress
        self._step = 0
        self._where = ""

    def note(self, where: object) -> None:
        """The weights are somewhere else now as they are: ``where``, in words."""
        self._step = self._progress.global_step
        self._where = str(where)

    @property
    def num_lost(self) -> int:
        """Steps that are lost with the weights. A durable run commits its last one."""
        return 0 if self._config.durable else abs(self._progress.global_step - self._step)

    @property
    def left(self) -> str:
        """Describe in words what is left of the run when its process has ended, and how it goes on."""
        step, lost = self._progress.global_step, self.num_lost
        if self._config.durable:
            return f"step {step} is committed under {self._config.paths[0]}: engine.load_checkpoint() goes on from it"
        if not self._where:
            unsaved = "its only step is not saved" if step == 1 else f"none of its {step} steps is saved"
            return f"{unsaved}. With durable=1, or engine.save_checkpoint(dir) in the loop, a run goes on where it was"
        since = {0: "", 1: "; the step since is not saved"}.get(lost, f"; {lost} steps since are not saved")
        return f"step {self._step} is in {self._where}{since}"
