"""From the engine to the launch of a GPU's kernels, without a GPU: the CUDA classes over a driver that is strict."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_rig import Call
from fake_driver import ILLEGAL_ADDRESS, MISALIGNED, FakeDriver, Stand, compiled
from gpu_emulator import Emulator
from speculative_updates import let_gradients_come_first
from tiny import Tiny, batches, loss_of, train

from offload import BudgetError, OffloadEngine, kernels, waiting
from offload.device import cuda, driver, pinned
from offload.device import programs as gpu_programs
from offload.device.driver import Context, DriverError
from offload.device.programs import GpuPrograms
from offload.dtypes import kernel_dtype
from offload.errors import WaitTimeout
from offload.interrupts import held_back
from offload.kernels.gpu import GpuKernels
from offload.kernels.nvrtc import CompilerMissing
from offload.native_optimizers import SgdCoef
from offload.report.report import LinkRates, MemoryRates
from offload.testing.simulated import SimulatedDevice
from offload.testing.stream import SimulatedStream
from offload.tiers import bandwidth
from offload.tiers.window import DeviceWindow
from offload.units import UnitSpec
from offload.update.speculative import SpeculativeUpdates
from offload.update.step import UnitUpdate


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch, num_devices=2)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(gpu_programs, "compile_kernels", compiled)
    return FakeDriver()


@pytest.fixture
def tensor(fake: FakeDriver) -> Callable[[int], torch.Tensor]:
    """Makes tensors in memory of the GPU, which live as long as the test."""

    kept = []

    def make(numel: int) -> torch.Tensor:
        kept.append(torch.ones(numel))
        fake.lend(0, kept[-1].data_ptr(), kept[-1].nbytes)
        return kept[-1]

    return make


@pytest.fixture
def page() -> Iterator[int]:
    """The address of a page of host memory."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    yield torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def step(native: Callable[[str], kernels.Kernel], weight: int, grad: int, numel: int) -> None:
    coef = SgdCoef(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.01, step=1)
    dtypes = {"grad_dtype": kernels.Dtype.F32, "weight_dtype": kernels.Dtype.F32}
    kernels.update(coef, numel, grad=grad, weight=weight, native=native, **dtypes)


def in_new_thread(call: Callable[[], Any]) -> BaseException | None:
    """What ``call`` raises in a thread that has not used CUDA."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


# The engine over the kernels' text for GPUs.


def test_the_engine_trains_by_the_kernels_text_for_gpus(
    make_model: Callable[..., Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = GpuKernels(Emulator())

    def sum_squares(stream: Any, source: Any, ranges: Any, lanes: Any, sums: Any) -> None:
        tensors = (source, ranges, lanes, sums)
        of_source, of_ranges, of_lanes, of_sums = (tensor.data_ptr() for tensor in tensors)
        num_blocks = lanes.numel() // kernels.SQUARES_LANES
        gpu.sum_squares(kernel_dtype(source.dtype), of_source, of_ranges, len(ranges), of_lanes, num_blocks, of_sums)

    with OffloadEngine(make_model(), gradient_clipping=0.1) as engine:
        expected, weights = train(engine)
    monkeypatch.setattr(SimulatedStream, "kernel", lambda stream, name: gpu.kernel(name))
    monkeypatch.setattr(SimulatedStream, "sum_squares", sum_squares)
    with OffloadEngine(make_model(), gradient_clipping=0.1, device=SimulatedDevice()) as engine:
        assert len(engine.plan.device.resident) == 7
        losses, found = train(engine)
    assert losses == expected and all(torch.equal(found[name], value) for name, value in weights.items())


# The engine over the CUDA classes.


def make_offloaded(make_model: Callable[..., Tiny], path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes engines whose tiles rest on the host, and that send most of them to the device for their updates."""
    monkeypatch.setattr(bandwidth, "measure_link", lambda *_: LinkRates(1e15, 1e15))

    def make(device: Any, **budgets: int) -> OffloadEngine:
        options = {"nvme_path": path, "tile_bytes": 64 << 10, "lr": 1e-3, "gradient_clipping": 0.1, **budgets}
        return OffloadEngine(make_model(num_blocks=8), device=device, **options)

    return make


def least(make: Callable[..., OffloadEngine]) -> int:
    with pytest.raises(BudgetError) as caught:
        make(device_memory=1)
    return caught.value.needed_bytes


def test_the_cuda_classes_train_with_the_bits_of_the_cpu(
    make_model: Callable[..., Tiny], stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the second of two GPUs: resident units, and tiles of the host that the update's own thread sends there."""
    make = make_offloaded(make_model, tmp_path, monkeypatch)
    with make("cpu") as engine:
        expected, weights = train(engine)
    for share in (None, 4):
        device = stand.device(1)
        budgets = {} if share is None else {"device_memory": share * least(partial(make, device))}
        with make(device, **budgets) as engine:
            assert (len(engine.plan.device.resident) == len(engine.plan.units)) == (share is None)
            losses, found = train(engine)
            assert stand.driver.num_registered >= 1
        assert losses == expected and all(torch.equal(found[name], value) for name, value in weights.items())
        assert stand.driver.num_registered == 0
    assert len(stand.driver.threads) > 1 and {index for index, _ in stand.driver.launches} == {1}


def test_the_cuda_classes_update_early_with_the_bits_of_the_cpu(
    make_model: Callable[..., Tiny], stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As much as may be is on NVMe, tiles are updated on the GPU, and nothing is clipped."""
    make = partial(make_offloaded(make_model, tmp_path, monkeypatch), gradient_clipping=1e9)
    with make("cpu") as engine:
        expected, weights = train(engine)
    begun: set[str] = set()
    begin = SpeculativeUpdates.begin

    def tell(speculative: SpeculativeUpdates, unit: UnitSpec, update: UnitUpdate | None) -> bool:
        begun.update([unit.name] if update is not None else [])
        return begin(speculative, unit, update)

    monkeypatch.setattr(SpeculativeUpdates, "begin", tell)
    device = stand.device()
    budgets = {"device_memory": least(partial(make, device))}
    with pytest.raises(BudgetError) as caught:
        make(device, host_memory=1, **budgets)
    let_gradients_come_first(monkeypatch)
    with make(device, host_memory=caught.value.needed_bytes, **budgets) as engine:
        streamed = [item.unit.name for item in engine.plan.units if item.streamed]
        losses, found = train(engine)
    assert losses == expected and all(torch.equal(found[name], value) for name, value in weights.items())
    assert len(streamed) > 8 and begun == set(streamed)


def test_a_launch_without_a_bound_context_is_found(
    make_model: Callable[..., Tiny], stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by a device guard of torch's, which binds nothing where the GPU is the current one already."""
    monkeypatch.setattr(Context, "_bound", lambda context: contextlib.nullcontext())
    make = make_offloaded(make_model, tmp_path, monkeypatch)
    monkeypatch.setattr(bandwidth, "measure_memory", lambda *_: MemoryRates())  # its copies would find it first
    with pytest.warns(UserWarning, match="invalid device context"), make(stand.device()) as engine:
        assert "invalid device context" in str(engine.plan)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    make_model: Callable[..., Tiny], stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = make_offloaded(make_model, tmp_path, monkeypatch)
    with make("cpu") as engine:
        expected, _ = train(engine)
    stand.driver.plant("cuMemHostRegister_v2", 2)
    said = pytest.warns(UserWarning, match=r"could not be pinned: .*out of memory \(2\)")
    with said as warnings, make(stand.device()) as engine:
        assert train(engine)[0] == expected
    assert len(warnings) == 1 and stand.driver.count("cuMemHostUnregister") == 0


def test_a_failure_that_the_runtime_remembers_is_found(
    make_model: Callable[..., Tiny], stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by ``cudaHostRegister``: the next work on the GPU raises it."""
    monkeypatch.setattr(cuda, "runtime_of", lambda index: pinned._Hip())
    make, raised = make_offloaded(make_model, tmp_path, monkeypatch), pytest.raises(RuntimeError, match="CUDA error 2")
    with pytest.warns(UserWarning, match="could not be pinned"), raised:
        with_runtime = make(stand.device(), device_memory=2 << 20)
        with with_runtime:
            train(with_runtime)


def test_host_memory_is_pinned_from_any_thread_and_for_its_gpu(stand: Stand, page: int) -> None:
    device = stand.device(1)
    assert in_new_thread(lambda: device.pin(page, mmap.PAGESIZE)) is None and stand.driver.num_registered == 1
    with pytest.warns(UserWarning, match="already mapped"):
        device.pin(page, mmap.PAGESIZE)
    assert in_new_thread(lambda: device.unpin(page)) is None and stand.driver.num_registered == 0
    assert stand.driver.num_bound == 0


def test_memory_that_a_gpu_may_still_write_to_stays_pinned(
    stand: Stand, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "WAIT_TIMEOUT_S", 0.01)
    device = stand.device()
    device.pin(page, mmap.PAGESIZE)
    device.new_stream().stream.hangs = True
    with pytest.raises(WaitTimeout, match="work on the GPU"):
        device.unpin(page)
    assert stand.driver.num_registered == 1


def test_kernels_of_tiles_go_before_those_of_the_model(stand: Stand) -> None:
    stand.device().new_stream()
    assert [stream.priority for stream in stand.cuda.streams] == [-1, -1, -1] and torch.cuda.current_stream(
        0
    ).priority == 0


# The link.


def test_the_link_is_measured_with_two_copies_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.tiers.bandwidth._SECONDS", 0.2)

    class Recorder:
        """A device whose copies and waits are noted."""

        torch_device = torch.device("cpu")
        allocated_bytes = 0

        def __init__(self) -> None:
            self.compute = self.to_device = self.to_host = self
            self.trace: list[str] = []
            self.seconds = 0.0

        def record(self) -> Any:
            return self

        def wait(self, event: Any = None) -> None:
            self.trace.append("wait")

        def seconds_since(self, earlier: Any) -> float:
            return 2.0

        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            self.trace.append("copy")
            self.seconds += 0.03

        def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
            storage.resize_(nbytes)

        def free(self, storage: torch.UntypedStorage) -> None:
            storage.resize_(0)

    recorder, host = Recorder(), torch.zeros(256)
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: recorder.seconds)
    window = DeviceWindow(256, torch.float32, recorder)  # type: ignore[arg-type]
    rates = bandwidth.measure_link(recorder, window, host.data_ptr(), len(host))  # type: ignore[arg-type]
    each_way = ["copy", "copy", "wait", "copy", "wait", "copy", "wait", "wait"]
    assert recorder.trace == ["wait", "wait", *each_way, *each_way]
    assert rates == LinkRates(4 * 1024 / 2, 4 * 1024 / 2)


# The driver.


def test_programs_are_compiled_once_and_launched_with_their_arguments(
    fake: FakeDriver, tensor: Callable[[int], torch.Tensor]
) -> None:
    programs = GpuPrograms(fake.context(), "12.8")
    assert programs.unsupported_reason() is None
    weight, expected, grad = tensor(1000), torch.ones(1000), tensor(1000)
    for native, target in ((programs.on(fake.stream()).kernel, weight), (kernels.on_host, expected)):
        for _ in range(2):
            step(native, target.data_ptr(), grad.data_ptr(), 1000)
    assert torch.equal(weight, expected) and fake.launches == [(0, "update"), (0, "update")]
    assert fake.count("cuModuleLoadData") == fake.count("cuModuleGetFunction") == 1 and fake.num_bound == 0


def test_a_thread_that_has_not_used_cuda_launches(fake: FakeDriver, tensor: Callable[[int], torch.Tensor]) -> None:
    kernel = GpuPrograms(fake.context(), "12.8").on(0).kernel
    weight, grad = tensor(8).data_ptr(), tensor(8).data_ptr()
    assert in_new_thread(lambda: step(kernel, weight, grad, 8)) is None


@pytest.mark.parametrize(
    ("past", "numel", "status"),
    [
        (2, 4, MISALIGNED),
        (0, 9, ILLEGAL_ADDRESS),  # one element more than there are
        (4 << 10, 8, ILLEGAL_ADDRESS),
    ],
)
def test_a_wrong_address_is_found_and_stays(
    fake: FakeDriver, tensor: Callable[[int], torch.Tensor], past: int, numel: int, status: int
) -> None:
    kernel = GpuPrograms(fake.context(), "12.8").on(fake.stream()).kernel("sgd")
    weight, grad = tensor(8).data_ptr(), tensor(8).data_ptr()
    for wrong in (past, 0):  # the second is right, in a context whose GPU has failed
        with pytest.raises(DriverError) as caught:
            kernel(kernels.Sweep([1.0, 0.0, 0.0], numel, grad, 0, 0, 0, weight + wrong, 0, [0, 0, 0], [0, 0, 0], 0, 0))
        assert caught.value.status == status
    assert fake.num_bound == 0


def test_threads_that_work_for_another_gpu_make_no_context_on_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, num_devices=2)
    device = stand.device(1)
    memory = torch.zeros(2, 8)

    def work() -> None:
        stream = device.new_stream()
        before = stream.record()
        stream.copy(memory[0], memory[1])
        with device.current(device.new_compute_stream()):
            pass
        after = stream.record()
        after.wait()
        assert after.done() and after.seconds_since(before) == 0.001
        assert stand.cuda.current_device() == 0, "what the thread's own code asks of torch goes where it went"

    Call(work).result()
    assert stand.cuda.contexts == {1}


THREAD_LOCAL = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``."""


def test_a_graph_that_another_thread_captures_refuses_nothing_of_the_engine_s(stand: Stand, page: int) -> None:
    device = stand.device()
    stand.driver.capture(True)
    with pytest.raises(RuntimeError, match="capturing"):
        torch.cuda.Event().query()  # which is why
    device.pin(page, 4096)
    kernel = device.compute.kernel("sgd")  # compiled and loaded when it is launched first
    kernel(kernels.Sweep([1.0, 0.0, 0.0], 0, 0, 0, 0, 0, 0, 0, [0, 0, 0], [0, 0, 0], 0, 0))
    assert device.kernels_unsupported_reason() is None
    event = device.to_host.record()
    event.wait()
    assert event.done()
    modes: list[int] = []

    class Watched(torch.UntypedStorage):
        def resize_(self, nbytes: int) -> None:
            modes.append(stand.driver.capture_mode)
            super().resize_(nbytes)

    storage = Watched(0)
    device.allocate(storage, 64)
    device.free(storage)
    device.unpin(page)
    assert modes[0] == THREAD_LOCAL
    assert stand.driver.num_registered == 0
    assert stand.driver.capture_mode == 0, "the thread's own captures are as they were"


def test_a_stream_of_another_gpu_is_refused(stand: Stand) -> None:
    kernel = GpuPrograms(stand.driver.context(0), "12.8").on(stand.driver.stream(1)).kernel
    memory = torch.ones(8)
    stand.driver.lend(0, memory.data_ptr(), memory.nbytes)
    with pytest.raises(DriverError, match=r"cuLaunchKernel failed on cuda:0: invalid resource handle \(400\)"):
        step(kernel, memory.data_ptr(), memory.data_ptr(), 8)


def test_what_the_driver_says_is_told(fake: FakeDriver) -> None:
    fake.plant("cuModuleLoadData", 2)
    programs = GpuPrograms(fake.context(), "12.8")
    assert programs.unsupported_reason() == "cuModuleLoadData failed on cuda:0: out of memory (2)"
    fake.plant("cuModuleLoadData", 12345)
    assert programs.unsupported_reason() == "cuModuleLoadData failed on cuda:0: unknown error (12345)"
    fake.plant("cuModuleLoadData", 0)
    assert programs.unsupported_reason() is None
    kernel = programs.on(fake.stream()).kernel("sgd")
    kernel(
        kernels.Sweep([1.0, 0.0, 0.0], 0, 0, 0, 0, 0, 0, 0, [0, 0, 0], [0, 0, 0], 0, 0)
    )  # no elements: nothing is launched
    assert fake.launches == [] and fake.num_bound == 0


def test_a_missing_compiler_or_driver_is_an_obstacle(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any) -> bytes:
        raise CompilerMissing("libnvrtc.so.12 is not installed")

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    without_cuda = "this torch is built without CUDA, and ROCm's compiler (hipRTC) is not used"
    assert GpuPrograms(fake.context(), None).unsupported_reason() == without_cuda
    with monkeypatch.context() as patch:
        patch.setattr(gpu_programs, "compile_kernels", missing)
        assert GpuPrograms(fake.context(), "12.8").unsupported_reason() == "libnvrtc.so.12 is not installed"
    driver.installed.cache_clear()
    monkeypatch.setattr(driver.ctypes, "CDLL", no_library)
    said = GpuPrograms(Context(0), "12.8").unsupported_reason()
    assert said == "there is no CUDA driver: libcuda.so.1: cannot open shared object file"


def test_a_gpu_that_is_not_there_is_said(fake: FakeDriver) -> None:
    assert (
        GpuPrograms(fake.context(3), "12.8").unsupported_reason()
        == "cuDeviceGet failed on cuda:3: invalid device ordinal (101)"
    )


# Signals.


def test_an_interrupt_during_backward_is_raised_when_it_is_queued_and_the_batch_can_be_repeated(
    make_model: Callable[..., Tiny], stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU backward runs on autograd's own thread; the main one, which alone handles signals, waits in C++."""
    on_this_thread = torch.autograd.backward

    def on_its_own_thread(*args: Any, **options: Any) -> None:
        with held_back():
            raised = in_new_thread(lambda: on_this_thread(*args, **options))
        if raised is not None:
            raise raised

    def losses(interrupt: bool) -> list[float]:
        with OffloadEngine(make_model(), gradient_clipping=0.1, device=stand.device()) as engine:
            found = []
            for tokens, targets in batches(3):
                if interrupt:
                    loss = loss_of(engine(tokens), targets)
                    loss.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGINT))
                    with pytest.raises(KeyboardInterrupt):
                        engine.backward(loss)
                    engine.optimizer.zero_grad()
                loss = loss_of(engine(tokens), targets)
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            return found

    monkeypatch.setattr(torch.autograd, "backward", on_its_own_thread)
    assert losses(interrupt=True) == losses(interrupt=False)
