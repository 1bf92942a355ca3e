"""Flower's own example apps with our patches, under every policy: which of them run.

python benchmarks/flower_apps.py FLOWER   # a checkout of https://github.com/flwrlabs/flower

The apps' files are Flower's, with one of examples/patches applied. Only what they download is
replaced: data by small made-up sets with skewed labels, BERT by a tiny one, a metric by our own.
Six clients run in one process per app, two rounds per policy. --apps and --policies are lists with
commas.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, reduce
from importlib.machinery import ModuleSpec
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
from provenance import write
from script import arguments

ROOT = Path(__file__).parents[1]
PATCHES = ROOT / "examples" / "patches"
RESULT = Path(__file__).parent / "results" / "flower-apps.json"
CLIENTS, EXAMPLES, LIMIT = 6, 50, 3600
#: Settings of runs, where an app does not have two rounds and batches for 64 examples.
SETTINGS = {"num-server-rounds": 2, "batch-size": 8, "params.nthread": 1}
VARIANTS = {"xgboost-comprehensive": {"bagging": {}, "cyclic": {"train-method": "cyclic"}}}


def rows(name: str, client: int):
    """Made-up examples in the columns of a data set; labels differ between clients."""
    rng = np.random.default_rng(client)
    labels = (client + rng.integers(2, size=EXAMPLES)) % (2 if "imdb" in name else 10)
    if "imdb" in name:
        words = rng.integers(5, 90, (EXAMPLES, 12))
        return {"text": [" ".join(f"w{w}" for w in text) for text in words], "label": labels}
    if "higgs" in name:
        values = rng.normal(labels[:, None] / 5, 1, (EXAMPLES, 28))
        return {"inputs": values.tolist(), "label": labels % 2}
    if "iris" in name:
        labels = rng.choice(3, EXAMPLES, p=np.roll([0.6, 0.3, 0.1], client))  # all, or it raises
        names = ("petal_length", "petal_width", "sepal_length", "sepal_width")
        return {**{n: rng.normal(labels, 1) for n in names}, "species": labels}
    if "income" in name:
        return {**{f"c{i}": rng.normal(labels, 1) for i in range(14)}, "income": labels % 2}
    shape = (EXAMPLES, 28, 28) if "mnist" in name else (EXAMPLES, 32, 32, 3)
    key = "image" if "mnist" in name else "img"
    return {key: rng.integers(256, size=shape, dtype=np.uint8), "label": labels}


def made_up(name: str, client: int):
    """The same as a Hugging Face data set."""
    import datasets

    columns = rows(name, client)
    for key in {"img", "image"} & columns.keys():
        from PIL import Image

        columns[key] = [Image.fromarray(each) for each in columns[key]]
    return datasets.Dataset.from_dict(columns)


def stand_in(name: str) -> ModuleType:
    """A new module in the place of one that would download, or need another PyTorch."""
    module = sys.modules[name] = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


def without_downloads(folder: Path) -> None:
    """Replace what the apps would download."""
    import flwr.common.typing
    import flwr_datasets
    import torch

    import datasets

    flwr_datasets.FederatedDataset = lambda dataset, **options: SimpleNamespace(
        load_partition=lambda client, split="train": made_up(dataset, client),
        load_split=lambda split: made_up(dataset, 99),
    )
    datasets.load_dataset = lambda name, split=None: (
        made_up(name, 99) if split else {"test": made_up(name, 99)}
    )
    metric = SimpleNamespace(add_batch=lambda **batch: None, compute=lambda: {"accuracy": 0.5})
    # Nothing forks: neither loaders of PyTorch nor maps of data sets.
    batch, loader = datasets.Dataset.batch, torch.utils.data.DataLoader.__init__
    datasets.Dataset.batch = lambda *a, **o: batch(*a, **{**o, "num_proc": None})
    torch.utils.data.DataLoader.__init__ = lambda *a, **o: loader(*a, **{**o, "num_workers": 0})
    stand_in("evaluate").load = lambda name: metric
    # Names that two apps import, and Flower no longer has.
    flwr.common.typing.UserConfig = dict
    old = stand_in("flwr.client.typing")
    old.ClientAppCallable = old.Mod = object
    with_tiny_bert(folder)
    for framework in ("pytorch_lightning", "opacus"):  # they look for torchvision
        with contextlib.suppress(ImportError):
            importlib.import_module(framework)
    to_tensor = lambda image: torch.tensor(np.atleast_3d(image)).permute(2, 0, 1) / 255  # noqa: E731
    stand_in("torchvision").transforms = transforms = stand_in("torchvision.transforms")
    transforms.functional = SimpleNamespace(to_tensor=to_tensor)
    transforms.ToTensor = lambda: to_tensor
    transforms.Normalize = lambda mean, std: lambda image: (image - mean[0]) / std[0]
    for name in ("RandomCrop", "RandomHorizontalFlip"):
        setattr(transforms, name, lambda *a, **o: lambda image: image)
    transforms.Compose = lambda steps: lambda image: reduce(lambda x, step: step(x), steps, image)


def with_tiny_bert(folder: Path) -> None:
    """Replace a pretrained model and its tokenizer."""
    try:
        import transformers as hf
    except ImportError:
        return
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(100))]
    (folder / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.BertConfig(vocab_size=len(words), intermediate_size=32, **sizes)
    hf.AutoTokenizer.from_pretrained = lambda *a, **o: hf.BertTokenizerFast(
        str(folder / "vocab.txt")
    )
    hf.AutoModelForSequenceClassification.from_pretrained = lambda *a, **o: (
        hf.BertForSequenceClassification(config)
    )


def enter(flower: Path, name: str) -> None:
    """Make this process one of an app, which says nothing."""
    folder = Path(tempfile.mkdtemp()) / name
    shutil.copytree(flower / "examples" / name, folder)
    subprocess.run(["git", "apply", PATCHES / f"{name}.patch"], cwd=folder, check=True)
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(ROOT)]
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@cache
def load_app():
    """The server and the client module of the process's app, and its settings."""
    from flwr.common.config import flatten_dict
    from tests.flower.conftest import identify_process

    without_downloads(Path.cwd().parent)
    identify_process()
    app = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]
    names = [app["components"][kind].partition(":")[0] for kind in ("serverapp", "clientapp")]
    return *map(importlib.import_module, names), flatten_dict(app["config"])


def run_app(settings: dict, policy: str) -> str:
    """Run the app under one policy, and return why that does not work: "" if it does."""
    from flwr.app import Context, RecordDict
    from tests.flower.conftest import LocalGrid

    from fedcohort.flower import CohortStrategy

    made = []

    def kept(*args, **options):
        made.append(CohortStrategy(*args, timeout=60, **options))
        return made[-1]

    try:
        server, client, config = load_app()
        server.CohortStrategy = kept
        changed = {k: v for k, v in SETTINGS.items() if k in config} | settings
        config = {**config, **changed, "policy": policy}
        random.seed(0)
        shutil.rmtree("outputs", ignore_errors=True)  # one app names runs by the second
        grid = LocalGrid()
        for i in range(CLIENTS):
            grid.add(i + 1, client.app, **{"partition-id": i, "num-partitions": CLIENTS})
            grid.contexts[i + 1].run_config = dict(config)
        server.app(grid, Context(0, 1, {}, RecordDict(), config))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    rounds = [len(r.finished) == len(r.selected) for s in made for r in s.history]
    last = made[0].history[-1].line() if rounds else "no round"
    return "" if rounds == [True, True] else f"{rounds}: {last}"


def outcomes(flower: Path, name: str, settings: dict, policies: list[str]) -> dict[str, str]:
    """Return why each policy does not run, "" for those that do."""
    out, pool = {}, None
    for policy in policies:
        if pool is None:
            pool = ProcessPoolExecutor(1, get_context("spawn"), enter, (flower, name))
        try:
            out[policy] = pool.submit(run_app, settings, policy).result(LIMIT)
        except (BrokenProcessPool, SystemExit):
            out[policy], pool = "it ended the process", None
    return out


def main() -> None:
    from fedcohort.policies import POLICIES

    every = {"apps": sorted(p.stem for p in PATCHES.glob("*.patch")), "policies": sorted(POLICIES)}
    joined = {name: ",".join(words) for name, words in every.items()}
    args = arguments(__doc__, "flower", **joined, out=str(RESULT))
    os.environ |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    policies, found = args.policies.split(","), {}
    for name in args.apps.split(","):
        added = re.findall(r"^\+(?!\+\+).", (PATCHES / f"{name}.patch").read_text(), re.M)
        for variant, settings in VARIANTS.get(name, {"": {}}).items():
            title = f"{name}, {variant}" if variant else name
            reasons = outcomes(Path(args.flower).resolve(), name, settings, policies)
            found[title] = {"lines": len(added), "reasons": reasons}
            print(title, {policy: why[:300] for policy, why in reasons.items() if why}, flush=True)
        write(args.out, {"clients": CLIENTS, "rounds": 2, "apps": found})


if __name__ == "__main__":
    main()
