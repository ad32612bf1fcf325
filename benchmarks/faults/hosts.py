"""Faults in hosts made of network namespaces; a line of JSON for each job is appended to a file.

`python benchmarks/faults/hosts.py [STRATEGY:HOSTS:SEED ...] [-- OPTIONS of phalanx bench faults]`
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(TESTS))

from namespaces import SSH, THREE_HOSTS, on_host, ssh_servers, switched  # noqa: E402

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
        lines = []
        for line in process.stdout:
            lines.append(line)
            if not line.startswith("{"):
                print(line, end="", flush=True)
        process.wait()
    return json.loads(lines[-1]) if lines[-1:] and lines[-1].startswith("{") else {"wrong": lines}


def main():
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    cases = [word.split(":") for word in words[:at]]
    cases = cases or [
        (each, 2 + (seed + seed // 6) % 2, seed) for seed, each in enumerate(2 * STRATEGIES)
    ]
    options = [f"--undisturbed={tempfile.mkdtemp()}/run", *words[at + 1 :]]
    for strategy, num_hosts, seed in cases:
        print(
            f"{time.strftime('%H:%M:%S')} {strategy} on {num_hosts} hosts, seed {seed}", flush=True
        )
        result = run_case(strategy, int(num_hosts), seed, *options)
        result |= {"num_hosts": int(num_hosts), "options": words[at + 1 :]}
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
