"""A file of src has its tests by its name: src/phalanx/ROOM/FILE.py in tests/ROOM/test_FILE.py.

Two test files cannot have one name, so the second has its folder in it (`test_script_loader.py` is
of script/loader.py), or is a `_command` of the command line (`test_plan_command.py`, cli/plan.py),
or what is `_shown`.
What tests several files, or one of several tests of a file, stands in `ACROSS`.

`python tests/test_mirror.py checkpoint/index.py` lists the tests that import a file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src/phalanx", ROOT / "tests"

NO_ROOM = ("benchmarks", "docs", "examples")
"""Folders whose tests are of no room of src."""

ACROSS = {
    "checkpoint/test_fuzz.py": "reading a checkpoint: manifest, index and tensor_file, damaged",
    "checkpoint/test_hostile.py": "reading a checkpoint: untrusted, manifest and index, forged",
    "checkpoint/test_killed.py": "saving: saver, files and lock, killed at each step",
    "checkpoint/test_object_store.py": "saver, files, lock and tensor_file with object_store",
    "checkpoint/test_reshard.py": "sharding and state: saved by one split, loaded by another",
    "checkpoint/test_resume.py": "state and manifest: a run in two parts is a run in one",
    "checkpoint/test_stuck.py": "saver and progress: ranks that stand still while they save",
    "cli/test_broken_configs.py": "every verb with a request that is wrong",
    "cli/test_help.py": "the --help of every verb, with config/help",
    "collectives/test_collectives_of_scripts.py": "phalanx.collectives, as a script calls it",
    "verify/test_expert_mutants.py": "verify by faults of experts that are planted",
    "models/test_latent_attention.py": "attention and roles: latent attention beside transformers",
    "models/test_moe.py": "models/experts.py: routers, experts and limits beside transformers",
    "comm/test_nccl.py": "every collective by the rules of NCCL",
    "comm/test_one_way_groups.py": "meshes: groups between neighbours of a pipeline",
    "train/test_lora.py": "adapters: models/shape, train/text, peft_folder, beside PEFT itself",
    "data/test_holdout.py": "tokens: documents that are held out for validation",
    "infer/test_evaluation.py": "the server as lm-evaluation-harness asks it",
    "infer/test_follow.py": "engine_thread and assembly: weights of later checkpoints of a run",
    "infer/test_generate.py": "cli/generate on a trained run and on published folders",
    "infer/test_on_a_gpu.py": "engine and runner on a GPU",
    "infer/test_openai_client.py": "app, protocol and answers by the client of OpenAI",
    "infer/test_page_in_chromium.py": "app and page.html in a browser",
    "infer/test_parity_with_transformers.py": "engine, runner and paged beside transformers",
    "planner/test_random_jobs.py": "search and price on jobs of random sizes",
    "script/test_transformers_experts.py": "expert_split and skeleton: experts of transformers",
    "script/test_script_generations.py": "a Trainer and an own loop on 4, 3, 2 and 4 ranks",
    "train/job/test_generations.py": "a run on text on 4, 3, 2 and 4 ranks, as launch continues it",
    "script/test_loss_forms.py": "gather, loss and loop_step: forms of a loss beside one process",
    "script/test_proof_by_default.py": "loop_proof as phalanx run calls it",
    "infer/test_serve_command.py": "cli/serve as a process",
    "train/test_chat_runs.py": "text, resolve and run_folder: runs on chats",
    "infer/test_server.py": "app, protocol and answers over HTTP",
    "infer/test_expert_parallel_engine.py": "engine and assembly under ep",
    "infer/test_tensor_parallel_engine.py": "engine and assembly under tp",
    "infer/test_who_is_answered.py": "app: keys, other sites, full queues",
    "launch/test_exit.py": "exit codes of a hundred jobs",
    "launch/test_supervisor.py": "local and heartbeat_monitor: a rank that stands still",
    "launch/test_watch_over_store.py": "watch and interface: hosts as network namespaces",
    "launch/test_ways_to_fail.py": "each way to fail by each launcher",
    "measure/test_planted_causes.py": "straggler and rank_times: causes planted in real ranks",
    "parallel/context/test_attention.py": "ring, ulysses and partial beside whole attention",
    "parallel/context/test_context_memory.py": "ring and ulysses beside account/activations",
    "parallel/pipeline/test_stage_memory.py": "memory of the ranks of a pipeline",
    "parallel/tensor/test_batch_shape.py": "parallel/batch_shape under every layout of tp",
    "parallel/tensor/test_bytes.py": "every layout: bytes held, beside formulas",
    "parallel/tensor/test_closed_forms.py": "every layout and account: bytes sent, beside formulas",
    "parallel/tensor/test_families.py": "transformers_tables: each family under tp",
    "parallel/tensor/test_refusals.py": "branch, check and loss: what they refuse",
    "parallel/tensor/test_sizes.py": "check: sizes that no layout divides",
    "parallel/test_frozen_experts.py": "groups, sharded and whole_matrix: experts, frozen parts",
    "parallel/test_fsdp_order.py": "sharded and overlap: the order of gathers and reductions",
    "planner/test_known_numbers.py": "held, price and hardware: numbers that everyone knows",
    "parallel/test_pure_plan.py": "plan, for every strategy: asking changes nothing",
    "script/test_bookkeeping.py": "mean_loss and gather: the numbers that a loop prints",
    "script/test_callbacks.py": "train/callback and train/evaluate, by both trainers",
    "script/test_compiled_scripts.py": "prepare under torch.compile",
    "script/test_drift.py": "guards/replicas: ranks that differ, each by a mistake",
    "script/test_dropout.py": "parallel/dropout in loops and trainers",
    "script/test_host_waits.py": "loop_step and session: waits for a GPU",
    "script/test_hostile_scripts.py": "states and checkpoint: a script's section, forged",
    "script/test_mfu.py": "session and flops: the MFU of a trainer",
    "script/test_mistakes.py": "prepare, loop_step, checks and guards: what users do wrong",
    "script/test_nccl_jobs.py": "loops and trainers by the rules of NCCL",
    "script/test_own_loop.py": "run, prepare and loop_step beside plain PyTorch",
    "script/test_peft.py": "prepare of a model of PEFT",
    "script/test_plain_scripts.py": "whole scripts beside plain PyTorch",
    "script/test_registered.py": "checkpoint/registered by run.register",
    "script/test_trainer_options.py": "session and trainer: what Options say",
    "script/test_wrong_jobs.py": "trainer, arguments and checks: jobs that are wrong",
    "show/test_methods_shown.py": "what every topic of phalanx show says",
    "train/job/test_longer_samples.py": "resume with samples of another length",
    "train/test_compile.py": "text, loop and notice under --compile",
    "train/test_gpu.py": "every strategy on GPUs",
    "train/test_served_tables.py": "served_step, and server/table: rows of embeddings",
    "train/test_stop.py": "loop and pace: signals",
    "train/test_served.py": "phalanx train over parameter servers",
    "verify/test_compositions.py": "harness: pipelines beside other axes",
    "verify/test_failures.py": "verdict: a rank that dies",
    "verify/test_module_mutants.py": "harness and locate: faults planted around a module",
    "verify/test_mutants.py": "harness and locate: faults planted in ranks",
    "verify/test_parity.py": "harness: every strategy",
    "verify/test_random_strategies.py": "harness: random strategies",
}
"""Tests of several files, and further tests of one -> which files, and what of them."""


def source_of(test: Path) -> Path:
    """Return which file or folder of src a test's name means, whether or not there is one."""
    folder = test.parent.relative_to(TESTS)
    name = test.stem.removeprefix("test_")
    names = [
        name,
        name.removeprefix(f"{test.parent.name}_"),
        *map(name.removesuffix, ("_command", "_shown")),
    ]
    found = [SOURCE / folder / f"{each}.py" for each in names] + [SOURCE / folder / name]
    return next((path for path in found if path.exists()), found[0])


def rooms() -> list[Path]:
    """Return the test files of the rooms of src."""
    files = (path for path in TESTS.rglob("test_*.py") if path.parent != TESTS)
    return sorted(path for path in files if path.relative_to(TESTS).parts[0] not in NO_ROOM)


def listed_for(source: Path) -> list[str]:
    """Return the tests that bear the name of a file of src, then those that import it."""
    module = ".".join(("phalanx", *source.relative_to(SOURCE).with_suffix("").parts))
    room, _, name = module.rpartition(".")
    asks = re.compile(rf"(from {module} |import {module}\b|from {room} import [^\n]*\b{name}\b)")
    named = [test for test in rooms() if source_of(test) == source]
    using = [test for test in rooms() if test not in named and asks.search(test.read_text())]
    return [str(test.relative_to(ROOT)) for test in [*named, *using]]


def test_each_test_file_names_a_file_of_src_or_says_what_it_is_of() -> None:
    odd = {str(test.relative_to(TESTS)) for test in rooms() if not source_of(test).exists()}
    assert odd - ACROSS.keys() == set(), (
        "name it after its file of src, or say in ACROSS what it tests"
    )
    named = {name for name in ACROSS if (TESTS / name).exists()}
    assert named - odd == set(), "these have a file of src by their name: take them out"


def test_the_tests_of_a_file_are_listed() -> None:
    assert listed_for(SOURCE / "hugging_face/config.py")[0] == "tests/hugging_face/test_config.py"
    assert "tests/checkpoint/test_hostile.py" in listed_for(SOURCE / "checkpoint/index.py")


def test_files_that_contributors_look_for_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page[page.index("## Where things are") : page.index("## What a change is held to")]
    named = re.findall(r"`([a-z_/]+\.py)`", table)
    assert len(named) > 20 and [name for name in named if not (SOURCE / name).is_file()] == []


if __name__ == "__main__":
    for word in sys.argv[1:]:
        sys.stdout.writelines(f"{test}\n" for test in listed_for((SOURCE / word).resolve()))
