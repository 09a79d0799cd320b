"""Activations over the tiers: the bits of the engine without, and nothing left behind."""

from __future__ import annotations

import copy
import ctypes
import pickle
import random
import types
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tiny import Tiny, batches, loss_of, train
from torch import backends, nn
from torch.utils.checkpoint import checkpoint

from offload import ActivationError, ConfigError, OffloadEngine, OffloadError, StorageIOError
from offload.model.forward_state import State
from offload.model.scripted import stopped_in_script
from offload.tiers.activations.pool import ActivationPool
from offload.torch_internals import can_swap_memory

MODES = {
    "recompute": {"activations": "recompute"},
    "host": {"activations": "host", "activation_memory": "1MiB"},
    "nvme": {"activations": "nvme", "activation_memory": "64KiB"},
    "each its own": {
        "activations": {"blocks.[01]": "nvme", "blocks.2": "recompute", "*": "host"},
        "activation_memory": "1MiB",
    },
}


def pool_of(engine: OffloadEngine) -> ActivationPool:
    (pool,) = engine._session.parts.activations.pools
    return pool


def left_in(engine: OffloadEngine) -> tuple[int, int]:
    pool_of(engine).drain()
    return pool_of(engine).taken_bytes, pool_of(engine).nvme_bytes


def same(left: object, right: object) -> bool:
    (losses, weights), (others, other_weights) = left, right  # type: ignore[misc]
    return losses == others and all(torch.equal(weights[name], other_weights[name]) for name in weights)


class Odd(nn.Module):
    """A block that draws, counts, keeps statistics, remembers, takes a cache and asks whether two arguments are one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_calls, self.seen = 0, []

    def forward(
        self, x: torch.Tensor, twin: torch.Tensor, *, cache: Cache, scales: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        x = x if twin is x else 2 * twin
        self.num_calls += 1
        self.seen.append(self.num_calls)
        hidden = self.norm(x.transpose(1, 2)).transpose(1, 2)
        past = cache.add(hidden)
        hidden = torch.nn.functional.gelu(self.up(hidden + past)) * (1 + 0.1 * random.random() + 0.01 * self.num_calls)
        return x + self.drop(self.down(hidden)) * scales["scale"]


class Cache:
    """As the caches of keys and values: what is added is there from then on."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def add(self, value: torch.Tensor) -> torch.Tensor:
        self.values.append(value.detach())
        return torch.stack(self.values).mean(0)


class OddModel(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd(128) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, cache = self.embed(tokens), Cache()
        scales = {"scale": x.detach().square().mean((1, 2), keepdim=True)}
        for block in self.blocks:
            x = block(x, x, cache=cache, scales=scales)
        return self.head(self.norm(x))


def odd_run(path: Path, **options: object) -> tuple[object, dict[str, torch.Tensor], list[object]]:
    torch.manual_seed(0)
    random.seed(0)
    model = OddModel()
    with OffloadEngine(model, nvme_path=path, host_memory="9MiB", lr=1e-2, **options) as engine:
        result = train(engine, 2)
        known = [(block.num_calls, list(block.seen)) for block in model.blocks]
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return result, buffers, [known, random.random(), torch.rand(1).item()]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_bits_of_keep_whatever_a_block_does_beside_computing(mode: str, tmp_path: Path):
    kept, recomputed = odd_run(tmp_path), odd_run(tmp_path, **MODES[mode])
    assert same(kept[0], recomputed[0])
    assert all(torch.equal(kept[1][name], recomputed[1][name]) for name in kept[1])
    assert kept[2] == recomputed[2]


@pytest.mark.parametrize("mode", ["host", "nvme"])
def test_nothing_is_left_after_a_step_and_the_report_says_what_was_moved(mode: str, make_model, tmp_path: Path):
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="8MiB", **MODES[mode]) as engine:
        train(engine, 1)
        assert left_in(engine) == (0, 0)
        use = engine.report().activations
        inputs = 4 * 4 * 16 * 128 * 4  # of four blocks; the norm's and the head's are saved outside of blocks
        assert use.kept_bytes == inputs + 2 * 4 * 16 * 128 * 4
        assert use.host_bytes_max <= pool_of(engine).memory.nbytes
        assert "activations: 0.2 MB kept" in str(engine.report())
        assert engine.plan.memory["activations"]["host"] == pool_of(engine).memory.nbytes
        if mode == "nvme":
            assert 0 < use.read_bytes < use.write_bytes <= use.kept_bytes
            assert use.write_bytes <= engine.report().nvme_write_bytes
            assert {"activations"} & {span.name for span in engine._session.meter.trace.last}
        tokens, _ = batches(1)[0]
        engine(tokens)  # nobody asks for a backward of it
        assert left_in(engine) == (0, 0)
        with torch.no_grad():
            engine(tokens)
        assert pool_of(engine).take_use().kept_bytes == use.kept_bytes


def test_what_stays_in_memory_does_not_grow_with_the_number_of_layers(make_model, tmp_path: Path):
    peaks = {}
    for num_blocks in (4, 12):
        options = {"activations": "nvme", "activation_memory": "128KiB", "host_memory": "12MiB"}
        with OffloadEngine(make_model(num_blocks=num_blocks), nvme_path=tmp_path, **options) as engine:
            train(engine, 1)
            peaks[num_blocks] = engine.report().activations.host_bytes_max
            assert engine.report().activations.nvme_bytes_max > (num_blocks - 4) * 4 * 16 * 128 * 4
    assert peaks[4] <= peaks[12] <= 128 << 10


def test_a_users_own_checkpoint_is_recomputed_once(tmp_path: Path):
    class Counting(Tiny):
        num_runs = 0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(self.run, block, x, use_reentrant=False)
            return self.head(self.norm(x))

        def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            self.num_runs += 1
            return block(x)

    results = []
    for options in ({}, MODES["nvme"]):
        torch.manual_seed(0)
        model = Counting()
        with OffloadEngine(model, nvme_path=tmp_path, host_memory="8MiB", **options) as engine:
            results.append(train(engine, 1))
            assert model.num_runs == 8
    assert same(*results)


def test_accumulated_retained_and_repeated_backwards_have_the_bits_of_keep(make_model, tmp_path: Path):
    found = []
    for options in ({}, MODES["nvme"]):
        model = make_model()
        model.blocks[2] = model.blocks[1]  # a unit that is used twice
        with OffloadEngine(model, nvme_path=tmp_path, host_memory="8MiB", **options) as engine:
            outputs = []
            for tokens, targets in batches(2):
                loss = loss_of(engine(tokens), targets)
                loss.backward(retain_graph=True)
                loss.backward()
                outputs.append(loss)  # kept
            engine.optimizer.step()
            found.append([parameter.detach().clone() for parameter in model.parameters()])
            if options:
                del loss, outputs
                assert left_in(engine) == (0, 0)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
def test_parts_of_one_memory_with_counters_of_their_own_are_kept_as_each_is(cell: type[nn.Module], tmp_path: Path):
    """The gates of a cell are written in place, each by a counter of its own, and saved at equal versions."""
    found = []
    for options in ({}, MODES["nvme"]):
        torch.manual_seed(0)
        model = nn.ModuleList([cell(64, 64), nn.Linear(64, 64)])
        with OffloadEngine(model, nvme_path=tmp_path, host_memory="8MiB", **options) as engine:
            x = torch.randn(96, 64)
            first = model[0](x)
            last = model[0](x, first)
            model[1](last if cell is nn.GRUCell else last[0]).square().mean().backward()
            found.append([parameter.grad.detach().clone() for parameter in model.parameters()])
            engine.optimizer.step()
            assert not options or engine.report().activations.kept_bytes > 0
    assert all(map(torch.equal, *found))


def test_a_change_in_place_of_what_was_kept_is_torchs_own_error(make_model, tmp_path: Path):
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="8MiB", **MODES["nvme"]) as engine:
        inputs = []
        engine.module.blocks[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        tokens, targets = batches(1)[0]
        loss = loss_of(engine(tokens), targets)
        with torch.no_grad():
            inputs[0].mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[4, 16, 128\]\] is at version 1"):
            engine.backward(loss)
        engine.optimizer.zero_grad()
        train(engine, 1)


class WritesToWhatIsSaved(nn.Module):
    """``tanh`` has saved its output, which is written to before ``down`` saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)).mul_(2))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_forward_that_writes_to_what_it_has_saved_is_torchs_own_error_in_a_second_run_too(activations: str):
    model = nn.Sequential(WritesToWhatIsSaved(), WritesToWhatIsSaved())
    error = pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\[3, 8\]\] is at version 1")
    with OffloadEngine(model, lr=0.1, precision="fp32", activations=activations) as engine, error:
        engine(torch.ones(3, 8)).sum().backward()


def test_a_fault_of_the_drive_is_one_typed_error_and_the_next_batch_trains(make_model, tmp_path: Path, monkeypatch):
    expected = None
    for fault in (None, "write", "read"):
        with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="8MiB", lr=1e-2, **MODES["nvme"]) as engine:
            if fault is not None:

                def fails(*args: object, **options: object) -> None:
                    raise StorageIOError("the drive says no")

                with monkeypatch.context() as patch:
                    patch.setattr(pool_of(engine).scratch, fault, fails)
                    tokens, targets = batches(1, seed=5)[0]
                    with pytest.raises(ActivationError, match="the drive says no"):
                        engine.backward(loss_of(engine(tokens), targets))
                engine.optimizer.zero_grad()
            result = train(engine, 2)
            assert left_in(engine) == (0, 0)
        expected = expected or result
        assert same(expected, result), fault


def test_too_little_memory_for_host_names_the_number_that_works(make_model, tmp_path: Path):
    options = {"nvme_path": tmp_path, "host_memory": "8MiB", "activations": "host"}
    with (
        OffloadEngine(make_model(), activation_memory="64KiB", **options) as engine,
        pytest.raises(ActivationError, match="activation_memory is too small") as caught,
    ):
        train(engine, 1)
    with OffloadEngine(make_model(), activation_memory=caught.value.needed_bytes, **options) as engine:
        train(engine, 2)


def test_a_budget_counts_what_is_set_aside(make_model, tmp_path: Path):
    from tiny import least_budget

    least = least_budget(make_model(), tmp_path)
    assert least_budget(make_model(), tmp_path, activations="nvme", activation_memory="1MiB") == least + (1 << 20)
    assert least_budget(make_model(), tmp_path, activations="recompute", activation_memory="1MiB") == least


def test_bad_options_are_refused_in_a_line(make_model, tmp_path: Path):
    for options, message in (
        ({"activations": "disk"}, "activations: expected one of 'keep', 'recompute', 'host', 'nvme'"),
        ({"activations": {"blocks.*": "nvm"}}, r"activations\['blocks.\*'\]: .*did you mean 'nvme'"),
        ({"activations": {"block.1": "host"}}, "no unit is called 'block.1'.*did you mean 'blocks.1'"),
        ({"activations": "nvme"}, "needs a place: give nvme_path"),
        ({"activation_memory": 1}, "activation_memory: expected at least 65536 bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            OffloadEngine(make_model(), **options)


def test_the_models_own_forward_is_there_in_copies_and_after_the_end(make_model, tmp_path: Path):
    model = make_model()
    with OffloadEngine(model, nvme_path=tmp_path, host_memory="8MiB", activations="recompute") as engine:
        tokens, _ = batches(1)[0]
        with torch.no_grad():
            expected = engine(tokens)
            assert torch.equal(copy.deepcopy(model)(tokens), expected)
            assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), expected)
    assert "forward" not in vars(model.blocks[0])


@torch.jit.script
def doubled_where_positive(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, 2 * x.sin(), x.sin())


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(16, 16), torch.jit.script(nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(doubled_where_positive(self.linear(x)))


@pytest.mark.parametrize("mode", ["recompute", "host", "nvme"])
def test_scripted_functions_run_again_in_backward(mode: str, tmp_path: Path):
    found = []
    for options in ({}, {"nvme_path": tmp_path, **MODES[mode]}):
        torch.manual_seed(0)
        with OffloadEngine(nn.Sequential(*(Scripted() for _ in range(4))), lr=1e-2, **options) as engine:
            losses = []
            for _ in range(4):  # by the third call the interpreter has compiled it
                loss = engine(torch.ones(2, 16)).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_an_error_of_a_scripted_function_in_a_second_run_is_told_as_it_is():
    @torch.jit.script
    def failing(x: torch.Tensor) -> torch.Tensor:
        return x.view(3)

    with pytest.raises(RuntimeError, match="invalid for input"), stopped_in_script():
        failing(torch.ones(4))


def test_a_second_run_finds_what_was_changed_after_the_first_as_it_was():
    module, seen = nn.BatchNorm1d(4), [1]
    state = State(module, [seen], "block")
    state.compare()
    module.eps, module.training = 0.5, False
    seen.append(2)
    with state.before():
        assert (module.eps, module.training, seen) == (1e-5, True, [1])
    assert (module.eps, module.training, seen) == (0.5, False, [1, 2])


class ByKernels(nn.Linear):
    """Its result tells by which kernels it is computed."""

    def forward(self, x):
        factor = {"ieee": 1.0, "bf16": 0.5, "tf32": 2.0}[backends.mkldnn.matmul.fp32_precision]
        return torch.tanh(super().forward(x) * (factor if backends.mkldnn.enabled else -factor))


class Curved(nn.Module):
    """Differentiates within its forward, twice, while it draws, counts and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.num_moments = 0
        self.register_buffer("seen", torch.zeros(1))

    def moment(self) -> torch.Tensor:
        self.num_moments += 1
        self.seen.add_(1)
        return self.seen.clone() + self.num_moments + random.random()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        energy = self.down(torch.tanh(self.up(x)) * self.moment()).tanh().square().sum()
        (slope,) = torch.autograd.grad(energy * self.moment(), x, create_graph=True)
        (curve,) = torch.autograd.grad((slope * self.moment()).tanh().sum(), x, create_graph=True)
        return x + (slope + curve) * self.moment()


def test_a_backward_within_a_first_run_finds_what_that_run_began_with():
    def trained(mode: str) -> tuple[list[float], torch.Tensor, list[int]]:
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(Curved(), Curved())
        losses = []
        with OffloadEngine(model, lr=0.1, precision="fp32", activations=mode) as engine:
            for _ in range(2):
                loss = engine(torch.ones(3, 8)).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            return losses, model[1].seen.clone(), [block.num_moments for block in model]

    losses, seen, counts = trained("recompute")
    assert counts == [8, 8]
    assert (losses, seen, counts) == trained("keep")


@pytest.mark.skipif(not hasattr(backends.mkldnn, "matmul"), reason="torch >= 2.9 has formats within fp32 operations")
@pytest.mark.parametrize("together", [False, True])
def test_a_forward_has_its_own_settings_of_kernels_in_a_second_run_and_beside_others(together: bool):
    found = []
    precision = backends.mkldnn.matmul.fp32_precision
    for trains in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(ByKernels(32, 32), nn.Tanh()) for _ in range(4)))
        x = torch.randn(8, 32)

        def body(index: int, model: nn.Module = model, x: torch.Tensor = x) -> None:
            with backends.mkldnn.flags(enabled=bool(index)):
                backends.mkldnn.matmul.fp32_precision = ("ieee", "bf16")[index]
                y = model(x)
            backends.mkldnn.matmul.fp32_precision = "tf32"
            y.sum().backward()
            backends.mkldnn.matmul.fp32_precision = precision

        if not trains:
            body(0)
            body(1)
            found.append([p.grad.clone() for p in model.parameters()])
            continue
        with OffloadEngine(model, optimizer="sgd", lr=0.1, precision="fp32", activations="recompute") as engine:
            for _ in range(2):  # the first micro-batch of all runs alone
                engine.optimizer.zero_grad()
                if together:
                    engine.together([0, 1], body)
                else:
                    body(0)
                    body(1)
                found.append([p.grad.clone() for p in model.parameters()])
    for plain, *ours in zip(*found, strict=True):
        assert all(torch.equal(plain, one) for one in ours)
    assert backends.mkldnn.enabled and backends.mkldnn.matmul.fp32_precision == precision


class Enlarges(nn.Linear):
    """Whether denormal numbers are flushed shows in its result, and in what it saves."""

    def forward(self, x):
        return torch.tanh(1e37 * (super().forward(x) * 1e-20 * 1e-18))


def test_a_second_run_flushes_denormal_numbers_where_the_first_did():
    found = []
    for trains in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(Enlarges(32, 32), nn.Linear(32, 32)) for _ in range(4)))
        with OffloadEngine(model, precision="fp32", activations="recompute") if trains else nullcontext():
            torch.set_flush_denormal(True)
            y = model(torch.randn(64, 32))
            torch.set_flush_denormal(False)
            y.sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


class Counter:
    def __init__(self) -> None:
        self.calls, self.of_each = 0, {"outputs": [0]}


def test_a_second_run_finds_nested_containers_and_objects_of_a_module_as_they_were():
    module = nn.BatchNorm1d(4)
    module.seen, module.counter = {"inputs": [1]}, Counter()
    state = State(module, [], "block")
    module.running_mean.fill_(1.0)
    module.register_buffer("late", torch.ones(1))
    module.seen["inputs"].append(2)
    module.counter.calls = 1
    module.counter.of_each["outputs"].append(1)
    state.compare()
    after = module.running_mean
    with state.before():
        assert (module.seen, module.counter.calls) == ({"inputs": [1]}, 0)
        assert module.counter.of_each == {"outputs": [0]}
        assert module.running_mean.tolist() == [0.0] * 4
        assert "late" not in module._buffers
        module.running_mean.fill_(1.0)
    assert (module.seen, module.counter.calls) == ({"inputs": [1, 2]}, 1)
    assert module.running_mean is after
    assert after.tolist() == [1.0] * 4


def test_each_run_of_a_graph_that_is_retained_finds_what_moves_in_place_as_the_first_one_did():
    module = nn.BatchNorm1d(4)
    module.scales = iter([1, 2, 3])
    state = State(module, [], "block")
    module.running_mean.add_(1.0)
    assert next(module.scales) == 1
    state.compare()
    for _ in range(3):
        with state.before():
            assert module.running_mean.tolist() == [0.0] * 4
            module.running_mean.add_(1.0)
            assert next(module.scales) == 1
    assert module.running_mean.tolist() == [1.0] * 4
    assert next(module.scales) == 2


CALLS = {"all": 0}


class CountingInAGlobal(Odd):
    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        CALLS["all"] += 1
        return super().forward(*args, **kwargs) * (1 + 0.1 * (CALLS["all"] % 5))


def test_a_second_run_leaves_globals_and_closures_of_forwards_and_hooks_as_they_were(tmp_path: Path):
    found = []
    for options in ({}, {"activations": "recompute"}):
        CALLS["all"], seen, sums, number = 0, [], defaultdict(float), 0
        torch.manual_seed(0)
        random.seed(0)
        model = OddModel()
        model.blocks = nn.ModuleList(CountingInAGlobal(128) for _ in range(4))

        def hook(module: nn.Module, args: object, seen=seen, sums=sums) -> None:
            nonlocal number
            number += 1
            seen.append(number)
            sums[number % 3] += 1.0

        for block in model.blocks:
            block.up.register_forward_pre_hook(hook)
        with OffloadEngine(model, nvme_path=tmp_path, host_memory="9MiB", lr=1e-2, **options) as engine:
            found.append((train(engine, 2), CALLS["all"], seen, dict(sums), number))
    assert same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert found[0][1] == found[0][4] == 8


class Tally:
    calls = 0

    @classmethod
    def count(cls) -> int:
        cls.calls += 1
        return cls.calls


REPLACED, WRITTEN = torch.zeros(()), torch.zeros(())
AS_MODULE = types.ModuleType("as_module")
exec("calls = 0\n\ndef count():\n    global calls\n    calls += 1\n    return calls", vars(AS_MODULE))


class CountingElsewhere(Odd):
    """It counts in a class that it names, in tensors that are globals, and by a function of another module."""

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        global REPLACED
        REPLACED = REPLACED + 1
        WRITTEN.add_(1)
        calls = Tally.count() + REPLACED.item() + WRITTEN.item() + AS_MODULE.count()
        return super().forward(*args, **kwargs) * (1 + 0.1 * (calls % 7))


def test_a_second_run_leaves_classes_tensors_and_modules_of_python_that_a_forward_names_as_they_were():
    global REPLACED
    found = []
    for options in ({}, {"activations": "recompute"}):
        Tally.calls = AS_MODULE.calls = 0
        REPLACED = torch.zeros(())
        WRITTEN.zero_()
        torch.manual_seed(0)
        random.seed(0)
        model = OddModel()
        model.blocks = nn.ModuleList(CountingElsewhere(128) for _ in range(4))
        with OffloadEngine(model, lr=1e-2, **options) as engine:
            found.append((train(engine, 2), Tally.calls, REPLACED.item(), WRITTEN.item(), AS_MODULE.calls))
    assert same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:] == (8, 8, 8, 8)


DRAWS = torch.Generator()


class Drawing(Odd):
    """It draws from a generator that is a global, through a function of torch's that the program has replaced, and
    counts in a slot."""

    __slots__ = ("calls",)

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        noise = torch.rand((), generator=DRAWS) + nn.functional.celu(torch.ones(()))
        return super().forward(*args, **kwargs) * (1 + 0.1 * noise + 0.1 * self.calls)


def test_a_second_run_finds_generators_of_globals_and_slots_as_the_first_one_did(monkeypatch: pytest.MonkeyPatch):
    own = torch.Generator()
    monkeypatch.setattr(nn.functional, "celu", lambda x: x * torch.rand(x.shape, generator=own))
    found = []
    for options in ({}, {"activations": "recompute"}):
        DRAWS.manual_seed(1)
        own.manual_seed(2)
        torch.manual_seed(0)
        random.seed(0)
        model = OddModel()
        model.blocks = nn.ModuleList(Drawing(128) for _ in range(4))
        with OffloadEngine(model, lr=1e-2, **options) as engine:
            trained = train(engine, 2)
            found.append((trained, DRAWS.get_state().tolist(), own.get_state().tolist(), model.blocks[0].calls))
    assert same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_a_large_tensor_outside_of_modules_that_a_forward_writes_to_is_an_error():
    large = torch.zeros(1 << 19)

    class Writing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            large.add_(1)
            return super().forward(x) * (1 + large[0])

    module = Writing(4, 4)
    state = State(module, [], "block")
    module(torch.ones(1, 4))
    with pytest.raises(ConfigError, match="a tensor outside of modules in place"):
        state.compare()


def test_a_buffer_that_is_written_between_the_two_runs_is_an_error_unless_the_first_wrote_it_too():
    for first_writes in (True, False):
        module = nn.BatchNorm1d(4)
        state = State(module, [], "block")
        if first_writes:
            module.running_mean.fill_(1.0)
        state.compare()
        module.running_mean.fill_(2.0)
        if first_writes:
            with state.before():
                assert module.running_mean.tolist() == [0.0] * 4
            assert module.running_mean.tolist() == [2.0] * 4
        else:
            with pytest.raises(OffloadError, match="running_mean was changed after"), state.before():
                pass


class Written(nn.Sequential):
    """Its forward writes to a weight, in the way that is given."""

    how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "data":
            self[0].weight.data = self[0].weight.data * 0.9
        elif self.how == "bytes":
            self[0].weight.data.mul_(0.9)
        elif self.how == "no_grad":
            with torch.no_grad():
                self[0].weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("how", ["data", "no_grad", "bytes", "between", "bytes between"])
def test_a_weight_that_two_runs_would_find_different_is_an_error(how: str):
    torch.manual_seed(0)
    blocks = [Written(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(6)]
    with OffloadEngine(nn.Sequential(*blocks), activations="recompute") as engine:
        for _ in range(2):  # a write is found in any use, and not in the first alone
            engine(torch.ones(2, 32)).sum().backward()
        blocks[3].how = how
        if how in ("data", "no_grad") or (how == "bytes" and not can_swap_memory()):  # bytes of a copy are looked at
            with pytest.raises(ConfigError, match=r'unit 3: its forward writes to its weights.*"3": "keep"'):
                engine(torch.ones(200, 32))
            return
        loss = engine(torch.ones(2, 32)).sum()
        if "between" in how:
            with torch.no_grad():
                (blocks[3][2].bias.data if "bytes" in how else blocks[3][2].bias).mul_(0.5)
        written = "0.weight" if how == "bytes" else "2.bias"
        with pytest.raises(OffloadError, match=rf"3\.{written} was changed after a forward had begun and before"):
            loss.backward()


class Centred(nn.Sequential):
    """Its centre moves as its backward begins, as that of clusters that a backward's hook brings up to date."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.register_buffer("centre", torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x - self.centre)
        y.register_hook(lambda _: self.move())
        return y

    def move(self) -> None:
        self.centre.data.mul_(0.5)


def test_a_buffer_that_a_backward_hook_writes_to_through_data_is_an_error_where_the_forward_runs_again():
    blocks = [Centred(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3)]
    with OffloadEngine(nn.Sequential(*blocks), activations="recompute") as engine:
        loss = engine(torch.randn(2, 32)).sum()
        with pytest.raises(OffloadError, match=r"unit 2: centre was changed after a forward had begun and before its"):
            loss.backward()


class Pair(tuple):
    """A tuple that is not to be taken for one."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


class Strict(list):
    def __len__(self) -> int:
        raise NotImplementedError

    __iter__ = __eq__ = __contains__ = None


class WithPairs(nn.Sequential):
    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.pairs = Strict([Pair((1, "even")), Pair((2, "odd"))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pairs.append(Pair((3, x.mean().item())))
        return super().forward(x) + list.__len__(self.pairs)


def test_containers_that_refuse_to_be_looked_at_are_looked_at_by_the_methods_of_the_built_in_ones():
    losses = {}
    for activations in ("keep", "recompute"):
        torch.manual_seed(0)
        blocks = [WithPairs(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3)]
        with OffloadEngine(nn.Sequential(*blocks), activations=activations) as engine:
            found = losses[activations] = []
            for _ in range(2):
                loss = engine(torch.ones(2, 32)).square().mean()
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            found += engine.together([torch.ones(1, 32)] * 2, lambda x: engine(x).square().mean().item())
            assert list.__len__(blocks[0].pairs) == 6
    assert losses["recompute"] == losses["keep"]


def test_memory_of_large_tensors_goes_back_when_they_are_freed(make_model, tmp_path: Path):
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("another C library than glibc, or an older one")
    libc.mallinfo2.restype = type("Figures", (ctypes.Structure,), {"_fields_": [("of", ctypes.c_size_t * 10)]})

    def mapped_bytes() -> int:
        return int(libc.mallinfo2().of[4])

    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="8MiB", **MODES["nvme"]):
        torch.empty(16 << 20, dtype=torch.uint8)  # glibc takes smaller ones from the heap after that, if nobody says no
        before, tensors = mapped_bytes(), []
        while mapped_bytes() < before + (8 << 20) and len(tensors) < 64:  # first from what the heap has free
            tensors.append(torch.empty(8 << 20, dtype=torch.uint8))
        assert mapped_bytes() >= before + (8 << 20)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_within_a_transform_has_the_gradients_of_plain_torch(mode: str, tmp_path: Path):
    """Tensors of a transform have no memory of their own, and no second run finds them: blocks keep."""
    x, v = torch.randn(2, 160, 32, generator=torch.Generator().manual_seed(1))

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        value, tangent = torch.func.jvp(model, (x,), (v,))
        (value - (v - tangent).detach()).square().mean().backward()
        torch.func.vmap(model)(x.view(2, 80, 32)).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def build() -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4))
        return nn.Sequential(*blocks)

    expected = gradients(build())
    options = {**MODES[mode], **({"nvme_path": tmp_path} if "nvme" in str(MODES[mode]) else {})}
    if isinstance(options["activations"], dict):
        options["activations"] = {"0": "nvme", "1": "recompute", "*": "host"}
    with OffloadEngine(build(), optimizer="sgd", lr=0.1, precision="fp32", **options) as engine:
        assert all(map(torch.equal, gradients(engine.module), expected))
