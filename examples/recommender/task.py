"""Which module does a file of the Python standard library import? A recommender: files, modules, and tables of both."""

import ast
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import allranks


def imports():
    """(file, module imported) of the standard library's own files, with a number for each file and module."""
    found = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {(path, alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add((path, node.module))
    pairs = sorted(found, key=str)
    files, modules = (
        {name: place for place, name in enumerate(sorted(set(names), key=str))} for names in zip(*pairs, strict=True)
    )
    return torch.tensor([[files[file], modules[module]] for file, module in pairs])


class TwoTables(nn.Module):
    """How much each file wants each module; under tp the tables' rows lie on several devices."""

    def __init__(self, num_files, num_modules, width):
        super().__init__()
        self.files, self.imported = nn.Embedding(num_files, width), nn.Embedding(num_modules, width)
        self.popularity = nn.Embedding(num_modules, 1)
        for table in self.children():
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, file, module):
        return (self.files(file) * self.imported(module)).sum(-1) + self.popularity(module).squeeze(-1)


class Recommender(allranks.Task):
    width: int = 16
    defaults = {"train.epochs": 10, "train.global_batch": 128, "optimizer.lr": 0.01}

    def __init__(self, **settings):
        super().__init__(**settings)
        self.pairs = imports()

    def dataset(self, split):  # each import, and beside it a module that the same file does not name: the wrong answer
        files, modules = self.pairs.unbind(1)
        wrong = torch.randint(int(modules.max()) + 1, modules.shape, generator=torch.Generator().manual_seed(0))
        held_out = torch.arange(len(files)) % 5 == 0
        chosen = held_out if split == "validation" else ~held_out
        return torch.utils.data.TensorDataset(files[chosen], modules[chosen], wrong[chosen])

    def model(self):
        files, modules = (self.pairs.amax(0) + 1).tolist()
        return TwoTables(files, modules, self.width)

    def hints(self):
        return allranks.Hints(tensor={"files": "vocab", "imported": "vocab", "popularity": "vocab"})

    def inputs(self, batch):
        file, right, wrong = batch
        return torch.cat([file, file]), torch.cat([right, wrong])

    def targets(self, batch):
        return len(batch[0])

    def loss(self, output, batch):  # Bayesian personalised ranking: the right one above the wrong one
        right, wrong = output.chunk(2)
        return -functional.logsigmoid(right - wrong).sum()

    def metrics(self, output, batch):
        right, wrong = output.chunk(2)
        return {"ranked_right": ((right > wrong).sum(), len(right))}
