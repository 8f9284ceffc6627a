"""Callbacks of training loops: the posterior is the one of a fit by hand, and its scores are logged."""

import importlib
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sublaplace import SubspaceLaplace
from sublaplace.after_training import AfterTraining


def data(n=150):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    return x, (x[:, :3] + torch.randn(n, 3, generator=generator)).argmax(1)


def loaders():
    x, y = data()
    parts = (slice(0, 80), slice(80, 120), slice(120, 150))
    return [DataLoader(TensorDataset(x[part], y[part]), batch_size=20) for part in parts]


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("lightning", "lightning", "lightning"), ("transformers", "transformers", "huggingface")],
)
def test_without_the_package_the_extra_is_named(module, package, extra, monkeypatch):
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"sublaplace.{module}", raising=False)
    with pytest.raises(ImportError, match=re.escape(f"pip install 'sublaplace[{extra}]'")):
        importlib.import_module(f"sublaplace.{module}")


def test_a_network_in_training_mode_is_fitted_without_a_warning_and_stays_in_it():
    """Trainers leave their networks in training mode; nobody could heed a warning."""
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).train()
    ending = AfterTraining("classification", {"dim": 4})
    train_loader, val_loader, _ = loaders()
    with warnings.catch_warnings(action="error"):
        ending.fit(network, train_loader, val_loader, None, "")
    assert all(module.training for module in network.modules())
    assert ending.metrics["posterior/nll"] > 0


# Lightning ------------------------------------------------------------------------------------------------------------


def lightning_run(callback, folder, val_loader=None, epochs=6):
    """Train a small module, and return it with the folder of its logger."""
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x):
            return self.network(x)

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch, index):
            pass

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.05)

    from lightning.pytorch.loggers import CSVLogger

    torch.manual_seed(0)
    module, logger = Module(), CSVLogger(folder)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=logger,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loaders()[0], val_loader)
    return module, Path(logger.log_dir)


def callback_of_lightning(*args, **options):
    pytest.importorskip("lightning")
    from sublaplace.lightning import SubspaceLaplaceCallback

    return SubspaceLaplaceCallback(*args, **options)


def as_by_hand(posterior, model, train_loader, val_loader, x, **options):
    by_hand = SubspaceLaplace(model, "classification", **options).fit(train_loader, val_loader)
    assert posterior.prior_precision == by_hand.prior_precision
    assert torch.equal(posterior(x), by_hand(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("network", [None, lambda module: module.network], ids=["the module", "a part of it"])
def test_lightning_ends_with_the_posterior_and_logs_its_scores(network, tmp_path):
    train_loader, val_loader, _ = loaders()
    callback = callback_of_lightning("classification", network=network, dim=5)
    assert callback.posterior is None
    module, folder = lightning_run(callback, tmp_path, val_loader)
    x = data()[0][:5]
    as_by_hand(callback.posterior, module.network, train_loader, val_loader, x, dim=5)
    lines = (folder / "metrics.csv").read_text().splitlines()
    logged = dict(zip(lines[0].split(","), lines[-1].split(","), strict=True))
    scores = callback.posterior.evaluate(val_loader)
    assert float(logged["plain/nll"]) == pytest.approx(scores.plain.scores["nll"])
    assert float(logged["posterior/ece"]) == pytest.approx(scores.posterior.scores["ece"])
    assert callback.metrics["posterior/nll"] == scores.posterior.scores["nll"]


def test_lightning_scores_other_data_where_they_are_given(tmp_path):
    _, val_loader, test_loader = loaders()
    callback = callback_of_lightning("classification", val_loader=val_loader, test_loader=test_loader, dim=5)
    lightning_run(callback, tmp_path, epochs=2)
    assert callback.evaluation.num_inputs == 30
    assert callback.metrics == {
        f"{who}/{name}": value
        for who, judged in (("plain", callback.evaluation.plain), ("posterior", callback.evaluation.posterior))
        for name, value in judged.scores.items()
    }


def test_lightning_without_validation_data_says_so_and_fits(tmp_path):
    callback = callback_of_lightning("classification", dim=5)
    with pytest.warns(UserWarning, match="There are no validation data.*val_dataloaders"):
        lightning_run(callback, tmp_path, epochs=2)
    assert callback.posterior.dim == 5 and callback.evaluation is None and not callback.metrics


def test_lightning_refuses_wrong_options_before_the_training(tmp_path):
    callback = callback_of_lightning("classification", dim=-1)
    with pytest.raises(ValueError, match="dim must not be negative"):
        lightning_run(callback, tmp_path)
    assert callback.posterior is None


# Hugging Face ---------------------------------------------------------------------------------------------------------


class Texts(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(2, 20, (count, 6), generator=generator)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, place):
        words = self.words[place]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": int(words[0] > 10)}


def hugging_face_run(callback, folder, **arguments):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    trainer = transformers.Trainer(
        transformers.BertForSequenceClassification(config),
        transformers.TrainingArguments(
            folder,
            num_train_epochs=3,
            per_device_train_batch_size=16,
            learning_rate=0.01,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Texts(64, 0),
        eval_dataset=Texts(32, 1),
        callbacks=[callback],
    )
    trainer.train()
    return trainer


def callback_of_hugging_face(*args, **options):
    pytest.importorskip("transformers")
    from sublaplace.transformers import SubspaceLaplaceCallback

    return SubspaceLaplaceCallback(*args, **options)


def test_hugging_face_ends_with_the_posterior_and_logs_its_scores(tmp_path):
    fixed_order = DataLoader(Texts(64, 0), batch_size=16)
    callback = callback_of_hugging_face("classification", train_loader=fixed_order, dim=5)
    trainer = hugging_face_run(callback, tmp_path, eval_strategy="epoch")
    batch = next(iter(trainer.get_eval_dataloader()))
    as_by_hand(callback.posterior, trainer.model, fixed_order, trainer.get_eval_dataloader(), batch, dim=5)
    scores = callback.posterior.evaluate(trainer.get_eval_dataloader())
    logged = trainer.state.log_history[-1]
    assert logged["plain/nll"] == pytest.approx(scores.plain.scores["nll"])
    assert logged["posterior/ece"] == pytest.approx(scores.posterior.scores["ece"])
    assert logged["step"] == trainer.state.global_step == 12
    assert logged["plain/nll"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-4)


def test_hugging_face_without_validation_data_says_so_and_fits(tmp_path):
    callback = callback_of_hugging_face("classification", dim=5)
    with pytest.warns(UserWarning, match="There are no validation data.*eval_dataset"):
        trainer = hugging_face_run(callback, tmp_path)
    assert callback.posterior.dim == 5 and callback.evaluation is None
    assert "plain/nll" not in trainer.state.log_history[-1]


def test_hugging_face_refuses_wrong_options_before_the_training(tmp_path):
    callback = callback_of_hugging_face("classification", projector="none such")
    with pytest.raises(ValueError, match="Unknown projector"):
        hugging_face_run(callback, tmp_path)
    assert callback.posterior is None


def test_a_given_prior_leaves_the_validation_data_for_the_scores(tmp_path):
    callback = callback_of_hugging_face("classification", dim=5, prior_precision=3.0)
    hugging_face_run(callback, tmp_path, eval_strategy="epoch")
    assert callback.posterior.prior_precision == 3.0
    assert callback.evaluation.num_inputs == 32
