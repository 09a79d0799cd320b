import re
import runpy
from pathlib import Path

import accelerate
import forked
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration, load_state_dict
from accelerate_script import VOCAB, Noisy, Script, same_bits
from tiny import Tiny, batches, loss_of
from torch import nn

from offload import ConfigError, OffloadConfig, OffloadEngine, OffloadError
from offload.integrations.accelerate import OffloadAccelerator
from offload.model.gradient_handle import GradientHandle

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "integrations" / "accelerate.md"


@pytest.fixture(autouse=True)
def _as_in_a_new_program():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture
def accelerator(tmp_path):
    made = []

    def make(offload=None, **options):
        offload = {"nvme_path": tmp_path, "host_memory": 1 << 20, **(offload or {})}
        made.append(OffloadAccelerator(cpu=True, offload=offload, **options))
        return made[-1]

    yield make
    for item in made:
        item.free_memory()


def plain(**options):
    return Accelerator(cpu=True, **options)


@pytest.mark.parametrize(("steps", "max_norm"), [(1, None), (2, 0.5), (3, 0.5)])
def test_a_script_has_the_losses_of_the_run_in_memory(accelerator, steps, max_norm):
    theirs = Script(plain(gradient_accumulation_steps=steps))
    theirs.train(max_norm=max_norm)
    ours = Script(accelerator(gradient_accumulation_steps=steps))
    ours.train(max_norm=max_norm)
    assert len(ours.losses) == 8
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.accelerator.engine.global_step == -(-8 // steps)
    assert sum(ours.accelerator.engine.plan.nvme_bytes.values()) > 0
    assert ours.scheduler.get_last_lr() == theirs.scheduler.get_last_lr()


def test_the_norm_is_that_of_the_run_in_memory_and_no_gradient_is_read(accelerator, monkeypatch):
    def dispatch(cls, func, types, args=(), kwargs=None):
        called.add(func)
        return own(func, types, args, kwargs)

    own, called, norms = GradientHandle.__torch_dispatch__, set(), []
    monkeypatch.setattr(GradientHandle, "__torch_dispatch__", classmethod(dispatch))
    for made in (plain(), accelerator()):
        script = Script(made)
        batch = next(iter(script.loader))
        made.backward(loss_of(script.model(batch["x"]), batch["y"]))
        norms.append(made.clip_grad_norm_(script.model.parameters(), 0.5).item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert not called


def test_the_norm_of_some_parameters_is_theirs(accelerator):
    norms = []
    for made in (plain(), accelerator()):
        script = Script(made)
        batch = next(iter(script.loader))
        made.backward(loss_of(script.model(batch["x"]), batch["y"]))
        norms.append(made.clip_grad_norm_(script.model.net.head.parameters(), 0.5).item())
        norms.append(made.clip_grad_norm_(script.model.parameters(), 0.5, norm_type=1).item())
        norms.append(script.model.net.head.weight.grad.abs().sum().item())
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-4)


def test_gradients_are_clipped_by_value(accelerator):
    losses = []
    for made in (plain(), accelerator()):
        script = Script(made)
        made.clip_grad_norm_ = lambda parameters, limit, made=made: made.clip_grad_value_(parameters, limit)
        script.train(max_norm=1e-4)
        losses.append(script.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_resumed_script_has_the_bits_of_the_uninterrupted_one(accelerator, tmp_path):
    whole = Script(accelerator(gradient_accumulation_steps=2))
    whole.train(last=4)
    whole.accelerator.save_state(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))
    assert not list((tmp_path / "saved").glob("optimizer*"))
    whole.train(first=4)
    resumed = Script(accelerator(gradient_accumulation_steps=2))
    resumed.accelerator.load_state(tmp_path / "saved")
    resumed.train(first=4)
    assert resumed.losses == whole.losses[4:]
    assert same_bits(resumed.model, whole.model)
    assert resumed.accelerator.engine.global_step == 4
    assert resumed.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_a_state_that_is_saved_in_the_middle_of_an_accumulation_has_its_gradients(accelerator, tmp_path):
    whole = Script(accelerator(gradient_accumulation_steps=4))
    whole.train(last=3)
    whole.accelerator.save_state(tmp_path / "saved")
    whole.train(first=3)
    resumed = Script(accelerator(gradient_accumulation_steps=4))
    resumed.accelerator.load_state(tmp_path / "saved")
    resumed.train(first=3)
    assert resumed.losses == whole.losses[3:]
    assert same_bits(resumed.model, whole.model)


def test_states_that_are_named_by_accelerate_rotate(accelerator, tmp_path, monkeypatch):
    def waited(self):
        order.append("wait")
        wait(self)

    def removed(folder, **options):
        order.append(Path(folder).name)
        remove(folder, **options)

    order, wait, remove = [], OffloadEngine.wait_for_checkpoint, accelerate.accelerator.shutil.rmtree
    monkeypatch.setattr(OffloadEngine, "wait_for_checkpoint", waited)
    monkeypatch.setattr(accelerate.accelerator.shutil, "rmtree", removed)
    naming = {"project_dir": tmp_path / "p", "automatic_checkpoint_naming": True, "total_limit": 2}
    script = Script(accelerator(project_config=ProjectConfiguration(**naming)))
    for first in range(3):
        script.train(first, first + 1)
        script.accelerator.save_state()
    names = {entry.name for entry in (tmp_path / "p" / "checkpoints").iterdir()}
    assert names == {"checkpoint_1", "checkpoint_2"}
    assert [event for event in order if event in ("wait", "checkpoint_0")] == ["wait", "wait", "wait", "checkpoint_0"]
    resumed = Script(accelerator(project_config=ProjectConfiguration(**naming)))
    resumed.accelerator.load_state()
    assert resumed.accelerator.engine.global_step == 3
    assert same_bits(resumed.model, script.model)


def test_a_state_without_the_engine_goes_on_in_it(accelerator, tmp_path):
    theirs = Script(plain())
    theirs.train(last=4)
    theirs.accelerator.save_state(tmp_path / "saved")
    theirs.train(first=4)
    ours = Script(accelerator())
    ours.accelerator.load_state(tmp_path / "saved")
    ours.train(first=4)
    assert ours.losses == pytest.approx(theirs.losses[4:], rel=1e-5)


def test_hooks_of_a_script_see_the_model_and_may_take_its_weights_out(accelerator, tmp_path):
    script = Script(accelerator())
    seen = []

    def saving(models, weights, output_dir):
        seen.append(("save", list(models)))
        weights.pop()

    def loading(models, input_dir):
        seen.append(("load", [models.pop()]))

    script.accelerator.register_save_state_pre_hook(saving)
    script.accelerator.register_load_state_pre_hook(loading)
    script.train(last=2)
    script.accelerator.save_state(tmp_path / "saved")
    before = {name: value.clone() for name, value in script.model.state_dict().items()}
    script.train(first=2)
    script.accelerator.load_state(tmp_path / "saved")
    assert seen == [("save", [script.model]), ("load", [script.model])]
    assert all(torch.equal(before[name], value) for name, value in script.model.state_dict().items())
    assert script.accelerator.engine.global_step == 2


def test_other_models_and_their_optimizers_stay_accelerates(accelerator, tmp_path):
    script = Script(accelerator())
    torch.manual_seed(3)
    other = nn.Linear(4, 4)
    other, optimizer = script.accelerator.prepare(other, torch.optim.SGD(other.parameters(), 0.1))
    script.train(last=2)
    script.accelerator.save_state(tmp_path / "saved")
    assert {entry.name for entry in (tmp_path / "saved").iterdir()} >= {"model.safetensors", "optimizer.bin", "offload"}
    before = other.weight.detach().clone()
    script.accelerator.backward(other(torch.ones(1, 4)).sum())
    optimizer.step()
    assert not torch.equal(other.weight, before)
    script.accelerator.load_state(tmp_path / "saved")
    assert torch.equal(other.weight, before)
    assert script.accelerator.engine.module is script.model


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("offload", "options", "precision", "max_norm"),
    [
        ({}, {"mixed_precision": "bf16"}, "bf16", 0.5),
        ({"precision": "bf16"}, {}, "bf16", None),
        ({"precision": "fp16"}, {}, "fp16", 0.5),
    ],
)
def test_16_bit_weights_have_fp32_masters(accelerator, offload, options, precision, max_norm):
    script = Script(accelerator(offload, **options))
    assert script.accelerator.engine.config.precision == precision
    script.train(max_norm=max_norm)
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
    losses = []
    with OffloadEngine(model, optimizer=optimizer, precision=precision) as engine:
        torch.manual_seed(1)
        torch.empty((), dtype=torch.int64).random_()  # as a loader that begins an epoch
        for tokens, targets in batches(8, VOCAB):
            loss = loss_of(engine(tokens[:1]).float(), targets[:1])
            losses.append(loss.item())
            engine.backward(loss)
            if max_norm is not None:
                engine.clip_grad_norm_(max_norm)
            engine.step()
            scheduler.step()
        assert script.losses == losses
        assert same_bits(script.model, model)


def test_bf16_takes_fp32_inputs_and_gives_fp32_outputs(accelerator):
    made = accelerator(mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    model, _ = made.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    output = model(torch.ones(2, 8))
    assert output.dtype == torch.float32
    assert model[0].weight.dtype == torch.bfloat16


def test_what_is_prepared_is_the_same_model(accelerator, tmp_path):
    torch.manual_seed(0)
    model = Tiny(width=32, num_blocks=12, vocab=VOCAB)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = accelerator()
    prepared, optimizer = made.prepare(model, torch.optim.AdamW(model.parameters()))
    assert prepared is model
    assert made.unwrap_model(prepared) is model
    assert made.prepare(prepared, optimizer) == (prepared, optimizer)
    state = made.get_state_dict(prepared)
    assert all(torch.equal(state[name], value) for name, value in before.items())
    made.save_model(prepared, tmp_path / "model")
    loaded = load_state_dict(str(tmp_path / "model" / "model.safetensors"))
    assert loaded.keys() == before.keys()
    assert all(torch.equal(loaded[name], value) for name, value in before.items())


def test_a_model_for_evaluation_gets_an_engine_without_states(accelerator, tmp_path):
    torch.manual_seed(0)
    model = Tiny(width=32, num_blocks=12, vocab=VOCAB).eval()
    tokens = batches(1, VOCAB)[0][0]
    with torch.no_grad():
        expected = model(tokens)
    made = accelerator()
    prepared = made.prepare_model(model, evaluation_mode=True)
    with torch.no_grad():
        assert torch.equal(prepared(tokens), expected)
    script = Script(made)
    script.train(last=1)
    made.save_state(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))


def test_free_memory_closes_the_engine(accelerator):
    script = Script(accelerator())
    engine = script.accelerator.engine
    script.accelerator.free_memory()
    with pytest.raises(OffloadError, match="closed"):
        engine.synchronize()
        engine.report()
        engine(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(OffloadError, match="no engine yet"):
        _ = script.accelerator.engine


@pytest.mark.parametrize(
    ("offload", "says"),
    [
        ({"lr": 1e-3}, "leave lr out, the optimizer has it"),
        ({"gradient_accumulation_steps": 2}, "OffloadAccelerator(gradient_accumulation_steps=...)"),
        ({"device": "cuda"}, "accelerator.device"),
        ({"keep_last": 2}, "total_limit"),
        ({"host_memori": 1}, "did you mean 'host_memory'"),
    ],
)
def test_options_that_belong_elsewhere_are_refused(accelerator, offload, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        accelerator(offload)


def test_precision_that_is_said_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="leave one out"):
        OffloadAccelerator(cpu=True, mixed_precision="bf16", offload=OffloadConfig(precision="fp32"))


def test_an_optimizer_that_comes_after_its_model_is_refused(accelerator):
    made, model = accelerator(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = made.prepare(model)
    with pytest.raises(ConfigError, match="prepare both in one call"):
        made.prepare(optimizer)


def test_two_optimizers_of_one_model_are_refused(accelerator):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    halves = [torch.optim.SGD(part.parameters(), 0.1) for part in model]
    with pytest.raises(ConfigError, match="Sequential has 2 optimizers"):
        accelerator().prepare(model, *halves)


def test_lbfgs_is_refused_by_name(accelerator):
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="LBFGS cannot run one parameter at a time"):
        accelerator().prepare(model, torch.optim.LBFGS(model.parameters()))


def test_steps_of_accumulation_may_change(accelerator):
    losses = []
    for make in (plain, accelerator):
        script = Script(make(gradient_accumulation_steps=2))
        script.train(last=4)
        script.accelerator.gradient_accumulation_steps = 4
        script.train(first=4)
        losses.append(script.losses)
        script.accelerator.gradient_accumulation_steps = 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.skipif(not accelerate.utils.is_fp8_available(), reason="accelerate refuses it without a library of it")
def test_fp8_is_refused(accelerator):
    with pytest.raises(ConfigError, match="mixed_precision='fp8'"):
        accelerator(mixed_precision="fp8")


def test_a_launcher_that_compiles_the_whole_model_is_refused(accelerator, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(ConfigError, match="compile the model's blocks"):
        accelerator()


def test_a_mesh_of_accelerates_own_is_refused(accelerator):
    with pytest.raises(ConfigError, match="all processes are the engine's ranks"):
        accelerator(parallelism_config=accelerate.ParallelismConfig())


def test_memory_stays_below_the_states_that_are_trained_and_saved(tmp_path):
    forked.import_ahead("accelerate")
    done = forked.run_script(TESTS / "accelerate_child.py", tmp_path)
    assert done.returncode == 0, done.stderr
    grown, state = map(int, done.stdout.split()[-2:])
    assert state > 100 << 20
    assert grown < state * 2 / 3


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(example)
    names = runpy.run_path("example.py")
    assert names["accelerator"].engine.global_step == 20
    assert (tmp_path / "checkpoint" / "offload" / "engine").is_dir()
    names["accelerator"].free_memory()
