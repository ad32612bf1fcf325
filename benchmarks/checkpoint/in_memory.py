"""What states in memory cost beside steps, and how soon a restart takes its next step.

python benchmarks/checkpoint/in_memory.py [--rounds 5] [--out FILE.json]
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.checkpoint import in_memory, manifest
from phalanx.comm.join import job_store
from phalanx.config import BatchConfig, CorpusConfig, TrainConfig
from phalanx.config.fields import with_value
from phalanx.launch.launched import VARIABLE, Launched
from phalanx.launch.local import run_ranks
from phalanx.train.job.resolve import Job, resolve
from phalanx.train.text import TextSession

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import ROOT, SHAPE, spread, write_result

MICROBATCH = 8
"""Sequences of 256 tokens of each rank in a step."""


def be_rank_of(hosts: list[Path], generation: int) -> None:
    """Set the variables by which an agent starts this rank; both ranks are on one of the hosts, or
    each is on one of its own."""
    rank, num_here = dist.get_rank(), 2 // len(hosts)
    store: Any = job_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    launched = Launched(folder=str(hosts[rank // num_here]), generation=generation, restarts=1)
    os.environ |= {
        VARIABLE: launched.text(), "RANK": str(rank), "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank % num_here), "LOCAL_WORLD_SIZE": str(num_here),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def time_steps(job: Job, hosts: list[Path], rounds: int) -> dict[str, Any]:
    """Train; by turns take as many steps as lie between two saves with a save, and without."""
    be_rank_of(hosts, 0)
    session = TextSession(job)
    pace = session.in_memory
    assert pace is not None
    rows: list[dict[str, float]] = []
    with session:
        while pace._every is None:
            step(session)
            session.save_in_memory()
        pace.saver.finish()
        for _ in range(rounds):
            row = {}
            for name, saves in (("without_s", False), ("with_s", True)):
                dist.barrier()
                begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
                for _ in range(pace.period):
                    step(session)
                    if saves:
                        session.save_in_memory()
                if saves:
                    pace.saver.finish()
                dist.barrier()
                row[name] = (time.perf_counter() - begin_s) / pace.period
                row[f"cpu_{name}"] = (time.process_time() - begin_cpu_s) / pace.period
            row["ratio"] = row["with_s"] / row["without_s"]
            rows.append(row | {"cpu_ratio": row["cpu_with_s"] / row["cpu_without_s"]})
        about = manifest.read(max((pace.saver.run / "checkpoints").iterdir()))
        planned = in_memory.traffic(about.files, pace.saver.hosts)
    exchange = pace.saver.exchange
    return {
        "period": pace.period, "rows": rows, "planned": planned,
        "sent": 0 if exchange is None else exchange.bytes_sent,
    }  # fmt: skip


def time_restart(config: TrainConfig, hosts: list[Path], begin_s: float) -> dict[str, float]:
    """Recover and resume; return the seconds since `begin_s`, when the ranks were started."""
    be_rank_of(hosts, 1)
    started_s = time.time()
    in_memory.recover()
    recovered_s = time.time()
    job = resolve(with_value(config, "resume", config.out))
    session = TextSession(job)
    with session:
        loaded_s = time.time()
        step(session)
        steps = session.step.steps_done
    return {
        "started": started_s - begin_s, "recovered": recovered_s - begin_s,
        "loaded": loaded_s - begin_s, "stepped": time.time() - begin_s, "steps_done": steps,
    }  # fmt: skip


def step(session: TextSession) -> None:
    session.step([batch.to(session.comm.device) for batch in next(session.loader)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--every", type=int, help="K; measured if unset")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    document: dict[str, Any] = {}
    for num_hosts in args.hosts:
        with (
            tempfile.TemporaryDirectory() as name,
            tempfile.TemporaryDirectory(dir="/dev/shm", prefix="phalanx-bench-") as memory,
        ):
            folder, hosts = Path(name), [Path(memory) / str(host) for host in range(num_hosts)]
            config = TrainConfig(
                data=str(ROOT / "src"), strategy="dp2", device="cpu", precision=args.precision,
                steps=10_000, threads=1, out=str(folder / "run"),
                shape=SHAPE,
                corpus=CorpusConfig(seq_len=256, cache=str(folder / "cache"), validation=0),
                batch=BatchConfig(microbatch=MICROBATCH),
            )  # fmt: skip
            job = resolve(config)
            job = replace(job, config=with_value(job.config, "memory_every", args.every))
            steps = run_ranks(time_steps, 2, job, hosts, args.rounds, threads=1)
            restarts = [run_ranks(time_restart, 2, config, hosts, time.time(), threads=1)]
            if num_hosts > 1:  # a new host in place of the first
                shutil.rmtree(hosts[0])
                restarts += [run_ranks(time_restart, 2, config, hosts, time.time(), threads=1)]
        document[f"{num_hosts} hosts"] = {"steps": steps, "restarts": restarts}
        rows = steps[0]["rows"]
        print(
            f"\n{num_hosts} hosts: every {steps[0]['period']} steps; planned {steps[0]['planned']}"
        )
        print(f"sent {steps[0]['sent']}")
        print("| | median | min | max |\n|---|---:|---:|---:|")
        for key in rows[0]:
            print(f"| {key} | {spread([row[key] for row in rows], '.3f')} |")
        for restart in restarts:
            slowest = max(restart, key=lambda each: each["stepped"])
            print({key: round(value, 2) for key, value in slowest.items()})
    write_result(args.out, document)


if __name__ == "__main__":
    main()
