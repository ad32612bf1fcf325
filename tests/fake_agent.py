"""Stand in for the agent of a host: `python fake_agent.py HOST SCENARIO`, which is JSON.

versions, why_unreached, store: what it answers; exit_code, errors: how it ends before it answers
save_s: seconds from a signal to the ends of its ranks
is_terminated_at_store: it sends the launcher SIGTERM in place of starting the store
generations: for each, what the agent sends once it is asked to start ranks; a message of kind
    "exit" ends the agent, "silence" stops its pings, "later" delays the next by 0.5 s, "errors"
    is printed, and "terminate the launcher" sends it SIGTERM
log: file to which the messages of the launcher are appended, without pings
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

host, scenario = sys.argv[1], json.loads(sys.argv[2])
is_silent = threading.Event()
lock = threading.Lock()


def send(kind: str, **values: Any) -> None:
    with lock:
        sys.stdout.write(json.dumps({"is": kind} | values) + "\n")
        sys.stdout.flush()


def ping() -> None:
    while not is_silent.wait(0.2):
        send("ping")


if scenario.get("exit_code") is not None:
    sys.stderr.write(scenario.get("errors", ""))
    sys.exit(scenario["exit_code"])
sys.stdout.write("Welcome to this host\n> ")  # as a login shell may do
first = num_here = 0
generations = iter(scenario.get("generations", []))
for line in sys.stdin:
    message = json.loads(line)
    kind = message["is"]
    if kind != "ping" and scenario.get("log"):
        with open(scenario["log"], "a") as log:
            log.write(json.dumps({"host": host} | message) + "\n")
    if kind == "settings":
        facts = {"num_cores": 4, "num_gpus": 0, "address": "", "name": host}
        send("facts", versions=scenario["versions"], **facts)
        threading.Thread(target=ping, daemon=True).start()
    elif kind == "store":
        if scenario.get("is_terminated_at_store"):
            os.kill(os.getppid(), signal.SIGTERM)
        else:
            send("store", rank=-1, value=scenario.get("store", 1))
    elif kind == "reach":
        send("reached", why=scenario.get("why_unreached", ""))
    elif kind == "signal":
        time.sleep(scenario.get("save_s", 0.0))
        for rank in range(first, first + num_here):
            send("ended", rank=rank, code=128 + message["signum"])
    elif kind == "clear":
        send("cleared")
    elif kind == "start":
        first, num_here = message["first"], message["num_here"]
        for sent in next(generations, []):
            if sent["is"] == "exit":
                os._exit(0)
            elif sent["is"] == "silence":
                is_silent.set()
            elif sent["is"] == "terminate the launcher":
                os.kill(os.getppid(), signal.SIGTERM)
            elif sent["is"] == "errors":
                sys.stderr.write(sent["text"])
                sys.stderr.flush()
                time.sleep(0.3)
            elif sent["is"] == "later":
                time.sleep(0.5)
            else:
                send(sent.pop("is"), **sent)
