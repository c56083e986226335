"""The program of a reward's worker process: loads the rewards, then answers jobs, one JSON line per call.

It reads jobs from its standard input and writes outcomes to its standard output. What rewards print goes to standard
error instead. The process never imports torch by itself, so that it starts in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress

from rlkernel.data.errors import InputError
from rlkernel.data.rewards.call import Job, Outcome, loaded, run_job
from rlkernel.data.rewards.limits import die_with_parent, limit_resource


def main() -> None:
    """Runs until standard input ends."""
    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    die_with_parent()
    start = json.loads(jobs.readline())
    if start["memory_bytes"] is not None:
        limit_resource(resource.RLIMIT_AS, start["memory_bytes"])
    try:
        rewards = [loaded(**reward) for reward in start["rewards"]]
    except InputError as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return
    print(json.dumps({"signatures": [reward.signature for reward in rewards]}), file=answers)

    def done(outcome: Outcome) -> None:
        with suppress(Exception):  # the reward may have closed or replaced them
            sys.stdout.flush()
        print(outcome.to_json(), file=answers)

    for line in jobs:
        run_job(rewards, Job.from_json(line), done)
        _reap_children()


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_parent=_note_fork)


def _reap_children() -> None:
    """Removes the finished children of rewards that call `os.fork` and never wait, before they exhaust the pids."""
    global _forked
    if _forked:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        _forked = False


if __name__ == "__main__":
    main()
