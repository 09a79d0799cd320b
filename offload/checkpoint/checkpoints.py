"""The checkpoints of one engine: when a step is committed, and what saving and loading do in which order.

[Note: The boundary of a step] What follows ``step()`` in the user's loop belongs to the step: an evaluation, what a
scheduler makes of its loss, weights that are cut. So a commit comes with the first forward that autograd records, with
a backward, a save or the end. After a save it comes again. By then a program has drawn the next batch. So what batches
come from is taken when ``step()`` returns: random generators, and registered objects that are iterated over.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from offload.access import ExternalAccess
from offload.checkpoint import program_end
from offload.checkpoint.every_rank import if_every_rank, on_every_rank
from offload.checkpoint.followers import Followers
from offload.checkpoint.native.commit import Committer, Publication
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.folder import CheckpointDirectory, SavingDirectory
from offload.checkpoint.native.generations import Generations, NoGenerations
from offload.checkpoint.native.load import Loading
from offload.checkpoint.native.logged_updates import LoggedUpdate
from offload.checkpoint.native.other_ranks import bring_together, last_run, went_on, what_is_there
from offload.checkpoint.native.parts import Parts, description_of, moment_of, own_description
from offload.checkpoint.native.records import EngineRecords
from offload.checkpoint.native.run_identity import RunIdentity
from offload.checkpoint.native.save import save_copy
from offload.checkpoint.native.saved_layout import Source
from offload.checkpoint.native.saved_units import SavedUnits
from offload.checkpoint.native.signals import Signals
from offload.checkpoint.native.update_log import UpdateLog
from offload.checkpoint.random_states import get_random_states, set_random_states
from offload.checkpoint.run_state import RunState, TakeGradients
from offload.checkpoint.saved_steps import SavedSteps
from offload.config import OffloadConfig
from offload.errors import ConfigError, named, warn
from offload.option_values import as_path
from offload.tiers.gradients.last_step import LastGradients
from offload.tiers.gradients.sink import GradientSink
from offload.tiers.store import EngineStore, RecordExtents
from offload.tiers.weights.host import HostLevel
from offload.units import UnitSpec
from offload.update.step import UnitUpdate
from swapper import OffloadError, StorageError, open_store

_log = logging.getLogger("offload")


class Checkpoints:
    """See the module's docstring. The training thread calls all methods."""

    def __init__(
        self,
        run: RunState,
        config: OffloadConfig,
        units: Sequence[UnitSpec],
        opened: EngineStore | None,
        records: Sequence[RecordExtents],
        host: HostLevel,
        sink: GradientSink,
        access: ExternalAccess,
        last_gradients: LastGradients,
        publication: Publication,
        *,
        speculative: bool,
    ) -> None:
        """``units`` are this rank's shards, where there are several: all of them call the methods then."""
        self._run = run
        self._config = config
        self._units = units
        self._opened = opened
        self._extents = records
        self._host = host
        self._sink = sink
        self._access = access
        self._ranks = access.ranks
        self._objects: list[Any] = []
        self._identity = RunIdentity()
        self._moment = ""
        """Of the commits of this engine: all ranks have the same one, and no other engine has."""
        if config.durable:
            self._moment = self._ranks.all_gather_object("the name of commits", secrets.token_hex(8))[0]
        self.is_due = False
        """A step waits for its boundary, to be committed; or the first forward is to warn of what it replaces."""
        self._feed: dict[str, Any] | None = None
        """Source of batches, as it was when the last step returned. Known with ``durable`` only."""
        self._followers = Followers()
        self._signals = Signals()
        self._commits = False
        """The next boundary is that of a step which is to be committed there."""
        self._at_boundary: bytes | None = None
        """The last step, as it was at its boundary, if it is not committed."""
        self.saved = SavedSteps(config, run.progress)
        self._records = EngineRecords(units, access, config.gradient_dtype)
        self._units_described: dict[str, tuple[SavedUnits, int]] = {}
        """Units as they are saved, and how many checksums of what is in files were known then."""
        self.generations = NoGenerations()
        if opened is not None and records:
            log = UpdateLog(units, access.homes, records, last_gradients, access.layout.formats.grads)
            committer = Committer(opened, self._records, records, log, publication, speculative=speculative)
            self.generations = Generations(committer, config, access.ranks)
        program_end.watch(self)
        if config.durable:
            self._signals.watch()
        self._unclaimed = self._committed() if config.durable else None
        """An earlier run's last step, that nobody has gone on from yet."""
        self.is_due = self._unclaimed is not None

    def register(self, objects: Iterable[Any]) -> None:
        """Objects with ``state_dict`` and ``load_state_dict`` are saved and restored with every checkpoint."""
        for item in objects:
            if not callable(getattr(item, "state_dict", None)) or not callable(getattr(item, "load_state_dict", None)):
                raise ConfigError(
                    f"register_for_checkpointing: a {type(item).__name__} has no state_dict() and load_state_dict()"
                )
            if all(item is not known for known in self._objects):
                self._objects.append(item)

    # Commits.

    def step_taken(self, step: Sequence[UnitUpdate]) -> None:
        """A step was taken; these updates run."""
        self.generations.step_taken(step)
        if self._config.durable:
            self._feed = self._present_feed()
            self._followers.step_taken(self._objects)
            self.is_due, self._commits = True, self._run.progress.global_step % self._config.durable == 0

    def step_skipped(self) -> None:
        """Gradients were not finite: what comes goes on behind their batches, with another loss scale."""
        if self._config.durable:
            self._feed = self._present_feed()
            self.is_due, self._commits = True, False

    def pass_boundary(self) -> None:
        """What comes now does not belong to the last step any more: commit it, if that is due."""
        if self._config.durable:
            self._signals.watch()
            self._followers.pass_boundary(self._objects)
        if self._unclaimed is not None:
            warn(
                f"nvme_path holds step {self._unclaimed.run['step']} of an earlier run: engine.load_checkpoint() goes "
                "on from it, and without that the first commit replaces it"
            )
        elif self.is_due and self._commits:
            self.generations.commit(self._describe_step)
            self._at_boundary = None
        elif self.is_due:  # the end may still commit it, in the middle of the next step
            self._at_boundary = self._describe_step()
        self._claim()

    @contextlib.contextmanager
    def before_boundary(self) -> Iterator[None]:
        """Uses within are no calls of the model: what a program writes in them still belongs to the last step."""
        is_due, self.is_due = self.is_due, False
        try:
            yield
        finally:
            self.is_due = is_due

    def _claim(self) -> None:
        self._unclaimed, self.is_due = None, False

    def _describe_step(self, updates: Sequence[LoggedUpdate] = ()) -> bytes:
        """Describe what the last step has left, without what came after it; ``updates`` are logged."""
        self._warn_of_newcomers()
        feed = self._feed or self._present_feed()
        description = self._describe(feed, None, self._own_units, self._moment)
        description.run.update(gradients={}, num_backwards=0, has_other_gradients=False)
        if missed := self._followers.missed(self._objects):
            description.run["missed"] = missed
        return replace(description, updates=tuple(updates)).encode()

    def _warn_of_newcomers(self) -> None:
        way = "have them and their optimizer saved, too: engine.register_for_checkpointing(module, optimizer)"
        self._run.warn_of_newcomers(self._objects, way)

    def finish(self, error: BaseException | None) -> None:
        """The end of the engine, because of this ``error`` if of one: the last step is committed, if nothing has
        failed, and a checkpoint that is on its way is finished, unless a signal ends the run. After Ctrl-C a line says
        what is kept. Raises what it has failed with. Safe to call twice."""
        generations, self.generations = self.generations, NoGenerations()
        try:
            generations.finish(self._last_step, give_up=self._signals.came)
            program_end.leave(self, error, self.saved.left if self._ranks.rank == 0 else "")
        finally:
            self._identity.release()
            self._signals.restore()

    @property
    def num_steps(self) -> int:
        """Steps that the run has taken."""
        return self._run.progress.global_step

    def _last_step(self) -> bytes | None:
        """The last step, if it is not committed, or if more may have followed it since."""
        return self._describe_step() if self._is_open else self._at_boundary

    @property
    def _is_open(self) -> bool:
        """What comes still belongs to the last step."""
        return self.is_due and self._unclaimed is None

    # Saving.

    def save(self, path: str | os.PathLike[str], tag: str | None, client_state: object) -> None:
        """See ``OffloadEngine.save_checkpoint``."""
        directory = SavingDirectory(path, tag, self._run.progress.global_step, self._identity, self._ranks)
        self.generations.wait_for_background()
        is_open = self._is_open
        self.pass_boundary()
        self.is_due = is_open
        self.generations.wait()
        self._warn_of_newcomers()
        self._access.using_gradients("engine.save_checkpoint()", [spec for spec, _ in self._access.gradients.of_all()])
        feed = self._present_feed()
        directory.make()
        self._sink.settle()

        def describe(units: SavedUnits) -> bytes:
            return self._describe(feed, client_state, units, directory.moment).encode()

        def of_all(units: SavedUnits) -> bytes:
            return if_every_rank(self._ranks, "what a checkpoint says", lambda: describe(units))

        if not self.generations.save(directory, lambda: of_all(self._own_units), self._ranks):
            metadata = of_all(self._copied_units)
            self._run.wait_for_updates()
            save_copy(self._records, directory, metadata)
            directory.retain(self._config.keep_last, self._config.keep_every)
        self.saved.note(directory.target)
        _log.info("checkpoint saved: %s, step %d", directory.target, self._run.progress.global_step)

    def save_dcp(self, path: str | os.PathLike[str]) -> None:
        """See ``OffloadEngine.save_dcp``."""
        target = as_path("dir", path)
        self._run.warn_of_newcomers((), "save them by engine.save_model, which writes all")
        self._run.wait_for_updates()
        from offload.checkpoint.dcp.save import save  # with it comes a second's worth of torch

        save(target, self._run, self._units, self._access)
        self.saved.note(target)
        _log.info("torch.distributed.checkpoint saved: %s, step %d", target, self._run.progress.global_step)

    # Loading.

    def load(self, path: str | os.PathLike[str] | None, tag: str | None) -> Any:
        """See ``OffloadEngine.load_checkpoint``."""
        self._begin_loading()
        if path is not None:
            directory = CheckpointDirectory(path)
            if self._ranks.rank == 0:
                directory.recover()
            self._ranks.barrier("load_checkpoint")
            with directory.open(tag) as generation:
                try:
                    return self._load(generation, f"checkpoint {generation.folder}")
                except StorageError as error:
                    if self._access.failure.is_known:
                        error.survives = "The engine is of no use any more: make model and engine again."
                    else:
                        error.survives = "Nothing has changed."
                    error.advice = directory.others(generation.folder.name)
                    raise
        if tag is not None:
            raise ConfigError("load_checkpoint: a tag belongs to the directory of save_checkpoint; give it, too")
        if not self._config.durable:
            raise ConfigError(
                "load_checkpoint() without a directory goes on from what a run with durable=k has committed under "
                "nvme_path. Give the directory of save_checkpoint, or make the engine with nvme_path and durable"
            )
        if self._unclaimed is not None:
            self._claim()
        opened = self._opened
        if opened is None:
            return None
        own = self._committed()
        identity = None if own is None else self._others_went_on(own, opened)
        if own is None or identity is not None:
            found = self._run_of_others(opened, own, identity)
            if found is not None:
                with found:
                    return self._load(found, f"the run of {len(found.generations)} ranks under {found.folder}")
        if own is None:
            return None
        if opened.store.generation:
            return self._rewind()
        assert opened.previous is not None
        with open_store(opened.paths, opened.previous, reserved=()) as store:
            return self._load(store, f"the run under {opened.paths[0]}")

    def _others_went_on(self, own: Description, opened: EngineStore) -> str | None:
        """The identity of the run, if others have gone on with it: see [Note: A run that went on]. The first rank
        looks: its identity is the run's."""
        store = opened.paths[0] / f"{opened.previous or opened.name}.store"
        base = self._ranks.world.folder_of_all(opened.paths[0])
        found = self._ranks.rank == 0 and went_on(base, self._ranks.size, own.run, store)
        identity: str | None = own.run["identity"] if found else None
        of_ranks: list[str | None] = self._ranks.all_gather_object("whether the run went on", identity)
        return of_ranks[0]

    def _run_of_others(self, opened: EngineStore, own: Description | None, identity: str | None) -> Parts | None:
        """The run under ``nvme_path`` of another number of ranks, with this ``identity`` if one is given, if there is
        one. It stays there. ``own`` is what these ranks have committed."""
        base, size = self._ranks.world.folder_of_all(opened.paths[0]), self._ranks.size
        if self._ranks.rank == 0:
            bring_together(base, size)
        self._ranks.barrier("the run of other ranks")
        found = last_run(base, size, identity)
        if self._ranks.rank != 0:
            return found
        if own is not None and found is not None:
            warn(
                f"this run has gone on under {base} with {len(found.generations)} ranks, beyond step "
                f"{own.run['step']}: it is taken up there, and the next commit replaces that step"
            )
        elif own is not None:
            warn(
                f"this run has gone on under {base} with another number of ranks, and not all parts of that are there: "
                f"it is taken up at step {own.run['step']}"
            )
        elif found is None and (there := what_is_there(base, size)):
            warn(f"nothing is committed under {base}: training begins at step 0. But there are {there}")
        return found

    def load_dcp(self, path: str | os.PathLike[str], *, states: bool) -> None:
        """See ``OffloadEngine.load_dcp``."""
        self._begin_loading()
        target = as_path("dir", path)
        rule = self._access.layout.rule if states else None
        from offload.checkpoint.dcp.load import DistributedLoading

        loading = DistributedLoading(target, self._run, self._units, self._access, rule)
        with contextlib.closing(loading):
            on_every_rank(self._ranks, f"load_dcp({target})", loading.open)
            with self._whole_or_of_no_use(f"checkpoint {target}"):
                self._replace(loading.state, loading.copy, lambda known: None, f"checkpoint {target}")
        _log.info("torch.distributed.checkpoint loaded: %s, step %d", target, self._run.progress.global_step)

    def _begin_loading(self) -> None:
        self.generations.wait_for_background()
        self.generations.wait()

    def _load(self, source: Source, where: str) -> Any:
        """Copy a generation into the engine."""
        description = description_of(source, where, self._ranks.rank)
        self._compare(description, where)
        with contextlib.closing(Loading(source, description, self._units, self._access)) as loading:
            if description.run["gradients"] and not loading.can_take_gradients():
                raise ConfigError(
                    f"{where} was saved in the middle of an accumulation, by another number of ranks: its gradients "
                    "can only be taken over by as many. Save after a step. Nothing has changed"
                )
            return self._take_over(description, loading, loading.copy, where)

    def _rewind(self) -> Any:
        """Go back to the last generation of the engine's own store."""
        if self._opened is None:
            return None
        store, where = self._opened.store, "the run under nvme_path"
        description = own_description(store, where)
        self._compare(description, where)
        with contextlib.closing(Loading(store, description, self._units, self._access)) as loading:

            def take() -> None:
                with self._access.changing_weights(self._units):
                    self._host.forget_copies()
                    store.rewind()
                    loading.take_residents(self._extents)

            return self._take_over(description, loading, take, where)

    def _take_over(
        self, description: Description, loading: Loading, take_records: Callable[[], None], where: str
    ) -> Any:
        run = description.run
        step, moment = moment_of(run)
        facts = {"the step": step, "the checkpoint": moment, "the parameter groups": run["groups"]}
        self._ranks.barrier("load_checkpoint", lambda: facts)
        with self._whole_or_of_no_use(where):
            self._replace(description.run, take_records, loading.take_gradients, where)
            self._take_over_rest(description)
        _log.info("checkpoint loaded: step %d", self._run.progress.global_step)
        return description.run["client_state"]

    @contextlib.contextmanager
    def _whole_or_of_no_use(self, where: str) -> Iterator[None]:
        """The engine is neither the old one nor the new one within: whatever ends this early (Ctrl-C, no memory) leaves
        it of no use, where it has not said so itself."""
        try:
            yield
        except OffloadError:
            raise
        except BaseException as error:
            advice = "Make model and engine again, and load what was saved last."
            self._access.failure.record(
                OffloadError(f"{where}: it was half loaded when {error!r} came.", advice=advice)
            )
            raise

    def _take_over_rest(self, description: Description) -> None:
        """What is there beside the records."""
        self._identity.go_on(description.run.get("identity", self._identity.value))
        for item, state in zip(self._objects, description.run["objects"], strict=True):
            try:
                item.load_state_dict(state)
            except Exception as error:
                raise OffloadError(
                    f"a registered {type(item).__name__} does not take the state that the checkpoint has: {error!r}",
                    survives="Weights, optimizer states and what was registered before it are the checkpoint's.",
                ) from error
        missed = description.run.get("missed", ())
        for kind in (type(item).__name__ for number, item in enumerate(self._objects) if number in missed):
            warn(
                f"the run ended between step {self._run.progress.global_step} and the {kind}.step() that follows each "
                "step: call it once now, or its rates are a step late from here on"
            )
        if description.run["random"] is not None:
            set_random_states(description.run["random"], self._access.device)
        if self._config.durable:  # a run that ends before its next step commits what it has gone on from
            self._feed = self._present_feed()

    def _replace(
        self, run: dict[str, Any], take_records: Callable[[], None], take_gradients: TakeGradients, where: str
    ) -> None:
        """Records first: while they come the engine is neither the old one nor the new one."""
        self.is_due, self._commits, self._feed, self._at_boundary = self._config.durable > 0, False, None, None
        try:
            with named(where):
                take_records()
                self._run.set(run, take_gradients)
        except OffloadError as error:
            raise self._access.failure.record(error) from None
        self._sink.restored()
        self.saved.note(where)

    def _compare(self, description: Description, where: str) -> None:
        own = self._describe({}, None, self._copied_units, "", objects=())
        difference = description.first_difference(own)
        groups = [[group["parameters"] for group in it.run["groups"]] for it in (description, own)]
        if difference is None and all(groups) and groups[0] != groups[1]:
            difference = _difference_of_groups(*groups)
        if difference is not None:
            raise ConfigError(f"{where} is that of another model or run: {difference}. Nothing has changed")
        if len(description.run["objects"]) != len(self._objects):
            raise ConfigError(
                f"{where} has the states of {len(description.run['objects'])} registered objects, and "
                f"{len(self._objects)} are registered: call register_for_checkpointing before load_checkpoint, with "
                "the same objects in the same order. Nothing has changed"
            )
        steps, own_steps = description.run.get("accumulation_steps"), self._config.gradient_accumulation_steps
        if description.run["num_backwards"] and steps not in (None, own_steps):
            raise ConfigError(
                f"{where} was saved after {description.run['num_backwards']} of {steps} micro-batches of a step, each "
                f"of which was divided by {steps}, and gradient_accumulation_steps is {own_steps} here: take {steps}, "
                "or save after a step. Nothing has changed"
            )
        self._run.check(description.run)

    # What is saved.

    def _describe(
        self,
        feed: dict[str, Any],
        client_state: object,
        units: SavedUnits,
        moment: str,
        objects: Iterable[Any] | None = None,
    ) -> Description:
        own = self._objects if objects is None else objects
        states = {id(item): item.state_dict() for item in own if not _is_iterated(item)}
        fed = feed.get("objects", {})
        run = {
            **self._run.get(),
            "accumulation_steps": self._config.gradient_accumulation_steps,
            "identity": self._identity.value,
            "moment": moment,
            "random": feed.get("random"),
            "objects": [fed[index] if index in fed else states[id(item)] for index, item in enumerate(own)],
            "client_state": client_state,
        }
        rule = self._access.layout.rule
        identity = None if rule is None else rule.identity
        return Description(self._config.precision, identity, units, run, self._records.files)

    @property
    def _own_units(self) -> SavedUnits:
        """In the extents of the engine's store."""
        return self._described("own", lambda: self._extents)

    @property
    def _copied_units(self) -> SavedUnits:
        """In the extents of a copy."""
        return self._described("copied", self._records.layout)

    def _described(self, where: str, extents: Callable[[], Sequence[RecordExtents]]) -> SavedUnits:
        """They stay the same once all checksums of what is in files are known."""
        known = self._records.num_checksums
        if self._units_described.get(where, (None, -1))[1] != known:
            self._units_described[where] = self._records.describe(extents()), known
        return self._units_described[where][0]

    def _present_feed(self) -> dict[str, Any]:
        iterated = {index: item.state_dict() for index, item in enumerate(self._objects) if _is_iterated(item)}
        return {"random": get_random_states(self._access.device), "objects": iterated}

    def _committed(self) -> Description | None:
        """Return what is committed under ``nvme_path``."""
        opened = self._opened
        if opened is None:
            return None
        if opened.store.generation:
            return Description.decode(opened.store.metadata, "the run under nvme_path")
        if opened.previous is None:
            return None
        with open_store(opened.paths, opened.previous, reserved=()) as store:
            return Description.decode(store.metadata, "the run under nvme_path")


def _difference_of_groups(there: list[list[str]], here: list[list[str]]) -> str:
    """Of parameter groups, given by the names of their parameters."""
    if len(there) != len(here):
        return f"{len(there)} parameter groups are there and {len(here)} here"
    index = next(index for index, names in enumerate(there) if names != here[index])
    pairs = enumerate(itertools.zip_longest(there[index], here[index], fillvalue="nothing"))
    at, (saved, own) = next((at, names) for at, names in pairs if names[0] != names[1])
    return f"parameter {at} of parameter group {index} is {saved} there and {own} here: give them in one order"


def _is_iterated(item: Any) -> bool:
    return isinstance(item, (Iterator, Iterable))
