import copy
import gc
import re
import runpy
import tempfile
from pathlib import Path

import forked
import pytest
import torch
from torch.utils.data import DataLoader

# isort: split
import lightning.pytorch
import lightning.pytorch.tuner
import pytorch_lightning
from lightning_modules import (
    NUM_BLOCKS,
    VOCAB,
    Resumable,
    bits,
    loader,
    module_over,
    same_bits,
    trainer_over,
)
from tiny import Tiny, batches, loss_of

from offload import BudgetError, ConfigError, OffloadEngine, OffloadError, StorageIOError, deferred_init
from offload.integrations.lightning import OffloadStrategy, PytorchLightningOffloadStrategy
from offload.model.gradient_handle import GradientHandle

DOCUMENT = Path(__file__).parents[2] / "docs" / "integrations" / "lightning.md"
CHILD = Path(__file__).parents[1] / "lightning_child.py"

PL = lightning.pytorch


@pytest.fixture
def strategy(tmp_path):
    made = []

    def make(**options):
        made.append(OffloadStrategy(nvme_path=tmp_path, **{"host_memory": 1 << 20, **options}))
        return made[-1]

    yield make
    for item in made:
        item.close()


def fit(package, root, strategy, train=None, module=None, ckpt_path=None, **options):
    module = module_over(package) if module is None else module
    trainer = trainer_over(package, root, strategy, **options)
    trainer.fit(module, loader() if train is None else train, loader(2, 5), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize(
    ("package", "made"), [(PL, OffloadStrategy), (pytorch_lightning, PytorchLightningOffloadStrategy)]
)
def test_a_run_has_the_losses_of_the_run_in_memory(tmp_path, package, made):
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    plain, at_home = fit(package, tmp_path, "auto", **options)
    own, trainer = fit(package, tmp_path, made(nvme_path=tmp_path, host_memory=1 << 20), **options)
    assert len(own.losses) == 16
    assert own.losses == pytest.approx(plain.losses, rel=1e-5)
    assert own.losses != plain.losses[:8] * 2  # it trains
    engine = trainer.strategy.engine
    assert engine.global_step == 8
    assert sum(engine.plan.nvme_bytes.values()) > 0
    (ours,) = trainer.validate(own, loader(2, 5), verbose=False)
    (theirs,) = at_home.validate(plain, loader(2, 5), verbose=False)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert torch.equal(trainer.predict(own, loader(1, 5))[0], at_home.predict(plain, loader(1, 5))[0])
    assert trainer.strategy.engine is engine
    trainer.strategy.close()


@pytest.mark.parametrize("package", [PL, pytorch_lightning])
def test_the_name_is_registered_and_the_store_lies_under_the_root_directory(tmp_path, package):
    _, trainer = fit(package, tmp_path / "root", "offload_nvme")
    assert trainer.strategy.engine.config.paths == (tmp_path / "root",)
    trainer.strategy.close()
    with pytest.raises(OffloadError, match="no engine"):
        _ = trainer.strategy.engine


@pytest.mark.parametrize(("every", "validated"), [(3, 1.0), (8, 0)], ids=["in an epoch", "at its end"])
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path, strategy, every, validated):
    def saving():
        return PL.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=every, save_top_k=-1)

    options = {"max_epochs": 2, "enable_checkpointing": True, "limit_val_batches": validated}
    whole, _ = fit(PL, tmp_path, strategy(), Resumable(), callbacks=[saving()], **options)
    (path,) = (tmp_path / "saved").glob(f"*step={every}.ckpt")
    resumed, trainer = fit(PL, tmp_path, strategy(), Resumable(), ckpt_path=path, callbacks=[saving()], **options)
    assert resumed.losses == whole.losses[every:]
    assert same_bits(resumed, whole)
    assert trainer.global_step == 16
    assert trainer.strategy.engine.global_step == 16


def test_a_shuffled_loader_goes_on_with_the_same_bits_from_the_end_of_an_epoch(tmp_path, strategy):
    def train():
        return DataLoader(batches(6, VOCAB), batch_size=None, shuffle=True)

    def saving():
        return PL.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_top_k=-1)

    options = {"max_epochs": 3, "enable_checkpointing": True}
    whole, _ = fit(PL, tmp_path, strategy(), train(), callbacks=[saving()], **options)
    (path,) = (tmp_path / "saved").glob("*step=6.ckpt")
    resumed, _ = fit(PL, tmp_path, strategy(), train(), ckpt_path=path, callbacks=[saving()], **options)
    assert resumed.losses == whole.losses[6:]
    assert same_bits(resumed, whole)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("precision", "own", "max_norm"),
    [("bf16-true", "bf16", 0.5), ("16-true", "fp16", None), ("16-true", "fp16", 0.5), ("32-true", "fp32", None)],
)
def test_precision_is_the_engines(tmp_path, strategy, precision, own, max_norm):
    module, trainer = fit(PL, tmp_path, strategy(), precision=precision, gradient_clip_val=max_norm)
    assert trainer.strategy.engine.config.precision == own

    def in_lightning(net, tokens):
        default = torch.get_default_dtype()
        torch.set_default_dtype(trainer.strategy.engine.config.dtype)
        try:
            return net(tokens)
        finally:
            torch.set_default_dtype(default)

    torch.manual_seed(0)
    net = Tiny(width=32, num_blocks=NUM_BLOCKS, vocab=VOCAB)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    dropout = torch.nn.Dropout(0.2)
    losses = []
    with OffloadEngine(net, optimizer=optimizer, precision=own) as engine:
        torch.manual_seed(1)
        torch.empty((), dtype=torch.int64).random_()  # as a loader that begins an epoch
        for tokens, targets in batches(8, VOCAB):
            loss = loss_of(dropout(in_lightning(engine, tokens)), targets)
            losses.append(loss.item())
            engine.backward(loss)
            if max_norm is not None:
                engine.clip_grad_norm_(max_norm)
            engine.step()
            scheduler.step()
        assert module.losses == losses
        assert same_bits(module.net, net)


def test_gradients_are_clipped_by_value(tmp_path, strategy):
    options = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}
    plain, _ = fit(PL, tmp_path, "auto", **options)
    own, _ = fit(PL, tmp_path, strategy(), **options)
    assert own.losses == pytest.approx(plain.losses, rel=1e-5)


def test_an_optimizer_may_have_a_part_of_the_parameters(tmp_path, strategy):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.blocks.parameters(), lr=1e-2)

    runs = [
        fit(
            PL, tmp_path, made, module=module_over(PL, configure_optimizers=configure_optimizers), gradient_clip_val=0.1
        )
        for made in ("auto", strategy())
    ]
    assert runs[1][0].losses == pytest.approx(runs[0][0].losses, rel=1e-5)
    assert torch.equal(runs[1][0].net.head.weight.detach(), runs[0][0].net.head.weight)


def test_clipping_by_norm_makes_no_operation_on_a_gradient(tmp_path, strategy, monkeypatch):
    def dispatch(cls, func, types, args=(), kwargs=None):
        called.append(func)
        return own(func, types, args, kwargs)

    own, called = GradientHandle.__torch_dispatch__, []
    monkeypatch.setattr(GradientHandle, "__torch_dispatch__", classmethod(dispatch))
    plain, _ = fit(PL, tmp_path, "auto", gradient_clip_val=0.1)
    own_run, _ = fit(PL, tmp_path, strategy(), gradient_clip_val=0.1)
    assert not called
    assert own_run.losses == pytest.approx(plain.losses, rel=1e-5)


def test_updates_begin_during_backward_where_nothing_is_clipped(tmp_path, strategy, monkeypatch):
    def backward(self, loss):
        calls.append(loss)
        own(self, loss)

    own, calls = OffloadEngine.backward, []
    monkeypatch.setattr(OffloadEngine, "backward", backward)
    fit(PL, tmp_path, strategy())
    assert len(calls) == 8
    fit(PL, tmp_path, strategy(), gradient_clip_val=0.1)
    assert len(calls) == 8


def test_a_schedule_of_accumulation_adds_up_in_fp32(tmp_path, strategy):
    def options():
        return {"max_epochs": 2, "callbacks": [PL.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})]}

    plain, _ = fit(PL, tmp_path, "auto", **options())
    own, trainer = fit(PL, tmp_path, strategy(), **options())
    assert own.losses == pytest.approx(plain.losses, rel=1e-5)
    assert trainer.strategy.engine.config.gradient_accumulation_steps == 4
    assert trainer.strategy.engine.global_step == 8 + 2


def test_backward_of_the_modules_own_is_called(tmp_path, strategy):
    def backward(self, loss):
        self.num_backwards = getattr(self, "num_backwards", 0) + 1
        loss.backward()

    plain, _ = fit(PL, tmp_path, "auto")
    own, _ = fit(PL, tmp_path, strategy(), module=module_over(PL, backward=backward))
    assert own.losses == pytest.approx(plain.losses, rel=1e-5)
    assert own.num_backwards == 8


def test_manual_optimization_steps_when_the_module_says(tmp_path, strategy):
    def training_step(self, batch, index):
        loss = loss_of(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.manual_backward(loss / 2)
        if index % 2:
            self.clip_gradients(self.optimizers(), 0.5, "norm")
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()

    def module():
        made = module_over(PL, training_step=training_step)
        made.automatic_optimization = False
        return made

    plain, _ = fit(PL, tmp_path, "auto", module=module())
    own, trainer = fit(PL, tmp_path, strategy(), module=module())
    assert own.losses == pytest.approx(plain.losses, rel=1e-5)
    assert trainer.strategy.engine.global_step == 4


def test_only_the_best_checkpoints_stay_and_their_weights_are_evaluated(tmp_path, strategy):
    saving = PL.callbacks.ModelCheckpoint(
        tmp_path / "saved", monitor="validation", save_top_k=2, save_last=True, every_n_epochs=1
    )
    options = {"callbacks": [saving], "enable_checkpointing": True, "check_val_every_n_epoch": 1}
    fit(PL, tmp_path, strategy(), max_epochs=4, **options)
    names = {entry.name for entry in (tmp_path / "saved").iterdir()}
    assert len(names) == 3
    assert "last.ckpt" in names
    evaluating = trainer_over(PL, tmp_path, strategy())
    (measured,) = evaluating.test(module_over(PL), loader(2, 5), ckpt_path=saving.best_model_path, verbose=False)
    assert measured["validation"] == pytest.approx(float(saving.best_model_score), rel=1e-6)
    engine = evaluating.strategy.engine
    assert engine.optimizer is None
    assert not engine.plan.nvme_bytes.get("moments")


def test_a_run_with_averages_goes_on_and_its_checkpoint_is_evaluated_by_them(tmp_path, strategy):
    def options():
        saving = PL.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_top_k=-1)
        averages = PL.callbacks.EMAWeightAveraging(decay=0.9)
        return {"max_epochs": 2, "enable_checkpointing": True, "callbacks": [averages, saving]}

    whole, trainer = fit(PL, tmp_path, strategy(), Resumable(), **options())
    first, last = ((tmp_path / "saved").glob(f"*step={step}.ckpt") for step in (8, 16))
    resumed, _ = fit(PL, tmp_path, strategy(), Resumable(), ckpt_path=next(first), **options())
    assert resumed.losses == whole.losses[8:] and same_bits(resumed, whole)
    (expected,) = trainer.test(whole, loader(2, 5), verbose=False)  # at the end of a run the module has them
    evaluating = trainer_over(PL, tmp_path, strategy())
    assert evaluating.test(module_over(PL), loader(2, 5), ckpt_path=next(last), verbose=False) == [expected]


def test_the_last_checkpoint_is_found(tmp_path, strategy):
    def saving():
        return PL.callbacks.ModelCheckpoint(tmp_path / "saved", save_last=True)

    options = {"enable_checkpointing": True, "ckpt_path": "last"}
    fit(PL, tmp_path, strategy(), max_epochs=2, callbacks=[saving()], **options)
    module, trainer = fit(PL, tmp_path, strategy(), max_epochs=3, callbacks=[saving()], **options)
    assert len(module.losses) == 8
    assert trainer.strategy.engine.global_step == 24


def test_checkpoints_on_another_file_system_are_complete_when_older_ones_go_and_when_the_run_ends(tmp_path, strategy):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if Path(elsewhere).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("the tests' directory is in memory, too")
        saving = PL.callbacks.ModelCheckpoint(elsewhere, every_n_train_steps=2, save_top_k=1)
        whole, _ = fit(PL, tmp_path, strategy(), Resumable(7), callbacks=[saving], enable_checkpointing=True)
        (path,) = Path(elsewhere).iterdir()
        resumed, _ = fit(PL, tmp_path, strategy(), Resumable(7), ckpt_path=path)
        assert resumed.losses == whole.losses[6:]
        assert same_bits(resumed, whole)


def test_what_is_saved_after_fit_goes_on_with_the_same_bits(tmp_path, strategy):
    _, trainer = fit(PL, tmp_path, strategy())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    whole, _ = fit(PL, tmp_path, strategy(), max_epochs=2)
    resumed, again = fit(PL, tmp_path, strategy(), ckpt_path=tmp_path / "end.ckpt", max_epochs=2)
    assert again.strategy.engine.global_step == 16
    assert resumed.losses == whole.losses[8:]
    assert same_bits(resumed, whole)


def test_weights_alone_are_one_file_as_of_any_strategy(tmp_path, strategy):
    module, trainer = fit(PL, tmp_path, strategy())
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert (tmp_path / "weights.ckpt").is_file()
    loaded = type(module).load_from_checkpoint(tmp_path / "weights.ckpt")
    assert same_bits(loaded, module)


def test_a_run_of_another_strategy_goes_on_in_the_engine(tmp_path, strategy):
    def saving():
        return PL.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=3, save_top_k=-1)

    options = {"max_epochs": 1, "enable_checkpointing": True}
    fit(PL, tmp_path, "auto", Resumable(), callbacks=[saving()], **options)
    (path,) = (tmp_path / "saved").glob("*step=3.ckpt")

    def no_dropout(self, batch, index):
        loss = loss_of(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    going_on = [
        fit(PL, tmp_path, made, Resumable(), module_over(PL, training_step=no_dropout), path, max_epochs=1)[0]
        for made in ("auto", strategy())
    ]
    assert len(going_on[1].losses) == 5
    assert going_on[1].losses == pytest.approx(going_on[0].losses, rel=1e-5)


def test_a_second_fit_begins_with_the_weights_of_the_first(tmp_path, strategy):
    plain, own = module_over(PL), module_over(PL)
    for module, chosen in ((plain, "auto"), (own, strategy())):
        trainer = trainer_over(PL, tmp_path, chosen)
        trainer.fit(module, loader(), loader(2, 5))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader(), loader(2, 5))
    assert len(own.losses) == 16
    assert own.losses == pytest.approx(plain.losses, rel=1e-5)


def test_a_search_for_the_learning_rate_leaves_the_weights_as_they_were(tmp_path, strategy):
    found = []
    for chosen in ("auto", strategy()):
        module, trainer = module_over(PL, lr=1e-3), trainer_over(PL, tmp_path, chosen)
        before = bits(module)
        search = PL.tuner.Tuner(trainer).lr_find(module, loader(4), num_training=4, update_attr=False)
        assert all(torch.equal(value, before[name]) for name, value in bits(module).items())
        found.append(search.results["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_module_that_is_built_without_memory_has_the_weights_that_it_would_have(tmp_path, strategy):
    def __init__(self):
        PL.LightningModule.__init__(self)
        self.dropout, self.losses, self.net = torch.nn.Dropout(0.2), [], None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(0)
            self.net = deferred_init(Tiny, width=32, num_blocks=NUM_BLOCKS, vocab=VOCAB)
            torch.manual_seed(1)

    plain, _ = fit(PL, tmp_path, strategy())
    module = module_over(PL, __init__=__init__, configure_model=configure_model)
    assert not list(module.parameters())
    own, _ = fit(PL, tmp_path, strategy(), module=module)
    assert own.losses == plain.losses


def test_an_empty_module_takes_its_weights_from_a_checkpoint(tmp_path, strategy):
    module, trainer = fit(PL, tmp_path, strategy())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    evaluating = trainer_over(PL, tmp_path, strategy())
    with evaluating.init_module(empty_init=True):
        empty = module_over(PL)
    assert all(parameter.is_meta for parameter in empty.parameters())
    evaluating.validate(empty, loader(2, 5), ckpt_path=tmp_path / "end.ckpt", verbose=False)
    assert same_bits(empty, module)


def test_parts_of_two_checkpoints_are_told_apart(tmp_path, strategy):
    _, trainer = fit(PL, tmp_path, strategy())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.strategy.engine.save_checkpoint(tmp_path / "end.ckpt", "engine", client_state="another")
    with pytest.raises(ConfigError, match="being replaced"):
        fit(PL, tmp_path, strategy(), ckpt_path=tmp_path / "end.ckpt")
    (tmp_path / "end.ckpt" / "trainer.ckpt").unlink()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        fit(PL, tmp_path, strategy(), ckpt_path=tmp_path / "end.ckpt")


def test_an_older_checkpoint_is_removed_when_the_next_one_is_complete(tmp_path, strategy, monkeypatch):
    order = []
    remove, wait = PL.strategies.ParallelStrategy.remove_checkpoint, OffloadEngine.wait_for_checkpoint
    monkeypatch.setattr(
        PL.strategies.ParallelStrategy,
        "remove_checkpoint",
        lambda self, path: (order.append("remove"), remove(self, path)),
    )
    monkeypatch.setattr(OffloadEngine, "wait_for_checkpoint", lambda self: (order.append("wait"), wait(self)))
    saving = PL.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=3, save_top_k=1, monitor=None)
    fit(PL, tmp_path, strategy(), callbacks=[saving], enable_checkpointing=True, limit_val_batches=0)
    assert order == ["wait", "remove", "wait"]  # the last one: the end of the run
    assert [entry.name for entry in (tmp_path / "saved").iterdir()] == ["epoch=0-step=6.ckpt"]


def test_an_update_that_failed_is_raised_at_the_end_and_closes_the_engine(tmp_path, strategy, monkeypatch):
    def fails(self):
        raise StorageIOError("the disk says no")

    monkeypatch.setattr(OffloadEngine, "synchronize", fails)
    chosen = strategy()
    with pytest.raises(StorageIOError, match="the disk says no"):
        fit(PL, tmp_path, chosen)
    with pytest.raises(OffloadError, match="no engine"):
        _ = chosen.engine


def two(self):
    return [torch.optim.SGD(self.net.embed.parameters(), 0.1), torch.optim.SGD(self.net.head.parameters(), 0.1)]


def lbfgs(self):
    return torch.optim.LBFGS(self.parameters())


def none(self):
    return None


def of_another(self):
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)


def manual(self, batch, index):
    return None


@pytest.mark.parametrize(
    ("configure", "says"),
    [
        (two, "2 optimizers, and the engine takes over one"),
        (lbfgs, "LBFGS cannot run one parameter at a time"),
        (none, "no optimizer over the module's parameters"),
        (of_another, "no optimizer over the module's parameters"),
    ],
)
def test_optimizers_that_the_engine_cannot_take_over_are_refused(tmp_path, strategy, configure, says):
    module = module_over(PL, configure_optimizers=configure, training_step=manual)
    module.automatic_optimization = configure is not two
    before = bits(module)
    with pytest.raises(ConfigError, match=says):
        fit(PL, tmp_path, strategy(), module=module)
    assert all(torch.equal(before[name], value) for name, value in bits(module).items())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"precision": "bf16-mixed"}, 'Write precision="bf16-true"'),
        ({"precision": "64-true"}, "expected one of 32-true, bf16-true, 16-true"),
    ],
)
def test_trainers_that_the_engine_cannot_serve_are_refused(tmp_path, strategy, options, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        trainer_over(PL, tmp_path, strategy(), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 1e-3}, "lr=...): leave it out, configure_optimizers says it"),
        ({"gradient_clipping": 1.0}, "Trainer(gradient_clip_val=...)"),
        ({"durable": 1}, "ModelCheckpoint"),
        ({"host_memori": 1}, "did you mean 'host_memory'"),
    ],
)
def test_options_that_belong_elsewhere_are_refused_when_the_strategy_is_made(tmp_path, options, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        OffloadStrategy(nvme_path=tmp_path, **options)


def test_a_checkpoint_on_another_machine_is_refused(tmp_path, strategy):
    _, trainer = fit(PL, tmp_path, strategy())
    with pytest.raises(ConfigError, match="local file systems"):
        trainer.save_checkpoint("memory://saved.ckpt")


def test_a_budget_that_is_too_small_leaves_the_module_as_it_was(tmp_path, strategy):
    module = module_over(PL)
    with pytest.raises(BudgetError):
        fit(PL, tmp_path, strategy(host_memory=1), module=module)
    assert module(loader(1).dataset[0][0]).shape[-1] == VOCAB


def test_memory_stays_below_the_states_that_are_trained_and_saved(tmp_path):
    gc.collect()
    forked.import_ahead("lightning.pytorch")
    done = forked.run_script(CHILD, tmp_path)
    assert done.returncode == 0, done.stderr
    grown, state = map(int, done.stdout.split()[-2:])
    assert state > 100 << 20
    assert grown < state * 2 / 3


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "example.py"
    file.write_text(example)
    names = runpy.run_path(str(file))
    assert names["trainer"].global_step == 40
    assert Path(names["trainer"].checkpoint_callback.best_model_path, "engine").is_dir()
    names["trainer"].strategy.close()


def test_a_module_keeps_its_engine_whichever_trainer_runs_it_and_its_copy_has_none(tmp_path, strategy):
    own, trainer = fit(PL, tmp_path, strategy())
    engine = trainer.strategy.engine
    trainer.validate(module_over(PL), loader(2, 5), verbose=False)
    assert trainer.strategy.engine is not engine
    copied = copy.deepcopy(own)
    (expected,) = trainer_over(PL, tmp_path, "auto").validate(copied, loader(2, 5), verbose=False)
    for other in (trainer, trainer_over(PL, tmp_path, strategy())):
        (found,) = other.validate(own, loader(2, 5), verbose=False)
        assert found == expected
        assert other.strategy.engine is engine
    with pytest.raises(ConfigError, match="give both trainers one precision"):
        trainer_over(PL, tmp_path, strategy(), precision="bf16-true").validate(own, loader(2, 5), verbose=False)
    fit(PL, tmp_path, "auto", module=copied)
    fit(PL, tmp_path, strategy(), module=own)
    assert len(own.losses) == 16
