"""Flower's own example apps with our patches, under every policy: which of them run.

python benchmarks/flower_apps.py FLOWER   # a checkout of https://github.com/flwrlabs/flower

The apps' files are Flower's, with one of examples/patches applied. Only what they download is
replaced: data by small made-up sets with skewed labels, BERT by a tiny one, a metric by our own.
Six clients run in this process, two rounds per policy; each app has a process of its own, which
starts anew where a policy ends it. Frameworks that are not installed are named as such. Writes
benchmarks/results/flower-apps.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
from provenance import write

ROOT = Path(__file__).parents[1]
PATCHES = ROOT / "examples" / "patches"
RESULT = Path(__file__).parent / "results" / "flower-apps.json"
CLIENTS, EXAMPLES, LIMIT = 6, 50, 3600
#: Settings of runs, where an app does not have two rounds and batches for 64 examples.
SETTINGS = {"num-server-rounds": 2, "batch-size": 8, "params.nthread": 1}
VARIANTS = {"xgboost-comprehensive": {"bagging": {}, "cyclic": {"train-method": "cyclic"}}}


def rows(name: str, client: int):
    """Return made-up examples in the columns of a data set; labels differ between clients."""
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


def dataset(name: str, client: int):
    """Return them as a Hugging Face data set."""
    import datasets

    columns = rows(name, client)
    for key in {"img", "image"} & columns.keys():
        from PIL import Image

        columns[key] = [Image.fromarray(each) for each in columns[key]]
    return datasets.Dataset.from_dict(columns)


def stand_in(name: str) -> ModuleType:
    """Return a new module in the place of one that would download, or need another PyTorch."""
    module = sys.modules[name] = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


class Composed:
    """Transforms of images, one after the other."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


def without_downloads(folder: Path) -> None:
    """Replace what the apps would download."""
    import flwr.common.typing
    import flwr_datasets
    import torch

    import datasets

    class Local:
        def __init__(self, dataset, **options):
            self.name = dataset

        def load_partition(self, client, split="train"):
            return dataset(self.name, client)

        def load_split(self, split):
            return dataset(self.name, 99)

    flwr_datasets.FederatedDataset = Local
    datasets.load_dataset = lambda name, split=None: (
        dataset(name, 99) if split else {"test": dataset(name, 99)}
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
    transforms.Compose = Composed


def with_tiny_bert(folder: Path) -> None:
    """Replace a pretrained model and its tokenizer."""
    try:
        import transformers as hf
    except ImportError:
        return
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(100))]
    (folder / "vocab.txt").write_text("\n".join(words))
    config = hf.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    hf.AutoTokenizer.from_pretrained = lambda *a, **o: hf.BertTokenizerFast(
        str(folder / "vocab.txt")
    )
    hf.AutoModelForSequenceClassification.from_pretrained = lambda *a, **o: (
        hf.BertForSequenceClassification(config)
    )


def run_app(flower: Path, name: str, settings: dict, policies: list[str]) -> None:
    """Run an app under policies, and print one line of JSON per policy."""
    sys.path.insert(0, str(ROOT))
    from flwr.app import Context, RecordDict
    from tests.flower.conftest import LocalGrid, identify_process

    from fedcohort.flower import CohortStrategy

    made = []

    class Kept(CohortStrategy):
        def __init__(self, *args, **options):
            super().__init__(*args, timeout=60, **options)
            made.append(self)

    folder = Path(tempfile.mkdtemp())
    shutil.copytree(flower / "examples" / name, folder / name)
    patch = PATCHES / f"{name}.patch"
    subprocess.run(["git", "apply", patch], cwd=folder / name, check=True)
    os.chdir(folder / name)
    sys.path.insert(0, str(folder / name))
    without_downloads(folder)
    identify_process()
    app = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]
    server, client = (
        importlib.import_module(app["components"][kind].partition(":")[0])
        for kind in ("serverapp", "clientapp")
    )
    server.CohortStrategy = Kept
    for policy in policies:
        print(json.dumps([policy, "it ended the process"]), flush=True)
        config = flat(app["config"])
        config |= {k: v for k, v in SETTINGS.items() if k in config}
        config |= {**settings, "policy": policy}
        made.clear()
        random.seed(0)
        shutil.rmtree("outputs", ignore_errors=True)  # one app names runs by the second
        grid = LocalGrid()
        for i in range(CLIENTS):
            grid.add(i + 1, client.app, **{"partition-id": i, "num-partitions": CLIENTS})
            grid.contexts[i + 1].run_config = dict(config)
        why = ""
        try:
            server.app(grid, Context(0, 1, {}, RecordDict(), config))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        rounds = [len(r.finished) == len(r.selected) for s in made for r in s.history]
        if not why and rounds != [True, True]:
            why = f"{rounds}: {made[0].history[-1].line() if rounds else 'no round'}"
        print(json.dumps([policy, why]), flush=True)


def flat(table: dict, prefix: str = "") -> dict:
    """Return the settings of a run as Flower names them."""
    out = {}
    for key, value in table.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def outcomes(flower: Path, name: str, settings: dict, policies: list[str]) -> dict[str, str]:
    """Return why each policy does not run, "" for those that do."""
    out: dict[str, str] = {}
    while left := [p for p in policies if p not in out]:
        arguments = [str(flower), "--one", name, json.dumps(settings), ",".join(left)]
        command = [sys.executable, __file__, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
        if not found:
            return dict.fromkeys(policies, done.stderr.strip().splitlines()[-1])
        out |= dict(found)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flower", type=Path)
    parser.add_argument("--apps", help="only these, separated by commas")
    parser.add_argument("--policies", help="only these")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, settings, policies = args.one
        run_app(args.flower, name, json.loads(settings), policies.split(","))
        return
    from fedcohort.policies import POLICIES

    apps = args.apps.split(",") if args.apps else sorted(p.stem for p in PATCHES.glob("*.patch"))
    policies = args.policies.split(",") if args.policies else sorted(POLICIES)
    found = {}
    for name in apps:
        lines = (PATCHES / f"{name}.patch").read_text().splitlines()
        added = sum(line.startswith("+") and len(line.strip("+")) > 0 for line in lines) - sum(
            line.startswith("+++") for line in lines
        )
        for variant, settings in VARIANTS.get(name, {"": {}}).items():
            title = f"{name}, {variant}" if variant else name
            reasons = outcomes(args.flower, name, settings, policies)
            found[title] = {"lines": added, "reasons": reasons}
            good = [policy for policy, why in reasons.items() if not why]
            print(f"{title}: {len(good)} of {len(policies)}", flush=True)
            for policy, why in reasons.items():
                if why:
                    print(f"    {policy}: {why[:300]}", flush=True)
        write(args.out, {"clients": CLIENTS, "rounds": 2, "apps": found})


if __name__ == "__main__":
    main()
