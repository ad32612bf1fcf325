"""Functions of Python's standard library, each with the package that it comes from."""

import ast
import functools
import importlib.util
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

PACKAGES = "asyncio email http importlib multiprocessing unittest urllib xml".split()
NUM_IDS, LENGTH = 1000, 32


@functools.cache
def functions() -> tuple[list[str], list[int]]:
    """Return the source of each function, and the number of its package."""
    texts: list[str] = []
    labels: list[int] = []
    for label, package in enumerate(PACKAGES):
        spec = importlib.util.find_spec(package)
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            source = path.read_text(encoding="utf-8", errors="replace")
            lines = source.splitlines(keepends=True)
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    texts.append("".join(lines[node.lineno - 1 : node.end_lineno]))
                    labels.append(label)
    return texts, labels


def load(num_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the first tokens of each function, padded with 0, and labels, in an order by chance.

    The vocabulary is learned from the first nine tenths, which are to be trained on.
    """
    texts, labels = functions()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    texts, labels = [texts[i] for i in order], [labels[i] for i in order]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[: len(texts) * 9 // 10], NUM_IDS, show_progress=False)
    rows = [[id_ + 1 for id_ in each.ids[:LENGTH]] for each in tokenizer.encode_batch(texts)]
    ids = torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows[:num_rows]])
    return ids, torch.tensor(labels[:num_rows])
