"""Faults in hosts made of network namespaces; each job appends a line of JSON to hosts.jsonl.

python benchmarks/faults/hosts.py [STRATEGY:HOSTS:SEED ...] [-- OPTIONS of phalanx bench faults]
python benchmarks/faults/hosts.py --table         what each job and each kind of fault cost
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from namespaces import SSH, THREE_HOSTS, on_host, ssh_servers, switched

RESULTS = Path(__file__).parent / "hosts.jsonl"
STRATEGIES = ("dp4", "fsdp4", "dp2,fsdp2", "pp2,dp2", "tp2,dp2", "cp2,dp2")


def run_case(strategy, num_hosts, seed, *options):
    """Run a job of 4 ranks on 2 or 3 hosts while faults strike it; return its JSON document."""
    hosts = THREE_HOSTS[:num_hosts]
    numbers = (2, 2) if num_hosts == 2 else (2, 1, 1)
    with switched(hosts), ssh_servers(hosts):
        listed = ",".join(f"{host}:{number}" for host, number in zip(hosts, numbers, strict=True))
        words = ["--hosts", listed, "--ssh", SSH, "--strategy", strategy, "--seed", str(seed)]
        command = [sys.executable, "-m", "phalanx", "bench", "faults", "--json", *words, *options]
        process = subprocess.Popen(
            on_host(hosts[0], *command), stdout=subprocess.PIPE, text=True, cwd="/"
        )
        last = ""
        for last in process.stdout:
            if not last.startswith("{"):
                print(last, end="", flush=True)
        process.wait()
    return json.loads(last) if last.startswith("{") else {"wrong": [last.strip()]}


def table():
    """Print a row for each job, and a row for each kind of fault with medians and maxima."""
    jobs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    print("| strategy | hosts | seed | faults | next step s | load | useful | wrong |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for job in jobs:
        faults = job["faults"]
        nexts = [fault["next_step_s"] for fault in faults if fault["next_step_s"] is not None]
        loads = [fault["load"] for fault in faults]
        print(
            f"| `{job['strategy']}` | {job['num_hosts']} | {job['seed']} | {len(faults)} | "
            f"{min(nexts):.1f}-{max(nexts):.1f} | {min(loads):.0f}-{max(loads):.0f} | "
            f"{job['useful']:.0%} | {'; '.join(job['wrong']) or 'none'} |"
        )
    faults = [fault for job in jobs for fault in job["faults"]]
    for name, group in {
        "load below 6": [fault for fault in faults if fault["load"] < 6],
        "load 6 to 39": [fault for fault in faults if fault["load"] >= 6],
    }.items():
        print(f"\n| {name} | number | detected s | next step s | steps again | lost s |")
        print("|---|---:|---:|---:|---:|---:|")
        for kind in dict.fromkeys(fault["kind"] for fault in faults):
            own = [fault for fault in group if fault["kind"] == kind]
            if own:
                cells = [
                    f"{statistics.median(values):.1f}, at most {max(values):.1f}"
                    for key in ("detected_s", "next_step_s", "repeated", "lost_s")
                    if (values := [each[key] for each in own if each[key] is not None])
                ]
                print(f"| {kind} | {len(own)} | {' | '.join(cells)} |")


def main():
    words = sys.argv[1:]
    if words == ["--table"]:
        return table()
    at = words.index("--") if "--" in words else len(words)
    cases = [word.split(":") for word in words[:at]]
    cases = cases or [
        (each, 2 + (seed + seed // 6) % 2, seed) for seed, each in enumerate(2 * STRATEGIES)
    ]
    options = [f"--undisturbed={tempfile.mkdtemp()}/run", *words[at + 1 :]]
    for strategy, num_hosts, seed in cases:
        now = time.strftime("%H:%M:%S")
        print(f"{now} {strategy} on {num_hosts} hosts, seed {seed}", flush=True)
        result = run_case(strategy, int(num_hosts), seed, *options)
        result |= {"num_hosts": int(num_hosts), "options": words[at + 1 :]}
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return None


if __name__ == "__main__":
    main()
