"""Programs around Lightning: what modules and callbacks do between the trainer and the model."""

import copy
import functools
import logging

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from misuses.case import Family
from misuses.place import values
from offload import BudgetError

family = Family(
    "lightning",
    needs=("lightning",),
    preload=(
        "lightning.pytorch.callbacks",
        "lightning.pytorch.loggers",
        "lightning.pytorch.tuner",
        "lightning.fabric",
        "offload.integrations.lightning",
        "torch.optim.swa_utils",
    ),
)

WIDTH = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@functools.cache
def _module():
    """The class: lightning is imported by those alone who run these cases."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self, lr=1e-2):
            super().__init__()
            torch.manual_seed(0)
            self.save_hyperparameters()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
            self.blocks = nn.ModuleList(Block() for _ in range(5))
            self.found = []

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

        def training_step(self, batch, index):
            loss = F.mse_loss(self(batch[0]), batch[1])
            self.found.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            loss = F.mse_loss(self(batch[0]), batch[1])
            self.found.append(loss.item())
            self.log("val_loss", loss)

        test_step = validation_step

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01, eps=1e-4)

    return Module


def loader(rows=24, seed=1, size=4):
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=size)


def _trainer(place, host_memory, **options):
    import lightning.pytorch as pl

    strategy = "auto"
    if place.has_engine:
        from offload.integrations.lightning import OffloadStrategy

        strategy = OffloadStrategy(nvme_path=place.folder, host_memory=host_memory, tile_bytes=65536)
        place.left.append(strategy)
    given = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": place.folder,
    }
    return pl.Trainer(strategy=strategy, **{**given, **options})


def trainer_in(place, **options):
    """A trainer; on NVMe with the least budget for the module."""
    least = "auto"
    if place.name == "nvme":
        try:
            _trainer(place, 1, max_steps=1).fit(_module()(), loader())
        except BudgetError as error:
            least = error.needed_bytes
    return _trainer(place, least, **options)


def fit(place, module=None, val=False, ckpt=None, **options):
    module, trainer = module or _module()(), trainer_in(place, **options)
    torch.manual_seed(5)
    trainer.fit(module, loader(), loader(8, 2) if val else None, ckpt_path=ckpt)
    return module, trainer


def result(module, trainer, *more):
    """Losses, all values, and what else is compared."""
    return module.found, values(module), list(more)


def _average(how):
    import lightning.pytorch as pl

    class Average(pl.Callback):
        def on_fit_start(self, trainer, module):
            self.ema = {name: p.detach().clone() for name, p in module.named_parameters()}

        def on_train_batch_end(self, trainer, module, *a):
            with torch.no_grad():
                for name, p in module.named_parameters():
                    self.ema[name].lerp_(p, 0.2)

        def on_validation_epoch_start(self, trainer, module):
            if not hasattr(self, "ema"):
                return
            if how == "data":
                self.kept = {name: p.data for name, p in module.named_parameters()}
                for name, p in module.named_parameters():
                    p.data = self.ema[name]
            elif how == "copy":
                self.kept = {name: p.detach().clone() for name, p in module.named_parameters()}
                with torch.no_grad():
                    for name, p in module.named_parameters():
                        p.copy_(self.ema[name])
            else:
                self.kept = copy.deepcopy(module.state_dict())
                module.load_state_dict(self.ema)

        def on_validation_epoch_end(self, trainer, module):
            if not hasattr(self, "ema"):
                return
            if how == "data":
                for name, p in module.named_parameters():
                    p.data = self.kept[name]
            elif how == "copy":
                with torch.no_grad():
                    for name, p in module.named_parameters():
                        p.copy_(self.kept[name])
            else:
                module.load_state_dict(self.kept)

        def state_dict(self):
            return {"ema": getattr(self, "ema", None)}

        def load_state_dict(self, s):
            self.loaded = s["ema"]

    return Average()


@family.works("`StochasticWeightAveraging`")
def lightning_swa(place):
    import lightning.pytorch as pl

    return result(
        *fit(
            place,
            val=True,
            max_epochs=4,
            callbacks=[pl.callbacks.StochasticWeightAveraging(swa_lrs=0.001, swa_epoch_start=2, annealing_epochs=1)],
        )
    )


@family.works("`EMAWeightAveraging`")
def lightning_ema_weight_averaging(place):
    import lightning.pytorch as pl

    return result(*fit(place, val=True, max_epochs=3, callbacks=[pl.callbacks.EMAWeightAveraging(decay=0.8)]))


@family.works("an average of the weights in a callback, exchanged by `.data` around validation")
def lightning_ema_by_data(place):
    callback = _average("data")
    module, trainer = fit(place, val=True, callbacks=[callback])
    return result(module, trainer, callback.ema)


@family.works("an average of the weights in a callback, copied in and out around validation")
def lightning_ema_by_copy(place):
    callback = _average("copy")
    module, trainer = fit(place, val=True, callbacks=[callback])
    return result(module, trainer, callback.ema)


@family.works("an average of the weights in a callback, by `load_state_dict` around validation")
def lightning_ema_by_state_dict(place):
    callback = _average("state_dict")
    module, trainer = fit(place, val=True, callbacks=[callback])
    return result(module, trainer, callback.ema)


@family.works("`AveragedModel(module)` in a callback")
def lightning_averaged_model(place):
    import lightning.pytorch as pl

    class Watch(pl.Callback):
        def on_fit_start(self, trainer, module):
            self.avg = torch.optim.swa_utils.AveragedModel(module)

        def on_train_batch_end(self, trainer, module, *a):
            self.avg.update_parameters(module)

    callback = Watch()
    module, trainer = fit(place, callbacks=[callback])
    return result(module, trainer, values(callback.avg))


@family.works("`LearningRateMonitor` with groups that have names")
def lightning_lr_monitor_names(place):
    import lightning.pytorch as pl

    class Own(_module()):
        def configure_optimizers(self):
            return torch.optim.SGD(
                [
                    {"params": self.first.parameters(), "lr": 0.01, "name": "head"},
                    {"params": self.blocks.parameters(), "name": "body"},
                    {"params": self.last.parameters(), "name": "tail"},
                ],
                lr=0.001,
                momentum=0.9,
            )

    callback = pl.callbacks.LearningRateMonitor("step")
    module, trainer = fit(
        place, Own(), callbacks=[callback], logger=pl.loggers.CSVLogger(place.folder / "log"), log_every_n_steps=1
    )
    return result(module, trainer, {kept: list(v) for kept, v in callback.lrs.items()})


@family.works("`GradientAccumulationScheduler` with clipping")
def lightning_accumulation_scheduler(place):
    import lightning.pytorch as pl

    return result(
        *fit(
            place,
            max_epochs=3,
            gradient_clip_val=0.3,
            callbacks=[pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4, 2: 2})],
        )
    )


@family.works("manual optimization with `clip_gradients`")
def lightning_manual(place):

    class Own(_module()):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            loss = F.mse_loss(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.found.append(loss.item())

    return result(*fit(place, Own()))


@family.works("manual optimization: a step at every second batch, norms read, a scheduler stepped by hand")
def lightning_manual_accumulation(place):

    class Own(_module()):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            loss = F.mse_loss(self(batch[0]), batch[1]) / 2
            self.manual_backward(loss)
            self.found.append(loss.item())
            if (index + 1) % 2 == 0:
                self.found.append(torch.stack([p.grad.norm() for p in self.parameters()]).norm().item())
                optimizer.step()
                optimizer.zero_grad()
                self.lr_schedulers().step()

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)])

    return result(*fit(place, Own()))


@family.refused("manual optimization with two optimizers", "takes over one")
def lightning_two_optimizers(place):

    class Own(_module()):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return (torch.optim.SGD(self.blocks.parameters(), 0.01), torch.optim.SGD(self.last.parameters(), 0.01))

        def training_step(self, batch, index):
            for optimizer in self.optimizers():
                loss = F.mse_loss(self(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.found.append(loss.item())

    return result(*fit(place, Own()))


@family.works("sharpness-aware steps by hand: weights are moved, and moved back")
def lightning_sam_manual(place):

    class Own(_module()):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            loss = F.mse_loss(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.found.append(loss.item())
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
                old = [p.detach().clone() for p in self.parameters()]
                for p in self.parameters():
                    p.add_(p.grad * (0.05 / norm))
            optimizer.zero_grad()
            self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
            with torch.no_grad():
                for p, q in zip(self.parameters(), old, strict=True):
                    p.copy_(q)
            optimizer.step()

    return result(*fit(place, Own()))


@family.works("two losses in turns, one optimizer of two groups, `requires_grad_` around each")
def lightning_gan_one_optimizer(place):

    class Own(_module()):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return torch.optim.Adam(
                [
                    {"params": [*self.first.parameters(), *self.blocks.parameters()]},
                    {"params": self.last.parameters(), "lr": 0.001},
                ],
                lr=0.01,
                eps=0.0001,
            )

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            for p in self.last.parameters():
                p.requires_grad_(False)
            loss = F.mse_loss(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            for p in self.last.parameters():
                p.requires_grad_(True)
            with torch.no_grad():
                hidden = self.first(batch[0])
            second = F.mse_loss(self.last(hidden), batch[1])
            optimizer.zero_grad()
            self.manual_backward(second)
            optimizer.step()
            self.found += [loss.item(), second.item()]

    return result(*fit(place, Own()))


@family.works("`configure_gradient_clipping` with torch's `clip_grad_norm_`")
def lightning_configure_clipping_by_hand(place):

    class Own(_module()):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            n = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
            self.found.append(n.item())
            self.log("norm", n)

    return result(*fit(place, Own(), gradient_clip_val=0.2))


@family.works("`configure_gradient_clipping`: each gradient by the norm of its weight (AGC)")
def lightning_adaptive_clipping(place):

    class Own(_module()):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            for p in self.parameters():
                if p.grad is None:
                    continue
                limit = p.detach().norm().clamp(min=0.001) * 0.05
                n = p.grad.norm()
                if n > limit:
                    p.grad.mul_(limit / n)

    return result(*fit(place, Own()))


@family.works("`grad_norm` in `on_before_optimizer_step`")
def lightning_norms_before_step(place):
    from lightning.pytorch.utilities import grad_norm

    class Own(_module()):
        def on_before_optimizer_step(self, optimizer):
            n = grad_norm(self, 2)
            self.log_dict(n)
            self.found.append({kept: float(v) for kept, v in n.items()})

    return result(*fit(place, Own(), gradient_clip_val=0.5))


@family.works("`nan_to_num(p.grad, out=p.grad)` in `on_after_backward`")
def lightning_nan_to_num(place):

    class Own(_module()):
        def on_after_backward(self):
            for p in self.parameters():
                if p.grad is not None:
                    torch.nan_to_num(p.grad, nan=0.0, posinf=100000.0, neginf=-100000.0, out=p.grad)

    return result(*fit(place, Own()))


@family.works("norms of gradients in `on_train_batch_end`")
def lightning_gradients_in_batch_end(place):

    class Own(_module()):
        def on_train_batch_end(self, *a):
            self.found.append([None if p.grad is None else p.grad.norm().item() for p in self.parameters()])

    return result(*fit(place, Own()))


@family.works("`ModelSummary` of all modules")
def lightning_model_summary(place):
    import lightning.pytorch as pl

    module = _module()()
    callback = pl.callbacks.ModelSummary(max_depth=-1)
    module.example_input_array = torch.zeros(2, WIDTH)
    module, trainer = fit(place, module, callbacks=[callback])
    s = pl.utilities.model_summary.ModelSummary(module, max_depth=2)
    return result(module, trainer, s.total_parameters, s.trainable_parameters, s.model_size, str(s))


@family.works("`EarlyStopping`, `ModelCheckpoint(monitor=...)`, and a test of the best")
def lightning_best_checkpoint(place):
    import lightning.pytorch as pl

    kept = pl.callbacks.ModelCheckpoint(
        place.folder / "ck", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.3f}"
    )
    module, trainer = fit(
        place,
        val=True,
        max_epochs=4,
        enable_checkpointing=True,
        callbacks=[kept, pl.callbacks.EarlyStopping("val_loss", patience=1)],
    )
    out = trainer.test(module, loader(8, 3), ckpt_path="best", verbose=False)
    return result(
        module,
        trainer,
        float(kept.best_model_score),
        out,
        kept.best_model_path.rpartition("/")[2],
        trainer.current_epoch,
    )


@family.refused(
    "`load_from_checkpoint` of a checkpoint with states, which is a folder", "directory", also=("IsADirectoryError",)
)
def lightning_load_from_checkpoint(place):
    import lightning.pytorch as pl

    kept = pl.callbacks.ModelCheckpoint(place.folder / "ck")
    module, trainer = fit(place, enable_checkpointing=True, callbacks=[kept])
    other = _module().load_from_checkpoint(kept.best_model_path)
    return result(module, trainer, values(other))


@family.works("`ckpt_path=`, with a callback that has a state of its own")
def lightning_resume(place):
    import lightning.pytorch as pl

    kept = pl.callbacks.ModelCheckpoint(place.folder / "ck", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    callback = _average("copy")
    module, trainer = fit(place, val=True, max_epochs=2, enable_checkpointing=True, callbacks=[kept, callback])
    if place.has_engine:
        trainer.strategy.close()
    again = _average("copy")
    module, trainer = fit(
        place,
        _module()(),
        val=True,
        max_epochs=4,
        enable_checkpointing=True,
        callbacks=[pl.callbacks.ModelCheckpoint(place.folder / "ck2"), again],
        ckpt=str(place.folder / "ck" / "epoch=1.ckpt"),
    )
    return result(module, trainer, again.loaded, again.ema, trainer.global_step)


@family.refused("`BackboneFinetuning`: frozen when the run begins, thawed at an epoch", "while it requires grad")
def lightning_backbone_finetuning(place):
    import lightning.pytorch as pl

    class Own(_module()):
        def __init__(self):
            super().__init__()

        @property
        def backbone(self):
            return self.blocks

        def configure_optimizers(self):
            return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01, eps=0.0001)

    return result(
        *fit(
            place,
            Own(),
            max_epochs=4,
            callbacks=[pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)],
        )
    )


@family.works("`ModelPruning`")
def lightning_pruning(place):
    import lightning.pytorch as pl

    return result(
        *fit(
            place,
            max_epochs=3,
            callbacks=[pl.callbacks.ModelPruning("l1_unstructured", amount=0.3, parameters_to_prune=None)],
        )
    )


@family.works("`optimizer_step` sets the learning rate by hand")
def lightning_warm_up(place):

    class Own(_module()):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if self.trainer.global_step < 4:
                for group in optimizer.param_groups:
                    group["lr"] = min(1.0, (self.trainer.global_step + 1) / 4) * self.hparams.lr
            optimizer.step(closure=optimizer_closure)

    return result(*fit(place, Own()))


@family.works("`optimizer_step` calls the closure alone at every second batch")
def lightning_optimizer_step_alternate(place):

    class Own(_module()):
        def optimizer_step(self, epoch, index, optimizer, closure):
            if index % 2 == 0:
                optimizer.step(closure=closure)
            else:
                closure()

    return result(*fit(place, Own()))


@family.works("`ReduceLROnPlateau` by a metric of validation")
def lightning_plateau(place):

    class Own(_module()):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
                    "monitor": "val_loss",
                },
            }

    module, trainer = fit(place, Own(), val=True, max_epochs=4)
    return result(module, trainer, trainer.optimizers[0].param_groups[0]["lr"])


@family.works("`Tuner.lr_find`, then `fit`")
def lightning_lr_find(place):
    import lightning.pytorch as pl

    module = _module()()
    trainer = trainer_in(place)
    search = pl.tuner.Tuner(trainer).lr_find(module, loader(), num_training=10, update_attr=False, attr_name="lr")
    losses = list(search.results["loss"])
    trainer.fit(module, loader())
    return result(module, trainer, losses)


@family.works("`training_step` returns None for some batches")
def lightning_returns_none(place):

    class Own(_module()):
        def training_step(self, batch, index):
            return None if index % 3 == 1 else super().training_step(batch, index)

    return result(*fit(place, Own()))


@family.works("validation differentiates by its inputs")
def lightning_adversarial_validation(place):

    class Own(_module()):
        def validation_step(self, batch, index):
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_()
                loss = F.mse_loss(self(x), batch[1])
                (slope,) = torch.autograd.grad(loss, x)
            self.found.append(F.mse_loss(self(batch[0] + 0.1 * slope.sign()), batch[1]).item())

    return result(*fit(place, Own(), val=True, inference_mode=False))


@family.works("a layer's `reset_parameters` at an epoch's begin")
def lightning_reinit_head(place):

    class Own(_module()):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                torch.manual_seed(9)
                self.last.reset_parameters()

    return result(*fit(place, Own()))


@family.works("a `deepcopy` of blocks as a teacher, made in `on_fit_start`")
def lightning_teacher_in_fit_start(place):

    class Own(_module()):
        def on_fit_start(self):
            self.__dict__["teacher"] = copy.deepcopy(self.blocks).eval().requires_grad_(False)

        def training_step(self, batch, index):
            hidden = self.first(batch[0])
            target = hidden.detach()
            for block in self.blocks:
                hidden = block(hidden)
            for block in self.teacher:
                target = block(target)
            loss = F.mse_loss(hidden, target) + F.mse_loss(self.last(hidden), batch[1])
            self.found.append(loss.item())
            return loss

    return result(*fit(place, Own()))


@family.works("a penalty on all weights in the loss")
def lightning_penalty(place):

    class Own(_module()):
        def training_step(self, batch, index):
            return super().training_step(batch, index) + 0.001 * sum(p.abs().sum() for p in self.parameters())

    return result(*fit(place, Own()))


@family.works("`Fabric.setup(engine.module, engine.optimizer)`: clipping, `save`, `load`")
def fabric_setup(place):
    from lightning.fabric import Fabric

    f = Fabric(accelerator="cpu", devices=1)
    f.launch()
    net = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(WIDTH, 1))
    engine = place.wrap(net, lr=0.01)
    module, optimizer = f.setup(engine.module, engine.optimizer)
    found = []
    for batch in f.setup_dataloaders(loader()):
        loss = F.mse_loss(module(batch[0]), batch[1])
        f.backward(loss)
        f.clip_gradients(module, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    f.save(place.folder / "c.pt", {"model": module, "optimizer": optimizer, "step": 3})
    s = f.load(place.folder / "c.pt")
    return (found, values(net), s["model"])


@family.works("`Fabric.load` into model and optimizer")
def fabric_load(place):
    from lightning.fabric import Fabric

    f = Fabric(accelerator="cpu", devices=1)
    f.launch()
    net = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(WIDTH, 1))
    engine = place.wrap(net, lr=0.01)
    module, optimizer = f.setup(engine.module, engine.optimizer)
    found = []

    def go():
        for batch in f.setup_dataloaders(loader()):
            loss = F.mse_loss(module(batch[0]), batch[1])
            f.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())

    go()
    f.save(place.folder / "c.pt", {"model": module, "optimizer": optimizer})
    go()
    f.load(place.folder / "c.pt", {"model": module, "optimizer": optimizer})
    go()
    return (found, values(net))


@family.works("fitted by one trainer, validated by a second, fitted by a third; a copy in between")
def lightning_one_module_three_trainers(place):
    module, _ = fit(place, max_epochs=1)
    found = trainer_in(place).validate(module, loader(8, 2), verbose=False)
    copied = values(copy.deepcopy(module))
    _, trainer = fit(place, module, max_epochs=1)
    return result(module, trainer, found, copied)


@family.works("one trainer fits a module, then another, and evaluates both")
def lightning_one_trainer_two_modules(place):
    first, trainer = fit(place, max_epochs=1)
    second = _module()()
    trainer.fit_loop.epoch_progress.reset()
    trainer.fit(second, loader())
    found = [trainer.validate(module, loader(8, 2), verbose=False) for module in (first, second, first)]
    return result(second, trainer, found, values(first))


@family.works(
    "persistent metrics of `torchmetrics` in the module, resumed in the middle of an epoch", needs=("torchmetrics",)
)
def lightning_resumes_metrics(place):
    import lightning.pytorch as pl
    import torchmetrics

    def run(checkpoint=None):
        module = _module()()
        module.error, module.kept = torchmetrics.MeanAbsoluteError(), torchmetrics.CatMetric()
        module.error.persistent(True)
        module.kept.persistent(True)

        def training_step(batch, batch_idx):
            output = module(batch[0])
            module.error.update(output, batch[1])
            module.kept.update(output.detach())
            return F.mse_loss(output, batch[1])

        module.training_step = training_step
        saving = pl.callbacks.ModelCheckpoint(place.folder / "ck", "{step}", every_n_train_steps=4, save_top_k=-1)
        fit(place, module, ckpt=checkpoint, enable_checkpointing=True, callbacks=[saving])
        return values(module), module.error.compute(), module.kept.compute()

    return run(), run(place.folder / "ck" / "step=4.ckpt")
